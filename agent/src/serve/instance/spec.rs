//! Spec of an instance, built from the request of the controller.

use std::net::SocketAddr;
use std::path::PathBuf;

use shorthorn_api::{nonzero, v1};
use shorthorn_control::{
    EngineSpec, FrontendChoice, INTENT_CLEAR_AFTER_MS, RebuildLimits, ReplicaEndpoint, ReplicaSpec, Secret,
    SpecError, Unknown, load_spec, store_spec, update_spec,
};
use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS, MAX_VOLUME_BYTES};
use shorthorn_types::{Members, ReplicaId, View, VolumeName};

use crate::serve::config::Config;
use crate::serve::error::NodeError;
use crate::serve::instance::{InstanceId, InstancePaths};
use crate::serve::paths::absolute;

/// The most addresses of one replica that an engine is given.
const ADDRESSES_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spec {
    /// Is written to the engine's spec file.
    Engine(EngineSpec),
    /// Is written to the replica's spec file.
    Replica(ReplicaSpec),
}

impl Spec {
    /// Converts the request of the controller to the spec of an engine.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] names the field that can never work.
    pub fn engine(
        request: v1::StartEngineRequest,
        config: &Config,
        paths: &InstancePaths,
    ) -> Result<Spec, NodeError> {
        let volume = VolumeName::new(&request.volume)?;
        let id = InstanceId::Engine(volume.clone());
        if request.attach == 0 {
            return Err(NodeError::Invalid("attach is 0: the first attachment has number 1".into()));
        }
        let secret = secret(&request.secret)?;
        let frontend = frontend(&request)?;
        Ok(Spec::Engine(EngineSpec {
            state_file: paths.engine_state(&volume, &secret),
            volume,
            size_bytes: volume_size(request.size_bytes)?,
            attach: request.attach,
            replicas: endpoints(request.replicas)?,
            frontend,
            secret,
            control_socket: paths.control(&id)?,
            frontend_socket: paths.data(&id)?,
            device_dir: config.device_dir.clone(),
            queues: config.queues,
            depth: config.queue_depth,
            replica_timeout_ms: config.replica_timeout_ms,
            granted: request.granted.map(View::try_from).transpose()?,
            rebuild: rebuild_limits(request.rebuild)?,
            intent_clear_after_ms: Some(INTENT_CLEAR_AFTER_MS),
            verify_reads: request.verify_reads,
            continues: nonzero(request.continues),
            encrypt_in_transit: request.encrypt_in_transit,
            unknown: Unknown::default(),
        }))
    }

    /// Converts the request of the controller to the spec of a replica. Its data port is chosen later.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] names the field that can never work.
    pub fn replica(
        request: v1::StartReplicaRequest,
        config: &Config,
        paths: &InstancePaths,
    ) -> Result<Spec, NodeError> {
        let volume = VolumeName::new(&request.volume)?;
        let replica: ReplicaId = request.replica_id.parse()?;
        let id = InstanceId::Replica(volume.clone(), replica);
        let members: Vec<ReplicaId> =
            request.first_members.iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
        let disk = absolute(PathBuf::from(&request.disk_path))
            .map_err(|error| NodeError::Invalid(format!("disk_path: {error}")))?;
        Ok(Spec::Replica(ReplicaSpec {
            volume,
            replica,
            directory: disk.join("replicas").join(id.name()),
            size_bytes: volume_size(request.size_bytes)?,
            create: request.create,
            create_once: true,
            first_members: Members::new(members)?,
            secret: secret(&request.secret)?,
            data_socket: paths.data(&id)?,
            data_address: None,
            control_socket: paths.control(&id)?,
            sum_bytes_per_s: Some(u64::from(config.sum_mib_per_s) << 20).filter(|rate| *rate > 0),
            encrypt_in_transit: request.encrypt_in_transit,
            unknown: Unknown::default(),
        }))
    }

    /// Reads the spec file of `id`.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn load(id: &InstanceId, paths: &InstancePaths) -> Result<Spec, SpecError> {
        let path = paths.spec(id);
        match id {
            InstanceId::Engine(_) => load_spec(&path).map(Spec::Engine),
            InstanceId::Replica(..) => load_spec(&path).map(Spec::Replica),
        }
    }

    /// Writes the spec file, durably.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn store(&self, paths: &InstancePaths) -> Result<(), SpecError> {
        let path = paths.spec(&self.id());
        match self {
            Spec::Engine(spec) => store_spec(&path, spec),
            Spec::Replica(spec) => store_spec(&path, spec),
        }
    }

    /// Writes a spec that comes from the same request as the one in the file, like [`Spec::store`]. Fields of
    /// a later version stay.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn update(&self, paths: &InstancePaths) -> Result<(), SpecError> {
        let path = paths.spec(&self.id());
        match self {
            Spec::Engine(spec) => update_spec(&path, spec),
            Spec::Replica(spec) => update_spec(&path, spec),
        }
    }

    /// Derives the identity from the names in the spec.
    pub fn id(&self) -> InstanceId {
        match self {
            Spec::Engine(spec) => InstanceId::Engine(spec.volume.clone()),
            Spec::Replica(spec) => InstanceId::Replica(spec.volume.clone(), spec.replica),
        }
    }

    /// Keeps the larger size: a late request must not revert the growth of the volume.
    pub fn keep_size(&mut self, known: &Spec) {
        if let (Spec::Engine(asked), Spec::Engine(known)) = (self, known) {
            asked.size_bytes = asked.size_bytes.max(known.size_bytes);
        }
    }

    /// Takes over the fields of a later version from `known`, which comes from the same request.
    pub fn keep_unknown(&mut self, known: &Spec) {
        match (self, known) {
            (Spec::Engine(asked), Spec::Engine(known)) => asked.unknown.clone_from(&known.unknown),
            (Spec::Replica(asked), Spec::Replica(known)) => asked.unknown.clone_from(&known.unknown),
            _ => {}
        }
    }

    /// Returns the control socket of the process.
    pub fn control_socket(&self) -> PathBuf {
        match self {
            Spec::Engine(spec) => spec.control_socket.clone(),
            Spec::Replica(spec) => spec.control_socket.clone(),
        }
    }

    /// Returns the number of the attachment of an engine.
    pub fn attach(&self) -> Option<u64> {
        match self {
            Spec::Engine(spec) => Some(spec.attach),
            Spec::Replica(_) => None,
        }
    }

    /// Returns true if connections to other hosts are encrypted.
    pub fn encrypts_in_transit(&self) -> bool {
        match self {
            Spec::Engine(spec) => spec.encrypt_in_transit,
            Spec::Replica(spec) => spec.encrypt_in_transit,
        }
    }

    /// Returns true if both specs come from the same request. Additions of the agent may differ with its
    /// configuration, and `create` changes once a replica has data. The replicas of an engine, the last
    /// grant, the limits and the size may change while it runs.
    pub fn is_same_request(&self, other: &Spec) -> bool {
        if self.encrypts_in_transit() != other.encrypts_in_transit() {
            return false;
        }
        match (self, other) {
            (Spec::Engine(a), Spec::Engine(b)) => {
                (&a.volume, a.attach, a.frontend, &a.secret) == (&b.volume, b.attach, b.frontend, &b.secret)
            }
            (Spec::Replica(a), Spec::Replica(b)) => {
                (&a.volume, a.replica, &a.directory) == (&b.volume, b.replica, &b.directory)
                    && (&a.first_members, &a.secret) == (&b.first_members, &b.secret)
            }
            _ => false,
        }
    }
}

/// Returns the replicas of a volume, as its engine is to find them.
///
/// # Errors
/// [`NodeError::Invalid`].
pub fn endpoints(replicas: Vec<v1::ReplicaAddress>) -> Result<Vec<ReplicaEndpoint>, NodeError> {
    if replicas.is_empty() || replicas.len() > MAX_MEMBERS {
        let count = replicas.len();
        return Err(NodeError::Invalid(format!("{count} replicas: an engine needs 1 to {MAX_MEMBERS}")));
    }
    let replicas: Vec<_> = replicas.into_iter().map(endpoint).collect::<Result<_, _>>()?;
    let distinct = Members::new(replicas.iter().map(|endpoint| endpoint.replica))?;
    if distinct.len() != replicas.len() {
        return Err(NodeError::Invalid("a replica is listed twice".into()));
    }
    Ok(replicas)
}

/// Converts the limits of copies; absent ones get their default.
///
/// # Errors
/// [`NodeError::Invalid`].
pub fn rebuild_limits(limits: Option<v1::RebuildLimits>) -> Result<RebuildLimits, NodeError> {
    let Some(limits) = limits else { return Ok(RebuildLimits::default()) };
    let share_percent = match limits.share_percent {
        0 => RebuildLimits::default().share_percent,
        percent => u8::try_from(percent)
            .ok()
            .filter(|percent| *percent <= 100)
            .ok_or_else(|| NodeError::Invalid(format!("a share of {percent} percent: use 1 to 100")))?,
    };
    Ok(RebuildLimits { bytes_per_s: nonzero(limits.bytes_per_s), share_percent })
}

fn endpoint(address: v1::ReplicaAddress) -> Result<ReplicaEndpoint, NodeError> {
    let replica: ReplicaId = address.replica_id.parse()?;
    if address.addresses.is_empty() || address.addresses.len() > ADDRESSES_MAX {
        let count = address.addresses.len();
        return Err(NodeError::Invalid(format!(
            "replica {replica} has {count} addresses: 1 to {ADDRESSES_MAX}"
        )));
    }
    for text in &address.addresses {
        let good = match text.split_once(':') {
            Some(("unix", path)) => absolute(path.into()).is_ok(),
            Some(("tcp", socket)) => socket.parse::<SocketAddr>().is_ok(),
            _ => false,
        };
        if !good {
            let hint = "use unix:<absolute path> or tcp:<ip>:<port>";
            return Err(NodeError::Invalid(format!("address {text:?} of replica {replica}: {hint}")));
        }
    }
    Ok(ReplicaEndpoint { replica, addresses: address.addresses, local: address.local })
}

/// Returns the size of a volume.
///
/// # Errors
/// [`NodeError::Invalid`].
pub fn volume_size(bytes: u64) -> Result<u64, NodeError> {
    if bytes != 0 && bytes.is_multiple_of(BLOCK_BYTES) && bytes <= MAX_VOLUME_BYTES {
        return Ok(bytes);
    }
    Err(NodeError::Invalid(format!(
        "size {bytes}: it must be a multiple of {BLOCK_BYTES}, from {BLOCK_BYTES} to {MAX_VOLUME_BYTES}"
    )))
}

fn secret(bytes: &[u8]) -> Result<Secret, NodeError> {
    let bytes = bytes.try_into();
    bytes.map(Secret::new).map_err(|_| NodeError::Invalid("the secret must have 32 bytes".into()))
}

fn frontend(request: &v1::StartEngineRequest) -> Result<FrontendChoice, NodeError> {
    let choice = request.chosen_frontend().and_then(FrontendChoice::try_from);
    choice.map_err(|error| NodeError::Invalid(error.to_string()))
}
