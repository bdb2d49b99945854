use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Number of a block device, as Linux shows it: `major:minor`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The number of the driver; 0 for file systems without a device.
    pub major: u32,
    /// The index of the device in the driver.
    pub minor: u32,
}

impl DeviceNumber {
    /// Splits an `rdev` or `dev` of stat(2). Its bits are in the order of major(3) and minor(3).
    #[must_use]
    pub fn of(number: u64) -> DeviceNumber {
        let low_bits = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or_default();
        let (low, high) = (low_bits(number), low_bits(number >> 32));
        let major = (low >> 8 & 0xfff) | (high & !0xfff);
        let minor = (low & 0xff) | (low_bits(number >> 12) & !0xff);
        DeviceNumber { major, minor }
    }

    /// Joins both parts as stat(2) and mknod(2) have them. Its bits are in the order of makedev(3).
    #[must_use]
    pub fn raw(self) -> u64 {
        let (major, minor) = (u64::from(self.major), u64::from(self.minor));
        (major & 0xfff) << 8 | (major & !0xfff) << 32 | (minor & 0xff) | (minor & !0xff) << 12
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl fmt::Debug for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The text is not `major:minor`.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a device number such as 259:3")]
pub struct DeviceNumberError(String);

impl FromStr for DeviceNumber {
    type Err = DeviceNumberError;

    fn from_str(text: &str) -> Result<DeviceNumber, DeviceNumberError> {
        let parts = text.trim_end().split_once(':');
        let number = parts.and_then(|(major, minor)| {
            Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
        });
        number.ok_or_else(|| DeviceNumberError(text.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_as_sysfs_writes_it() {
        assert_eq!("259:3\n".parse(), Ok(DeviceNumber { major: 259, minor: 3 }));
        for text in ["", "259", "1:-2", "a:b"] {
            assert_eq!(text.parse::<DeviceNumber>(), Err(DeviceNumberError(text.to_owned())));
        }
        assert_eq!(DeviceNumber { major: 8, minor: 1 }.to_string(), "8:1");
    }

    #[test]
    fn the_bits_of_stat_are_those_of_the_kernel() {
        let number = |major, minor| DeviceNumber { major, minor };
        // As makedev(3) of glibc joins them.
        for (bits, expected) in [
            (0x801, number(8, 1)),
            (0x1_0303, number(259, 3)),
            (0xfff0_03f0, number(3, 0xf_fff0)),
            (0xfff01, number(0xfff, 1)),
            (u64::MAX, number(u32::MAX, u32::MAX)),
        ] {
            assert_eq!((DeviceNumber::of(bits), expected.raw()), (expected, bits), "{bits:#x}");
        }
    }
}
