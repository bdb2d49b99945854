//! Follows one agent: its stream of instances, and from time to time its disks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::observed::{Instance, InstanceKey, InstanceKind, Link};
use shorthorn_controller_core::{NodeName, Timestamp};
use shorthorn_proto::v1;
use shorthorn_proto::v1::instance_event::Type;
use shorthorn_proto::v1::node_client::NodeClient;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::{CALL_LIMIT, Fleet, convert, limited};
use crate::work::backoff;

/// How often the free space and the health of disks are asked for.
const DISKS_EVERY: Duration = Duration::from_secs(30);
/// The longest wait before an agent is tried again: a volume may be frozen until it is back.
const RECONNECT_MAX: Duration = Duration::from_millis(500);
/// The longest that an agent may take to show everything that is there.
const SYNC_LIMIT: Duration = Duration::from_secs(30);

/// Follows the agent of `node` for ever; connects anew, ever later, where that breaks.
pub(super) async fn follow(fleet: Arc<Fleet>, node: NodeName) {
    let mut failures = 0;
    loop {
        let Ok(mut client) = fleet.client(&node) else { return };
        let error = match sync(&fleet, &node, &mut client).await {
            Ok(stream) => {
                failures = 0;
                listen(&fleet, &node, &mut client, stream).await
            }
            Err(error) => error,
        };
        failures += 1;
        lose(&fleet, &node, &error);
        tokio::time::sleep(backoff(failures).min(RECONNECT_MAX)).await;
    }
}

fn lose(fleet: &Fleet, node: &NodeName, error: &Status) {
    let reason = reason(error);
    let mut was_synced = false;
    fleet.change(node, |view| {
        was_synced = view.is_synced();
        let since = match view.link {
            Link::Down { since, .. } => since,
            Link::Synced => Timestamp::now(),
        };
        view.link = Link::Down { since, reason: reason.clone() };
    });
    if was_synced {
        tracing::warn!(%node, reason, "the agent is out of reach");
        fleet.wake_all(node);
    }
}

/// What went wrong, down to the system's own words: "transport error" helps nobody.
fn reason(error: &Status) -> String {
    let mut innermost: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(source) = innermost.and_then(std::error::Error::source) {
        innermost = Some(source);
    }
    let text = innermost.map_or_else(|| error.message().to_owned(), ToString::to_string);
    if text.is_empty() { error.code().to_string() } else { text }
}

/// Takes in everything that the agent shows, and returns the stream of what changes after that.
async fn sync(
    fleet: &Fleet,
    node: &NodeName,
    client: &mut NodeClient<Channel>,
) -> Result<Streaming<v1::InstanceEvent>, Status> {
    let version = look(fleet, node, client).await?;
    let mut stream = client.watch_instances(v1::WatchInstancesRequest {}).await?.into_inner();
    let everything = collect(&mut stream);
    let instances = tokio::time::timeout(SYNC_LIMIT, everything)
        .await
        .map_err(|_| Status::deadline_exceeded("the agent does not finish showing its instances"))??;
    fleet.change(node, |view| {
        view.failures.clear();
        view.instances = instances;
        view.link = Link::Synced;
    });
    tracing::info!(%node, version, "the agent is in reach");
    fleet.wake_all(node);
    Ok(stream)
}

/// Takes in who the agent is and which disks it has; returns its version.
async fn look(fleet: &Fleet, node: &NodeName, client: &mut NodeClient<Channel>) -> Result<String, Status> {
    let _asking = fleet.ask_for_disks(node).await;
    let info = client.get_node(limited(v1::GetNodeRequest {}, CALL_LIMIT)).await?.into_inner();
    let disks = client.list_disks(limited(v1::ListDisksRequest {}, CALL_LIMIT)).await?.into_inner();
    let version = info.version.clone();
    fleet.change(node, |view| {
        view.info = Some(convert::info(info));
        view.disks = disks.disks.into_iter().map(convert::disk).collect();
    });
    Ok(version)
}

async fn collect(
    stream: &mut Streaming<v1::InstanceEvent>,
) -> Result<BTreeMap<InstanceKey, Instance>, Status> {
    let mut instances = BTreeMap::new();
    loop {
        let event = stream.message().await?.ok_or_else(|| Status::unavailable("the stream ended"))?;
        match (event.r#type(), event.instance.map(convert::instance)) {
            (Type::Synced, _) => return Ok(instances),
            (Type::Set, Some(Some((key, instance)))) => drop(instances.insert(key, instance)),
            (Type::Gone, Some(Some((key, _)))) => drop(instances.remove(&key)),
            _ => {}
        }
    }
}

/// Takes in what changes, until the stream ends.
async fn listen(
    fleet: &Fleet,
    node: &NodeName,
    client: &mut NodeClient<Channel>,
    mut stream: Streaming<v1::InstanceEvent>,
) -> Status {
    let mut look_at_disks = tokio::time::interval_at(Instant::now() + DISKS_EVERY, DISKS_EVERY);
    look_at_disks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            event = stream.message() => match event {
                Ok(Some(event)) => take(fleet, node, event),
                Ok(None) => return Status::unavailable("the agent ended the stream"),
                Err(error) => return error,
            },
            _ = look_at_disks.tick() => match look(fleet, node, client).await {
                Ok(_) => fleet.queue.add([Key::new(Kind::Node, node.as_str())]),
                Err(error) => return error,
            },
        }
    }
}

fn take(fleet: &Fleet, node: &NodeName, event: v1::InstanceEvent) {
    let kind = event.r#type();
    let Some((key, instance)) = event.instance.and_then(convert::instance) else { return };
    let object = Key::new(
        match key.kind {
            InstanceKind::Engine => Kind::Engine,
            InstanceKind::Replica => Kind::Replica,
        },
        &key.name,
    );
    fleet.change(node, |view| match kind {
        Type::Set => drop(view.instances.insert(key, instance)),
        Type::Gone => drop(view.instances.remove(&key)),
        Type::Synced | Type::Unspecified => {}
    });
    // The arbiter looks at what the engine says itself, at once.
    let volume = (object.kind == Kind::Engine).then(|| Key::new(Kind::Volume, &object.name));
    fleet.queue.add([object].into_iter().chain(volume));
}
