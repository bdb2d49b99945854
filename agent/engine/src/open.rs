//! Opening a volume: fence the replicas, find the view, bring the first one through.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use shorthorn_control::{EngineSpec, MemberMode, MemberStatus, ReplicaEndpoint};
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{Basis, Change, Progress, basis};
use shorthorn_wire::{Hello, Welcome};

use crate::connection::{ConnectError, Connection};
use crate::error::EngineError;

/// How long members that do not answer are waited for when the others are enough: a process that is being
/// restarted is back by then.
pub const MISSING_LIMIT: Duration = Duration::from_secs(5);
/// Between two attempts to reach the replicas that are missing.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// A volume that may be served: its first view is through.
#[derive(Debug)]
pub struct Opened {
    pub view: View,
    /// For every replica of the spec, in its order: a connection per queue, where it is a member.
    pub connections: Vec<Vec<Connection>>,
    pub members: Vec<MemberStatus>,
}

/// Why an attempt to open the volume failed.
#[derive(Debug)]
pub enum OpenError {
    /// Never again: a newer engine holds it.
    Fatal(EngineError),
    /// Perhaps later; nothing was proposed.
    Missing { reason: String, members: Vec<MemberStatus> },
    /// Perhaps later, with a new generation: a view was proposed and may be stored somewhere.
    Torn(String),
}

/// A replica that answers, fenced.
struct Reached {
    index: usize,
    connection: Connection,
    welcome: Welcome,
}

/// One attempt to open the volume with `generation`. Unless `without_missing`, a member of the view that does not
/// answer is waited for: who is left out has to be rebuilt.
pub fn open(spec: &EngineSpec, generation: Generation, without_missing: bool) -> Result<Opened, OpenError> {
    let timeout = Duration::from_millis(u64::from(spec.replica_timeout_ms));
    let (mut reached, mut members) = reach(spec, generation, timeout)?;
    let reports: Vec<(ReplicaId, ReplicaReport)> =
        reached.iter().map(|one| (spec.replicas[one.index].replica, one.welcome.report.clone())).collect();
    let missing = |reason: String, members| OpenError::Missing { reason, members };
    let found = match basis(&reports, None) {
        Ok(found) if found.members != found.holders && !without_missing => {
            let missing_members = found.holders.filter(|id| !found.members.contains(id));
            return Err(missing(format!("{missing_members} of the view do not answer"), members));
        }
        Ok(found) if !found.needs_grant => found,
        Ok(found) => {
            let reason =
                format!("{} is exactly half of a view: that needs the arbiter's grant", found.members);
            return Err(missing(reason, members));
        }
        Err(cannot) => return Err(missing(cannot.to_string(), members)),
    };
    let view = View { id: ViewId { generation, number: 1 }, members: found.members };
    bring_through(spec, &mut reached, &found, view)?;
    let connections = connect_queues(spec, reached, view, timeout)?;
    for member in &mut members {
        let in_view = view.members.contains(member.replica);
        member.mode = if in_view { MemberMode::Member } else { MemberMode::Failed };
        if !in_view && member.message.is_empty() {
            "it has left the view: it has to be rebuilt".clone_into(&mut member.message);
        }
    }
    Ok(Opened { view, connections, members })
}

/// Fences all replicas at once, and waits for each until it has answered or its time is over: whoever is
/// left out here has to be rebuilt later.
fn reach(
    spec: &EngineSpec,
    generation: Generation,
    timeout: Duration,
) -> Result<(Vec<Reached>, Vec<MemberStatus>), OpenError> {
    let (sender, answers) = mpsc::channel();
    for (index, endpoint) in spec.replicas.iter().cloned().enumerate() {
        let (sender, spec) = (sender.clone(), spec.clone());
        thread::spawn(move || {
            // The receiver has gone when somebody else's answer was fatal: then this one does not matter.
            let _ = sender.send((index, greet(&spec, &endpoint, generation, 0, timeout)));
        });
    }
    drop(sender);
    let mut reached: Vec<Reached> = Vec::new();
    let mut members: Vec<MemberStatus> = spec.replicas.iter().map(connecting).collect();
    for (index, answer) in answers {
        match answer {
            Ok((connection, welcome)) => reached.push(Reached { index, connection, welcome }),
            Err(ConnectError::Deposed { holder, .. }) => {
                return Err(OpenError::Fatal(EngineError::Deposed { generation, holder }));
            }
            Err(error) => {
                members[index].mode = MemberMode::Failed;
                members[index].message = error.to_string();
            }
        }
    }
    reached.sort_unstable_by_key(|one| one.index);
    Ok((reached, members))
}

fn connecting(endpoint: &ReplicaEndpoint) -> MemberStatus {
    MemberStatus {
        replica: endpoint.replica,
        address: endpoint.addresses.first().cloned().unwrap_or_default(),
        mode: MemberMode::Connecting,
        message: String::new(),
    }
}

/// Opens one connection to a replica, at the first of its addresses that answers.
fn greet(
    spec: &EngineSpec,
    endpoint: &ReplicaEndpoint,
    generation: Generation,
    queue: u16,
    timeout: Duration,
) -> Result<(Connection, Welcome), ConnectError> {
    let mut last = ConnectError::Address(String::new());
    for address in &endpoint.addresses {
        let hello = Hello {
            volume: spec.volume.clone(),
            replica: endpoint.replica,
            generation,
            queue,
            proof: String::new(),
        };
        let answer = Connection::open(address, timeout).and_then(|mut connection| {
            let welcome = connection.greet(hello, &spec.secret)?;
            Ok((connection, welcome))
        });
        match answer {
            Ok((_, welcome)) if welcome.size_bytes != spec.size_bytes => {
                let message = format!("it has {} bytes, the volume {}", welcome.size_bytes, spec.size_bytes);
                last = ConnectError::Refused { message, errno: shorthorn_types::Errno::INVALID };
            }
            Ok(answer) => return Ok(answer),
            Err(deposed @ ConnectError::Deposed { .. }) => return Err(deposed),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Has every replica that was reached store `view`, and commits it when that is enough.
fn bring_through(
    spec: &EngineSpec,
    reached: &mut [Reached],
    found: &Basis,
    view: View,
) -> Result<(), OpenError> {
    let mut change = Change::new(found.honoured.clone(), view);
    let mut refused = Vec::new();
    for one in reached.iter_mut() {
        let replica = spec.replicas[one.index].replica;
        match one.connection.propose(view, &found.honoured) {
            Ok(()) => change.stored(replica),
            Err(ConnectError::Deposed { holder, .. }) => {
                return Err(OpenError::Fatal(EngineError::Deposed {
                    generation: view.id.generation,
                    holder,
                }));
            }
            Err(error) => refused.push(format!("{replica}: {error}")),
        }
    }
    if change.progress() != Progress::Through {
        return Err(OpenError::Torn(format!("view {view} is not through: {}", refused.join("; "))));
    }
    for one in reached.iter_mut() {
        // A mark that gets lost only leaves more to honour at the next start.
        let _ = one.connection.commit(view, &found.honoured);
    }
    Ok(())
}

/// The connections of the members: the one of queue 0 is there, those of the others are made now.
fn connect_queues(
    spec: &EngineSpec,
    reached: Vec<Reached>,
    view: View,
    timeout: Duration,
) -> Result<Vec<Vec<Connection>>, OpenError> {
    let mut all: Vec<Vec<Connection>> = spec.replicas.iter().map(|_| Vec::new()).collect();
    let members: &Members = &view.members;
    for one in reached {
        let endpoint = &spec.replicas[one.index];
        if !members.contains(endpoint.replica) {
            continue;
        }
        all[one.index].push(one.connection);
        for queue in 1..spec.queues {
            let opened = greet(spec, endpoint, view.id.generation, queue, timeout);
            let (connection, _) =
                opened.map_err(|error| OpenError::Torn(format!("{}: {error}", endpoint.replica)))?;
            all[one.index].push(connection);
        }
    }
    Ok(all)
}
