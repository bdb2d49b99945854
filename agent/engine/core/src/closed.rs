use crate::membership::{PeerIndex, PeerMask};

/// Per queue, the replicas whose connection is closed: no data is transferred between the queue's buffers and
/// these replicas.
///
/// Only such a replica may be left out of a request that it has not answered. Otherwise the frontend could
/// reuse the buffer while the connection still reads or writes it.
#[derive(Debug)]
pub(crate) struct ClosedConnections {
    by_queue: Vec<PeerMask>,
}

impl ClosedConnections {
    pub fn new(queues: u16) -> ClosedConnections {
        ClosedConnections { by_queue: vec![PeerMask::NONE; usize::from(queues)] }
    }

    /// Records that the connection of `queue` to `peer` is closed.
    pub fn close(&mut self, peer: PeerIndex, queue: u16) {
        if let Some(closed) = self.by_queue.get_mut(usize::from(queue)) {
            *closed = closed.with(PeerMask::one(peer));
        }
    }

    /// Records that `peer` has a new connection on every queue.
    pub fn reopen(&mut self, peer: PeerIndex) {
        for closed in &mut self.by_queue {
            *closed = closed.without(PeerMask::one(peer));
        }
    }

    /// Returns the replicas whose connection of `queue` is closed.
    pub fn of_queue(&self, queue: u16) -> PeerMask {
        self.by_queue.get(usize::from(queue)).copied().unwrap_or(PeerMask::NONE)
    }

    pub fn queues(&self) -> impl Iterator<Item = u16> + use<> {
        (0..).take(self.by_queue.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_closes_by_itself_and_all_open_together() {
        let mut closed = ClosedConnections::new(2);
        closed.close(1, 0);
        closed.close(2, 1);
        closed.close(1, 7);
        assert_eq!(closed.queues().collect::<Vec<_>>(), [0, 1]);
        assert_eq!((closed.of_queue(0), closed.of_queue(1)), (PeerMask::one(1), PeerMask::one(2)));
        closed.close(1, 1);
        closed.reopen(1);
        assert_eq!((closed.of_queue(0), closed.of_queue(1)), (PeerMask::NONE, PeerMask::one(2)));
    }
}
