use anyhow::{Result, ensure};

/// Checks that a text has all these words.
///
/// # Errors
/// A word is missing; the message has the text.
pub fn ensure_has(text: &str, words: &[&str]) -> Result<()> {
    let missing = words.iter().find(|word| !text.contains(**word));
    ensure!(missing.is_none(), "{missing:?} is not in:\n{text}");
    Ok(())
}
