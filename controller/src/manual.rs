//! Man pages of this program: see [`shorthorn_manual`].

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::config::Cli;

/// Writes a man page of each command to `directory`.
///
/// # Errors
/// A page cannot be written.
pub fn pages(directory: &Path) -> anyhow::Result<()> {
    shorthorn_manual::write_pages(Cli::command(), directory)
        .with_context(|| format!("writing man pages to {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_with_its_options() {
        let directory = tempfile::tempdir().unwrap();
        pages(directory.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        // In roff a hyphen is escaped.
        assert!(page("shorthorn-controller.8").replace('\\', "").contains("shorthorn-controller-serve(8)"));
        assert!(page("shorthorn-controller-crds.8").contains("without"));
        assert!(!directory.path().join("shorthorn-controller-man.8").exists(), "for packagers only");
    }
}
