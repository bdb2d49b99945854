//! The handshake over a connection that blocks. The caller bounds the time of each read and write.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::DerefMut;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ConnectionCommon, ServerConfig, ServerConnection};
use shorthorn_types::Secret;

use crate::kernel::Keys;
use crate::{TlsError, keys};

/// The header of a record: its type, the version, and the length of the rest (RFC 8446, section 5.1).
pub const RECORD_HEADER_BYTES: usize = 5;
/// The longest rest of a record (RFC 8446, section 5.2).
const RECORD_BYTES_MAX: usize = (1 << 14) + 256;
/// The most records that one end receives in a handshake. Ours has seven.
const RECORDS_MAX: usize = 16;
/// The types of records: change_cipher_spec, alert, handshake, application_data (RFC 8446, appendix B.1).
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// The engine's end of encrypted connections of one volume.
#[derive(Clone, Debug)]
pub struct EngineTls(Arc<ClientConfig>);

/// The replica's end of encrypted connections of one volume.
#[derive(Clone, Debug)]
pub struct ReplicaTls(Arc<ServerConfig>);

#[cfg(test)]
impl From<ClientConfig> for EngineTls {
    fn from(config: ClientConfig) -> EngineTls {
        EngineTls(Arc::new(config))
    }
}

#[cfg(test)]
impl From<ServerConfig> for ReplicaTls {
    fn from(config: ServerConfig) -> ReplicaTls {
        ReplicaTls(Arc::new(config))
    }
}

impl EngineTls {
    /// Returns the engine's end for the volume with this secret.
    ///
    /// # Errors
    /// [`TlsError::Derivation`].
    pub fn new(secret: &Secret) -> Result<EngineTls, TlsError> {
        Ok(EngineTls(Arc::new(keys::client_config(secret)?)))
    }

    /// Does the handshake. Reads nothing beyond its last record.
    ///
    /// # Errors
    /// [`TlsError`] says why the connection has to be closed.
    pub fn handshake(&self, channel: &mut (impl Read + Write)) -> Result<Keys, TlsError> {
        // The replica shows a key and no name.
        let name = ServerName::from(IpAddr::from(Ipv4Addr::LOCALHOST));
        let mut connection = ClientConnection::new(Arc::clone(&self.0), name)?;
        shake_hands(&mut connection, None, channel)?;
        Ok(Keys::new(connection.dangerous_extract_secrets()?))
    }
}

impl ReplicaTls {
    /// Returns the replica's end for the volume with this secret.
    ///
    /// # Errors
    /// [`TlsError::Derivation`].
    pub fn new(secret: &Secret) -> Result<ReplicaTls, TlsError> {
        Ok(ReplicaTls(Arc::new(keys::server_config(secret)?)))
    }

    /// Does the handshake, whose first record was already received. Reads nothing beyond its last record.
    ///
    /// # Errors
    /// [`TlsError`] says why the connection has to be closed.
    pub fn handshake(&self, first: Vec<u8>, channel: &mut (impl Read + Write)) -> Result<Keys, TlsError> {
        let mut connection = ServerConnection::new(Arc::clone(&self.0))?;
        shake_hands(&mut connection, Some(first), channel)?;
        Ok(Keys::new(connection.dangerous_extract_secrets()?))
    }
}

/// Exchanges records until both ends have the keys. `first` is the first record, if it was received.
fn shake_hands<D>(
    connection: &mut impl DerefMut<Target = ConnectionCommon<D>>,
    mut first: Option<Vec<u8>>,
    channel: &mut (impl Read + Write),
) -> Result<(), TlsError> {
    for _ in 0..=RECORDS_MAX {
        send(connection, channel)?;
        if !connection.is_handshaking() {
            return Ok(());
        }
        let record = match first.take() {
            Some(record) => record,
            None => read_record(read_start(channel)?, channel)?,
        };
        if let Err(error) = take(connection, &record) {
            // An alert has the reason. If it cannot be sent, the peer notices the end of the connection.
            let _ = send(connection, channel);
            return Err(error);
        }
    }
    Err(TlsError::TooLong)
}

fn send<D>(
    connection: &mut impl DerefMut<Target = ConnectionCommon<D>>,
    channel: &mut impl Write,
) -> Result<(), TlsError> {
    while connection.wants_write() {
        if connection.write_tls(channel)? == 0 {
            return Err(io::Error::from(io::ErrorKind::WriteZero).into());
        }
    }
    Ok(channel.flush()?)
}

fn read_start(channel: &mut impl Read) -> Result<[u8; RECORD_HEADER_BYTES], TlsError> {
    let mut start = [0; RECORD_HEADER_BYTES];
    channel.read_exact(&mut start)?;
    Ok(start)
}

/// Reads the rest of the record that begins with `start`, and returns the whole record.
///
/// # Errors
/// [`TlsError::NotTls`] if no record begins like that.
pub fn read_record(start: [u8; RECORD_HEADER_BYTES], channel: &mut impl Read) -> Result<Vec<u8>, TlsError> {
    let [kind, version, _, high, low] = start;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if !RECORD_TYPES.contains(&kind) || version != 3 || length > RECORD_BYTES_MAX {
        return Err(TlsError::NotTls(start));
    }
    let mut record = start.to_vec();
    record.resize(RECORD_HEADER_BYTES + length, 0);
    channel.read_exact(&mut record[RECORD_HEADER_BYTES..])?;
    Ok(record)
}

fn take<D>(
    connection: &mut impl DerefMut<Target = ConnectionCommon<D>>,
    mut record: &[u8],
) -> Result<(), TlsError> {
    while !record.is_empty() {
        if connection.read_tls(&mut record)? == 0 {
            return Err(TlsError::TooLong);
        }
    }
    connection.process_new_packets()?;
    Ok(())
}
