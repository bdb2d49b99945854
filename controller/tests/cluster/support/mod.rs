//! The shared parts of the tests of whole processes: agents in memory, and the real binaries around them.
#![allow(dead_code)]

pub mod agent;
pub mod apiserver;
pub mod cluster;
pub mod csi;
pub mod tls_agent;
