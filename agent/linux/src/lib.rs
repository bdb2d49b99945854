//! The information of the Linux kernel that several crates of a node need.
#![forbid(unsafe_code)]

pub mod block_device;
pub mod mounts;
pub mod process;
