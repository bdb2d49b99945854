//! The kernel's end: it encrypts and decrypts the records of a connection.
//!
//! Source of the options: include/uapi/linux/tls.h and Documentation/networking/tls.rst of Linux.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{TcpTlsRx, TcpTlsTx, TcpUlp, TlsCryptoInfo};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use crate::TlsError;

/// The keys of both directions of a connection whose handshake is over.
pub struct Keys(ExtractedSecrets);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(hidden)")
    }
}

impl Keys {
    pub(crate) fn new(secrets: ExtractedSecrets) -> Keys {
        Keys(secrets)
    }

    #[cfg(test)]
    pub(crate) fn secrets(&self) -> &ExtractedSecrets {
        &self.0
    }

    /// Gives the keys to the kernel. From then on, `socket` sends and receives encrypted.
    ///
    /// # Errors
    /// [`TlsError::Kernel`]; the connection has to be closed.
    pub fn give_to_kernel(&self, socket: &impl AsFd) -> Result<(), TlsError> {
        let refused = |errno: nix::errno::Errno| TlsError::Kernel(errno.into());
        setsockopt(socket, TcpTlsTx, &crypto_info(&self.0.tx)?).map_err(refused)?;
        setsockopt(socket, TcpTlsRx, &crypto_info(&self.0.rx)?).map_err(refused)
    }
}

/// Prepares a connected TCP socket for encryption by the kernel. Bytes pass unchanged until it has keys.
///
/// # Errors
/// [`TlsError::Kernel`] if the kernel cannot encrypt.
pub fn prepare_kernel(socket: &impl AsFd) -> Result<(), TlsError> {
    setsockopt(socket, TcpUlp::default(), b"tls").map_err(|errno| match errno {
        // The peer is gone already: a fault of the connection, not of this host.
        nix::errno::Errno::ENOTCONN => TlsError::Io(errno.into()),
        errno => TlsError::Kernel(errno.into()),
    })
}

/// The time in which this host connects to itself. No network is involved, so a longer wait means that it
/// does not work.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Checks that the kernel of this host can encrypt, on a connection to itself.
///
/// # Errors
/// [`TlsError::Kernel`] has the remedy.
pub fn check_kernel() -> Result<(), TlsError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    // A firewall may drop packets to itself.
    let stream = TcpStream::connect_timeout(&listener.local_addr()?, CONNECT_LIMIT)?;
    prepare_kernel(&stream)?;
    let empty = libc::tls12_crypto_info_chacha20_poly1305 {
        info: INFO,
        iv: [0; 12],
        key: [0; 32],
        salt: [],
        rec_seq: [0; 8],
    };
    // The module may be there and the cipher not. Nothing is ever sent with this key.
    setsockopt(&stream, TcpTlsTx, &TlsCryptoInfo::Chacha20Poly1305(empty))
        .map_err(|errno| TlsError::Kernel(errno.into()))
}

const INFO: libc::tls_crypto_info =
    libc::tls_crypto_info { version: libc::TLS_1_3_VERSION, cipher_type: libc::TLS_CIPHER_CHACHA20_POLY1305 };

/// Returns the keys of one direction in the kernel's form.
fn crypto_info((number, secrets): &(u64, ConnectionTrafficSecrets)) -> Result<TlsCryptoInfo, TlsError> {
    let unusable = || TlsError::Kernel(io::Error::from(io::ErrorKind::Unsupported));
    let ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } = secrets else { return Err(unusable()) };
    Ok(TlsCryptoInfo::Chacha20Poly1305(libc::tls12_crypto_info_chacha20_poly1305 {
        info: INFO,
        iv: iv.as_ref().try_into().map_err(|_| unusable())?,
        key: key.as_ref().try_into().map_err(|_| unusable())?,
        salt: [],
        rec_seq: number.to_be_bytes(),
    }))
}
