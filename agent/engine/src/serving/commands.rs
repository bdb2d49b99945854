//! Commands of clients of the control socket.

use std::sync::Arc;

use shorthorn_control::{ProcessCommand, RebuildLimits, ReplicaEndpoint, ScrubCommand, ScrubStatus};
use shorthorn_core::{Event, PeerConfig, PeerIndex, PeerState};
use shorthorn_recovery::{DropHistory, RebuildFailures, ServingEngine};
use shorthorn_types::View;
use shorthorn_types::limits::MAX_MEMBERS;

use super::moves::Peering;
use super::{NO_DELAY, Serving};
use crate::context::PeerContext;
use crate::copy_limits::{copy_limits, scrub_config};
use crate::error::EngineError;
use crate::events::Ending;
use crate::scrubber::Scrubbing;
use crate::status;

impl Serving<'_> {
    pub(super) fn execute(&mut self, command: ProcessCommand) -> Result<Option<Ending>, EngineError> {
        match command {
            ProcessCommand::Stop => return Ok(Some(Ending::Stop)),
            ProcessCommand::Handover => return Ok(Some(Ending::Terminate)),
            ProcessCommand::Grant { view } => self.granted(view)?,
            ProcessCommand::Replicas { replicas } => self.set_replicas(replicas)?,
            ProcessCommand::Scrub { scrub } => self.scrub(scrub)?,
            ProcessCommand::Limits { limits } => self.limit(limits),
            ProcessCommand::Fence { .. } => self.ignore("fence", "only for replicas"),
            ProcessCommand::Listen { .. } => self.ignore("listen", "only for replicas"),
            ProcessCommand::Expand { size_bytes } => self.expand(size_bytes)?,
            // The server answers these itself.
            ProcessCommand::Status | ProcessCommand::Watch | ProcessCommand::Io => {}
        }
        Ok(None)
    }

    pub(super) fn ignore(&self, what: &str, reason: &str) {
        tracing::warn!(volume = %self.spec.volume, reason, "ignoring a command: {what}");
    }

    fn granted(&mut self, view: View) -> Result<(), EngineError> {
        if view.id.generation.attach > self.spec.attach {
            self.ignore("grant", &format!("view {view} is of a later attachment than {}", self.spec.attach));
            return Ok(());
        }
        let is_known = self.state.granted().is_some_and(|known| known.id >= view.id);
        // Durable before it is used: the next start has to honour it.
        self.state.keep_grant(view)?;
        if self.asked != Some(view) && is_known {
            return Ok(()); // the agent repeats it while the engine asks for another grant
        }
        if self.asked != Some(view) {
            self.ignore("grant", &format!("view {view} was not requested; the next start honours it"));
            return Ok(());
        }
        tracing::info!(volume = %self.spec.volume, %view, "the arbiter has granted the view");
        self.shared().send_to_core(Event::Granted { view: view.id });
        Ok(())
    }

    fn limit(&mut self, limits: RebuildLimits) {
        if !(1..=100).contains(&limits.share_percent) {
            return self.ignore("limits", &format!("share_percent {}: 1 to 100", limits.share_percent));
        }
        tracing::info!(volume = %self.spec.volume, ?limits, "the limits of copies have changed");
        self.spec.rebuild = limits;
        let limits = copy_limits(limits);
        self.context().limit(limits.bytes_per_s);
        self.shared().send_to_core(Event::SetCopyLimits(limits));
    }

    /// Starts a scrub with the snapshots. Their rot shows in the volume too, and two members cannot tell
    /// which of them is right there.
    fn scrub(&mut self, command: Option<ScrubCommand>) -> Result<(), EngineError> {
        tracing::info!(volume = %self.spec.volume, ?command, "scrub");
        self.log_all_differences();
        self.scrubs.stop();
        self.shared().send_to_core(Event::Scrub(None));
        let Some(command) = command else {
            self.publish(|engine| engine.change_scrub(ScrubStatus::stop));
            return Ok(());
        };
        // An operator who requests a scrub checks the volume: late replicas may try again.
        self.drop_histories = Default::default();
        self.context().known_peers().iter().for_each(|(index, _)| self.rebuild_tasks.end_delay(*index));
        let number = self.scrubs.next_number();
        self.publish(|engine| {
            engine.scrub =
                Some(ScrubStatus { number: Some(number), running: true, ..ScrubStatus::default() });
        });
        let config = scrub_config(command);
        let scrubbing = Scrubbing::start(Arc::clone(self.rebuild_tasks.context()), command, number)?;
        self.scrubs.start(scrubbing, config);
        Ok(())
    }

    fn set_replicas(&mut self, replicas: Vec<ReplicaEndpoint>) -> Result<(), EngineError> {
        if let Err(reason) = status::check_replicas(&replicas) {
            self.ignore("replicas", &reason);
            return Ok(());
        }
        self.spec.replicas = replicas;
        self.give_up_unwanted()?;
        for endpoint in self.spec.replicas.clone() {
            match self.context().find(endpoint.replica) {
                Some((index, _)) => self.readdress(index, endpoint),
                None => self.add(endpoint)?,
            }
        }
        self.rebuild_tasks.retry_now();
        Ok(())
    }

    /// Sets the addresses of a replica. If its connections use none of the new addresses, the engine closes
    /// them. The replica then comes back over a new address, and not only after the time-out of a late
    /// replica.
    fn readdress(&mut self, index: PeerIndex, endpoint: ReplicaEndpoint) {
        let (replica, address) = (endpoint.replica, endpoint.addresses.first().cloned().unwrap_or_default());
        let (mut former, next) = (Vec::new(), endpoint.addresses.clone());
        self.context().update(index, |peer| {
            former = std::mem::replace(&mut peer.endpoint, endpoint).addresses;
        });
        self.publish_member(replica, |member| member.address.clone_from(&address));
        if former != next {
            tracing::info!(volume = %self.spec.volume, %replica, address, "a replica has another address");
            self.moves.readdress(index, &former, &next, format!("the address has changed to {address}"));
        }
    }

    /// Gives up the connections of members that are to move to their new addresses now.
    pub(super) fn move_members(&mut self) {
        if self.moves.is_idle() {
            return;
        }
        let timeout_ms = u64::from(self.spec.replica_timeout_ms);
        let mut moves = std::mem::take(&mut self.moves);
        // Under one lock: no other member may be lost in between.
        self.shared().decide(|core, outputs| {
            let peering = |peer| Peering {
                is_member: core.membership().state(peer) == PeerState::Member,
                silent_ms: core.silent_ms(peer),
            };
            let peers: [Peering; MAX_MEMBERS] =
                std::array::from_fn(|peer| PeerIndex::try_from(peer).map(peering).unwrap_or_default());
            for (peer, reason) in moves.take(core.membership().view().members.len(), &peers, timeout_ms) {
                core.apply(Event::Lost { peer, reason }, outputs);
            }
        });
        self.moves = moves;
    }

    fn add(&mut self, endpoint: ReplicaEndpoint) -> Result<(), EngineError> {
        let Some(index) = self.free_number() else {
            tracing::info!(
                volume = %self.spec.volume, replica = %endpoint.replica,
                "a new replica waits: the volume has {MAX_MEMBERS}, those that are leaving included"
            );
            return Ok(());
        };
        tracing::info!(volume = %self.spec.volume, replica = %endpoint.replica, "a replica was added");
        let mut member = status::connecting(&endpoint);
        member.away_since_ms = Some(status::now_ms());
        self.publish(|engine| engine.members.push(member));
        let config = PeerConfig { replica: endpoint.replica, local: endpoint.local };
        let (is_complete, was_in_view) = (false, false);
        let new = PeerContext { endpoint, is_complete, was_in_view, last_view: None, run: None };
        self.context().set(index, Some(new));
        self.shared().send_to_core(Event::Track { peer: index, config });
        self.drop_histories[usize::from(index)] = DropHistory::default();
        self.rebuild_failures[usize::from(index)] = RebuildFailures::default();
        self.rebuild_tasks.start(index, NO_DELAY)
    }

    fn free_number(&self) -> Option<PeerIndex> {
        let numbers = PeerIndex::try_from(MAX_MEMBERS).unwrap_or(PeerIndex::MAX);
        (0..numbers).find(|index| self.context().is_free(*index))
    }

    /// Returns true if a replica of the volume waits for a free number.
    pub(super) fn has_waiting(&self) -> bool {
        self.spec.replicas.iter().any(|wanted| self.context().find(wanted.replica).is_none())
    }

    /// Adds the replicas that wait, as soon as a number is free.
    pub(super) fn add_waiting(&mut self) -> Result<(), EngineError> {
        let is_waiting = |wanted: &&ReplicaEndpoint| self.context().find(wanted.replica).is_none();
        let waiting: Vec<ReplicaEndpoint> = self.spec.replicas.iter().filter(is_waiting).cloned().collect();
        for endpoint in waiting {
            if self.free_number().is_some() {
                self.add(endpoint)?;
            }
        }
        Ok(())
    }

    /// Gives up the replicas that the volume is not to have any more, as soon as they are not in the view.
    pub(super) fn give_up_unwanted(&mut self) -> Result<(), EngineError> {
        for (index, peer) in self.context().known_peers() {
            let replica = peer.endpoint.replica;
            if self.spec.replicas.iter().any(|wanted| wanted.replica == replica) {
                continue;
            }
            // Under one lock: it must not become a member in between.
            let is_given_up = self.shared().decide(|core, outputs| {
                let may_go = !core.membership().view().members.contains(replica)
                    && core.membership().state(index) != PeerState::Member;
                if may_go {
                    core.apply(Event::Forget { peer: index }, outputs);
                }
                may_go
            });
            if !is_given_up {
                self.ignore("giving a replica up", &format!("{replica} is in the view {}", self.view));
                continue;
            }
            tracing::info!(volume = %self.spec.volume, %replica, "a replica is given up");
            self.copies.end_rebuild(index);
            self.moves.end(index);
            self.rebuild_tasks.give_up(index, replica)?;
            self.publish(|engine| engine.members.retain(|member| member.replica != replica));
        }
        Ok(())
    }
}
