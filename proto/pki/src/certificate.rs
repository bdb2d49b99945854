//! Reading certificates of this cluster. Reading is not verification: [`crate::Trust::verify`] does that.

use rustls::pki_types::UnixTime;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use crate::role::{CertificateName, CertificateNameError};
use crate::serial::Serial;

/// The longest certificate that is read.
const MAX_BYTES: usize = 16 << 10;

/// The content of a certificate that counts here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Distinguishes it from the others of its CA.
    pub serial: Serial,
    /// The identity of its holder.
    pub name: CertificateName,
    /// Seconds since 1970 from which it is valid.
    pub not_before: u64,
    /// Seconds since 1970 until which it is valid.
    pub not_after: u64,
    /// The public key of its holder, as SubjectPublicKeyInfo in DER.
    pub public: Vec<u8>,
}

/// A certificate cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CertificateError {
    /// Not a certificate, or too long.
    #[error("the certificate cannot be read: {0}")]
    Read(&'static str),
    /// A certificate of another kind.
    #[error("the certificate has {0} names of the form URI: a certificate of Shorthorn has one")]
    Names(usize),
    /// A certificate of another kind.
    #[error("the certificate is not one of Shorthorn: {0}")]
    Name(#[from] CertificateNameError),
}

impl Certificate {
    /// Reads a certificate in DER.
    ///
    /// # Errors
    /// [`CertificateError`] says why it is not one of Shorthorn.
    pub fn from_der(der: &[u8]) -> Result<Certificate, CertificateError> {
        if der.len() > MAX_BYTES {
            return Err(CertificateError::Read("more than 16 KiB"));
        }
        let (rest, parsed) =
            X509Certificate::from_der(der).map_err(|_| CertificateError::Read("no X.509 in DER"))?;
        if !rest.is_empty() {
            return Err(CertificateError::Read("bytes after its end"));
        }
        let seconds = |time: x509_parser::time::ASN1Time| {
            u64::try_from(time.timestamp()).map_err(|_| CertificateError::Read("a date before 1970"))
        };
        Ok(Certificate {
            serial: Serial::from_bytes(parsed.raw_serial())
                .ok_or(CertificateError::Read("a serial number that no CA may give"))?,
            name: name(&parsed)?,
            not_before: seconds(parsed.validity().not_before)?,
            not_after: seconds(parsed.validity().not_after)?,
            public: parsed.public_key().raw.to_vec(),
        })
    }

    /// Returns true if the certificate is expired.
    #[must_use]
    pub fn is_expired(&self, now: UnixTime) -> bool {
        now.as_secs() > self.not_after
    }

    /// Returns true if it is to be renewed: half of its life is over, or its life has not begun. Then it was
    /// made while the clock was wrong.
    #[must_use]
    pub fn is_due(&self, now: UnixTime) -> bool {
        now.as_secs() < self.not_before || self.is_older_than(2, now)
    }

    /// Returns true if it should have been renewed: three quarters of its life are over.
    #[must_use]
    pub fn is_overdue(&self, now: UnixTime) -> bool {
        self.is_older_than(3, now)
    }

    fn is_older_than(&self, quarters: u64, now: UnixTime) -> bool {
        let life = self.not_after.saturating_sub(self.not_before);
        now.as_secs() >= self.not_before + life / 4 * quarters
    }
}

fn name(parsed: &X509Certificate<'_>) -> Result<CertificateName, CertificateError> {
    let names = parsed
        .subject_alternative_name()
        .map_err(|_| CertificateError::Read("names that cannot be read, or twice"))?
        .ok_or(CertificateError::Names(0))?;
    let uris: Vec<&str> = names
        .value
        .general_names
        .iter()
        .filter_map(|name| if let GeneralName::URI(uri) = name { Some(*uri) } else { None })
        .collect();
    match uris.as_slice() {
        [uri] => Ok(uri.parse()?),
        others => Err(CertificateError::Names(others.len())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_certificate_is_due_after_half_of_its_life_or_before_it() {
        let certificate = Certificate {
            serial: "01".parse().unwrap(),
            name: "shorthorn://c/controller".parse().unwrap(),
            not_before: 1000,
            not_after: 1400,
            public: Vec::new(),
        };
        let at = |seconds| UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        let is_due = |seconds| certificate.is_due(at(seconds));
        assert_eq!([999, 1000, 1199, 1200, 1500].map(is_due), [true, false, false, true, true]);
        let is_overdue = |seconds| certificate.is_overdue(at(seconds));
        assert_eq!([999, 1200, 1299, 1300, 1500].map(is_overdue), [false, false, false, true, true]);
    }

    proptest! {
        #[test]
        fn every_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            prop_assert!(Certificate::from_der(&bytes).is_err());
        }
    }
}
