//! NBD: the protocol, the server of a queue, and the two frontends that use it.
//!
//! From the client inwards, `protocol` and `handshake` are the bytes. `connection` turns them into requests
//! of at most a slot's data each, kept in the tables of `command`. `share` decides which connection gets a
//! slot, and `service` has the connections of one queue. The frontend `socket` listens on a Unix socket. The
//! frontend `kernel` gives sockets to the kernel's driver (`driver_link`) by `netlink`, and finds its device
//! in `sysfs`.

mod command;
mod connection;
mod driver_link;
mod export;
#[cfg(shorthorn_fuzzing)]
pub mod fuzzing;
mod handshake;
mod kernel;
mod netlink;
mod protocol;
mod request;
mod service;
mod share;
mod socket;
mod sysfs;

pub use kernel::{is_nbd_of_other_volume, prepare_nbd, remove_nbd_leftovers};
pub use socket::prepare_socket;
pub(crate) use sysfs::read_once;

/// Returns an error unless the kernel's NBD driver answers over generic netlink.
pub(crate) fn driver_answers() -> std::io::Result<()> {
    netlink::NbdDriver::open().map(drop)
}
