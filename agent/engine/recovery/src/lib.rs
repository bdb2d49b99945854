//! The order of the steps of four operations of an engine. It opens a volume ([`open()`]) and rebuilds
//! a replica that is not in the view ([`rebuild()`]). It expands the replicas ([`grow_replicas`]) and
//! gives a replica up ([`give_up`]).
//!
//! The steps are async functions over traits: the engine process brings blocking connections and threads, the
//! simulation brings its own. So both run the same order of the same questions, and the same decisions about
//! the answers. Nothing in here knows a clock, a socket or a thread.
//!
//! - [`ReplicaLink`]: a connection to one replica that has taken this engine.
//! - [`OpeningEngine`]: the process while it opens the volume.
//! - [`ServingEngine`]: the process while it serves.
//! - [`ReplicaRebuild`]: the task that rebuilds one replica.
//!
//! [`Offenders`] are the replicas that an attempt to open the volume leaves out. [`BadSources`] are the
//! members that the next copy does not read. [`DropHistory`] decides how soon a dropped replica may come
//! back, and [`RebuildFailures`] whether it is waited for.
#![forbid(unsafe_code)]
#![expect(async_fn_in_trait, reason = "neither user of these traits sends the futures to another thread")]

mod drop_history;
mod grow;
mod offenders;
mod open;
mod other_member;
mod out_of_sync_sets;
mod rebuild;
mod rebuild_failures;
mod replica_link;
mod serving;

pub use drop_history::{DropHistory, RebuildDelay};
pub use grow::{NotGrown, grow_replicas};
pub use offenders::{BadSources, Offenders};
pub use open::{
    Grant, NotOpen, OpenRequest, Opened, OpeningEngine, Proposal, Reached, conclude, open, propose_to,
};
pub use other_member::{BlockSearch, UNREAD_MAX};
pub use out_of_sync_sets::{forget_in_vain, give_up};
pub use rebuild::{OTHER_RUN, RebuildError, ReplicaRebuild, SOURCE_HAS_LEFT, Source, rebuild};
pub use rebuild_failures::{RebuildFailure, RebuildFailures};
pub use replica_link::{LinkError, ReplicaLink, SizeMismatch, fit, regions};
pub use serving::{Address, KnownPeer, PendingView, ServingEngine, members};
