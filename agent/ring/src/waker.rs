use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::{Arena, IoBuf, Ring, Token};

/// Wakes a thread that waits in its ring.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

/// The receiving end of a [`Waker`].
#[derive(Debug)]
pub struct WakeReceiver {
    fd: Arc<OwnedFd>,
    buf: IoBuf,
}

impl WakeReceiver {
    /// Creates a pair. The memory behind it is never given back: make one per thread.
    ///
    /// # Errors
    /// The error of eventfd or mmap.
    pub fn new() -> io::Result<(WakeReceiver, Waker)> {
        // SAFETY: no memory involved.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let fd = Arc::new(unsafe { OwnedFd::from_raw_fd(raw) });
        let buf = Arena::new(1, 4096)?.buf(0).part(0, 8);
        let waker = Waker(Arc::clone(&fd));
        Ok((WakeReceiver { fd, buf }, waker))
    }

    /// Requests a completion with `token` for the next wake-up. The caller arms again after every one.
    pub fn arm(&self, ring: &mut Ring, token: Token) {
        ring.read(self.fd.as_raw_fd(), self.buf, u64::MAX, token);
    }
}

impl Waker {
    /// Wakes the thread. Several calls before it looks count as one.
    pub fn wake(&self) {
        // SAFETY: eight bytes of a live number. The call can only fail if the counter is full: then the other
        // side is being woken already.
        unsafe {
            libc::write(self.0.as_raw_fd(), std::ptr::from_ref(&1u64).cast(), 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakes_a_waiting_ring() {
        let mut ring = Ring::new(4).unwrap();
        let (wake, waker) = WakeReceiver::new().unwrap();
        let token = Token { source: 9, kind: 0, index: 0, tag: 0 };
        wake.arm(&mut ring, token);
        let thread = std::thread::spawn(move || waker.wake());
        let mut out = Vec::new();
        ring.wait(None, &mut out).unwrap();
        assert_eq!(out[0].token, token);
        thread.join().unwrap();
    }
}
