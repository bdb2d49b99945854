//! The rules of views and generations as pure state machines. They decide which engine may write, and which
//! replicas hold every acknowledged write.
//!
//! - A replica keeps [`ReplicaViews`]: the generation that it serves, the newest committed view, and every
//!   proposed view newer than that. The shell makes them durable before it answers.
//! - An engine that starts computes its [`StartPlan`], with its [`Basis`], from the reports of the replicas.
//!   It commits its first view as a [`ViewChange`].
//! - An engine that loses a member changes to the view without it by a [`ViewChange`].
//! - The controller keeps an [`Arbiter`], which lets one of two halves continue.
//!
//! Quorum of a view: more than half of its members, or exactly half together with the arbiter's grant.
//!
//! Rules of the grant:
//! - An engine that starts asks before it proposes anything, for the replicas that it has fenced. A view that
//!   one half has stored and the arbiter never grants would block the other half. An engine that starts later
//!   and does not know the grant needs more than half of the view, and has fenced these replicas. Otherwise
//!   it has to ask too, and learns of the grant.
//! - If it reaches further replicas, or gives up waiting for the answer, it takes a new generation: a view's
//!   number never stands for two sets.
//! - An engine that serves proposes first, and asks when all members of the view have stored it.
//! - An engine that serves and has less than half of its view left proposes nothing and ends.
//! - The arbiter records before it answers. It refuses an engine that has honoured neither its last grant nor
//!   anything committed since, and returns that grant. So an engine may start with an old state file, or
//!   without one. It honours the grant of the refusal when it starts again.
//! - The members of a view that is asked for are members of every view that it honours. A rebuilding replica
//!   cannot be the only one that remains.
//! - An engine that cannot start from the reports asks the arbiter for its last grant. The only obstacle may
//!   be a view that this grant has overruled.
//! - An engine that has asked continues with that view or stops. A view that may be committed later must not
//!   be abandoned.
#![forbid(unsafe_code)]

mod arbiter;
mod combined_sets;
mod out_of_sync_sets;
mod plan;
mod quorum;
mod replica;
mod start;
mod view_change;

pub use arbiter::{Arbiter, NotGranted};
pub use combined_sets::{CombinedSets, MemberSets, OutOfSyncSet, combine_sets};
pub use out_of_sync_sets::{lacks_room, out_of_sync_sets_to_forget};
pub use plan::{FencedReplica, NoPlan, StartPlan, plan, remembers};
pub use quorum::{Quorum, quorum};
pub use replica::{Fence, Refused, ReplicaViews};
pub use start::{Basis, CannotStart, basis, basis_without, forgets, knows_no_engine};
pub use view_change::{ChangeProgress, ViewChange};
