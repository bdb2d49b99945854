//! Encrypts a connection to another host, between the challenge of the replica and the hello.

use std::io::{self, Read, Write};
use std::time::Instant;

use shorthorn_control::Secret;
use shorthorn_tls::{EngineTls, RECORD_HEADER_BYTES, TlsError, prepare_kernel};
use shorthorn_wire::{Challenge, HEADER_BYTES, Header, Opcode, Refusal, decode_text};
use thiserror::Error;

use super::{ConnectError, ReplicaConnection, ReplicaSocket};

/// The reason why a connection was not encrypted. Nothing of the volume has been sent.
#[derive(Debug, Error)]
pub enum EncryptionError {
    /// The handshake has failed, or this host cannot encrypt.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The replica does not offer encryption.
    #[error(
        "the volume encrypts in transit, and the replica does not: upgrade shorthorn-agent on its node, then \
         restart the replica"
    )]
    NotOffered,
    /// The replica answers in clear that it cannot encrypt. Nothing proves the message.
    #[error("the replica does not encrypt: {0}")]
    Declined(String),
}

impl ReplicaConnection {
    /// Has the connection encrypted before the hello, unless it is a Unix socket, which does not leave the
    /// host.
    pub fn require_encryption(&mut self, is_required: bool) {
        self.is_to_encrypt = is_required && matches!(self.stream, ReplicaSocket::Tcp(_));
    }

    /// Encrypts the connection, within the time of one step.
    pub(super) fn encrypt(&mut self, challenge: &Challenge, secret: &Secret) -> Result<(), ConnectError> {
        if !challenge.encrypted {
            return Err(EncryptionError::NotOffered.into());
        }
        let end = self.timeout.map(|timeout| Instant::now() + timeout);
        self.within(end, |connection| connection.exchange_keys(secret))
    }

    fn exchange_keys(&mut self, secret: &Secret) -> Result<(), ConnectError> {
        let ReplicaSocket::Tcp(stream) = &self.stream else { return Ok(()) };
        prepare_kernel(stream).map_err(EncryptionError::Tls)?;
        let tls = EngineTls::new(secret).map_err(EncryptionError::Tls)?;
        let keys = match tls.handshake(&mut InTime(self)) {
            Err(TlsError::NotTls(start)) => return Err(self.declined(start).into()),
            other => other.map_err(EncryptionError::Tls)?,
        };
        let ReplicaSocket::Tcp(stream) = &self.stream else { return Ok(()) };
        Ok(keys.give_to_kernel(stream).map_err(EncryptionError::Tls)?)
    }

    /// Reads the refusal in clear that begins with `start`.
    pub(super) fn declined(&mut self, start: [u8; RECORD_HEADER_BYTES]) -> EncryptionError {
        let not_tls = TlsError::NotTls(start);
        let mut bytes = [0; HEADER_BYTES];
        bytes[..start.len()].copy_from_slice(&start);
        if self.read_all(&mut bytes[start.len()..]).is_err() {
            return not_tls.into();
        }
        let Ok(header) = Header::decode(&bytes) else { return not_tls.into() };
        let mut text = vec![0; header.data_bytes() as usize];
        if header.opcode != Opcode::Hello || self.read_all(&mut text).is_err() {
            return not_tls.into();
        }
        match decode_text::<Refusal>(&header, &text) {
            Ok(refusal) => EncryptionError::Declined(refusal.message),
            Err(_) => not_tls.into(),
        }
    }
}

/// The connection, with the limits of a step for each read and write. A read fills the buffer.
struct InTime<'a>(&'a mut ReplicaConnection);

impl Read for InTime<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read_all(buf).map(|()| buf.len())
    }
}

impl Write for InTime<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write_all_in_time(buf).map(|()| buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
