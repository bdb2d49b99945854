//! Couriers: a thread for each replica that is not in the view, which brings it back.
//!
//! A courier connects to its replica, has it store a pending view, and copies the snapshot layers to a new
//! replica. In the end it gives the connections to the queues and the replica to the core, which copies the
//! rest ([`join`]). All that uses control connections ([`lines`]), which carry no request of a frontend.

mod join;
mod layers;
mod lines;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_control::ReplicaEndpoint;
use shorthorn_core::{DropCause, PeerIndex};
use shorthorn_recovery::{BadSources, Standing, Stay, rebuild};
use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{ReplicaId, View};

use crate::connection::{ConnectError, finish};
use crate::error::EngineError;
use crate::open::Greeter;
use crate::shared::{News, Shared, lock};
use lines::Lines;

/// Between two attempts: doubled after every failure.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The pause after a refusal that lasts until the operator changes something.
const LASTING_PAUSE: Duration = Duration::from_secs(30);
const STACK_BYTES: usize = 256 << 10;

/// A report of a courier on its replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The replica does not come back yet, for this reason.
    Waiting(String),
    /// Snapshot layers are being copied to it; bytes in all, and left.
    Copying { total_bytes: u64, left_bytes: u64 },
    /// The core copies the rest. `is_copy`: the replica was made anew, else it has kept its data.
    Joining { missing_bytes: u64, is_copy: bool },
}

/// A message from the main thread to a courier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// The replica is not in the view: bring it back after its stay.
    Attend(Stay),
    /// The reason for a pause is gone.
    Relent,
    /// The replica may be reachable again: try at once.
    Hurry,
    /// The replica is given up.
    End,
}

/// The state that the couriers of an engine share.
#[derive(Debug)]
pub struct Desk {
    pub greeter: Greeter,
    pub queues: u16,
    pub shared: Arc<Shared>,
    peers: Mutex<Vec<Option<Peer>>>,
    lines: Lines,
    /// True if the courier of each number has not ended.
    couriers: [AtomicBool; MAX_MEMBERS],
    /// The most that is copied in a second; 0: no limit.
    bytes_per_s: AtomicU64,
    begun: Instant,
}

/// The known state of one replica.
#[derive(Clone, Debug)]
pub struct Peer {
    pub endpoint: ReplicaEndpoint,
    /// True if members and core know all that it has missed.
    pub is_complete: bool,
    /// The last view of this engine that it was in: it has stored that.
    pub last_view: Option<View>,
    /// The run of its process that the engine knows: see [`Welcome::run`](shorthorn_wire::Welcome::run).
    pub run: Option<u64>,
}

impl Desk {
    pub fn new(greeter: Greeter, queues: u16, shared: Arc<Shared>, peers: Vec<Peer>) -> Desk {
        let mut all: Vec<Option<Peer>> = peers.into_iter().map(Some).collect();
        all.resize(MAX_MEMBERS, None);
        Desk {
            greeter,
            queues,
            shared,
            peers: Mutex::new(all),
            lines: Lines::default(),
            couriers: Default::default(),
            bytes_per_s: AtomicU64::new(0),
            begun: Instant::now(),
        }
    }

    /// Returns replica number `peer`, unless it was given up.
    pub fn known_peer(&self, peer: PeerIndex) -> Option<Peer> {
        lock(&self.peers).get(usize::from(peer)).cloned().flatten()
    }

    /// Returns all replicas with their numbers.
    pub fn known_peers(&self) -> Vec<(PeerIndex, Peer)> {
        let peers = lock(&self.peers);
        (0..).zip(peers.iter()).filter_map(|(index, peer)| Some((index, peer.clone()?))).collect()
    }

    /// Changes the known state of a peer if it is still a replica of the volume.
    pub fn update(&self, peer: PeerIndex, change: impl FnOnce(&mut Peer)) {
        if let Some(Some(peer)) = lock(&self.peers).get_mut(usize::from(peer)) {
            change(peer);
        }
    }

    /// Sets or removes replica number `peer`.
    pub fn set(&self, index: PeerIndex, peer: Option<Peer>) {
        if let Some(place) = lock(&self.peers).get_mut(usize::from(index)) {
            *place = peer;
        }
    }

    /// Returns true if a new replica may get the number: the last one was given up, its courier has ended,
    /// and no queue has a connection to it. Else that courier could give the new one connections of the last
    /// one.
    pub fn is_free(&self, peer: PeerIndex) -> bool {
        let courier = self.couriers.get(usize::from(peer));
        self.known_peer(peer).is_none()
            && courier.is_some_and(|runs| !runs.load(Ordering::Acquire))
            && self.shared.is_disconnected(peer)
    }

    fn note_courier(&self, peer: PeerIndex, runs: bool) {
        if let Some(courier) = self.couriers.get(usize::from(peer)) {
            courier.store(runs, Ordering::Release);
        }
    }

    /// Limits the speed of copies from now on.
    pub fn limit(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s.load(Ordering::Relaxed)
    }

    /// Returns the numbers of the replicas in the view, those on this host first.
    pub fn members(&self) -> Vec<PeerIndex> {
        let members = shorthorn_recovery::members(self).unwrap_or_default();
        members.into_iter().map(|(index, _)| index).collect()
    }
}

/// Starts couriers and talks to them; on the main thread.
#[derive(Debug)]
pub struct Couriers {
    desk: Arc<Desk>,
    calls: Vec<Option<Sender<Call>>>,
}

impl Couriers {
    pub fn new(desk: Arc<Desk>) -> Couriers {
        Couriers { desk, calls: (0..MAX_MEMBERS).map(|_| None).collect() }
    }

    /// Returns the state that the couriers share.
    pub fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }

    /// Brings replica number `peer` back after `stay`.
    ///
    /// # Errors
    /// No thread is to be had.
    pub fn attend(&mut self, peer: PeerIndex, stay: Stay) -> Result<(), EngineError> {
        let place = &mut self.calls[usize::from(peer)];
        if let Some(calls) = place
            && calls.send(Call::Attend(stay)).is_ok()
        {
            return Ok(());
        }
        let (sender, calls) = mpsc::channel();
        // The receiver is in our hands: it cannot be gone.
        let _ = sender.send(Call::Attend(stay));
        *place = Some(sender);
        let courier = Courier {
            peer,
            desk: Arc::clone(&self.desk),
            calls,
            pause: FIRST_PAUSE,
            cause: None,
            later: Cell::default(),
            bad_sources: BadSources::default(),
            standing: Standing::default(),
        };
        self.desk.note_courier(peer, true);
        let desk = Arc::clone(&self.desk);
        let spawned = spawn(format!("courier-{peer}"), move || {
            courier.run();
            desk.note_courier(peer, false);
        });
        spawned.inspect_err(|_| self.desk.note_courier(peer, false))
    }

    /// Lets all couriers try at once after a change.
    pub fn hurry(&self) {
        for calls in self.calls.iter().flatten() {
            // An ended courier needs no message.
            let _ = calls.send(Call::Hurry);
        }
    }

    /// Lets replica number `peer` come back at once, however often it was dropped.
    pub fn relent(&self, peer: PeerIndex) {
        if let Some(Some(calls)) = self.calls.get(usize::from(peer)) {
            let _ = calls.send(Call::Relent);
        }
    }

    /// Gives replica number `peer` up: ends its courier, and makes the members forget its out-of-sync set.
    ///
    /// # Errors
    /// No thread is to be had.
    pub fn give_up(&mut self, peer: PeerIndex, replica: ReplicaId) -> Result<(), EngineError> {
        if let Some(calls) = self.calls[usize::from(peer)].take() {
            // It may have ended by itself.
            let _ = calls.send(Call::End);
        }
        self.desk.set(peer, None);
        let desk = Arc::clone(&self.desk);
        spawn("forget".to_owned(), move || forget(&desk, replica))
    }
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<(), EngineError> {
    let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
    builder.spawn(body).map(drop).map_err(EngineError::system("starting a thread"))
}

/// Makes the members forget the out-of-sync set of a replica that is given up.
fn forget(desk: &Desk, replica: ReplicaId) {
    for (member, error) in finish(shorthorn_recovery::give_up(desk)) {
        tracing::warn!(volume = %desk.greeter.volume, %replica, %member, %error, "a member still has the \
         out-of-sync set of a removed replica");
    }
}

/// The reason why an attempt did not bring the replica back.
type Trouble = shorthorn_recovery::Trouble<ConnectError>;

/// The thread of one replica.
#[derive(Debug)]
struct Courier {
    peer: PeerIndex,
    desk: Arc<Desk>,
    calls: Receiver<Call>,
    pause: Duration,
    /// The cause of the last failure, so that it is logged once.
    cause: Option<String>,
    /// A stay that was ordered in the middle of an attempt: it begins when that has failed.
    later: Cell<Option<Stay>>,
    /// Members that could not be read to bring the replica back.
    bad_sources: BadSources,
    /// The recent errors and nonsense in answers of the replica.
    standing: Standing,
}

impl Courier {
    /// Runs until the replica is given up or the process ends.
    fn run(mut self) {
        while let Ok(call) = self.calls.recv() {
            let goes_on = match call {
                Call::Attend(stay) => self.stay(stay) && self.attend(),
                Call::Hurry | Call::Relent => true,
                Call::End => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Waits until the replica may come back; false if the courier has to end.
    fn stay(&self, stay: Stay) -> bool {
        let until = match stay {
            Stay::For(Duration::ZERO) => return true,
            Stay::For(pause) => Instant::now().checked_add(pause),
            Stay::Out => None,
        };
        loop {
            let call = match until {
                Some(until) => self.calls.recv_timeout(until.saturating_duration_since(Instant::now())),
                None => self.calls.recv().map_err(RecvTimeoutError::from),
            };
            match call {
                Err(RecvTimeoutError::Timeout) | Ok(Call::Relent) => return true,
                Ok(Call::Attend(_) | Call::Hurry) => {}
                Ok(Call::End) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Tries to bring the replica back until the core has it; false where the courier has to end.
    fn attend(&mut self) -> bool {
        (self.pause, self.cause) = (FIRST_PAUSE, None);
        loop {
            let mut bad_sources = std::mem::take(&mut self.bad_sources);
            let rebuilt = finish(rebuild(&*self, &mut bad_sources));
            self.bad_sources = bad_sources;
            let pause = match rebuilt {
                Ok(()) => return true,
                Err(Trouble::Ended) => return false,
                Err(Trouble::NotYet(why)) => {
                    self.tell(Told::Waiting(why.to_owned()));
                    self.next_pause()
                }
                Err(
                    Trouble::Failed { error: ConnectError::Deposed { holder, .. }, .. }
                    | Trouble::SourceFailed { error: ConnectError::Deposed { holder, .. }, .. },
                ) => {
                    self.desk.shared.tell(News::Deposed { holder });
                    return false;
                }
                Err(Trouble::Failed { doing, error }) => {
                    let pause = self.failed(&format!("{doing}: {error}"), error.is_lasting());
                    if error.is_of_replica() { pause.max(self.stay_of_offender()) } else { pause }
                }
                // The next attempt reads another member, if there is one.
                Err(Trouble::SourceFailed { source, doing, error }) => {
                    self.failed(&format!("{doing}: {source}: {error}"), false)
                }
            };
            if let Some(stay) = self.later.take()
                && !self.stay(stay)
            {
                return false;
            }
            match self.calls.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Call::Hurry | Call::Relent) => self.pause = FIRST_PAUSE,
                // It was dropped once more, as a joiner.
                Ok(Call::Attend(stay)) => {
                    self.pause = FIRST_PAUSE;
                    if !self.stay(stay) {
                        return false;
                    }
                }
                Ok(Call::End) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Logs and shows a failure once for each cause; returns how long to wait.
    fn failed(&mut self, message: &str, is_lasting: bool) -> Duration {
        if self.cause.as_deref() != Some(message) {
            let (volume, replica) = (&self.desk.greeter.volume, self.replica());
            tracing::warn!(%volume, replica, "a replica is not brought back yet: {message}");
            self.tell(Told::Waiting(message.to_owned()));
            self.cause = Some(message.to_owned());
        }
        if is_lasting { LASTING_PAUSE } else { self.next_pause() }
    }

    /// Returns the pause for a replica that has answered with an error or nonsense. It grows each time, even
    /// if the courier is sent again meanwhile.
    fn stay_of_offender(&mut self) -> Duration {
        // From long before the start on: else the first time would seem to follow another one.
        let now = self.desk.begun.elapsed() + Duration::from_secs(1 << 20);
        match self.standing.dropped(DropCause::Broken, now, false) {
            Stay::For(pause) => pause,
            Stay::Out => LASTING_PAUSE,
        }
    }

    fn next_pause(&mut self) -> Duration {
        let next = (self.pause * 2).min(LONGEST_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }

    fn replica(&self) -> String {
        self.desk.known_peer(self.peer).map(|peer| peer.endpoint.replica.to_string()).unwrap_or_default()
    }

    fn tell(&self, told: Told) {
        self.desk.shared.tell(News::Courier { peer: self.peer, told });
    }

    /// Checks between two steps whether the replica was given up meanwhile.
    fn look_up(&self) -> Result<(), Trouble> {
        while let Ok(call) = self.calls.try_recv() {
            match call {
                Call::End => return Err(Trouble::Ended),
                Call::Attend(stay) => self.later.set(Some(stay)),
                Call::Hurry | Call::Relent => {}
            }
        }
        Ok(())
    }

    /// Does nothing for a while, unless the replica is given up.
    fn rest(&self, pause: Duration) -> Result<(), Trouble> {
        let until = Instant::now() + pause;
        loop {
            match self.calls.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Ok(Call::End) | Err(RecvTimeoutError::Disconnected) => return Err(Trouble::Ended),
                Ok(Call::Attend(stay)) => self.later.set(Some(stay)),
                Ok(Call::Hurry | Call::Relent) => {}
            }
        }
    }
}
