//! Limits the simultaneous handshakes, so that silent connections do not keep an engine out.

use std::net::IpAddr;

/// Handshakes with processes of this host at once.
const LOCAL_MAX: usize = 8;
/// Handshakes with other hosts at once.
const REMOTE_MAX: usize = 24;
/// The maximum number of simultaneous handshakes, including those that were stopped and have not ended.
/// Further connections wait in the socket's backlog.
const ALL_MAX: usize = 2 * (LOCAL_MAX + REMOTE_MAX);

/// The origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This host, over the Unix socket.
    Local,
    /// The connection comes from another host.
    Remote(IpAddr),
}

impl Origin {
    fn is_local(self) -> bool {
        self == Origin::Local
    }
}

/// The running handshakes. `S` is a handle that stops one.
#[derive(Debug)]
pub(crate) struct EngineHandshakes<S> {
    next_id: u64,
    /// From the oldest to the newest.
    running: Vec<IncomingHandshake<S>>,
}

#[derive(Debug)]
struct IncomingHandshake<S> {
    id: u64,
    origin: Origin,
    /// The handle; none if the handshake was stopped.
    socket: Option<S>,
}

impl<S> EngineHandshakes<S> {
    pub fn new() -> EngineHandshakes<S> {
        EngineHandshakes { next_id: 0, running: Vec::new() }
    }

    /// Returns true if no connection may be accepted until one has ended.
    pub fn is_full(&self) -> bool {
        self.running.len() >= ALL_MAX
    }

    /// Begins the handshake of a connection from `origin`. Returns its number, and the socket of a handshake
    /// that has to make room for it. That is the oldest one of the origin that has the most. An engine that
    /// proves its identity at once succeeds, however many others stay silent.
    pub fn begin(&mut self, origin: Origin, socket: S) -> (u64, Option<S>) {
        let limit = if origin.is_local() { LOCAL_MAX } else { REMOTE_MAX };
        let alike = self.heard().filter(|one| one.origin.is_local() == origin.is_local());
        let victim = if alike.count() < limit { None } else { self.victim(origin.is_local()) };
        let evicted = victim.and_then(|at| self.running[at].socket.take());
        let id = self.next_id;
        self.next_id += 1;
        self.running.push(IncomingHandshake { id, origin, socket: Some(socket) });
        (id, evicted)
    }

    pub fn end(&mut self, id: u64) {
        self.running.retain(|one| one.id != id);
    }

    /// Returns the handshakes that were not stopped.
    fn heard(&self) -> impl Iterator<Item = &IncomingHandshake<S>> {
        self.running.iter().filter(|one| one.socket.is_some())
    }

    /// Returns the index of the oldest handshake of the origin that has the most.
    fn victim(&self, is_local: bool) -> Option<usize> {
        let of = |origin: Origin| self.heard().filter(|one| one.origin == origin).count();
        let most =
            self.heard().filter(|one| one.origin.is_local() == is_local).map(|one| of(one.origin)).max()?;
        self.running.iter().position(|one| {
            one.socket.is_some() && one.origin.is_local() == is_local && of(one.origin) == most
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn remote(host: u8) -> Origin {
        Origin::Remote(IpAddr::from([10, 0, 0, host]))
    }

    #[test]
    fn silent_hosts_keep_out_neither_this_host_nor_others() {
        let mut handshakes = EngineHandshakes::new();
        for _ in 0..REMOTE_MAX {
            assert_eq!(handshakes.begin(remote(1), "silent").1, None);
        }
        assert_eq!(handshakes.begin(Origin::Local, "engine").1, None, "this host has places of its own");
        let (other, evicted) = handshakes.begin(remote(2), "engine");
        assert_eq!(evicted, Some("silent"));
        for _ in 0..ALL_MAX {
            if !handshakes.is_full() {
                assert_eq!(
                    handshakes.begin(remote(1), "silent").1,
                    Some("silent"),
                    "it makes room for itself"
                );
            }
        }
        assert!(handshakes.is_full(), "those that have to end still have threads");
        assert!(handshakes.running.iter().any(|one| one.id == other && one.socket.is_some()));
    }

    #[test]
    fn a_handshake_that_has_ended_makes_room() {
        let mut handshakes = EngineHandshakes::new();
        let first = handshakes.begin(Origin::Local, 0).0;
        for socket in 1..LOCAL_MAX {
            handshakes.begin(Origin::Local, socket);
        }
        handshakes.end(first);
        assert_eq!(handshakes.begin(Origin::Local, LOCAL_MAX).1, None);
        assert_eq!(handshakes.begin(Origin::Local, LOCAL_MAX + 1).1, Some(1), "the oldest");
    }

    proptest! {
        #[test]
        fn the_newest_is_never_ended(hosts in proptest::collection::vec(0u8..5, 0..200)) {
            let mut handshakes = EngineHandshakes::new();
            for (number, host) in hosts.into_iter().enumerate() {
                let origin = if host == 0 { Origin::Local } else { remote(host) };
                let (id, evicted) = handshakes.begin(origin, number);
                if let Some(evicted) = evicted {
                    let gone = handshakes.running.iter().find(|one| one.id == evicted as u64).unwrap();
                    prop_assert_eq!(gone.origin.is_local(), origin.is_local());
                    prop_assert!(evicted != number);
                    handshakes.end(evicted as u64);
                }
                let local = handshakes.heard().filter(|one| one.origin.is_local()).count();
                prop_assert!(local <= LOCAL_MAX && handshakes.heard().count() - local <= REMOTE_MAX);
                prop_assert!(handshakes.heard().any(|one| one.id == id));
            }
        }
    }
}
