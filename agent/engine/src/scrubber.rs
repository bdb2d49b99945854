//! Compares the members' snapshots, layer by layer, on its own thread.
//!
//! Snapshots never change: no request waits for this, and it uses control connections. The members are asked
//! for the sum of each piece of each layer, and for the one that they have kept from the last agreement.
//! [`compare_sums`] decides which members are right. Rotten pieces are copied from a right member and
//! checked again ([`repair`]). Sums that all agree on are kept ([`sum_writer`]). The oldest layer comes
//! first, because the others build on it.

mod repair;
mod sum_writer;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_control::ScrubCommand;
use shorthorn_core::{
    MemberSums, PeerIndex, ReplicaSums, SUM_OF_NO_BLOCKS, ScrubResult, compare_sums, sum_to_keep,
};
use shorthorn_types::ByteRange;
use shorthorn_wire::{EMPTY_SUM, LayerCheck, LayerRange, SUM_PIECE_BYTES};

use crate::connection::ConnectError;
use crate::context::EngineContext;
use crate::copy_limits::scrub_config;
use crate::error::EngineError;
use crate::events::{Done, MainEvent, ScrubFinding, ScrubProgress};
use crate::pacer::Pacer;
use sum_writer::SumWriter;

/// The interval of progress reports, which only people read.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of checking whether the previous scrub has ended.
const PREVIOUS_END_INTERVAL: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 256 << 10;
const _: () = assert!(EMPTY_SUM == SUM_OF_NO_BLOCKS);

/// A scrub of the snapshots that is under way. It stops soon after this is dropped.
#[derive(Debug)]
pub struct Scrubbing {
    _stop: Sender<()>,
}

impl Scrubbing {
    /// Starts the scrub. Its reports carry `number`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(
        context: Arc<EngineContext>,
        command: ScrubCommand,
        number: u64,
    ) -> Result<Scrubbing, EngineError> {
        let (stop, stopped) = mpsc::channel();
        let pacer = Pacer::new(Instant::now());
        let mut scrubber = Scrubber {
            context,
            command,
            number,
            stopped,
            pacer,
            reported: None,
            incomplete: None,
            unrepaired: BTreeSet::new(),
        };
        thread::Builder::new()
            .name("scrub".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || scrubber.run())
            .map_err(EngineError::system("starting a thread"))?;
        Ok(Scrubbing { _stop: stop })
    }
}

/// The reason why a scrub does not continue.
#[derive(Debug)]
enum ScrubError {
    /// The scrub was stopped by a command.
    Stopped,
    /// The scrub cannot continue.
    Failed(String),
}

/// A snapshot's layer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ScrubbedLayer {
    image: String,
    /// The layer's number at each member that has it.
    numbers: Vec<(PeerIndex, u32)>,
}

impl ScrubbedLayer {
    fn snapshot(&self) -> String {
        let name = self.image.strip_prefix("volume-snap-").and_then(|name| name.strip_suffix(".img"));
        name.unwrap_or(&self.image).to_owned()
    }

    fn number_at(&self, peer: PeerIndex) -> Option<u32> {
        self.numbers.iter().find(|(index, _)| *index == peer).map(|(_, number)| *number)
    }
}

struct Scrubber {
    context: Arc<EngineContext>,
    command: ScrubCommand,
    number: u64,
    stopped: Receiver<()>,
    pacer: Pacer,
    reported: Option<Instant>,
    /// The reason why not everything was compared.
    incomplete: Option<String>,
    /// Pieces of examined layers that still differ. The scrub does not repair the layers above there, because
    /// they build on them.
    unrepaired: BTreeSet<u64>,
}

impl Scrubber {
    fn run(&mut self) {
        match self.scrub_alone() {
            Ok(()) => {}
            Err(ScrubError::Failed(reason)) => self.incomplete = Some(reason),
            Err(ScrubError::Stopped) => return, // the receiver is gone
        }
        let incomplete = self.incomplete.take();
        self.report(ScrubProgress::Ended { incomplete });
    }

    fn report(&self, progress: ScrubProgress) {
        self.context.shared.send_event(MainEvent::Snapshots { scrub: self.number, progress });
    }

    /// Waits for the previous scrub, which was stopped and may still compare a piece, and then scrubs.
    fn scrub_alone(&mut self) -> Result<(), ScrubError> {
        let context = Arc::clone(&self.context);
        let _scrubbing = loop {
            match context.snapshot_use.scrubbing() {
                Some(scrubbing) => break scrubbing,
                None => self.pause(PREVIOUS_END_INTERVAL)?,
            }
        };
        self.scrub_all()
    }

    fn scrub_all(&mut self) -> Result<(), ScrubError> {
        for layer in self.layers()? {
            match self.scrub_layer(&layer) {
                Err(ScrubError::Failed(reason)) => {
                    let (volume, snapshot) = (&self.context.connector.volume, layer.snapshot());
                    tracing::warn!(%volume, snapshot, reason, "a snapshot could not be compared completely");
                    self.incomplete = Some(format!("snapshot {snapshot}: {reason}"));
                }
                scrubbed => scrubbed?,
            }
        }
        Ok(())
    }

    /// Returns the layers of all snapshots, the oldest first.
    fn layers(&mut self) -> Result<Vec<ScrubbedLayer>, ScrubError> {
        let mut layers: Vec<ScrubbedLayer> = Vec::new();
        let mut is_first = true;
        for peer in self.context.members() {
            let names = match self.images_of(peer) {
                Ok(names) => names,
                Err(error) => {
                    self.skipped(peer, &error);
                    continue;
                }
            };
            if is_first {
                layers = names
                    .iter()
                    .map(|image| ScrubbedLayer { image: image.clone(), numbers: Vec::new() })
                    .collect();
                is_first = false;
            } else if names.len() != layers.len() {
                let (volume, replica) = (&self.context.connector.volume, self.replica(peer));
                tracing::warn!(%volume, replica, "a replica has other snapshots than the others");
            }
            for layer in &mut layers {
                let number = names.iter().position(|image| *image == layer.image);
                let number = number.and_then(|number| u32::try_from(number).ok());
                layer.numbers.extend(number.map(|number| (peer, number)));
            }
        }
        if is_first { Err(ScrubError::Failed("no member answers".to_owned())) } else { Ok(layers) }
    }

    /// Returns the images of all layers but the head that a member has, the oldest first.
    fn images_of(&self, peer: PeerIndex) -> Result<Vec<String>, ConnectError> {
        let size_bytes = || self.context.connector.size_bytes();
        let list = self.context.with_control_of(peer, |control| control.list_layers(size_bytes))?;
        let count = list.layers.len().saturating_sub(1);
        Ok(list.layers.into_iter().take(count).map(|layer| layer.image).collect())
    }

    fn replica(&self, peer: PeerIndex) -> String {
        self.context.known_peer(peer).map(|peer| peer.endpoint.replica.to_string()).unwrap_or_default()
    }

    fn skipped(&mut self, peer: PeerIndex, error: &ConnectError) {
        let (volume, replica) = (&self.context.connector.volume, self.replica(peer));
        tracing::warn!(%volume, replica, %error, "a replica takes no part in the scrub of the snapshots");
        self.incomplete = Some(format!("replica {replica}: {error}"));
    }

    fn scrub_layer(&mut self, layer: &ScrubbedLayer) -> Result<(), ScrubError> {
        let mut peers: Vec<PeerIndex> = layer.numbers.iter().map(|(peer, _)| *peer).collect();
        let mut writers: Vec<SumWriter> =
            peers.iter().map(|peer| SumWriter::new(*peer, &layer.image)).collect();
        let mut at = Some(0);
        while let Some(offset_bytes) = at {
            let Some(piece) = self.piece(offset_bytes) else { break };
            self.wait(piece.length())?;
            self.show(layer, offset_bytes);
            let members = self.context.members();
            peers.retain(|peer| members.contains(peer));
            let checks = self.check(layer, piece, &mut peers);
            if checks.is_empty() {
                return Err(ScrubError::Failed("no member answers".to_owned()));
            }
            at = checks
                .iter()
                .filter_map(|(_, check)| check.next_bytes)
                .min()
                .filter(|next| *next > offset_bytes);
            let sums = self.judge(layer, piece, &checks)?;
            writers.retain(|writer| peers.contains(&writer.peer()));
            for writer in &mut writers {
                let sum = sums.iter().find(|(peer, _)| *peer == writer.peer()).and_then(|(_, sum)| *sum);
                writer.put(&self.context, offset_bytes / SUM_PIECE_BYTES, sum);
            }
        }
        // Later decisions cannot rest on the statement of a single member.
        if writers.len() > 1 {
            writers.into_iter().for_each(|writer| writer.finish(&self.context));
        }
        Ok(())
    }

    fn piece(&self, offset_bytes: u64) -> Option<ByteRange> {
        let left = self.context.connector.size_bytes().saturating_sub(offset_bytes).min(SUM_PIECE_BYTES);
        ByteRange::new(offset_bytes, left).ok().filter(|piece| !piece.is_empty())
    }

    /// Keeps to the limit.
    fn wait(&mut self, bytes: u64) -> Result<(), ScrubError> {
        let pause = self.pacer.pause(scrub_config(self.command).bytes_per_s, bytes, Instant::now());
        self.pause(pause)
    }

    /// Waits, unless the scrub is stopped.
    fn pause(&self, pause: Duration) -> Result<(), ScrubError> {
        match self.stopped.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Err(ScrubError::Stopped),
        }
    }

    fn show(&mut self, layer: &ScrubbedLayer, offset_bytes: u64) {
        if self.reported.is_none_or(|reported| reported.elapsed() >= REPORT_INTERVAL) {
            self.reported = Some(Instant::now());
            self.report(ScrubProgress::At { snapshot: layer.snapshot(), offset_bytes });
        }
    }

    /// Requests the checks from all of `peers`. Members that do not answer are not asked again in this layer.
    fn check(
        &mut self,
        layer: &ScrubbedLayer,
        piece: ByteRange,
        peers: &mut Vec<PeerIndex>,
    ) -> Vec<(PeerIndex, LayerCheck)> {
        let mut checks = Vec::with_capacity(peers.len());
        peers.retain(|peer| match self.check_one(layer, piece, *peer) {
            Ok(check) => {
                checks.push((*peer, check));
                true
            }
            Err(error) => {
                self.skipped(*peer, &error);
                false
            }
        });
        checks
    }

    fn check_one(
        &self,
        layer: &ScrubbedLayer,
        piece: ByteRange,
        peer: PeerIndex,
    ) -> Result<LayerCheck, ConnectError> {
        let length_bytes = u32::try_from(piece.length()).unwrap_or(u32::MAX);
        let asked = LayerRange { image: layer.image.clone(), offset_bytes: piece.offset(), length_bytes };
        self.context.with_control_of(peer, |control| control.check_layer(&asked))
    }

    /// Judges the members' checks of a piece and acts on the result. Returns the sum that each member is to
    /// keep.
    fn judge(
        &mut self,
        layer: &ScrubbedLayer,
        piece: ByteRange,
        checks: &[(PeerIndex, LayerCheck)],
    ) -> Result<Vec<(PeerIndex, Option<u32>)>, ScrubError> {
        let member = |(peer, check): &(PeerIndex, LayerCheck)| {
            let LayerCheck { sum, kept, .. } = *check;
            (*peer, ReplicaSums { sum, kept, ..ReplicaSums::default() })
        };
        let mut member_sums: Vec<MemberSums> = checks.iter().map(member).collect();
        let mut scrub_result = compare_sums(&member_sums);
        if scrub_result == ScrubResult::CompareShownData {
            self.read_shown_data(layer, piece, &mut member_sums);
            scrub_result = compare_sums(&member_sums);
        }
        let keep = |peer, is_repaired| sum_to_keep(&member_sums, &scrub_result, is_repaired, peer);
        let keep_all = |is_repaired| {
            member_sums.iter().map(|(peer, _)| (*peer, keep(*peer, is_repaired))).collect::<Vec<_>>()
        };
        let (odd, done) = match &scrub_result {
            ScrubResult::Equal => return Ok(keep_all(false)),
            ScrubResult::Undecided(odd) => (odd.clone(), Done::Undecided),
            // Some member does not report the shown sum.
            ScrubResult::CompareShownData => {
                (member_sums.iter().map(|(peer, _)| *peer).collect(), Done::Undecided)
            }
            ScrubResult::Odd { odd, .. } if !self.command.repair => (odd.clone(), Done::Reported),
            ScrubResult::Odd { odd, sources } => {
                (odd.clone(), self.repair(layer, piece, odd, sources, &member_sums))
            }
        };
        if self.layers()?.iter().all(|now| now != layer) {
            return Err(ScrubError::Failed("the snapshots have changed meanwhile".to_owned()));
        }
        let mut sums = keep_all(matches!(done, Done::Repaired { .. }));
        if let Done::Repaired { from } = done {
            let sum = keep(from, true);
            sums.iter_mut().filter(|(peer, _)| odd.contains(peer)).for_each(|(_, kept)| *kept = sum);
        } else {
            self.unrepaired.insert(piece.offset());
        }
        self.report(ScrubProgress::Found(ScrubFinding {
            snapshot: layer.snapshot(),
            range: piece,
            odd,
            done,
        }));
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_control::EngineSpec;
    use shorthorn_core::{CopyLimits, CoreConfig, EngineCore, FlightLimits};
    use shorthorn_types::{Generation, Members, RegionSet, ReplicaId, View, ViewId};

    use super::*;
    use crate::connector::ReplicaConnector;
    use crate::shared_core::{SharedCore, boot_time_ms};

    /// Returns the context of an engine that knows no replica. A scrub ends at once.
    fn context(events: Sender<MainEvent>) -> Arc<EngineContext> {
        let spec: EngineSpec = serde_json::from_value(serde_json::json!({
            "volume": "v1", "size_bytes": 1 << 20, "attach": 1, "replicas": [], "frontend": "socket",
            "secret": "07".repeat(32), "state_file": "/s", "control_socket": "/c", "frontend_socket": "/f",
            "device_dir": "/d", "queues": 1, "depth": 1, "replica_timeout_ms": 1000,
        }))
        .unwrap();
        let generation = Generation::new(1, 0);
        let members = Members::new([ReplicaId::from_random(1)]).unwrap();
        let core = EngineCore::new(&CoreConfig {
            queues: 1,
            depth: 1,
            peers: Vec::new(),
            view: View { id: ViewId { generation, number: 1 }, members },
            replica_timeout_ms: 1000,
            late_limit_ms: 1000,
            flight_limits: FlightLimits { bytes: 1 << 20, requests: 1 },
            size_bytes: 1 << 20,
            dirty: RegionSet::empty(16),
            resync_sources: Vec::new(),
            out_of_sync: Vec::new(),
            stamp: 0,
            out_of_sync_stamps: Vec::new(),
            copy_slots: 2,
            copy_limits: CopyLimits { bytes_per_s: None, share_percent: 100 },
            intent_interval_ms: None,
            intent_keep_bytes: 0,
            verify_reads: false,
            refuses_requests: false,
        });
        let shared = Arc::new(SharedCore::new(core, Vec::new(), events, boot_time_ms()));
        Arc::new(EngineContext::new(ReplicaConnector::new(&spec, generation), 1, shared, Vec::new()))
    }

    /// A scrub that was stopped completes its current piece.
    #[test]
    fn a_scrub_begins_after_the_end_of_the_one_before() {
        let (sender, events) = mpsc::channel();
        let context = context(sender);
        let before = context.snapshot_use.scrubbing().unwrap();
        let command = ScrubCommand { bytes_per_s: None, repair: true };
        let stopped = Scrubbing::start(Arc::clone(&context), command, 1).unwrap();
        let scrubbing = Scrubbing::start(Arc::clone(&context), command, 2).unwrap();
        assert!(events.recv_timeout(PREVIOUS_END_INTERVAL * 2).is_err(), "one is under way");
        drop((stopped, before));
        let ended = events.recv_timeout(Duration::from_secs(10)).unwrap();
        let is_second =
            |event| matches!(event, MainEvent::Snapshots { scrub: 2, progress: ScrubProgress::Ended { .. } });
        assert!(is_second(ended));
        drop(scrubbing);
    }
}
