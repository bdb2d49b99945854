//! Probes which frontends work on this host, and chooses one.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::iscsi::{FUSE_DEVICE, Host, judge_tgt};
use crate::ublk::{CONTROL_PATH, REQUIRED_FEATURES};
use crate::{FrontendError, FrontendKind, ublk, wait};

/// The time limit of loading a module, which takes milliseconds unless it hangs.
const MODPROBE_LIMIT: Duration = Duration::from_secs(10);
/// The driver answers at once, or never.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// devtmpfs makes nodes before the module has loaded; udev alone needs a moment.
const NODE_LIMIT: Duration = Duration::from_secs(2);

const UBLK_MODULE: &str = "ublk_drv";
const NBD_MODULE: &str = "nbd";
const ISCSI_MODULE: &str = "iscsi_tcp";
const FUSE_MODULE: &str = "fuse";
/// The programs of iSCSI, with their packages on Debian.
const ISCSI_PROGRAMS: [(&str, &str); 3] = [("tgtd", "tgt"), ("tgtadm", "tgt"), ("iscsiadm", "open-iscsi")];

/// The support of one frontend on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendReport {
    /// The kind of the frontend.
    pub kind: FrontendKind,
    /// True if it does.
    pub usable: bool,
    /// The offered features, or the missing one and the remedy.
    pub reason: String,
}

/// Probes the frontends here, in the order of preference. Loads the module of ublk; if that is of no use
/// that of NBD, and then that of iSCSI.
#[must_use]
pub fn probe() -> Vec<FrontendReport> {
    let ublk = probe_ublk();
    let nbd = probe_nbd(ublk.is_err());
    let iscsi = probe_iscsi(ublk.is_err() && nbd.is_err());
    let socket = Ok("NBD on a Unix socket needs no kernel driver".to_owned());
    let found = [
        (FrontendKind::Ublk, ublk),
        (FrontendKind::Nbd, nbd),
        (FrontendKind::Iscsi, iscsi),
        (FrontendKind::Socket, socket),
    ];
    found
        .into_iter()
        .map(|(kind, found)| {
            let usable = found.is_ok();
            FrontendReport { kind, usable, reason: found.unwrap_or_else(|reason| reason) }
        })
        .collect()
}

/// Chooses the frontend: `wanted`, or else the first usable one that makes a block device.
///
/// # Errors
/// The missing feature of `wanted`, or of each that was tried.
pub fn choose(
    wanted: Option<FrontendKind>,
    reports: &[FrontendReport],
) -> Result<FrontendKind, FrontendError> {
    let Some(kind) = wanted else { return choose_any(reports) };
    match reports.iter().find(|report| report.kind == kind) {
        Some(report) if report.usable => Ok(kind),
        // It needs nothing of the host.
        None if kind == FrontendKind::Socket => Ok(kind),
        Some(report) => Err(FrontendError::Unsupported { frontend: kind, reason: report.reason.clone() }),
        None => Err(FrontendError::Unsupported { frontend: kind, reason: "not probed".into() }),
    }
}

fn choose_any(reports: &[FrontendReport]) -> Result<FrontendKind, FrontendError> {
    let devices = || reports.iter().filter(|report| report.kind != FrontendKind::Socket);
    if let Some(report) = devices().find(|report| report.usable) {
        return Ok(report.kind);
    }
    let reasons: Vec<String> =
        devices().map(|report| format!("{}: {}", report.kind, report.reason)).collect();
    Err(FrontendError::Refused {
        action: "choose a frontend that makes a block device".into(),
        reason: reasons.join("; "),
    })
}

/// Returns the reason why ublk must not be touched on the kernel of this `release` (uname -r), or none.
///
/// Kernels with commit 529d4d632788 and without 011af85ccd87 follow a null pointer on the first ADD_DEV: the
/// caller hangs for good, and a host with panic_on_oops reboots. No trial can find that out.
#[must_use]
pub fn ublk_deny_reason(release: &str) -> Option<String> {
    let fix = if is_stable_oops(release) {
        "use 6.18.6 or later"
    } else if is_ubuntu_oops(release) {
        "use another kernel of the distribution"
    } else {
        return None;
    };
    Some(format!(
        "the kernel {release} crashes when a ublk device is made (fixed by commit 011af85ccd87); {fix}"
    ))
}

/// Returns true for 6.18.4 and 6.18.5 of kernel.org, and the kernels that distributions build of them.
fn is_stable_oops(release: &str) -> bool {
    ["6.18.4", "6.18.5"].iter().any(|bad| {
        release.strip_prefix(bad).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Returns true for Ubuntu's kernels for clouds that may crash, as in `6.17.0-1015-azure`: on Azure builds
/// 1015 to 1018 are known to crash, on AWS no 6.17 is known not to.
fn is_ubuntu_oops(release: &str) -> bool {
    let Some(build) = release.strip_prefix("6.17.0-") else { return false };
    match build.split_once('-') {
        Some((_, "aws")) => true,
        Some((number, "azure")) => number.parse::<u32>().is_ok_and(|number| (1015..=1018).contains(&number)),
        _ => false,
    }
}

/// Returns the features of ublk on this host, or the reason why it is unusable.
fn probe_ublk() -> Result<String, String> {
    let release = release();
    if let Some(reason) = ublk_deny_reason(&release) {
        return Err(reason);
    }
    load_ublk().map_err(|missing| missing.to_string())?;
    let features = ublk::features(ANSWER_LIMIT).map_err(|error| explain_ublk(&error, &release))?;
    let missing: Vec<&str> =
        REQUIRED_FEATURES.iter().filter(|(bit, _)| features & bit == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        let slower = match is_deferral_safe(&release) {
            true => String::new(),
            false => format!(
                "; without deferred task work, which costs some speed: io_uring of kernel {release} may hang at the end of a \
                 process (fixed by commit da579f05ef0f: 6.6.122, 6.12.67 or 6.19)"
            ),
        };
        Ok(format!("ublk with features {features:#x}{slower}"))
    } else {
        Err(format!(
            "the ublk driver of kernel {release} has no {}; use Linux 6.5 or later",
            missing.join(", ")
        ))
    }
}

/// Returns true if a ring with deferred task work may hold ublk commands on the kernel of this `release`
/// (uname -r). Without commit da579f05ef0f the kernel closes such a ring in an endless loop if requests
/// arrive meanwhile, and the device is not given back. Kernels whose number does not tell whether they have
/// that commit count as if they had not.
pub(crate) fn is_deferral_safe(release: &str) -> bool {
    match version(release) {
        [Some(6), Some(6), Some(patch)] => patch >= 122,
        [Some(6), Some(12), Some(patch)] => patch >= 67,
        [Some(6), Some(minor), _] => minor >= 19,
        [Some(major), _, _] => major >= 7,
        _ => false,
    }
}

/// Returns the first three numbers of a `release` (uname -r).
pub(crate) fn version(release: &str) -> [Option<u32>; 3] {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    std::array::from_fn(|_| numbers.next().flatten())
}

/// Explains a failed probe of the driver.
fn explain_ublk(error: &io::Error, release: &str) -> String {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => format!(
            "{CONTROL_PATH} or io_uring is not permitted ({error}); run as root, and see that \
             /proc/sys/kernel/io_uring_disabled is 0"
        ),
        Some(libc::ENOSYS) => format!("kernel {release} has no io_uring; use one with CONFIG_IO_URING"),
        Some(libc::ENODEV | libc::EOPNOTSUPP) => {
            format!("the ublk driver of kernel {release} is too old ({error}); use Linux 6.5 or later")
        }
        _ => format!("the ublk driver of kernel {release} does not answer: {error}"),
    }
}

/// Loads the ublk driver unless it is loaded.
pub(crate) fn load_ublk() -> Result<(), MissingModule> {
    let node = Path::new(CONTROL_PATH);
    if node.exists() {
        return Ok(());
    }
    load(UBLK_MODULE)?;
    let seen = wait::until(NODE_LIMIT, || Ok::<_, ()>(node.exists().then_some(())));
    if seen == Ok(Some(())) {
        return Ok(());
    }
    Err(MissingModule {
        module: UBLK_MODULE,
        reason: format!("module loaded, but {CONTROL_PATH} does not exist"),
    })
}

/// Loads the NBD driver unless it is loaded.
pub(crate) fn load_nbd() -> Result<(), MissingModule> {
    if is_loaded(NBD_MODULE) { Ok(()) } else { load(NBD_MODULE) }
}

/// Returns the features of NBD on this host, or the reason why it is unusable. If `load` is false, an
/// unloaded module is only searched for.
fn probe_nbd(load: bool) -> Result<String, String> {
    if !load && !is_loaded(NBD_MODULE) {
        modprobe(NBD_MODULE, &["--dry-run"]).map_err(|missing| missing.to_string())?;
        return Ok("the module nbd can be loaded".into());
    }
    load_nbd().map_err(|missing| missing.to_string())?;
    crate::nbd::driver_answers().map_err(|error| {
        format!(
            "the module nbd is loaded, but its netlink family can not be used: {error}; it is in the host's \
             network namespace only"
        )
    })?;
    Ok("NBD through generic netlink".into())
}

/// Loads the modules of iSCSI unless they are loaded, and looks for its programs.
///
/// # Errors
/// The missing parts, and the remedy.
pub(crate) fn load_iscsi() -> Result<(), String> {
    probe_iscsi(true).map(drop)
}

/// Returns the features of iSCSI on this host, or the reason why it is unusable. If `load` is false, an
/// unloaded module is only searched for.
fn probe_iscsi(load: bool) -> Result<String, String> {
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
    let answer = answer.map_err(|error| format!("tgtd does not tell its version: {error}"))?;
    judge_tgt(&String::from_utf8_lossy(&answer.stdout))
}

/// A kernel module is missing.
#[derive(Debug, thiserror::Error)]
#[error("no module {module}: {reason}; {}", remedy(.module))]
pub(crate) struct MissingModule {
    module: &'static str,
    reason: String,
}

fn remedy(module: &str) -> &'static str {
    match module {
        UBLK_MODULE => {
            "it needs Linux 6.5 or later with CONFIG_BLK_DEV_UBLK (Debian 12: a kernel of bookworm-backports; \
             Ubuntu: linux-modules-extra of this kernel)"
        }
        NBD_MODULE => {
            "it needs a kernel with CONFIG_BLK_DEV_NBD (Ubuntu: linux-modules-extra of this kernel)"
        }
        _ => "iSCSI needs a kernel with CONFIG_ISCSI_TCP and CONFIG_FUSE_FS",
    }
}

fn is_loaded(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists()
}

fn load(module: &'static str) -> Result<(), MissingModule> {
    modprobe(module, &[])
}

fn modprobe(module: &'static str, options: &'static [&'static str]) -> Result<(), MissingModule> {
    let missing = |reason: String| MissingModule { module, reason };
    let output = wait::within(MODPROBE_LIMIT, move || {
        Host::here().command("modprobe").args(options).arg(module).stdin(Stdio::null()).output()
    });
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.trim();
            Err(missing(if said.is_empty() {
                format!("modprobe: {}", output.status)
            } else {
                said.to_owned()
            }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(missing("no modprobe (package kmod)".into()))
        }
        Err(error) => Err(missing(format!("modprobe: {error}"))),
    }
}

/// Returns the release of the running kernel, as in uname -r.
pub(crate) fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_whose_rings_end() {
        for release in
            ["6.12.67", "6.12.117+deb12-cloud-amd64", "6.6.122", "6.19.0", "6.19-rc7", "7.0.1-arch1-1"]
        {
            assert!(is_deferral_safe(release), "{release}");
        }
        for release in
            ["6.12.66", "6.6.121", "6.8.0-45-generic", "6.18.6", "5.14.0-503.el9.x86_64", "6.12", "", "linux"]
        {
            assert!(!is_deferral_safe(release), "{release}");
        }
    }

    #[test]
    fn kernels_that_crash_are_denied() {
        for bad in [
            "6.18.4",
            "6.18.4-arch1-1",
            "6.18.5",
            "6.18.5-zabbly+",
            "6.18.5+deb14-amd64",
            "6.17.0-1015-azure",
            "6.17.0-1018-azure",
            "6.17.0-1017-aws",
            "6.17.0-1003-aws",
        ] {
            let reason = ublk_deny_reason(bad);
            assert!(reason.is_some_and(|reason| reason.contains(bad)), "{bad}");
        }
    }

    #[test]
    fn other_kernels_are_not() {
        for good in [
            "6.18.3",
            "6.18.6",
            "6.18.44",
            "6.18.50-1",
            "6.17.0-1014-azure",
            "6.17.0-1019-azure",
            "6.17.0-14-generic",
            "6.17.4",
            "6.12.95+deb12-amd64",
            "6.1.0-40-amd64",
            "16.18.4",
            "",
        ] {
            assert_eq!(ublk_deny_reason(good), None, "{good}");
        }
    }

    fn reports(ublk: bool, nbd: bool, iscsi: bool) -> [FrontendReport; 4] {
        let kinds = [
            (FrontendKind::Ublk, ublk),
            (FrontendKind::Nbd, nbd),
            (FrontendKind::Iscsi, iscsi),
            (FrontendKind::Socket, true),
        ];
        kinds.map(|(kind, usable)| FrontendReport { kind, usable, reason: format!("reason of {kind}") })
    }

    #[test]
    fn the_choice() {
        use FrontendKind::{Iscsi, Nbd, Socket, Ublk};
        // wanted, ublk usable, nbd usable, iscsi usable: chosen
        let table = [
            (None, true, true, true, Some(Ublk)),
            (None, true, false, true, Some(Ublk)),
            (None, false, true, true, Some(Nbd)),
            (None, false, false, true, Some(Iscsi)),
            (None, false, false, false, None),
            (Some(Ublk), true, true, true, Some(Ublk)),
            (Some(Ublk), false, true, true, None),
            (Some(Nbd), true, true, true, Some(Nbd)),
            (Some(Nbd), true, false, true, None),
            (Some(Iscsi), true, true, true, Some(Iscsi)),
            (Some(Iscsi), true, true, false, None),
            (Some(Socket), false, false, false, Some(Socket)),
        ];
        for (wanted, ublk, nbd, iscsi, chosen) in table {
            let found = choose(wanted, &reports(ublk, nbd, iscsi)).ok();
            assert_eq!(found, chosen, "{wanted:?} with ublk {ublk}, nbd {nbd}, iscsi {iscsi}");
        }
        assert_eq!(choose(Some(Socket), &[]).ok(), Some(Socket));
    }

    #[test]
    fn a_refusal_names_every_reason() {
        let text = choose(None, &reports(false, false, false)).unwrap_err().to_string();
        for kind in ["ublk", "nbd", "iscsi"] {
            assert!(text.contains(&format!("{kind}: reason of {kind}")), "{text}");
        }
        let text = choose(Some(FrontendKind::Nbd), &reports(true, false, true)).unwrap_err().to_string();
        assert!(text.contains("reason of nbd") && !text.contains("reason of ublk"), "{text}");
    }

    #[test]
    fn a_probe_always_ends_with_reasons() {
        let reports = probe();
        assert_eq!(reports.iter().map(|report| report.kind).collect::<Vec<_>>(), reports_order());
        assert!(reports.iter().all(|report| !report.reason.is_empty()), "{reports:?}");
        assert!(reports[3].usable);
    }

    fn reports_order() -> Vec<FrontendKind> {
        reports(true, true, true).into_iter().map(|report| report.kind).collect()
    }

    #[test]
    fn what_is_missing_and_what_helps() {
        let text = load("no-such-module").unwrap_err().to_string();
        assert!(text.contains("no module no-such-module"), "{text}");
        let missing = MissingModule { module: UBLK_MODULE, reason: "not found".into() };
        assert!(missing.to_string().contains("CONFIG_BLK_DEV_UBLK"), "{missing}");
        assert!(explain_ublk(&io::Error::from_raw_os_error(libc::EACCES), "6.12").contains("run as root"));
        assert!(explain_ublk(&wait::timed_out(ANSWER_LIMIT), "6.12").contains("no answer within 5s"));
    }
}
