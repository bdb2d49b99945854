//! The rebuild tasks: each rebuilds one replica, in the steps of [`shorthorn_recovery::rebuild()`].

use std::cell::Cell;
use std::ops::Range;

use shorthorn_core::PeerIndex;
use shorthorn_recovery::{
    Address, BadSources, BlockSearch, KnownPeer, LinkError, OTHER_RUN, PendingView, RebuildError,
    ReplicaRebuild, SOURCE_HAS_LEFT, Source, UNREAD_MAX, forget_in_vain, rebuild,
};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{CONTROL_QUEUE, CopyState, LayerList};

use super::simulated_link::ControlLink;
use super::*;
use crate::disk::SparseFile;
use crate::net::RottenBlock;

/// The number of blocks that a source may be unable to read in an attempt, unless it has failed before.
const UNREAD_LEFT: u32 = 3;
/// The number of pieces in which a snapshot is copied.
const SNAPSHOT_PIECES: u64 = 4;

impl EngineHandle {
    /// Runs the rebuild task of a replica, which rebuilds it whenever it is absent.
    pub(super) async fn rebuild_task(&self, peer: usize) {
        let mut bad_sources = BadSources::default();
        loop {
            until(|| self.is_away(peer)).await;
            let mut pause = FIRST_PAUSE_US;
            loop {
                self.sleep(pause).await;
                let Some(replica) = self.is_away(peer) else { break };
                self.set_rebuilding(peer, true);
                if self.sim.borrow().options.sabotage == Some(Sabotage::FirstSource) {
                    bad_sources = BadSources::default();
                }
                // A snapshot has few blocks here.
                let unread = Cell::new(UNREAD_MAX - UNREAD_LEFT);
                let attempt = Rebuild { process: self, peer, replica, unread };
                let rebuilt = rebuild(&attempt, &mut bad_sources).await;
                self.set_rebuilding(peer, false);
                match rebuilt {
                    Ok(()) => break,
                    Err(
                        RebuildError::Failed { error: CallError::Deposed(holder), .. }
                        | RebuildError::SourceFailed { error: CallError::Deposed(holder), .. },
                    ) => return self.depose(holder),
                    Err(RebuildError::SourceFailed { source, doing, error }) => {
                        let mut sim = self.sim.borrow_mut();
                        sim.trace(|| format!("{doing}: {source}: {error}"));
                        sim.count("sources that fail");
                    }
                    Err(RebuildError::Unread { member, range, error }) => {
                        let mut sim = self.sim.borrow_mut();
                        sim.trace(|| format!("{member} cannot read {range} of the snapshot: {error}"));
                        sim.count("blocks of snapshots that no member can read");
                    }
                    Err(_) => {}
                }
                self.sim.borrow_mut().count("rebuilds given up");
                pause = (pause * 2).min(LONGEST_PAUSE_US);
            }
        }
    }

    /// Records whether the rebuild task of a number is in an attempt.
    fn set_rebuilding(&self, peer: usize, is_busy: bool) {
        if let Some(process) = self.sim.borrow_mut().engines.get_mut(&self.engine)
            && let Some(peer) = process.peers.get_mut(peer)
        {
            peer.has_rebuild_task = is_busy;
        }
    }

    /// Returns the replica to rebuild.
    fn is_away(&self, peer: usize) -> Option<ReplicaId> {
        let sim = self.sim.borrow();
        let process = sim.engines.get(&self.engine)?;
        let known = process.peers.get(peer).filter(|peer| !peer.is_given_up)?;
        let state = process.core.as_ref()?.membership().state(index(peer));
        (process.is_disconnected(peer) && state == PeerState::Failed).then_some(known.replica)
    }

    /// Waits until the control connection is free, and takes it.
    async fn take_control_connection(&self, peer: usize) -> Option<ConnId> {
        let taken = until(|| {
            let mut sim = self.sim.borrow_mut();
            let Some(process) = sim.engines.get_mut(&self.engine) else { return Some(None) };
            let control = process.control_connections.get_mut(peer)?;
            if control.is_busy {
                return None;
            }
            control.is_busy = true;
            Some(control.conn)
        });
        taken.await
    }

    fn give_control_connection(&self, peer: usize, conn: Option<ConnId>) {
        let mut sim = self.sim.borrow_mut();
        sim.wake(self.engine);
        let conn = conn.filter(|conn| sim.conns.get(conn).is_some_and(|conn| conn.engine_open));
        if let Some(process) = sim.engines.get_mut(&self.engine) {
            process.control_connections[peer] = crate::engine::ControlConnection { conn, is_busy: false };
        }
    }

    fn is_at(&self, address: Address) -> bool {
        self.peer(address.peer).is_some_and(|peer| peer.replica == address.replica)
    }

    /// Returns true if a connection leads to this replica: another one may have had its number before.
    fn leads_to(&self, conn: ConnId, replica: ReplicaId) -> bool {
        let sim = self.sim.borrow();
        sim.conns.get(&conn).is_some_and(|conn| sim.replicas[conn.replica].id == replica)
    }

    /// Opens a control connection to a replica.
    async fn open_control_connection(&self, to: Address) -> Result<(ConnId, Welcome), CallError> {
        if !self.is_at(to) {
            return Err(CallError::Broken);
        }
        let (mut link, welcome) = self.handshake(to.replica, CONTROL_QUEUE).await?;
        match forget_in_vain(self, &mut link, &welcome).await {
            Ok(()) | Err(CallError::Refused(_)) => Ok((link.0.into_conn(), welcome)),
            Err(error) => Err(error),
        }
    }

    /// Replaces a closed connection: to the same run of the replica's process only.
    async fn reopen_control_connection(&self, to: Address) -> Result<ConnId, CallError> {
        let (conn, welcome) = self.open_control_connection(to).await?;
        let known = self
            .sim
            .borrow()
            .engines
            .get(&self.engine)
            .and_then(|process| process.peers[usize::from(to.peer)].run);
        if known.is_some_and(|run| run != welcome.run) {
            self.close(conn);
            return Err(CallError::Broken);
        }
        Ok(conn)
    }

    /// Asks a replica something over its control connection, which is closed if that fails.
    pub(super) async fn with_line(&self, to: Address, ask: Ask) -> Result<ReplicaAnswer, CallError> {
        let peer = usize::from(to.peer);
        let taken = self.take_control_connection(peer).await;
        if !self.is_at(to) {
            self.give_control_connection(peer, taken);
            return Err(CallError::Broken);
        }
        let conn = match taken {
            Some(conn) if self.leads_to(conn, to.replica) => Ok(conn),
            other => {
                if let Some(conn) = other {
                    self.close(conn);
                }
                self.reopen_control_connection(to).await
            }
        };
        let conn = match conn {
            Ok(conn) => conn,
            Err(error) => {
                self.give_control_connection(peer, None);
                return Err(error);
            }
        };
        let answer = self.call(conn, ask, LINE_LIMIT_US).await;
        let is_usable = matches!(answer, Ok(_) | Err(CallError::Refused(_)));
        if !is_usable {
            self.close(conn);
        }
        self.give_control_connection(peer, Some(conn).filter(|_| is_usable));
        answer
    }
}

impl ServingEngine for EngineHandle {
    type Error = CallError;
    type Control<'a> = Via<ControlLink<'a>>;

    fn peers(&self) -> Vec<(PeerIndex, KnownPeer)> {
        let sim = self.sim.borrow();
        let Some(process) = sim.engines.get(&self.engine) else { return Vec::new() };
        let peers = process.peers.iter().enumerate().filter(|(_, peer)| !peer.is_given_up);
        let known = |(at, peer): (usize, &crate::engine::Peer)| {
            let crate::engine::Peer { replica, is_complete, last_view, .. } = *peer;
            (index(at), KnownPeer { replica, is_local: at == 0, is_complete, last_view })
        };
        peers.map(known).collect()
    }

    fn set_complete(&self, of: Address, is_complete: bool) {
        let mut sim = self.sim.borrow_mut();
        if !is_complete {
            sim.count("deposed replicas");
        }
        if let Some(process) = sim.engines.get_mut(&self.engine)
            && process.index_of(of.replica) == Some(usize::from(of.peer))
        {
            process.peers[usize::from(of.peer)].is_complete = is_complete;
        }
    }

    fn size_bytes(&self) -> u64 {
        self.sim.borrow().engines.get(&self.engine).map_or(0, |process| process.size_bytes)
    }

    fn pending_view(&self) -> Option<PendingView> {
        let (view, honoured) = self.sim.borrow().engines.get(&self.engine)?.pending.clone()?;
        Some(PendingView { view, honoured })
    }

    fn is_disconnected(&self, peer: PeerIndex) -> bool {
        let sim = self.sim.borrow();
        let process = sim.engines.get(&self.engine);
        process.is_none_or(|process| process.is_disconnected(usize::from(peer)))
    }

    fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Option<R> {
        Some(at(self.sim.borrow().engines.get(&self.engine)?.core.as_ref()?))
    }

    fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> Option<R> {
        // The core is out of the simulation meanwhile: `act` may look at the simulation.
        let mut core = self.sim.borrow_mut().engines.get_mut(&self.engine)?.core.take()?;
        let mut outputs = Outputs::new();
        let result = act(&mut core, &mut outputs);
        let mut sim = self.sim.borrow_mut();
        sim.engines.get_mut(&self.engine)?.core = Some(core);
        sim.perform_all(self.engine, outputs);
        Some(result)
    }

    fn control(&self, to: Address) -> Via<ControlLink<'_>> {
        Via(ControlLink { process: self, to })
    }

    async fn open_control(&self, to: Address) -> Result<Welcome, CallError> {
        let peer = usize::from(to.peer);
        if let Some(old) = self.take_control_connection(peer).await {
            self.close(old);
        }
        let made = self.open_control_connection(to).await;
        if let (Ok((_, welcome)), Some(process)) =
            (&made, self.sim.borrow_mut().engines.get_mut(&self.engine))
            && process.index_of(to.replica) == Some(peer)
        {
            process.peers[peer].run = Some(welcome.run);
        }
        self.give_control_connection(peer, made.as_ref().ok().map(|(conn, _)| *conn));
        made.map(|(_, welcome)| welcome)
    }
}

/// An attempt to rebuild a replica.
struct Rebuild<'a> {
    process: &'a EngineHandle,
    peer: usize,
    replica: ReplicaId,
    /// The number of blocks that the source could not read: see [`BlockSearch::after`].
    unread: Cell<u32>,
}

impl Rebuild<'_> {
    /// A block of the snapshot that another member has sound, after the source has not given it for the
    /// reason `error`. None: it is lost.
    async fn read_other(
        &self,
        source: Source,
        others: &[Source],
        block: u64,
        error: CallError,
    ) -> Result<Option<crate::disk::Block>, RebuildError<CallError>> {
        let sabotage = self.process.sim.borrow().options.sabotage;
        let is_sabotaged = sabotage == Some(Sabotage::OthersUnread);
        let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap_or(ByteRange::EMPTY);
        let mut unread = self.unread.get();
        let mut judged = source;
        judged.has_failed &= sabotage != Some(Sabotage::NoSecondAttempt);
        let search = BlockSearch::after(judged, range, error, &mut unread);
        self.unread.set(unread);
        if unread > UNREAD_MAX {
            let what =
                if source.has_failed { "sources without a limit" } else { "sources that read too little" };
            self.process.sim.borrow_mut().count(what);
        }
        let mut search = search?;
        for other in others.iter().filter(|_| !is_sabotaged) {
            let read = self.process.with_line(other.address, Ask::ReadSnapshotBlock(block)).await;
            let content = match read {
                Ok(ReplicaAnswer::SnapshotBlock(content)) => Ok(content),
                Ok(_) => Err(CallError::Broken),
                // As if every refusal said that the block is not there.
                Err(error) if error.is_refusal() && sabotage == Some(Sabotage::RefusalsBelieved) => Ok(None),
                Err(error) => Err(error),
            };
            let has_stayed = self.process.read_core(|core| other.has_stayed(core)) == Some(true);
            let (content, read) = match content {
                Ok(content) => (content, Ok(())),
                Err(error) => (None, Err(error)),
            };
            if search.answered(*other, has_stayed, read.map(|()| content.is_some()))? {
                return Ok(content.map(|content| *content));
            }
        }
        search.conclude().map(|()| None)
    }

    async fn read_source(
        &self,
        source: Source,
        blocks: Range<u64>,
    ) -> Result<(SparseFile, Vec<RottenBlock>), CallError> {
        match self.process.with_line(source.address, Ask::ReadSnapshot(blocks)).await {
            Ok(ReplicaAnswer::Snapshot(file, rotten)) => Ok(((*file).clone(), rotten)),
            Ok(_) => Err(CallError::Broken),
            Err(error) => Err(error),
        }
    }

    /// Copies some blocks of the snapshot; those that the source cannot read one by one.
    async fn copy_blocks(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        blocks: Range<u64>,
    ) -> Result<(), RebuildError<CallError>> {
        let is_final = self.process.sim.borrow().options.sabotage == Some(Sabotage::UnreadIsFinal);
        match self.read_source(source, blocks.clone()).await {
            Ok((file, rotten)) => self.copy_read(target, source, others, blocks, file, rotten).await,
            Err(error) if error.is_refusal() && !is_final => {
                for block in blocks {
                    let alone = block..block + 1;
                    let (file, rotten) = match self.read_source(source, alone.clone()).await {
                        Ok(read) => read,
                        Err(error) => {
                            let content = self.read_other(source, others, block, error).await?;
                            self.process
                                .sim
                                .borrow_mut()
                                .count("blocks of snapshots that a source cannot read");
                            let mut file = SparseFile::default();
                            file.replace(block, content);
                            (file, Vec::new())
                        }
                    };
                    self.copy_read(target, source, others, alone, file, rotten).await?;
                }
                Ok(())
            }
            Err(error) => Err(RebuildError::while_reading(source, "reading a layer of a member")(error)),
        }
    }

    /// Copies blocks of the snapshot that the source has given, with those in which it holds rot.
    async fn copy_read(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        blocks: Range<u64>,
        mut file: SparseFile,
        rotten: Vec<RottenBlock>,
    ) -> Result<(), RebuildError<CallError>> {
        let mut lost = Vec::new();
        for (block, was) in rotten {
            let before = self.sound_below(others, block);
            let of_source = CallError::Refused(Errno::ROTTEN);
            match self.read_other(source, others, block, of_source).await? {
                Some(content) => {
                    self.process.sim.borrow_mut().count("blocks of snapshots of another member");
                    file.replace(block, Some(content));
                }
                None => {
                    self.judge_lost(others, block, &before);
                    lost.push((block, was));
                }
            }
        }
        if self.process.sim.borrow().options.sabotage == Some(Sabotage::LostUnreported) {
            lost.clear();
        }
        let piece = Ask::CopySnapshot(Rc::new(file), blocks, lost);
        let written = self.process.with_line(target, piece).await;
        written.map(drop).map_err(RebuildError::while_doing("writing a layer"))
    }

    /// Returns the members that have stayed and have the block of the snapshot sound. With each is the number
    /// of blocks that its disk has healed: as long as that stays, the block was sound all the time.
    fn sound_below(&self, others: &[Source], block: u64) -> Vec<(ReplicaId, u64)> {
        let stays = |other: &&Source| self.process.read_core(|core| other.has_stayed(core)) == Some(true);
        let staying: Vec<ReplicaId> =
            others.iter().filter(stays).map(|other| other.address.replica).collect();
        let sim = self.process.sim.borrow();
        let sound = staying.into_iter().filter_map(|id| {
            let replica = &sim.replicas[sim.replica_index(id)?];
            replica.has_sound_below(block).then_some((id, replica.files.heals()))
        });
        sound.collect()
    }

    /// Checks that the block is lost only if no other member has had it since it was asked. `before` has
    /// those that had it then.
    fn judge_lost(&self, others: &[Source], block: u64, before: &[(ReplicaId, u64)]) {
        let still = self.sound_below(others, block);
        let mut sim = self.process.sim.borrow_mut();
        sim.count("blocks of snapshots that are lost");
        if let Some((id, _)) = still.into_iter().find(|one| before.contains(one)) {
            sim.violate(format!("block {block} counts as lost, and {id} has it"));
        }
    }
}

impl ReplicaRebuild for Rebuild<'_> {
    type Engine = EngineHandle;

    fn engine(&self) -> &EngineHandle {
        self.process
    }

    fn peer(&self) -> PeerIndex {
        index(self.peer)
    }

    fn has_to_end(&self) -> bool {
        self.process.is_away(self.peer) != Some(self.replica)
    }

    /// Copies the snapshot piece by piece. Blocks in which its source holds rot come from other members.
    async fn copy_snapshots(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), RebuildError<CallError>> {
        self.process.sim.borrow_mut().count("full copies");
        if layers.layers.len() < 2 {
            return Ok(());
        }
        if state.done.first() == Some(&true) {
            self.process.sim.borrow_mut().count("snapshots kept by copies");
            return Ok(());
        }
        let count = self.process.size_bytes().div_ceil(BLOCK_BYTES);
        let piece = count.div_ceil(SNAPSHOT_PIECES).max(1);
        for piece_number in 0..SNAPSHOT_PIECES {
            let blocks = (piece_number * piece).min(count)..((piece_number + 1) * piece).min(count);
            self.copy_blocks(target, source, others, blocks).await?;
            if self.has_to_end() {
                return Err(RebuildError::Ended);
            }
        }
        if self.process.read_core(|core| source.has_stayed(core)) != Some(true) {
            return Err(RebuildError::NotYet(SOURCE_HAS_LEFT));
        }
        let ended = self.process.with_line(target, Ask::SnapshotEnd).await;
        ended.map(drop).map_err(RebuildError::while_doing("ending the copy of a layer"))
    }

    async fn connect_queues(&self, replica: ReplicaId, run: u64) -> Result<u64, RebuildError<CallError>> {
        let size_bytes = self.process.size_bytes();
        let queues = self.process.sim.borrow().queues;
        for queue in 0..queues {
            let connected = self.process.handshake(replica, queue).await;
            let (link, welcome) = connected.map_err(RebuildError::while_doing("connecting a queue"))?;
            let conn = link.0.into_conn();
            if welcome.run != run {
                self.process.close(conn);
                return Err(RebuildError::NotYet(OTHER_RUN));
            }
            let mut sim = self.process.sim.borrow_mut();
            let engine = sim.engines.get_mut(&self.process.engine).ok_or(RebuildError::Ended)?;
            let place = &mut engine.links[self.peer][usize::from(queue)];
            if place.is_some() {
                drop(sim);
                self.process.close(conn);
                return Err(RebuildError::NotYet("a queue has another connection"));
            }
            *place = Some(conn);
        }
        Ok(size_bytes)
    }

    fn report_restored(&self, _: Option<u32>, _: u32) {
        self.process.sim.borrow_mut().count("rolled back replicas that came back");
    }

    fn report_rebuilding(&self, missing_bytes: u64, is_copy: bool) {
        let Rebuild { process, replica, .. } = self;
        process.sim.borrow_mut().trace(|| {
            let engine = process.engine;
            format!(
                "engine {engine}: {replica} is rebuilt, copy: {is_copy}, {missing_bytes} bytes are missing"
            )
        });
    }
}
