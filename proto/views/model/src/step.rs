use crate::bits::Bits;
use crate::network::Message;

/// A step of the model. Engines are named by their index in [`crate::State::engines`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelStep {
    /// The controller attaches the volume to another host, where an engine starts.
    Attach {
        /// True if the nonce is above those of others with the same numbers, else below.
        higher: bool,
    },
    /// A backup of the controller's store is made, in place of the last one.
    BackUp,
    /// The controller restores its backup.
    Restore,
    /// The controller sees that an engine serves that was started since.
    Renew,
    /// The host of an attachment, not necessarily of the current one, starts its engine again.
    Restart {
        /// The attachment, from 0.
        host: u8,
        /// True if the nonce is above those of others with the same numbers, else below.
        higher: bool,
    },
    /// The host of an attachment loses its state and starts an engine, whose numbers were used before.
    StartAnew {
        /// The attachment, from 0.
        host: u8,
        /// True if the nonce is above those of others with the same numbers, else below.
        higher: bool,
    },
    /// An engine process ends.
    Crash {
        /// The process that ends.
        engine: u8,
    },
    /// A replica process ends and comes back: its connections are gone.
    ReplicaCrash {
        /// The process that ends.
        replica: u8,
    },
    /// A message arrives, and stays in the network.
    Deliver(Message),
    /// A starting engine has reached enough replicas, and chooses its members among those that hold
    /// everything. It asks the arbiter if necessary.
    Choose {
        /// The starting engine.
        engine: u8,
        /// The members of the first view.
        members: Bits,
        /// The replicas that it has reached, and that are to store nothing.
        left_out: Bits,
    },
    /// The engine resyncs its members, and proposes its first view to the replicas that it had reached
    /// when it chose.
    Begin {
        /// The starting engine.
        engine: u8,
        /// The member whose data all get.
        source: u8,
    },
    /// A serving engine takes a member for failed.
    Leave {
        /// The serving engine.
        engine: u8,
        /// The member that has failed.
        replica: u8,
    },
    /// An engine gives up one more replica while it changes its view.
    LeaveToo {
        /// The engine that changes its view.
        engine: u8,
        /// The replica that is given up.
        replica: u8,
    },
    /// An engine continues in its old view.
    GiveUp {
        /// The engine that ends the change of its view.
        engine: u8,
    },
    /// A replica outside the view gets the data of a member, and all writes from now on.
    Copy {
        /// The engine that rebuilds the replica.
        engine: u8,
        /// The receiving replica.
        replica: u8,
        /// The member that is read.
        source: u8,
    },
    /// The engine proposes the rebuilding replica as a member.
    Admit {
        /// The engine with a rebuilding replica.
        engine: u8,
    },
    /// The engine loses the rebuilding replica before that.
    LoseRebuilt {
        /// The engine with a rebuilding replica.
        engine: u8,
    },
    /// Exactly half have stored the view under way: the arbiter is asked.
    Ask {
        /// The engine that changes its view.
        engine: u8,
    },
    /// A write is submitted.
    Write {
        /// The engine that gets the write.
        engine: u8,
    },
    /// A write is acknowledged.
    Acknowledge {
        /// The engine that got the write.
        engine: u8,
        /// Index of the write in the run, from 0.
        write: u8,
    },
}
