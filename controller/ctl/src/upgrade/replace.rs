//! Replaces the engine of one volume, and waits until the volume is as healthy as before.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_types::status::{EnginePhase, MemberMode, Robustness};
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::Replaced;
use crate::calls::limited;
use crate::error::{CtlError, is_unreachable};

/// The longest that the agent may take to replace one engine. The controller gives it two minutes.
const UPGRADE_LIMIT: Duration = Duration::from_secs(150);
/// The interval of queries for the state of a volume.
const POLL: Duration = Duration::from_millis(300);
/// The longest pause after a request that got no answer.
const REQUEST_PAUSE_MAX: Duration = Duration::from_secs(10);

/// The state of a volume whose engine is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpgradeState {
    /// The engine runs the former program and serves.
    Former,
    /// The engine runs the former program and does not serve.
    Sick,
    /// The agent has not compared the program of the engine yet.
    NotCompared,
    /// The engine runs the installed program, and the volume is not as healthy as before.
    Recovering,
    /// The engine runs the installed program, and the volume is as healthy as before.
    Done,
    /// The volume was detached or has moved: its next engine is a new process.
    Gone,
}

/// An engine that could not be replaced, or does not serve as well as before.
#[derive(Debug)]
pub(super) struct FailedReplacement {
    /// The engine and the problem.
    pub sentence: String,
    /// True if other engines may have the same problem: the new program, or no controller.
    pub is_general: bool,
}

/// An engine to replace.
pub(super) struct One {
    pub client: ControllerClient<Channel>,
    pub server: String,
    pub volume: String,
    pub node: String,
    pub deadline: Instant,
}

/// The state of the requests to replace an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RequestState {
    /// No request was sent.
    #[default]
    NotSent,
    /// A request was sent, and none was answered.
    Unanswered,
    /// The engine is replaced.
    Answered,
    /// The engine was left alone: another one has replaced it.
    LeftAlone,
}

/// The steps so far.
#[derive(Debug, Default)]
struct ReplaceProgress {
    /// The volume just before the first request.
    before: Option<v1::Volume>,
    request: RequestState,
    /// The number of requests without an answer.
    lost_requests: u32,
    /// The time of the next request; none: at once.
    next_request_at: Option<Instant>,
    pause_ms: Option<u64>,
    /// The last request that got no answer of the agent.
    lost: Option<Status>,
    /// The volume as it was seen last; none if no controller answers.
    state: Option<UpgradeState>,
}

impl One {
    /// Replaces the engine, and waits until its volume is as healthy as before. Returns none if the engine
    /// runs the installed program already, or is gone.
    pub(super) async fn replace(mut self) -> Result<Option<Replaced>, FailedReplacement> {
        let mut progress = ReplaceProgress::default();
        loop {
            let now = self.get_volume().await?;
            progress.see(now.as_ref());
            match progress.state {
                Some(UpgradeState::Done | UpgradeState::Gone) => break,
                // Another command replaces it.
                Some(UpgradeState::Recovering) if progress.request == RequestState::NotSent => break,
                Some(UpgradeState::Former) if progress.may_request(Instant::now()) => {
                    self.request_upgrade(&mut progress).await?;
                }
                _ => {}
            }
            if Instant::now() >= self.deadline {
                return Err(self.late(&progress));
            }
            sleep(POLL).await;
        }
        let is_replaced = matches!(progress.request, RequestState::Unanswered | RequestState::Answered);
        let pause_ms = progress.pause_ms;
        Ok(is_replaced.then(|| Replaced { pause_ms, ..Replaced::new(self.volume, self.node) }))
    }

    /// Returns the volume; none if no controller answers at the moment. A volume that is deleted is detached.
    async fn get_volume(&mut self) -> Result<Option<v1::Volume>, FailedReplacement> {
        match self.client.get_volume(limited(v1::GetVolumeRequest { name: self.volume.clone() })).await {
            Ok(now) => Ok(Some(now.into_inner())),
            Err(status) if status.code() == Code::NotFound => Ok(Some(v1::Volume::default())),
            Err(status) if is_passing(&status, false) => Ok(None),
            Err(status) => Err(self.refused(&status)),
        }
    }

    async fn request_upgrade(&mut self, progress: &mut ReplaceProgress) -> Result<(), FailedReplacement> {
        let message = v1::UpgradeVolumeEngineRequest { name: self.volume.clone(), only_outdated: true };
        let mut request = tonic::Request::new(message);
        request.set_timeout(UPGRADE_LIMIT);
        let was_lost = progress.lost.is_some();
        match self.client.upgrade_volume_engine(request).await {
            Ok(answer) => {
                let v1::UpgradeEngineResponse { pause_ms, already_current, .. } = answer.into_inner();
                // A request before, whose answer was lost, may be the one that was carried out.
                let is_left_alone = already_current && !was_lost;
                progress.request =
                    if is_left_alone { RequestState::LeftAlone } else { RequestState::Answered };
                progress.pause_ms = (!already_current).then_some(pause_ms);
            }
            Err(status) if is_passing(&status, was_lost) => progress.lose(status, Instant::now()),
            Err(status) => return Err(self.refused(&status)),
        }
        Ok(())
    }

    fn refused(&self, status: &Status) -> FailedReplacement {
        self.failure(&CtlError::of(status, &self.server).to_string(), false)
    }

    /// Returns the failure of an engine whose time is over.
    fn late(&self, progress: &ReplaceProgress) -> FailedReplacement {
        let why = format!("shorthornctl volume why {} has the reason", self.volume);
        match (progress.state, &progress.lost) {
            (None, _) => self.failure("not replaced in time: no controller answers", true),
            (Some(UpgradeState::NotCompared), _) if progress.request == RequestState::NotSent => {
                self.failure("not replaced in time: its agent has not compared its program", false)
            }
            (Some(UpgradeState::NotCompared), _) => self
                .failure("the engine is replaced, and its agent has not compared the program in time", false),
            (Some(UpgradeState::Former | UpgradeState::Sick), Some(lost)) if !progress.is_answered() => {
                self.failure(&format!("not replaced in time: {}", lost.message()), false)
            }
            (Some(UpgradeState::Sick), _) => {
                self.failure(&format!("not replaced in time, because it does not serve: {why}"), false)
            }
            (Some(UpgradeState::Former), _) => {
                self.failure("the engine is replaced, and runs another program than the installed one", false)
            }
            _ => {
                let problem = "the new engine did not become as healthy as the former one in time";
                self.failure(&format!("{problem}: {why}"), true)
            }
        }
    }

    fn failure(&self, problem: &str, is_general: bool) -> FailedReplacement {
        let sentence = format!("the engine of volume {} on node {}: {problem}", self.volume, self.node);
        FailedReplacement { sentence, is_general }
    }
}

impl ReplaceProgress {
    fn is_answered(&self) -> bool {
        matches!(self.request, RequestState::Answered | RequestState::LeftAlone)
    }

    /// Returns true if a request may be sent.
    fn may_request(&self, now: Instant) -> bool {
        !self.is_answered() && self.next_request_at.is_none_or(|at| now >= at)
    }

    /// Records a request without an answer. The pause before the next one doubles each time: the agent or the
    /// controller may be starting, with the requests for many engines.
    fn lose(&mut self, status: Status, now: Instant) {
        self.request = RequestState::Unanswered;
        self.lost = Some(status);
        let factor = 2_u32.saturating_pow(self.lost_requests.min(16));
        self.lost_requests = self.lost_requests.saturating_add(1);
        self.next_request_at = Some(now + REQUEST_PAUSE_MAX.min(POLL.saturating_mul(factor)));
    }

    /// Records the volume as it is now. Until the first request, that is the volume before.
    fn see(&mut self, now: Option<&v1::Volume>) {
        self.state = now.map(|now| {
            let is_before = self.request == RequestState::NotSent;
            if is_before && self.before.as_ref().is_none_or(|before| is_same_engine(before, now)) {
                self.before = Some(now.clone());
            }
            self.before.as_ref().map_or(UpgradeState::Gone, |before| upgrade_state(before, now))
        });
    }
}

/// Returns true if the engine of the volume needs to be replaced; none if that is not known.
pub(super) fn needs_upgrade(volume: &v1::Volume) -> Option<bool> {
    volume.engine.as_ref().and_then(|engine| engine.needs_upgrade)
}

/// Returns true if the engine of the volume serves.
pub(super) fn is_serving(volume: &v1::Volume) -> bool {
    volume.engine.as_ref().and_then(v1::Engine::known_phase) == Some(EnginePhase::Serving)
}

/// Returns the number of members of the view.
fn members(volume: &v1::Volume) -> usize {
    let members = volume.replicas.iter().filter_map(v1::Replica::known_member);
    members.filter(|member| member.known_mode() == MemberMode::Member).count()
}

fn is_same_engine(before: &v1::Volume, now: &v1::Volume) -> bool {
    now.attach == before.attach && now.current_node == before.current_node
}

/// Returns the state of the volume that was `before`.
pub(super) fn upgrade_state(before: &v1::Volume, now: &v1::Volume) -> UpgradeState {
    if !is_same_engine(before, now) || now.current_node.is_empty() {
        return UpgradeState::Gone;
    }
    let is_healthy = |volume: &v1::Volume| volume.known_robustness() == Some(Robustness::Healthy);
    let is_whole = is_healthy(now) || (!is_healthy(before) && members(now) >= members(before));
    match (needs_upgrade(now), is_serving(now)) {
        (None, _) => UpgradeState::NotCompared,
        (Some(true), true) => UpgradeState::Former,
        (Some(true), false) => UpgradeState::Sick,
        (Some(false), true) if is_whole => UpgradeState::Done,
        (Some(false), _) => UpgradeState::Recovering,
    }
}

/// Returns true if the call can succeed when it is repeated, as after the death of a controller or an agent.
/// `was_lost`: the answer of an earlier one is not known, so that the engine may be starting.
pub(super) fn is_passing(status: &Status, was_lost: bool) -> bool {
    let is_lost = matches!(
        status.code(),
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::DeadlineExceeded
    );
    is_lost || is_unreachable(status) || (was_lost && status.code() == Code::FailedPrecondition)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(needs_upgrade: Option<bool>, phase: EnginePhase, robustness: Robustness) -> v1::Volume {
        let engine = v1::Engine { needs_upgrade, ..v1::Engine::default() }.with_phase(phase);
        v1::Volume {
            name: "v".to_owned(),
            attach: 3,
            current_node: "n1".to_owned(),
            engine: Some(engine),
            ..v1::Volume::default()
        }
        .with_robustness(robustness)
    }

    #[test]
    fn an_engine_is_done_when_its_volume_is_as_healthy_as_before() {
        use EnginePhase::{Frozen, Serving, Starting};
        use Robustness::{Degraded, Healthy, Unknown};
        let (outdated, current) = (Some(true), Some(false));
        let before = volume(outdated, Serving, Healthy);
        let now = |volume: v1::Volume| upgrade_state(&before, &volume);
        assert_eq!(now(before.clone()), UpgradeState::Former);
        assert_eq!(now(volume(outdated, Frozen, Unknown)), UpgradeState::Sick);
        assert_eq!(now(volume(None, Serving, Healthy)), UpgradeState::NotCompared, "of either program");
        assert_eq!(now(volume(current, Starting, Unknown)), UpgradeState::Recovering);
        assert_eq!(now(volume(current, Serving, Degraded)), UpgradeState::Recovering, "it was healthy");
        assert_eq!(now(volume(current, Serving, Healthy)), UpgradeState::Done);
        assert_eq!(now(v1::Volume { attach: 4, ..before.clone() }), UpgradeState::Gone);
        assert_eq!(now(v1::Volume { current_node: String::new(), ..before.clone() }), UpgradeState::Gone);
        // A volume that lacks a replica needs no more than it had.
        let degraded = volume(outdated, Serving, Degraded);
        assert_eq!(upgrade_state(&degraded, &volume(current, Serving, Degraded)), UpgradeState::Done);
        assert_eq!(upgrade_state(&degraded, &volume(current, Starting, Unknown)), UpgradeState::Recovering);
    }

    #[test]
    fn the_volume_just_before_the_request_is_compared_with() {
        use EnginePhase::Serving;
        use Robustness::{Degraded, Healthy};
        let mut progress = ReplaceProgress::default();
        progress.see(Some(&volume(Some(true), Serving, Healthy)));
        // It loses a replica before its turn.
        progress.see(Some(&volume(Some(true), Serving, Degraded)));
        assert_eq!(progress.state, Some(UpgradeState::Former));
        progress.request = RequestState::Unanswered;
        progress.see(Some(&volume(Some(false), Serving, Degraded)));
        assert_eq!(progress.state, Some(UpgradeState::Done));
        progress.see(None);
        assert_eq!(progress.state, None, "no controller answers");
        progress.see(Some(&v1::Volume::default()));
        assert_eq!(progress.state, Some(UpgradeState::Gone), "it was deleted");
    }

    #[test]
    fn lost_requests_are_repeated_after_longer_and_longer_pauses() {
        let (start, mut progress) = (Instant::now(), ReplaceProgress::default());
        let mut now = start;
        let mut pauses_ms = Vec::new();
        for _ in 0..8 {
            assert!(progress.may_request(now));
            progress.lose(Status::unavailable("gone"), now);
            let next = progress.next_request_at.unwrap();
            assert!(!progress.may_request(next - Duration::from_millis(1)));
            pauses_ms.push((next - now).as_millis());
            now = next;
        }
        assert_eq!(pauses_ms, [300, 600, 1200, 2400, 4800, 9600, 10_000, 10_000]);
        progress.request = RequestState::Answered;
        assert!(!progress.may_request(now));
    }

    #[test]
    fn a_refusal_ends_the_attempt_and_a_lost_agent_or_controller_does_not() {
        for code in [Code::Unavailable, Code::Cancelled, Code::Unknown, Code::Internal] {
            assert!(is_passing(&Status::new(code, "transport error"), false), "{code}");
        }
        let refused = Status::failed_precondition("the engine does not serve");
        assert!(!is_passing(&refused, false));
        assert!(is_passing(&refused, true), "it may be the new engine, which starts");
        assert!(!is_passing(&Status::not_found("no such volume"), true));
    }
}
