//! Serves metrics and health of a program over HTTP/1.1, for Prometheus and for probes:
//!
//! - `/metrics`: numbers, as OpenMetrics text;
//! - `/healthz`: the process lives;
//! - `/readyz`: it can do its work; else 503, and why not.
//!
//! The pages are read-only, so that any address may be configured; by default it is one of the loopback
//! device. A page is made at the request, one at a time, and requests are bounded in number, size and time:
//! no client can delay the program.
#![forbid(unsafe_code)]

mod address;
mod page;
mod process;
mod server;

pub use address::{MetricsListen, MetricsListenError};
pub use page::{Counters, Gauges, Histograms, MetricsPage, Seconds};
pub use server::{MetricsError, MetricsSource, Serving, start};
