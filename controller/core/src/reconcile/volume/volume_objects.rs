//! The objects of one volume with the reports of its processes, for decisions about its engine.

use shorthorn_types::{Generation, ReplicaId, ReplicaReport, View};
use shorthorn_views::{forgets, knows_no_engine};

use crate::NodeName;
use crate::objects::{Engine, Replica, Volume};
use crate::observed::{Detail, GrantWanted, InstanceKey, InstanceState, ObservedReplica};
use crate::reconcile::{Context, Reachability, engine, is_given_up, reachability};

/// The maximum number of attachments that a process may know beyond the stored one. A volume has fewer
/// between a backup of the store and its restoration. With more, one report could use up the numbers.
const ATTACHES_AHEAD_MAX: u64 = 1 << 32;

/// The stored objects of one volume. Its methods answer questions about them, and about the processes that
/// agents report. A run changes none of them.
pub(super) struct VolumeObjects<'a> {
    context: &'a Context<'a>,
    volume: &'a Volume,
    engine: Option<&'a Engine>,
    replicas: Vec<&'a Replica>,
}

impl<'a> VolumeObjects<'a> {
    /// Finds the objects of the volume. The engine that an earlier volume of the name has left behind is not
    /// its own: it has a number of that one.
    pub(super) fn of(context: &'a Context<'a>, volume: &'a Volume) -> VolumeObjects<'a> {
        let stored = context.cluster.engines.get(&volume.metadata.name);
        VolumeObjects {
            context,
            volume,
            engine: stored.filter(|engine| !engine::is_left_behind(context, engine)),
            replicas: context.cluster.replicas_of(&volume.spec.volume_name).collect(),
        }
    }

    /// Returns the engine of this volume, if its object exists.
    pub(super) fn engine(&self) -> Option<&'a Engine> {
        self.engine
    }

    /// Returns the replicas whose objects can be used.
    pub(super) fn replicas(&self) -> &[&'a Replica] {
        &self.replicas
    }

    /// Leaves the engine to its own reconciler from here on, because the volume is removed before it.
    pub(super) fn leave_engine_behind(&mut self) {
        self.engine = None;
    }

    /// Returns true if only the engine of an earlier volume of the name exists.
    pub(super) fn has_engine_of_earlier_volume(&self) -> bool {
        self.engine.is_none() && self.context.cluster.engines.contains_key(&self.volume.metadata.name)
    }

    /// Returns true if no engine of this attachment, or of an older one, can acknowledge a write any more.
    pub(super) fn is_fenced(&self, engine: &Engine) -> bool {
        self.volume.status.is_fenced(engine.spec.attach)
    }

    /// Returns true if the engine of a volume that is to be deleted is on a node that never comes back. No
    /// other engine follows it.
    pub(super) fn is_on_lost_node(&self, engine: &Engine) -> bool {
        self.volume.is_deleting() && self.is_on_given_up_node(engine)
    }

    /// Returns true if the operator has given up the node of the engine, and has decided that the data of one
    /// replica is the volume. Too few replicas may be left to fence the engine.
    pub(super) fn is_given_up_for_salvage(&self, engine: &Engine) -> bool {
        self.volume.status.pending_salvage().is_some() && self.is_on_given_up_node(engine)
    }

    fn is_on_given_up_node(&self, engine: &Engine) -> bool {
        engine.spec.node_id.as_ref().is_some_and(|node| is_given_up(self.context, node))
    }

    /// Returns the obstacles of the replicas.
    pub(super) fn replica_messages(&self) -> String {
        let said = self.replicas.iter().filter(|replica| !replica.status.message.is_empty());
        said.map(|replica| format!("; {}: {}", replica.metadata.name, replica.status.message)).collect()
    }

    /// Returns the observed process of the replica, if it runs and its node answers.
    pub(super) fn observed_replica(&self, replica: &Replica) -> Option<&'a ObservedReplica> {
        let Reachability::Reachable(agent) = reachability(self.context, &replica.spec.node_id) else {
            return None;
        };
        let key = InstanceKey::replica(&replica.spec.volume_name, replica.spec.replica_id);
        let instance =
            agent.instances.get(&key).filter(|instance| instance.state == InstanceState::Running)?;
        match &instance.detail {
            Detail::Replica(shown) => Some(shown),
            Detail::Engine(_) => None,
        }
    }

    /// Returns the allocated bytes of the largest replica, if any agent reports them.
    pub(super) fn allocated_bytes(&self) -> Option<u64> {
        let of = |replica: &&Replica| {
            let spec = &replica.spec;
            let key = InstanceKey::replica(&spec.volume_name, spec.replica_id);
            match &self.context.agents.get(&spec.node_id)?.instances.get(&key)?.detail {
                Detail::Replica(shown) => Some(shown.allocated_bytes),
                Detail::Engine(_) => None,
            }
        };
        self.replicas.iter().filter_map(of).max()
    }

    /// Returns the newest attachment that the engine or any reachable process of the volume knows, if any
    /// does.
    pub(super) fn known_attach(&self) -> Option<u64> {
        let volume = &self.volume.spec.volume_name;
        let key = InstanceKey::engine(volume);
        let agents = self.context.agents.with_engine(volume).map(|(_, agent)| agent);
        let processes = agents.filter(|agent| agent.is_synced()).filter_map(|agent| {
            match &agent.instances.get(&key)?.detail {
                Detail::Engine(engine) => engine.attach,
                Detail::Replica(_) => None,
            }
        });
        let of_engine = self.engine.and_then(|engine| engine.spec.attach);
        let processes = processes.filter(|attach| self.is_plausible(*attach));
        processes.chain(self.refused_attach()).chain(of_engine).max()
    }

    /// Returns true unless the number of an attachment is far above the stored one. A node that reports such
    /// a number would otherwise use up the numbers of the volume.
    fn is_plausible(&self, attach: u64) -> bool {
        attach <= self.volume.status.attach.unwrap_or(0).saturating_add(ATTACHES_AHEAD_MAX)
    }

    /// Returns the newest attachment that has opened a replica in reach. An engine may be of another volume
    /// of this name, a replica is not.
    pub(super) fn refused_attach(&self) -> Option<u64> {
        let attach = |replica: &&Replica| self.observed_replica(replica)?.attach;
        let known: Vec<u64> = self.replicas.iter().filter_map(attach).collect();
        // If most replicas refuse all lower numbers, an engine needs a number above.
        let implausible = known.iter().filter(|attach| !self.is_plausible(**attach)).count();
        let is_needed = 2 * implausible > self.replicas.len();
        known.into_iter().filter(|attach| is_needed || self.is_plausible(*attach)).max()
    }

    /// Returns the newest view that the engine of this attachment has committed, as a replica that has stored
    /// it reports.
    pub(super) fn served_view(&self) -> Option<View> {
        let attach = self.volume.status.attach;
        let engine = self.engine.filter(|engine| {
            let current = engine.spec.attach == attach && engine.status.seen_attach == attach;
            current && engine.status.is_serving()
        })?;
        let reports =
            self.replicas.iter().filter_map(|replica| self.observed_replica(replica)?.views.as_ref());
        let committed = reports.map(|report| report.committed);
        let own = committed.filter(|view| Some(view.id.generation) == engine.status.generation);
        own.max_by_key(|view| view.id)
    }

    /// Returns the reports of the replicas that refuse every engine of a lower attachment than `attach`. A
    /// replica that has lost its directory is not asked, because it has lost its records.
    pub(super) fn fenced_reports(&self, attach: Option<u64>) -> Vec<(ReplicaId, ReplicaReport)> {
        let of = |replica: &&Replica| {
            let shown = self
                .observed_replica(replica)
                .filter(|shown| shown.attach.is_some() && shown.attach >= attach)?;
            Some((replica.spec.replica_id, (**shown.views.as_ref()?).clone()))
        };
        let mut reports: Vec<_> = self.replicas.iter().filter_map(of).collect();
        let Some(newest) = reports.iter().map(|(_, report)| report.committed).max_by_key(|view| view.id)
        else {
            return reports;
        };
        let was_served = self.engine.is_some_and(|engine| engine.status.served_attach.is_some())
            || self.replicas.iter().any(|replica| replica.status.healthy_at.is_some());
        let all_know = was_served || newest.id.generation != Generation::NEVER;
        let is_forgetful = |id: ReplicaId, report: &ReplicaReport| {
            forgets(id, report, newest) || (all_know && knows_no_engine(report))
        };
        reports.retain(|(id, report)| !is_forgetful(*id, report));
        reports
    }

    /// Returns the grant that the engine of the current attachment waits for, and its node.
    pub(super) fn grant_wanted(&self) -> Option<(&'a NodeName, &'a GrantWanted)> {
        let node = self.engine?.spec.node_id.as_ref()?;
        let agent = self.context.agents.get(node).filter(|agent| agent.is_synced())?;
        let instance = agent.instances.get(&InstanceKey::engine(&self.volume.spec.volume_name))?;
        match &instance.detail {
            Detail::Engine(shown) if shown.is_of(self.volume.status.attach) => {
                shown.grant_wanted().map(|wanted| (node, wanted))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
