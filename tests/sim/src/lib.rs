//! A deterministic simulation of one volume: the real engine core, view rules, region keeping and layer
//! plans. Disks, connections, hosts, a controller and a guest are simulated.
//!
//! A run follows from its [`Script`] alone, and a script from a seed. For a while the simulation has trouble.
//! Processes are killed or stopped, hosts lose power, connections break, stall or fall silent. Disks are
//! full, slow or report errors, the volume is attached elsewhere, replicas are replaced or lost. Then the
//! trouble ends, and the volume has to come back by itself. If the last holder of some data is gone for good,
//! it comes back after a salvage.
//!
//! The rules ([`run`] returns the violated one):
//! - a read returns the last acknowledged write of each sector or a concurrent one ([`shorthorn_checker`]),
//!   also after the device was recovered or attached elsewhere;
//! - every write that a flush or a FUA write has acknowledged survives every loss of power;
//! - two reads of a sector agree; an engine that is fenced changes nothing any more;
//! - when the trouble is over, every request is answered, every replica becomes a member, and all of them
//!   read the same.
#![forbid(unsafe_code)]

mod controller;
mod disk;
mod engine;
mod engine_shell;
mod faults;
mod guest;
mod guest_turns;
mod liars;
mod net;
mod occurrence;
mod opening;
mod replica;
mod replica_process;
mod script;
mod scrubs;
mod shrink;
mod simulation;
mod tasks;
mod trouble;
mod watchers;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use fastrand::Rng;
use shorthorn_checker::{Checker, Id, has_rot};
use shorthorn_core::{PeerState, ScrubConfig};
use shorthorn_types::{Generation, Members, Regions, ReplicaId, View, ViewId};
use shorthorn_views::ReplicaViews;

use crate::disk::{BLOCK_SECTORS, Files};
pub use crate::faults::Fault;
use crate::guest::Guest;
use crate::occurrence::Occurrence;
use crate::replica::Replica;
pub use crate::script::{Layout, Script, Strike};
pub use crate::shrink::{Shrunk, shrink};
use crate::simulation::Simulation;
use crate::tasks::Tasks;

/// A part of the rules that is left out, to see that the simulation notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// Replicas keep no write intent and no out-of-sync sets.
    NoIntent,
    /// A flush is acknowledged without being done.
    LyingFlush,
    /// A new engine is admitted while the disk still executes requests of an older one.
    ServeBeforeFenced,
    /// After an unclean stop, the engine believes that the members are equal.
    NoResync,
    /// Requests continue while a view is being changed.
    NotPaused,
    /// The engine does not send the writes of the meantime to a replica that is being rebuilt.
    RebuildingSkipped,
    /// Write intent is cleared without a flush.
    ClearWithoutFlush,
    /// Requests that overlap are in flight together.
    NoRangeTable,
    /// After a write that only some members had space for, the members are not resynced.
    NoGiveBack,
    /// Engines draw no nonce, and replicas answer a proposal that they do not store like one that they have
    /// stored.
    OldProposals,
    /// Stamps are ignored.
    NoStamps,
    /// Replicas do not report rot in their reads.
    UncheckedSources,
    /// The snapshots of a copy are not compared.
    UncheckedLayers,
    /// A block of a snapshot that the source of a copy has lost is not read from another member.
    OthersUnread,
    /// A block of a snapshot that the source of a copy cannot read is not read from another member.
    UnreadIsFinal,
    /// A new replica does not get the list of the blocks that all members have lost.
    LostUnreported,
    /// Any refusal of another member counts as the answer that it does not have a block.
    RefusalsBelieved,
    /// A lost block that has other data after a restart is not lost any more.
    MergedForgotten,
    /// A block that has vanished from the head is not compared if a snapshot has it.
    HolesShowThrough,
    /// The sectors that requests have merged with rot count although the disk has changed the block again.
    StaleSectors,
    /// A source that cannot read many blocks is never the source again.
    NoSecondAttempt,
    /// The first repair takes the sums of a region away, also those beside the rot.
    ForgottenRot,
    /// Known rot is forgotten before the outcome of the request that gives its block other data is known.
    EarlyForgetting,
    /// A page of sums that is not in memory counts as one without sums.
    UnreadPages,
    /// The sums beside rot end although the limit of tracked blocks is reached.
    UntrackedRot,
    /// The sums of lost blocks that are merged with new data are not recorded.
    MergesUnrecorded,
    /// The repair of a block ends the sums of its region, before it is durable.
    RepairsEndSums,
    /// A scrub that is only to report makes the members equal.
    ReportsRepair,
    /// A scrub that is stopped continues.
    ScrubsGoOn,
    /// A repair of a snapshot makes its blocks unknown, also beside requests.
    RepairsCure,
    /// A repair of a snapshot shows its data in place of zeroes that a request has written.
    RepairsUncover,
    /// The sums that show a vanished block of a snapshot are not kept before its repair ends them.
    HolesUnkept,
    /// The former data of a block counts although an engine knows of its rot, and has decided for other data.
    ReportsForgotten,
    /// A source of a copy says where it has data, and not where its sums say that it had some.
    HolesUnseen,
    /// Blocks are read for their sums before the record of later modifications begins.
    SumsBeforeLook,
    /// An engine serves reads after a pause as before.
    PausesUnnoticed,
    /// A replica that has failed ends although its disk does not say that data may be gone.
    EndUnrecorded,
    /// A start never leaves a replica out that it has reached.
    NoOffenders,
    /// A copy is always made of the first member.
    FirstSource,
    /// Neither the engine nor a new replica checks the layers that the source of a copy lists.
    UncheckedLists,
}

/// The options of running a script.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// True to write a log.
    pub trace: bool,
    /// The part of the protocol to leave out.
    pub sabotage: Option<Sabotage>,
}

/// The result of a run.
#[derive(Debug)]
pub struct ScriptResult {
    /// The violated rule; none if the run has passed.
    pub violation: Option<String>,
    /// The number of occurrences of each event.
    pub counts: BTreeMap<&'static str, u64>,
    /// The log, if it was wanted.
    pub log: Vec<String>,
}

/// Events that have to happen in a thousand runs, besides every kind of fault: otherwise the simulation
/// covers less than it seems to.
pub const COVERED: &[&str] = &[
    "full copies",
    "rebuilds",
    "view changes",
    "granted",
    "records renewed",
    "lost writes reported to guests",
    "grants asked",
    "resyncs after an unclean stop",
    "starts from lost caches",
    "salvages needed",
    "salvages run",
    "salvages that may lose",
    "cleared all",
    "expansions",
    "expansions cut off",
    "scrubs",
    "deposed",
    "frozen",
    "drops of late replicas",
    "waits for late members",
    "late members answered",
    "replicas replaced after their loss",
    "failed requests",
    "messages lost",
    "error: write",
    "error: flush",
    "error: read",
    "error: verify",
    "error: state",
    "error: page",
    "error: loss record",
    "failed replicas that ended",
    "failed replicas that were ended",
    "lie: an error where all is done",
    "lie: regions that cannot be",
    "lie: extents that cannot be",
    "lie: a proposal that fails",
    "lie: a source that fails",
    "lie: layers that cannot be",
    "liars judged",
    "starts without an offender",
    "sources that fail",
    "error: ping",
    "error: no space",
    "error: no space for a page",
    "fault: kill replica",
    "fault: cut power of replica",
    "fault: kill engine",
    "fault: kill engine, messages linger",
    "fault: hand over",
    "fault: attach elsewhere",
    "fault: partition",
    "fault: one-way partition",
    "fault: half-open connection",
    "fault: break connection",
    "fault: stop controller",
    "fault: cut power of all",
    "fault: fill disk",
    "fault: slow disk",
    "fault: pause engine",
    "fault: pause replica",
    "fault: clock jumps",
    "fault: replace replica",
    "fault: destroy replica",
    "fault: expand",
    "fault: rot sets",
    "fault: rot blocks",
    "fault: blocks vanish",
    "fault: rot anywhere",
    "fault: blocks vanish anywhere",
    "blocks that rot again",
    "blocks that rot beside rot",
    "blocks that vanish above a snapshot",
    "fault: scrub of a snapshot",
    "fault: scrub",
    "fault: scrub that only reports",
    "fault: isolate engine",
    "reads after a pause",
    "scrubs stopped",
    "fault: another program",
    "regions summed",
    "rot reported",
    "blocks of snapshots that rot",
    "blocks of snapshots of another member",
    "blocks of snapshots that are lost",
    "blocks of snapshots repaired",
    "modifications refused beside rot",
    "repairs refused beside rot",
    "repairs beside a request that has read rot",
    "repairs without space",
    "repairs without the end of sums",
    "repairs refused beside the write of a set",
    "repairs that keep sums",
    "rot that a loss of power brings back",
    "blocks of snapshots that a source cannot read",
    "blocks of snapshots that no member can read",
    "sources without a limit",
    "sources that read too little",
    "snapshot copies cut off",
    "snapshots kept by copies",
    "error: block of a snapshot",
    "rot found by copies",
    "rot found by scrubs",
    "fault: lose state file",
    "fault: restore controller",
    "fault: restore disk",
    "fault: lie at proposals",
    "fault: lie as source",
    "fault: blocks that cannot be read",
    "rolled back replicas that came back",
];

/// The time limit for the volume to come back.
const RECOVERY_US: u64 = 60_000_000;
/// The maximum number of scrubs at the end, if replicas leave meanwhile.
const LAST_SCRUBS_MAX: u32 = 5;
const REGIONS: u64 = 10;
/// The time for which replicas may lie after all other trouble is over, and after the last new member.
const LIES_US: u64 = 30_000_000;
/// The maximum number of such times.
const LIES_MAX: u64 = 4;
/// The time after which replicas that come back by themselves are back.
const PATIENCE_US: u64 = 8_000_000;

/// Runs a script. Then the faults end, and the volume has to recover.
#[must_use]
pub fn run(script: &Script, options: RunOptions) -> ScriptResult {
    let sim = Rc::new(RefCell::new(make_simulation(script, options)));
    let mut tasks = Tasks::default();
    sim.borrow_mut().schedule(script);
    advance(&sim, &mut tasks, script.trouble_us, |_| false);
    sim.borrow_mut().calm_down();
    outlast_lies(&sim, &mut tasks);
    let mut end = sim.borrow().now + RECOVERY_US;
    // While a replica that is gone for good is needed, only the operator can help.
    let is_stuck = |sim: &Simulation| is_recovered(sim) || needs_gone_replica(sim);
    let mut recovered = advance(&sim, &mut tasks, end, is_stuck);
    if recovered && !is_recovered(&sim.borrow()) {
        sim.borrow_mut().salvage();
        end = sim.borrow().now + RECOVERY_US;
        recovered = advance(&sim, &mut tasks, end, is_recovered);
    }
    for _ in 0..LAST_SCRUBS_MAX {
        if !recovered || !order_scrub(&sim) {
            break;
        }
        let (done, views) = (sim.borrow().scrubs_done, sim.borrow().counted("view changes"));
        end = sim.borrow().now + RECOVERY_US;
        recovered = advance(&sim, &mut tasks, end, |sim| sim.scrubs_done > done && is_recovered(sim));
        // It has not seen a replica that has left meanwhile and is back.
        if sim.borrow().counted("view changes") == views {
            break;
        }
    }
    let mut sim = sim.borrow_mut();
    if !recovered && sim.violation.is_none() {
        let state = describe(&sim);
        sim.violate(format!("the volume has not come back: {state}"));
    }
    if sim.violation.is_none() {
        compare_replicas(&mut sim);
    }
    let done = sim.guest.done;
    sim.counts.insert("requests", done);
    ScriptResult {
        violation: sim.violation.take(),
        counts: std::mem::take(&mut sim.counts),
        log: std::mem::take(&mut sim.log),
    }
}

/// Continues some lies after all other trouble is over. As far as the others are enough the volume has to
/// start and to come back without them.
fn outlast_lies(sim: &Rc<RefCell<Simulation>>, tasks: &mut Tasks) {
    if !sim.borrow().has_liars() {
        return;
    }
    let known = Cell::new((sim.borrow().serving(), sim.borrow().now));
    let goes_on = |sim: &Simulation| {
        let ((before, since), members) = (known.get(), sim.serving());
        // A new member can be an honest source of the others.
        let has_gained =
            members.is_some_and(|now| now.iter().any(|id| !before.is_some_and(|b| b.contains(id))));
        known.set((members, if has_gained { sim.now } else { since }));
        sim.serves_with_liars()
    };
    let last = sim.borrow().now + LIES_MAX * LIES_US;
    let mut end = sim.borrow().now + LIES_US;
    let mut is_over = false;
    while !is_over && !advance(sim, tasks, end, goes_on) {
        let next = (known.get().1 + LIES_US).min(last);
        is_over = next <= end || sim.borrow().now < end;
        end = next;
    }
    let mut sim = sim.borrow_mut();
    if is_over && sim.violation.is_none() {
        let is_judged = known.get().1 + LIES_US <= sim.now;
        sim.count(if is_judged { "liars judged" } else { "liars not judged" });
        if is_judged {
            sim.judge_liars();
        }
    }
    sim.end_lies();
}

/// Orders a scrub with repairs. False if it has one replica.
fn order_scrub(sim: &Rc<RefCell<Simulation>>) -> bool {
    let mut sim = sim.borrow_mut();
    let Some(engine) = sim.guest.engine.filter(|_| sim.guest.replicas.len() > 1) else { return false };
    let scrub = ScrubConfig { bytes_per_s: None, repair: true };
    sim.trace(|| "the volume is scrubbed".to_owned());
    sim.order_scrub(engine, 0, scrub)
}

fn make_simulation(script: &Script, options: RunOptions) -> Simulation {
    let mut rng = Rng::with_seed(script.seed ^ 0x6461_7461);
    let size_bytes = Regions::of(1 << 20).region_bytes() * REGIONS + 4096 * script.odd_blocks;
    let ids: Vec<ReplicaId> = (1..=script.replicas.max(1)).map(|n| ReplicaId::from_random(n * 7)).collect();
    let members = Members::new(ids.iter().copied()).unwrap_or_default();
    let view = View { id: ViewId { generation: Generation::NEVER, number: 0 }, members };
    let mut files = Files::default();
    let mut next_id: Id = 1;
    for block in 0..size_bytes / 4096 {
        if rng.u8(..) < 40 {
            files.snapshot.set(block, Some([next_id; BLOCK_SECTORS]));
            next_id += 1;
        }
    }
    files.snapshot.sync(usize::MAX);
    let initial: Vec<Id> = files.content(size_bytes / 4096).into_iter().flatten().collect();
    let replica = |(at, id): (usize, &ReplicaId)| {
        let layout = script.layouts.get(at).copied().unwrap_or_default();
        let seed = script.seed ^ (at as u64 + 1) << 32;
        let mut replica = Replica::new(*id, size_bytes, ReplicaViews::new(view), files.clone(), layout, seed);
        replica.limit_known_rot(script.rot_places);
        replica
    };
    let replicas = ids.iter().enumerate().map(replica).collect();
    let guest = Guest::new(ids, size_bytes, next_id, script);
    let mut sim = Simulation::new(options, script, replicas, guest, Checker::new(&initial));
    sim.layouts.clone_from(&script.layouts);
    sim
}

/// Lets things happen until `until` holds, or the time is over.
fn advance(
    sim: &Rc<RefCell<Simulation>>,
    tasks: &mut Tasks,
    end: u64,
    until: impl Fn(&Simulation) -> bool,
) -> bool {
    loop {
        {
            let mut sim = sim.borrow_mut();
            if sim.violation.is_some() || sim.now >= end {
                return false;
            }
            let Some(what) = sim.next() else { return false };
            let may_be_over = matches!(what, Occurrence::Guest | Occurrence::Control);
            if let Some(what) = sim.is_postponed(what) {
                sim.happen(what);
            }
            if may_be_over && until(&sim) {
                return true;
            }
        }
        run_tasks(sim, tasks);
    }
}

/// Gives the tasks of the processes that were woken their turns.
fn run_tasks(sim: &Rc<RefCell<Simulation>>, tasks: &mut Tasks) {
    loop {
        let (new, woken) = {
            let mut sim = sim.borrow_mut();
            if sim.woken.is_empty() {
                return;
            }
            (std::mem::take(&mut sim.new_engines), std::mem::take(&mut sim.woken))
        };
        for engine in new {
            tasks.spawn(engine, opening::live(Rc::clone(sim), engine));
        }
        for engine in woken {
            let runs = sim.borrow().engines.get(&engine).map(|process| !process.paused);
            match runs {
                Some(true) => tasks.poll(engine),
                Some(false) => {}
                None => tasks.drop_those_of(engine),
            }
        }
    }
}

impl Simulation {
    /// Handles an occurrence.
    pub fn happen(&mut self, what: Occurrence) {
        match what {
            Occurrence::Deliver { conn, to_replica, number, message } => {
                self.deliver(conn, to_replica, number, message);
            }
            Occurrence::Take { conn, to_replica, message } => self.take(conn, to_replica, message),
            Occurrence::DiskDone { replica, boot, op } => self.disk_done(replica, boot, op),
            Occurrence::PageDone { replica, boot, write } => self.page_done(replica, boot, write),
            Occurrence::Sum { replica, boot, is_read: None } => self.look_for_sums(replica, boot),
            Occurrence::Sum { replica, boot, is_read: Some(is_written) } => {
                self.sums_done(replica, boot, is_written);
            }
            Occurrence::Repair { replica, boot, block } => self.repair_snapshot(replica, boot, block),
            Occurrence::Tick { engine } => self.tick(engine),
            Occurrence::Fault(strike) => self.trouble(strike),
            Occurrence::Mend(mend) => self.mend(mend),
            Occurrence::StartReplica { replica, boot } => self.start_replica(replica, boot),
            Occurrence::StartEngine { host } => self.start_engine(host),
            Occurrence::EndEngine { engine } => self.end_engine(engine),
            Occurrence::CloseQueue { engine, conn } => self.close_queue(engine, conn),
            Occurrence::Submit { engine, slot } => self.engine_takes(engine, slot),
            Occurrence::Watch { engine } => self.watch(engine),
            Occurrence::AskArbiter { engine } => self.ask_arbiter(engine),
            Occurrence::Granted { engine, view } => self.granted(engine, view),
            Occurrence::Control => self.control_turn(),
            Occurrence::AttachAnew { attach } => self.attach_again(attach),
            Occurrence::Guest => self.guest_turn(),
            Occurrence::Wake { engine } => self.wake(engine),
        }
    }
}

/// Returns true if the guest has no request left and every replica is a member.
fn is_recovered(sim: &Simulation) -> bool {
    let Some(engine) = sim.guest.engine.and_then(|engine| sim.engines.get(&engine)) else { return false };
    let Some(core) = &engine.core else { return false };
    let members = core.membership().view().members;
    sim.calm
        && !sim.hosts[engine.host].lost_writes
        && sim.guest.budget == 0
        && sim.guest.size_bytes == sim.controller.size_bytes
        && sim.guest.slots.iter().all(Option::is_none)
        && !core.membership().is_changing()
        && core.copy_progress().resync_left_bytes == 0
        && sim.guest.replicas.iter().all(|replica| members.contains(*replica))
        && engine.links.iter().flatten().flatten().all(|conn| sim.is_alive(*conn))
}

/// Returns true if no engine serves, and the attached one cannot start without a replica that is gone.
fn needs_gone_replica(sim: &Simulation) -> bool {
    let is_gone = |id| {
        let replica = sim.replica_index(id).map(|at| &sim.replicas[at]);
        replica.is_some_and(|replica| replica.gone || replica.is_rolled_back)
    };
    let engine = sim.hosts[sim.controller.host].engine.and_then(|engine| sim.engines.get(&engine));
    sim.calm
        && engine.is_some_and(|engine| engine.core.is_none() && engine.begun_us + PATIENCE_US < sim.now)
        && (sim.needed.iter().any(is_gone) || is_torn(sim) || waits_in_vain(sim))
}

/// Returns true if replicas have stored views without a common member, and the record of the dead one was
/// lost with a replica.
fn is_torn(sim: &Simulation) -> bool {
    sim.is_torn && sim.replicas.iter().any(|replica| replica.gone)
}

/// Returns true if half of the volume is left, and the arbiter of a restored store cannot grant a view to it.
/// The missing replicas may have continued alone. Or each half has stored a view of its own, and the record
/// of the granted one is lost.
fn waits_in_vain(sim: &Simulation) -> bool {
    let is_gone = |replica: &Replica| replica.gone || replica.is_rolled_back;
    let is_half_gone = sim.replicas.iter().any(is_gone) || sim.is_torn;
    sim.controller.arbiter.stale_since().is_some() && is_half_gone
}

fn describe(sim: &Simulation) -> String {
    let engine = sim.guest.engine.and_then(|engine| sim.engines.get(&engine));
    let core = engine.and_then(|engine| engine.core.as_ref());
    let states = core.map(|core| {
        let peers = 0..engine.map_or(0, |engine| engine.peers.len());
        let states: Vec<PeerState> = peers.map(|peer| core.membership().state(engine::index(peer))).collect();
        (core.membership().view(), states, core.copy_progress(), core.unfinished())
    });
    let waiting = sim.guest.slots.iter().flatten().count();
    if sim.options.trace {
        return format!("{waiting} requests wait; {core:#?}");
    }
    format!("{waiting} requests wait, {} are to come; {states:?}", sim.guest.budget)
}

/// Heals blocks that all members have lost, and know to be lost: no repair is possible.
fn heal_lost(sim: &mut Simulation) {
    let wanted = sim.guest.replicas.clone();
    let all: Vec<usize> = wanted.iter().filter_map(|id| sim.replica_index(*id)).collect();
    let blocks = all.iter().map(|at| sim.replicas[*at].size_bytes / 4096).min().unwrap_or(0);
    for block in 0..blocks {
        if all.iter().all(|at| sim.replicas[*at].is_known_rotten(block)) {
            all.iter().for_each(|at| sim.replicas[*at].files.heal(block));
            sim.count("blocks that all have lost");
        }
    }
}

/// All members read the same.
fn compare_replicas(sim: &mut Simulation) {
    heal_lost(sim);
    let wanted = sim.guest.replicas.clone();
    let contents: Vec<(ReplicaId, Vec<disk::Block>)> = wanted
        .iter()
        .filter_map(|id| sim.replica_index(*id))
        .map(|at| (sim.replicas[at].id, sim.replicas[at].content()))
        .collect();
    for pair in contents.windows(2) {
        if let Some(block) = (0..pair[0].1.len()).find(|block| pair[0].1[*block] != pair[1].1[*block]) {
            let (one, other) = (&pair[0], &pair[1]);
            let what = format!(
                "block {block} is {:?} in replica {} and {:?} in replica {}",
                one.1[block], one.0, other.1[block], other.0
            );
            return sim.violate(what);
        }
    }
    let flat: Vec<Id> = contents[0].1.iter().flatten().copied().collect();
    if has_rot(&flat) {
        return sim.violate("rot is left after a scrub".to_owned());
    }
    let now = sim.now;
    if let Err(wrong) = sim.checker.read(0, &flat, now, now) {
        sim.violate(format!("at the end: {wrong}"));
    }
}
