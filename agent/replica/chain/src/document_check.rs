//! A check in a JSON document, as its last field: readers that know nothing of it, Longhorn among them, skip
//! the field. A document without a check is accepted: Longhorn or an older version of ours has written it.

use crate::error::ChainError;

const FIELD: &str = "ShorthornCheck";

/// Returns the document of an object with at least one field, which ends in `}` and a newline, with a check
/// over all of it.
#[must_use]
pub fn with_check(mut document: Vec<u8>) -> Vec<u8> {
    debug_assert!(document.ends_with(END));
    let check = field(&document);
    document.truncate(document.len() - END.len());
    document.extend_from_slice(check.as_bytes());
    document.extend_from_slice(END);
    document
}

/// Returns the document `name` without its check, if it has one.
///
/// # Errors
/// [`ChainError::Check`]: the document has changed since it was written.
pub fn without_check(name: &str, bytes: &[u8]) -> Result<Vec<u8>, ChainError> {
    let wrong = || ChainError::Check { name: name.to_owned(), field: FIELD };
    // A quote in a string has a backslash before it, so this is not part of a string.
    let key = format!("\"{FIELD}\"");
    if !bytes.windows(key.len()).any(|window| window == key.as_bytes()) {
        return Ok(bytes.to_vec());
    }
    let length = field(&[]).len() + END.len();
    let at = bytes.len().checked_sub(length).ok_or_else(wrong)?;
    let document = [&bytes[..at], END].concat();
    // The check is at the end, unless another program has reformatted the document.
    if with_check(document.clone()) == bytes { Ok(document) } else { Err(wrong()) }
}

const END: &[u8] = b"}\n";

fn field(document: &[u8]) -> String {
    format!(",\"{FIELD}\":\"{:08x}\"", crc32c::crc32c(document))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &[u8] =
        b"{\"Parent\":\"volume-snap-a.img\",\"Labels\":{\"\\\"ShorthornCheck\\\"\":\"1\"}}\n";

    #[test]
    fn a_check_is_removed_again() {
        let checked = with_check(DOCUMENT.to_vec());
        let text = String::from_utf8(checked.clone()).unwrap();
        assert!(text.ends_with("\"}\n") && text.contains(",\"ShorthornCheck\":\""), "{text}");
        assert_eq!(without_check("x", &checked).unwrap(), DOCUMENT);
        assert_eq!(without_check("x", DOCUMENT).unwrap(), DOCUMENT, "a check is optional");
    }

    #[test]
    fn a_changed_document_is_refused_by_name() {
        let text = String::from_utf8(with_check(DOCUMENT.to_vec())).unwrap();
        let edited = text.replace("snap-a", "snap-b");
        let formatted = text.replace("\":\"", "\": \"");
        let shorter = text.replace("\"}\n", "\"}");
        let moved = format!("{{\"ShorthornCheck\":\"00000000\",{}", &text[1..]);
        for changed in [edited, formatted, shorter, moved, "\"ShorthornCheck\"".to_owned()] {
            let error = without_check("volume-snap-b.img.meta", changed.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("volume-snap-b.img.meta") && error.contains("ShorthornCheck"), "{error}");
        }
    }
}
