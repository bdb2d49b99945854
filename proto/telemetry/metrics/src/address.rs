use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

/// The address at which metrics and health are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsListen {
    /// At this address.
    At(SocketAddr),
    /// The metrics are not served.
    Off,
}

/// A text is not such an address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not an address for metrics: use ADDRESS:PORT, like 127.0.0.1:9510 or [::]:9510, or off")]
pub struct MetricsListenError(String);

impl MetricsListen {
    /// Returns the given port of the loopback device.
    #[must_use]
    pub const fn loopback(port: u16) -> MetricsListen {
        MetricsListen::At(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
    }
}

impl FromStr for MetricsListen {
    type Err = MetricsListenError;

    fn from_str(text: &str) -> Result<MetricsListen, MetricsListenError> {
        if text == "off" {
            return Ok(MetricsListen::Off);
        }
        text.parse().map(MetricsListen::At).map_err(|_| MetricsListenError(text.chars().take(200).collect()))
    }
}

impl fmt::Display for MetricsListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsListen::At(address) => address.fmt(f),
            MetricsListen::Off => f.write_str("off"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["127.0.0.1:9510", "[::1]:9510", "0.0.0.0:1", "off"] {
            assert_eq!(text.parse::<MetricsListen>().unwrap().to_string(), text);
        }
        for text in ["", "9510", ":9510", "127.0.0.1", "node-a:9510", "127.0.0.1:65536", "unix:///run/m.sock"]
        {
            let error = text.parse::<MetricsListen>().unwrap_err().to_string();
            assert!(error.contains("ADDRESS:PORT") && error.contains(text), "{error}");
        }
    }
}
