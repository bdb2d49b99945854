//! Requested size of a volume.

use shorthorn_api::csi::v1;

use crate::error::CsiError;

/// The size limits of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeRange {
    /// The minimum size in bytes; 0: unspecified.
    pub required_bytes: u64,
    /// The maximum size in bytes; 0: unspecified.
    pub limit_bytes: u64,
}

/// Parses the requested size.
///
/// # Errors
/// [`CsiError::Invalid`] for a negative size, [`CsiError::OutOfRange`] if the limit is below the minimum.
pub fn size_range(range: Option<v1::CapacityRange>) -> Result<SizeRange, CsiError> {
    let v1::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
    let size = |bytes: i64| {
        u64::try_from(bytes).map_err(|_| CsiError::Invalid(format!("capacity_range: {bytes} is not a size")))
    };
    let (required_bytes, limit_bytes) = (size(required_bytes)?, size(limit_bytes)?);
    if limit_bytes != 0 && required_bytes > limit_bytes {
        let message =
            format!("capacity_range: {required_bytes} bytes are required, and {limit_bytes} are the limit");
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
        assert_eq!(of(5, 0).unwrap(), SizeRange { required_bytes: 5, limit_bytes: 0 });
        assert_eq!(of(5, 5).unwrap(), SizeRange { required_bytes: 5, limit_bytes: 5 });
        assert_eq!(size_range(None).unwrap(), SizeRange::default());
        assert!(matches!(of(-1, 0), Err(CsiError::Invalid(_))));
        assert!(matches!(of(0, -1), Err(CsiError::Invalid(_))));
        assert!(matches!(of(5, 4), Err(CsiError::OutOfRange(_))));
    }
}
