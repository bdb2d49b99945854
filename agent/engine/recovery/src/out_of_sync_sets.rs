//! Deletes out-of-sync sets that replicas do not need. Every handshake examines them.

use shorthorn_types::{MarkRegions, Members, ReplicaId, ReplicaReport, View};
use shorthorn_views::{lacks_room, out_of_sync_sets_to_forget};
use shorthorn_wire::Welcome;

use crate::replica_link::ReplicaLink;
use crate::serving::{Address, KnownPeer, ServingEngine, members};

/// Has a replica forget the out-of-sync sets of `gone`.
pub(crate) async fn forget<L: ReplicaLink>(link: &mut L, gone: &Members) -> Result<(), L::Error> {
    for replica in gone.iter() {
        link.mark(&MarkRegions::forget(replica)).await?;
    }
    Ok(())
}

/// Makes a replica that has to store `target` delete out-of-sync sets that it does not need, if it has no
/// room for more. Otherwise it could never again store a view that leaves a member out. `honoured` is the
/// view that the start honours.
pub(crate) async fn make_room<L: ReplicaLink>(
    link: &mut L,
    (me, welcome): (ReplicaId, &Welcome),
    wanted: &Members,
    target: &View,
    honoured: &ReplicaReport,
) -> Result<(), L::Error> {
    let known = || welcome.report.views().chain(honoured.views());
    if !lacks_room(me, &welcome.tracks, target, known()) {
        return Ok(());
    }
    forget(link, &out_of_sync_sets_to_forget(&welcome.tracks, wanted, known().chain([target]))).await
}

/// Makes a replica forget the out-of-sync sets that it does not need. The replica has a new control
/// connection. No other set begins on it meanwhile. That would take the control connection, which the caller
/// holds, or a view, and then the replica is in a view.
///
/// # Errors
/// The replica has not forgotten them. If it has refused, the connection can be used all the same: the next
/// handshake tries again.
pub async fn forget_in_vain<E: ServingEngine>(
    engine: &E,
    link: &mut impl ReplicaLink<Error = E::Error>,
    welcome: &Welcome,
) -> Result<(), E::Error> {
    if welcome.tracks.is_empty() {
        return Ok(());
    }
    let Some(view) = engine.read_core(|core| core.membership().view()) else { return Ok(()) };
    let pending = engine.pending_view();
    let honoured = pending.iter().flat_map(|pending| pending.honoured.views());
    let proposed = pending.iter().map(|pending| &pending.view);
    let views = welcome.report.views().chain([&view]).chain(honoured).chain(proposed);
    forget(link, &out_of_sync_sets_to_forget(&welcome.tracks, &wanted(engine), views)).await
}

/// Returns the replicas that the volume is to have.
fn wanted(engine: &impl ServingEngine) -> Members {
    // A set can hold all replicas, as the engine checked when it got the list.
    Members::new(engine.peers().into_iter().map(|(_, peer)| peer.replica)).unwrap_or_default()
}

/// Makes the members forget the out-of-sync set of a replica that the volume no longer has. It marks each of
/// them after it has learned the view without the replica. Returns the members that did not do it: they keep
/// the set in vain until their next handshake.
pub async fn give_up<E: ServingEngine>(engine: &E) -> Vec<(ReplicaId, E::Error)> {
    let mut failed = Vec::new();
    let Some(view) = engine.read_core(|core| core.membership().view()) else { return failed };
    let known = ReplicaReport { committed: view, proposed: Vec::new() };
    for (peer, KnownPeer { replica, .. }) in members(engine).unwrap_or_default() {
        let member = Address { peer, replica };
        let asked = match engine.control(member).commit(view, &known).await {
            Ok(()) => engine.open_control(member).await.map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = asked {
            failed.push((replica, error));
        }
    }
    failed
}
