//! Compares the references of the controller and of StorageClasses with the code, and the commands of the
//! documentation with the program.

use clap::CommandFactory;
use shorthorn_controller::config;
use shorthorn_controller_core::csi::{PARAMETERS, Parameter, longhorn_parameters};
use shorthorn_testkit::docs::{blocks_read_by, check_commands, check_generated, read, reference, table};

#[test]
fn the_documentation_has_each_command() {
    check_generated("docs/reference/shorthorn-controller.md", "commands", &reference(config::Cli::command()));
}

#[test]
fn commands_of_the_documentation_exist() {
    let count = check_commands(&config::Cli::command());
    assert!(count > 2, "only {count} commands");
}

/// The unit gives the flags of its environment file to the program.
#[test]
fn flags_of_the_environment_file_are_accepted() {
    let unit = read("systemd/system/shorthorn-controller.service");
    for page in ["docs/install-hosts.md", "docs/reference/shorthorn-controller.md"] {
        for block in blocks_read_by(page, "controller/tests/docs.rs").unwrap() {
            let (name, flags) = block.text.split_once('=').unwrap();
            assert!(unit.contains(&format!("${name}\n")), "the unit does not use {name}");
            let fixed = ["shorthorn-controller", "serve", "--store", "/var/lib/shorthorn/controller.redb"];
            let words = fixed.into_iter().chain(flags.split_whitespace());
            let parsed = config::Cli::command().try_get_matches_from(words);
            assert!(parsed.is_ok(), "{page}: {}\n{}", block.text, parsed.unwrap_err());
        }
    }
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
