use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{Change, Progress};

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

    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        (0..8).filter(move |peer| self.has(*peer))
    }
}

/// A replica that the engine was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Which replica.
    pub replica: ReplicaId,
    /// Whether it is on this host: reads go there first.
    pub local: bool,
}

/// How a replica stands with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// It is in the view and answers.
    Member,
    /// It was never in the view of this engine, or has left, or is about to leave.
    Failed,
}

#[derive(Debug)]
struct Peer {
    config: PeerConfig,
    state: PeerState,
}

/// Which replicas are members, and the change that is under way.
#[derive(Debug)]
pub struct Membership {
    peers: Vec<Peer>,
    view: View,
    change: Option<Change>,
    next_number: u32,
    next_read: u8,
}

/// What follows from the loss of a member, or from an answer to a proposal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing now.
    Wait,
    /// Propose this view to every replica that still answers.
    Propose(View, ReplicaReport),
    /// The view has changed.
    Installed(View),
    /// Too few replicas are left.
    Frozen(String),
}

impl Membership {
    /// `view` is the engine's first one, through already; its members are among `peers`.
    pub(crate) fn new(peers: &[PeerConfig], view: View) -> Membership {
        assert!(peers.len() <= MAX_MEMBERS, "{} replicas", peers.len());
        let state = |config: &PeerConfig| match view.members.contains(config.replica) {
            true => PeerState::Member,
            false => PeerState::Failed,
        };
        let peers = peers.iter().map(|config| Peer { config: *config, state: state(config) }).collect();
        Membership { peers, view, change: None, next_number: view.id.number + 1, next_read: 0 }
    }

    /// The current view.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
    }

    /// Whether a change of the view is under way.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// How replica number `peer` stands.
    #[must_use]
    pub fn state(&self, peer: PeerIndex) -> PeerState {
        self.peers.get(usize::from(peer)).map_or(PeerState::Failed, |peer| peer.state)
    }

    /// Replicas that are in the view, those about to leave among them.
    pub(crate) fn in_view(&self) -> PeerMask {
        self.mask(|peer| self.view.members.contains(peer.config.replica))
    }

    /// Replicas that are in the view and answer.
    pub(crate) fn answering(&self) -> PeerMask {
        self.mask(|peer| peer.state == PeerState::Member)
    }

    fn mask(&self, test: impl Fn(&Peer) -> bool) -> PeerMask {
        let bit = |index: usize| PeerMask::one(u8::try_from(index).unwrap_or(u8::MAX));
        let found = self.peers.iter().enumerate().filter(|(_, peer)| test(peer));
        found.fold(PeerMask::NONE, |mask, (index, _)| mask.with(bit(index)))
    }

    /// Who serves the next read: replicas on this host take turns, else all members do.
    pub(crate) fn reader(&mut self) -> Option<PeerIndex> {
        let all = self.answering();
        let local = self.mask(|peer| peer.state == PeerState::Member && peer.config.local);
        let from = if local.is_empty() { all } else { local };
        let next = self.next_read;
        let chosen = from.iter().find(|peer| *peer >= next).or_else(|| from.iter().next())?;
        self.next_read = chosen + 1;
        Some(chosen)
    }

    /// `peer` has failed: the view without it is proposed.
    pub(crate) fn lose(&mut self, peer: PeerIndex) -> Step {
        let Some(lost) = self.peers.get_mut(usize::from(peer)) else { return Step::Wait };
        if lost.state == PeerState::Failed {
            return Step::Wait;
        }
        lost.state = PeerState::Failed;
        let answering = self.answering();
        let is_left =
            |id: ReplicaId| answering.iter().any(|left| self.peers[usize::from(left)].config.replica == id);
        let members = self.view.members.filter(is_left);
        if members.is_empty() {
            self.change = Some(Change::new(self.honoured(), View { id: self.view.id, members }));
            return Step::Frozen(format!("the last of its members {} is lost", self.view.members));
        }
        self.propose(members)
    }

    fn propose(&mut self, members: Members) -> Step {
        let id = ViewId { generation: self.view.id.generation, number: self.next_number };
        self.next_number += 1;
        let target = View { id, members };
        let honoured = self.honoured();
        self.change = Some(Change::new(honoured.clone(), target));
        Step::Propose(target, honoured)
    }

    fn honoured(&self) -> ReplicaReport {
        ReplicaReport { committed: self.view, proposed: Vec::new() }
    }

    /// `peer` has stored the proposed view `id`.
    pub(crate) fn stored(&mut self, peer: PeerIndex, id: ViewId) -> Step {
        let Some(change) = self.change.as_mut().filter(|change| change.target.id == id) else {
            return Step::Wait;
        };
        let Some(stored) = self.peers.get(usize::from(peer)) else { return Step::Wait };
        change.stored(stored.config.replica);
        let target = change.target;
        match change.progress() {
            Progress::Storing => Step::Wait,
            Progress::Through => {
                self.view = target;
                self.change = None;
                Step::Installed(target)
            }
            Progress::NeedsGrant => Step::Frozen(format!(
                "{} is exactly half of {}: that needs the arbiter's grant",
                target.members, self.view.members
            )),
            Progress::NoQuorum => Step::Frozen(format!(
                "{} is less than half of {}: no quorum",
                target.members, self.view.members
            )),
        }
    }

    /// Of the engine.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.view.id.generation
    }
}
