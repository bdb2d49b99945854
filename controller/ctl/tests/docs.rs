//! Compares the reference of shorthornctl with the code, and the commands of the documentation with it.

use clap::CommandFactory;
use shorthorn_testkit::docs::{check_commands, check_generated, reference};
use shorthornctl::Cli;

#[test]
fn the_documentation_has_each_command() {
    check_generated("docs/reference/shorthornctl.md", "commands", &reference(Cli::command()));
}

#[test]
fn commands_of_the_documentation_exist() {
    let count = check_commands(&Cli::command());
    assert!(count > 60, "only {count} commands");
}
