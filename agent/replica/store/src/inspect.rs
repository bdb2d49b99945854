//! Looking at a directory without changing anything in it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Serialize, Serializer};
use shorthorn_chain::{Checks, DirectoryFacts, DiskMeta, ImageName, Layout, Recovery, VolumeMeta, recover};
use shorthorn_types::{HumanBytes, Regions};

use crate::boot::Boot;
use crate::directory::Directory;
use crate::directory_scan::collect;
use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::info::Provenance;
use crate::lock::Lock;
use crate::regions;
use crate::state::{self, SavedState};
use crate::table::table;

/// The content of a directory. [`fmt::Display`] gives it as text for people.
#[derive(Clone, Debug, Serialize)]
pub struct DirectoryInspection {
    /// The path of the directory.
    pub directory: String,
    /// True if a store could open it, perhaps after repairs.
    pub usable: bool,
    /// The volume, if `volume.meta` can be read.
    pub volume: Option<InspectedVolume>,
    /// The chain from the head to the oldest layer, then layers on side branches.
    pub layers: Vec<InspectedLayer>,
    /// The state that Shorthorn keeps beside the volume.
    pub own_state: OwnState,
    /// The process that has the directory open.
    pub in_use_by: Option<u32>,
    /// The problems that were found.
    pub problems: Vec<Problem>,
}

/// `volume.meta`.
#[derive(Clone, Debug, Serialize)]
pub struct InspectedVolume {
    /// `Size` in the document, in bytes.
    pub size_bytes: i64,
    /// The head's file.
    pub head: String,
    /// True if the replica was not closed cleanly, or is open now.
    pub dirty: bool,
    /// True if the replica is being rebuilt.
    pub rebuilding: bool,
    /// True if the replica is not in the view of its volume. Longhorn treats it as one that is being rebuilt.
    pub has_left: bool,
    /// The error that Longhorn last found.
    pub error: String,
}

/// A layer as an inspection finds it on the disk.
#[derive(Clone, Debug, Serialize)]
pub struct InspectedLayer {
    /// The name of the layer's file.
    pub image: String,
    /// The snapshot's name; the head has none.
    pub snapshot: Option<String>,
    /// The file below it.
    pub parent: Option<String>,
    /// True if the layer is the head, or the head builds on it.
    pub in_chain: bool,
    /// The apparent size of the file in bytes.
    pub size_bytes: u64,
    /// The allocated bytes on the disk.
    pub allocated_bytes: u64,
    /// True if a user took it.
    pub user_created: bool,
    /// True if it is marked as removed.
    pub removed: bool,
    /// The time of creation, RFC 3339.
    pub created: String,
    /// Read from the document of the image; empty if it has none.
    pub labels: BTreeMap<String, String>,
}

/// The status of the state that a directory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SavedStatus {
    /// The directory has no state.
    None,
    /// The state belongs to the volume as it is.
    Current,
    /// Another program may have changed the volume since.
    Outdated,
    /// The file of the state is damaged.
    Damaged,
}

impl fmt::Display for SavedStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SavedStatus::None => "none",
            SavedStatus::Current => "current",
            SavedStatus::Outdated => "outdated",
            SavedStatus::Damaged => "damaged",
        })
    }
}

fn number_or_zero<S: Serializer>(number: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(number.unwrap_or(0))
}

/// The state that Shorthorn keeps beside the volume.
#[derive(Clone, Debug, Serialize)]
pub struct OwnState {
    /// Current, unless the state is missing, outdated or damaged.
    pub status: SavedStatus,
    /// The length of the saved state.
    pub length_bytes: usize,
    /// The epoch, which rises whenever another program may have changed the volume; none if Shorthorn never
    /// had it.
    // The text has 0 for none.
    #[serde(serialize_with = "number_or_zero")]
    pub epoch: Option<u64>,
    /// The evidence that another program may have had the directory.
    pub foreign: Option<String>,
    /// True if unflushed writes may be lost, because the host was restarted or the disk has failed. The next
    /// open would find the same.
    pub lost_cache: bool,
    /// The saved state; empty if it is damaged.
    #[serde(skip)]
    pub saved: SavedState,
}

/// A problem of the directory.
#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// Decides if the directory can be opened.
    pub severity: Severity,
    /// The problem, its place, and the remedy.
    pub message: String,
}

/// The severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The directory is not usable.
    Error,
    /// The next open repairs it.
    Repair,
    /// Good to know.
    Note,
}

/// Looks at a replica directory. Works on damaged ones, and beside a process that has it open.
///
/// # Errors
/// Only if the directory itself cannot be read; all else is in [`DirectoryInspection::problems`].
pub fn inspect(path: impl AsRef<Path>) -> Result<DirectoryInspection, StoreError> {
    let directory = Directory::open(path.as_ref())?;
    let mut problems = Vec::new();
    let in_use_by = match Lock::shared(&directory) {
        Ok(_) => None,
        Err(StoreError::Locked { holder, .. }) => holder,
        Err(error) => return Err(error),
    };
    let facts = collect(&directory)?;
    let volume = facts.volume_meta.as_deref().and_then(|bytes| VolumeMeta::parse(bytes).ok());
    let found = EpochRecord::load(&directory)?;
    let known_sizes =
        found.as_ref().map(|epoch_record| epoch_record.known_sizes().clone()).unwrap_or_default();
    let checks = Checks { accept_rebuilding: true, known_sizes, ..Checks::default() };
    let recovered = recover(facts.clone(), &checks);
    let (usable, layers) = match &recovered {
        Ok(Recovery { layout, messages, .. }) => {
            problems.extend(messages.iter().map(|message| problem(Severity::Repair, future(message))));
            (true, layers_of(layout))
        }
        Err(error) => {
            problems.push(problem(Severity::Error, error.to_string()));
            (false, layers_found(&facts))
        }
    };
    let own_state = own_state(&directory, found, volume.as_ref(), &mut problems)?;
    if let Some(volume) = &volume {
        problems.extend(problems_of(volume, in_use_by));
    }
    let mut inspection = DirectoryInspection {
        directory: directory.path().display().to_string(),
        usable,
        volume: volume.map(inspected_volume),
        layers,
        own_state,
        in_use_by,
        problems,
    };
    for layer in &mut inspection.layers {
        layer.allocated_bytes = directory.stat(&layer.image)?.map_or(0, |stat| stat.allocated_bytes);
    }
    Ok(inspection)
}

/// Puts the text of a repair into the future tense: an open would do it, and nothing has been done yet.
fn future(message: &str) -> String {
    format!("the next open repairs this: {message}")
}

fn problem(severity: Severity, message: impl Into<String>) -> Problem {
    Problem { severity, message: message.into() }
}

fn problems_of(volume: &VolumeMeta, in_use_by: Option<u32>) -> Vec<Problem> {
    let mut problems = Vec::new();
    if volume.dirty && in_use_by.is_none() {
        let message = "the replica was not closed cleanly; the last writes may differ from other replicas";
        problems.push(problem(Severity::Note, message));
    }
    if volume.is_rebuilding() {
        problems.push(problem(Severity::Note, "the replica was being rebuilt and lacks data"));
    }
    if volume.has_left() {
        let message = "the replica has left the view of its volume and may lack data; Longhorn takes it as \
                       one that is being rebuilt";
        problems.push(problem(Severity::Note, message));
    }
    if !volume.error.is_empty() {
        problems.push(problem(Severity::Note, format!("volume.meta reports an error: {}", volume.error)));
    }
    problems
}

fn inspected_volume(volume: VolumeMeta) -> InspectedVolume {
    InspectedVolume {
        size_bytes: volume.size,
        rebuilding: volume.is_rebuilding(),
        has_left: volume.has_left(),
        head: volume.head,
        dirty: volume.dirty,
        error: volume.error,
    }
}

fn own_state(
    directory: &Directory,
    found: Option<EpochRecord>,
    volume: Option<&VolumeMeta>,
    problems: &mut Vec<Problem>,
) -> Result<OwnState, StoreError> {
    let was_ours = found.is_some();
    let epoch = found.as_ref().map(EpochRecord::epoch);
    let foreign = match EpochRecord::judge(directory, found) {
        Ok((_, Provenance::Foreign { why })) if was_ours => Some(why),
        Err(error) if was_ours => Some(error.to_string()),
        _ => None,
    };
    let trusted = epoch.filter(|_| foreign.is_none());
    let (status, saved) = match state::load(directory, trusted) {
        Ok(saved @ SavedState::None) => (SavedStatus::None, saved),
        Ok(saved @ SavedState::Current(_)) => (SavedStatus::Current, saved),
        Ok(saved @ SavedState::Outdated(_)) => (SavedStatus::Outdated, saved),
        Err(error @ StoreError::StateDamaged { .. }) => {
            problems.push(problem(Severity::Error, error.to_string()));
            (SavedStatus::Damaged, SavedState::None)
        }
        Err(error) => return Err(error),
    };
    let length_bytes = saved.bytes().map_or(0, <[u8]>::len);
    let lost_cache = match volume {
        Some(volume) => lost_cache(directory, volume, trusted, problems)?,
        None => false,
    };
    if lost_cache {
        problems.push(problem(
            Severity::Note,
            "the host was restarted while the replica was open, or its \
         disk failed: unflushed writes may be gone",
        ));
    }
    Ok(OwnState { status, length_bytes, epoch, foreign, lost_cache, saved })
}

/// Returns true if data may be lost from the page cache, by a restart of the host or a failure of the disk.
/// No data is lost if no region was written since the last complete flush.
fn lost_cache(
    directory: &Directory,
    volume: &VolumeMeta,
    trusted: Option<u64>,
    problems: &mut Vec<Problem>,
) -> Result<bool, StoreError> {
    let (boot, damage) = Boot::judge(directory, volume.dirty, None)?;
    problems.extend(damage.map(|damage| problem(Severity::Repair, damage)));
    if !boot.lost_cache() {
        return Ok(false);
    }
    let regions = Regions::of(u64::try_from(volume.size).unwrap_or(0));
    let intent = regions::written_lately(directory, regions, trusted)?;
    Ok(intent.is_none_or(|intent| !intent.is_empty()))
}

fn layers_of(layout: &Layout) -> Vec<InspectedLayer> {
    let side = layout.disks().keys().filter(|image| !layout.chain().contains(image));
    let layers = layout.chain().iter().chain(side).filter_map(|image| {
        let disk = layout.disks().get(image)?;
        Some(layer(image, &disk.meta, disk.size_bytes, layout.chain().contains(image)))
    });
    layers.collect()
}

/// Returns the known facts about the layers of a directory without a valid layout.
fn layers_found(facts: &DirectoryFacts) -> Vec<InspectedLayer> {
    let layers = facts.images.iter().map(|(image, found)| {
        let meta =
            facts.metas.get(image).and_then(|meta| DiskMeta::parse(&image.meta_name(), &meta.bytes).ok());
        layer(image, &meta.unwrap_or_default(), found.size_bytes, false)
    });
    layers.collect()
}

fn layer(image: &ImageName, meta: &DiskMeta, size_bytes: u64, in_chain: bool) -> InspectedLayer {
    InspectedLayer {
        image: image.to_string(),
        snapshot: image.snapshot_name().map(str::to_owned),
        parent: (!meta.parent.is_empty()).then(|| meta.parent.clone()),
        in_chain,
        size_bytes,
        allocated_bytes: 0,
        user_created: meta.user_created,
        removed: meta.removed,
        created: meta.created.clone(),
        labels: meta.labels.clone().unwrap_or_default(),
    }
}

impl fmt::Display for DirectoryInspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.directory)?;
        if let Some(volume) = &self.volume {
            let size = u64::try_from(volume.size_bytes)
                .map_or_else(|_| "no size".to_owned(), |bytes| HumanBytes(bytes).to_string());
            writeln!(f, "  volume  {size} ({} bytes), {}", volume.size_bytes, self.condition(volume))?;
            writeln!(f, "  head    {}", volume.head)?;
        }
        writeln!(f, "  ours    {}", self.own_state)?;
        if !self.layers.is_empty() {
            writeln!(f, "\n{}", self.layer_table().trim_end())?;
        }
        if !self.problems.is_empty() {
            writeln!(f)?;
        }
        for problem in &self.problems {
            writeln!(f, "{}: {}", problem.severity, problem.message)?;
        }
        Ok(())
    }
}

impl DirectoryInspection {
    fn condition(&self, volume: &InspectedVolume) -> String {
        match (self.in_use_by, volume.dirty) {
            (Some(pid), _) => format!("in use by process {pid}"),
            (None, true) => "not closed cleanly".to_owned(),
            (None, false) => "closed cleanly".to_owned(),
        }
    }

    fn layer_table(&self) -> String {
        let heading = ["LAYER", "KIND", "SIZE", "ALLOCATED", "CREATED", "PARENT", "LABELS"];
        let rows: Vec<Vec<String>> = self.layers.iter().map(row).collect();
        table(&heading, &rows)
    }
}

fn row(layer: &InspectedLayer) -> Vec<String> {
    let plain = |image: &str| {
        ImageName::parse(image)
            .and_then(|name| name.snapshot_name().map(str::to_owned))
            .unwrap_or_else(|| image.to_owned())
    };
    let mut kind = match (&layer.snapshot, layer.user_created) {
        (None, _) => "head",
        (Some(_), true) => "user",
        (Some(_), false) => "system",
    }
    .to_owned();
    if layer.removed {
        kind.push_str(", removed");
    }
    if !layer.in_chain {
        kind.push_str(", side");
    }
    let labels: Vec<String> = layer.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    vec![
        plain(&layer.image),
        kind,
        HumanBytes(layer.size_bytes).to_string(),
        HumanBytes(layer.allocated_bytes).to_string(),
        layer.created.clone(),
        layer.parent.as_deref().map_or_else(|| "-".to_owned(), plain),
        labels.join(","),
    ]
}

impl fmt::Display for OwnState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.epoch, self.status) {
            (None, SavedStatus::None) => write!(f, "nothing: never opened by Shorthorn")?,
            (Some(epoch), SavedStatus::None) => write!(f, "epoch {epoch}, no state saved")?,
            (epoch, status) => {
                let epoch = epoch.unwrap_or(0);
                write!(f, "epoch {epoch}, {} bytes of state, {status}", self.length_bytes)?;
            }
        }
        match &self.foreign {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Repair => "repair",
            Severity::Note => "note",
        })
    }
}
