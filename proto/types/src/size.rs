//! Sizes as people read and write them: `1.5 GiB`, `10GiB`, `512Mi`, `4096`.

use std::fmt;

use thiserror::Error;

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Displays a number of bytes in the largest IEC unit, with one decimal unless it is 0. The rest is cut off.
#[derive(Clone, Copy, Debug)]
pub struct HumanBytes(pub u64);

/// Displays a number of bytes in GiB with one decimal, so that two of them can be compared. The rest is cut
/// off.
#[derive(Clone, Copy, Debug)]
pub struct HumanGib(pub u64);

/// The reason why a text is not a number of bytes.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParseBytesError {
    /// The text is not a whole number with a known unit.
    #[error(
        "{0:?} is not a size: write a whole number of bytes, or one with KiB, MiB, GiB or TiB, like 10GiB"
    )]
    Syntax(String),
    /// The number does not fit into 64 bits.
    #[error("size {0:?} is too large")]
    TooLarge(String),
}

fn tenths(bytes: u64, shift: u32) -> (u128, u128) {
    let tenths = (u128::from(bytes) * 10) >> shift;
    (tenths / 10, tenths % 10)
}

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, shift) = UNITS.iter().find(|(_, shift)| self.0 >> shift > 0).unwrap_or(&("B", 0));
        match tenths(self.0, *shift) {
            (whole, 0) => write!(f, "{whole} {name}"),
            (whole, tenth) => write!(f, "{whole}.{tenth} {name}"),
        }
    }
}

impl fmt::Display for HumanGib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, tenth) = tenths(self.0, 30);
        write!(f, "{whole}.{tenth} GiB")
    }
}

/// Reads a number of bytes: a whole number, and a unit with or without its `B`.
///
/// # Errors
/// [`ParseBytesError`].
pub fn parse_bytes(text: &str) -> Result<u64, ParseBytesError> {
    let syntax = || ParseBytesError::Syntax(text.to_owned());
    let too_large = || ParseBytesError::TooLarge(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let is_unit = |name: &str, unit: &str| unit == name || Some(unit) == name.strip_suffix('B');
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        unit => UNITS.iter().find(|(name, _)| is_unit(name, unit)).ok_or_else(syntax)?.1,
    };
    if number.is_empty() {
        return Err(syntax());
    }
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1023.9 KiB"),
            (10 << 30, "10 GiB"),
            (5 << 50, "5120 TiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(HumanBytes(bytes).to_string(), text);
        }
        for (bytes, text) in [(0, "0.0 GiB"), (3 << 29, "1.5 GiB"), ((50 << 30) - 1, "49.9 GiB")] {
            assert_eq!(HumanGib(bytes).to_string(), text);
        }
    }

    #[test]
    fn reads_each_unit_and_refuses_others() {
        for (text, bytes) in [
            ("4096", 4096),
            ("7B", 7),
            ("1KiB", 1024),
            ("10 GiB", 10 << 30),
            ("5Gi", 5 << 30),
            ("16TiB", 16 << 40),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "10GB", "10gib", "1G", "-1", "1.5GiB", "10Gi B"] {
            assert_eq!(parse_bytes(text), Err(ParseBytesError::Syntax(text.to_owned())));
        }
        for text in ["99999999999999999999", "99999999TiB"] {
            assert_eq!(parse_bytes(text), Err(ParseBytesError::TooLarge(text.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn a_whole_number_of_units_is_read_back(number in 1_u64..1024, unit in 0_u32..5) {
            let bytes = number << (10 * unit);
            prop_assert_eq!(parse_bytes(&HumanBytes(bytes).to_string()), Ok(bytes));
        }
    }
}
