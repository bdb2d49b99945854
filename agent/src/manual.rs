//! Man pages, made from the definitions of the commands. Packages contain them.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::Cli;

/// The section of daemons.
const SECTION: &str = "8";

/// Writes a man page of each command to `directory`.
pub fn pages(directory: &Path) -> anyhow::Result<()> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(directory)
        .and_then(|()| write(command, directory))
        .with_context(|| format!("writing man pages to {}", directory.display()))
}

fn write(command: clap::Command, directory: &Path) -> std::io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()).cloned() {
        write(command, directory)?;
    }
    clap_mangen::Man::new(command).section(SECTION).generate_to(directory).map(drop)
}

#[cfg(test)]
mod tests {
    use shorthorn_testkit::docs::{check_commands, check_generated, reference};

    use super::*;

    #[test]
    fn the_documentation_has_each_command() {
        check_generated("docs/reference/shorthorn-agent.md", "commands", &reference(Cli::command()));
    }

    #[test]
    fn commands_of_the_documentation_exist() {
        let count = check_commands(&Cli::command());
        assert!(count > 8, "only {count} commands");
    }

    #[test]
    fn each_command_has_a_page_with_its_options() {
        let directory = tempfile::tempdir().unwrap();
        pages(directory.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        // In roff a hyphen is escaped.
        assert!(page("shorthorn-agent.8").replace('\\', "").contains("shorthorn-agent-serve(8)"));
        assert!(page("shorthorn-agent-replica-export.8").contains("snapshot"));
        assert!(!directory.path().join("shorthorn-agent-man.8").exists(), "for packagers only");
    }
}
