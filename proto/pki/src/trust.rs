//! The CAs that are trusted and the serials that are not.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use ring::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use serde::{Deserialize, Serialize};
use shorthorn_types::{from_hex, hex};
use thiserror::Error;
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use crate::certificate::{Certificate, CertificateError};
use crate::role::{ClusterId, Role};
use crate::serial::Serial;

/// More CAs than any roll-over has.
const AUTHORITIES_MAX: usize = 4;
/// More revoked certificates than a cluster has in the lifetime of one.
pub(crate) const REVOKED_MAX: usize = 16_384;
const PIN_BYTES: usize = 32;

/// SHA-256 of a CA's certificate in DER.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pin([u8; PIN_BYTES]);

impl Pin {
    /// The pin of this certificate.
    #[must_use]
    pub fn of(der: &[u8]) -> Pin {
        let mut bytes = [0; PIN_BYTES];
        bytes.copy_from_slice(digest(&SHA256, der).as_ref());
        Pin(bytes)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Pin {
    type Err = String;
    fn from_str(text: &str) -> Result<Pin, String> {
        let bytes: Option<[u8; PIN_BYTES]> = from_hex(text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Pin).ok_or_else(|| "the pin of a CA has 64 hexadecimal digits".to_owned())
    }
}

impl TryFrom<String> for Pin {
    type Error = String;
    fn try_from(text: String) -> Result<Pin, String> {
        text.parse()
    }
}

impl From<Pin> for String {
    fn from(pin: Pin) -> String {
        pin.to_string()
    }
}

/// The trusted CAs of one cluster, and the revoked certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    cluster: ClusterId,
    version: u64,
    authorities: Vec<CertificateDer<'static>>,
    anchors: Vec<TrustAnchor<'static>>,
    revoked: BTreeSet<Serial>,
}

/// The use of a certificate in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usage {
    /// The peer listens.
    Server,
    /// The peer dials.
    Client,
}

/// A certificate or a list of CAs is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrustError {
    /// A CA that cannot be read.
    #[error("CA certificate number {0} cannot be read")]
    Authority(usize),
    /// None, or more than a roll-over has.
    #[error("{0} CA certificates are given: a cluster has 1 to {AUTHORITIES_MAX}")]
    Authorities(usize),
    /// More than fit.
    #[error("{0} certificates are revoked: the maximum is {REVOKED_MAX}")]
    TooManyRevoked(usize),
    /// Signature, dates or usages are wrong.
    #[error("the certificate of the peer is not valid: {0}")]
    Chain(webpki::Error),
    /// Not one of ours.
    #[error("{0}")]
    Certificate(#[from] CertificateError),
    /// The peer is of another cluster.
    #[error("the peer belongs to cluster {found}, not to {expected}")]
    Cluster {
        /// The cluster of the peer.
        found: ClusterId,
        /// The cluster of this process.
        expected: ClusterId,
    },
    /// Another one answers at the address.
    #[error("the certificate of the peer is for {found}, expected {expected}")]
    Role {
        /// The role of the peer.
        found: Role,
        /// The role that it has to have.
        expected: Role,
    },
    /// An administrator has revoked it.
    #[error("the certificate {0} of the peer is revoked: enrol its holder again")]
    Revoked(Serial),
    /// The CA is not the one of the join token.
    #[error("the CA of the peer has pin {found}, expected {expected}: this is another cluster, or an attack")]
    Pin {
        /// The pin of its CA.
        found: Pin,
        /// The pin in the token.
        expected: Pin,
    },
    /// A server that does not send its CA.
    #[error("the peer does not send the certificate of its CA, so the pin of the CA cannot be checked")]
    NoAuthority,
}

impl Trust {
    /// Trusts these CAs, in DER, but for the revoked certificates. A later `version` replaces an earlier one.
    ///
    /// # Errors
    /// [`TrustError`] for a CA that cannot be read, and for too many of them.
    pub fn new(
        cluster: ClusterId,
        version: u64,
        authorities: impl IntoIterator<Item = Vec<u8>>,
        revoked: impl IntoIterator<Item = Serial>,
    ) -> Result<Trust, TrustError> {
        let authorities: Vec<CertificateDer<'static>> =
            authorities.into_iter().map(CertificateDer::from).collect();
        if authorities.is_empty() || authorities.len() > AUTHORITIES_MAX {
            return Err(TrustError::Authorities(authorities.len()));
        }
        let revoked: BTreeSet<Serial> = revoked.into_iter().take(REVOKED_MAX + 1).collect();
        if revoked.len() > REVOKED_MAX {
            return Err(TrustError::TooManyRevoked(revoked.len()));
        }
        let anchor = |(at, der)| {
            let anchor = anchor_from_trusted_cert(der).map_err(|_| TrustError::Authority(at + 1))?;
            Ok(anchor.to_owned())
        };
        let anchors = authorities.iter().enumerate().map(anchor).collect::<Result<Vec<_>, TrustError>>()?;
        Ok(Trust { cluster, version, authorities, anchors, revoked })
    }

    /// Returns the identity of the cluster, which every certificate must name.
    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.cluster
    }

    /// Counts the changes of the list.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The certificates of the CAs.
    #[must_use]
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        &self.authorities
    }

    /// The pins of the CAs.
    #[must_use]
    pub fn pins(&self) -> Vec<Pin> {
        self.authorities.iter().map(|der| Pin::of(der)).collect()
    }

    /// The revoked certificates.
    #[must_use]
    pub fn revoked(&self) -> &BTreeSet<Serial> {
        &self.revoked
    }

    /// Checks the certificate of a peer. It has to be signed by a trusted CA, valid now, of this cluster, not
    /// revoked, and for that usage. If `expected` is given, it must have that role.
    pub(crate) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        usage: Usage,
        expected: Option<&Role>,
        now: UnixTime,
    ) -> Result<Certificate, TrustError> {
        verify_chain(leaf, &self.anchors, usage, now)?;
        let certificate = Certificate::from_der(leaf)?;
        if certificate.name.cluster != self.cluster {
            let found = certificate.name.cluster;
            return Err(TrustError::Cluster { found, expected: self.cluster.clone() });
        }
        if let Some(expected) = expected.filter(|expected| **expected != certificate.name.role) {
            return Err(TrustError::Role { found: certificate.name.role, expected: expected.clone() });
        }
        if self.revoked.contains(&certificate.serial) {
            return Err(TrustError::Revoked(certificate.serial));
        }
        Ok(certificate)
    }

    /// Returns the certificate of a server if it is accepted now.
    ///
    /// # Errors
    /// [`TrustError`] says why not.
    pub fn verify_server(&self, leaf: &CertificateDer<'_>, now: UnixTime) -> Result<Certificate, TrustError> {
        self.verify(leaf, Usage::Server, None, now)
    }
}

/// Checks signature, dates and usage. Our CAs sign leaves only, so a chain has no certificate in between.
pub(crate) fn verify_chain(
    leaf: &CertificateDer<'_>,
    anchors: &[TrustAnchor<'_>],
    usage: Usage,
    now: UnixTime,
) -> Result<(), TrustError> {
    let entity = EndEntityCert::try_from(leaf).map_err(TrustError::Chain)?;
    let usage = match usage {
        Usage::Server => KeyUsage::server_auth(),
        Usage::Client => KeyUsage::client_auth(),
    };
    let algorithms = webpki::ALL_VERIFICATION_ALGS;
    let verified = entity.verify_for_usage(algorithms, anchors, &[], now, usage, None, None);
    verified.map(drop).map_err(TrustError::Chain)
}

#[derive(Serialize, Deserialize)]
struct Stored {
    cluster: ClusterId,
    version: u64,
    authorities: Vec<String>,
    revoked: Vec<Serial>,
}

impl Serialize for Trust {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = Stored {
            cluster: self.cluster.clone(),
            version: self.version,
            authorities: self.authorities.iter().map(|der| hex(der)).collect(),
            revoked: self.revoked.iter().cloned().collect(),
        };
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Trust {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Trust, D::Error> {
        let stored = Stored::deserialize(deserializer)?;
        let of_hex = |text: &String| {
            from_hex(text).ok_or_else(|| serde::de::Error::custom("a CA that is not hexadecimal digits"))
        };
        let authorities = stored.authorities.iter().map(of_hex).collect::<Result<Vec<_>, _>>()?;
        Trust::new(stored.cluster, stored.version, authorities, stored.revoked)
            .map_err(serde::de::Error::custom)
    }
}
