//! The lengths and names of functions.

use super::Source;

const FUNCTION_LINES_MAX: usize = 60;
/// Words, and words that follow each other, that name neither the actor nor the thing.
const AVOIDED_IN_NAMES: [&str; 16] = [
    "anybody",
    "come_back",
    "comes_back",
    "everybody",
    "goes_away",
    "goes_on",
    "is_told",
    "made_anew",
    "nobody",
    "nobodys",
    "put_right",
    "somebody",
    "taken_away",
    "what",
    "who",
    "whoever",
];

/// Returns the name of the function that begins in this line.
fn function_name(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    loop {
        let word = words.next()?;
        if word == "fn" {
            let name = words.next()?;
            return name.split(|c: char| !c.is_alphanumeric() && c != '_').next();
        }
        let is_qualifier = ["pub", "default", "const", "async", "unsafe", "extern"].contains(&word)
            || word.starts_with("pub(")
            || word.starts_with('"');
        if !is_qualifier {
            return None;
        }
    }
}

/// Returns the index of the last line of the function that begins at index `start`. In the format of rustfmt,
/// its closing brace is the first one at the indentation of its first line.
fn function_end(lines: &[String], start: usize) -> usize {
    let first = &lines[start];
    let indent = &first[..first.len() - first.trim_start().len()];
    if first.ends_with(['}', ';']) {
        return start;
    }
    let ends = |line: &String| {
        line.strip_prefix(indent).is_some_and(|rest| {
            rest.starts_with('}') || (rest.ends_with(';') && !rest.starts_with(char::is_whitespace))
        })
    };
    lines.iter().skip(start + 1).position(ends).map_or(lines.len() - 1, |more| start + 1 + more)
}

/// Returns the functions of more than [`FUNCTION_LINES_MAX`] lines.
pub fn long_functions(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (at, line) in source.lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let count = function_end(&source.lines, at) + 1 - at;
        if count > FUNCTION_LINES_MAX {
            found.push(source.at(at, &format!("{name} has {count} lines")));
        }
    }
    found
}

/// Returns the functions with one of [`AVOIDED_IN_NAMES`] in their names.
pub fn avoided_names(source: &Source) -> Vec<String> {
    let has = |name: &str, words: &str| format!("_{name}_").contains(&format!("_{words}_"));
    let is_bad = |name: &&str| AVOIDED_IN_NAMES.iter().any(|words| has(name, words));
    let names = source.lines.iter().enumerate().filter_map(|(at, line)| Some((at, function_name(line)?)));
    names.filter(|(_, name)| is_bad(name)).map(|(at, name)| source.at(at, name)).collect()
}

#[test]
fn functions_end_at_the_brace_of_their_indentation() {
    let body = "        if x {\n        }\n".repeat(FUNCTION_LINES_MAX / 2);
    let text = format!(
        "impl A {{\n    pub(crate) async fn long<T>(\n        a: T,\n    ) -> T \
         {{\n{body}    }}\n\n    fn short() {{}}\n}}\n\
         trait B {{\n    fn declared(\n        &self,\n    );\n\n{body}}}\n"
    );
    assert_eq!(long_functions(&Source::new("a.rs", &text)), ["a.rs:2: long has 64 lines"]);
}

#[test]
fn names_count_by_whole_words() {
    let text = "fn what_is_lost_stays() {}\nfn whatever() {}\n    async fn a_write_goes_on() {}\n\
                fn goes_one_by_one() {}\n// fn who\npub(crate) fn told_to_nobody<T>() {}\n";
    let found = avoided_names(&Source::new("a.rs", text));
    assert_eq!(found, ["a.rs:1: what_is_lost_stays", "a.rs:3: a_write_goes_on", "a.rs:6: told_to_nobody"]);
}
