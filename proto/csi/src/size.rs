//! Requested size of a volume.

use std::num::NonZeroU64;

use shorthorn_api::csi::v1;

use crate::error::CsiError;

/// The size limits of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeRange {
    /// The minimum size in bytes, if it is specified.
    pub required_bytes: Option<NonZeroU64>,
    /// The maximum size in bytes, if it is specified.
    pub limit_bytes: Option<NonZeroU64>,
}

/// Parses the requested size.
///
/// # Errors
/// [`CsiError::Invalid`] for a negative size, [`CsiError::OutOfRange`] if the limit is below the minimum.
pub fn size_range(range: Option<v1::CapacityRange>) -> Result<SizeRange, CsiError> {
    let v1::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
    let size = |bytes: i64| -> Result<Option<NonZeroU64>, CsiError> {
        let bytes = u64::try_from(bytes)
            .map_err(|_| CsiError::Invalid(format!("capacity_range: {bytes} is not a size")))?;
        Ok(NonZeroU64::new(bytes))
    };
    let (required_bytes, limit_bytes) = (size(required_bytes)?, size(limit_bytes)?);
    if let (Some(required), Some(limit)) = (required_bytes, limit_bytes)
        && required > limit
    {
        let message = format!("capacity_range: {required} bytes are required, and {limit} are the limit");
        return Err(CsiError::OutOfRange(message));
    }
    Ok(SizeRange { required_bytes, limit_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_to_fit_together() {
        let of =
            |required_bytes, limit_bytes| size_range(Some(v1::CapacityRange { required_bytes, limit_bytes }));
        let five = NonZeroU64::new(5);
        assert_eq!(of(5, 0).unwrap(), SizeRange { required_bytes: five, limit_bytes: None });
        assert_eq!(of(5, 5).unwrap(), SizeRange { required_bytes: five, limit_bytes: five });
        assert_eq!(of(0, 5).unwrap(), SizeRange { required_bytes: None, limit_bytes: five });
        assert_eq!(size_range(None).unwrap(), SizeRange::default());
        assert!(matches!(of(-1, 0), Err(CsiError::Invalid(_))));
        assert!(matches!(of(0, -1), Err(CsiError::Invalid(_))));
        assert!(matches!(of(5, 4), Err(CsiError::OutOfRange(_))));
    }
}
