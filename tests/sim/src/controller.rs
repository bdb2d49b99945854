//! The controller of the volume, which replaces lost replicas, and the operator, who makes one replica
//! the volume.

use fastrand::Rng;
use shorthorn_checker::Id;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId, is_current};
use shorthorn_views::{Arbiter, ReplicaViews};

use crate::disk::Files;
use crate::faults::Replacement;
use crate::net;
use crate::occurrence::Occurrence;
use crate::replica::{Judgement, Replica};
use crate::script::Layout;
use crate::simulation::Simulation;

/// The interval at which the controller looks for lost replicas.
const CONTROL_US: u64 = 400_000;

impl Simulation {
    /// Returns true if both ends have the connection. The engine learns later that a replica has ended and
    /// may have lost data.
    pub fn is_alive(&self, conn: net::ConnId) -> bool {
        self.conns.get(&conn).is_some_and(|conn| conn.engine_open && conn.replica_open)
    }

    /// Replaces a replica like the controller, only while all others are members.
    pub fn replace_replica(&mut self, victim: usize) -> bool {
        if !self.has_room() || self.guest.replicas.len() < 2 || !self.controller.up || !self.all_are_members()
        {
            return false;
        }
        let place = victim % self.guest.replicas.len();
        let Some(at) = self.replica_index(self.guest.replicas[place]) else { return false };
        if !self.is_one_left_without(at) {
            return false;
        }
        self.trace(|| format!("replica {at} is given up"));
        let mut rng = self.rng.fork();
        self.lose_replica(at, &mut rng);
        self.guest.replicas[place] = self.new_replica();
        true
    }

    /// Destroys a replica for good, at any time. One with data is always left.
    pub fn destroy_replica(&mut self, victim: usize, replacement: Replacement, rng: &mut Rng) -> bool {
        let at = self.victim(victim);
        if self.replicas[at].gone || !self.is_one_left_without(at) || !self.has_room() {
            return false;
        }
        self.replacement = replacement;
        self.lose_replica(at, rng);
        true
    }

    /// Has a lost replica return under its number. It is one more than the volume had. Only one returns: two
    /// could be the majority of a view from before they were lost.
    pub fn return_replica(&mut self, victim: usize, for_us: u64) -> bool {
        let lost: Vec<usize> = (0..self.replicas.len()).filter(|at| self.replicas[*at].gone).collect();
        let Some(at) = victim.checked_rem(lost.len()).map(|pick| lost[pick]) else { return false };
        if self.has_returned || !self.controller.up {
            return false;
        }
        self.has_returned = true;
        self.trace(|| format!("replica {at} returns"));
        self.replicas[at].gone = false;
        let id = self.replicas[at].id;
        if !self.guest.replicas.contains(&id) {
            self.guest.replicas.push(id);
            self.wanted_replicas += 1;
            self.count("lost replicas that return");
        }
        let boot = self.fresh();
        self.after(for_us, Occurrence::StartReplica { replica: at, boot });
        true
    }

    fn has_room(&self) -> bool {
        self.replicas.len() < crate::script::REPLICAS_MAX
    }

    /// Returns true if another replica has data.
    fn is_one_left_without(&self, at: usize) -> bool {
        (0..self.replicas.len()).any(|other| other != at && self.knows_an_engine(other))
    }

    fn knows_an_engine(&self, at: usize) -> bool {
        let report = self.replicas[at].judgement().report;
        !self.replicas[at].gone && shorthorn_views::remembers(&report, None)
    }

    fn lose_replica(&mut self, at: usize, rng: &mut Rng) {
        self.trace(|| format!("replica {at} is lost"));
        self.replicas[at].gone = true;
        self.kill_replica(at, true, 0, rng);
    }

    /// Makes a new replica without any state. It only knows the first members of the volume.
    fn new_replica(&mut self) -> ReplicaId {
        let number = self.replicas.len() as u64;
        let id = ReplicaId::from_random(1000 + number);
        self.trace(|| format!("{id} is made"));
        let first = View {
            id: ViewId { generation: Generation::NEVER, number: 0 },
            members: self.guest.first_members,
        };
        let layout = Layout { is_flat: true, has_zeroes: false, ..self.layout(self.replicas.len()) };
        let (size, seed) = (self.controller.size_bytes, self.rng.u64(..));
        let views = ReplicaViews::new(first);
        let mut replica = Replica::new(id, size, views, Files::default(), layout, seed);
        replica.limit_known_rot(self.rot_places);
        self.replicas.push(replica);
        let replica = self.replicas.len() - 1;
        self.after(1000, Occurrence::Sum { replica, boot: 0, is_read: None });
        id
    }

    fn layout(&self, at: usize) -> Layout {
        self.layouts.get(at).copied().unwrap_or_default()
    }

    fn all_are_members(&self) -> bool {
        let Some(engine) = self.guest.engine.and_then(|engine| self.engines.get(&engine)) else {
            return false;
        };
        let Some(core) = &engine.core else { return false };
        let members = core.membership().view().members;
        self.guest.replicas.iter().all(|replica| members.contains(*replica))
            && !core.membership().is_changing()
    }

    /// Replaces the replicas that are gone, once an engine serves without them.
    pub fn control_turn(&mut self) {
        self.after(CONTROL_US, Occurrence::Control);
        self.renew_record();
        let Some(engine) = self.guest.engine.and_then(|engine| self.engines.get(&engine)) else { return };
        let Some(core) = engine.core.as_ref().filter(|core| !core.membership().is_changing()) else { return };
        let members = core.membership().view().members;
        if !self.controller.up {
            return;
        }
        let is_lost = |id: &ReplicaId| {
            !members.contains(*id) && self.replica_index(*id).is_some_and(|at| self.replicas[at].gone)
        };
        let lost = self.guest.replicas.iter().position(is_lost);
        let are_others_members =
            self.guest.replicas.iter().all(|replica| is_lost(replica) || members.contains(*replica));
        self.replace_lost(lost, are_others_members);
    }

    /// Takes the next step of the replacement of the replica that has the place `lost`, if any.
    fn replace_lost(&mut self, lost: Option<usize>, are_others_members: bool) {
        let count = self.guest.replicas.len();
        match (lost, self.replacement) {
            (None, _) if count >= self.wanted_replicas => {}
            (None, _) => {
                self.count("replicas replaced after others were given up");
                let new = self.new_replica();
                self.guest.replicas.push(new);
            }
            (Some(place), Replacement::AtOnce) => {
                self.count("replicas replaced after their loss");
                self.guest.replicas[place] = self.new_replica();
            }
            (Some(place), Replacement::OldFirst) => {
                self.guest.replicas.remove(place);
            }
            (Some(_), Replacement::NewFirst) if count <= self.wanted_replicas => {
                self.count("replicas replaced before others are given up");
                let new = self.new_replica();
                self.guest.replicas.push(new);
            }
            (Some(place), Replacement::NewFirst) if are_others_members => {
                self.guest.replicas.remove(place);
            }
            (Some(_), Replacement::NewFirst) => {}
        }
    }

    /// Renews the record of the arbiter of a restored store, which grants again once an engine that was
    /// started since serves without it.
    fn renew_record(&mut self) {
        let Some(process) = self.hosts[self.controller.host].engine.and_then(|id| self.engines.get(&id))
        else {
            return;
        };
        let Some(core) = process.core.as_ref().filter(|_| self.controller.up) else { return };
        let view = core.membership().view();
        let renewed = self.controller.arbiter.renewed(view);
        if let Some(arbiter) = renewed.filter(|_| view.id.generation.attach == self.controller.attach) {
            self.trace(|| format!("the arbiter grants again, from {view} on"));
            self.count("records renewed");
            self.controller.arbiter = arbiter;
        }
    }

    /// Makes the best replica the volume, like an operator. Unless it is a member of every view that may have
    /// counted, it may lack anything, but holds nothing that was never written.
    pub fn salvage(&mut self) {
        self.count("salvages needed");
        let mut rng = self.rng.fork();
        for host in 0..self.hosts.len() {
            self.kill_engine(host, 0, &mut rng);
        }
        self.guest_moves();
        self.mark_forgotten_undecided();
        let Some((at, lacks_nothing)) = self.best_choice() else {
            return self.violate("no replica is left to be the volume".to_owned());
        };
        self.count(if lacks_nothing { "salvages that lose nothing" } else { "salvages that may lose" });
        let id = self.replicas[at].id;
        self.controller.attach += 1;
        let attach = self.controller.attach;
        self.trace(|| format!("replica {at} ({id}) is salvaged as attachment {attach}"));
        self.kill_replica(at, false, 1000, &mut rng);
        self.replicas[at].salvage(attach);
        self.controller.arbiter = salvaged_arbiter(attach, id);
        if std::mem::take(&mut self.lost_unreported) {
            // Its guest got errors, and the next one starts over.
            let now = self.now;
            self.checker.power_lost(now);
        }
        // It may have grown when the device has not yet.
        let known = self.checker.sectors();
        let content: Vec<Id> = self.replicas[at].content().into_iter().flatten().take(known).collect();
        let now = self.now;
        let judged = if lacks_nothing {
            self.checker.read(0, &content, now, now)
        } else {
            self.checker.salvaged(&content)
        };
        if let Err(wrong) = judged {
            return self.violate(format!("after a salvage: {wrong}"));
        }
        self.attach_elsewhere(&mut rng);
        self.count("salvages run");
    }

    /// Returns the replica that lacks the least, and whether it surely lacks nothing. Then it is a member of
    /// every view that any replica has ever stored and that may count, including replicas that are gone.
    fn best_choice(&self) -> Option<(usize, bool)> {
        let all: Vec<Judgement> = self.replicas.iter().map(Replica::judgement).collect();
        let newest = all.iter().map(|one| one.report.committed).max_by_key(|view| view.id)?;
        let proposed = all.iter().flat_map(|one| one.report.proposed.clone());
        let may_count: Vec<View> = proposed
            .chain(self.controller.arbiter.granted())
            .filter(|view| view.id > newest.id)
            .chain([newest])
            .collect();
        let is_member = |at: &usize| newest.members.contains(self.replicas[*at].id);
        let members = (0..self.replicas.len()).filter(is_member);
        let newest_stamp = members.filter_map(|at| all[at].stamp).max().unwrap_or(0);
        let judge = |at: usize| {
            let one = &all[at];
            let lacks = may_count.iter().filter(|view| !view.members.contains(self.replicas[at].id)).count();
            let rolled_back = !is_current(one.stamp, newest_stamp);
            let is_sure = lacks == 0 && !one.rebuilding && !rolled_back && !one.lost_cache;
            let age = std::cmp::Reverse(one.report.committed.id);
            (at, is_sure, (one.rebuilding, lacks, rolled_back, one.lost_cache, age))
        };
        let known = (0..self.replicas.len()).filter(|at| self.knows_an_engine(*at));
        let best = known.map(judge).min_by_key(|(.., judged)| *judged)?;
        Some((best.0, best.1))
    }
}

/// Returns the arbiter as the controller makes it: the salvaged view is the last grant, so that no engine
/// starts from others.
fn salvaged_arbiter(attach: u64, replica: ReplicaId) -> Arbiter {
    let members = Members::new([replica]).unwrap_or_default();
    let first = View { id: ViewId { generation: Generation::NEVER, number: 0 }, members };
    let salvaged = View { id: ViewId { generation: Generation::new(attach, 0), number: 0 }, members };
    let honoured = ReplicaReport { committed: first, proposed: Vec::new() };
    Arbiter::default().ask(attach, salvaged, &honoured, &members).unwrap_or_default()
}
