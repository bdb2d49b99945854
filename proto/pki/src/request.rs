//! Certificate signing requests. Of a request, the CA takes the public key and nothing else.

use rcgen::{PublicKeyData, SubjectPublicKeyInfo};
use thiserror::Error;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

/// The longest request that is read.
const MAX_BYTES: usize = 16 << 10;

const PEM_TAG: &str = "CERTIFICATE REQUEST";

/// A request whose signature proves that its sender has the private key.
#[derive(Clone, Debug)]
pub struct CertificateRequest {
    common_name: String,
    dns_names: Vec<String>,
    pub(crate) public: SubjectPublicKeyInfo,
}

/// A request or a key cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CertificateRequestError {
    /// Not a request in DER, or too long.
    #[error("the certificate signing request cannot be read: {0}")]
    Read(&'static str),
    /// The sender does not have the private key.
    #[error("the signature of the certificate signing request is wrong")]
    Signature,
    /// The key is of a kind that the CA does not sign.
    #[error("the key of the certificate signing request is not supported: {0}; use ECDSA on P-256")]
    PublicKey(String),
    /// The request asks for a name that the CA does not give.
    #[error(
        "the certificate signing request asks for {0}: ask for the common name and DNS names of one node only"
    )]
    Content(&'static str),
    /// The request is for another node or administrator.
    #[error("the certificate signing request names {found:?}, not {expected:?}")]
    Name {
        /// A requested name that differs, cut off after 80 characters.
        found: String,
        /// The name that it may have.
        expected: String,
    },
    /// The private key cannot be read.
    #[error("the private key cannot be read: {0}")]
    Key(String),
    /// A key or a request cannot be made.
    #[error("cannot make a key or a certificate signing request: {0}")]
    Make(String),
}

impl CertificateRequest {
    /// Reads a request in DER and checks its signature.
    ///
    /// # Errors
    /// [`CertificateRequestError`] says why the CA does not sign it.
    pub fn from_der(der: &[u8]) -> Result<CertificateRequest, CertificateRequestError> {
        if der.len() > MAX_BYTES {
            return Err(CertificateRequestError::Read("more than 16 KiB"));
        }
        let (rest, parsed) = X509CertificationRequest::from_der(der)
            .map_err(|_| CertificateRequestError::Read("no PKCS#10 in DER"))?;
        if !rest.is_empty() {
            return Err(CertificateRequestError::Read("bytes after its end"));
        }
        let info = &parsed.certification_request_info;
        let public = SubjectPublicKeyInfo::from_der(info.subject_pki.raw)
            .map_err(|error| CertificateRequestError::PublicKey(error.to_string()))?;
        parsed.verify_signature().map_err(|_| CertificateRequestError::Signature)?;
        let common_name = common_name(&parsed)?;
        let dns_names = dns_names(&parsed)?;
        Ok(CertificateRequest { common_name, dns_names, public })
    }

    /// Reads a request in PEM, as Kubernetes has it.
    ///
    /// # Errors
    /// [`CertificateRequestError`] says why the CA does not sign it.
    pub fn from_pem(text: &[u8]) -> Result<CertificateRequest, CertificateRequestError> {
        if text.len() > 2 * MAX_BYTES {
            return Err(CertificateRequestError::Read("more than 32 KiB"));
        }
        let block = pem::parse(text).map_err(|_| CertificateRequestError::Read("no PEM"))?;
        if block.tag() != PEM_TAG {
            return Err(CertificateRequestError::Read("no CERTIFICATE REQUEST in PEM"));
        }
        CertificateRequest::from_der(block.contents())
    }

    /// Checks that the request names `expected` and nothing else.
    ///
    /// # Errors
    /// [`CertificateRequestError::Name`].
    pub fn check_names(&self, expected: &str) -> Result<(), CertificateRequestError> {
        let mut names = std::iter::once(&self.common_name).chain(&self.dns_names);
        match names.find(|name| *name != expected) {
            None => Ok(()),
            Some(found) => Err(CertificateRequestError::Name {
                found: found.chars().take(80).collect(),
                expected: expected.to_owned(),
            }),
        }
    }

    /// Returns the common name in the subject, which the requester chose.
    #[must_use]
    pub fn common_name(&self) -> &str {
        &self.common_name
    }

    /// The public key, as SubjectPublicKeyInfo in DER.
    #[must_use]
    pub fn public(&self) -> Vec<u8> {
        self.public.subject_public_key_info()
    }
}

/// Writes a request in DER as PEM, as Kubernetes takes it.
#[must_use]
pub fn request_to_pem(der: &[u8]) -> String {
    let block = pem::Pem::new(PEM_TAG, der);
    pem::encode_config(&block, pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF))
}

/// The subject has to be one common name: the rest, like groups of Kubernetes, would be ignored silently.
fn common_name(parsed: &X509CertificationRequest<'_>) -> Result<String, CertificateRequestError> {
    let subject = &parsed.certification_request_info.subject;
    let mut names = subject.iter_common_name();
    let (Some(name), None, 1) = (names.next(), names.next(), subject.iter_attributes().count()) else {
        return Err(CertificateRequestError::Content("a subject that is not one common name"));
    };
    name.as_str()
        .map(str::to_owned)
        .map_err(|_| CertificateRequestError::Content("a common name that is not text"))
}

fn dns_names(parsed: &X509CertificationRequest<'_>) -> Result<Vec<String>, CertificateRequestError> {
    let mut found = Vec::new();
    for attribute in parsed.certification_request_info.iter_attributes() {
        let ParsedCriAttribute::ExtensionRequest(requested) = attribute.parsed_attribute() else {
            return Err(CertificateRequestError::Content("an unknown attribute"));
        };
        for extension in &requested.extensions {
            match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) => {
                    for name in &names.general_names {
                        let GeneralName::DNSName(name) = name else {
                            return Err(CertificateRequestError::Content(
                                "an alternative name that is not a DNS name",
                            ));
                        };
                        found.push((*name).to_owned());
                    }
                }
                // The CA decides about both.
                ParsedExtension::KeyUsage(_) | ParsedExtension::ExtendedKeyUsage(_) => {}
                _ => {
                    return Err(CertificateRequestError::Content("an extension other than names and usages"));
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, IsCa, SanType};

    use super::*;
    use crate::PrivateKey;

    fn request(
        change: impl FnOnce(&mut CertificateParams),
    ) -> Result<CertificateRequest, CertificateRequestError> {
        let key = PrivateKey::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "node-a");
        change(&mut params);
        CertificateRequest::from_der(params.serialize_request(&key.0).unwrap().der())
    }

    #[test]
    fn a_request_names_one_node_only() {
        let key = PrivateKey::generate().unwrap();
        let read = CertificateRequest::from_der(&key.request("node-a").unwrap()).unwrap();
        assert_eq!((read.common_name(), read.public()), ("node-a", key.public()));
        read.check_names("node-a").unwrap();
        assert!(matches!(read.check_names("node-b"), Err(CertificateRequestError::Name { .. })));
        let dns = |name: &str| SanType::DnsName(name.try_into().unwrap());
        request(|params| params.subject_alt_names = vec![dns("node-a")])
            .unwrap()
            .check_names("node-a")
            .unwrap();
        let other = request(|params| params.subject_alt_names = vec![dns("node-a"), dns("node-b")]).unwrap();
        assert!(other.check_names("node-a").is_err());
    }

    #[test]
    fn requests_for_more_than_a_name_are_refused() {
        let uri = SanType::URI("shorthorn://c/controller".try_into().unwrap());
        assert!(request(|params| params.subject_alt_names = vec![uri]).is_err());
        assert!(request(|params| params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained)).is_err());
        let group = |params: &mut CertificateParams| {
            params.distinguished_name.push(DnType::OrganizationName, "system:masters");
        };
        assert!(matches!(request(group), Err(CertificateRequestError::Content(_))));
    }

    #[test]
    fn a_request_without_the_private_key_is_refused() {
        let key = PrivateKey::generate().unwrap();
        let mut der = key.request("node-a").unwrap();
        let last = der.len() - 1;
        der[last] ^= 1;
        assert!(CertificateRequest::from_der(&der).is_err());
        let mut longer = key.request("node-a").unwrap();
        longer.push(0);
        assert_eq!(
            CertificateRequest::from_der(&longer).unwrap_err(),
            CertificateRequestError::Read("bytes after its end")
        );
    }

    proptest! {
        #[test]
        fn every_text_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            prop_assert!(CertificateRequest::from_der(&bytes).is_err());
            prop_assert!(CertificateRequest::from_pem(&bytes).is_err());
        }

        #[test]
        fn a_changed_byte_changes_no_content(at in any::<proptest::sample::Index>(), bit in 0..8_u32) {
            let key = PrivateKey::generate().unwrap();
            let mut der = key.request("node-a").unwrap();
            let at = at.index(der.len());
            der[at] ^= 1 << bit;
            // The reader accepts some tags around the signed part that it does not need.
            if let Ok(read) = CertificateRequest::from_der(&der) {
                prop_assert_eq!(read.common_name(), "node-a");
                prop_assert_eq!(read.public(), key.public());
            }
        }
    }
}
