use crate::state::State;

/// A message in flight. Engines are named by their index in [`State::engines`].
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
        /// The number of the view.
        number: u8,
    },
    /// A replica has stored it.
    Stored {
        /// The receiver.
        engine: u8,
        /// The sender.
        replica: u8,
        /// The number of the view.
        number: u8,
    },
    /// The view `number` is through.
    Commit {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
        /// The number of the view.
        number: u8,
    },
    /// A write with its data.
    Write {
        /// The sender.
        engine: u8,
        /// The receiver.
        replica: u8,
        /// Over which of the connections that the two have had.
        link: u8,
        /// The number of the write.
        write: u8,
    },
    /// A replica has the data.
    Applied {
        /// The receiver.
        engine: u8,
        /// The sender.
        replica: u8,
        /// Over which connection.
        link: u8,
        /// The number of the write.
        write: u8,
    },
    /// An engine asks the arbiter for its view `number`.
    Ask {
        /// The sender.
        engine: u8,
        /// The number of the view.
        number: u8,
    },
    /// The arbiter has recorded it.
    Granted {
        /// The receiver.
        engine: u8,
        /// The number of the view.
        number: u8,
    },
    /// The arbiter refuses; its last grant is in [`crate::Engine::refusal`].
    Refused {
        /// The receiver.
        engine: u8,
    },
}

impl Message {
    /// Returns true if the message can still have an effect. Generations only rise, engines do not come back
    /// to life, and views are never numbered twice. A message without effect now never has one, and two
    /// states that differ only in it are equal.
    pub(crate) fn is_of_use(self, state: &State) -> bool {
        let at = |engine: u8| state.engine(engine);
        let holder = |replica: u8| state.replica(replica).views.generation();
        match self {
            Message::Open { engine, replica } => {
                let (holder, generation) = (holder(replica), at(engine).generation);
                // Another engine may have the same one, if it draws no nonce.
                let is_shared =
                    || state.engines.iter().filter(|one| one.generation == generation).count() > 1;
                let is_new = at(engine).welcomes[usize::from(replica)].is_none();
                holder < generation || (holder == generation && is_new && is_shared())
            }
            Message::Opened { engine, replica } => at(engine).alive && !at(engine).reached.has(replica),
            Message::Propose { engine, replica, .. } | Message::Commit { engine, replica, .. } => {
                holder(replica) <= at(engine).generation
            }
            Message::Write { engine, replica, link, .. } => {
                holder(replica) <= at(engine).generation && link == at(engine).link(replica)
            }
            Message::Stored { engine, replica, number } => {
                at(engine).waits_for(number) && !at(engine).who_stored().has(replica)
            }
            Message::Applied { engine, replica, link, write } => {
                let engine = at(engine);
                let is_open = engine.pending.has(write) && !engine.answered(replica).has(write);
                engine.alive && is_open && link == engine.link(replica)
            }
            Message::Ask { engine, .. } => at(engine).generation.attach == state.attach,
            Message::Granted { engine, number } => at(engine).waits_for(number),
            Message::Refused { engine } => at(engine).alive,
        }
    }
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
