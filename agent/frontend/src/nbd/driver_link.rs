//! The sockets between the kernel's NBD driver and our queues, and how broken ones are replaced.
//!
//! The kernel gives up a socket when we close it. With several queues it also does so when a request was not
//! answered within the time-out. RECONFIGURE puts a new socket in place of a dead one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt::SendTimeout};
use nix::sys::time::{TimeVal, TimeValLike};
use shorthorn_ring::protect_thread;

use super::netlink::NbdDriver;
use super::sysfs;
use crate::{QueueSocket, wait};

/// The time for which a new socket is offered. A dead socket is noticed within milliseconds after it broke.
/// The driver takes the new socket only after that.
const OFFER_LIMIT: Duration = Duration::from_secs(10);
/// The time limit of one call to the driver. A call waits for locks that are held for the time of another
/// call. No call may wait for requests in flight: see `kernel_release::nbd_resize_deny_reason`.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// The time limit of the kernel for sending one request, after which it gives up the connection: as long as
/// an engine may be slow. A send waits only if the engine has no free slot and the socket is full. Without a
/// limit, disconnecting a device of a hanging process would wait for that send for ever.
const SEND_LIMIT_S: i64 = 60;

/// Returns a connected pair: one end for this process, one for the kernel, which takes no other sockets than
/// SOCK_STREAM.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, kernels) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
    // The driver puts its request time-out here instead, if the device has one.
    setsockopt(&kernels, SendTimeout, &TimeVal::seconds(SEND_LIMIT_S))?;
    Ok((ours, kernels))
}

/// Returns the sockets of the queues that an earlier process has handed over, by the number of the queue. A
/// socket that the kernel has given up is of no use: the kernel sends its requests again over another one.
pub(super) fn living(handed_over: Vec<QueueSocket>, queues: u16) -> Vec<Option<OwnedFd>> {
    let mut sockets: Vec<Option<OwnedFd>> = (0..queues).map(|_| None).collect();
    for QueueSocket { queue, socket } in handed_over {
        if is_given_up(&socket) {
            tracing::warn!(queue, "nbd: the kernel has given up the connection of a queue");
        } else if let Some(place) = sockets.get_mut(usize::from(queue)) {
            *place = Some(socket);
        }
    }
    sockets
}

/// Returns true if the other end is closed or shut down, or its state cannot be read.
fn is_given_up(socket: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    // A Unix socket reports that neither end can send any more.
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    match poll(&mut asked, PollTimeout::ZERO) {
        Ok(_) => asked[0].revents().is_none_or(|events| events.intersects(gone)),
        Err(_) => true,
    }
}

/// Calls the driver, with a limit, on a thread that is left behind if the call hangs.
pub(super) fn call<T: Send + 'static>(
    work: impl FnOnce(&mut NbdDriver) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    wait::within(CALL_LIMIT, move || work(&mut NbdDriver::open()?))
}

/// A kernel's device that is ours.
#[derive(Clone, Debug)]
pub(super) struct OwnedDevice {
    pub(super) index: u32,
    pub(super) backend: String,
}

impl OwnedDevice {
    /// Puts `socket` in place of a dead one, as soon as there is a dead one.
    ///
    /// # Errors
    /// The error of the driver; [`io::ErrorKind::TimedOut`] if all sockets stay alive, because another
    /// process serves.
    pub(super) fn reconnect(&self, socket: &OwnedFd) -> io::Result<()> {
        let taken = wait::until(OFFER_LIMIT, || {
            let offered = socket.try_clone()?;
            let device = self.clone();
            let is_taken =
                call(move |driver| driver.reconnect(device.index, &device.backend, offered.as_fd()))?;
            Ok::<_, io::Error>(is_taken.then_some(()))
        })?;
        taken.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "all its connections are alive: another process serves it",
            )
        })
    }

    /// Returns true if the device is still connected, and ours.
    pub(super) fn is_there(&self) -> bool {
        sysfs::backend(self.index).as_deref() == Some(self.backend.as_str())
    }
}

/// Replaces sockets that broke while the device is in use: takes the kernel's ends of new pairs from
/// `broken`. Ends when all queues have ended. Sets `closed` if the device is gone for good.
pub(super) fn spawn_reconnect(
    device: OwnedDevice,
    broken: Receiver<OwnedFd>,
    closed: Arc<AtomicBool>,
) -> io::Result<()> {
    let reconnect = move || {
        // The device waits for this process; the queues' threads report missing protections.
        let _ = protect_thread();
        for socket in broken {
            if closed.load(Ordering::Acquire) {
                continue;
            }
            match device.reconnect(&socket) {
                Ok(()) => tracing::info!(device = device.index, "nbd: a broken connection was replaced"),
                Err(_) if !device.is_there() => {
                    closed.store(true, Ordering::Release);
                    tracing::warn!(device = device.index, "nbd: another process disconnected the device");
                }
                // The queue finds its end closed, and tries again with a new pair.
                Err(error) => {
                    tracing::warn!(
                        device = device.index,
                        %error,
                        "nbd: a broken connection cannot be replaced yet"
                    );
                }
            }
        }
    };
    thread::Builder::new().name("nbd-reconnect".into()).spawn(reconnect).map(drop)
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::getsockopt;

    use super::*;

    #[test]
    fn a_socket_that_was_given_up_is_not_used() {
        let [(good, _kept), (closed, other), (half, end)] = [(); 3].map(|()| pair().unwrap());
        drop(other);
        nix::unistd::write(&end, b"unread").unwrap();
        std::os::unix::net::UnixStream::from(end.try_clone().unwrap())
            .shutdown(std::net::Shutdown::Both)
            .unwrap();
        let one = |(queue, socket)| QueueSocket { queue, socket };
        let handed_over = [(2, good), (0, closed), (1, half)].map(one);
        let sockets = living(handed_over.into(), 4);
        assert_eq!(sockets.iter().map(Option::is_some).collect::<Vec<_>>(), [false, false, true, false]);
        let (extra, _kept) = pair().unwrap();
        assert!(living(vec![one((4, extra))], 4).iter().all(Option::is_none), "the queue does not exist");
    }

    #[test]
    fn the_kernel_sends_with_a_limit() {
        let (ours, kernels) = pair().unwrap();
        let limit_s = |socket| getsockopt(socket, SendTimeout).unwrap().num_seconds();
        assert_eq!((limit_s(&ours), limit_s(&kernels)), (0, SEND_LIMIT_S));
    }
}
