//! The replica process: serves one replica directory to the engine of its volume.
//!
//! - The *main* thread opens the directory and the sockets, answers for the process (status, signals), and
//!   leaves the directory clean at the end.
//! - The *accept* thread takes connections, and a few short-lived threads open them: an engine proves there
//!   that it has the volume's secret. The replica proves the same in its welcome.
//! - The *data* thread does everything else: it has the ring, the buffers, the directory and all connections,
//!   and shares none of them.
//!
//! Guarantees of the replica:
//! - After an answer to WRITE, DISCARD or WRITE_ZEROES, later reads return the new data.
//! - After an answer to FLUSH, all data of earlier answers is durable. With FUA, that holds for one request.
//! - The generation and the views are durable before they are answered.
//! - When a sync has failed once, the replica serves nothing any more: the status reports that, and every
//!   answer is EIO. The process ends when no engine is connected any more, and only after the disk has a
//!   durable record that data may be lost. The next process serves again. After repeated failures, the
//!   process waits before it ends.
//!
//! A region that is about to be modified is marked dirty first, durably. The intent set has the regions in
//! which replicas may differ. The out-of-sync set of each absent replica has the regions that it lacks.
//! The rules are in `shorthorn-regions`.
//!
//! A replica that is not a member can receive a full copy of another one. It gets the same layers, the
//! snapshots one by one, and reports that it is being rebuilt until the engine ends the copy.
//!
//! Engines guarantee that no two requests in flight modify the same block of 4 KiB. If an engine breaks that,
//! the overlapping blocks may have data of both; all other data is safe. The replica closes a connection that
//! is silent for 60 seconds; an idle engine sends a PING before that.
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
