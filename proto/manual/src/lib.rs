//! Man pages of the daemons, made from the definitions of their commands. Packages contain them.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// The section of daemons.
const SECTION: &str = "8";

/// Writes a man page of `command`, and of each command below it, to `directory`. Makes the directory if it is
/// missing.
///
/// # Errors
/// The directory cannot be made, or a page cannot be written.
pub fn write_pages(command: Command, directory: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(directory)?;
    write(command, directory)
}

fn write(command: Command, directory: &Path) -> io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()).cloned() {
        write(command, directory)?;
    }
    Man::new(command).section(SECTION).generate_to(directory).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_that_is_not_hidden_has_a_page() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("man");
        let command = Command::new("d")
            .subcommand(Command::new("serve").subcommand(Command::new("once").about("Ends at once")))
            .subcommand(Command::new("man").hide(true));
        write_pages(command, &directory).unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["d-serve-once.8", "d-serve.8", "d.8"]);
        let page = std::fs::read_to_string(directory.join("d-serve-once.8")).unwrap();
        assert!(page.contains("Ends at once"), "{page}");
    }
}
