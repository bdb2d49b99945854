//! Compares the references of the controller and of StorageClasses with the code, and the commands of the
//! documentation with the program.

use clap::CommandFactory;
use shorthorn_controller::config;
use shorthorn_controller_core::csi::{PARAMETERS, Parameter, longhorn_parameters};
use shorthorn_testkit::docs::{check_commands, check_generated, reference, table};

#[test]
fn the_documentation_has_each_command() {
    check_generated("docs/reference/shorthorn-controller.md", "commands", &reference(config::Cli::command()));
}

#[test]
fn commands_of_the_documentation_exist() {
    let count = check_commands(&config::Cli::command());
    assert!(count > 2, "only {count} commands");
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
