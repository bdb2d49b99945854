//! Instances and the data address of the node: replicas follow it, and engines lose dead connections.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use shorthorn_api::v1::{self, instance::Detail};
use shorthorn_control::{ProcessCommand, ReplicaSpec};

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::instance::hub::{finish, spec_files};
use crate::serve::instance::{Hub, InstanceId, InstancePaths, ProcessPhase, Spec, control_watch, ports};

/// Returns the most frequent data address of the replicas of an earlier agent. That agent may have ended in
/// the middle of a change.
pub fn last_data_address(paths: &InstancePaths) -> Option<IpAddr> {
    let kind = v1::InstanceKind::Replica;
    let ids = spec_files(&paths.specs(kind), kind).unwrap_or_default();
    let specs = ids.iter().filter_map(|id| Spec::load(id, paths).ok());
    let mut counts = std::collections::BTreeMap::<IpAddr, usize>::new();
    for spec in specs {
        if let Spec::Replica(ReplicaSpec { data_address: Some(address), .. }) = spec {
            *counts.entry(address.ip()).or_default() += 1;
        }
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(address, _)| address)
}

impl Hub {
    /// Makes the running replicas listen on `address`. Returns those that do not do so yet: call again.
    /// Without an address, they stay as they are until they are started again.
    pub async fn move_replicas(self: &Arc<Hub>, address: Option<IpAddr>) -> Vec<InstanceId> {
        let Some(address) = address else { return Vec::new() };
        let mut left = Vec::new();
        for id in self.table().replicas() {
            let hub = Arc::clone(self);
            let moved = id.clone();
            // A task of its own, like each operation: half of it must not stay undone.
            let moved = tokio::spawn(async move { hub.move_replica(&moved, address).await });
            match finish(moved).await {
                Ok(true) => {}
                Ok(false) => left.push(id),
                Err(error) => {
                    tracing::warn!(instance = %id, %address, "the replica does not move yet: {error}");
                    left.push(id);
                }
            }
        }
        left
    }

    /// Returns true if the replica is stopped or listens on that address.
    async fn move_replica(&self, id: &InstanceId, address: IpAddr) -> Result<bool, NodeError> {
        let gate = self.gate(id);
        let _open = gate.lock().await;
        let Some((Spec::Replica(mut spec), process)) = self.table().known(id) else { return Ok(true) };
        let before = spec.data_address;
        if process.phase == ProcessPhase::Stopped {
            // Its next start chooses the port. But the next agent takes the address of most specs for the one
            // that this host had last.
            if let Some(before) = before.filter(|before| before.ip() != address) {
                spec.data_address = Some(SocketAddr::new(address, before.port()));
                self.keep(spec).await?;
            }
            return Ok(true);
        }
        if before.map(|before| before.ip()) != Some(address) {
            let ports = self.data_ports();
            let _choosing = self.choosing_port().await;
            let taken = self.table().ports_of_others(id);
            spec = blocking(move || {
                ports::choose(&mut spec, Some(address), &ports, &taken)?;
                Ok(spec)
            })
            .await?;
            // Stored first: a process that is started at this moment reads it.
            self.keep(spec.clone()).await?;
        }
        let Some(wanted) = spec.data_address else { return Ok(true) };
        if before == Some(wanted) && self.shows(id, wanted) {
            return Ok(true);
        }
        let command = ProcessCommand::Listen { address: wanted };
        let sent = control_watch::request(&spec.control_socket, &command).await;
        sent.map(|()| false)
            .map_err(|error| NodeError::Unavailable(format!("{}: {error}", spec.control_socket.display())))
    }

    /// Stores the spec of a replica, and shows it.
    async fn keep(&self, spec: ReplicaSpec) -> Result<(), NodeError> {
        let stored = (Spec::Replica(spec.clone()), self.paths().clone());
        blocking(move || Ok(stored.0.update(&stored.1)?)).await?;
        self.table().set_spec(Spec::Replica(spec));
        Ok(())
    }

    /// Returns true if the process shows that address, or nothing at all yet: it has just read its spec.
    fn shows(&self, id: &InstanceId, address: SocketAddr) -> bool {
        let shown = self.table().published(id);
        let Some(Detail::Replica(shown)) = shown.and_then(|shown| shown.detail) else { return true };
        shown.addresses.is_empty() || shown.addresses.contains(&format!("tcp:{address}"))
    }

    /// Starts the process of a replica again, with another port. It is of a version that cannot move, or
    /// another program has its port on the new address.
    pub async fn restart_replica(self: &Arc<Hub>, id: InstanceId) {
        let hub = Arc::clone(self);
        let restarted = tokio::spawn(async move { hub.restart_replica_now(&id).await });
        if let Err(error) = finish(restarted).await {
            tracing::warn!("a replica is not started again: {error}");
        }
    }

    async fn restart_replica_now(&self, id: &InstanceId) -> Result<(), NodeError> {
        let gate = self.gate(id);
        let _open = gate.lock().await;
        let Some((Spec::Replica(mut spec), process)) = self.table().known(id) else { return Ok(()) };
        if process.phase != ProcessPhase::Running {
            return Ok(());
        }
        let (address, ports) = (self.data_address().address, self.data_ports());
        let choosing = self.choosing_port().await;
        let mut taken = self.table().ports_of_others(id);
        taken.extend(spec.data_address.map(|address| address.port()));
        spec = blocking(move || {
            ports::choose(&mut spec, address, &ports, &taken)?;
            Ok(spec)
        })
        .await?;
        self.keep(spec).await?;
        drop(choosing);
        tracing::info!(instance = %id, "starting it again, because it does not move to the new address");
        Ok(self.backend().restart(id).await?)
    }

    /// Returns the engines with replicas on other hosts.
    pub fn engines_of_remote_replicas(&self) -> Vec<InstanceId> {
        let is_remote = |addresses: &[String]| !addresses.iter().any(|address| address.starts_with("unix:"));
        let specs = self.table().engine_specs().into_iter();
        let engines = specs.filter(|(_, spec)| spec.replicas.iter().any(|one| is_remote(&one.addresses)));
        engines.map(|(id, _)| id).collect()
    }

    /// Hands these engines over to new processes, after this host has lost the address from which they were
    /// connected. Their connections are dead, and a new process connects within seconds; otherwise they would
    /// wait for their replicas for a minute. Returns those that do not run.
    pub async fn renew_connections(self: &Arc<Hub>, engines: Vec<InstanceId>) -> Vec<InstanceId> {
        let mut left = Vec::new();
        for id in engines {
            let (hub, engine) = (Arc::clone(self), id.clone());
            let renewed = tokio::spawn(async move {
                let gate = hub.gate(&engine);
                let _open = gate.lock().await;
                let known = hub.table().known(&engine);
                let runs = known.is_some_and(|(_, process)| process.phase == ProcessPhase::Running);
                if runs {
                    tracing::info!(
                        instance = %engine,
                        "handing over, because its connections came from an address that is gone"
                    );
                    hub.backend().restart(&engine).await?;
                }
                Ok(runs)
            });
            match finish(renewed).await {
                Ok(true) => {}
                Ok(false) => left.push(id),
                Err(error) => tracing::warn!("an engine keeps its connections: {error}"),
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shorthorn_control::Unknown;
    use shorthorn_types::{Members, ReplicaId, Secret};
    use tokio::sync::watch;

    use super::*;
    use crate::serve::instance::{Children, Table};
    use crate::serve::network::Choice;

    fn replica(id: ReplicaId, port: u16) -> Spec {
        Spec::Replica(ReplicaSpec {
            volume: "v1".parse().unwrap(),
            replica: id,
            directory: "/data/v1".into(),
            size_bytes: 1 << 20,
            create: false,
            create_once: false,
            first_members: Members::new([id]).unwrap(),
            secret: Secret::new([1; 32]),
            data_socket: "/data.sock".into(),
            data_address: Some(SocketAddr::from(([10, 1, 0, 1], port))),
            control_socket: "/control.sock".into(),
            sum_bytes_per_s: None,
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        })
    }

    /// A version whose specs allowed the creation at each start of the process has left one.
    #[tokio::test]
    async fn a_directory_that_is_there_is_not_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&folder.path().join("s"), &folder.path().join("r")).unwrap();
        let of = |id: u64, is_there: bool| {
            let mut spec = replica(ReplicaId::from_random(id), 10001);
            let directory = folder.path().join(id.to_string());
            if is_there {
                std::fs::create_dir(&directory).unwrap();
                std::fs::write(directory.join("volume.meta"), "{}").unwrap();
            }
            let Spec::Replica(replica) = &mut spec else { panic!("{spec:?}") };
            (replica.create, replica.directory) = (true, directory);
            spec.store(&paths).unwrap();
            spec.id()
        };
        let (missing, there) = (of(1, false), of(2, true));
        let table = Table::new();
        let backend = Box::new(Children::new(paths.clone(), Arc::clone(&table)).unwrap());
        let (_choice, address) = watch::channel(Choice::default());
        let _hub = Hub::start(10000..=10009, address, paths.clone(), table, backend).await.unwrap();
        let may_create = |id: &InstanceId| match Spec::load(id, &paths).unwrap() {
            Spec::Replica(replica) => replica.create,
            Spec::Engine(_) => panic!("it is a replica"),
        };
        let forbidden = async {
            while may_create(&there) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(30), forbidden).await.unwrap();
        assert!(may_create(&missing), "it is still to be made");
    }

    /// Returns an agent that has found two replicas of an earlier one, which do not run.
    async fn hub(folder: &Path) -> (Arc<Hub>, InstancePaths) {
        let paths = InstancePaths::prepare(&folder.join("s"), &folder.join("r")).unwrap();
        for (id, port) in [(ReplicaId::from_random(1), 10001), (ReplicaId::from_random(2), 10002)] {
            replica(id, port).store(&paths).unwrap();
        }
        let table = Table::new();
        let backend = Box::new(Children::new(paths.clone(), Arc::clone(&table)).unwrap());
        let (_choice, address) = watch::channel(Choice::default());
        let hub = Hub::start(10000..=10009, address, paths.clone(), table, backend).await.unwrap();
        (hub, paths)
    }

    #[tokio::test]
    async fn instances_that_are_not_found_running_yet_are_left_for_the_next_round() {
        let folder = tempfile::tempdir().unwrap();
        let (hub, _) = hub(folder.path()).await;
        let found = hub.table().replicas();
        assert_eq!(hub.renew_connections(found.clone()).await, found);
        assert!(hub.engines_of_remote_replicas().is_empty());
    }

    #[tokio::test]
    async fn replicas_that_are_stopped_bring_no_former_address_back() {
        let folder = tempfile::tempdir().unwrap();
        let (hub, paths) = hub(folder.path()).await;
        // The host was restarted, with another address.
        let now: IpAddr = "10.1.0.2".parse().unwrap();
        assert!(hub.move_replicas(Some(now)).await.is_empty());
        assert_eq!(last_data_address(&paths), Some(now));
        let specs = hub.table().replicas();
        let ports = specs.iter().filter_map(|id| ports::of(&hub.table().known(id)?.0)).collect::<Vec<_>>();
        assert_eq!(ports, [10001, 10002], "they keep their ports");
    }
}
