//! The gRPC interface of the controller: checks and stores the desired state, and returns the current one.

mod diagnostics;
mod discover;
mod list;
mod lost;
mod messages;
mod overview;
mod placement;
mod rebalance;
mod repair;
mod server;
mod status;
mod trash;

pub use diagnostics::Diagnostics;
pub use server::Api;
