//! The life of a supervised process, as a state machine without a clock, a process or a thread.
//!
//! The caller reports events with their time, and carries out the returned actions. `run` does so on its main
//! thread, and `serve` in a task for each instance.

use std::time::{Duration, Instant};

use shorthorn_control::ProcessCommand;

use crate::supervision::RestartBackoff;
use crate::supervision::start_limit::StartLimit;

/// The time limit for a process to end after SIGKILL. The kernel may have to give up its I/O first.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// The time limits for a process to end.
#[derive(Clone, Copy, Debug)]
pub struct EndLimits {
    /// The time between an accepted request and SIGTERM; none if SIGTERM does not follow a request.
    pub orderly: Option<Duration>,
    /// The time between SIGTERM and SIGKILL, or between the request and SIGKILL without SIGTERM.
    pub stop: Duration,
}

/// The purpose of an end that the supervisor causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The process is not wanted any longer.
    Stop,
    /// A new process takes its place.
    Handover,
}

impl EndReason {
    /// Returns the command for the control socket.
    pub fn command(self) -> ProcessCommand {
        match self {
            EndReason::Stop => ProcessCommand::Stop,
            EndReason::Handover => ProcessCommand::Handover,
        }
    }
}

/// An event in the life of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleEvent {
    /// The first process is wanted now.
    Start,
    /// The process ended, or could not be started.
    Ended {
        /// True if the process ended on the request of another program, and not by a failure.
        cleanly: bool,
    },
    /// The process is to stop for good. A repetition means that the caller does not want to wait.
    Stop,
    /// A new process is to take the place of this one.
    Handover,
    /// The control socket was asked to end the process.
    Answered {
        /// True if the process took the request.
        accepted: bool,
    },
    /// Time has passed, perhaps until the deadline.
    Tick,
}

/// The next action of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleAction {
    /// Wait for the next event, and for the deadline if there is one.
    Wait,
    /// Start a process, or find the running one. A failure is reported as an end.
    Start,
    /// Start a process in place of one that has handed over.
    Replace,
    /// Wait for this time before the next start, because the process ended without a request of the caller.
    Pause(Duration),
    /// Send a request to the control socket, and report the answer.
    Request(EndReason),
    /// Send SIGTERM.
    Terminate,
    /// Send SIGKILL.
    Kill,
    /// Return: the process has stopped, and is not started again.
    Finish,
    /// Return an error: the process outlives SIGKILL.
    GiveUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LifecycleState {
    /// The first process is not wanted yet.
    Idle,
    Running {
        since: Instant,
    },
    /// The process ended, and the next one is started later.
    Pausing {
        until: Instant,
    },
    Ending {
        reason: EndReason,
        means: Means,
        /// The deadline of these means; none while the answer to a request is not known.
        until: Option<Instant>,
    },
    Stopped,
    OutlivesKill,
}

/// The last means of ending a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Means {
    Request,
    Terminate,
    Kill,
}

/// The life of a process that is restarted when it ends, until it is stopped.
#[derive(Debug)]
pub struct Lifecycle {
    limits: EndLimits,
    takes_requests: bool,
    backoff: RestartBackoff,
    start_limit: StartLimit,
    state: LifecycleState,
}

impl Lifecycle {
    /// Creates a life before the first start. A process that does not take requests ends by SIGTERM.
    pub fn new(limits: EndLimits, takes_requests: bool) -> Lifecycle {
        Lifecycle {
            limits,
            takes_requests,
            backoff: RestartBackoff::default(),
            start_limit: StartLimit::default(),
            state: LifecycleState::Idle,
        }
    }

    /// Takes an event at the time `now`, and returns the next action.
    pub fn handle(&mut self, event: LifecycleEvent, now: Instant) -> LifecycleAction {
        match (self.state, event) {
            (LifecycleState::Stopped, _) => LifecycleAction::Finish,
            (_, LifecycleEvent::Tick) => self.tick(now),
            (LifecycleState::Idle, LifecycleEvent::Start)
            | (LifecycleState::Pausing { .. }, LifecycleEvent::Start | LifecycleEvent::Handover) => {
                self.start_on_request(LifecycleAction::Start, now)
            }
            (LifecycleState::Idle | LifecycleState::Pausing { .. }, LifecycleEvent::Stop)
            | (LifecycleState::OutlivesKill, LifecycleEvent::Ended { .. }) => self.finish(),
            (LifecycleState::Running { since }, LifecycleEvent::Ended { cleanly }) => {
                let wait = self.backoff.ended(cleanly, now.saturating_duration_since(since));
                let wait = self.start_limit.wait(wait, now);
                self.state = LifecycleState::Pausing { until: now + wait };
                LifecycleAction::Pause(wait)
            }
            (LifecycleState::Running { .. }, LifecycleEvent::Stop) => self.end(EndReason::Stop, now),
            (LifecycleState::Running { .. }, LifecycleEvent::Handover) => self.end(EndReason::Handover, now),
            (
                LifecycleState::Ending { reason, until: None, .. },
                LifecycleEvent::Answered { accepted: true },
            ) => {
                let limit = self.limits.orderly.unwrap_or(self.limits.stop);
                self.end_by(Means::Request, reason, Some(now + limit), LifecycleAction::Wait)
            }
            (
                LifecycleState::Ending { reason, until: None, .. },
                LifecycleEvent::Answered { accepted: false },
            ) => self.terminate(reason, now),
            (LifecycleState::Ending { reason: EndReason::Stop, .. }, LifecycleEvent::Ended { .. }) => {
                self.finish()
            }
            (LifecycleState::Ending { .. }, LifecycleEvent::Ended { .. }) => {
                self.start_on_request(LifecycleAction::Replace, now)
            }
            (LifecycleState::Ending { reason: EndReason::Stop, .. }, LifecycleEvent::Stop) => {
                self.kill(EndReason::Stop, now)
            }
            // The process ends already. Now no other one follows it.
            (LifecycleState::Ending { means, until, .. }, LifecycleEvent::Stop) => {
                self.end_by(means, EndReason::Stop, until, LifecycleAction::Wait)
            }
            (LifecycleState::OutlivesKill, _) => LifecycleAction::GiveUp,
            _ => LifecycleAction::Wait,
        }
    }

    /// Returns the time of the next action without another event.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            LifecycleState::Pausing { until } => Some(until),
            LifecycleState::Ending { until, .. } => until,
            _ => None,
        }
    }

    /// Returns true before the first start.
    pub fn is_idle(&self) -> bool {
        self.state == LifecycleState::Idle
    }

    /// Returns true from the request to stop or to hand over until the end of the process.
    pub fn is_ending(&self) -> bool {
        matches!(self.state, LifecycleState::Ending { .. })
    }

    /// Returns true from the request to stop until the end of the process.
    pub fn is_stopping(&self) -> bool {
        matches!(self.state, LifecycleState::Ending { reason: EndReason::Stop, .. })
    }

    /// Returns the number of failures in a row.
    pub fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    fn tick(&mut self, now: Instant) -> LifecycleAction {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return LifecycleAction::Wait;
        }
        match self.state {
            LifecycleState::Pausing { .. } => self.start(LifecycleAction::Start, now),
            LifecycleState::Ending { reason, means: Means::Request, .. } if self.limits.orderly.is_some() => {
                self.terminate(reason, now)
            }
            LifecycleState::Ending { means: Means::Kill, .. } => {
                self.state = LifecycleState::OutlivesKill;
                LifecycleAction::GiveUp
            }
            LifecycleState::Ending { reason, .. } => self.kill(reason, now),
            LifecycleState::Idle
            | LifecycleState::Running { .. }
            | LifecycleState::Stopped
            | LifecycleState::OutlivesKill => LifecycleAction::Wait,
        }
    }

    /// Starts a process that the caller has requested. The count of starts begins again, as with systemd: the
    /// agent resets the count of a unit that it starts or restarts.
    fn start_on_request(&mut self, action: LifecycleAction, now: Instant) -> LifecycleAction {
        self.start_limit.reset();
        self.start(action, now)
    }

    fn start(&mut self, action: LifecycleAction, now: Instant) -> LifecycleAction {
        self.start_limit.count(now);
        self.state = LifecycleState::Running { since: now };
        action
    }

    fn finish(&mut self) -> LifecycleAction {
        self.state = LifecycleState::Stopped;
        LifecycleAction::Finish
    }

    fn end(&mut self, reason: EndReason, now: Instant) -> LifecycleAction {
        match self.takes_requests {
            true => self.end_by(Means::Request, reason, None, LifecycleAction::Request(reason)),
            false => self.terminate(reason, now),
        }
    }

    fn terminate(&mut self, reason: EndReason, now: Instant) -> LifecycleAction {
        let until = Some(now + self.limits.stop);
        self.end_by(Means::Terminate, reason, until, LifecycleAction::Terminate)
    }

    fn kill(&mut self, reason: EndReason, now: Instant) -> LifecycleAction {
        self.end_by(Means::Kill, reason, Some(now + KILL_LIMIT), LifecycleAction::Kill)
    }

    fn end_by(
        &mut self,
        means: Means,
        reason: EndReason,
        until: Option<Instant>,
        action: LifecycleAction,
    ) -> LifecycleAction {
        self.state = LifecycleState::Ending { reason, means, until };
        action
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::LifecycleAction as Action;
    use super::LifecycleEvent as Event;
    use super::*;
    use crate::supervision::start_limit::{AFTER_START_LIMIT, START_LIMIT_BURST};

    const ORDERLY_LIMIT: Duration = Duration::from_secs(45);
    const STOP_LIMIT: Duration = Duration::from_secs(40);
    const LIMITS: EndLimits = EndLimits { orderly: Some(ORDERLY_LIMIT), stop: STOP_LIMIT };
    const WITHOUT_SIGTERM: EndLimits = EndLimits { orderly: None, stop: STOP_LIMIT };
    const FAILED: Event = Event::Ended { cleanly: false };
    const LEFT_TO_NEXT: Event = Event::Ended { cleanly: true };

    /// A life with its clock.
    struct Timeline {
        life: Lifecycle,
        now: Instant,
    }

    impl Timeline {
        fn new(limits: EndLimits, takes_requests: bool) -> Timeline {
            Timeline { life: Lifecycle::new(limits, takes_requests), now: Instant::now() }
        }

        fn started(limits: EndLimits, takes_requests: bool) -> Timeline {
            let mut timeline = Timeline::new(limits, takes_requests);
            assert_eq!(timeline.on(Event::Start), Action::Start);
            timeline
        }

        fn on(&mut self, event: Event) -> Action {
            self.life.handle(event, self.now)
        }

        /// Lets time pass until the deadline, and returns that time and the action.
        fn at_deadline(&mut self) -> (Duration, Action) {
            let wait = self.life.deadline().expect("a deadline").saturating_duration_since(self.now);
            if let Some(earlier) = wait.checked_sub(Duration::from_millis(1)) {
                assert_eq!(self.life.handle(Event::Tick, self.now + earlier), Action::Wait);
            }
            self.now += wait;
            (wait, self.on(Event::Tick))
        }
    }

    fn millis(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    #[test]
    fn a_process_that_fails_is_started_again_after_growing_waits() {
        let mut timeline = Timeline::started(LIMITS, true);
        for wait in [100, 200, 400].map(millis) {
            assert_eq!(timeline.on(FAILED), Action::Pause(wait));
            assert_eq!(timeline.at_deadline(), (wait, Action::Start));
        }
        timeline.now += Duration::from_secs(10);
        assert_eq!(timeline.on(FAILED), Action::Pause(millis(100)), "the process was stable");
    }

    #[test]
    fn a_process_that_leaves_its_work_to_the_next_one_is_replaced_at_once() {
        let mut timeline = Timeline::started(LIMITS, true);
        timeline.now += millis(100);
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(Duration::ZERO));
        assert_eq!(timeline.at_deadline(), (Duration::ZERO, Action::Start));
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(millis(100)), "an end at the start is a failure");
    }

    #[test]
    fn a_process_that_always_ends_cleanly_is_started_no_more_often_than_its_unit() {
        let mut timeline = Timeline::started(LIMITS, true);
        for _ in 1..START_LIMIT_BURST {
            timeline.now += millis(100);
            assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(Duration::ZERO));
            assert_eq!(timeline.at_deadline(), (Duration::ZERO, Action::Start));
        }
        timeline.now += millis(100);
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(AFTER_START_LIMIT));
        assert_eq!(timeline.at_deadline(), (AFTER_START_LIMIT, Action::Start));
        timeline.now += millis(100);
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(Duration::ZERO), "the count begins again");
    }

    #[test]
    fn requested_starts_do_not_reach_the_limit() {
        let mut timeline = Timeline::started(LIMITS, true);
        for _ in 0..=START_LIMIT_BURST {
            assert_eq!(timeline.on(Event::Handover), Action::Request(EndReason::Handover));
            assert_eq!(timeline.on(Event::Answered { accepted: true }), Action::Wait);
            assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Replace);
        }
        timeline.now += millis(100);
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Pause(Duration::ZERO));
    }

    #[test]
    fn a_request_to_hand_over_ends_the_wait_before_a_start() {
        let mut timeline = Timeline::started(LIMITS, true);
        assert_eq!(timeline.on(FAILED), Action::Pause(millis(100)));
        assert_eq!(timeline.on(Event::Handover), Action::Start);
        assert_eq!(timeline.on(FAILED), Action::Pause(millis(200)), "the failures still count");
    }

    #[test]
    fn an_engine_is_requested_to_stop_then_terminated_then_killed() {
        let mut timeline = Timeline::started(LIMITS, true);
        assert_eq!(timeline.on(Event::Stop), Action::Request(EndReason::Stop));
        assert_eq!(timeline.life.deadline(), None, "the answer is not known");
        assert_eq!(timeline.on(Event::Answered { accepted: true }), Action::Wait);
        assert_eq!(timeline.at_deadline(), (ORDERLY_LIMIT, Action::Terminate));
        assert_eq!(timeline.at_deadline(), (STOP_LIMIT, Action::Kill));
        assert_eq!(timeline.at_deadline(), (KILL_LIMIT, Action::GiveUp));
        assert_eq!(timeline.on(FAILED), Action::Finish);
    }

    #[test]
    fn an_accepted_request_without_sigterm_is_followed_by_sigkill() {
        let mut timeline = Timeline::started(WITHOUT_SIGTERM, true);
        assert_eq!(timeline.on(Event::Stop), Action::Request(EndReason::Stop));
        assert_eq!(timeline.on(Event::Answered { accepted: true }), Action::Wait);
        assert_eq!(timeline.at_deadline(), (STOP_LIMIT, Action::Kill));
    }

    #[test]
    fn a_process_without_a_control_socket_gets_sigterm_at_once() {
        let mut refusing = Timeline::started(WITHOUT_SIGTERM, true);
        assert_eq!(refusing.on(Event::Stop), Action::Request(EndReason::Stop));
        assert_eq!(refusing.on(Event::Answered { accepted: false }), Action::Terminate);
        let mut replica = Timeline::started(LIMITS, false);
        assert_eq!(replica.on(Event::Stop), Action::Terminate);
        for mut timeline in [refusing, replica] {
            assert_eq!(timeline.at_deadline(), (STOP_LIMIT, Action::Kill));
            assert_eq!(timeline.on(FAILED), Action::Finish);
        }
    }

    #[test]
    fn a_repeated_stop_kills() {
        let mut timeline = Timeline::started(LIMITS, false);
        assert_eq!(timeline.on(Event::Stop), Action::Terminate);
        for _ in 0..2 {
            timeline.now += millis(1);
            assert_eq!(timeline.on(Event::Stop), Action::Kill);
        }
        assert_eq!(timeline.at_deadline(), (KILL_LIMIT, Action::GiveUp));
    }

    #[test]
    fn a_hand_over_starts_the_next_process_at_once_and_counts_as_no_failure() {
        let mut timeline = Timeline::started(LIMITS, true);
        assert_eq!(timeline.on(Event::Handover), Action::Request(EndReason::Handover));
        assert_eq!(timeline.on(Event::Answered { accepted: true }), Action::Wait);
        assert_eq!(timeline.on(FAILED), Action::Replace);
        assert_eq!(timeline.on(FAILED), Action::Pause(millis(100)));
    }

    #[test]
    fn a_hand_over_that_does_not_end_kills_and_replaces_the_process() {
        let mut timeline = Timeline::started(LIMITS, true);
        assert_eq!(timeline.on(Event::Handover), Action::Request(EndReason::Handover));
        assert_eq!(timeline.on(Event::Answered { accepted: false }), Action::Terminate);
        assert_eq!(timeline.at_deadline(), (STOP_LIMIT, Action::Kill));
        assert_eq!(timeline.on(FAILED), Action::Replace);
    }

    #[test]
    fn a_stop_during_a_hand_over_keeps_its_limits_and_starts_no_process() {
        let mut timeline = Timeline::started(LIMITS, true);
        assert_eq!(timeline.on(Event::Handover), Action::Request(EndReason::Handover));
        assert_eq!(timeline.on(Event::Answered { accepted: true }), Action::Wait);
        timeline.now += millis(1000);
        assert_eq!(timeline.on(Event::Stop), Action::Wait);
        assert!(timeline.life.is_stopping());
        assert_eq!(timeline.at_deadline(), (ORDERLY_LIMIT - millis(1000), Action::Terminate));
        assert_eq!(timeline.on(LEFT_TO_NEXT), Action::Finish);
    }

    #[test]
    fn a_stop_without_a_process_finishes() {
        for mut timeline in [Timeline::new(LIMITS, true), Timeline::started(LIMITS, true)] {
            timeline.on(FAILED);
            assert_eq!(timeline.on(Event::Stop), Action::Finish);
            for later in [Event::Start, Event::Handover, Event::Stop, Event::Tick] {
                assert_eq!(timeline.on(later), Action::Finish);
            }
        }
    }

    /// The caller of a life, with a process that may do anything.
    struct Caller {
        timeline: Timeline,
        lives: bool,
        waits_for_answer: bool,
        is_stopped: bool,
        is_ending: bool,
    }

    impl Caller {
        /// Reports an event if it is possible now, and checks the action.
        fn report(&mut self, event: Event) -> Result<Action, TestCaseError> {
            match event {
                Event::Ended { .. } if !self.lives => return Ok(Action::Wait),
                Event::Answered { .. } if !self.waits_for_answer => return Ok(Action::Wait),
                Event::Ended { .. } => (self.lives, self.is_ending) = (false, false),
                Event::Stop => self.is_stopped = true,
                _ => {}
            }
            self.waits_for_answer &= self.lives && !matches!(event, Event::Answered { .. });
            let action = self.timeline.on(event);
            match action {
                Action::Start | Action::Replace => {
                    prop_assert!(!self.lives, "two processes at once");
                    prop_assert!(!self.is_stopped, "a start after a stop");
                    self.lives = true;
                }
                Action::Pause(_) => prop_assert!(!self.lives && !self.is_stopped),
                Action::Request(_) | Action::Terminate => {
                    prop_assert!(self.lives);
                    self.waits_for_answer = matches!(action, Action::Request(_));
                    self.is_ending = true;
                }
                Action::Kill | Action::GiveUp => prop_assert!(self.lives && self.is_ending),
                Action::Finish => prop_assert!(!self.lives && self.is_stopped),
                Action::Wait => {}
            }
            Ok(action)
        }
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            1 => Just(Event::Stop),
            2 => Just(Event::Start),
            4 => Just(Event::Handover),
            6 => any::<bool>().prop_map(|cleanly| Event::Ended { cleanly }),
            6 => any::<bool>().prop_map(|accepted| Event::Answered { accepted }),
            9 => Just(Event::Tick),
        ]
    }

    proptest! {
        #[test]
        fn a_stop_is_never_followed_by_a_start_and_ends_within_its_limits(
            takes_requests in any::<bool>(),
            orderly in any::<bool>(),
            steps in prop::collection::vec((event(), 0_u64..60_000), 0..40),
        ) {
            let limits = if orderly { LIMITS } else { WITHOUT_SIGTERM };
            let timeline = Timeline::new(limits, takes_requests);
            let (lives, waits_for_answer, is_stopped, is_ending) = Default::default();
            let mut caller = Caller { timeline, lives, waits_for_answer, is_stopped, is_ending };
            for (event, wait_ms) in steps {
                caller.timeline.now += millis(wait_ms);
                if caller.report(event)? == Action::GiveUp {
                    return Ok(());
                }
            }
            let mut action = if caller.is_stopped { Action::Wait } else { caller.report(Event::Stop)? };
            if caller.waits_for_answer {
                action = caller.report(Event::Answered { accepted: true })?;
            }
            let begin = caller.timeline.now;
            while caller.lives && action != Action::GiveUp {
                let deadline = caller.timeline.life.deadline().expect("a process that ends has a deadline");
                caller.timeline.now = caller.timeline.now.max(deadline);
                action = caller.report(Event::Tick)?;
            }
            prop_assert!(caller.timeline.now - begin <= ORDERLY_LIMIT + STOP_LIMIT + KILL_LIMIT);
        }

        #[test]
        fn waits_between_failures_in_a_row_never_shrink_and_stay_below_a_limit(
            uptimes_ms in prop::collection::vec(0_u64..10_000, 1..30),
        ) {
            let mut timeline = Timeline::started(LIMITS, true);
            let mut last = Duration::ZERO;
            for uptime_ms in uptimes_ms {
                timeline.now += millis(uptime_ms);
                timeline.on(FAILED);
                let (wait, action) = timeline.at_deadline();
                prop_assert_eq!(action, Action::Start);
                prop_assert!(wait >= last.max(millis(100)) && wait <= Duration::from_secs(5));
                last = wait;
            }
        }
    }
}
