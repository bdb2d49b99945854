//! The parts of the host that iSCSI needs: modules and programs.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use super::channel::FUSE_DEVICE;
use super::tools::judge_tgt;
use crate::host::Host;
use crate::modules::{is_loaded, modprobe};
use crate::wait;

const ISCSI_MODULE: &str = "iscsi_tcp";
const FUSE_MODULE: &str = "fuse";
/// If tgtd prints its version at all, it does so at once.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The programs of iSCSI, with their packages on Debian.
const ISCSI_PROGRAMS: [(&str, &str); 3] = [("tgtd", "tgt"), ("tgtadm", "tgt"), ("iscsiadm", "open-iscsi")];

/// Returns the features of iSCSI on this host, or the reason why it is unusable. If `load` is false, an
/// unloaded module is only searched for.
///
/// # Errors
/// The missing parts, and the remedy.
pub(crate) fn support(load: bool) -> Result<String, String> {
    let host = Host::here();
    let missing: Vec<String> = ISCSI_PROGRAMS
        .iter()
        .filter(|(program, _)| host.find(program).is_none())
        .map(|(program, package)| format!("{program} (package {package})"))
        .collect();
    if !missing.is_empty() {
        return Err(format!("the host has no {}", missing.join(", ")));
    }
    let modules = [(ISCSI_MODULE, is_loaded(ISCSI_MODULE)), (FUSE_MODULE, Path::new(FUSE_DEVICE).exists())];
    for (module, is_there) in modules {
        if !is_there {
            let options: &[&str] = if load { &[] } else { &["--dry-run"] };
            modprobe(module, options).map_err(|missing| missing.to_string())?;
        }
    }
    let tgt = tgt_version(host)?;
    Ok(format!("iSCSI by tgt ({tgt}) and open-iscsi, slower than ublk and NBD"))
}

/// Returns the version of tgt, for people.
fn tgt_version(host: Host) -> Result<String, String> {
    let answer = wait::within(ANSWER_LIMIT, move || {
        host.command("tgtd").arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output()
    });
    let answer = answer.map_err(|error| format!("cannot read the version of tgtd: {error}"))?;
    judge_tgt(&String::from_utf8_lossy(&answer.stdout))
}
