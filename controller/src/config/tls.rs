//! The flags for TLS.

use std::net::SocketAddr;

use clap::Args;

/// Flags for TLS.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct TlsArgs {
    /// Address of the API with mutual TLS: ADDRESS:PORT. Administrators need a certificate from shorthornctl
    /// tls issue. Nodes that join with a token need this address. Off by default
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tls_listen: Option<SocketAddr>,
}
