//! The connections of engines by index.

use shorthorn_ring::Ring;

use crate::connection::EngineConnection;
use crate::limits::CONNECTIONS_MAX;

/// See the module. The index of a connection is in tokens and slots.
#[derive(Debug)]
pub(super) struct Connections {
    by_index: Vec<Option<EngineConnection>>,
}

impl Connections {
    pub fn new() -> Connections {
        let mut by_index = Vec::with_capacity(CONNECTIONS_MAX);
        by_index.resize_with(CONNECTIONS_MAX, || None);
        Connections { by_index }
    }

    /// Returns the indices of all connections that may exist.
    pub fn indices(&self) -> impl Iterator<Item = u16> + use<> {
        0..u16::try_from(CONNECTIONS_MAX).unwrap_or(u16::MAX)
    }

    /// Returns the connection at an index.
    pub fn get(&mut self, index: u16) -> Option<&mut EngineConnection> {
        self.by_index.get_mut(usize::from(index))?.as_mut()
    }

    /// Returns the connection at an index unless it is over.
    pub fn open(&mut self, index: u16) -> Option<&mut EngineConnection> {
        self.get(index).filter(|connection| !connection.is_over())
    }

    /// Returns the lowest index without a connection; none if all are taken.
    pub fn free_index(&self) -> Option<u16> {
        self.by_index.iter().position(Option::is_none).and_then(|index| u16::try_from(index).ok())
    }

    pub fn put(&mut self, index: u16, connection: EngineConnection) {
        self.by_index[usize::from(index)] = Some(connection);
    }

    pub fn remove(&mut self, index: u16) {
        self.by_index[usize::from(index)] = None;
    }

    pub fn is_empty(&self) -> bool {
        self.by_index.iter().all(Option::is_none)
    }

    /// Starts the sends of all connections that are not over.
    pub fn flush(&mut self, ring: &mut Ring) {
        self.by_index.iter_mut().flatten().for_each(|connection| connection.flush(ring));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tests::connection;

    #[test]
    fn every_place_is_given_once() {
        let mut connections = Connections::new();
        let mut others = Vec::new();
        for index in connections.indices() {
            assert_eq!(connections.free_index(), Some(index));
            let (connection, other) = connection(index);
            connections.put(index, connection);
            others.push(other);
        }
        assert_eq!(connections.free_index(), None);
        connections.remove(5);
        assert_eq!(connections.free_index(), Some(5));
        connections.indices().for_each(|index| connections.remove(index));
        assert!(connections.is_empty());
    }

    #[test]
    fn a_connection_that_is_over_keeps_its_place() {
        let mut connections = Connections::new();
        let (connection, _other) = connection(0);
        connections.put(0, connection);
        connections.get(0).unwrap().end();
        assert!(connections.open(0).is_none() && connections.get(0).is_some());
        assert!(!connections.is_empty());
        assert!(connections.get(u16::MAX).is_none(), "a token may have any index");
    }
}
