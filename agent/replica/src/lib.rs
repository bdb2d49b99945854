//! The replica process: serves one replica directory to the engine of its volume.
//!
//! - The *main* thread opens the directory and the sockets, answers for the process (status, signals), and
//!   leaves the directory clean at the end.
//! - The *accept* thread takes connections, and a few short-lived threads open them: an engine proves there
//!   that it has the volume's secret. The replica proves the same in its welcome.
//! - The *data* thread does everything else: it has the ring, the buffers, the directory and all connections,
//!   and shares none of them.
//!
//! What is promised to engines: an answer to WRITE, DISCARD or WRITE_ZEROES means that later reads see it; an
//! answer to FLUSH that everything answered before is durable, and FUA the same for one request. The
//! generation and the views are durable before they are answered. When making data durable has failed once,
//! nothing is served any more, which the status tells and every answer says with EIO. The process ends when
//! no engine is connected any more, and only if the disk says that data may be gone; the next one serves
//! again. If that happens again and again, it waits before it ends.
//!
//! A region that is about to be modified is noted first, durably: in the intent set, which tells a new engine
//! where replicas may differ, and in the set of each replica that is away, which tells what that one has
//! missed. The rules are in `shorthorn-regions`.
//!
//! A replica that is no member can be made a copy of another one: it is given the same layers, the snapshots
//! one by one, and says that it is being rebuilt until it is told that all of it is there.
//!
//! What engines promise: no two requests in flight that modify data and overlap, rounded to 4 KiB. Where one
//! breaks that, the blocks where they overlap hold any mixture; nothing else suffers. An engine that has
//! nothing to ask sends a PING now and then: a connection on which nothing comes for 60 seconds is closed.
#![forbid(unsafe_code)]

mod accept;
mod connection;
mod error;
mod executor;
mod handshake;
mod handshakes;
mod limits;
mod mailbox;
mod process;
mod server;
mod slots;
mod state;

pub use error::ReplicaError;
pub use process::run;
