/// A message in flight. Engines are named by their index in [`State::engines`](crate::State::engines).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// An engine wants to hold a replica.
    Open {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
    },
    /// The replica accepts; the report is in [`crate::Engine::welcomes`].
    Opened {
        /// The receiver.
        engine: u8,
        /// The sender.
        replica: u8,
    },
    /// An engine proposes its view `number`.
    Propose {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
        /// The index in [`Engine::proposals`](crate::Engine::proposals), plus one.
        number: u8,
    },
    /// A replica has stored it.
    Stored {
        /// The receiver.
        engine: u8,
        /// The sender.
        replica: u8,
        /// The index in [`Engine::proposals`](crate::Engine::proposals), plus one.
        number: u8,
    },
    /// The view `number` is committed.
    Commit {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
        /// The index in [`Engine::proposals`](crate::Engine::proposals), plus one.
        number: u8,
    },
    /// A write with its data.
    Write {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
        /// The number of the connection; the two may have had several.
        link: u8,
        /// Index of the write in the run, from 0.
        write: u8,
    },
    /// A replica has the data.
    Applied {
        /// The receiver.
        engine: u8,
        /// The sender.
        replica: u8,
        /// The number of the connection that the write came over.
        link: u8,
        /// Index of the write that the replica has applied.
        write: u8,
    },
    /// An engine asks the arbiter for its view `number`.
    Ask {
        /// The sender.
        engine: u8,
        /// The index in [`Engine::proposals`](crate::Engine::proposals), plus one.
        number: u8,
    },
    /// The arbiter has recorded it.
    Granted {
        /// The receiver.
        engine: u8,
        /// The index in [`Engine::proposals`](crate::Engine::proposals), plus one.
        number: u8,
    },
    /// The arbiter refuses; its last grant is in [`crate::Engine::refusal`].
    Refused {
        /// The receiver.
        engine: u8,
    },
}

impl Message {
    /// Returns the message to or from another replica.
    pub(crate) fn with_replica(mut self, other: impl Fn(u8) -> u8) -> Message {
        match &mut self {
            Message::Open { replica, .. }
            | Message::Opened { replica, .. }
            | Message::Propose { replica, .. }
            | Message::Stored { replica, .. }
            | Message::Commit { replica, .. }
            | Message::Write { replica, .. }
            | Message::Applied { replica, .. } => *replica = other(*replica),
            Message::Ask { .. } | Message::Granted { .. } | Message::Refused { .. } => {}
        }
        self
    }
}
