//! Waits until a volume is in the desired state.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_objects::{NEXT_ATTACH, REPLICAS_STOPPING};
use shorthorn_types::HumanBytes;
use shorthorn_types::status::VolumeState;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::error::{CtlError, is_unreachable};
use super::format::Format;
use super::output::for_programs;
use crate::terminal_text::terminal_text;

/// The wait before a broken stream is opened again.
const RETRY: Duration = Duration::from_millis(200);
/// The interval of queries for the rest of a drain.
const DRAIN_POLL: Duration = Duration::from_millis(500);
/// The longest that such a question may take. The controller answers from memory; the limit is for a
/// connection that has died.
const DRAIN_CALL_LIMIT: Duration = Duration::from_secs(30);
/// The time for which the whole rest of a drain may be held before the wait ends: the controller needs a
/// moment to begin.
pub(super) const HELD_LIMIT: Duration = Duration::from_secs(10);

/// The condition to wait for.
#[derive(Clone, Debug)]
pub(super) enum Goal {
    /// All replicas have a disk.
    Created,
    /// The device is on that node.
    Attached(String),
    /// The volume has no process, except for replicas that cannot be stopped for long.
    Detached,
    /// The volume has that size, and so has its device if it is attached.
    Expanded(u64),
    /// The volume does not exist any more.
    Deleted,
}

enum GoalState {
    Reached,
    NotYet,
    Never(String),
}

impl Goal {
    fn description(&self) -> String {
        match self {
            Goal::Created => "created".to_owned(),
            Goal::Attached(node) => format!("attached to {node}"),
            Goal::Detached => "detached".to_owned(),
            Goal::Expanded(size_bytes) => format!("expanded to {}", HumanBytes(*size_bytes)),
            Goal::Deleted => "deleted".to_owned(),
        }
    }

    fn state(&self, volume: &v1::Volume) -> GoalState {
        let reached = match self {
            Goal::Created => volume.known_state() != Some(VolumeState::Creating),
            Goal::Attached(node) if volume.node != *node => {
                return GoalState::Never(format!("volume {} is no longer wanted on {node}", volume.name));
            }
            Goal::Attached(node) => {
                volume.known_state() == Some(VolumeState::Attached) && volume.current_node == *node
            }
            Goal::Detached if !volume.node.is_empty() => {
                return GoalState::Never(format!("volume {} is wanted on {} now", volume.name, volume.node));
            }
            Goal::Detached => {
                let settled = condition(volume, "Settled").map(|condition| condition.reason.as_str());
                is_detached(volume) && settled != Some(REPLICAS_STOPPING)
            }
            Goal::Expanded(size_bytes) => volume.current_size_bytes >= *size_bytes,
            Goal::Deleted => false,
        };
        if let (Goal::Expanded(_), false) = (self, reached)
            && let Some(condition) = condition(volume, "Expanded")
            && condition.reason == NEXT_ATTACH
        {
            return GoalState::Never(condition.message.clone());
        }
        match trouble(volume, "Scheduled") {
            _ if reached => GoalState::Reached,
            // Only more nodes or disks help, or the deletion of another volume: waiting is of no use.
            Some(message) if matches!(self, Goal::Created) => GoalState::Never(format!(
                "no place for the replicas of volume {}: {message}. The controller creates the volume as \
                 soon as its replicas can be scheduled; shorthornctl volume delete {} cancels that",
                volume.name, volume.name
            )),
            _ => GoalState::NotYet,
        }
    }
}

fn is_detached(volume: &v1::Volume) -> bool {
    matches!(volume.known_state(), Some(VolumeState::Detached | VolumeState::Creating))
}

fn trouble<'a>(volume: &'a v1::Volume, kind: &str) -> Option<&'a str> {
    condition(volume, kind).map(|condition| condition.message.as_str())
}

/// Returns the condition, if it does not hold.
fn condition<'a>(volume: &'a v1::Volume, kind: &str) -> Option<&'a v1::Condition> {
    volume.conditions.iter().find(|condition| condition.r#type == kind && !condition.status)
}

/// Waits until the goal is reached, and returns the volume after that, or nothing once it is gone.
pub(super) async fn wait(
    client: &mut ControllerClient<Channel>,
    server: &str,
    name: &str,
    goal: &Goal,
    limit: Duration,
) -> Result<Option<v1::Volume>, CtlError> {
    let deadline = Instant::now() + limit;
    let progress = ProgressLine::start();
    let mut last = None;
    loop {
        let followed = follow(client, name, goal, &progress, &mut last);
        match timeout_at(deadline, followed).await {
            // Its engine has stopped, so it may be used elsewhere.
            Err(_) if matches!(goal, Goal::Detached) && last.as_ref().is_some_and(is_detached) => {
                return Ok(last);
            }
            Err(_) => return Err(CtlError::Timeout(late(name, goal, limit, last.as_ref()))),
            Ok(Ok(end)) => return Ok(end),
            // A controller that restarts comes back.
            Ok(Err(Broken::Stream(error))) => {
                progress.say(&format!("the controller is unreachable: {}", error.message()));
                if timeout_at(deadline, sleep(RETRY)).await.is_err() {
                    return Err(CtlError::of(&error, server));
                }
            }
            Ok(Err(Broken::Never(message))) => return Err(CtlError::Refused(message)),
            Ok(Err(Broken::Refused(error))) => return Err(CtlError::of(&error, server)),
        }
    }
}

/// The place that is drained.
#[derive(Clone, Debug)]
pub(super) struct Drained {
    pub(super) node: String,
    /// The path of the disk; none for the whole node.
    pub(super) disk: Option<String>,
}

impl Drained {
    /// Makes the request for the rest of the drain.
    pub(super) fn request(&self) -> v1::GetDrainRequest {
        v1::GetDrainRequest { node: self.node.clone(), disk: self.disk.clone().unwrap_or_default() }
    }

    /// Returns the command that ends the drain.
    fn uncordon(&self) -> String {
        match &self.disk {
            None => format!("shorthornctl node uncordon {}", self.node),
            Some(path) => format!("shorthornctl disk uncordon {} {path}", self.node),
        }
    }
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.disk {
            None => write!(f, "node {}", self.node),
            Some(path) => write!(f, "disk {path} of node {}", self.node),
        }
    }
}

/// Waits until a drained node or disk is empty. If the whole rest has been held for a while, only the
/// operator can continue.
pub(super) async fn drained(
    client: &mut ControllerClient<Channel>,
    server: &str,
    place: &Drained,
    limit: Duration,
) -> Result<v1::Drain, CtlError> {
    let deadline = Instant::now() + limit;
    let progress = ProgressLine::start();
    let mut held_since = None;
    loop {
        let mut request = tonic::Request::new(place.request());
        request.set_timeout(DRAIN_CALL_LIMIT);
        let left = match client.get_drain(request).await {
            Ok(drain) => {
                let drain = drain.into_inner();
                if drain.left.is_empty() {
                    return Ok(drain);
                }
                if !drain.eviction_requested {
                    let message = format!("{place} is no longer drained: it was uncordoned");
                    return Err(CtlError::Refused(message));
                }
                let held = drain.left.iter().all(|left| left.held);
                held_since = held.then(|| held_since.unwrap_or_else(Instant::now));
                drain_left(place, &drain.left)
            }
            // A controller that restarts comes back.
            Err(error) if is_unreachable(&error) && Instant::now() < deadline => error.message().to_owned(),
            Err(error) => return Err(CtlError::of(&error, server)),
        };
        progress.say(left.lines().next().unwrap_or_default());
        if held_since.is_some_and(|since| since.elapsed() >= HELD_LIMIT) {
            return Err(CtlError::Refused(format!(
                "{left}\nThe controller continues as soon as possible; {} cancels it",
                place.uncordon()
            )));
        }
        if timeout_at(deadline, sleep(DRAIN_POLL)).await.is_err() {
            return Err(CtlError::Timeout(format!("{left}\nThe controller continues")));
        }
    }
}

enum Broken {
    Stream(Status),
    Never(String),
    Refused(Status),
}

async fn follow(
    client: &mut ControllerClient<Channel>,
    name: &str,
    goal: &Goal,
    progress: &ProgressLine,
    last: &mut Option<v1::Volume>,
) -> Result<Option<v1::Volume>, Broken> {
    let ended = |error: Status| match (error.code(), goal) {
        (Code::NotFound, Goal::Deleted) => Ok(None),
        (Code::Unavailable, _) => Err(Broken::Stream(error)),
        _ if is_unreachable(&error) => Err(Broken::Stream(error)),
        _ => Err(Broken::Refused(error)),
    };
    let request = v1::GetVolumeRequest { name: name.to_owned() };
    let mut stream = match client.watch_volume(request).await {
        Ok(stream) => stream.into_inner(),
        Err(error) => return ended(error),
    };
    loop {
        let volume = match stream.message().await {
            Ok(Some(volume)) => volume,
            Ok(None) => return Err(Broken::Stream(Status::unavailable("the stream ended"))),
            Err(error) => return ended(error),
        };
        match goal.state(&volume) {
            GoalState::Reached => return Ok(Some(volume)),
            GoalState::Never(message) => return Err(Broken::Never(message)),
            GoalState::NotYet => {}
        }
        let what = trouble(&volume, "Settled").or_else(|| trouble(&volume, "Expanded")).unwrap_or_default();
        progress.say(&format!("volume {name} is {}: {what}", volume.shown_state()));
        *last = Some(volume);
    }
}

fn late(name: &str, goal: &Goal, limit: Duration, last: Option<&v1::Volume>) -> String {
    let state = match last {
        Some(volume) => {
            let what = trouble(volume, "Settled").or_else(|| trouble(volume, "Expanded"));
            let what = what.unwrap_or("no reason known");
            format!("the volume is {}: {what}", volume.shown_state())
        }
        None => "the controller has not reported its state".to_owned(),
    };
    format!(
        "volume {name} was not {} within {} s; {state}. The controller continues: see shorthornctl volume \
         inspect {name}",
        goal.description(),
        limit.as_secs_f64()
    )
}

/// A line on standard error about the condition; only on a terminal.
pub(super) struct ProgressLine(ProgressBar);

impl ProgressLine {
    pub(super) fn start() -> ProgressLine {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        ProgressLine(bar)
    }

    pub(super) fn say(&self, text: &str) {
        self.0.set_message(terminal_text(text).into_owned());
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Formats the rest of a drain of a node or disk.
pub(super) fn drain_rest(format: Format, place: &Drained, drain: v1::Drain) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return for_programs(format, &drain);
    }
    if drain.left.is_empty() {
        return Ok(format!("{place} is drained: nothing is left on it"));
    }
    Ok(drain_left(place, &drain.left))
}

/// Returns the same in words.
fn drain_left(place: &Drained, left: &[v1::DrainLeft]) -> String {
    let held = left.iter().filter(|left| left.held).count();
    let mut text = format!("{} left on {place}, {held} of them need an operator:", left.len());
    for left in left {
        let what = if left.replica.is_empty() {
            format!("engine of volume {}", left.volume)
        } else {
            format!("replica {}", left.replica)
        };
        let held = if left.held { " (held)" } else { "" };
        text.push_str(&format!("\n- {what}{held}: {}", left.message));
    }
    text
}
