//! The guest's serial console, as QEMU writes it to a file.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::cache;

const TAIL_LINES: usize = 15;

/// The number of logs of failed VMs that are kept.
const KEPT_LOGS: usize = 50;

/// A console log. It is removed with this value, unless something failed.
#[derive(Debug)]
pub struct ConsoleLog {
    path: PathBuf,
    failed: AtomicBool,
}

impl ConsoleLog {
    /// Returns a log in the cache folder; `name` must be unique on this machine.
    pub fn create(name: &str) -> Result<Self> {
        let parent = cache::root()?.join("logs");
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        remove_oldest(&parent)?;
        let path = parent.join(format!("{name}.log"));
        fs::write(&path, "").with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path, failed: AtomicBool::new(false) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the log, and returns its name and last lines for an error message.
    pub fn failure(&self) -> String {
        self.failed.store(true, Ordering::Relaxed);
        let bytes = fs::read(&self.path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let mut tail = format!("console log {}:", self.path.display());
        for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
            // Writing to a String cannot fail.
            let _ = write!(tail, "\n    {}", line.trim_end());
        }
        tail
    }
}

impl Drop for ConsoleLog {
    fn drop(&mut self) {
        if !self.failed.load(Ordering::Relaxed) && !thread::panicking() {
            // Logs that stay behind are removed when there are too many.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn remove_oldest(parent: &Path) -> Result<()> {
    let entries = fs::read_dir(parent).with_context(|| format!("cannot read {}", parent.display()))?;
    let mut logs: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    logs.sort();
    let surplus = logs.len().saturating_sub(KEPT_LOGS);
    for (_, path) in logs.into_iter().take(surplus) {
        // Another process may be quicker.
        let _ = fs::remove_file(path);
    }
    Ok(())
}
