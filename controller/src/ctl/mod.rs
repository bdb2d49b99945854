//! `shorthornctl`: what people and scripts do with volumes.

mod args;
mod commands;
mod confirm;
mod error;
mod output;
mod rebalance;
mod reboot;
mod size;
mod view;
mod wait;

pub use args::Cli;
pub use commands::run;
pub use error::CtlError;
