//! Encrypted connections between an engine and its replicas.
//!
//! Both ends do the handshake of TLS 1.3 with rustls, and then give the keys to the kernel (kTLS,
//! Documentation/networking/tls.rst). From then on, plain send and recv on the socket encrypt and decrypt, so
//! the I/O path does not change.
//!
//! Each end has an Ed25519 key pair that is derived from the volume's secret, and shows it as a raw public
//! key (RFC 7250). Each end accepts exactly the key of the other one. A process without the secret therefore
//! fails on either side, also between the two.
//!
//! The only cipher is ChaCha20-Poly1305. A connection may live for months, and a kernel before Linux 6.14
//! cannot change the keys of one. AES-GCM allows 2^24.5 records under one key (RFC 8446, section 5.5), which
//! are 380 GiB at most. ChaCha20-Poly1305 has no such limit.
//!
//! The kernel sends no close_notify, and closes the connection at one. Frames have lengths and numbers, so a
//! connection that is cut short loses no more than any broken connection does.
#![forbid(unsafe_code)]

mod handshake;
mod kernel;
mod keys;

use std::io;

use thiserror::Error;

pub use handshake::{EngineTls, RECORD_HEADER_BYTES, ReplicaTls, read_record};
pub use kernel::{Keys, check_kernel, prepare_kernel};
pub use keys::connection_secret;

/// The reason why a connection was not encrypted. It has to be closed then.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The kernel of this host cannot encrypt.
    #[error(
        "the kernel of this host does not encrypt connections ({0}): run `modprobe tls`, and `echo tls > \
         /etc/modules-load.d/shorthorn-tls.conf` for later boots"
    )]
    Kernel(io::Error),
    /// The key pair cannot be made. Never happens with a secret of the right length.
    #[error("the keys of the encryption cannot be derived from the volume's secret")]
    Derivation,
    /// The peer has another key: it does not have the secret, or is the same end.
    #[error(
        "the other end does not have the key of this volume. Find out which process answers at this address, \
         and whether it was started with the secret of this volume"
    )]
    Stranger,
    /// The peer has ended the handshake by an alert.
    #[error("the other end has refused the encryption ({0}): its log has the reason")]
    Refused(String),
    /// The peer breaks the rules of TLS.
    #[error("the encryption was not established: {0}")]
    Protocol(rustls::Error),
    /// The peer sends no records of TLS. These are its first bytes.
    #[error("the other end does not encrypt")]
    NotTls([u8; RECORD_HEADER_BYTES]),
    /// The handshake is longer than any that this program makes.
    #[error("the handshake of the encryption is too long")]
    TooLong,
    /// The connection broke, or the time is over.
    #[error("the connection failed during the handshake of the encryption: {0}")]
    Io(#[from] io::Error),
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> TlsError {
        match error {
            rustls::Error::InvalidCertificate(rustls::CertificateError::ApplicationVerificationFailure) => {
                TlsError::Stranger
            }
            rustls::Error::AlertReceived(alert) => TlsError::Refused(format!("{alert:?}")),
            error => TlsError::Protocol(error),
        }
    }
}

#[cfg(test)]
mod tests;
