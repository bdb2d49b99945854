//! Facts about the programs of iSCSI on this host: the version of tgt, and the daemon of the initiator.

use std::fs;
use std::path::Path;

/// The first version of tgt whose backing store `rdwr` makes an fdatasync of a flush. Earlier ones call
/// sync_file_range(2), which does not reach the engine (commit 8cab5b51f652 of tgt).
const OLDEST_TGT: [u32; 3] = [1, 0, 18];
/// The socket on which iscsid takes commands, or systemd for it, as /proc/net/unix shows it.
const ISCSID_SOCKET: &str = "@ISCSIADM_ABSTRACT_NAMESPACE";
const ISCSID: &str = "iscsid";

/// The state of iscsid, the daemon that connects the sessions of the initiator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IscsidState {
    /// The daemon runs.
    Runs,
    /// systemd starts the daemon for the first command.
    OnDemand,
    /// The daemon does not run. Sessions get no new connections.
    #[default]
    Dead,
}

/// Looks for iscsid among the processes, and for the socket by which systemd starts it.
#[must_use]
pub fn iscsid() -> IscsidState {
    iscsid_in(Path::new("/proc"))
}

fn iscsid_in(proc: &Path) -> IscsidState {
    let processes = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut names = processes.filter_map(|process| fs::read_to_string(process.path().join("comm")).ok());
    if names.any(|name| name.trim_end() == ISCSID) {
        return IscsidState::Runs;
    }
    // Process 1 is in the network namespace of the host.
    let sockets = fs::read_to_string(proc.join("1/net/unix")).unwrap_or_default();
    let listens = sockets.lines().any(|line| line.split_whitespace().last() == Some(ISCSID_SOCKET));
    if listens { IscsidState::OnDemand } else { IscsidState::Dead }
}

/// Returns the part of an error text about a session or iscsiadm that names iscsid.
pub(super) fn hint(state: IscsidState) -> &'static str {
    match state {
        IscsidState::Runs => "; if iscsid does not answer: systemctl restart iscsid",
        IscsidState::OnDemand => "; if systemd does not start iscsid: journalctl -u iscsid",
        IscsidState::Dead => "; iscsid does not run, and connects no session: systemctl restart iscsid",
    }
}

/// Judges the answer of `tgtd --version`: returns the version for people.
///
/// # Errors
/// A flush would not reach the engine.
pub(crate) fn judge_tgt(answer: &str) -> Result<String, String> {
    let is_part = |c: char| c.is_ascii_digit() || c == '.';
    let numbers = |word: &str| {
        let mut parts = word.split('.').map(|part| part.parse::<u32>().ok());
        Some([parts.next()??, parts.next()??, parts.next()??])
    };
    let words = answer.split(|c: char| !is_part(c));
    let Some([major, minor, patch]) = words.filter_map(numbers).next() else {
        return Ok("of a version not known; 1.0.18 or later is needed".to_owned());
    };
    let version = format!("{major}.{minor}.{patch}");
    if [major, minor, patch] < OLDEST_TGT {
        return Err(format!("tgt {version} does not pass a flush on: install 1.0.18 or later"));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tgt_that_loses_flushes_is_refused() {
        for (answer, version) in [("1.0.97\n", "1.0.97"), ("1.0.18", "1.0.18"), ("1:1.0.85-1+b2", "1.0.85")] {
            assert_eq!(judge_tgt(answer).unwrap(), version);
        }
        for old in ["1.0.17", "0.9.11\n", "1.0.4-2"] {
            assert!(judge_tgt(old).unwrap_err().contains("1.0.18 or later"), "{old}");
        }
        for unknown in ["", "v3", "1.0", "unrecognized option"] {
            assert!(judge_tgt(unknown).unwrap().contains("not known"), "{unknown}");
        }
    }

    #[test]
    fn a_dead_daemon_differs_from_one_that_waits_for_work() {
        let proc = tempfile::tempdir().unwrap();
        let at = |path: &str, text: &str| {
            let path = proc.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        at("7/comm", "iscsiadm\n");
        assert_eq!(iscsid_in(proc.path()), IscsidState::Dead);
        at(
            "1/net/unix",
            "Num RefCount\n0: 00000002 00000000 00010000 0001 01 9 @ISCSIADM_ABSTRACT_NAMESPACE\n",
        );
        assert_eq!(iscsid_in(proc.path()), IscsidState::OnDemand);
        at("8/comm", "iscsid\n");
        assert_eq!(iscsid_in(proc.path()), IscsidState::Runs);
        assert!(hint(IscsidState::Dead).contains("systemctl restart iscsid"));
    }
}
