//! The shell around the decisions of `shorthorn-controller-core`.
//!
//! - [`kubernetes`][]: everything of Kubernetes: the API server, custom resources, events, certificates.
//! - [`store`][]: keeps the objects, with compare-and-swap.
//! - [`agents`][]: the connections to the agents, and their reports.
//! - [`queue`][]: the objects to reconcile.
//! - [`work`][]: runs the reconcilers when something changes, and carries their actions out.
//! - [`api`][]: the gRPC interface of the controller.
//! - [`csi`][]: the Controller service of CSI.
//! - [`metrics`][]: the metrics for Prometheus, and probes.
//! - [`open_files`][]: the limit of open files.
//! - [`serve`][]: puts these together into the daemon; [`config`] says how.
//! - [`tls`][]: the cluster's CA, and the certificates of this controller, nodes and administrators.
//! - [`manual`][]: man pages of the daemon.
#![forbid(unsafe_code)]

pub mod agents;
pub mod api;
mod backoff;
pub mod ca_storage;
pub mod config;
pub mod counters;
pub mod csi;
pub mod kubernetes;
pub mod manual;
pub mod metrics;
pub mod open_files;
pub mod queue;
mod random;
pub mod serve;
pub mod store;
pub mod tls;
pub mod work;
