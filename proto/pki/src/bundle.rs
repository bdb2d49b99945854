//! A PEM file with everything that an identity needs: private key, certificate, CA, and the trust list.

use std::fmt;
use std::sync::Arc;

use pem::{EncodeConfig, LineEnding, Pem};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use thiserror::Error;

use crate::certificate::{Certificate, CertificateError};
use crate::key::PrivateKey;
use crate::request::CertificateRequestError;
use crate::trust::Trust;

/// The longest bundle that is read: room for the largest list of revoked certificates.
pub(crate) const BUNDLE_MAX_BYTES: usize = 2 << 20;
const KEY_TAG: &str = "PRIVATE KEY";
const CERTIFICATE_TAG: &str = "CERTIFICATE";
const TRUST_TAG: &str = "SHORTHORN TRUST";
/// Leaf and CA.
const CHAIN_MAX: usize = 4;

/// A private key and its certificate, followed by the certificate of its CA.
#[derive(Clone)]
pub struct Identity {
    key: Vec<u8>,
    chain: Vec<CertificateDer<'static>>,
    certificate: Certificate,
    pub(crate) certified: Arc<CertifiedKey>,
}

/// An identity and the CAs that it trusts.
#[derive(Clone, Debug)]
pub struct Bundle {
    /// None: not enrolled yet.
    pub identity: Option<Identity>,
    /// The trusted CAs.
    pub trust: Trust,
}

/// A bundle cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BundleError {
    /// Not PEM.
    #[error("not a PEM file: {0}")]
    Pem(String),
    /// A part is missing, or is there twice.
    #[error("the PEM file has {found} sections {tag:?}, expected {expected}")]
    Sections {
        /// The label between the dashes of PEM.
        tag: &'static str,
        /// Number of sections in the file.
        found: usize,
        /// The allowed numbers, such as "1 to 4".
        expected: &'static str,
    },
    /// The trust list cannot be read.
    #[error("the trust list cannot be read: {0}")]
    Trust(String),
    /// The certificate cannot be read.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The private key cannot be read.
    #[error(transparent)]
    Key(#[from] CertificateRequestError),
    /// Key and certificate are of different origin.
    #[error("the private key does not belong to the certificate: {0}")]
    Pair(String),
    /// The identity is of another cluster than the CAs.
    #[error("the certificate and the trust list belong to different clusters")]
    Cluster,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Identity {
    /// The pair of this key and this chain: leaf first, then its CA.
    ///
    /// # Errors
    /// [`BundleError`] if they do not fit.
    pub fn new(key: &PrivateKey, chain: Vec<CertificateDer<'static>>) -> Result<Identity, BundleError> {
        Identity::from_pkcs8(key.to_pkcs8().to_vec(), chain)
    }

    fn from_pkcs8(key: Vec<u8>, chain: Vec<CertificateDer<'static>>) -> Result<Identity, BundleError> {
        let Some(leaf) = chain.first().filter(|_| chain.len() <= CHAIN_MAX) else {
            let (tag, found) = (CERTIFICATE_TAG, chain.len());
            return Err(BundleError::Sections { tag, found, expected: "1 to 4" });
        };
        let certificate = Certificate::from_der(leaf)?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.clone()));
        // Compares the public keys.
        let certified = CertifiedKey::from_der(chain.clone(), private, &default_provider())
            .map_err(|error| BundleError::Pair(error.to_string()))?;
        Ok(Identity { key, chain, certificate, certified: Arc::new(certified) })
    }

    /// The content of its certificate.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// The certificate and its CA.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// Returns the private key.
    ///
    /// # Errors
    /// [`CertificateRequestError::Key`] if the key is of a kind that this program cannot use for requests.
    pub fn key(&self) -> Result<PrivateKey, CertificateRequestError> {
        PrivateKey::from_pkcs8(&self.key)
    }
}

/// Reads the certificates of a PEM text: leaf first, then its CA.
///
/// # Errors
/// [`BundleError`].
pub fn chain_from_pem(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, BundleError> {
    let blocks = sections(text)?;
    let certificates = blocks.into_iter().filter(|block| block.tag() == CERTIFICATE_TAG);
    Ok(certificates.map(|block| CertificateDer::from(block.into_contents())).collect())
}

/// Writes certificates as PEM.
#[must_use]
pub fn chain_to_pem(chain: &[CertificateDer<'_>]) -> String {
    let blocks: Vec<Pem> = chain.iter().map(|der| Pem::new(CERTIFICATE_TAG, der.to_vec())).collect();
    pem::encode_many_config(&blocks, EncodeConfig::new().set_line_ending(LineEnding::LF))
}

fn sections(text: &[u8]) -> Result<Vec<Pem>, BundleError> {
    if text.len() > BUNDLE_MAX_BYTES {
        return Err(BundleError::Pem(format!("more than {BUNDLE_MAX_BYTES} bytes")));
    }
    pem::parse_many(text).map_err(|error| BundleError::Pem(error.to_string()))
}

impl Bundle {
    /// Reads a bundle.
    ///
    /// # Errors
    /// [`BundleError`] names the problem.
    pub fn from_pem(text: &[u8]) -> Result<Bundle, BundleError> {
        let (mut keys, mut chain, mut trusts) = (Vec::new(), Vec::new(), Vec::new());
        for block in sections(text)? {
            match block.tag() {
                KEY_TAG => keys.push(block.into_contents()),
                CERTIFICATE_TAG => chain.push(CertificateDer::from(block.into_contents())),
                TRUST_TAG => trusts.push(block.into_contents()),
                _ => {}
            }
        }
        let [trust] = trusts.as_slice() else {
            return Err(BundleError::Sections { tag: TRUST_TAG, found: trusts.len(), expected: "1" });
        };
        let trust: Trust =
            serde_json::from_slice(trust).map_err(|error| BundleError::Trust(error.to_string()))?;
        let found = keys.len();
        let identity = match keys.pop() {
            None if chain.is_empty() => None,
            Some(key) if keys.is_empty() => Some(Identity::from_pkcs8(key, chain)?),
            _ => return Err(BundleError::Sections { tag: KEY_TAG, found, expected: "1" }),
        };
        let bundle = Bundle { identity, trust };
        bundle.check()?;
        Ok(bundle)
    }

    /// Checks that the identity and the trust list belong together.
    ///
    /// # Errors
    /// [`BundleError::Cluster`].
    pub fn check(&self) -> Result<(), BundleError> {
        let of = self.identity.as_ref().map(|identity| &identity.certificate.name.cluster);
        if of.is_some_and(|cluster| cluster != self.trust.cluster()) {
            return Err(BundleError::Cluster);
        }
        Ok(())
    }

    /// The bundle as PEM, private key included.
    ///
    /// # Errors
    /// [`BundleError::Trust`] never happens for a list that could be read.
    pub fn to_pem(&self) -> Result<String, BundleError> {
        let mut blocks = Vec::new();
        if let Some(identity) = &self.identity {
            blocks.push(Pem::new(KEY_TAG, identity.key.clone()));
            let chain = identity.chain.iter();
            blocks.extend(chain.map(|der| Pem::new(CERTIFICATE_TAG, der.to_vec())));
        }
        let trust = serde_json::to_vec(&self.trust).map_err(|error| BundleError::Trust(error.to_string()))?;
        blocks.push(Pem::new(TRUST_TAG, trust));
        Ok(pem::encode_many_config(&blocks, EncodeConfig::new().set_line_ending(LineEnding::LF)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Authority, ClusterId, Role, UnixTime};

    fn bundle(role: &Role) -> Bundle {
        let cluster = ClusterId::new("c0ffee").unwrap();
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(1_800_000_000));
        let mut authority = Authority::create(cluster, now).unwrap();
        let identity = authority.issue(role, now).unwrap();
        Bundle { identity: Some(identity), trust: authority.trust().unwrap() }
    }

    #[test]
    fn a_bundle_is_read_as_it_was_written() {
        let written = bundle(&Role::Controller);
        let text = written.to_pem().unwrap();
        let read = Bundle::from_pem(text.as_bytes()).unwrap();
        assert_eq!(read.to_pem().unwrap(), text);
        assert_eq!(read.trust, written.trust);
        assert_eq!(read.identity.unwrap().certificate().name.role, Role::Controller);
        let identity = written.identity.unwrap();
        assert!(
            !format!("{identity:?}")
                .contains(&format!("{:?}", &identity.key[40..56]).replace(['[', ']'], ""))
        );
    }

    #[test]
    fn the_key_of_another_certificate_is_refused() {
        let (one, other) = (bundle(&Role::Controller), bundle(&Role::Controller));
        let (mut mixed, other) = (one.identity.unwrap(), other.identity.unwrap());
        mixed.key = other.key;
        let mixed = Bundle { identity: Some(mixed), trust: one.trust };
        let read = Bundle::from_pem(mixed.to_pem().unwrap().as_bytes());
        assert!(matches!(read, Err(BundleError::Pair(_))), "{read:?}");
    }

    #[test]
    fn a_bundle_without_one_of_its_parts_is_refused() {
        let whole = bundle(&Role::Controller).to_pem().unwrap();
        let blocks = pem::parse_many(&whole).unwrap();
        assert_eq!(blocks.len(), 4, "key, certificate, CA, trust list");
        for left_out in [0, 1, 3] {
            let mut some = blocks.clone();
            some.remove(left_out);
            assert!(Bundle::from_pem(pem::encode_many(&some).as_bytes()).is_err(), "without {left_out}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_changed_bundle_is_never_mixed(at in any::<proptest::sample::Index>(), byte in any::<u8>()) {
            let whole = bundle(&Role::node("node-a").unwrap());
            let mut text = whole.to_pem().unwrap().into_bytes();
            let at = at.index(text.len());
            prop_assert!(Bundle::from_pem(&text[..at]).is_err() || at + 1 >= text.len());
            text[at] = byte;
            if let Ok(read) = Bundle::from_pem(&text) {
                // Only a change of no meaning, or of the trust list, is read; key and certificate still fit.
                if let Some(identity) = read.identity {
                    let key = identity.key().unwrap();
                    prop_assert_eq!(key.public(), identity.certificate().public.clone());
                }
            }
        }

        #[test]
        fn every_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            prop_assert!(Bundle::from_pem(&bytes).is_err());
        }
    }
}
