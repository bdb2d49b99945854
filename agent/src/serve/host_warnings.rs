//! Problems of this host, for the warnings of the node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::serve::config::Config;

/// The age up to which findings count. The controller asks every half minute, and hosts rarely change.
const FRESH: Duration = Duration::from_mins(10);
/// The time limit for a check. A file system that hangs must not hold up the node's answer.
const CHECK_LIMIT: Duration = Duration::from_secs(5);

/// The findings of the last check.
#[derive(Debug)]
pub struct HostWarnings {
    check: fn(&Config) -> Vec<String>,
    last: Mutex<LastCheck>,
}

#[derive(Debug, Default)]
struct LastCheck {
    found: Option<(Instant, Vec<String>)>,
    /// The check that has not ended yet. At most one runs.
    running: Option<JoinHandle<Vec<String>>>,
}

impl HostWarnings {
    /// Returns the warnings that `check` finds.
    pub fn new(check: fn(&Config) -> Vec<String>) -> HostWarnings {
        HostWarnings { check, last: Mutex::default() }
    }

    /// Returns the findings of `shorthorn-agent check` that only have to be read.
    pub async fn get(&self, config: &Arc<Config>) -> Vec<String> {
        let (check, config) = (self.check, Arc::clone(config));
        self.get_from(move || check(&config), CHECK_LIMIT).await
    }

    async fn get_from(
        &self,
        check: impl FnOnce() -> Vec<String> + Send + 'static,
        limit: Duration,
    ) -> Vec<String> {
        let mut last = self.last.lock().await;
        if let Some((at, warnings)) = &last.found
            && at.elapsed() < FRESH
        {
            return warnings.clone();
        }
        let running = last.running.get_or_insert_with(|| tokio::task::spawn_blocking(check));
        let ended = tokio::time::timeout(limit, running).await;
        if ended.is_ok() {
            last.running = None;
        }
        let warnings = match ended {
            Ok(Ok(warnings)) => warnings,
            Ok(Err(error)) => vec![format!("this host cannot be checked: {error}")],
            Err(_) => vec![format!(
                "this host cannot be checked: no end within {limit:?}; a file system may hang: run \
                 shorthorn-agent check"
            )],
        };
        last.found = Some((Instant::now(), warnings.clone()));
        warnings
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_check_that_hangs_holds_nothing_up() {
        let (release, held) = mpsc::channel::<()>();
        let warnings = HostWarnings::new(|_| Vec::new());
        let check = move || {
            let _ = held.recv();
            Vec::new()
        };
        let found = warnings.get_from(check, Duration::from_millis(20)).await;
        assert!(found[0].contains("no end within 20ms"), "{found:?}");
        let again = warnings.get_from(|| panic!("a second check runs beside it"), CHECK_LIMIT).await;
        assert_eq!(again, found);
        drop(release);
    }
}
