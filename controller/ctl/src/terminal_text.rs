//! Texts of nodes, replicas and objects on a terminal.
//!
//! Agents and users of the API choose a part of these texts. A control character among them could move the
//! cursor, or change what the terminal shows of other lines.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns the text with an escape sequence in place of each control character, except for line breaks and
/// tabs.
pub fn terminal_text(text: &str) -> Cow<'_, str> {
    let is_hidden = |character: char| character.is_control() && !matches!(character, '\n' | '\t');
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if is_hidden(character) {
            // Also an escape sequence of JSON, and of YAML in double quotes.
            let _ = write!(shown, "\\u{:04x}", u32::from(character));
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_obeyed() {
        assert_eq!(terminal_text("gone\u{1b}[2J\u{9b}1A\r\u{7f}"), r"gone\u001b[2J\u009b1A\u000d\u007f");
        let plain = "NODE\tREADY\nnode-ä\tno";
        assert!(matches!(terminal_text(plain), Cow::Borrowed(text) if text == plain));
    }
}
