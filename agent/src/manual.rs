//! Man pages of this program: see [`shorthorn_manual`].

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::Cli;

/// Writes a man page of each command to `directory`.
pub fn pages(directory: &Path) -> anyhow::Result<()> {
    shorthorn_manual::write_pages(Cli::command(), directory)
        .with_context(|| format!("writing man pages to {}", directory.display()))
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
