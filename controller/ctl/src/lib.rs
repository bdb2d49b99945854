//! `shorthornctl`: manages volumes for people and scripts.
//!
//! The command line knows the controller only by its API. Through a cluster, it reads the kubeconfig and
//! forwards a port as kubectl does.
#![forbid(unsafe_code)]

mod args;
mod bundle;
mod calls;
mod cluster_checks;
mod commands;
mod confirm;
mod discover;
mod doctor;
mod error;
mod format;
mod json;
mod list;
mod manual;
mod output;
mod placement;
mod reach;
mod rebalance;
mod reboot;
mod status;
mod table;
mod terminal_text;
mod tls;
mod upgrade;
mod wait;

pub use args::Cli;
pub use commands::run;
pub use error::CtlError;
pub use terminal_text::terminal_text;
