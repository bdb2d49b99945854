//! What the tests of whole processes share: agents in memory, and the real binaries around them.
#![allow(dead_code)]

pub mod agent;
pub mod cluster;
pub mod csi;
pub mod tls_agent;
