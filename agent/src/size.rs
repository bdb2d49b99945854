//! Sizes as people write them: `1GiB`, `512Mi`, `1073741824`.

use std::str::FromStr;

use shorthorn_types::limits::{BLOCK_BYTES, MAX_VOLUME_BYTES};
use thiserror::Error;

/// The size of a volume: a multiple of 4096, and not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeSize(pub u64);

/// The reason why a text is no size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// The text is not a number with a known unit.
    #[error(
        "size {0:?}: write a whole number of bytes, or one with KiB, MiB, GiB or TiB, for instance 10GiB"
    )]
    Syntax(String),
    /// No volume can be so large.
    #[error("size {0:?} is too large: a volume has at most 16TiB")]
    TooLarge(String),
    /// No volume can have it.
    #[error("size {0:?} is not a multiple of 4096 bytes greater than 0")]
    Unaligned(String),
}

impl FromStr for VolumeSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<VolumeSize, SizeError> {
        let syntax = || SizeError::Syntax(text.to_owned());
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift = match unit {
            "" | "B" => 0,
            "Ki" | "KiB" => 10,
            "Mi" | "MiB" => 20,
            "Gi" | "GiB" => 30,
            "Ti" | "TiB" => 40,
            _ => return Err(syntax()),
        };
        if number.is_empty() {
            return Err(syntax());
        }
        let number: u64 = number.parse().map_err(|_| SizeError::TooLarge(text.to_owned()))?;
        let bytes = number.checked_mul(1 << shift).ok_or_else(|| SizeError::TooLarge(text.to_owned()))?;
        if bytes > MAX_VOLUME_BYTES {
            return Err(SizeError::TooLarge(text.to_owned()));
        }
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(SizeError::Unaligned(text.to_owned()));
        }
        Ok(VolumeSize(bytes))
    }
}

/// Formats `bytes` with the largest unit that leaves a whole number.
pub fn human(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (shift, unit) in units {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [("4096", 4096), ("4KiB", 4096), ("1Gi", 1 << 30), ("16TiB", 16 << 40)] {
            assert_eq!(text.parse(), Ok(VolumeSize(bytes)), "{text}");
            assert_eq!(human(bytes).parse(), Ok(VolumeSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_volume() {
        for text in ["", "GiB", "1G", "1.5GiB", "-1", "1 GiB", "1gib"] {
            assert!(matches!(text.parse::<VolumeSize>(), Err(SizeError::Syntax(_))), "{text}");
        }
        for text in ["0", "512", "4097", "0GiB"] {
            assert!(matches!(text.parse::<VolumeSize>(), Err(SizeError::Unaligned(_))), "{text}");
        }
        for text in ["99999999999999999999", "99999999TiB", "17TiB"] {
            assert!(matches!(text.parse::<VolumeSize>(), Err(SizeError::TooLarge(_))), "{text}");
        }
    }
}
