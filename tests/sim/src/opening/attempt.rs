//! An attempt to open the volume, driven by [`shorthorn_recovery`].

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use shorthorn_recovery::{Grant, NotOpen, OpeningEngine, Proposal, Reached, propose_to};
use shorthorn_types::{Members, ReplicaId, ReplicaReport};
use shorthorn_views::{FencedReplica, MemberSets, NoPlan, StartPlan, ViewChange};

use super::simulated_link::{CallError, Via, Wire};
use super::{EngineHandle, RETRY_US};
use crate::net::ConnId;
use crate::occurrence::Occurrence;
use crate::tasks::all;

/// The connections to the members: by replica and queue.
pub(super) type MemberConnections = Vec<(usize, Vec<ConnId>)>;

/// An attempt to open the volume, driven by [`shorthorn_recovery`].
pub(super) struct OpenAttempt {
    process: EngineHandle,
    replicas: Vec<ReplicaId>,
    /// Handshakes with replicas that had not answered, while the arbiter is waited for. Each says whether it
    /// answers.
    search: Vec<(ReplicaId, Handshake)>,
    pub lost_writes: bool,
    /// True if the attempt continues without some of the reached replicas.
    pub leaves_out: bool,
}

type Handshake = Pin<Box<dyn Future<Output = bool>>>;

impl OpenAttempt {
    pub fn new(process: EngineHandle, replicas: Vec<ReplicaId>) -> OpenAttempt {
        OpenAttempt { process, replicas, search: Vec::new(), lost_writes: false, leaves_out: false }
    }
}

impl OpeningEngine for OpenAttempt {
    type Link = Via<Wire>;
    type Connections = MemberConnections;
    type Stop = ();

    async fn reach(&mut self) -> Result<Vec<Reached<Via<Wire>>>, NotOpen<()>> {
        let process = &self.process;
        let handshake = |replica| async move { process.handshake(replica, 0).await };
        let answers = all(self.replicas.iter().map(|replica| Box::pin(handshake(*replica))).collect()).await;
        let mut reached = Vec::new();
        for (replica, answer) in self.replicas.iter().zip(answers) {
            match answer {
                Ok((link, welcome)) => reached.push(Reached { replica: *replica, link, welcome }),
                Err(CallError::Deposed(holder)) => return Err(NotOpen::Deposed(holder)),
                Err(_) => {}
            }
        }
        Ok(reached)
    }

    fn planned(&mut self, fenced_replicas: &[FencedReplica], plan: Result<&StartPlan, &NoPlan>) {
        match plan {
            Ok(plan) => {
                self.process.judge_unfit(&plan.unfit);
                self.process.sim.borrow_mut().is_torn = false;
                self.lost_writes = plan.lost_writes;
            }
            Err(none) => {
                self.process.judge_unfit(&none.unfit);
                self.process.cannot_start(fenced_replicas, none);
            }
        }
    }

    fn offended(&mut self, replica: ReplicaId, reason: &str) {
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.trace(|| format!("engine {engine}: {replica} makes an attempt fail: {reason}"));
    }

    fn leaves_out(&mut self, replica: ReplicaId, _: &str) {
        self.leaves_out = true;
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.trace(|| format!("engine {engine} leaves {replica} out"));
        sim.count("attempts without an offender");
    }

    fn waited_ms(&self) -> u64 {
        let sim = self.process.sim.borrow();
        let begun_us = sim.engines.get(&self.process.engine).map_or(sim.now, |engine| engine.begun_us);
        (sim.now - begun_us) / 1000
    }

    fn has_user(&self) -> bool {
        let sim = self.process.sim.borrow();
        let host = sim.engines.get(&self.process.engine).map(|process| process.host);
        host.is_some_and(|host| sim.hosts[host].was_live && !sim.hosts[host].lost_writes)
    }

    fn ask_arbiter(&mut self, change: &ViewChange, stored: Members) {
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.count("grants asked");
        sim.after(100, Occurrence::AskArbiter { engine });
        if let Some(process) = sim.engines.get_mut(&engine) {
            process.wants = Some((change.target, change.honoured.clone(), stored));
        }
    }

    async fn next_grant(&mut self, reached: &mut [Reached<Via<Wire>>]) -> Result<Grant, NotOpen<()>> {
        if self.search.is_empty() {
            self.process.sleep(RETRY_US).await;
            let is_reached = |replica| reached.iter().any(|one| one.replica == replica);
            for replica in self.replicas.iter().copied().filter(|replica| !is_reached(*replica)) {
                let process = self.process.clone();
                let handshake = async move { process.handshake(replica, 0).await.is_ok() };
                self.search.push((replica, Box::pin(handshake)));
            }
        }
        let (process, search, replicas) = (&self.process, &mut self.search, &self.replicas);
        std::future::poll_fn(|context| {
            {
                let mut sim = process.sim.borrow_mut();
                let has_others = sim.controller.up && sim.guest.replicas != *replicas;
                let (is_up, wanted_bytes) = (sim.controller.up, sim.controller.size_bytes);
                let Some(engine) = sim.engines.get_mut(&process.engine) else { return Poll::Pending };
                let is_larger = is_up && wanted_bytes > engine.size_bytes;
                if let Some(view) = engine.was_granted.take() {
                    return Poll::Ready(Ok(Grant::Answered(view)));
                }
                if has_others {
                    sim.count("starts with another list of replicas");
                    return Poll::Ready(Err(NotOpen::aborted("the volume has other replicas now")));
                }
                if is_larger {
                    sim.count("starts with another size");
                    return Poll::Ready(Err(NotOpen::aborted("the volume has a new size now")));
                }
            }
            let mut back = None;
            search.retain_mut(|(replica, handshake)| match handshake.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(answers) => {
                    back = back.or_else(|| answers.then_some(*replica));
                    false
                }
            });
            match back {
                Some(replica) => {
                    process.sim.borrow_mut().count("starts with a replica that is back");
                    Poll::Ready(Ok(Grant::Back(replica)))
                }
                None if search.is_empty() => Poll::Ready(Ok(Grant::Nothing)),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn ask_no_more(&mut self) {
        if let Some(process) = self.process.sim.borrow_mut().engines.get_mut(&self.process.engine) {
            process.wants = None;
        }
        self.search.clear();
    }

    fn record_start(&mut self, _: &ReplicaReport, lost_writes: bool) -> Result<(), ()> {
        if lost_writes {
            self.process.record_losses();
        }
        Ok(())
    }

    async fn propose(
        &mut self,
        to: Vec<Reached<Via<Wire>>>,
        proposal: &Proposal,
    ) -> Vec<(Reached<Via<Wire>>, Result<Option<MemberSets>, CallError>)> {
        let propose = |mut one| async move {
            let answer = propose_to(&mut one, proposal).await;
            (one, answer)
        };
        all(to.into_iter().map(|one| Box::pin(propose(one))).collect()).await
    }

    async fn connect(
        &mut self,
        reached: Vec<Reached<Via<Wire>>>,
        proposal: &Proposal,
    ) -> Result<MemberConnections, NotOpen<()>> {
        let (process, replicas) = (&self.process, &self.replicas);
        let connect = |one| process.connect_member(one, proposal, replicas);
        let connected = all(reached.into_iter().map(|one| Box::pin(connect(one))).collect()).await;
        let links: Result<Vec<_>, ReplicaId> = connected.into_iter().collect();
        let links = links.map_err(|replica| NotOpen::aborted_by(replica, "a queue is not connected"))?;
        let into_conns = |(peer, links): (usize, Vec<Via<Wire>>)| {
            (peer, links.into_iter().map(|link| link.0.into_conn()).collect())
        };
        Ok(links.into_iter().filter(|(_, links)| !links.is_empty()).map(into_conns).collect())
    }
}
