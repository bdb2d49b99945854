use prost::Message;
use shorthorn_types::VolumeName;
use shorthorn_types::status::Frontend;

use super::*;

/// The messages as release 0.1.0 has them, with the fields that have changed since.
mod first {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct EngineStatus {
        #[prost(string, tag = "2")]
        pub phase: String,
        #[prost(string, tag = "3")]
        pub generation: String,
        #[prost(string, tag = "4")]
        pub view: String,
        #[prost(message, repeated, tag = "5")]
        pub members: Vec<EngineMember>,
        #[prost(uint64, tag = "9")]
        pub attach: u64,
        #[prost(message, optional, tag = "12")]
        pub scrub: Option<ScrubStatus>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct EngineMember {
        #[prost(string, tag = "1")]
        pub replica_id: String,
        #[prost(string, tag = "3")]
        pub mode: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ScrubStatus {
        #[prost(bool, tag = "1")]
        pub running: bool,
        #[prost(uint64, tag = "2")]
        pub at_bytes: u64,
        #[prost(uint64, tag = "3")]
        pub found: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ReplicaStatus {
        #[prost(string, tag = "6")]
        pub generation: String,
    }

    /// The engine of controller.proto.
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Engine {
        #[prost(string, tag = "4")]
        pub phase: String,
        #[prost(string, tag = "5")]
        pub view: String,
    }

    /// The volume of controller.proto.
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Volume {
        #[prost(string, tag = "20")]
        pub granted: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ReplicaInspection {
        #[prost(string, tag = "5")]
        pub generation: String,
    }

    /// The replica of controller.proto.
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Replica {
        #[prost(string, tag = "3")]
        pub replica_id: String,
        #[prost(string, tag = "8")]
        pub mode: String,
        #[prost(message, optional, tag = "11")]
        pub copy: Option<crate::v1::CopyStatus>,
        #[prost(uint64, tag = "12")]
        pub away_since_ms: u64,
    }
}

fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

fn view() -> View {
    let id = ViewId { generation: Generation::new(3, 1).of_nonce(0x1f3a), number: 5 };
    View { id, members: Members::new([1, 2].map(self::id)).unwrap() }
}

fn member(number: u64, mode: MemberMode) -> MemberStatus {
    MemberStatus {
        replica: id(number),
        address: "unix:/r".to_owned(),
        mode,
        message: "late".to_owned(),
        awaited: Some(mode == MemberMode::Member),
        times_awaited: 1,
        times_rotten: 2,
        times_rot_copied: 3,
        away_since_ms: (mode != MemberMode::Member).then_some(7),
        rebuild_failed: mode == MemberMode::Failed,
        copy: (mode == MemberMode::Rebuilding).then_some(copy()),
    }
}

const fn copy() -> CopyStatus {
    CopyStatus { total_bytes: 10, left_bytes: 4, bytes_per_s: 2 }
}

fn scrub() -> ScrubStatus {
    ScrubStatus {
        number: Some(2),
        snapshot: Some("s".to_owned()),
        at_bytes: 8,
        found: 3,
        repaired: 1,
        last: Some("r: repaired".to_owned()),
        ..ScrubStatus::default()
    }
}

fn engine() -> EngineStatus {
    let honoured = ReplicaReport { committed: view(), proposed: vec![view()] };
    EngineStatus {
        volume: VolumeName::new("v1").unwrap(),
        pid: None,
        phase: EnginePhase::Frozen,
        message: String::new(),
        generation: view().id.generation,
        view: Some(view()),
        members: MemberMode::ALL.into_iter().zip(1..).map(|(mode, number)| member(number, mode)).collect(),
        frontend: Some(Frontend::Nbd),
        endpoint: Some("/dev/longhorn/v1".into()),
        device: Some("43:0".to_owned()),
        size_bytes: 4096,
        lost_writes: true,
        expansion: Some(ExpansionStatus {
            size_bytes: 8192,
            message: Some("full".to_owned()),
            next_attach: true,
        }),
        grant_wanted: Some(GrantWanted { view: view(), honoured, stored: view().members }),
        resync: Some(copy()),
        scrub: Some(scrub()),
        read_findings: Some(ReadFindings { found: 2, repaired: 1, last: "a block".to_owned() }),
        version: Some("9".to_owned()),
    }
}

/// Sends a message to a reader that has another definition of it.
fn sent<T: Message + Default>(message: &impl Message) -> T {
    T::decode(message.encode_to_vec().as_slice()).unwrap()
}

#[test]
fn each_part_of_a_status_reads_back() {
    let status = engine();
    let message: v1::EngineStatus = sent(&v1::EngineStatus::from(&status));
    assert_eq!(message.reported().as_ref(), Some(&status));
    let only_started = v1::EngineStatus { attach: 3, size_bytes: 4096, ..v1::EngineStatus::default() };
    assert_eq!(only_started.reported(), None, "the agent adds these before the engine reports");
    for member in &status.members {
        let replica: v1::Replica = sent(&v1::Replica::default().with_member(member));
        assert_eq!(replica.known_member().map(MemberStatus::try_from), Some(Ok(member.clone())));
    }
    for phase in ["starting", "serving", "frozen", "stopping", "stopped"] {
        let phase = EnginePhase::of_word(phase);
        assert_eq!(v1::Engine::default().with_phase(phase).known_phase(), phase);
    }
}

#[test]
fn an_engine_has_the_rest_of_its_status_once() {
    let status = engine();
    let shown: v1::Engine = sent(&v1::Engine::default().with_reported(Some(&status)));
    let rest = shown.status.unwrap();
    assert_eq!((rest.lost_writes, rest.version.as_str(), rest.device.as_str()), (true, "9", "43:0"));
    assert_eq!(rest.read_findings.map(ReadFindings::from), status.read_findings);
    assert_eq!(rest.expansion.map(ExpansionStatus::from), status.expansion);
    assert!(rest.members.is_empty() && rest.scrub.is_none() && rest.view.is_none());
    assert_eq!((rest.phase, rest.phase_word.as_str(), rest.view_text.as_str()), (0, "", ""));
    assert_eq!(v1::Engine::default().with_reported(None), v1::Engine::default());
}

#[test]
fn release_0_1_0_reads_a_status_of_this_one() {
    let old: first::EngineStatus = sent(&v1::EngineStatus::from(&engine()));
    assert_eq!((old.phase.as_str(), old.generation.as_str(), old.attach), ("frozen", "3.1#1f3a", 3));
    assert_eq!(old.view, view().to_string());
    let modes: Vec<&str> = old.members.iter().map(|member| member.mode.as_str()).collect();
    assert_eq!(modes, ["member", "failed", "connecting", "rebuilding"]);
    assert_eq!(old.scrub, Some(first::ScrubStatus { running: false, at_bytes: 8, found: 3 }));
    let engine = v1::Engine::default().with_phase(EnginePhase::Serving).with_view(Some(view()));
    let old: first::Engine = sent(&engine);
    assert_eq!((old.phase, old.view), ("serving".to_owned(), view().to_string()));
    let old: first::Volume = sent(&v1::Volume::default().with_granted(Some(view())));
    assert_eq!(old.granted, view().to_string());
    let inspection = v1::ReplicaInspection::default().with_generation(Generation::new(3, 1));
    let old: first::ReplicaInspection = sent(&inspection);
    assert_eq!(old.generation, "3.1");
    let old: first::Replica = sent(&v1::Replica::default().with_member(&member(1, MemberMode::Failed)));
    assert_eq!((old.mode.as_str(), old.copy, old.away_since_ms), ("failed", None, 7));
    let old: first::Replica = sent(&v1::Replica::default().with_member(&member(1, MemberMode::Rebuilding)));
    assert_eq!(old.copy, Some(copy().into()));
}

#[test]
fn a_status_of_release_0_1_0_is_read() {
    let member = |mode: &str| first::EngineMember { replica_id: id(1).to_string(), mode: mode.to_owned() };
    let old = first::EngineStatus {
        phase: "serving".to_owned(),
        generation: "3.1#1f3a".to_owned(),
        view: view().to_string(),
        members: ["member", "failed", "connecting", "rebuilding"].map(member).into(),
        attach: 3,
        scrub: Some(first::ScrubStatus { found: 3, ..first::ScrubStatus::default() }),
    };
    let new: v1::EngineStatus = sent(&old);
    assert_eq!(new.known_phase(), Some(EnginePhase::Serving));
    assert_eq!(new.known_generation(), Some(view().id.generation));
    assert_eq!(new.known_view(), Some(view()));
    let modes: Vec<MemberMode> = new.members.iter().map(v1::EngineMember::known_mode).collect();
    assert_eq!(modes, MemberMode::ALL);
    let late = |mode| v1::EngineMember { message: "late".to_owned(), ..Default::default() }.with_mode(mode);
    assert!(late(MemberMode::Member).is_awaited());
    assert!(!late(MemberMode::Failed).is_awaited());
    assert!(!v1::EngineMember { awaited: Some(false), ..late(MemberMode::Member) }.is_awaited());
    assert_eq!(ScrubStatus::from(new.scrub.unwrap()), ScrubStatus { found: 3, ..ScrubStatus::default() });
    let new: v1::ReplicaStatus = sent(&first::ReplicaStatus { generation: "4.0".to_owned() });
    assert_eq!(new.known_generation(), Some(Generation::new(4, 0)));
    let new: v1::ReplicaStatus = sent(&first::ReplicaStatus { generation: "0.0".to_owned() });
    assert_eq!(new.known_generation(), None, "no engine has opened it");
    let new: v1::Engine = sent(&first::Engine { phase: "frozen".to_owned(), view: view().to_string() });
    assert_eq!((new.known_phase(), new.known_view()), (Some(EnginePhase::Frozen), Some(view())));
    let new: v1::Volume = sent(&first::Volume { granted: view().to_string() });
    assert_eq!((new.known_granted(), new.shown_granted()), (Some(view()), view().to_string()));
    let new: v1::ReplicaInspection = sent(&first::ReplicaInspection { generation: "4.0".to_owned() });
    assert_eq!(new.known_generation(), Some(Generation::new(4, 0)));
    let new: v1::ReplicaInspection = sent(&first::ReplicaInspection { generation: "0.0".to_owned() });
    assert_eq!((new.known_generation(), new.shown_generation().as_str()), (None, "0.0"));
    let new: v1::Replica = sent(&first::Replica {
        replica_id: id(1).to_string(),
        mode: "rebuilding".to_owned(),
        copy: Some(copy().into()),
        away_since_ms: 7,
    });
    let (copy, away_since_ms) = (Some(copy()), Some(7));
    let rebuilt = MemberStatus { copy, away_since_ms, ..MemberStatus::of(id(1), MemberMode::Rebuilding) };
    assert_eq!(new.known_member().map(MemberStatus::try_from), Some(Ok(rebuilt)));
}

#[test]
fn an_id_of_a_later_version_leaves_the_rest_of_a_member_readable() {
    let mut replica = v1::Replica::default().with_member(&member(1, MemberMode::Rebuilding));
    replica.member.as_mut().unwrap().replica_id = "a-longer-id".to_owned();
    let old = first::Replica {
        replica_id: "a-longer-id".to_owned(),
        mode: "rebuilding".to_owned(),
        copy: Some(copy().into()),
        away_since_ms: 7,
    };
    for replica in [replica, sent(&old)] {
        let known = replica.known_member().unwrap();
        assert_eq!((known.known_mode(), known.away_since_ms), (MemberMode::Rebuilding, 7));
        assert_eq!(known.copy.map(CopyStatus::from), Some(copy()));
    }
}

#[test]
fn words_and_numbers_of_a_later_version_leave_the_rest_readable() {
    let mut later = v1::EngineStatus::from(&engine());
    (later.phase, later.phase_word) = (99, "levitating".to_owned());
    (later.members[0].mode, later.members[0].mode_word) = (99, "levitating".to_owned());
    let read: v1::EngineStatus = sent(&later);
    assert_eq!(read.known_phase(), Some(EnginePhase::Unknown));
    assert_eq!(read.members[0].known_mode(), MemberMode::Connecting);
    assert_eq!((read.known_generation(), read.known_view()), (Some(view().id.generation), Some(view())));
    // A later version may leave the texts out.
    (later.phase, later.phase_word) = (v1::EnginePhase::Serving.into(), String::new());
    assert_eq!(later.known_phase(), Some(EnginePhase::Serving));
    // And a word of a version between that one and 0.1.0 is not known either.
    (later.phase, later.phase_word) = (0, "levitating".to_owned());
    assert_eq!(later.known_phase(), Some(EnginePhase::Unknown));
}

#[test]
fn zero_and_an_empty_text_are_none() {
    let instance = |pid| v1::Instance { pid, ..v1::Instance::default() }.known_pid();
    assert_eq!((instance(0), instance(7)), (None, Some(7)));
    let status = v1::EngineStatus { version: "2".to_owned(), ..v1::EngineStatus::default() };
    assert_eq!((status.known_version(), v1::EngineStatus::default().known_version()), (Some("2"), None));
    let silent = v1::NodeDevices { problem: "no answer".to_owned(), ..v1::NodeDevices::default() };
    assert_eq!(silent.known_problem(), Some("no answer"));
    assert_eq!(v1::NodeDevices::default().known_problem(), None);
}

#[test]
fn an_absent_status_is_none() {
    let nothing = v1::EngineStatus::default();
    assert_eq!((nothing.known_phase(), nothing.known_generation(), nothing.known_view()), (None, None, None));
    assert_eq!(v1::ReplicaStatus::default().known_generation(), None);
    assert_eq!(v1::Replica::default().known_member(), None);
    let member = v1::EngineMember { replica_id: id(1).to_string(), ..v1::EngineMember::default() };
    assert_eq!(MemberStatus::try_from(member).unwrap().away_since_ms, None);
}

#[test]
fn a_grant_is_wanted_with_all_that_it_needs_or_not_at_all() {
    let whole = v1::GrantWanted::from(&engine().grant_wanted.unwrap());
    let none_stored = v1::GrantWanted { stored: Vec::new(), ..whole.clone() };
    assert_eq!(GrantWanted::try_from(none_stored).unwrap().stored, view().members);
    let stored = vec![id(1).to_string(), id(3).to_string(), id(4).to_string()];
    let three = v1::GrantWanted { stored, ..whole.clone() };
    assert_eq!(GrantWanted::try_from(three).unwrap().stored.len(), 3);
    let bad = |member: &str| v1::View { members: vec![member.to_owned()], ..v1::View::from(&view()) };
    for broken in [
        v1::GrantWanted { view: None, ..whole.clone() },
        v1::GrantWanted { committed: None, ..whole.clone() },
        v1::GrantWanted { view: Some(bad("x")), ..whole.clone() },
        v1::GrantWanted { proposed: vec![bad("y")], ..whole },
    ] {
        assert!(GrantWanted::try_from(broken.clone()).is_err(), "{broken:?}");
    }
}
