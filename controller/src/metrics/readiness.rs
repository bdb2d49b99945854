//! Readiness of the controller.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The phase of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadinessPhase {
    /// The controller has not opened its store, or has not requested the lease yet.
    Opening,
    /// Another controller leads, and this one is on standby.
    StandingBy,
    /// The controller leads.
    Leading,
}

/// The state behind `/readyz`.
#[derive(Debug)]
pub struct Readiness(Mutex<ReadinessState>);

#[derive(Debug)]
struct ReadinessState {
    phase: ReadinessPhase,
    /// The error of the store if its last call failed.
    away: Option<String>,
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness(Mutex::new(ReadinessState { phase: ReadinessPhase::Opening, away: None }))
    }
}

impl Readiness {
    fn state(&self) -> MutexGuard<'_, ReadinessState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the controller has reached the phase.
    pub fn reached(&self, phase: ReadinessPhase) {
        *self.state() = ReadinessState { phase, away: None };
    }

    /// Records whether the store, or the API server, has answered.
    pub fn heard(&self, error: Option<String>) {
        self.state().away = error;
    }

    /// Returns true if the last call of the store failed.
    pub fn is_away(&self) -> bool {
        self.state().away.is_some()
    }

    /// Returns true if this controller leads.
    pub fn is_leading(&self) -> bool {
        self.state().phase == ReadinessPhase::Leading
    }

    /// Returns an error unless the controller can work.
    ///
    /// # Errors
    /// The error has the reason.
    pub fn check(&self) -> Result<(), String> {
        let state = self.state();
        match (state.phase, &state.away) {
            (_, Some(error)) => Err(format!("the store does not answer: {error}")),
            (ReadinessPhase::Opening, None) => Err("the store is not open yet".to_owned()),
            (ReadinessPhase::StandingBy | ReadinessPhase::Leading, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_ready_while_the_store_answers() {
        let readiness = Readiness::default();
        assert!(readiness.check().unwrap_err().contains("not open yet"));
        readiness.heard(Some("no route".to_owned()));
        assert!(readiness.check().unwrap_err().contains("no route"));
        readiness.reached(ReadinessPhase::StandingBy);
        assert!(readiness.check().is_ok() && !readiness.is_leading());
        readiness.reached(ReadinessPhase::Leading);
        assert!(readiness.check().is_ok() && readiness.is_leading());
        readiness.heard(Some("gone".to_owned()));
        assert!(readiness.check().unwrap_err().contains("gone"));
        readiness.heard(None);
        assert!(readiness.check().is_ok());
    }
}
