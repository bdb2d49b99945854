//! Doc comments that say nothing.

use super::{Source, doc_marker};

/// Words that say nothing beside the words of an item.
const FILLING: [&str; 8] = ["id", "name", "number", "of", "return", "returns", "these", "this"];

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

/// Returns doc comments of one line that have no other word than those of the item below them and its type.
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
        let known = words(item);
        let is_known = |word: &String| FILLING.contains(&word.as_str()) || known.contains(word);
        if !said.is_empty() && said.iter().all(is_known) {
            found.push(source.at(at, &format!("{text} ({item})")));
        }
    }
    found
}
