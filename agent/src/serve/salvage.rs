//! Reads the state of a replica's directory for the operator's decision, and carries the decision out.

use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use shorthorn_api::v1;
use shorthorn_store::{OpenOptions, SavedStatus, Severity, Store};
use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId, VolumeName};
use shorthorn_views::ReplicaViews;

use crate::serve::error::NodeError;

/// The part of a replica's state that describes its content. The rest is about other replicas, or about
/// regions that were being written.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedViews {
    volume: VolumeName,
    replica: ReplicaId,
    views: ReplicaViews,
}

/// Looks at a directory; works beside a process that has it open.
///
/// # Errors
/// The directory cannot be read.
pub fn inspect(directory: &Path, runs: bool) -> Result<v1::ReplicaInspection, NodeError> {
    let mut shown = v1::ReplicaInspection {
        directory: directory.display().to_string(),
        running: runs,
        ..v1::ReplicaInspection::default()
    };
    if !directory.try_exists().map_err(NodeError::at(directory))? {
        shown.missing = true;
        return Ok(shown);
    }
    let found = shorthorn_store::inspect(directory)?;
    shown.usable = found.usable;
    shown.running |= found.in_use_by.is_some();
    shown.allocated_bytes = found.layers.iter().map(|layer| layer.allocated_bytes).sum();
    if let Some(volume) = &found.volume {
        shown.dirty = volume.dirty && !shown.running;
        shown.rebuilding = volume.rebuilding;
    }
    let worth_telling = found.problems.iter().filter(|problem| problem.severity != Severity::Note);
    shown.problems = worth_telling.map(|problem| problem.message.clone()).collect();
    let own = found.own_state;
    shown.problems.extend(own.foreign);
    shown.lost_cache = own.lost_cache;
    shown.modified_ms = modified_ms(directory).unwrap_or_default();
    match own.saved.bytes().map(parse) {
        Some(Ok(state)) => {
            let report = state.views.report();
            shown = shown.with_generation(state.views.generation());
            shown.committed = Some((&report.committed).into());
            shown.proposed = report.proposed.iter().map(Into::into).collect();
        }
        Some(Err(error)) => shown.problems.push(format!("the state of the replica cannot be read: {error}")),
        None if own.status == SavedStatus::None => {
            shown.problems.push("no engine has ever opened it".to_owned())
        }
        None => {} // it is among the problems
    }
    Ok(shown)
}

fn parse(bytes: &[u8]) -> Result<SavedViews, serde_json::Error> {
    serde_json::from_slice(bytes)
}

/// Returns the newest time at which a file of the directory was written, if that is known.
fn modified_ms(directory: &Path) -> Option<u64> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let times = entries.filter_map(|entry| entry.metadata().ok()?.modified().ok());
    let since = times.filter_map(|time| time.duration_since(UNIX_EPOCH).ok());
    since.max().map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Makes the replica alone the committed view of its volume; see the node API.
///
/// # Errors
/// [`NodeError`] has the problem of the directory, which is unchanged then.
pub fn salvage(directory: &Path, replica: ReplicaId, attach: u64) -> Result<(), NodeError> {
    if !directory.join("volume.meta").try_exists().map_err(NodeError::at(directory))? {
        return Err(NodeError::NotFound(format!("{} holds no replica", directory.display())));
    }
    let options = OpenOptions { accept_rebuilding: true, ..OpenOptions::default() };
    let mut store = Store::open(directory, options)?;
    let changed = rewrite(&mut store, directory, replica, attach);
    let closed = store.close().map_err(NodeError::from);
    changed.and(closed)
}

fn rewrite(store: &mut Store, directory: &Path, replica: ReplicaId, attach: u64) -> Result<(), NodeError> {
    let refuse = |why: String| NodeError::Precondition(format!("{}: {why}", directory.display()));
    let saved = store.load_state()?;
    let Some(bytes) = saved.bytes() else {
        return Err(refuse("no engine has ever opened it: it holds nothing".into()));
    };
    let state =
        parse(bytes).map_err(|error| refuse(format!("the state of the replica cannot be read: {error}")))?;
    if state.replica != replica {
        return Err(refuse(format!("the directory is of replica {}, not {replica}", state.replica)));
    }
    let views = alone(replica, attach)?;
    let known = state.views.generation().attach;
    if known == attach && state.views.report() == views.report() {
        tracing::info!(directory = %directory.display(), attach, "salvaged already");
        return Ok(());
    }
    if known >= attach {
        return Err(refuse(format!(
            "an engine of attachment {known} has opened it, and the salvage has the number {attach}: salvage \
             it again"
        )));
    }
    let salvaged = SavedViews { views, ..state.clone() };
    let bytes = serde_json::to_vec(&salvaged).map_err(|error| refuse(error.to_string()))?;
    // The sets describe other replicas, which receive full copies, or regions in which this one may differ
    // from them. They are removed before the state: after an interruption, all steps are repeated.
    store.region_files().remove_all()?;
    store.drop_damaged_lost_blocks()?;
    let accepted =
        store.accept_unfinished_copy(&format!("{attach}-{replica}")).and_then(|()| store.set_left(false));
    accepted?;
    store.save_state(&bytes)?;
    let before = state.views.report();
    tracing::warn!(
        directory = %directory.display(),
        attach,
        ?before,
        "salvaged: the volume continues from this replica alone"
    );
    Ok(())
}

/// Returns the views of a replica that alone is the volume, held by no engine before `attach`.
fn alone(replica: ReplicaId, attach: u64) -> Result<ReplicaViews, NodeError> {
    let generation = Generation::new(attach, 0);
    let members = Members::new([replica])?;
    let mut views = ReplicaViews::new(View { id: ViewId { generation, number: 0 }, members });
    views.fence(generation).map_err(|error| NodeError::Precondition(error.to_string()))?;
    Ok(views)
}

#[cfg(test)]
mod tests {
    use shorthorn_store::CreateOptions;

    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    /// Makes the directory of a replica that lost its rebuild, and knows a proposed view of others.
    fn replica(directory: &Path) {
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(directory, created).unwrap();
        let view = |attach, number, ids: &[u64]| View {
            id: ViewId { generation: Generation::new(attach, 0), number },
            members: Members::new(ids.iter().copied().map(id)).unwrap(),
        };
        let mut views = ReplicaViews::new(view(0, 0, &[1, 2]));
        views.fence(Generation::new(3, 0)).unwrap();
        let basis = views.report().clone();
        views.propose(Generation::new(3, 0), view(3, 1, &[2]), &basis).unwrap();
        let state = SavedViews { volume: VolumeName::new("v1").unwrap(), replica: id(1), views };
        let mut state = serde_json::to_value(&state).unwrap();
        state["missed"] = serde_json::json!({ "00000002": [1] });
        store.save_state(&serde_json::to_vec(&state).unwrap()).unwrap();
        store.set_rebuilding(true).unwrap();
        store.set_left(true).unwrap();
        store.close().unwrap();
    }

    #[test]
    fn shows_views_and_possible_losses() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        assert!(inspect(&directory, false).unwrap().missing);
        replica(&directory);
        let shown = inspect(&directory, false).unwrap();
        assert_eq!(shown.known_generation(), Some(Generation::new(3, 0)));
        assert_eq!(shown.committed.unwrap().members.len(), 2);
        assert_eq!((shown.proposed[0].attach, shown.proposed[0].members.len()), (3, 1));
        assert!(shown.rebuilding && !shown.lost_cache && !shown.dirty && !shown.missing);
        assert!(shown.modified_ms > 0);
    }

    #[test]
    fn shows_that_the_host_was_restarted_under_it() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        replica(&directory);
        let options = OpenOptions { accept_rebuilding: true, ..OpenOptions::default() };
        drop(Store::open(&directory, options).unwrap()); // as if its process had been killed
        let shown = inspect(&directory, false).unwrap();
        assert!(shown.dirty && !shown.lost_cache, "the page cache is still there");
        let boot = directory.join("shorthorn.boot");
        let mut found: serde_json::Value = serde_json::from_slice(&fs::read(&boot).unwrap()).unwrap();
        found["boot_id"] = "another".into();
        // The old check would not match. A document without a check is accepted.
        found.as_object_mut().unwrap().remove("ShorthornCheck");
        fs::write(&boot, found.to_string()).unwrap();
        let shown = inspect(&directory, false).unwrap();
        assert!(shown.dirty && shown.lost_cache);
    }

    #[test]
    fn a_damaged_state_is_a_problem_and_no_answer() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        replica(&directory);
        let path = directory.join("shorthorn.state");
        let text = fs::read_to_string(&path).unwrap().replace("v1", "v2");
        fs::write(&path, text).unwrap();
        let shown = inspect(&directory, false).unwrap();
        assert_eq!((shown.shown_generation(), shown.committed), (String::new(), None));
        assert!(shown.problems.iter().any(|problem| problem.contains("checksum")), "{:?}", shown.problems);
    }

    #[test]
    fn a_salvaged_replica_is_the_volume_alone() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        replica(&directory);
        assert!(matches!(salvage(&directory, id(2), 4), Err(NodeError::Precondition(_))));
        let names = ["shorthorn.intent", "shorthorn.missed-00000002", "shorthorn.lost-blocks"];
        let sets = names.map(|name| directory.join(name));
        sets.iter().for_each(|set| fs::write(set, "regions").unwrap());
        salvage(&directory, id(1), 4).unwrap();
        assert!(sets.iter().all(|set| !set.exists()));
        let shown = inspect(&directory, false).unwrap();
        let committed = shown.committed.clone().unwrap();
        assert_eq!((committed.attach, committed.restart, committed.number), (4, 0, 0));
        assert_eq!(committed.members, [id(1).to_string()]);
        assert_eq!((shown.known_generation(), shown.proposed.len()), (Some(Generation::new(4, 0)), 0));
        assert!(!shown.rebuilding);
        let volume = fs::read_to_string(directory.join("volume.meta")).unwrap();
        assert!(volume.contains("\"Rebuilding\":false"), "Longhorn can have it: {volume}");
        let text = fs::read_to_string(directory.join("shorthorn.state")).unwrap();
        assert!(!text.contains("missed"), "{text}");
        // Again, and late: nothing changes.
        salvage(&directory, id(1), 4).unwrap();
        let error = salvage(&directory, id(1), 3).unwrap_err().to_string();
        assert!(error.contains("attachment 4") && error.contains("number 3"), "{error}");
        assert_eq!(fs::read_to_string(directory.join("shorthorn.state")).unwrap(), text);
    }

    /// A controller whose store was restored from a backup may draw a number that was used before.
    #[test]
    fn a_salvage_with_the_number_of_a_known_engine_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        replica(&directory);
        let error = salvage(&directory, id(1), 3).unwrap_err().to_string();
        assert!(error.contains("salvage it again"), "{error}");
        assert!(inspect(&directory, false).unwrap().rebuilding, "nothing has changed");
    }

    #[test]
    fn the_incomplete_snapshots_of_a_salvaged_replica_are_labelled() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        replica(&directory);
        let options = OpenOptions { accept_rebuilding: true, ..OpenOptions::default() };
        let mut store = Store::open(&directory, options).unwrap();
        store.snapshot("s", true, std::collections::BTreeMap::new(), "2026-11-26T00:00:00Z").unwrap();
        store.close().unwrap();
        salvage(&directory, id(1), 4).unwrap();
        let meta = fs::read_to_string(directory.join("volume-snap-s.img.meta")).unwrap();
        assert!(meta.contains(&format!("\"shorthorn-salvaged\":\"4-{}\"", id(1))), "{meta}");
    }

    #[test]
    fn missing_open_and_never_used_replicas_are_not_salvaged() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(salvage(dir.path(), id(1), 1), Err(NodeError::NotFound(_))));
        let directory = dir.path().join("v1-00000001");
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let held = Store::create(&directory, created).unwrap();
        assert!(matches!(salvage(&directory, id(1), 1), Err(NodeError::Precondition(_))));
        held.close().unwrap();
        let error = salvage(&directory, id(1), 1).unwrap_err().to_string();
        assert!(error.contains("no engine has ever opened it"), "{error}");
    }
}
