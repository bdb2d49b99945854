//! Sleeps in tests.

use super::{Source, is_of_this_test, tests_begin};

/// The number of lines before a sleep that may have its reason.
const REASON_LINES_MAX: usize = 2;

/// Returns true if the text has the name of a constant.
fn has_constant(text: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let is_constant = |word: &str| {
        word.len() > 2
            && word.starts_with(|c: char| c.is_ascii_uppercase())
            && !word.contains(|c: char| c.is_ascii_lowercase())
    };
    text.split(|c: char| !is_name(c)).any(is_constant)
}

/// Returns the part of a line of code from the argument of a sleep on, if it calls `sleep`. A method of that
/// name is another one.
fn sleep_argument(line: &str) -> Option<&str> {
    let (before, argument) = line.split_once("sleep(")?;
    let is_call = before.is_empty() || before.ends_with([' ', ':', '(', '|']);
    let is_definition = before.ends_with("fn ");
    let is_text = before.contains("//") || before.matches('"').count() % 2 == 1;
    (is_call && !is_definition && !is_text).then_some(argument)
}

/// Returns the sleeps of tests without a reason. A reason is a comment beside the sleep or in the two lines
/// before, or a constant whose name says it. The clock of a file with `start_paused` is simulated.
pub fn unexplained_sleeps(source: &Source) -> Vec<String> {
    let is_simulated = source.lines.iter().any(|line| line.contains("start_paused = true"));
    if is_simulated || is_of_this_test(source) {
        return Vec::new();
    }
    let first = if source.path.starts_with("tests") { 0 } else { tests_begin(source) };
    let is_unexplained = |at: usize| {
        let Some(argument) = sleep_argument(source.lines[at].trim()) else { return false };
        let before = &source.lines[at.saturating_sub(REASON_LINES_MAX)..at];
        let is_reason =
            |line: &String| line.contains("//") || line.trim().starts_with("let ") && has_constant(line);
        !argument.contains("//") && !has_constant(argument) && !before.iter().any(is_reason)
    };
    let found = (first..source.lines.len()).filter(|at| is_unexplained(*at));
    found.map(|at| source.at(at, source.lines[at].trim())).collect()
}

#[test]
fn a_sleep_has_a_comment_or_a_constant() {
    let bad = "thread::sleep(Duration::from_millis(5));";
    let text = format!(
        "fn a() {{\n    {bad}\n    // The random part.\n    let a = 1;\n    {bad}\n    b();\n\
         \x20   {bad} // Why.\n\n\n    thread::sleep(LOOK_PAUSE.min(left));\n\
         \x20   let pause = LIMIT / 2;\n    sleep(pause).await;\n\n    sleep(rest).await;\n\
         \x20   self.sleep(1);\n}}\nfn sleep(a: u8) {{}}\n// sleep(1)\n\n\
         let a = \"sleep(1)\";\n"
    );
    let found = unexplained_sleeps(&Source::new("tests/src/a.rs", &text));
    assert_eq!(
        found,
        [format!("tests/src/a.rs:2: {bad}"), "tests/src/a.rs:14: sleep(rest).await;".to_owned()]
    );
    assert!(unexplained_sleeps(&Source::new("agent/src/a.rs", &text)).is_empty(), "not a test");
    let simulated = format!("#[tokio::test(start_paused = true)]\n{text}");
    assert!(unexplained_sleeps(&Source::new("tests/src/a.rs", &simulated)).is_empty());
}
