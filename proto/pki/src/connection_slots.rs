//! Open connections that count: those with a certificate, and those without.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;

use crate::handshakes::{TlsHandshakes, source};

/// The room that a connection without a certificate takes, until it ends.
#[derive(Debug)]
pub(crate) struct UncertifiedSlot {
    _permit: OwnedSemaphorePermit,
    _place: Place,
}

/// A connection with a certificate; it has ended when this is dropped.
#[derive(Debug)]
pub(crate) struct CertifiedConnection {
    handshakes: Arc<Mutex<TlsHandshakes>>,
    address: IpAddr,
}

impl CertifiedConnection {
    /// Counts the connection as one of its address.
    pub(crate) fn connect(
        handshakes: &Arc<Mutex<TlsHandshakes>>,
        address: SocketAddr,
    ) -> CertifiedConnection {
        lock(handshakes).connect(address.ip());
        CertifiedConnection { handshakes: Arc::clone(handshakes), address: address.ip() }
    }
}

impl Drop for CertifiedConnection {
    fn drop(&mut self) {
        lock(&self.handshakes).disconnect(self.address, Instant::now());
    }
}

/// Locks the state of all handshakes.
pub(crate) fn lock(handshakes: &Mutex<TlsHandshakes>) -> MutexGuard<'_, TlsHandshakes> {
    handshakes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts connections without a certificate per source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A connection of a source.
#[derive(Debug)]
struct Place {
    sources: Sources,
    source: IpAddr,
}

impl Sources {
    /// Returns the room for a connection without a certificate; none if its address has `max` already.
    pub(crate) fn admit(
        &self,
        permit: OwnedSemaphorePermit,
        address: SocketAddr,
        max: usize,
    ) -> Option<UncertifiedSlot> {
        Some(UncertifiedSlot { _permit: permit, _place: self.enter(address, max)? })
    }

    fn enter(&self, address: SocketAddr, max: usize) -> Option<Place> {
        let source = source(address.ip());
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(source).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(Place { sources: self.clone(), source })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.sources.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_of_one_source_are_counted_together_and_end() {
        let sources = Sources::default();
        let enter = |text: &str| sources.enter(text.parse().unwrap(), 2);
        let first = enter("[fd00::1]:1");
        let second = enter("[fd00::2]:1");
        assert!(first.is_some() && second.is_some());
        assert!(enter("[fd00::3]:1").is_none(), "the same /64");
        let other = [enter("[fd00:0:0:1::1]:1"), enter("10.0.0.1:1"), enter("[::ffff:10.0.0.1]:1")];
        assert!(other.iter().all(Option::is_some));
        assert!(enter("10.0.0.1:2").is_none(), "IPv4, also when it is written as IPv6");
        drop(first);
        assert!(enter("[fd00::3]:1").is_some());
        drop((second, other));
        assert!(sources.0.lock().unwrap().is_empty());
    }
}
