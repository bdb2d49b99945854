//! Paths in the configuration and in requests.

use std::path::PathBuf;

/// Returns an absolute path without `.` and `..`, so that a name appended to it stays inside.
pub fn absolute(path: PathBuf) -> Result<PathBuf, String> {
    use std::path::Component::{Normal, RootDir};
    if path.is_absolute() && path.components().all(|part| matches!(part, Normal(_) | RootDir)) {
        return Ok(path);
    }
    Err(format!("{:?} is not an absolute path without \"..\"", path.display().to_string()))
}
