//! The real controller and the real shorthornctl, over agents in memory. One program, because each one links
//! the whole controller.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

mod csi;
mod daily;
mod detach;
mod laptop;
mod left_out_objects;
mod lost_node;
mod metrics;
mod repair;
mod restart;
mod scheduling;
mod story;
mod support;
mod tls;
mod undelete;
mod upgrade;
