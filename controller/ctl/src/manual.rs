//! Completions and man pages, made from the definitions of the commands.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use super::args::Cli;
use super::error::CtlError;

/// The name of the program.
const NAME: &str = "shorthornctl";

/// Returns the script that completes commands in that shell.
pub(super) fn completion(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a man page of each command to `directory`.
pub(super) fn pages(directory: &Path) -> Result<(), CtlError> {
    let failed = |error: std::io::Error| CtlError::Output(format!("{}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_have_no_mistake() {
        Cli::command().debug_assert();
    }

    #[test]
    fn completions_know_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completion(shell);
            for word in ["support-bundle", "rebuild-limit", "sort-by"] {
                assert!(script.contains(word), "{word} for {shell}");
            }
        }
    }

    #[test]
    fn each_command_has_a_page_with_its_options() {
        let directory = tempfile::tempdir().unwrap();
        pages(directory.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(page("shorthornctl.1").contains("doctor"));
        assert!(page("shorthornctl-volume-list.1").contains("sort"));
        assert!(!directory.path().join("shorthornctl-man.1").exists(), "for packagers only");
    }
}
