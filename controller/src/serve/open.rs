//! Opens the store; with Kubernetes once this controller leads.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::ServeError;
use super::in_kubernetes::InKubernetes;
use super::leader_tasks::LeaderTasks;
use crate::config::StoreConfig;
use crate::kubernetes::claims::record_claims;
use crate::kubernetes::discover::{Machines, discover};
use crate::kubernetes::events::events;
use crate::kubernetes::guard_pods::GuardPods;
use crate::kubernetes::leader_pod;
use crate::kubernetes::lease_thread::{END_LIMIT, LeaseThread};
use crate::kubernetes::store::KubeStore;
use crate::kubernetes::{CaSecret, KubernetesConfig, connect};
use crate::metrics::{Readiness, ReadinessPhase};
use crate::store::{ObjectStore, RedbStore};
use crate::tls::CaStorage;

/// The time that the decisions of a new leader wait for the PersistentVolumes of Kubernetes to be listed and
/// recorded. After that they work with the stored claims.
const CLAIMS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the last line of the log. The process ends because of a lost lease, and must not wait
/// for a full pipe.
const LOG_LIMIT: Duration = Duration::from_millis(100);

/// An open store that this controller may write, and the parts that belong to it.
pub(super) struct OpenedStore {
    /// The place for the CA.
    pub(super) ca_storage: Arc<dyn CaStorage>,
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) tasks: LeaderTasks,
    /// None outside of Kubernetes.
    pub(super) kubernetes: Option<InKubernetes>,
}

/// Opens the store. With Kubernetes it first waits until this controller leads.
pub(super) async fn open(config: &StoreConfig, readiness: &Readiness) -> Result<OpenedStore, ServeError> {
    match config {
        StoreConfig::File(path) => {
            let store = Arc::new(RedbStore::open(path)?);
            let ca_storage = store.ca_storage();
            Ok(OpenedStore { ca_storage, store, tasks: LeaderTasks::alone(), kubernetes: None })
        }
        StoreConfig::Kubernetes(config) => lead(config, readiness).await,
    }
}

async fn lead(config: &KubernetesConfig, readiness: &Readiness) -> Result<OpenedStore, ServeError> {
    let client = connect(config).await?;
    let status = "waiting for the lease".to_owned();
    // Standing by is all that can be asked of it for now.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Status(&status), sd_notify::NotifyState::Ready]);
    let host = host();
    let identity = format!("{host}-{:08x}", getrandom::u32()?);
    let lease = LeaseThread::start(config, identity.clone(), end).map_err(ServeError::Lease)?;
    let mut tasks = LeaderTasks::with_lease(lease);
    // The name of a pod is the name of its host.
    let serves = tasks.serves();
    tasks.spawn(leader_pod::run(client.clone(), config.namespace.clone(), host, serves));
    let looked = |error: Option<String>| match error {
        None => readiness.reached(ReadinessPhase::StandingBy),
        error => readiness.heard(error),
    };
    let leader = tasks.acquired(&looked).await?;
    readiness.reached(ReadinessPhase::Opening);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Status("leading")]);
    let (events, recorder) = events(client.clone(), &config.namespace, &identity);
    tasks.spawn(recorder.run());
    tasks.flush_at_release(events.clone());
    let opening = KubeStore::open(client.clone(), &config.namespace, events.clone());
    let store: Arc<dyn ObjectStore> = match tasks.during(opening).await? {
        Ok(store) => Arc::new(store.led_by(leader)),
        Err(error) => {
            // Nothing was begun, and the next attempt need not wait for the end of this lease.
            tasks.release().await;
            return Err(error.into());
        }
    };
    let machines = Machines::new();
    tasks.spawn(discover(client.clone(), Arc::clone(&machines), Arc::clone(&store), config.agent_port));
    know_claims(&client, &store, &mut tasks).await?;
    let (known, kept, image) = (Arc::clone(&machines), Arc::clone(&store), config.guard_pod_image());
    let guard_pods = GuardPods::new(client.clone(), &config.namespace, image, known, kept, events.clone());
    tasks.spawn(guard_pods.run());
    let ca_storage: Arc<dyn CaStorage> = Arc::new(CaSecret::new(client.clone(), &config.namespace));
    let kubernetes = Some(InKubernetes::new(client, machines, events, config));
    Ok(OpenedStore { ca_storage, store, tasks, kubernetes })
}

/// Starts the task that records the claims of volumes, and waits for its first round. Objects that were
/// deleted without a leader are thus judged by the current needs of Kubernetes, not by the records of an
/// earlier controller.
async fn know_claims(
    client: &kube::Client,
    store: &Arc<dyn ObjectStore>,
    tasks: &mut LeaderTasks,
) -> Result<(), ServeError> {
    let (first, recorded) = oneshot::channel();
    tasks.spawn(record_claims(client.clone(), Arc::clone(store), first));
    if tasks.during(tokio::time::timeout(CLAIMS_LIMIT, recorded)).await?.is_err() {
        tracing::warn!("PersistentVolumes are not listed yet; continuing with the stored claims");
    }
    Ok(())
}

/// Returns the name of the host or the pod.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Ends the process, which hangs, as another controller may work by now.
#[expect(clippy::exit, reason = "the threads that could end it in order do not run")]
fn end() {
    // A log that blocks does not delay the end.
    std::thread::spawn(|| {
        tracing::error!("the lease is lost, and the controller did not end within {} s", END_LIMIT.as_secs());
    });
    std::thread::sleep(LOG_LIMIT);
    std::process::exit(1);
}
