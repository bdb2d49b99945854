//! Compares the references of both programs and of StorageClasses with the code, and the commands of the
//! documentation with the programs.

use clap::CommandFactory;
use shorthorn_controller::{config, ctl};
use shorthorn_controller_core::csi::{PARAMETERS, Parameter, longhorn_parameters};
use shorthorn_testkit::docs::{check_commands, check_generated, reference, table};

#[test]
fn the_documentation_has_each_command() {
    check_generated("docs/reference/shorthornctl.md", "commands", &reference(ctl::Cli::command()));
    check_generated("docs/reference/shorthorn-controller.md", "commands", &reference(config::Cli::command()));
}

#[test]
fn commands_of_the_documentation_exist() {
    let counts = [check_commands(&ctl::Cli::command()), check_commands(&config::Cli::command())];
    assert!(counts[0] > 60 && counts[1] > 2, "only {counts:?} commands");
}

#[test]
fn the_documentation_has_each_parameter() {
    let rows = PARAMETERS.map(|Parameter { name, values, default, meaning }| {
        let default = if default.is_empty() { "none".to_owned() } else { format!("`{default}`") };
        vec![format!("`{name}`"), values.to_owned(), default, meaning.to_owned()]
    });
    let made = table(&["Parameter", "Values", "Default", "Meaning"], &rows);
    check_generated("docs/reference/storageclass.md", "parameters", &made);

    let rows = longhorn_parameters().map(|(name, values)| {
        let accepted = values.map_or_else(
            || "any".to_owned(),
            |values| {
                let shown = values.iter().filter(|value| !value.is_empty()).map(|value| format!("`{value}`"));
                shown.chain(["empty".to_owned()]).collect::<Vec<_>>().join(", ")
            },
        );
        vec![format!("`{name}`"), accepted]
    });
    let made = table(&["Parameter", "Accepted values"], &rows.collect::<Vec<_>>());
    check_generated("docs/reference/storageclass.md", "longhorn", &made);
}
