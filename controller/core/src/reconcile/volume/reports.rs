//! Reads the reports of processes about a volume, for decisions about its engine.

use shorthorn_types::{Generation, ReplicaId, ReplicaReport, View};
use shorthorn_views::{forgets, knows_no_engine};

use crate::objects::{Engine, Replica, Volume};
use crate::observed::{Detail, InstanceKey, InstanceState, ObservedReplica};
use crate::reconcile::{Context, Reachability, reachability};

/// Returns the observed process of the replica, if it runs and its node answers.
pub(super) fn observed_replica<'a>(context: &Context<'a>, replica: &Replica) -> Option<&'a ObservedReplica> {
    let Reachability::Reachable(agent) = reachability(context, &replica.spec.node_id) else {
        return None;
    };
    let key = InstanceKey::replica(&replica.spec.volume_name, replica.spec.replica_id);
    let instance = agent.instances.get(&key).filter(|instance| instance.state == InstanceState::Running)?;
    match &instance.detail {
        Detail::Replica(shown) => Some(shown),
        Detail::Engine(_) => None,
    }
}

/// Returns the newest attachment that any reachable process of the volume knows.
pub(super) fn reported_attach(context: &Context<'_>, volume: &Volume, replicas: &[&Replica]) -> Option<u64> {
    let volume = &volume.spec.volume_name;
    let key = InstanceKey::engine(volume);
    let agents = context.agents.with_engine(volume).map(|(_, agent)| agent);
    let engines = agents.filter(|agent| agent.is_synced()).filter_map(|agent| {
        match &agent.instances.get(&key)?.detail {
            Detail::Engine(engine) => engine.attach,
            Detail::Replica(_) => None,
        }
    });
    engines.chain(refused_attach(context, replicas)).max()
}

/// Returns the newest attachment that has opened a replica in reach. An engine may be of another volume of
/// this name, a replica is not.
pub(super) fn refused_attach(context: &Context<'_>, replicas: &[&Replica]) -> Option<u64> {
    let attach = |replica: &&Replica| observed_replica(context, replica)?.attach;
    replicas.iter().filter_map(attach).max()
}

/// Returns the newest view that the engine of this attachment has committed, as a replica that has stored it
/// reports.
pub(super) fn served_view(
    context: &Context<'_>,
    volume: &Volume,
    engine: Option<&Engine>,
    replicas: &[&Replica],
) -> Option<View> {
    let attach = volume.status.attach;
    let engine = engine.filter(|engine| {
        let current = engine.spec.attach == attach && engine.status.seen_attach == attach;
        current && engine.status.is_serving()
    })?;
    let reports = replicas.iter().filter_map(|replica| observed_replica(context, replica)?.views.as_ref());
    let committed = reports.map(|report| report.committed);
    let own = committed.filter(|view| Some(view.id.generation) == engine.status.generation);
    own.max_by_key(|view| view.id)
}

/// Returns the reports of the replicas that refuse every engine but the next. A replica that has lost its
/// directory is not asked, because it has lost its records.
pub(super) fn fenced_reports(
    context: &Context<'_>,
    volume: &Volume,
    engine: Option<&Engine>,
    replicas: &[&Replica],
) -> Vec<(ReplicaId, ReplicaReport)> {
    let attach = volume.status.attach;
    let of = |replica: &&Replica| {
        let shown = observed_replica(context, replica).filter(|shown| shown.attach >= Some(attach))?;
        Some((replica.spec.replica_id, (**shown.views.as_ref()?).clone()))
    };
    let mut reports: Vec<_> = replicas.iter().filter_map(of).collect();
    let Some(newest) = reports.iter().map(|(_, report)| report.committed).max_by_key(|view| view.id) else {
        return reports;
    };
    let was_served = engine.is_some_and(|engine| engine.status.served_attach > 0)
        || replicas.iter().any(|replica| replica.status.healthy_at.is_some());
    let all_know = was_served || newest.id.generation != Generation::NEVER;
    let is_forgetful = |id: ReplicaId, report: &ReplicaReport| {
        forgets(id, report, newest) || (all_know && knows_no_engine(report))
    };
    reports.retain(|(id, report)| !is_forgetful(*id, report));
    reports
}
