//! A replica process as it runs: connections, requests in the hands of the disk, pages, and its end.

mod growth;
mod lies;
mod power;
mod repair;
mod sums;

pub use sums::Rotting;

use std::collections::BTreeMap;
use std::rc::Rc;

use fastrand::Rng;
use shorthorn_checker::{Micros, has_rot};
use shorthorn_regions::PAGE_BYTES;
use shorthorn_replica_core::{PageEnd, QueueId, Ready, RefusalReason, Superseded, Waiter, WaitingRequests};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, Generation, Regions, ReplicaId};
use shorthorn_wire::{LayerList, RegionsQuery};

use crate::Sabotage;
use crate::faults::{FaultyOperation, LieAt};
use crate::guest::sectors;
use crate::net::{Ask, ConnId, NetMessage, ReplicaAnswer};
use crate::occurrence::{Mend, Occurrence};
use crate::replica::{Op, Replica, Summing, block_numbers, block_range, modified};
use crate::simulation::Simulation;

/// The interval at which a failed process checks whether it may end.
const FAILED_POLL_US: Micros = 50_000;

impl Simulation {
    pub(super) fn disk_delay(&mut self, replica: usize) -> Micros {
        let replica = &mut self.replicas[replica];
        let base = replica.rng.u64(30..600);
        if replica.slow_by_us > 0 { base + replica.rng.u64(0..replica.slow_by_us) } else { base }
    }

    pub(super) fn answer(&mut self, conn: ConnId, number: u64, answer: ReplicaAnswer) {
        if self.conns.get(&conn).is_some_and(|conn| conn.replica_open) {
            self.send(conn, false, NetMessage::Answer(number, Box::new(answer)));
        }
    }

    /// Handles the arrival of a request at a replica.
    pub fn asked(&mut self, id: ConnId, number: u64, ask: Ask) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (at, boot) = (conn.replica, conn.boot);
        let replica = &self.replicas[at];
        if !replica.up || replica.boot != boot || !conn.replica_open {
            return self.end_at_replica(id);
        }
        if let Ask::Hello(generation, queue) = ask {
            conn.place = Some((generation, queue));
            return self.hello(at, id, number, QueueId { generation, queue });
        }
        if replica.admission.queue_id(id).is_none() {
            return self.end_at_replica(id);
        }
        if replica.failed {
            let answer = ReplicaAnswer::Error(Errno::IO);
            self.look_at_check(at, id, &ask, &answer);
            return self.answer(id, number, answer);
        }
        self.execute(at, Op::new(id, number, ask));
    }

    /// Records that a check of the engine finds a difference, because the replica cannot read its data.
    fn look_at_check(&mut self, at: usize, id: ConnId, ask: &Ask, answer: &ReplicaAnswer) {
        if let (Ask::Verify(_), ReplicaAnswer::Error(_), Some(conn)) = (ask, answer, self.conns.get(&id)) {
            *self.failed_checks.entry((at, conn.engine)).or_default() += 1;
        }
    }

    pub fn end_at_replica(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let at = conn.replica;
        if std::mem::replace(&mut conn.replica_open, false) {
            self.send(id, false, NetMessage::Close);
        }
        self.advance_connections(at);
    }

    /// Handles the end of the engine's side.
    pub fn engine_has_closed(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.replica_open = false;
        let at = conn.replica;
        self.advance_connections(at);
    }

    fn is_open_at_replica(&self, id: ConnId) -> bool {
        self.conns.get(&id).is_some_and(|conn| conn.replica_open)
    }

    fn hello(&mut self, at: usize, id: ConnId, number: u64, queue_id: QueueId) {
        let replica = &mut self.replicas[at];
        if replica.failed {
            return self.end_at_replica(id);
        }
        let fenced = replica.change(|state, disk| state.hello(disk, queue_id.generation, queue_id.queue));
        self.look_at_failure(at, FaultyOperation::State);
        match fenced {
            Err(Errno::NOT_PERMITTED) => return self.refuse_older(at, id, number),
            Err(_) => return self.end_at_replica(id),
            Ok(_) => {}
        }
        let replica = &mut self.replicas[at];
        let superseded = replica.admission.arrive(queue_id, (id, number));
        self.close_superseded(at, superseded);
        self.advance_connections(at);
    }

    fn close_superseded(&mut self, at: usize, superseded: Superseded<ConnId, (ConnId, u64)>) {
        for id in superseded.close {
            self.end_at_replica(id);
        }
        for (_, (id, number), why) in superseded.refuse {
            match why {
                RefusalReason::Fenced => self.refuse_older(at, id, number),
                RefusalReason::QueueAgain | RefusalReason::TooMany => self.end_at_replica(id),
            }
        }
    }

    fn refuse_older(&mut self, at: usize, id: ConnId, number: u64) {
        let holder = self.replicas[at].state.views().generation();
        self.answer(id, number, ReplicaAnswer::Deposed(holder));
        self.end_at_replica(id);
    }

    /// Forgets connections that are gone, and admits the candidates that waited for that.
    fn advance_connections(&mut self, at: usize) {
        let sabotaged = self.options.sabotage == Some(Sabotage::ServeBeforeFenced);
        let replica = &self.replicas[at];
        let is_gone =
            |id: &ConnId| !self.is_open_at_replica(*id) && (sabotaged || !replica.is_busy_with(*id));
        let gone: Vec<ConnId> = replica.admission.connections().filter(is_gone).collect();
        gone.into_iter().for_each(|id| self.replicas[at].admission.gone(id));
        loop {
            let replica = &mut self.replicas[at];
            match replica.admission.next_ready(replica.failed) {
                Some(Ready::Welcome(queue_id, (id, number))) => self.welcome(at, id, number, queue_id),
                Some(Ready::Refuse(_, (id, _))) => self.end_at_replica(id),
                None => return,
            }
        }
    }

    fn welcome(&mut self, at: usize, id: ConnId, number: u64, queue_id: QueueId) {
        // The engine may have closed it while it waited.
        if self.is_open_at_replica(id) {
            let replica = &mut self.replicas[at];
            let welcome = replica.welcome();
            replica.admission.open(id, queue_id);
            self.answer(id, number, ReplicaAnswer::Welcome(Box::new(welcome)));
        }
    }

    fn execute(&mut self, at: usize, mut op: Op) {
        if let Some(range) = modified(&op.ask) {
            let is_repair = match self.prepare_sums(at, &op.ask, range) {
                Ok(is_repair) => is_repair,
                Err(errno) => return self.answer(op.conn, op.number, ReplicaAnswer::Error(errno)),
            };
            let sabotaged = self.options.sabotage == Some(Sabotage::NoIntent);
            if !sabotaged {
                let Replica { waiting, state, .. } = &mut self.replicas[at];
                let admitted = match is_repair {
                    true => waiting.admit_repair(state, range, op),
                    false => waiting.admit(state, range, op),
                };
                let Some(admitted) = admitted else { return self.write_pages(at) };
                op = admitted;
            }
            let sabotage = self.options.sabotage;
            self.replicas[at].sums_follow(&op, range, sabotage);
        }
        match &op.ask {
            Ask::Propose(..)
            | Ask::Commit(_)
            | Ask::Mark(_)
            | Ask::Layers
            | Ask::ReadSnapshot(_)
            | Ask::ReadSnapshotBlock(_)
            | Ask::HeadExtents(_)
            | Ask::CopyBegin(_)
            | Ask::CopySnapshot(..)
            | Ask::SnapshotEnd
            | Ask::CopyEnd
            | Ask::Expand(_)
            | Ask::Regions(_) => {
                self.control(at, op);
            }
            Ask::Ping => {
                let free_mib = self.replicas[at].free_mib();
                self.answer(op.conn, op.number, ReplicaAnswer::Pong { free_mib });
            }
            _ => self.give_to_disk(at, op),
        }
    }

    fn give_to_disk(&mut self, at: usize, mut op: Op) {
        op.mark = self.replicas[at].files.head.mark();
        let delay = self.disk_delay(at);
        self.repair_beside(at, &op, delay);
        let number = self.fresh();
        self.replicas[at].ops.insert(number, op);
        let boot = self.replicas[at].boot;
        self.after(delay, Occurrence::DiskDone { replica: at, boot, op: number });
    }

    /// Completes a request on the disk.
    pub fn disk_done(&mut self, at: usize, boot: u64, number: u64) {
        let sabotage = self.options.sabotage;
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some(op) = replica.ops.remove(&number) else { return };
        let (mut answer, error) = replica.done(&op, sabotage);
        if let Some(block) = self.replicas[at].forgotten_rot.take() {
            self.violate(format!("replica {at} has forgotten the rot of block {block}"));
        }
        if let Some(block) = self.replicas[at].stale_lost.take() {
            self.violate(format!("block {block} of replica {at} has other data, and counts as lost"));
        }
        self.look_at_rot(at, &op.ask, &answer);
        self.continue_after(at, error);
        let replica = &mut self.replicas[at];
        if replica.failed {
            // The kernel may have done it all the same.
            answer = ReplicaAnswer::Error(Errno::IO);
        }
        self.look_at_check(at, op.conn, &op.ask, &answer);
        if let Some(range) = modified(&op.ask) {
            let (engine, boot) = self.conns.get(&op.conn).map_or((0, 0), |conn| (conn.engine, conn.boot));
            self.trace(|| {
                format!(
                    "  replica {at} of {boot} has done {} for {engine}: {answer:?}",
                    describe(&op.ask, range)
                )
            });
        }
        // A check that fails without need says nothing about the volume.
        let may_lie = !matches!(answer, ReplicaAnswer::Error(_)) && !matches!(op.ask, Ask::Verify(_));
        if may_lie && self.replicas[at].takes_error(FaultyOperation::Answer) {
            answer = ReplicaAnswer::Error(Errno::IO);
            self.count(FaultyOperation::Answer.name());
        }
        if matches!(answer, ReplicaAnswer::Error(Errno::NO_SPACE)) {
            self.count("error: no space");
        }
        self.answer(op.conn, op.number, answer);
        self.advance_connections(at);
    }

    /// Checks that exactly the rotten blocks are reported, and that no copy sends them.
    fn look_at_rot(&mut self, at: usize, ask: &Ask, answer: &ReplicaAnswer) {
        let replica = &self.replicas[at];
        let wrong = match (ask, answer) {
            (Ask::CheckedRead(range) | Ask::Verify(range), ReplicaAnswer::Error(Errno::ROTTEN)) => {
                let reported = replica.rotten_blocks(*range);
                reported
                    .into_iter()
                    .find(|block| {
                        let may_look_rotten =
                            replica.has_recorded_lost(*block) || replica.doubted.contains(block);
                        !replica.files.rot.contains_key(block) && !may_look_rotten
                    })
                    .map(|block| format!("block {block} of replica {at} looks rotten and is sound"))
            }
            (Ask::Write(range, data, _), _) if has_rot(data) => {
                Some(format!("rot is copied to replica {at} at {range}"))
            }
            _ => None,
        };
        if let (
            Ask::CheckedRead(range) | Ask::Verify(range),
            ReplicaAnswer::Data(_) | ReplicaAnswer::Check(_),
        ) = (ask, answer)
        {
            let replica = &mut self.replicas[at];
            block_numbers(*range).for_each(|block| replica.known_rot.found_sound(block));
        }
        if let (Ask::CheckedRead(range) | Ask::Verify(range), ReplicaAnswer::Error(Errno::ROTTEN)) =
            (ask, answer)
        {
            self.count("rot reported");
            let sabotage = self.options.sabotage;
            let replica = &mut self.replicas[at];
            if let Some(block) = replica.rotten_blocks(*range).first() {
                replica.know_rot(*block, *range, sabotage);
                if sabotage != Some(Sabotage::ReportsForgotten) {
                    replica.known_rot.reported(*block);
                }
                replica.files.report(*block);
            }
        }
        if let Some(wrong) = wrong {
            self.violate(wrong);
        }
    }

    /// Counts an error of the disk. After all errors except for those of reads, nothing is served any more.
    fn continue_after(&mut self, at: usize, error: Option<FaultyOperation>) {
        let Some(error) = error else { return };
        if matches!(error, FaultyOperation::Read | FaultyOperation::Verify) || self.replicas[at].failed {
            return self.count(error.name());
        }
        self.replicas[at].change(|state, disk| state.fail(disk, error.name().to_owned()));
        self.look_at_failure(at, error);
    }

    /// Gives waiting requests up, and restarts the replica later, if it has failed just now.
    pub(super) fn look_at_failure(&mut self, at: usize, error: FaultyOperation) {
        let replica = &mut self.replicas[at];
        if replica.state.failure().is_none() || std::mem::replace(&mut replica.failed, true) {
            return;
        }
        let (boot, restarts_after) = (replica.boot, replica.restarts_after.max(1));
        replica.is_ended_by_others = replica.rng.bool();
        let is_recorded = replica.may_end();
        self.count(error.name());
        if !is_recorded {
            self.count(FaultyOperation::LossRecord.name());
        }
        self.give_up_waiting(at, Errno::IO);
        self.after(restarts_after, Occurrence::Mend(Mend::Failed(at, boot)));
    }

    /// Ends the process of a failed replica, if it may end; else this is tried again.
    pub fn end_failed(&mut self, at: usize, boot: u64) {
        let sabotaged = self.options.sabotage == Some(Sabotage::EndUnrecorded);
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.failed || !replica.up {
            return;
        }
        if !replica.paused && !replica.may_end() && !sabotaged {
            replica.retry_record();
        }
        let may_end = replica.may_end() || sabotaged;
        let ends_itself = !replica.paused && replica.is_quiet();
        if !may_end || !(ends_itself || replica.is_ended_by_others) {
            self.after(FAILED_POLL_US, Occurrence::Mend(Mend::Failed(at, boot)));
            return;
        }
        self.count(if ends_itself {
            "failed replicas that ended"
        } else {
            "failed replicas that were ended"
        });
        let mut rng = self.rng.fork();
        self.kill_replica(at, false, 1000, &mut rng);
    }

    /// Answers everything that waits for a page with an error.
    fn give_up_waiting(&mut self, at: usize, errno: Errno) {
        while let Some(waiter) = self.replicas[at].waiting.give_up() {
            let (conn, number) = match waiter {
                Waiter::Modification(op) => {
                    self.replicas[at].sums_are_refused(&op, errno);
                    (op.conn, op.number)
                }
                Waiter::Mark(mark) => mark,
            };
            self.answer(conn, number, ReplicaAnswer::Error(errno));
        }
    }

    fn control(&mut self, at: usize, op: Op) {
        let Some(QueueId { generation, .. }) = self.replicas[at].admission.queue_id(op.conn) else { return };
        let sabotaged = self.options.sabotage == Some(Sabotage::OldProposals);
        if let Some(answer) = self.lie(at, generation, &op.ask) {
            return self.answer(op.conn, op.number, answer);
        }
        let replica = &mut self.replicas[at];
        let answer = match &op.ask {
            Ask::Propose(view, basis) => {
                match replica.change(|state, disk| state.propose(disk, generation, *view, basis)) {
                    Err(Errno::NOT_PERMITTED) if sabotaged => Ok(()),
                    answer => answer,
                }
            }
            Ask::Commit(view) => replica.change(|state, disk| state.commit(disk, generation, *view)),
            Ask::Mark(mark) => match replica.change(|state, disk| state.mark(disk, mark)) {
                Ok(None) => Ok(()),
                Ok(Some(ticket)) => {
                    replica.waiting.add_mark((op.conn, op.number), ticket);
                    return self.write_pages(at);
                }
                Err(errno) => Err(errno),
            },
            Ask::Layers => {
                let layers = replica.durable.layers(replica.size_bytes);
                return self.answer(op.conn, op.number, ReplicaAnswer::Layers(layers));
            }
            Ask::ReadSnapshot(blocks) => return self.read_snapshot(at, &op, blocks),
            Ask::ReadSnapshotBlock(block) => return self.read_snapshot_block(at, &op, *block),
            Ask::HeadExtents(from_bytes) => return self.send_extents(at, &op, *from_bytes),
            Ask::CopyBegin(layers) => match self.begin_copy(at, layers) {
                Ok(copying) => return self.answer(op.conn, op.number, copying),
                Err(errno) => Err(errno),
            },
            Ask::CopySnapshot(file, blocks, lost) => match self.copy_snapshot(at, file, blocks, lost) {
                true => Ok(()),
                false => return,
            },
            Ask::SnapshotEnd => replica.write_document(|replica| {
                replica.durable.is_snapshot_done = true;
                Ok(())
            }),
            Ask::CopyEnd => replica.write_document(|replica| {
                replica.durable.rebuilding = false;
                replica.record_cured_by_copy();
                Ok(())
            }),
            Ask::Expand(size_bytes) => return self.expand_replica(at, &op, *size_bytes),
            Ask::Regions(query) => return self.send_regions(at, &op, query),
            _ => Ok(()),
        };
        self.look_at_failure(at, FaultyOperation::State);
        self.answer(op.conn, op.number, answer.map_or_else(ReplicaAnswer::Error, |()| ReplicaAnswer::Done));
    }

    fn begin_copy(&mut self, at: usize, layers: &LayerList) -> Result<ReplicaAnswer, Errno> {
        let is_sabotaged = self.options.sabotage == Some(Sabotage::UncheckedLists);
        let replica = &mut self.replicas[at];
        replica.write_document(|replica| replica.copy_begin(layers, is_sabotaged))?;
        let (id, can_have) = (replica.id, replica.can_have(layers));
        let is_snapshot_done = replica.durable.is_snapshot_done;
        if !can_have {
            self.violate(format!("{id} has taken layers that no replica can have: {layers:?}"));
        }
        Ok(ReplicaAnswer::Copying { is_snapshot_done })
    }

    fn send_extents(&mut self, at: usize, op: &Op, from_bytes: u64) {
        let replica = &mut self.replicas[at];
        replica.files.copy_covered();
        if replica.durable.has_snapshot {
            // A copy of the head does not find them.
            let vanished: Vec<u64> = replica.files.vanished_from_head().collect();
            vanished.into_iter().for_each(|block| replica.heal_or_doubt(block));
        }
        let mut page = replica.head_extents(from_bytes);
        if replica.takes_error(FaultyOperation::Extents) {
            replica.spoil_extents(&mut page);
            self.count(FaultyOperation::Extents.name());
        }
        self.answer(op.conn, op.number, ReplicaAnswer::Extents(page));
    }

    fn send_regions(&mut self, at: usize, op: &Op, query: &RegionsQuery) {
        let sabotage = self.options.sabotage;
        let replica = &mut self.replicas[at];
        let mut page = replica.regions(query, sabotage);
        if replica.takes_error(FaultyOperation::Regions) {
            replica.spoil_regions(&mut page);
            self.count(FaultyOperation::Regions.name());
        }
        self.answer(op.conn, op.number, ReplicaAnswer::Page(page));
    }

    pub(super) fn write_pages(&mut self, at: usize) {
        let lazy = self.replicas[at].rng.bool();
        loop {
            let number = self.fresh();
            let replica = &mut self.replicas[at];
            let Some(write) = replica.waiting.next_write(&mut replica.state, lazy) else { return };
            let (slot, key, page, bytes) = (write.slot, write.key, write.page, write.bytes.to_vec());
            replica.pages.insert(number, (slot, Some(key), page, bytes));
            let boot = replica.boot;
            let delay = self.disk_delay(at);
            self.after(delay, Occurrence::PageDone { replica: at, boot, write: number });
        }
    }

    /// Completes the write of a page of a set of regions.
    pub fn page_done(&mut self, at: usize, boot: u64, number: u64) {
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some((slot, key, page, bytes)) = replica.pages.remove(&number) else { return };
        let breaks = key.is_some() && replica.takes_error(FaultyOperation::Page);
        let has_no_space = key.is_some() && replica.full_for_pages;
        if let Some(key) = key.filter(|_| !has_no_space) {
            let written = if breaks { replica.rng.usize(0..PAGE_BYTES / 512) * 512 } else { bytes.len() };
            replica.durable.write_page(key, page, &bytes[..written]);
        }
        let outcome = match (breaks, has_no_space) {
            (true, _) => Err(Errno::IO),
            (_, true) => Err(Errno::NO_SPACE),
            _ => Ok(()),
        };
        match replica.waiting.page_ended(&mut replica.state, slot, outcome) {
            PageEnd::Written => self.resume_waiting(at),
            PageEnd::Again => {}
            PageEnd::NoSpace(errno) => {
                self.count("error: no space for a page");
                self.give_up_waiting(at, errno);
            }
            PageEnd::Failed(_) => self.continue_after(at, Some(FaultyOperation::Page)),
        }
        self.advance_connections(at);
    }

    /// Examines the requests that wait for pages.
    fn resume_waiting(&mut self, at: usize) {
        let mut again = Vec::new();
        self.replicas[at].waiting.take_modifications(&mut again);
        for op in again {
            self.execute(at, op);
        }
        let replica = &mut self.replicas[at];
        let durable = std::iter::from_fn(|| replica.waiting.next_durable_mark(replica.state.intent_log()));
        let marks: Vec<(ConnId, u64)> = durable.collect();
        for (conn, number) in marks {
            self.answer(conn, number, ReplicaAnswer::Done);
        }
        self.write_pages(at);
    }

    /// Kills the process; with `power`, its host is off. It is back after `for_us`; 0: a random time. Returns
    /// false if it does not run.
    ///
    /// A failed replica that could not record that stays until it can, or its host loses power. If it is
    /// killed all the same, the next process takes its data for whole; the real one reports that to the
    /// operator.
    pub fn kill_replica(&mut self, at: usize, power: bool, for_us: Micros, rng: &mut Rng) -> bool {
        let sabotaged = self.options.sabotage == Some(Sabotage::EndUnrecorded);
        let sabotage = self.options.sabotage;
        let is_unrecorded = sabotage == Some(Sabotage::MergesUnrecorded);
        let replica = &self.replicas[at];
        let has_to_stay = replica.failed && !replica.may_end() && !power && !sabotaged;
        if !replica.up || has_to_stay {
            return false;
        }
        self.trace(|| {
            format!("replica {at} is killed{}", if power { ", the host has no power" } else { "" })
        });
        let replica = &mut self.replicas[at];
        replica.up = false;
        replica.end_summing(rng);
        replica.paused = false;
        replica.backlog.clear();
        // Operations that the kernel already has may happen, or a part of them.
        for op in std::mem::take(&mut replica.ops).into_values() {
            let changes = replica.changes(&op);
            replica.sums_are_merged(&op, &changes, sabotage);
            if !is_unrecorded {
                replica.record_merged(&op);
            }
            for (block, content) in changes {
                if rng.bool() {
                    replica.put(block, content);
                }
            }
        }
        for (_, key, page, bytes) in std::mem::take(&mut replica.pages).into_values() {
            let Some(key) = key else { continue };
            match rng.u8(0..3) {
                0 => {}
                1 => replica.durable.write_page(key, page, &bytes),
                _ => replica.durable.write_page(key, page, &bytes[..rng.usize(0..PAGE_BYTES / 512) * 512]),
            }
        }
        replica.waiting = WaitingRequests::default();
        let admission = std::mem::take(&mut replica.admission);
        if power {
            self.lose_power(at, rng);
        }
        let mut open: Vec<ConnId> = admission.connections().collect();
        open.extend(admission.candidates().map(|(conn, _)| *conn));
        open.retain(|conn| self.is_open_at_replica(*conn));
        for conn in open {
            if rng.bool() {
                self.lose_suffix(conn, rng);
            }
            self.end_at_replica(conn);
        }
        if !self.replicas[at].gone {
            let delay = if for_us > 0 { for_us } else { rng.u64(5_000..2_500_000) };
            let boot = self.fresh();
            self.after(delay, Occurrence::StartReplica { replica: at, boot });
        }
        true
    }
}

fn describe(ask: &Ask, range: ByteRange) -> String {
    let sectors = sectors(range);
    match ask {
        Ask::Write(_, data, _) => format!("write {:?} of {:?}", sectors, data.first()),
        Ask::Discard(_) => format!("discard {sectors:?}"),
        _ => format!("zeroes {sectors:?}"),
    }
}
