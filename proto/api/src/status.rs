//! The conversion of each status type to its message and back.
//!
//! Phases, modes, generations, views and frontends were texts in release 0.1.0. Their messages and enums have
//! numbers of their own: this release writes both, and reads the text if the other is absent. A number of a
//! later version never makes a status invalid.

mod enums;
mod replica;

use shorthorn_types::status::{
    CopyStatus, EnginePhase, EngineStatus, ExpansionStatus, GrantWanted, MemberMode, MemberStatus,
    ReadFindings, ScrubStatus,
};
use shorthorn_types::{
    Generation, Members, ReplicaId, ReplicaIdError, ReplicaReport, TooManyMembers, View, ViewId,
};
use thiserror::Error;

use crate::v1;

/// A message that has no valid view.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ViewError {
    /// A member has no valid id.
    #[error(transparent)]
    Member(#[from] ReplicaIdError),
    /// More members than a view can hold.
    #[error(transparent)]
    Members(#[from] TooManyMembers),
    /// A part is missing.
    #[error("the {0} view is missing")]
    Missing(&'static str),
}

impl v1::EnginePhase {
    fn of(phase: EnginePhase) -> v1::EnginePhase {
        match phase {
            EnginePhase::Starting => v1::EnginePhase::Starting,
            EnginePhase::Serving => v1::EnginePhase::Serving,
            EnginePhase::Frozen => v1::EnginePhase::Frozen,
            EnginePhase::Stopping => v1::EnginePhase::Stopping,
            EnginePhase::Stopped => v1::EnginePhase::Stopped,
            EnginePhase::Unknown => v1::EnginePhase::Unspecified,
        }
    }

    fn known(number: i32, word: &str) -> Option<EnginePhase> {
        Some(match v1::EnginePhase::try_from(number) {
            Ok(v1::EnginePhase::Starting) => EnginePhase::Starting,
            Ok(v1::EnginePhase::Serving) => EnginePhase::Serving,
            Ok(v1::EnginePhase::Frozen) => EnginePhase::Frozen,
            Ok(v1::EnginePhase::Stopping) => EnginePhase::Stopping,
            Ok(v1::EnginePhase::Stopped) => EnginePhase::Stopped,
            Ok(v1::EnginePhase::Unspecified) => return EnginePhase::of_word(word),
            Err(_) => EnginePhase::Unknown,
        })
    }
}

impl v1::MemberMode {
    fn of(mode: MemberMode) -> v1::MemberMode {
        match mode {
            MemberMode::Member => v1::MemberMode::Member,
            MemberMode::Failed => v1::MemberMode::Failed,
            MemberMode::Connecting => v1::MemberMode::Connecting,
            MemberMode::Rebuilding => v1::MemberMode::Rebuilding,
        }
    }

    fn known(number: i32, word: &str) -> MemberMode {
        match v1::MemberMode::try_from(number) {
            Ok(v1::MemberMode::Member) => MemberMode::Member,
            Ok(v1::MemberMode::Failed) => MemberMode::Failed,
            Ok(v1::MemberMode::Rebuilding) => MemberMode::Rebuilding,
            Ok(v1::MemberMode::Unspecified) => MemberMode::of_word(word),
            // A mode of a later version is not a member.
            Ok(v1::MemberMode::Connecting) | Err(_) => MemberMode::Connecting,
        }
    }
}

/// Gives messages with a phase their typed accessors.
macro_rules! has_phase {
    ($($message:ty),*) => {$(
        impl $message {
            /// Returns the phase; none if it is not reported.
            #[must_use]
            pub fn known_phase(&self) -> Option<EnginePhase> {
                v1::EnginePhase::known(self.phase, &self.phase_word)
            }

            /// Returns the message with that phase.
            #[must_use]
            pub fn with_phase(mut self, phase: impl Into<Option<EnginePhase>>) -> Self {
                self.report_phase(phase);
                self
            }

            /// Sets the phase.
            pub fn report_phase(&mut self, phase: impl Into<Option<EnginePhase>>) {
                let phase = phase.into();
                self.phase = phase.map_or(v1::EnginePhase::Unspecified, v1::EnginePhase::of).into();
                self.phase_word = phase.map(EnginePhase::as_str).unwrap_or_default().to_owned();
            }
        }
    )*};
}
has_phase!(v1::EngineStatus, v1::Engine);

impl v1::EngineMember {
    /// Returns the mode. A mode that is unknown or absent is not a member.
    #[must_use]
    pub fn known_mode(&self) -> MemberMode {
        v1::MemberMode::known(self.mode, &self.mode_word)
    }

    /// Returns the message with that mode.
    #[must_use]
    pub fn with_mode(mut self, mode: MemberMode) -> Self {
        self.report_mode(mode);
        self
    }

    /// Returns true if requests wait for the replica, because it is late.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.known_mode().is_awaited(self.awaited, &self.message)
    }

    /// Sets the mode.
    pub fn report_mode(&mut self, mode: MemberMode) {
        self.mode = v1::MemberMode::of(mode).into();
        self.mode_word = mode.as_str().to_owned();
    }
}

impl v1::Disk {
    /// Returns the problem that keeps the agent from using the disk, and its remedy.
    #[must_use]
    pub fn known_problem(&self) -> Option<&str> {
        Some(self.problem.as_str()).filter(|problem| !problem.is_empty())
    }

    /// Returns true if the agent can use the disk.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.known_problem().is_none()
    }
}

impl v1::Instance {
    /// Returns the process id; none if the instance has no process.
    #[must_use]
    pub fn known_pid(&self) -> Option<i32> {
        Some(self.pid).filter(|pid| *pid != 0)
    }
}

impl v1::EngineStatus {
    /// Returns the version of the program that the process runs; none if the process does not report it.
    #[must_use]
    pub fn known_version(&self) -> Option<&str> {
        Some(self.version.as_str()).filter(|version| !version.is_empty())
    }
}

impl v1::NodeDevices {
    /// Returns the reason why the devices of the node are not known; none if they are known.
    #[must_use]
    pub fn known_problem(&self) -> Option<&str> {
        Some(self.problem.as_str()).filter(|problem| !problem.is_empty())
    }
}

impl v1::TrashedReplica {
    /// Returns the record of its deletion; none if the directory cannot be restored.
    #[must_use]
    pub fn known_record(&self) -> Option<&str> {
        self.problem.is_empty().then_some(self.record.as_str())
    }
}

impl v1::Replica {
    /// Returns the state of the replica in its engine; none unless the volume is attached.
    #[must_use]
    pub fn known_member(&self) -> Option<v1::EngineMember> {
        let of_release_0_1_0 = || v1::EngineMember {
            replica_id: self.replica_id.clone(),
            mode_word: self.mode_word.clone(),
            copy: self.copy,
            away_since_ms: self.away_since_ms,
            ..v1::EngineMember::default()
        };
        self.member.clone().or_else(|| (!self.mode_word.is_empty()).then(of_release_0_1_0))
    }

    /// Returns the message with that state of the replica in its engine.
    #[must_use]
    pub fn with_member(mut self, member: &MemberStatus) -> Self {
        let all = v1::EngineMember::from(member);
        (self.mode_word, self.copy, self.away_since_ms) =
            (all.mode_word.clone(), all.copy, all.away_since_ms);
        self.member = Some(all);
        self
    }
}

impl v1::Engine {
    /// Returns the message with the status that the engine reports, if it reports one.
    ///
    /// Fields that this message or that of the volume has are left out. All others are passed on, so that a
    /// new one is.
    #[must_use]
    pub fn with_reported(mut self, status: Option<&EngineStatus>) -> Self {
        self.status = status.map(|status| v1::EngineStatus {
            volume: String::new(),
            phase: v1::EnginePhase::Unspecified.into(),
            phase_word: String::new(),
            generation_text: String::new(),
            view: None,
            view_text: String::new(),
            members: Vec::new(),
            frontend: v1::Frontend::Unspecified.into(),
            frontend_word: String::new(),
            endpoint: String::new(),
            attach: 0,
            generation: None,
            size_bytes: 0,
            resync: None,
            scrub: None,
            ..v1::EngineStatus::from(status)
        });
        self
    }
}

/// Returns the number; none if it is 0, with which a message has none.
#[must_use]
pub fn nonzero(number: u64) -> Option<u64> {
    Some(number).filter(|number| *number > 0)
}

/// Returns the text; none if it is empty, with which a message has none.
#[must_use]
pub fn nonempty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Gives messages with a generation their typed accessor.
macro_rules! has_generation {
    ($($message:ty),*) => {$(
        impl $message {
            /// Returns the generation; none: no engine holds or held it, or it is not reported.
            #[must_use]
            pub fn known_generation(&self) -> Option<Generation> {
                let of_text = || self.generation_text.parse().ok();
                self.generation.map(Generation::from).or_else(of_text).and_then(Generation::of_engine)
            }
        }
    )*};
}
has_generation!(v1::EngineStatus, v1::ReplicaStatus, v1::ReplicaInspection, v1::TrashedReplica);

impl v1::ReplicaInspection {
    /// Returns the message with the generation that the directory has stored.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Self {
        self.generation = generation.of_engine().map(Into::into);
        self.generation_text = generation.to_string();
        self
    }

    /// Returns the generation to show; empty if the message has none.
    #[must_use]
    pub fn shown_generation(&self) -> String {
        let known = self.known_generation().map(|generation| generation.to_string());
        known.unwrap_or_else(|| self.generation_text.clone())
    }
}

/// Gives messages with a view their typed accessors.
macro_rules! has_view {
    ($($message:ident { $view:ident, $text:ident: $known:ident, $shown:ident, $with:ident })*) => {$(
        impl v1::$message {
            /// Returns the view; none if the message has none.
            #[must_use]
            pub fn $known(&self) -> Option<View> {
                let of_text = || self.$text.parse().ok();
                self.$view.clone().and_then(|view| view.try_into().ok()).or_else(of_text)
            }

            /// Returns the view as text; empty if the message has none.
            #[must_use]
            pub fn $shown(&self) -> String {
                self.$known().map_or_else(|| self.$text.clone(), |view| view.to_string())
            }

            /// Returns the message with that view.
            #[must_use]
            pub fn $with(mut self, view: Option<View>) -> Self {
                self.$view = view.as_ref().map(Into::into);
                self.$text = view.map(|view| view.to_string()).unwrap_or_default();
                self
            }
        }
    )*};
}
has_view! {
    EngineStatus { view, view_text: known_view, shown_view, with_view }
    Engine { view, view_text: known_view, shown_view, with_view }
    Volume { granted, granted_text: known_granted, shown_granted, with_granted }
}

impl From<Generation> for v1::Generation {
    fn from(generation: Generation) -> v1::Generation {
        let Generation { attach, restart, nonce } = generation;
        v1::Generation { attach, restart, nonce }
    }
}

impl From<v1::Generation> for Generation {
    fn from(generation: v1::Generation) -> Generation {
        Generation::new(generation.attach, generation.restart).of_nonce(generation.nonce)
    }
}

impl From<&View> for v1::View {
    fn from(view: &View) -> v1::View {
        let ViewId { generation: Generation { attach, restart, nonce }, number } = view.id;
        v1::View { attach, restart, nonce, number, members: texts(&view.members) }
    }
}

impl TryFrom<v1::View> for View {
    type Error = ViewError;

    fn try_from(view: v1::View) -> Result<View, ViewError> {
        let generation = Generation::new(view.attach, view.restart).of_nonce(view.nonce);
        let id = ViewId { generation, number: view.number };
        Ok(View { id, members: members(&view.members)? })
    }
}

/// Converts a report.
///
/// # Errors
/// A view is missing or invalid: the others allow no conclusion then.
pub fn report(committed: Option<v1::View>, proposed: Vec<v1::View>) -> Result<ReplicaReport, ViewError> {
    let proposed = proposed.into_iter().map(View::try_from).collect::<Result<_, _>>()?;
    let committed = committed.ok_or(ViewError::Missing("committed"))?.try_into()?;
    Ok(ReplicaReport { committed, proposed })
}

impl From<&GrantWanted> for v1::GrantWanted {
    fn from(wanted: &GrantWanted) -> v1::GrantWanted {
        let GrantWanted { view, honoured, stored } = wanted;
        v1::GrantWanted {
            view: Some(view.into()),
            committed: Some((&honoured.committed).into()),
            proposed: honoured.proposed.iter().map(Into::into).collect(),
            stored: texts(stored),
        }
    }
}

impl TryFrom<v1::GrantWanted> for GrantWanted {
    type Error = ViewError;

    fn try_from(wanted: v1::GrantWanted) -> Result<GrantWanted, ViewError> {
        let v1::GrantWanted { view, committed, proposed, stored } = wanted;
        let view = View::try_from(view.ok_or(ViewError::Missing("wanted"))?)?;
        // An engine that does not report the replicas which have stored the view asks once all members have.
        let stored = if stored.is_empty() { view.members } else { members(&stored)? };
        Ok(GrantWanted { view, honoured: report(committed, proposed)?, stored })
    }
}

fn texts(members: &Members) -> Vec<String> {
    members.iter().map(|id| id.to_string()).collect()
}

fn members(ids: &[String]) -> Result<Members, ViewError> {
    let ids: Vec<ReplicaId> = ids.iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
    Ok(Members::new(ids)?)
}

impl From<CopyStatus> for v1::CopyStatus {
    fn from(copy: CopyStatus) -> v1::CopyStatus {
        let CopyStatus { total_bytes, left_bytes, bytes_per_s } = copy;
        v1::CopyStatus { total_bytes, left_bytes, bytes_per_s }
    }
}

impl From<v1::CopyStatus> for CopyStatus {
    fn from(copy: v1::CopyStatus) -> CopyStatus {
        let v1::CopyStatus { total_bytes, left_bytes, bytes_per_s } = copy;
        CopyStatus { total_bytes, left_bytes, bytes_per_s }
    }
}

impl From<ScrubStatus> for v1::ScrubStatus {
    fn from(scrub: ScrubStatus) -> v1::ScrubStatus {
        let ScrubStatus { number, running, snapshot, at_bytes, found, repaired, last } = scrub;
        let (number, snapshot) = (number.unwrap_or_default(), snapshot.unwrap_or_default());
        let last = last.unwrap_or_default();
        v1::ScrubStatus { running, at_bytes, found, repaired, last, snapshot, number }
    }
}

impl From<v1::ScrubStatus> for ScrubStatus {
    fn from(scrub: v1::ScrubStatus) -> ScrubStatus {
        let v1::ScrubStatus { running, at_bytes, found, repaired, last, snapshot, number } = scrub;
        let (number, snapshot, last) = (nonzero(number), nonempty(snapshot), nonempty(last));
        ScrubStatus { number, running, snapshot, at_bytes, found, repaired, last }
    }
}

impl From<ReadFindings> for v1::ReadFindings {
    fn from(findings: ReadFindings) -> v1::ReadFindings {
        let ReadFindings { found, repaired, last } = findings;
        v1::ReadFindings { found, repaired, last }
    }
}

impl From<v1::ReadFindings> for ReadFindings {
    fn from(findings: v1::ReadFindings) -> ReadFindings {
        let v1::ReadFindings { found, repaired, last } = findings;
        ReadFindings { found, repaired, last }
    }
}

impl From<ExpansionStatus> for v1::Expansion {
    fn from(expansion: ExpansionStatus) -> v1::Expansion {
        let ExpansionStatus { size_bytes, message, next_attach } = expansion;
        v1::Expansion { size_bytes, message: message.unwrap_or_default(), next_attach }
    }
}

impl From<v1::Expansion> for ExpansionStatus {
    fn from(expansion: v1::Expansion) -> ExpansionStatus {
        let v1::Expansion { size_bytes, message, next_attach } = expansion;
        ExpansionStatus { size_bytes, message: nonempty(message), next_attach }
    }
}

impl From<&MemberStatus> for v1::EngineMember {
    fn from(member: &MemberStatus) -> v1::EngineMember {
        let is_awaited = member.is_awaited();
        // All fields of both: the compiler finds one that is forgotten.
        let MemberStatus {
            replica,
            address,
            mode,
            message,
            awaited: _,
            times_awaited,
            times_rotten,
            times_rot_copied,
            away_since_ms,
            rebuild_failed,
            copy,
        } = member.clone();
        v1::EngineMember {
            replica_id: replica.to_string(),
            address,
            mode: v1::MemberMode::of(mode).into(),
            mode_word: mode.as_str().to_owned(),
            message,
            awaited: Some(is_awaited),
            times_awaited,
            times_rotten,
            times_rot_copied,
            away_since_ms: away_since_ms.unwrap_or_default(),
            rebuild_failed,
            copy: copy.map(Into::into),
        }
    }
}

impl TryFrom<v1::EngineMember> for MemberStatus {
    type Error = ReplicaIdError;

    fn try_from(member: v1::EngineMember) -> Result<MemberStatus, ReplicaIdError> {
        Ok(MemberStatus {
            replica: member.replica_id.parse()?,
            mode: member.known_mode(),
            awaited: Some(member.is_awaited()),
            address: member.address,
            message: member.message,
            times_awaited: member.times_awaited,
            times_rotten: member.times_rotten,
            times_rot_copied: member.times_rot_copied,
            away_since_ms: nonzero(member.away_since_ms),
            rebuild_failed: member.rebuild_failed,
            copy: member.copy.map(Into::into),
        })
    }
}

impl From<&EngineStatus> for v1::EngineStatus {
    fn from(status: &EngineStatus) -> v1::EngineStatus {
        let path = status.endpoint.as_ref().map(|path| path.display().to_string());
        v1::EngineStatus {
            volume: status.volume.to_string(),
            generation: Some(status.generation.into()),
            generation_text: status.generation.to_string(),
            members: status.members.iter().map(Into::into).collect(),
            endpoint: path.unwrap_or_default(),
            size_bytes: status.size_bytes,
            attach: status.generation.attach,
            grant_wanted: status.grant_wanted.as_ref().map(Into::into),
            resync: status.resync.map(Into::into),
            scrub: status.scrub.clone().map(Into::into),
            read_findings: status.read_findings.clone().map(Into::into),
            expansion: status.expansion.clone().map(Into::into),
            lost_writes: status.lost_writes,
            device: status.device.clone().unwrap_or_default(),
            version: status.version.clone().unwrap_or_default(),
            ..v1::EngineStatus::default()
        }
        .with_phase(status.phase)
        .with_view(status.view)
        .with_frontend(status.frontend)
    }
}

impl v1::EngineStatus {
    /// Returns the status that the engine has reported; none before it has reported one.
    ///
    /// Parts of a later version that are not understood are left out.
    #[must_use]
    pub fn reported(self) -> Option<EngineStatus> {
        let (phase, generation, view) = (self.known_phase()?, self.known_generation()?, self.known_view());
        let frontend = self.known_frontend();
        let members = self.members.into_iter().filter_map(|member| MemberStatus::try_from(member).ok());
        Some(EngineStatus {
            volume: self.volume.parse().ok()?,
            pid: None,
            phase,
            // The message of an instance has it.
            message: String::new(),
            generation,
            view,
            members: members.collect(),
            frontend,
            endpoint: nonempty(self.endpoint).map(Into::into),
            device: nonempty(self.device),
            size_bytes: self.size_bytes,
            lost_writes: self.lost_writes,
            expansion: self.expansion.map(Into::into),
            // An invalid one cannot be granted.
            grant_wanted: self.grant_wanted.and_then(|wanted| wanted.try_into().ok()),
            resync: self.resync.map(Into::into),
            scrub: self.scrub.map(Into::into),
            read_findings: self.read_findings.map(Into::into),
            version: nonempty(self.version),
        })
    }
}

#[cfg(test)]
mod tests;
