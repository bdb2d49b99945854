//! Checks the style that rustfmt and clippy leave alone: comments, errors, files and functions of Rust, and
//! comments of the gRPC interfaces. Sentences of the documentation count, too, and comments of scripts,
//! units, TOML and YAML.
//!
//! Each constant is the exact number of violations. A change that removes some lowers the constant with it.

#[path = "tidy/fillers.rs"]
mod fillers;
#[path = "tidy/functions.rs"]
mod functions;
#[path = "tidy/sleeps.rs"]
mod sleeps;
#[path = "tidy/sources.rs"]
mod sources;
#[path = "tidy/texts.rs"]
mod texts;

use std::path::PathBuf;
use std::sync::OnceLock;

use fillers::{fillers, verbless};
use functions::{avoided_names, long_functions};
use sleeps::unexplained_sleeps;
use sources::{interfaces, pages, settings, sources};
use texts::{Kind, Text, count_words, of_markdown, of_proto, of_rust, of_settings, sentences};

/// Doc comments whose first line starts with one of [`OPENERS`].
const BAD_OPENINGS: usize = 0;
/// Texts of errors that start with one of [`OPENERS`].
const BAD_ERRORS: usize = 0;
/// Comments of .proto files that start with one of [`OPENERS`].
const BAD_PROTO_COMMENTS: usize = 0;
/// Comments of scripts, units, TOML and YAML that start with one of [`OPENERS`].
const BAD_SETTINGS_COMMENTS: usize = 0;
/// Doc comments that only repeat names: of the item, of its type, of the variant and the type around it.
const FILLERS: usize = 0;
/// Doc comments that begin without a verb, like "To which replica."
const VERBLESS: usize = 0;
/// Lines of more than [`LINE_CHARS_MAX`] characters.
const LONG_LINES: usize = 0;
/// Lines with one of [`AVOIDED`].
const AVOIDED_WORDS: usize = 0;
/// Sentences of comments, texts and pages with one of [`AVOIDED_IN_TEXTS`].
const AVOIDED_TEXTS: usize = 0;
/// Sentences of more than [`SENTENCE_WORDS_MAX`] words.
const LONG_SENTENCES: usize = 0;
/// String literals outside of tests that start with one of [`LITERAL_OPENERS`].
const BAD_LITERALS: usize = 0;
/// Headings of pages that start with one of [`OPENERS`].
const BAD_HEADINGS: usize = 0;
/// Examples in doc comments that rustdoc would compile. tests/run does not run them.
const DOC_TESTS: usize = 0;
/// Files of more than [`FILE_LINES_MAX`] lines.
const LONG_FILES: usize = 0;
/// Functions of more than 60 lines.
const LONG_FUNCTIONS: usize = 0;
/// Names of functions, tests included, with words that hide the actor or the thing.
const AVOIDED_NAMES: usize = 0;
/// Sleeps of tests without a comment or a constant that says their reason.
const UNEXPLAINED_SLEEPS: usize = 0;

/// Words that delay the subject of a comment. See "Words and English" in CONTRIBUTING.md.
const OPENERS: [&str; 28] = [
    "as",
    "everybody",
    "everything",
    "how",
    "it",
    "it's",
    "its",
    "nobody",
    "nothing",
    "of",
    "one",
    "somebody",
    "something",
    "that",
    "there",
    "these",
    "they",
    "those",
    "what",
    "whatever",
    "where",
    "wherever",
    "whether",
    "which",
    "who",
    "whoever",
    "whose",
    "why",
];
/// Words that hide the actor, in lower case. Parts of names do not count; tidy/functions.rs checks those.
const AVOIDED: [&str; 4] = ["nobody", "somebody", "whoever", "there is no"];
/// More words that hide the actor, and forms that negate a noun. Code in backquotes may have them.
const AVOIDED_IN_TEXTS: [&str; 17] = [
    "go on",
    "goes",
    "gone on",
    "heard",
    "hears",
    "how-manieth",
    "how-many",
    "is to go",
    "made equal",
    "so many",
    "taken away",
    "tells",
    "there are no",
    "there was no",
    "there were no",
    "told",
    "went",
];
/// Words that a reason must not start with: it follows a name in most messages, and stands alone in some.
const LITERAL_OPENERS: [&str; 4] = ["it", "its", "one", "that"];
const SENTENCE_WORDS_MAX: usize = 25;
const LINE_CHARS_MAX: usize = 110;
/// Longer words, such as addresses and encoded data, are not broken.
const WORD_CHARS_MAX: usize = 70;
const FILE_LINES_MAX: usize = 600;

/// A file with its lines.
struct Source {
    path: PathBuf,
    lines: Vec<String>,
    texts: OnceLock<Vec<Text>>,
}

impl Source {
    fn new(path: impl Into<PathBuf>, text: &str) -> Source {
        let lines = text.lines().map(str::to_owned).collect();
        Source { path: path.into(), lines, texts: OnceLock::new() }
    }

    /// Returns the comments and literals of code, or the page.
    fn texts(&self) -> &[Text] {
        self.texts.get_or_init(|| {
            let text = self.lines.join("\n");
            match self.path.extension().and_then(|extension| extension.to_str()) {
                Some("rs") => of_rust(&text),
                Some("proto") => of_proto(&text),
                Some("md") => of_markdown(&text),
                _ => of_settings(&text),
            }
        })
    }

    /// Describes the place of the line at index `at`.
    fn at(&self, at: usize, text: &str) -> String {
        format!("{}:{}: {text}", self.path.display(), at + 1)
    }
}

fn doc_marker(line: &str) -> Option<&'static str> {
    let line = line.trim_start();
    let is_doc = |marker: &&str| line.starts_with(*marker) && !line.starts_with("////");
    ["///", "//!"].iter().copied().find(is_doc)
}

/// Returns true if the text starts with one of [`OPENERS`].
fn has_bad_opening(text: &str) -> bool {
    let word = text.split(|c: char| !c.is_alphabetic() && c != '\'' && c != '-').next();
    OPENERS.contains(&word.unwrap_or_default().to_lowercase().as_str())
}

/// Returns the texts of `#[error("…")]`, also those whose text is on the next line.
fn bad_errors(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_attribute = false;
    for (at, line) in source.lines.iter().enumerate() {
        let line = line.trim();
        let text = line.strip_prefix("#[error(").or_else(|| is_attribute.then_some(line));
        is_attribute = line == "#[error(";
        let Some(text) = text.and_then(|text| text.strip_prefix('"')) else { continue };
        if has_bad_opening(text) {
            found.push(source.at(at, text));
        }
    }
    found
}

/// Returns the comments of a .proto file whose first line has a bad opening.
fn bad_proto_comments(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_inside = false;
    for (at, line) in source.lines.iter().enumerate() {
        let comment = line.trim_start().strip_prefix("//").map(str::trim);
        if let Some(text) = comment.filter(|text| !is_inside && has_bad_opening(text)) {
            found.push(source.at(at, text));
        }
        is_inside = comment.is_some();
    }
    found
}

/// Returns the first line of each doc comment with its index, without the marker.
fn first_doc_lines(source: &Source) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut before = None;
    for (at, line) in source.lines.iter().enumerate() {
        let marker = doc_marker(line);
        if let Some(marker) = marker.filter(|_| marker != before) {
            found.push((at, line.trim_start().trim_start_matches(marker).trim()));
        }
        before = marker;
    }
    found
}

fn bad_openings(source: &Source) -> Vec<String> {
    let bad = first_doc_lines(source).into_iter().filter(|(_, text)| has_bad_opening(text));
    bad.map(|(at, text)| source.at(at, text)).collect()
}

/// Returns true if the text has the words, and not only as a part of a name.
fn has_words(text: &str, words: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(words).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + words.len()..]);
        !before.ends_with(is_name) && !after.starts_with(is_name)
    })
}

/// Returns true for the files of this test, which have avoided words as examples.
fn is_of_this_test(source: &Source) -> bool {
    source.path.ends_with(file!()) || source.path.starts_with("tests/kit/tests/tidy")
}

fn avoided_words(source: &Source) -> Vec<String> {
    if is_of_this_test(source) {
        return Vec::new();
    }
    let is_bad = |line: &str| AVOIDED.iter().any(|words| has_words(&line.to_lowercase(), words));
    let lines = source.lines.iter().enumerate().filter(|(_, line)| is_bad(line));
    lines.map(|(at, line)| source.at(at, line.trim())).collect()
}

/// Returns the sentences of comments, string literals outside of tests, .proto files and pages.
fn prose(source: &Source) -> Vec<(usize, String)> {
    let tests_begin = tests_begin(source);
    let counts = |text: &&Text| match text.kind {
        Kind::Comment(_) => true,
        Kind::Literal => text.first < tests_begin,
        Kind::Raw => false,
    };
    source.texts().iter().filter(counts).flat_map(sentences).collect()
}

/// Returns the index of the first line of the tests in this file, or the number of its lines.
fn tests_begin(source: &Source) -> usize {
    let is_tests = |part: &std::ffi::OsStr| part == "tests" || part.to_string_lossy().ends_with("tests.rs");
    // tests/src and tests/sim are programs; the folder tests at the top has them, too.
    let mut parts = source.path.iter().skip(1);
    if parts.any(is_tests) {
        return 0;
    }
    let begins =
        |pair: &[String]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{');
    source.lines.windows(2).position(begins).unwrap_or(source.lines.len())
}

fn long_sentences(source: &Source) -> Vec<String> {
    let is_long = |(at, sentence): (usize, String)| {
        let count = count_words(&sentence);
        (count > SENTENCE_WORDS_MAX).then(|| source.at(at, &format!("{count} words: {sentence}")))
    };
    prose(source).into_iter().filter_map(is_long).collect()
}

fn avoided_texts(source: &Source) -> Vec<String> {
    // CONTRIBUTING has them as examples.
    if source.path.ends_with("CONTRIBUTING.md") || is_of_this_test(source) {
        return Vec::new();
    }
    let is_bad = |sentence: &str| {
        let sentence = sentence.to_lowercase().replace('`', "_");
        AVOIDED_IN_TEXTS.iter().any(|words| has_words(&sentence, words))
    };
    let bad = prose(source).into_iter().filter(|(_, sentence)| is_bad(sentence));
    bad.map(|(at, sentence)| source.at(at, &sentence)).collect()
}

/// Returns the string literals outside of tests that start with one of [`LITERAL_OPENERS`].
fn bad_literals(source: &Source) -> Vec<String> {
    let tests_begin = tests_begin(source);
    let is_bad = |text: &&Text| {
        let start = text.text.trim_start_matches([':', ';', ',', ' ']).to_lowercase();
        let has_opener = LITERAL_OPENERS
            .iter()
            .any(|word| start.strip_prefix(word).is_some_and(|rest| rest.starts_with([' ', '\''])));
        text.kind == Kind::Literal && text.first < tests_begin && has_opener
    };
    source.texts().iter().filter(is_bad).map(|text| source.at(text.first, &text.text)).collect()
}

/// Returns the lines that are too long, except those of raw literals, which are documents, and those with a
/// word that cannot be broken.
fn long_lines(source: &Source) -> Vec<String> {
    let is_long = |line: &&String| line.chars().count() > LINE_CHARS_MAX;
    if !source.lines.iter().any(|line| is_long(&line)) {
        return Vec::new();
    }
    let documents: Vec<&Text> = source.texts().iter().filter(|text| text.kind == Kind::Raw).collect();
    let is_document = |at: usize| documents.iter().any(|text| (text.first..=text.last).contains(&at));
    let can_break = |line: &str| line.split_whitespace().all(|word| word.chars().count() <= WORD_CHARS_MAX);
    let lines = source.lines.iter().enumerate().filter(|(_, line)| is_long(line));
    let found = lines.filter(|(at, line)| !is_document(*at) && can_break(line));
    found.map(|(at, line)| source.at(at, line.trim())).collect()
}

/// Returns the fences of doc comments that begin a block of another kind than text.
fn doc_tests(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_inside = false;
    for (at, line) in source.lines.iter().enumerate() {
        let Some(marker) = doc_marker(line) else { continue };
        let text = line.trim_start().trim_start_matches(marker).trim();
        if !text.starts_with("```") {
            continue;
        }
        if !is_inside && text != "```text" {
            found.push(source.at(at, text));
        }
        is_inside = !is_inside;
    }
    found
}

fn long_file(source: &Source) -> Option<String> {
    let count = source.lines.len();
    (count > FILE_LINES_MAX).then(|| format!("{}: {count} lines", source.path.display()))
}

fn check(found: &[String], allowed: usize, constant: &str, rule: &str) {
    assert!(
        found.len() == allowed,
        "{} violations of \"{rule}\", and {constant} is {allowed}. Remove new ones, or lower the \
         constant:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn docs_start_with_the_thing() {
    let found: Vec<String> = sources().iter().flat_map(bad_openings).collect();
    check(&found, BAD_OPENINGS, "BAD_OPENINGS", "the first line of a doc comment names the thing");
}

#[test]
fn errors_start_with_the_thing() {
    let found: Vec<String> = sources().iter().flat_map(bad_errors).collect();
    check(&found, BAD_ERRORS, "BAD_ERRORS", "the text of an error names the thing");
}

#[test]
fn comments_of_interfaces_start_with_the_thing() {
    let files = interfaces();
    assert!(files.len() >= 5, "only {} files", files.len());
    let found: Vec<String> = files.iter().flat_map(bad_proto_comments).collect();
    check(&found, BAD_PROTO_COMMENTS, "BAD_PROTO_COMMENTS", "the first line of a comment names the thing");
}

#[test]
fn comments_of_settings_and_scripts_start_with_the_thing() {
    let files = settings();
    assert!(files.len() >= 100, "only {} files", files.len());
    let found: Vec<String> = files.iter().flat_map(bad_settings_comments).collect();
    let rule = "the first line of a comment names the thing";
    check(&found, BAD_SETTINGS_COMMENTS, "BAD_SETTINGS_COMMENTS", rule);
}

#[test]
fn docs_say_more_than_the_name() {
    let found: Vec<String> = sources().iter().flat_map(fillers).collect();
    check(&found, FILLERS, "FILLERS", "a doc comment says something that the name does not");
}

#[test]
fn docs_do_not_begin_with_which() {
    let found: Vec<String> = sources().iter().flat_map(verbless).collect();
    check(&found, VERBLESS, "VERBLESS", "a doc comment names the thing instead of asking which");
}

#[test]
fn lines_are_short() {
    let found: Vec<String> = sources().iter().chain(interfaces()).flat_map(long_lines).collect();
    check(&found, LONG_LINES, "LONG_LINES", "lines have at most 110 characters");
}

#[test]
fn actors_are_named() {
    let found: Vec<String> = sources().iter().chain(settings()).flat_map(avoided_words).collect();
    check(&found, AVOIDED_WORDS, "AVOIDED_WORDS", "name the actor, and negate the verb");
}

fn bad_headings(source: &Source) -> Vec<String> {
    let heading = |line: &str| {
        line.strip_prefix('#').is_some_and(|rest| has_bad_opening(rest.trim_start_matches(['#', ' '])))
    };
    let lines = source.lines.iter().enumerate().filter(|(_, line)| heading(line));
    lines.map(|(at, line)| source.at(at, line)).collect()
}

/// Returns the files whose sentences count.
fn files_with_prose() -> impl Iterator<Item = &'static Source> {
    sources().iter().chain(interfaces()).chain(pages()).chain(settings())
}

/// Returns the comments of a script, unit, TOML or YAML file that have a bad opening.
fn bad_settings_comments(source: &Source) -> Vec<String> {
    let bad = source.texts().iter().filter(|text| has_bad_opening(&text.text));
    bad.map(|text| source.at(text.first, text.text.lines().next().unwrap_or_default())).collect()
}

#[test]
fn headings_start_with_the_thing() {
    let found: Vec<String> = pages().iter().flat_map(bad_headings).collect();
    check(&found, BAD_HEADINGS, "BAD_HEADINGS", "a heading names the thing");
}

#[test]
fn sentences_are_short() {
    let found: Vec<String> = files_with_prose().flat_map(long_sentences).collect();
    check(&found, LONG_SENTENCES, "LONG_SENTENCES", "a sentence has at most 25 words");
}

#[test]
fn texts_name_the_actor() {
    let found: Vec<String> = files_with_prose().flat_map(avoided_texts).collect();
    check(&found, AVOIDED_TEXTS, "AVOIDED_TEXTS", "write the standard verb, and negate the verb");
}

#[test]
fn messages_start_with_the_thing() {
    let found: Vec<String> = sources().iter().flat_map(bad_literals).collect();
    check(&found, BAD_LITERALS, "BAD_LITERALS", "a text does not start with it, its, one or that");
}

#[test]
fn doc_comments_have_no_examples_to_run() {
    let found: Vec<String> = sources().iter().flat_map(doc_tests).collect();
    check(&found, DOC_TESTS, "DOC_TESTS", "blocks of code in doc comments begin with ```text");
}

#[test]
fn files_are_short() {
    let found: Vec<String> = sources().iter().chain(interfaces()).filter_map(long_file).collect();
    check(&found, LONG_FILES, "LONG_FILES", "files have at most 600 lines");
}

#[test]
fn functions_are_short() {
    let found: Vec<String> = sources().iter().flat_map(long_functions).collect();
    check(&found, LONG_FUNCTIONS, "LONG_FUNCTIONS", "functions have at most 60 lines");
}

#[test]
fn names_of_functions_name_the_thing() {
    let found: Vec<String> = sources().iter().flat_map(avoided_names).collect();
    check(&found, AVOIDED_NAMES, "AVOIDED_NAMES", "the name of a function has the actor and the thing");
}

#[test]
fn sleeps_of_tests_have_a_reason() {
    let found: Vec<String> = sources().iter().flat_map(unexplained_sleeps).collect();
    check(&found, UNEXPLAINED_SLEEPS, "UNEXPLAINED_SLEEPS", "a sleep of a test says what it waits for");
}

#[test]
fn only_the_first_line_of_a_doc_comment_counts() {
    let text = "//! A thing.\n//! It is more.\n\n/// Its end.\n/// What else.\nfn f() {}\n\
                /// One-way.\n// It is code.\n";
    assert_eq!(bad_openings(&Source::new("a.rs", text)), ["a.rs:4: Its end."]);
}

#[test]
fn errors_count_on_the_line_of_the_attribute_and_on_the_next() {
    let text = "#[error(\"the node is gone\")]\n#[error(\"it is gone\")]\n\
                #[error(\n    \"that is gone\"\n)]\nlet a = \"it is\";\n";
    assert_eq!(bad_errors(&Source::new("a.rs", text)), ["a.rs:2: it is gone\")]", "a.rs:4: that is gone\""]);
}

#[test]
fn only_the_first_line_of_a_proto_comment_counts() {
    let text = "  // A node,\n  // what else.\n  string a = 1;\n  // Whether it is.\n";
    assert_eq!(bad_proto_comments(&Source::new("a.proto", text)), ["a.proto:4: Whether it is."]);
}

#[test]
fn comments_and_descriptions_of_settings_have_sentences() {
    let text =
        "#!/bin/sh\n# It is\n# one text.\nset -e # It is not.\n    # The end.\n  description: \"Its end.\"\n";
    let source = Source::new("a.yaml", text);
    assert_eq!(bad_settings_comments(&source), ["a.yaml:2: It is", "a.yaml:6: Its end."]);
    let found: Vec<String> = prose(&source).into_iter().map(|(_, sentence)| sentence).collect();
    assert_eq!(found, ["It is one text.", "The end.", "Its end."]);
}

#[test]
fn a_doc_comment_of_the_words_of_its_name_is_a_filler() {
    let text = "/// The view.\npub view: View,\n/// The sender of the view.\nview: View,\n\
                /// A rebuild\n/// The slot.\nslot: u8,\n\
                /// The open slot.\nenum OpenSlot {}\n\
                /// Returns the id of this volume.\n#[must_use]\n#[expect(\n    a\n)]\n\
                fn identity(&self) -> VolumeId {}\n/// The volume.\n#[test]\n";
    let found = fillers(&Source::new("a.rs", text));
    let said = ["a.rs:1: The view.", "a.rs:8: The open slot.", "a.rs:10: Returns the id of this volume."];
    assert!(found.iter().zip(said).all(|(found, said)| found.starts_with(said)), "{found:?}");
    assert_eq!(found.len(), said.len(), "{found:?}");
}

#[test]
fn avoided_words_count_in_any_case_but_not_in_names() {
    let text =
        "fn nobody_waits() {}\n/// Nobody waits.\nlet a = \"as there is no disk\";\nstruct NobodyElse;\n";
    let found = avoided_words(&Source::new("a.rs", text));
    assert_eq!(found, ["a.rs:2: /// Nobody waits.", "a.rs:3: let a = \"as there is no disk\";"]);
}

#[test]
fn sentences_end_at_full_stops_of_one_comment() {
    let half = "word ".repeat(SENTENCE_WORDS_MAX / 2 + 1);
    let text = format!(
        "/// {half}\n/// {half}end. Next.\n//! {half}\n//! Stop. {half}\n\nlet a = \"{half}\\\n   {half}\";\n\
         /// - {half}\n/// - {half}\n#[cfg(test)]\nmod tests {{\nlet a = \"{half}{half}\";\n}}\n"
    );
    let found = long_sentences(&Source::new("a.rs", &text));
    let places: Vec<&str> = found.iter().filter_map(|one| one.split(" words").next()).collect();
    assert_eq!(places, ["a.rs:1: 27", "a.rs:6: 26"]);
}

#[test]
fn tables_code_and_headings_have_no_sentences() {
    let long = "word ".repeat(SENTENCE_WORDS_MAX + 1);
    let text = format!("# {long}\n| {long} |\n```\n{long}\n```\n\n    {long}\n\n{long}\n");
    assert_eq!(long_sentences(&Source::new("a.md", &text)), [format!("a.md:9: 26 words: {}", long.trim())]);
}

#[test]
fn avoided_texts_count_outside_of_backquotes_and_tests() {
    let text = "// `goes` is a flag.\n\n// The engine\n// is told.\nlet a = \"there \\\n  are no disks\";\n\
                fn goes() {}\n#[cfg(test)]\nmod tests {\n    let a = \"it goes\";\n}\n";
    let found = avoided_texts(&Source::new("a.rs", text));
    assert_eq!(found, ["a.rs:3: The engine is told.", "a.rs:5: there are no disks"]);
}

#[test]
fn literals_start_with_the_thing_also_after_punctuation() {
    let text =
        "let a = [\"it is\", \"item\", \": its end\", r\"it is\", \"One day\", 'x', \"a\"];\n// it is\n";
    let found = bad_literals(&Source::new("a.rs", text));
    assert_eq!(found, ["a.rs:1: it is", "a.rs:1: : its end", "a.rs:1: One day"]);
}

#[test]
fn long_lines_count_in_characters_and_not_in_documents() {
    let (fits, long) = ("é ".repeat(LINE_CHARS_MAX / 2 - 2), "x ".repeat(LINE_CHARS_MAX / 2 - 1));
    let word = "x".repeat(LINE_CHARS_MAX);
    let text = format!(
        "// {fits}\n    // {long}\nlet a = \"{long}\";\nlet b = r\"\n{long}xxx\";\nuse(\"{word}\");\n"
    );
    let found = long_lines(&Source::new("a.rs", &text));
    assert_eq!(found, [format!("a.rs:2: // {}", long.trim()), format!("a.rs:3: let a = \"{long}\";")]);
}

#[test]
fn only_the_fence_that_begins_a_block_counts() {
    let fence = "`".repeat(3);
    let text =
        format!("/// {fence}text\n/// a\n/// {fence}\n//! {fence}no_run\n//! b\n//! {fence}\n// {fence}\n");
    assert_eq!(doc_tests(&Source::new("a.rs", &text)), [format!("a.rs:4: {fence}no_run")]);
}
