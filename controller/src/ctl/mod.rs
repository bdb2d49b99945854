//! `shorthornctl`: manages volumes for people and scripts.

mod args;
mod bundle;
mod cluster_checks;
mod commands;
mod confirm;
mod discover;
mod doctor;
mod error;
mod list;
mod manual;
mod output;
mod placement;
mod reach;
mod rebalance;
mod reboot;
mod size;
mod status;
mod tls;
mod upgrade;
mod view;
mod wait;

pub use args::Cli;
pub use commands::run;
pub use error::CtlError;
