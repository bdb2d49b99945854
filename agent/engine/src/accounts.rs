//! Accounts of missed regions that replicas keep in vain: at every greeting they are looked at, and forgotten.

use shorthorn_control::EngineSpec;
use shorthorn_types::{MarkAction, MarkRegions, Members, RegionsOf, ReplicaId, ReplicaReport, View};
use shorthorn_views::{accounts_to_forget, lacks_room};
use shorthorn_wire::Welcome;

use crate::connection::{ConnectError, Connection};

/// The order to forget what `replica` has missed.
pub fn order_to_forget(replica: ReplicaId) -> MarkRegions {
    let of = RegionsOf::Missed(replica);
    MarkRegions { of, action: MarkAction::Forget, runs: Vec::new(), stamp: 0, size_bytes: 0 }
}

/// The replicas of a volume, as its engine was told.
pub fn wanted(spec: &EngineSpec) -> Members {
    // There are no more replicas than a set can have: that was checked when the list came.
    Members::new(spec.replicas.iter().map(|endpoint| endpoint.replica)).unwrap_or_default()
}

/// Has a replica that is to store `target` forget what it keeps in vain, where it has no room for more accounts: it
/// could not store any view that leaves a member out, ever again. `honoured` is what the start honours.
///
/// # Errors
/// The replica has not done it.
pub fn make_room(
    connection: &mut Connection,
    (me, welcome): (ReplicaId, &Welcome),
    wanted: &Members,
    target: &View,
    honoured: &ReplicaReport,
) -> Result<(), ConnectError> {
    let known = || welcome.report.views().chain(honoured.views());
    if !lacks_room(me, &welcome.tracks, target, known()) {
        return Ok(());
    }
    forget(connection, me, &accounts_to_forget(&welcome.tracks, wanted, known().chain([target])))
}

/// Has a replica forget the accounts of `gone`.
///
/// # Errors
/// It has not done it.
pub fn forget(connection: &mut Connection, me: ReplicaId, gone: &Members) -> Result<(), ConnectError> {
    for replica in gone.iter() {
        connection.mark(&order_to_forget(replica))?;
        tracing::info!(keeper = %me, %replica, "what a replica misses that is gone is no longer kept");
    }
    Ok(())
}
