//! Certificates of one cluster, and the mutual TLS that they give.
//!
//! - [`CertificateName`] is the identity in a certificate: a cluster and a [`Role`].
//!   [`Certificate`] reads it.
//! - [`Authority`] is the cluster's CA with its rules: it signs, revokes, makes join tokens and rolls over.
//! - [`Identity`] is a key with its certificate, [`Trust`] is the list of CAs and revoked serials. [`Bundle`]
//!   has both, as one PEM file.
//! - [`Credentials`] is a bundle in use. TLS configurations made from it follow [`Credentials::replace`]
//!   without a restart, and open connections end once the certificate of the peer is expired, revoked or
//!   distrusted.
//! - [`address`] has the URLs of servers, and connects to them with or without TLS.
//! - [`incoming()`] accepts connections for a tonic server, [`Connector`] makes them for a tonic client.
//! - [`AccessLayer`] refuses each method that [`access::TABLE`] does not permit to the role of the peer.
//!
//! Rules take the time as an argument. Only [`Credentials`], [`incoming()`] and [`Connector`] read a clock.

pub mod access;
pub mod address;
mod authority;
mod bundle;
mod certificate;
mod certificate_check;
mod connect;
mod connection_slots;
mod credentials;
mod file;
mod handshakes;
mod incoming;
mod key;
mod pinned;
mod request;
mod role;
mod serial;
mod token;
mod trust;
mod verifiers;

pub use access::{AccessLayer, RoleKind};
pub use authority::{Authority, AuthorityError, Issued, Revoked};
pub use bundle::{Bundle, BundleError, Identity, chain_from_pem, chain_to_pem};
pub use certificate::{Certificate, CertificateError};
pub use certificate_check::{CheckedConnection, TlsPeer};
pub use connect::{ClientConnection, Connector, EndpointError};
pub use credentials::{ClientAuth, Credentials};
pub use file::{BundleFileError, load, store};
pub use incoming::{Limits, incoming};
pub use key::PrivateKey;
pub use pinned::enrolment_config;
pub use request::{CertificateRequest, CertificateRequestError, request_to_pem};
pub use role::{CertificateName, CertificateNameError, ClusterId, Role};
pub use serial::Serial;
pub use token::{JoinToken, TokenError};
pub use trust::{Pin, Trust, TrustError};

pub use rustls::pki_types::{CertificateDer, UnixTime};

/// Lifetime of certificates of nodes and controllers. The controller renews them after half of it, so a
/// cluster may be without a controller for seven days. The CA has two valid ones of each node then.
pub const LEAF_SECONDS: u64 = 14 * 24 * 3600;
/// Lifetime of certificates of administrators, which nothing renews.
pub const ADMIN_SECONDS: u64 = 90 * 24 * 3600;
/// Lifetime of a CA.
pub const AUTHORITY_SECONDS: u64 = 10 * 365 * 24 * 3600;
/// Certificates are valid from this long before their signature, for hosts whose clock is late.
pub const BACKDATED_SECONDS: u64 = 10 * 60;
/// Name of the signer for CertificateSigningRequests of Kubernetes.
pub const SIGNER_NAME: &str = "shorthorn.io/agent";
