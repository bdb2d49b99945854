//! Addresses of gRPC servers: `unix:///path`, `http://host:port` or `https://host:port`. With http,
//! connections to other hosts use TLS, and connections to this host do not. With https, all do.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};

use crate::{Connector, Credentials, Role};

/// The default address of the controller's API.
pub const DEFAULT_SERVER: &str = "unix:///run/shorthorn/controller.sock";

/// The rest of an error about another host that a program without a certificate cannot connect to.
const NO_CERTIFICATE: &str =
    "use --tls-identity FILE or SHORTHORN_TLS_IDENTITY, with a file of shorthornctl tls issue";

const HTTP: &str = "http://";
const HTTPS: &str = "https://";

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ServerUrl(String);

/// A text is not an address.
#[derive(Debug, Error)]
pub enum AddressError {
    /// Not one of the known forms.
    #[error("{0:?} is not an address: use unix:///path/of/socket, http://host:port or https://host:port")]
    Url(String),
    /// The text is not one of the known forms.
    #[error("{0:?} is not an address to listen on: use unix:///path/of/socket or 127.0.0.1:port")]
    Listen(String),
    /// The connection would not be protected.
    #[error(
        "{0} can be reached from other hosts, and connections are not encrypted: use --tls-listen for it, or \
         listen on 127.0.0.1 or unix:///path"
    )]
    Open(SocketAddr),
    /// TLS cannot be configured.
    #[error("cannot configure TLS: {0}")]
    Tls(String),
}

impl ServerUrl {
    /// Returns a client's end of it; connects at the first use, and again after it broke.
    ///
    /// # Errors
    /// [`AddressError::Url`].
    pub fn endpoint(&self) -> Result<Endpoint, AddressError> {
        // The connector of `connect` does TLS, not the endpoint.
        let url = match self.0.strip_prefix(HTTPS) {
            Some(host) => format!("{HTTP}{host}"),
            None => self.0.clone(),
        };
        Endpoint::from_shared(url).map_err(|_| AddressError::Url(self.0.clone()))
    }

    /// A channel over `endpoint`, which connects when it is used first. The server has to have the role
    /// `expected`, unless the connection stays on this host. Without credentials, it has to stay there.
    ///
    /// # Errors
    /// [`AddressError::Tls`].
    pub fn connect(
        &self,
        endpoint: &Endpoint,
        credentials: Option<&Credentials>,
        expected: Role,
    ) -> Result<Channel, AddressError> {
        if self.0.starts_with("unix:") {
            return Ok(endpoint.connect_lazy());
        }
        let connector = match credentials {
            Some(credentials) => Connector::new(credentials, expected),
            None => Ok(Connector::loopback_only(NO_CERTIFICATE)),
        };
        let connector = connector.map_err(|error| AddressError::Tls(error.to_string()))?;
        let is_https = self.0.starts_with(HTTPS);
        let connector = if is_https { connector.always_tls() } else { connector };
        Ok(endpoint.connect_with_connector_lazy(connector))
    }
}

impl FromStr for ServerUrl {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<ServerUrl, AddressError> {
        let absolute = text.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'));
        let host = [HTTP, HTTPS].iter().find_map(|scheme| text.strip_prefix(scheme));
        let host = host.is_some_and(|host| !host.is_empty());
        let url = ServerUrl(text.to_owned());
        if !(absolute || host) || url.endpoint().is_err() {
            return Err(AddressError::Url(text.to_owned()));
        }
        Ok(url)
    }
}

impl TryFrom<String> for ServerUrl {
    type Error = AddressError;
    fn try_from(text: String) -> Result<ServerUrl, AddressError> {
        text.parse()
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The address on which a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Listen {
    /// A socket in the file system, for its owner only.
    Unix(PathBuf),
    /// A port of this host, for this host only.
    Tcp(SocketAddr),
}

impl FromStr for Listen {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Listen, AddressError> {
        if let Some(path) = text.strip_prefix("unix://").filter(|path| path.starts_with('/')) {
            return Ok(Listen::Unix(PathBuf::from(path)));
        }
        let address: SocketAddr = text.parse().map_err(|_| AddressError::Listen(text.to_owned()))?;
        if !address.ip().is_loopback() {
            return Err(AddressError::Open(address));
        }
        Ok(Listen::Tcp(address))
    }
}

impl TryFrom<String> for Listen {
    type Error = AddressError;
    fn try_from(text: String) -> Result<Listen, AddressError> {
        text.parse()
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix://{}", path.display()),
            Listen::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_sockets_and_loopback_only() {
        for good in ["unix:///run/a.sock", "127.0.0.1:9500", "[::1]:9500"] {
            assert_eq!(good.parse::<Listen>().unwrap().to_string(), good);
        }
        for bad in ["unix://run/a.sock", "0.0.0.0:9500", "10.0.0.1:1", "localhost", ""] {
            assert!(bad.parse::<Listen>().is_err(), "{bad}");
        }
        for good in ["unix:///run/a.sock", "http://127.0.0.1:9501", "https://node-a:9501"] {
            assert_eq!(good.parse::<ServerUrl>().unwrap().to_string(), good);
        }
        for bad in ["unix://run/a.sock", "ftp://a:1", "a:1", "http://", "https://", "http://a b"] {
            assert!(bad.parse::<ServerUrl>().is_err(), "{bad}");
        }
    }
}
