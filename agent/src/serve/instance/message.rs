//! Instances as the node API shows them.

use shorthorn_api::v1::{self, InstanceState, instance::Detail};
use shorthorn_control::{EnginePhase, EngineSpec, ProcessStatus, ReplicaPhase, ReplicaSpec};

use crate::serve::instance::{InstanceProcess, ProcessPhase, Spec};

/// Combines the states of the process and of the control socket of an instance. During a takeover, the engine
/// of the former attachment still answers: its status is left out.
pub fn instance(spec: &Spec, process: &InstanceProcess, status: Option<&ProcessStatus>) -> v1::Instance {
    let id = spec.id();
    let status = status.filter(|status| !is_of_other_attachment(spec, status));
    let (inside, reported) = match status {
        Some(ProcessStatus::Engine(engine)) => (engine_state(engine.phase), engine.message.as_str()),
        Some(ProcessStatus::Replica(replica)) => (replica_state(replica.phase), replica.message.as_str()),
        None => (InstanceState::Starting, ""),
    };
    let state = match process.phase {
        ProcessPhase::Stopped => InstanceState::Stopped,
        ProcessPhase::Starting => InstanceState::Starting,
        ProcessPhase::Running => inside,
        ProcessPhase::Stopping => InstanceState::Stopping,
        ProcessPhase::Failed => InstanceState::Error,
    };
    let message = process.message.as_deref().unwrap_or(reported);
    v1::Instance {
        kind: id.kind().into(),
        name: id.name(),
        state: state.into(),
        message: message.to_owned(),
        pid: process.pid.unwrap_or_default(),
        detail: Some(match spec {
            Spec::Engine(spec) => Detail::Engine(engine(spec, status)),
            Spec::Replica(spec) => Detail::Replica(replica(spec, status)),
        }),
    }
}

/// Returns true if the status comes from the engine of another attachment than the one in the spec.
pub fn is_of_other_attachment(spec: &Spec, status: &ProcessStatus) -> bool {
    match (spec, status) {
        (Spec::Engine(spec), ProcessStatus::Engine(engine)) => engine.generation.attach != spec.attach,
        _ => false,
    }
}

/// Returns true if the engine has reported that it serves, whether or not its process still runs.
pub fn says_serving(instance: &v1::Instance) -> bool {
    matches!(
        &instance.detail, Some(Detail::Engine(engine)) if engine.known_phase() == Some(EnginePhase::Serving)
    )
}

fn engine_state(phase: EnginePhase) -> InstanceState {
    match phase {
        // A phase of a later version may be one before it serves.
        EnginePhase::Starting | EnginePhase::Unknown => InstanceState::Starting,
        EnginePhase::Serving | EnginePhase::Frozen => InstanceState::Running,
        EnginePhase::Stopping => InstanceState::Stopping,
        EnginePhase::Stopped => InstanceState::Error,
    }
}

fn replica_state(phase: ReplicaPhase) -> InstanceState {
    match phase {
        ReplicaPhase::Closed => InstanceState::Starting,
        ReplicaPhase::Serving => InstanceState::Running,
        ReplicaPhase::Failed => InstanceState::Error,
    }
}

fn engine(spec: &EngineSpec, status: Option<&ProcessStatus>) -> v1::EngineStatus {
    let Some(ProcessStatus::Engine(status)) = status else {
        return v1::EngineStatus {
            volume: spec.volume.to_string(),
            size_bytes: spec.size_bytes,
            attach: spec.attach,
            ..v1::EngineStatus::default()
        };
    };
    v1::EngineStatus { attach: spec.attach, ..status.into() }
}

fn replica(spec: &ReplicaSpec, status: Option<&ProcessStatus>) -> v1::ReplicaStatus {
    let Some(ProcessStatus::Replica(status)) = status else {
        return v1::ReplicaStatus {
            volume: spec.volume.to_string(),
            replica_id: spec.replica.to_string(),
            size_bytes: spec.size_bytes,
            directory: spec.directory.display().to_string(),
            ..v1::ReplicaStatus::default()
        };
    };
    status.into()
}

#[cfg(test)]
pub(super) mod tests {
    use shorthorn_control::{EngineStatus, FrontendChoice, RebuildLimits, Secret, Unknown};
    use shorthorn_types::{Generation, VolumeName};

    use super::*;
    use crate::serve::instance::{InstanceId, InstancePaths};

    pub fn spec(paths: &InstancePaths, attach: u64) -> Spec {
        let volume: VolumeName = "v".parse().unwrap();
        let (id, secret) = (InstanceId::Engine(volume.clone()), Secret::new([7; 32]));
        Spec::Engine(EngineSpec {
            state_file: paths.engine_state(&volume, &secret),
            volume,
            size_bytes: 1 << 20,
            attach,
            replicas: Vec::new(),
            frontend: FrontendChoice::Socket,
            secret,
            control_socket: paths.control(&id).unwrap(),
            frontend_socket: paths.data(&id).unwrap(),
            device_dir: "/dev/longhorn".into(),
            queues: 1,
            depth: 128,
            replica_timeout_ms: 8000,
            granted: None,
            rebuild: RebuildLimits::default(),
            intent_clear_after_ms: None,
            verify_reads: false,
            continues: Some(1),
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        })
    }

    pub fn serving(attach: u64) -> ProcessStatus {
        in_phase(attach, EnginePhase::Serving)
    }

    pub fn in_phase(attach: u64, phase: EnginePhase) -> ProcessStatus {
        let generation = Generation::new(attach, 3);
        ProcessStatus::Engine(EngineStatus {
            phase,
            endpoint: Some("/dev/longhorn/v".into()),
            ..EngineStatus::starting("v".parse().unwrap(), generation, 1 << 20)
        })
    }

    #[test]
    fn an_engine_of_the_former_attachment_does_not_show_as_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&dir.path().join("state"), &dir.path().join("runtime")).unwrap();
        let process = InstanceProcess::with_pid(ProcessPhase::Running, 4711);
        for (of_process, state) in [(4, InstanceState::Starting), (5, InstanceState::Running)] {
            let shown = instance(&spec(&paths, 5), &process, Some(&serving(of_process)));
            let Some(Detail::Engine(engine)) = &shown.detail else { panic!("{shown:?}") };
            assert_eq!((shown.state(), engine.attach, shown.pid), (state, 5, 4711), "{of_process}");
            let serves = state == InstanceState::Running;
            let is_serving = engine.known_phase() == Some(EnginePhase::Serving);
            assert_eq!((is_serving, !engine.endpoint.is_empty()), (serves, serves), "{of_process}");
        }
    }
}
