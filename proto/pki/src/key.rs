//! Private keys.

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::request::CertificateRequestError;

/// A private key of ECDSA on P-256.
pub struct PrivateKey(pub(crate) KeyPair);

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrivateKey(hidden)")
    }
}

impl PrivateKey {
    /// Makes a key.
    ///
    /// # Errors
    /// [`CertificateRequestError::Make`] if the system has no random numbers.
    pub fn generate() -> Result<PrivateKey, CertificateRequestError> {
        KeyPair::generate().map(PrivateKey).map_err(|error| CertificateRequestError::Make(error.to_string()))
    }

    /// Reads a key in PKCS#8.
    ///
    /// # Errors
    /// [`CertificateRequestError::Key`].
    pub fn from_pkcs8(der: &[u8]) -> Result<PrivateKey, CertificateRequestError> {
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(der));
        KeyPair::try_from(&der)
            .map(PrivateKey)
            .map_err(|error| CertificateRequestError::Key(error.to_string()))
    }

    /// The key in PKCS#8.
    #[must_use]
    pub fn to_pkcs8(&self) -> &[u8] {
        self.0.serialized_der()
    }

    /// The public half, as SubjectPublicKeyInfo in DER.
    #[must_use]
    pub fn public(&self) -> Vec<u8> {
        self.0.subject_public_key_info()
    }

    /// A certificate signing request in DER whose only content is the common name `common_name`: the name of
    /// a node or of an administrator.
    ///
    /// # Errors
    /// [`CertificateRequestError::Make`].
    pub fn request(&self, common_name: &str) -> Result<Vec<u8>, CertificateRequestError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let request = params.serialize_request(&self.0);
        request
            .map(|request| request.der().to_vec())
            .map_err(|error| CertificateRequestError::Make(error.to_string()))
    }
}
