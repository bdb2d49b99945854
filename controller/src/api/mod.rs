//! The gRPC interface of the controller: checks and stores what is wanted, and shows what is.

mod diagnostics;
mod list;
mod lost;
mod overview;
mod places;
mod rebalance;
mod repair;
mod server;
mod status;
mod trash;
mod view;

pub use diagnostics::Diagnostics;
pub use server::Api;
