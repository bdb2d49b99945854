//! The size of a volume on the command line.

use std::str::FromStr;

use shorthorn_types::limits::{BLOCK_BYTES, MAX_VOLUME_BYTES};
use shorthorn_types::{ParseBytesError, parse_bytes};
use thiserror::Error;

/// The size of a volume: a multiple of 4096, and not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeArgument(pub u64);

/// The reason why a text is not the size of a volume.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeArgumentError {
    /// The text is not a number of bytes.
    #[error(transparent)]
    Syntax(#[from] ParseBytesError),
    /// No volume can be so large.
    #[error("size {0:?} is too large: a volume has at most 16TiB")]
    TooLarge(String),
    /// No volume can have it.
    #[error("size {0:?} is not a multiple of 4096 bytes greater than 0")]
    Unaligned(String),
}

impl FromStr for SizeArgument {
    type Err = SizeArgumentError;

    fn from_str(text: &str) -> Result<SizeArgument, SizeArgumentError> {
        let bytes = parse_bytes(text)?;
        if bytes > MAX_VOLUME_BYTES {
            return Err(SizeArgumentError::TooLarge(text.to_owned()));
        }
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(SizeArgumentError::Unaligned(text.to_owned()));
        }
        Ok(SizeArgument(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_whole_blocks_up_to_the_limit() {
        for (text, bytes) in [("4096", 4096), ("1Gi", 1 << 30), ("16TiB", 16 << 40)] {
            assert_eq!(text.parse(), Ok(SizeArgument(bytes)), "{text}");
        }
        assert!(matches!("1G".parse::<SizeArgument>(), Err(SizeArgumentError::Syntax(_))));
        for text in ["0", "512", "4097", "0GiB"] {
            assert!(matches!(text.parse::<SizeArgument>(), Err(SizeArgumentError::Unaligned(_))), "{text}");
        }
        assert!(matches!("17TiB".parse::<SizeArgument>(), Err(SizeArgumentError::TooLarge(_))));
    }
}
