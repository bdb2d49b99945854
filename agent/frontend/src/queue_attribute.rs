//! Attributes of a block device's queue in sysfs, of a device that this process serves.
//!
//! **This process neither writes nor reads them.** The kernel may make the writer of such an attribute wait
//! until every request of the device is answered. It may make the reader of another one wait until that has
//! ended (`queue_attr_store` and `queue_attr_show` in block/blk-sysfs.c, Linux 6.11 and later). Neither can
//! be killed meanwhile. If the waiting thread has to answer these requests, it waits for ever. A process with
//! such a thread keeps its device until the host is restarted. A child process waits instead.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

/// Reads the attribute in `$0`, and writes `$2` if it is `$1` or more.
const LOWER: &str = r#"read -r now <"$0" && { [ "$now" -lt "$1" ] || echo "$2" >"$0"; }"#;

/// Lowers `attribute` of the disk `kernel_name` to `value` if it is larger, and returns at once. If that
/// fails, the log has the `consequence`.
pub(crate) fn lower(kernel_name: &str, attribute: &str, value: u32, consequence: &'static str) {
    lower_from(kernel_name, attribute, value.saturating_add(1), value, consequence);
}

/// Sets the attribute to `value`, from any value.
pub(crate) fn set(kernel_name: &str, attribute: &str, value: u32, consequence: &'static str) {
    lower_from(kernel_name, attribute, 0, value, consequence);
}

/// Lowers like [`lower`] if the value is `from` or more.
pub(crate) fn lower_from(
    kernel_name: &str,
    attribute: &str,
    from: u32,
    value: u32,
    consequence: &'static str,
) {
    let path = Path::new("/sys/block").join(kernel_name).join("queue").join(attribute);
    let work = move || {
        if let Err(error) = lower_in(&path, from, value) {
            tracing::warn!(path = %path.display(), value, error, "cannot be set: {consequence}");
        }
    };
    if let Err(error) = thread::Builder::new().name("attribute".into()).spawn(work) {
        tracing::warn!(%error, attribute, "cannot start a thread to set an attribute: {consequence}");
    }
}

fn lower_in(path: &Path, from: u32, value: u32) -> Result<(), String> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", LOWER]).arg(path).args([from.to_string(), value.to_string()]).stdin(Stdio::null());
    let output = shell.output().map_err(|error| format!("/bin/sh: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn attributes_over_the_limit_are_lowered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("an attribute");
        for (before, after) in
            [("30000\n", "1000\n"), ("5000\n", "1000\n"), ("4999\n", "4999\n"), ("999\n", "999\n")]
        {
            fs::write(&path, before).unwrap();
            lower_in(&path, 5000, 1000).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        }
    }

    #[test]
    fn a_limit_of_zero_sets_the_attribute_in_any_case() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("an attribute");
        fs::write(&path, "128\n").unwrap();
        lower_in(&path, 0, 1024).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1024\n");
    }

    #[test]
    fn an_error_names_the_attribute() {
        let dir = tempfile::tempdir().unwrap();
        let error = lower_in(&dir.path().join("missing"), 2, 1).unwrap_err();
        assert!(error.contains("missing"), "{error}");
    }
}
