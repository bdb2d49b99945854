//! Serial numbers of certificates.

use std::fmt;
use std::str::FromStr;

use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use shorthorn_types::{from_hex, hex};

/// RFC 5280 permits 20 bytes.
const MAX_BYTES: usize = 20;
const DRAWN_BYTES: usize = 16;

/// The serial number of a certificate, without leading zeros; shown as hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Serial(Vec<u8>);

impl Serial {
    /// The serial of these bytes, as a certificate has them. None: no certificate may have it.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Serial> {
        let first = bytes.iter().position(|byte| *byte != 0)?;
        // A positive number may begin with one byte of zero.
        let digits = bytes.get(first..)?;
        (digits.len() <= MAX_BYTES).then(|| Serial(digits.to_vec()))
    }

    /// A random serial.
    pub(crate) fn draw() -> Result<Serial, ring::error::Unspecified> {
        let mut bytes = [0; DRAWN_BYTES];
        SystemRandom::new().fill(&mut bytes)?;
        // Positive, and never with a leading zero.
        bytes[0] = (bytes[0] & 0x7f) | 0x40;
        Ok(Serial(bytes.to_vec()))
    }

    /// Returns the number in big-endian order.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Serial {
    type Err = String;
    fn from_str(text: &str) -> Result<Serial, String> {
        let bytes = from_hex(&text.to_ascii_lowercase().replace(':', ""));
        let serial = bytes.as_deref().and_then(Serial::from_bytes);
        let shown: String = text.chars().take(80).collect();
        serial.ok_or_else(|| {
            format!("{shown:?} is not a serial number: use the hexadecimal digits of tls show")
        })
    }
}

impl TryFrom<String> for Serial {
    type Error = String;
    fn try_from(text: String) -> Result<Serial, String> {
        text.parse()
    }
}

impl From<Serial> for String {
    fn from(serial: Serial) -> String {
        serial.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_compared_without_leading_zeros() {
        let serial = Serial::from_bytes(&[0, 0x8f, 1]).unwrap();
        assert_eq!(serial, Serial::from_bytes(&[0x8f, 1]).unwrap());
        assert_eq!(serial, "8F:01".parse().unwrap());
        assert_eq!(serial.to_string(), "8f01");
        for bad in ["", "0", "00", "8f0", "xy", "é", &"11".repeat(21)] {
            assert!(bad.parse::<Serial>().is_err(), "{bad}");
        }
        assert_ne!(Serial::draw().unwrap(), Serial::draw().unwrap());
    }
}
