//! Serves metrics and health of a program over HTTP/1.1, for Prometheus and for probes:
//!
//! - `/metrics`: numbers, as OpenMetrics text;
//! - `/healthz`: the process lives;
//! - `/readyz`: it can do its work; else 503 with the reason.
//!
//! The pages are read-only, so any address may be configured; the default is a loopback address. Pages are
//! made at the request, one at a time. Requests are bounded in number, size and time, so no client can
//! delay the program.
#![forbid(unsafe_code)]

mod address;
mod page;
mod process;
mod server;

pub use address::{MetricsListen, MetricsListenError};
pub use page::{Counters, Gauges, Histograms, MetricsPage, Seconds};
pub use server::{MetricsError, MetricsServer, MetricsSource, start};
