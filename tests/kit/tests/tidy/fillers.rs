//! Doc comments that say nothing.

use super::{Source, doc_marker, first_doc_lines};

/// Words that say nothing beside the words of an item.
const FILLING: [&str; 8] = ["id", "name", "number", "of", "return", "returns", "these", "this"];
/// More such words, unless the item is a function, whose first sentence needs some of them.
const FILLING_OF_DATA: [&str; 17] = [
    "all", "are", "be", "both", "for", "from", "has", "in", "is", "it", "its", "kind", "new", "that", "them",
    "to", "with",
];
/// Words before a "which" that begins a phrase without a verb, as in "To which replica."
const PREPOSITIONS: [&str; 17] = [
    "about", "after", "at", "before", "between", "by", "for", "from", "in", "into", "of", "on", "over",
    "through", "to", "under", "with",
];

/// Returns the words of a name or a text in lower case, without articles.
fn words(text: &str) -> Vec<String> {
    let mut spaced = String::new();
    for c in text.chars() {
        if c.is_uppercase() {
            spaced.push(' ');
        }
        spaced.push(if c.is_alphanumeric() { c } else { ' ' });
    }
    let words = spaced.split_whitespace().map(str::to_lowercase);
    words.filter(|word| !["the", "a", "an"].contains(&word.as_str())).collect()
}

/// Returns the first line after index `at` that does not belong to an attribute.
fn item_below(source: &Source, at: usize) -> Option<&str> {
    let mut is_attribute = false;
    source.lines[at + 1..].iter().map(|line| line.trim_start()).find(|line| {
        let is_part = is_attribute || line.starts_with("#[");
        is_attribute = is_part && !line.ends_with(']');
        !is_part
    })
}

/// Returns the word without the ending of a plural.
fn stem(word: &str) -> &str {
    let stem = word.strip_suffix('s').filter(|stem| stem.len() > 2 && !stem.ends_with('s'));
    stem.unwrap_or(word)
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Returns the lines that open the blocks around the line at index `at`: of a variant, its enum and so on.
fn openings_around(source: &Source, at: usize) -> Vec<&str> {
    let mut depth = indentation(&source.lines[at]);
    let mut found = Vec::new();
    for line in source.lines[..at].iter().rev() {
        let text = line.trim_start();
        if indentation(line) < depth && !text.is_empty() && !text.starts_with(['#', '/', '}', ')']) {
            depth = indentation(line);
            found.push(text);
        }
    }
    found
}

/// Returns doc comments of one line that only repeat names. These are of the item below them, of its type,
/// and of the variant and the type around it.
pub fn fillers(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (at, line) in source.lines.iter().enumerate() {
        let Some(text) = line.trim_start().strip_prefix("/// ") else { continue };
        let is_alone = at == 0 || doc_marker(&source.lines[at - 1]).is_none();
        let Some(item) = item_below(source, at) else { continue };
        if !is_alone || !text.ends_with('.') || item.starts_with("///") {
            continue;
        }
        let said = words(text);
        let is_function = item.split_whitespace().any(|word| word == "fn");
        let around = openings_around(source, at);
        let known: Vec<String> = around.into_iter().chain([item]).flat_map(words).collect();
        let is_known = |word: &String| {
            FILLING.contains(&word.as_str())
                || (!is_function && FILLING_OF_DATA.contains(&word.as_str()))
                || known.iter().any(|other| stem(other) == stem(word))
        };
        if !said.is_empty() && said.iter().all(is_known) {
            found.push(source.at(at, &format!("{text} ({item})")));
        }
    }
    found
}

/// Returns the first lines of doc comments that begin with a preposition and "which".
pub fn verbless(source: &Source) -> Vec<String> {
    let is_verbless = |text: &str| {
        let mut words = text.split_whitespace().map(str::to_lowercase);
        words.next().is_some_and(|word| PREPOSITIONS.contains(&word.as_str()))
            && words.next().as_deref() == Some("which")
    };
    let bad = first_doc_lines(source).into_iter().filter(|(_, text)| is_verbless(text));
    bad.map(|(at, text)| source.at(at, text)).collect()
}

#[test]
fn words_of_the_variant_and_the_type_around_a_field_are_known() {
    let text = "pub enum Event {\n    /// A replica answers.\n    Submit {\n        \
                /// The queue of the request, from 0.\n        queue: u16,\n        \
                /// The number of the event to submit.\n        number: u64,\n    },\n}\n\
                pub struct Queue {\n    /// All of the slots.\n    slots: Vec<SlotId>,\n    \
                /// The event.\n    last: u64,\n}\n";
    let found = fillers(&Source::new("a.rs", text));
    let said = ["a.rs:6: The number of the event to submit.", "a.rs:11: All of the slots."];
    assert!(found.iter().zip(said).all(|(found, said)| found.starts_with(said)), "{found:?}");
    assert_eq!(found.len(), said.len(), "{found:?}");
}

#[test]
fn functions_may_have_more_words_than_fields() {
    let text = "impl Slots {\n    /// Returns all slots.\n    fn iter(&self) {}\n    \
                /// Returns the slot.\n    fn slot(&self) {}\n}\n";
    assert_eq!(fillers(&Source::new("a.rs", text)), ["a.rs:4: Returns the slot. (fn slot(&self) {})"]);
}

#[test]
fn a_preposition_before_which_is_no_sentence() {
    let text = "//! Over which connection.\n\n/// To which replica.\n/// By which engine.\nlet a = 1;\n\
                /// The replica to which it is sent.\nlet b = 1;\n/// To whichever.\nlet c = 1;\n";
    let found = verbless(&Source::new("a.rs", text));
    assert_eq!(found, ["a.rs:1: Over which connection.", "a.rs:3: To which replica."]);
}
