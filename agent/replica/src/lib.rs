//! The replica process: serves one replica directory to the engine of its volume.
//!
//! - The *main* thread opens the directory and the sockets, answers for the process (status, signals), and
//!   leaves the directory clean at the end.
//! - The *accept* thread takes connections, and a few short-lived threads open them: an engine proves there
//!   that it has the volume's secret. The replica proves the same in its welcome.
//! - The *data* thread does everything else: it has the ring, the buffers, the directory and all connections,
//!   and shares none of them.
//!
//! The replica promises engines: after an answer to WRITE, DISCARD or WRITE_ZEROES later reads see it. After
//! an answer to FLUSH everything answered before is durable, and with FUA the same holds for one request. The
//! generation and the views are durable before they are answered. When a sync has failed once, the replica
//! serves nothing any more: the status reports that, and every answer is EIO. The process ends when no engine
//! is connected any more, and only if a note on the disk says that data may be lost; the next one serves
//! again. If that happens again and again, it waits before it ends.
//!
//! A region that is about to be modified is marked dirty first, durably. The intent set tells a new engine
//! where replicas may differ. The set of each absent replica has the regions that it has missed. The rules
//! are in `shorthorn-regions`.
//!
//! A replica that is no member can be made a copy of another one. It gets the same layers, the snapshots one
//! by one, and reports that it is being rebuilt until the engine ends the copy.
//!
//! Engines promise: no two requests in flight modify data and overlap, rounded to 4 KiB. If one breaks that,
//! the overlapping blocks hold any mixture; all other data is safe. An idle engine sends a PING now and then:
//! a connection that is silent for 60 seconds is closed.
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
pub use shorthorn_ring::bind_tcp;
