//! Bytes as hexadecimal digits in lower case, so that the same bytes have one text.

/// Returns the digits of these bytes.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses the bytes of lower-case digits; none if the text has another character or an odd length.
#[must_use]
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs.iter().map(|[high, low]| Some(value(*high)? << 4 | value(*low)?)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_pairs_of_lower_case_digits_are_parsed() {
        assert_eq!(from_hex("00ff3c"), Some(vec![0, 0xff, 0x3c]));
        assert_eq!(from_hex(""), Some(Vec::new()));
        for bad in ["0", "000", "0A", "0g", " 0", "+1", "é"] {
            assert_eq!(from_hex(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn digits_are_parsed_to_the_same_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let text = hex(&bytes);
            prop_assert_eq!(text.len(), 2 * bytes.len());
            prop_assert_eq!(from_hex(&text), Some(bytes));
        }
    }
}
