//! Programs in the documentation: a reference that is made from their definitions, and a check of every
//! command that a page shows.

use std::fmt::Write as _;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};

use super::{Code, Page, pages, simple_commands, table};

/// Values for the words in capitals that a page uses; a word that is not listed stands for itself in small
/// letters.
const VALUES: [(&str, &str); 9] = [
    ("ADDRESS", "127.0.0.1"),
    ("PORT", "9501"),
    ("SIZE", "1GiB"),
    ("SECONDS", "5"),
    ("COUNT", "3"),
    ("NUMBER", "3"),
    ("PERCENT", "20"),
    ("URL", "http://host:9501"),
    ("IP", "192.0.2.1"),
];

/// Compares every command of the documentation that calls this program with its definition, and returns their
/// number. A line of a block has to be complete; a span in a sentence may lack arguments.
///
/// # Panics
/// A command is wrong.
#[must_use]
pub fn check_commands(program: &Command) -> usize {
    let (mut count, mut wrong) = (0, Vec::new());
    for (page, code, words) in shown_commands(program.get_name()) {
        count += 1;
        if let Err(error) = check(program, &words, code.is_block) {
            wrong.push(page.at(code.line, &format!("{}\n{error}", words.join(" "))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    count
}

/// Returns every command of the documentation that calls the program, as words, with its place.
#[must_use]
pub fn shown_commands(program: &str) -> Vec<(Page, Code, Vec<String>)> {
    let mut found = Vec::new();
    for page in pages() {
        for code in page.code() {
            let commands = simple_commands(&code.text).into_iter().filter(|words| calls(program, words));
            found.extend(commands.map(|words| (page.clone(), code.clone(), words)));
        }
    }
    found
}

/// Returns true if `words` call the program with at least one argument. An arrow in a drawing is none.
fn calls(program: &str, words: &[String]) -> bool {
    let file = words.first().and_then(|word| Path::new(word).file_name());
    let has_argument = words.get(1).is_some_and(|word| word.is_ascii());
    has_argument && file.is_some_and(|file| file == program)
}

fn check(program: &Command, words: &[String], is_complete: bool) -> Result<(), String> {
    let words = words.iter().map(|word| with_values(word));
    let Err(error) = program.clone().try_get_matches_from(words) else { return Ok(()) };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(()),
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            if !is_complete =>
        {
            Ok(())
        }
        _ => Err(error.to_string()),
    }
}

/// Replaces each word in capitals by a value.
fn with_values(word: &str) -> String {
    let is_capital = |c: char| c.is_ascii_uppercase() || c == '_';
    let (mut made, mut rest) = (String::new(), word);
    while let Some(start) = rest.find(is_capital) {
        let end = rest[start..].find(|c| !is_capital(c)).map_or(rest.len(), |end| start + end);
        let name = &rest[start..end];
        let value = VALUES.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        made.push_str(&rest[..start]);
        match value {
            Some(value) => made.push_str(&value),
            None if name.len() > 1 => made.push_str(&name.to_lowercase()),
            None => made.push_str(name),
        }
        rest = &rest[end..];
    }
    made + rest
}

/// Returns the reference of a program in Markdown: each command with its arguments.
#[must_use]
pub fn reference(program: Command) -> String {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    let mut text = String::new();
    let global: Vec<&Arg> = program.get_arguments().filter(|arg| arg.is_global_set()).collect();
    if !global.is_empty() {
        let _ = write!(text, "## Options of every command\n\n{}\n", arguments(&global));
    }
    write_command(&mut text, &program, program.get_name());
    text
}

fn write_command(text: &mut String, command: &Command, name: &str) {
    let subcommands: Vec<&Command> = command.get_subcommands().filter(|one| !one.is_hide_set()).collect();
    if subcommands.is_empty() {
        let about = command.get_long_about().or_else(|| command.get_about());
        let about = about.map(ToString::to_string).unwrap_or_default();
        let usage = command.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage:").split_whitespace().collect::<Vec<_>>().join(" ");
        // Without the name, which the heading has: with it, the usage would be checked as a command.
        let usage = usage.strip_prefix(name).unwrap_or(&usage).trim();
        let _ = write!(text, "## {name}\n\n{}\n\n", sentence(&about));
        if !matches!(usage, "" | "[OPTIONS]") {
            let _ = write!(text, "Usage: `{usage}`\n\n");
        }
        for alias in command.get_visible_aliases() {
            let _ = write!(text, "Alias: `{alias}`\n\n");
        }
        let own: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_global_set()).collect();
        let made = arguments(&own);
        if !made.is_empty() {
            let _ = writeln!(text, "{made}");
        }
    }
    for subcommand in subcommands {
        write_command(text, subcommand, &format!("{name} {}", subcommand.get_name()));
    }
}

/// Returns the table of these arguments; empty if no row is left.
fn arguments(all: &[&Arg]) -> String {
    let shown =
        all.iter().filter(|arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version"));
    let rows: Vec<Vec<String>> =
        shown.map(|arg| vec![format!("`{}`", synopsis(arg)), meaning(arg)]).collect();
    if rows.is_empty() { String::new() } else { table(&["Argument", "Meaning"], &rows) }
}

/// Returns the form of an argument, such as `-o, --output FORMAT`.
fn synopsis(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let value = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    if arg.is_positional() {
        return value;
    }
    let short = arg.get_short().map(|short| format!("-{short}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let flag = short.into_iter().chain(long).collect::<Vec<_>>().join(", ");
    if takes_value(arg) { format!("{flag} {value}") } else { flag }
}

fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = sentence(&help);
    let mut add = |label: &str, values: &[String]| {
        let _ = write!(text, " {label}: {}.", values.join(", "));
    };
    let code = |text: &str| format!("`{text}`");
    let values = arg.get_possible_values();
    if takes_value(arg) && !values.is_empty() && !values.iter().any(|value| value.get_name() == "true") {
        add("Values", &values.iter().map(|value| code(value.get_name())).collect::<Vec<_>>());
    }
    if takes_value(arg) && !arg.is_hide_default_value_set() && !arg.get_default_values().is_empty() {
        let values = arg.get_default_values().iter();
        add("Default", &values.map(|value| code(&value.to_string_lossy())).collect::<Vec<_>>());
    }
    if let Some(name) = arg.get_env() {
        add("Environment", &[code(&name.to_string_lossy())]);
    }
    text
}

/// Ends a text like a sentence. A default at the end, as help texts have it, becomes a sentence of its own.
fn sentence(text: &str) -> String {
    let text = text.trim().trim_end_matches('.');
    let text = match text.strip_suffix(']').and_then(|text| text.rsplit_once("[default: ")) {
        Some((text, default)) => format!("{}. Default: {default}", text.trim().trim_end_matches('.')),
        None => text.to_owned(),
    };
    if text.is_empty() { text } else { format!("{text}.") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        Command::new("p").subcommand(
            Command::new("do").about("Does it").arg(Arg::new("name").value_name("NAME").required(true)).arg(
                Arg::new("port")
                    .long("port")
                    .value_name("PORT")
                    .value_parser(clap::value_parser!(u16))
                    .default_value("1")
                    .help("Its port"),
            ),
        )
    }

    #[test]
    fn commands_are_compared_with_the_definition() {
        let check = |line: &str, is_complete| {
            check(&program(), &simple_commands(line)[0], is_complete).map_err(|_| ())
        };
        assert_eq!(check("p do NAME --port PORT", true), Ok(()));
        assert_eq!(check("p do", false), Ok(()));
        assert_eq!(check("p do", true), Err(()), "the name is missing");
        assert_eq!(check("p do NAME --port NAME", true), Err(()), "a port is a number");
        assert_eq!(check("p do NAME --prot 1", false), Err(()));
        assert_eq!(check("p undo", false), Err(()));
    }

    #[test]
    fn words_in_capitals_have_values() {
        assert_eq!(with_values("HOST:PORT"), "host:9501");
        assert_eq!(with_values("--size=SIZE"), "--size=1GiB");
        assert_eq!(with_values("1GiB"), "1GiB");
    }

    #[test]
    fn a_reference_has_each_command_with_its_arguments() {
        let text = reference(program());
        assert!(text.contains("## p do\n\nDoes it.\n\nUsage: `[OPTIONS] <NAME>`\n\n"), "{text}");
        assert!(text.contains("| `NAME` |  |\n| `--port PORT` | Its port. Default: `1`. |\n"), "{text}");
    }
}
