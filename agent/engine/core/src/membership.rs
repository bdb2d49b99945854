use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{ChangeProgress, Quorum, ViewChange, quorum};

/// Index of a replica in the engine's list, below [`MAX_MEMBERS`].
pub type PeerIndex = u8;

/// A set of replicas of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct PeerMask(u8);

impl PeerMask {
    pub const NONE: PeerMask = PeerMask(0);

    pub fn one(peer: PeerIndex) -> PeerMask {
        PeerMask(1 << peer)
    }

    pub fn has(self, peer: PeerIndex) -> bool {
        self.0 & (1 << peer) != 0
    }

    pub fn with(self, other: PeerMask) -> PeerMask {
        PeerMask(self.0 | other.0)
    }

    pub fn without(self, other: PeerMask) -> PeerMask {
        PeerMask(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn is_one(self) -> bool {
        self.0.count_ones() == 1
    }

    pub fn and(self, other: PeerMask) -> PeerMask {
        PeerMask(self.0 & other.0)
    }

    /// Returns the peers for which `test` is true.
    pub fn filter(self, test: impl Fn(PeerIndex) -> bool) -> PeerMask {
        self.iter().filter(|peer| test(*peer)).fold(PeerMask::NONE, |all, peer| all.with(PeerMask::one(peer)))
    }

    pub fn first(self) -> Option<PeerIndex> {
        self.iter().next()
    }

    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        (0..8).filter(move |peer| self.has(*peer))
    }
}

/// A replica that the engine was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Identity in views; it does not change with the address.
    pub replica: ReplicaId,
    /// True if it is on this host: the engine then reads there first.
    pub local: bool,
}

/// The state of a replica in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// The replica is in the view and answers.
    Member,
    /// The replica is not in the view and is being rebuilt.
    Rebuilding,
    /// The replica was never in the view of this engine, or has left it, or is about to leave.
    Failed,
}

#[derive(Debug)]
struct Peer {
    config: PeerConfig,
    state: PeerState,
    /// The number of times that the replica was lost, or replaced by another one.
    losses: u64,
    /// The replica was given up. It may come back under another number.
    is_forgotten: bool,
}

/// The phase of a change of the view.
#[derive(Debug)]
enum ChangePhase {
    /// All members agree on the view: no change is under way.
    Agreed,
    /// The members of the new view are storing it.
    Proposed(ViewChange),
    /// The arbiter was asked to grant this change, or one that this change replaced. Either this change
    /// succeeds or none does.
    Asked(ViewChange),
}

impl ChangePhase {
    fn change(&self) -> Option<&ViewChange> {
        match self {
            ChangePhase::Agreed => None,
            ChangePhase::Proposed(change) | ChangePhase::Asked(change) => Some(change),
        }
    }

    /// Returns the change if it proposes the view `id`.
    fn change_to(&mut self, id: ViewId) -> Option<&mut ViewChange> {
        let change = match self {
            ChangePhase::Agreed => None,
            ChangePhase::Proposed(change) | ChangePhase::Asked(change) => Some(change),
        };
        change.filter(|change| change.target.id == id)
    }

    fn is_asked(&self) -> bool {
        matches!(self, ChangePhase::Asked(_))
    }

    /// Replaces this change with another one. A pending request to the arbiter stays pending.
    fn replace(&mut self, change: ViewChange) {
        *self = if self.is_asked() { ChangePhase::Asked(change) } else { ChangePhase::Proposed(change) };
    }
}

/// The members of the volume, and the pending change.
///
/// The view changes only when the change is complete. All its members have stored it then, and the arbiter
/// has granted it if they are half of the view. While the arbiter is asked, no other view is proposed.
#[derive(Debug)]
pub struct Membership {
    peers: Vec<Peer>,
    view: View,
    phase: ChangePhase,
    /// True if too few replicas are left: no change follows. A grant that was asked for before still installs
    /// its view, so this is no phase.
    is_frozen: bool,
    /// Replicas that have stored the view of the change.
    stored: PeerMask,
    next_number: u32,
    next_read: u8,
    /// Replicas in state [`PeerState::Member`], those of them on this host, and replicas in state
    /// [`PeerState::Rebuilding`]: every request asks for them.
    answering: PeerMask,
    local: PeerMask,
    rebuilding: PeerMask,
}

/// The consequence of a loss, of a proposal, or of an answer to one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MembershipStep {
    /// The caller has to wait for answers.
    Wait,
    /// Propose this view to [`Membership::proposed_to`].
    Propose(View, ReplicaReport),
    /// Ask the arbiter to grant this view.
    AskGrant(View, ReplicaReport, Members),
    /// The view has changed; these replicas have become members.
    Installed(View, PeerMask),
    /// Too few replicas are left.
    Frozen(String),
}

impl Membership {
    /// Creates the membership. `view` is the engine's first one, committed already; its members are among
    /// `peers`.
    pub(crate) fn new(peers: &[PeerConfig], view: View) -> Membership {
        assert!(peers.len() <= MAX_MEMBERS, "{} replicas", peers.len());
        let state = |config: &PeerConfig| match view.members.contains(config.replica) {
            true => PeerState::Member,
            false => PeerState::Failed,
        };
        let mut membership = Membership {
            peers: peers
                .iter()
                .map(|config| Peer { config: *config, state: state(config), losses: 0, is_forgotten: false })
                .collect(),
            view,
            phase: ChangePhase::Agreed,
            is_frozen: false,
            stored: PeerMask::NONE,
            next_number: view.id.number + 1,
            next_read: 0,
            answering: PeerMask::NONE,
            local: PeerMask::NONE,
            rebuilding: PeerMask::NONE,
        };
        membership.refresh();
        membership
    }

    /// Returns the view that was committed last.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
    }

    /// Returns true if a change of the view is under way.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.phase.change().is_some()
    }

    /// Returns true if too few replicas are left to change the view ever again.
    pub(crate) fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// Returns the state of replica number `peer`.
    #[must_use]
    pub fn state(&self, peer: PeerIndex) -> PeerState {
        self.peers.get(usize::from(peer)).map_or(PeerState::Failed, |peer| peer.state)
    }

    /// Returns the number of losses of replica number `peer` before it became a member; none if it is not a
    /// member. While the number stays the same, it has been a member without a break.
    #[must_use]
    pub fn losses_of_member(&self, peer: PeerIndex) -> Option<u64> {
        let peer = self.peers.get(usize::from(peer)).filter(|peer| peer.state == PeerState::Member)?;
        Some(peer.losses)
    }

    /// Returns the identity in views of the peer; none for an unused index.
    #[must_use]
    pub fn replica(&self, peer: PeerIndex) -> Option<ReplicaId> {
        self.peers.get(usize::from(peer)).map(|peer| peer.config.replica)
    }

    /// Returns the replicas that are in the view, those about to leave among them.
    pub(crate) fn in_view(&self) -> PeerMask {
        self.mask(|peer| self.view.members.contains(peer.config.replica) && !self.is_elsewhere(peer))
    }

    /// Returns true if the replica of a number that was given up has another number now.
    fn is_elsewhere(&self, peer: &Peer) -> bool {
        let has_it = |other: &Peer| !other.is_forgotten && other.config.replica == peer.config.replica;
        peer.is_forgotten && self.peers.iter().any(has_it)
    }

    /// Returns the replicas that are in the view and answer.
    pub(crate) fn answering(&self) -> PeerMask {
        self.answering
    }

    /// Returns the replicas that are being rebuilt.
    pub(crate) fn rebuilding(&self) -> PeerMask {
        self.rebuilding
    }

    /// Returns the replicas that answer: members and rebuilding replicas.
    pub(crate) fn connected(&self) -> PeerMask {
        self.answering.with(self.rebuilding)
    }

    /// Returns the rest of the view if only the members in `peers` stay. While the arbiter is asked for a
    /// view, a further loss is the end.
    pub(crate) fn quorum_of(&self, peers: PeerMask) -> Quorum {
        if self.phase.is_asked() {
            return Quorum::Less;
        }
        let stays = |id: ReplicaId| peers.iter().any(|peer| self.replica(peer) == Some(id));
        quorum(&self.view.members, &self.view.members.filter(stays))
    }

    /// Returns the members of the view that is being proposed.
    pub(crate) fn proposed_to(&self) -> PeerMask {
        let Some(change) = self.phase.change() else { return PeerMask::NONE };
        self.mask(|peer| change.target.members.contains(peer.config.replica)).and(self.connected())
    }

    /// Returns the members of the proposed view that have not stored it yet.
    pub(crate) fn unstored(&self) -> PeerMask {
        self.proposed_to().without(self.stored)
    }

    fn mask(&self, test: impl Fn(&Peer) -> bool) -> PeerMask {
        let found = (0..).zip(&self.peers).filter(|(_, peer)| test(peer));
        found.fold(PeerMask::NONE, |mask, (index, _)| mask.with(PeerMask::one(index)))
    }

    fn refresh(&mut self) {
        self.answering = self.mask(|peer| peer.state == PeerState::Member);
        self.local = self.mask(|peer| peer.state == PeerState::Member && peer.config.local);
        self.rebuilding = self.mask(|peer| peer.state == PeerState::Rebuilding);
    }

    /// Returns the member that serves the next read: members on this host take turns, or else all do. Members
    /// in `slow` are left alone if others exist, and members in `rotten` always.
    pub(crate) fn reader(&mut self, slow: PeerMask, rotten: PeerMask) -> Option<PeerIndex> {
        let (local, all) = (self.local.without(rotten), self.answering.without(rotten));
        let choices = [local.without(slow), all.without(slow), local, all];
        let from = choices.into_iter().find(|choice| !choice.is_empty())?;
        let next = self.next_read;
        let chosen = from.iter().find(|peer| *peer >= next).or_else(|| from.first())?;
        self.next_read = chosen + 1;
        Some(chosen)
    }

    /// Returns the first of `members` on this host, or else of all of them.
    pub(crate) fn nearest(&self, members: PeerMask) -> Option<PeerIndex> {
        self.local.and(members).first().or_else(|| members.first())
    }

    /// Sets the configuration of `peer`; the next index makes room for one more.
    pub(crate) fn know(&mut self, peer: PeerIndex, config: PeerConfig) {
        let at = usize::from(peer);
        assert!(at <= self.peers.len() && at < MAX_MEMBERS, "replica {peer} of {}", self.peers.len());
        if at == self.peers.len() {
            self.peers.push(Peer { config, state: PeerState::Failed, losses: 0, is_forgotten: false });
        } else {
            let peer = &mut self.peers[at];
            (peer.config, peer.losses, peer.is_forgotten) = (config, peer.losses + 1, false);
        }
    }

    /// Records that `peer` is given up. From now on its replica may be in the view under another number.
    pub(crate) fn forget(&mut self, peer: PeerIndex) {
        if let Some(peer) = self.peers.get_mut(usize::from(peer)) {
            peer.is_forgotten = true;
        }
    }

    /// Records that `peer` is connected and is being rebuilt.
    pub(crate) fn start_rebuild(&mut self, peer: PeerIndex) {
        if let Some(peer) = self.peers.get_mut(usize::from(peer)) {
            peer.state = PeerState::Rebuilding;
        }
        self.refresh();
    }

    /// Proposes the view with `peer`, which holds everything.
    pub(crate) fn admit(&mut self, peer: PeerIndex) -> MembershipStep {
        let Some(replica) = self.replica(peer) else { return MembershipStep::Wait };
        match self.view.members.with(replica) {
            Ok(members) => self.propose(members),
            Err(_) => MembershipStep::Wait, // as many indices as members: there is always room
        }
    }

    /// Handles the failure of `peer`: proposes the view without it if that differs from the agreed one.
    pub(crate) fn lose(&mut self, peer: PeerIndex) -> MembershipStep {
        let Some(lost) = self.peers.get_mut(usize::from(peer)) else { return MembershipStep::Wait };
        let replica = lost.config.replica;
        let was = std::mem::replace(&mut lost.state, PeerState::Failed);
        lost.losses += 1;
        self.refresh();
        match was {
            PeerState::Failed => MembershipStep::Wait,
            PeerState::Member => self.shrink(),
            PeerState::Rebuilding => {
                let is_proposed =
                    self.phase.change().is_some_and(|change| change.target.members.contains(replica));
                if is_proposed { self.shrink() } else { MembershipStep::Wait }
            }
        }
    }

    /// Proposes the members that are left.
    fn shrink(&mut self) -> MembershipStep {
        let answering = self.answering;
        let is_left = |id: ReplicaId| answering.iter().any(|left| self.replica(left) == Some(id));
        let members = self.view.members.filter(is_left);
        if members.is_empty() {
            self.phase.replace(ViewChange::new(self.honoured(), View { id: self.view.id, members }));
            return self.freeze(format!("the last of its members {} is lost", self.view.members));
        }
        if let ChangePhase::Asked(change) = &self.phase {
            let target = change.target;
            return self
                .freeze(format!("a member of {target} is lost while the arbiter is asked for that view"));
        }
        if quorum(&self.view.members, &members) == Quorum::Less {
            // Such a change could never complete, and once stored it would only obstruct others.
            let old = self.view.members;
            self.phase.replace(ViewChange::new(self.honoured(), View { id: self.view.id, members }));
            return self.freeze(format!("{members} is less than half of {old}: no quorum"));
        }
        self.propose(members)
    }

    fn freeze(&mut self, reason: String) -> MembershipStep {
        self.is_frozen = true;
        MembershipStep::Frozen(reason)
    }

    fn propose(&mut self, members: Members) -> MembershipStep {
        let id = ViewId { generation: self.view.id.generation, number: self.next_number };
        self.next_number += 1;
        let target = View { id, members };
        let honoured = self.honoured();
        self.phase.replace(ViewChange::new(honoured.clone(), target));
        self.stored = PeerMask::NONE;
        MembershipStep::Propose(target, honoured)
    }

    fn honoured(&self) -> ReplicaReport {
        ReplicaReport { committed: self.view, proposed: Vec::new() }
    }

    /// Records that `peer` has stored the proposed view `id`.
    pub(crate) fn stored(&mut self, peer: PeerIndex, id: ViewId) -> MembershipStep {
        let Some(replica) = self.replica(peer) else { return MembershipStep::Wait };
        let Some(change) = self.phase.change_to(id) else { return MembershipStep::Wait };
        change.stored(replica);
        self.stored = self.stored.with(PeerMask::one(peer));
        self.progress()
    }

    /// Handles the grant of the proposed view `id`.
    pub(crate) fn granted(&mut self, id: ViewId) -> MembershipStep {
        let Some(change) = self.phase.change_to(id) else { return MembershipStep::Wait };
        change.granted();
        self.progress()
    }

    fn progress(&mut self) -> MembershipStep {
        let Some(change) = self.phase.change() else { return MembershipStep::Wait };
        let (target, old) = (change.target, self.view.members);
        match change.progress() {
            ChangeProgress::Storing => MembershipStep::Wait,
            ChangeProgress::Committed => self.install(target),
            ChangeProgress::NeedsGrant if self.phase.is_asked() => MembershipStep::Wait,
            ChangeProgress::NeedsGrant => {
                let change = change.clone();
                let step = MembershipStep::AskGrant(target, change.honoured.clone(), *change.stored_by());
                self.phase = ChangePhase::Asked(change);
                step
            }
            ChangeProgress::NoQuorum => {
                self.freeze(format!("{} is less than half of {old}: no quorum", target.members))
            }
        }
    }

    fn install(&mut self, view: View) -> MembershipStep {
        (self.view, self.phase) = (view, ChangePhase::Agreed);
        let rebuilt = self
            .mask(|peer| peer.state == PeerState::Rebuilding && view.members.contains(peer.config.replica));
        for peer in rebuilt.iter() {
            self.peers[usize::from(peer)].state = PeerState::Member;
        }
        self.refresh();
        MembershipStep::Installed(view, rebuilt)
    }

    /// Returns the generation of the engine.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.view.id.generation
    }
}

#[cfg(test)]
mod tests;
