//! Computes the size of a volume from the caller's minimum and maximum.

use std::num::NonZeroU64;

use shorthorn_types::limits::BLOCK_BYTES;
use thiserror::Error;

use crate::requests::MAX_VOLUME_BYTES;

/// The default size of a volume in bytes.
pub const DEFAULT_VOLUME_BYTES: u64 = 10 << 30;

/// The reason why no size fits.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// The size is beyond the maximum of any volume.
    #[error("{0} bytes are required, and the largest volume has {MAX_VOLUME_BYTES}")]
    TooLarge(u64),
    /// Sizes come in steps.
    #[error(
        "no valid size from {required_bytes} to {limit_bytes} bytes: sizes are multiples of {BLOCK_BYTES}"
    )]
    NoStep {
        /// The minimum in bytes.
        required_bytes: u64,
        /// The maximum in bytes.
        limit_bytes: u64,
    },
    /// Volumes do not shrink.
    #[error("the volume has {has_bytes} bytes, and {limit_bytes} are the limit: it cannot become smaller")]
    Shrinks {
        /// The current size in bytes.
        has_bytes: u64,
        /// The maximum in bytes.
        limit_bytes: u64,
    },
}

/// Returns the size of a new volume: the minimum, rounded up to whole steps.
///
/// # Errors
/// [`SizeError`].
pub fn size_of_new(
    required_bytes: Option<NonZeroU64>,
    limit_bytes: Option<NonZeroU64>,
) -> Result<u64, SizeError> {
    match (required_bytes, limit_bytes.map(NonZeroU64::get)) {
        (None, Some(limit_bytes)) if limit_bytes < DEFAULT_VOLUME_BYTES => {
            let size = limit_bytes / BLOCK_BYTES * BLOCK_BYTES;
            if size == 0 { Err(SizeError::NoStep { required_bytes: 0, limit_bytes }) } else { Ok(size) }
        }
        _ => in_steps(required_bytes.map_or(DEFAULT_VOLUME_BYTES, NonZeroU64::get), limit_bytes),
    }
}

/// Returns true if a volume of that size satisfies the request.
#[must_use]
pub fn fits(has_bytes: u64, required_bytes: Option<NonZeroU64>, limit_bytes: Option<NonZeroU64>) -> bool {
    required_bytes.is_none_or(|required| has_bytes >= required.get())
        && limit_bytes.is_none_or(|limit| has_bytes <= limit.get())
}

/// Returns the new size of the volume, which is the current one if that suffices.
///
/// # Errors
/// [`SizeError`].
pub fn size_of_grown(
    has_bytes: u64,
    required_bytes: Option<NonZeroU64>,
    limit_bytes: Option<NonZeroU64>,
) -> Result<u64, SizeError> {
    if let Some(limit) = limit_bytes.filter(|limit| has_bytes > limit.get()) {
        return Err(SizeError::Shrinks { has_bytes, limit_bytes: limit.get() });
    }
    match required_bytes.map(NonZeroU64::get) {
        Some(required_bytes) if required_bytes > has_bytes => in_steps(required_bytes, limit_bytes),
        _ => Ok(has_bytes),
    }
}

fn in_steps(wanted_bytes: u64, limit_bytes: Option<NonZeroU64>) -> Result<u64, SizeError> {
    if wanted_bytes > MAX_VOLUME_BYTES {
        return Err(SizeError::TooLarge(wanted_bytes));
    }
    let size = wanted_bytes.next_multiple_of(BLOCK_BYTES);
    if let Some(limit) = limit_bytes.filter(|limit| size > limit.get()) {
        return Err(SizeError::NoStep { required_bytes: wanted_bytes, limit_bytes: limit.get() });
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the size for limits as a caller gives them: 0 is unspecified.
    fn size_of_new(required_bytes: u64, limit_bytes: u64) -> Result<u64, SizeError> {
        super::size_of_new(NonZeroU64::new(required_bytes), NonZeroU64::new(limit_bytes))
    }

    /// Returns the size as [`size_of_new`] does.
    fn size_of_grown(has_bytes: u64, required_bytes: u64, limit_bytes: u64) -> Result<u64, SizeError> {
        super::size_of_grown(has_bytes, NonZeroU64::new(required_bytes), NonZeroU64::new(limit_bytes))
    }

    #[test]
    fn sizes_of_new_volumes() {
        assert_eq!(size_of_new(0, 0), Ok(DEFAULT_VOLUME_BYTES));
        assert_eq!(size_of_new(1, 0), Ok(4096));
        assert_eq!(size_of_new(4097, 8192), Ok(8192));
        assert_eq!(size_of_new(0, 1 << 30), Ok(1 << 30));
        assert_eq!(size_of_new(0, 5000), Ok(4096));
        assert_eq!(size_of_new(0, u64::MAX), Ok(DEFAULT_VOLUME_BYTES));
        assert_eq!(size_of_new(MAX_VOLUME_BYTES, 0), Ok(MAX_VOLUME_BYTES));
        assert!(matches!(size_of_new(MAX_VOLUME_BYTES + 1, 0), Err(SizeError::TooLarge(_))));
        assert!(matches!(size_of_new(4097, 8191), Err(SizeError::NoStep { .. })));
        assert!(matches!(size_of_new(0, 4095), Err(SizeError::NoStep { .. })));
    }

    #[test]
    fn sizes_of_grown_volumes() {
        assert_eq!(size_of_grown(8192, 4096, 0), Ok(8192));
        assert_eq!(size_of_grown(8192, 8193, 0), Ok(12288));
        assert_eq!(size_of_grown(8192, 0, 8192), Ok(8192));
        assert!(matches!(size_of_grown(8192, 4096, 4096), Err(SizeError::Shrinks { .. })));
        assert!(matches!(size_of_grown(8192, 8193, 8194), Err(SizeError::NoStep { .. })));
        assert!(matches!(size_of_grown(8192, u64::MAX, 0), Err(SizeError::TooLarge(_))));
    }

    proptest! {
        #[test]
        fn a_size_always_fits_the_request(
            required in 0u64..1 << 45, limit in prop_oneof![Just(0), 0u64..1 << 45], has in 1u64..1 << 32,
        ) {
            for size in [size_of_new(required, limit), size_of_grown(has * BLOCK_BYTES, required, limit)] {
                let Ok(size) = size else { continue };
                let [required, limit] = [required, limit].map(NonZeroU64::new);
                prop_assert!(fits(size, required, limit), "{}", size);
                prop_assert!(size > 0 && size.is_multiple_of(BLOCK_BYTES) && size <= MAX_VOLUME_BYTES);
            }
        }
    }
}
