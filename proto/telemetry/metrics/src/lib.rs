//! Serves metrics and health of a program over HTTP/1.1, for Prometheus and for probes:
//!
//! - `/metrics`: numbers, as OpenMetrics text;
//! - `/healthz`: the process lives;
//! - `/readyz`: it can do its work; else 503, and why not.
//!
//! Nothing can be changed there, so that any address may be configured; by default it is one of the loopback
//! device. A page is made when it is asked for, one at a time, and whoever asks is bounded in number, size
//! and time: nobody can hold the program up.
#![forbid(unsafe_code)]

mod address;
mod page;
mod process;
mod server;

pub use address::{MetricsListen, MetricsListenError};
pub use page::{Counters, Gauges, Histograms, Page, Seconds};
pub use server::{MetricsError, Serving, Vitals, start};
