//! A deterministic simulation of one volume: the real engine core, view rules, region keeping and layer plans, over simulated
//! disks, connections, hosts, a controller and a guest.
//!
//! A run follows from its seed alone. For a while there is trouble: processes are killed, hosts lose power, connections break
//! or stall, disks are full, slow or report errors, the volume is attached elsewhere, replicas are replaced. Then the
//! trouble ends, and the volume has to come back by itself.
//!
//! What must hold ([`run`] says which did not):
//! - a read returns the last acknowledged write of each sector or a concurrent one ([`checker`]), also after the device
//!   was recovered or attached elsewhere;
//! - what a flush or a FUA write has acknowledged survives every loss of power;
//! - two reads of a sector agree; an engine that is fenced changes nothing any more;
//! - when the trouble is over, every request is answered, every replica becomes a member, and all of them read the same.
#![forbid(unsafe_code)]

pub mod checker;
mod disk;
mod engine;
mod faults;
mod guest;
mod net;
mod opening;
mod replica;
mod tasks;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use fastrand::Rng;
use shorthorn_core::PeerState;
use shorthorn_types::{Generation, Members, Regions, ReplicaId, View, ViewId};
use shorthorn_views::ReplicaViews;

use crate::checker::{Checker, Id};
use crate::disk::{BLOCK_SECTORS, Files};
use crate::guest::Guest;
use crate::replica::Replica;
use crate::tasks::Tasks;
use crate::world::{Occurrence, World};

/// A part of the rules that is left out, to see that the simulation notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// Replicas keep no write intent and no missed regions.
    NoIntent,
    /// A flush is acknowledged without being done.
    LyingFlush,
    /// A new engine is let in while requests of an older one are still in the hands of the disk.
    ServeBeforeFenced,
}

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Everything follows from it.
    pub seed: u64,
    /// Whether to write a log.
    pub trace: bool,
    /// What to leave out.
    pub sabotage: Option<Sabotage>,
    /// Whether messages are now and then very late. Chosen from the seed by [`Options::of`].
    pub slow_network: bool,
}

impl Options {
    /// The run of `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Options {
        Options { seed, trace: false, sabotage: None, slow_network: seed.is_multiple_of(3) }
    }
}

/// What became of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What did not hold; none: everything did.
    pub violation: Option<String>,
    /// How often what happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// The log, if it was wanted.
    pub log: Vec<String>,
}

/// How long there is trouble.
const TROUBLE_US: u64 = 15_000_000;
/// How long the volume may take to come back.
const RECOVERY_US: u64 = 60_000_000;
const REGIONS: u64 = 10;

/// Runs the simulation of a seed.
#[must_use]
pub fn run(options: Options) -> Outcome {
    let world = Rc::new(RefCell::new(make_world(options)));
    let mut tasks = Tasks::default();
    {
        let mut world = world.borrow_mut();
        world.after(10, Occurrence::StartEngine { host: 0 });
        world.after(20, Occurrence::Guest);
        world.schedule_fault();
    }
    advance(&world, &mut tasks, TROUBLE_US, |_| false);
    world.borrow_mut().calm_down();
    let recovered = advance(&world, &mut tasks, TROUBLE_US + RECOVERY_US, is_recovered);
    let mut world = world.borrow_mut();
    if !recovered && world.violation.is_none() && needs_what_is_gone(&world) {
        // The last holder of something was lost for good before anybody else had it: only the operator can help.
        world.count("salvage needed");
    } else if !recovered && world.violation.is_none() {
        let state = describe(&world);
        world.violate(format!("the volume has not come back: {state}"));
    }
    if world.violation.is_none() && !needs_what_is_gone(&world) {
        compare_replicas(&mut world);
    }
    let done = world.guest.done;
    world.counts.insert("requests", done);
    Outcome {
        violation: world.violation.take(),
        counts: std::mem::take(&mut world.counts),
        log: std::mem::take(&mut world.log),
    }
}

fn make_world(options: Options) -> World {
    let mut rng = Rng::with_seed(options.seed);
    let count = [2, 3, 3, 3, 1, 2][rng.usize(0..6)];
    let size_bytes = Regions::of(1 << 20).region_bytes() * REGIONS + 4096 * rng.u64(0..3);
    let ids: Vec<ReplicaId> = (1..=count).map(|n| ReplicaId::from_random(n * 7)).collect();
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
    let replicas =
        ids.iter().map(|id| Replica::new(*id, size_bytes, ReplicaViews::new(view), files.clone())).collect();
    let budget = rng.u64(200..6_000);
    let guest = Guest::new(ids, size_bytes, next_id, budget);
    World::new(options, replicas, 3, guest, Checker::new(&initial), rng)
}

/// Lets things happen until `until` holds, or the time is over.
fn advance(world: &Rc<RefCell<World>>, tasks: &mut Tasks, end: u64, until: impl Fn(&World) -> bool) -> bool {
    loop {
        {
            let mut world = world.borrow_mut();
            if world.violation.is_some() || world.now >= end {
                return false;
            }
            let Some(what) = world.next() else { return false };
            happen(&mut world, what);
            if until(&world) {
                return true;
            }
        }
        let new = std::mem::take(&mut world.borrow_mut().new_engines);
        for engine in new {
            tasks.spawn(engine, opening::live(Rc::clone(world), engine));
        }
        let alive: Vec<u64> = world.borrow().engines.keys().copied().collect();
        tasks.poll(|engine| alive.contains(&engine));
    }
}

fn happen(world: &mut World, what: Occurrence) {
    match what {
        Occurrence::Deliver { conn, to_replica, message } => world.deliver(conn, to_replica, message),
        Occurrence::DiskDone { replica, boot, op } => world.disk_done(replica, boot, op),
        Occurrence::PageDone { replica, boot, write } => world.page_done(replica, boot, write),
        Occurrence::Tick { engine } => world.tick(engine),
        Occurrence::Fault(fault) => world.trouble(fault),
        Occurrence::StartReplica { replica, boot } => world.start_replica(replica, boot),
        Occurrence::StartEngine { host } => world.start_engine(host),
        Occurrence::EndEngine { engine } => world.end_engine(engine),
        Occurrence::AskArbiter { engine } => world.ask_arbiter(engine),
        Occurrence::Granted { engine, view } => world.granted(engine, view),
        Occurrence::Guest => world.guest_turn(),
        Occurrence::Wake => {}
    }
}

/// Whether the guest has no request left and every replica is a member.
fn is_recovered(world: &World) -> bool {
    let Some(engine) = world.guest.engine.and_then(|engine| world.engines.get(&engine)) else { return false };
    let Some(core) = &engine.core else { return false };
    let members = core.membership().view().members;
    world.calm
        && world.guest.budget == 0
        && world.guest.size_bytes == world.controller.size_bytes
        && world.guest.slots.iter().all(Option::is_none)
        && !core.membership().is_changing()
        && core.copy_progress().equalise_left_bytes == 0
        && world.guest.replicas.iter().all(|replica| members.contains(*replica))
}

fn needs_what_is_gone(world: &World) -> bool {
    let is_gone = |id| world.replica_index(id).is_some_and(|at| world.replicas[at].gone);
    world.guest.engine.is_none_or(|engine| !world.engines.contains_key(&engine))
        && world.needed.iter().any(is_gone)
}

fn describe(world: &World) -> String {
    let engine = world.guest.engine.and_then(|engine| world.engines.get(&engine));
    let core = engine.and_then(|engine| engine.core.as_ref());
    let states = core.map(|core| {
        let peers = 0..engine.map_or(0, |engine| engine.peers.len());
        let states: Vec<PeerState> = peers.map(|peer| core.membership().state(engine::index(peer))).collect();
        (core.membership().view(), states, core.copy_progress(), core.unfinished())
    });
    let waiting = world.guest.slots.iter().flatten().count();
    if world.options.trace {
        return format!("{waiting} requests wait; {core:#?}");
    }
    format!("{waiting} requests wait, {} are to come; {states:?}", world.guest.budget)
}

/// All members read the same.
fn compare_replicas(world: &mut World) {
    let wanted = world.guest.replicas.clone();
    let contents: Vec<(ReplicaId, Vec<disk::Block>)> = wanted
        .iter()
        .filter_map(|id| world.replica_index(*id))
        .map(|at| (world.replicas[at].id, world.replicas[at].content()))
        .collect();
    for pair in contents.windows(2) {
        if let Some(block) = (0..pair[0].1.len()).find(|block| pair[0].1[*block] != pair[1].1[*block]) {
            let (one, other) = (&pair[0], &pair[1]);
            let what = format!(
                "block {block} is {:?} in replica {} and {:?} in replica {}",
                one.1[block], one.0, other.1[block], other.0
            );
            return world.violate(what);
        }
    }
    let flat: Vec<Id> = contents[0].1.iter().flatten().copied().collect();
    let now = world.now;
    if let Err(wrong) = world.checker.read(0, &flat, now, now) {
        world.violate(format!("at the end: {wrong}"));
    }
}

impl World {
    /// A replica is gone for good, and a new one takes its place: as the controller does it, only while the others are members.
    fn replace_replica(&mut self) {
        if self.replicas.len() >= 6 || self.guest.replicas.len() < 2 || !self.controller.up {
            return;
        }
        let Some(engine) = self.guest.engine.and_then(|engine| self.engines.get(&engine)) else { return };
        let Some(core) = &engine.core else { return };
        let members = core.membership().view().members;
        let all_members = self.guest.replicas.iter().all(|replica| members.contains(*replica));
        if !all_members || core.membership().is_changing() {
            return;
        }
        let place = self.rng.usize(0..self.guest.replicas.len());
        let lost = self.guest.replicas[place];
        let Some(at) = self.replica_index(lost) else { return };
        let id = ReplicaId::from_random(1000 + self.rng.u64(0..1 << 20));
        self.note(|| format!("replica {at} ({lost}) is lost, {id} takes its place"));
        self.count("replacements");
        self.replicas[at].gone = true;
        self.kill_replica(at, true);
        let first = View {
            id: ViewId { generation: Generation::NEVER, number: 0 },
            members: Members::new([lost]).unwrap_or_default(),
        };
        let mut files = Files::default();
        // The snapshot is copied before anything else; that part is not simulated.
        files.snapshot = self.replicas[at].files.snapshot.clone();
        let size = self.controller.size_bytes;
        self.replicas.push(Replica::new(id, size, ReplicaViews::new(first), files));
        self.guest.replicas[place] = id;
    }
}
