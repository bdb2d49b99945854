//! Probes which frontends work on this host, and chooses one.

use std::io;
use std::time::Duration;

use crate::kernel_release::{is_deferral_safe, release};
use crate::modules::{CONTROL_PATH, NBD_MODULE, is_loaded, load_nbd, load_ublk, modprobe};
use crate::ublk::REQUIRED_FEATURES;
use crate::{FrontendError, FrontendKind, iscsi, nbd, ublk};

pub use crate::kernel_release::ublk_deny_reason;

/// The driver answers at once, or never.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The support of one frontend on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendReport {
    /// The driver that was examined.
    pub kind: FrontendKind,
    /// True if the host supports this frontend.
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
    let iscsi = iscsi::support(ublk.is_err() && nbd.is_err());
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
        let slower = without_deferral(&release);
        Ok(format!("ublk with features {features:#x}{slower}"))
    } else {
        Err(format!(
            "the ublk driver of kernel {release} has no {}; use Linux 6.5 or later",
            missing.join(", ")
        ))
    }
}

/// Returns the part of the report that names the fault of a kernel on which task work is not deferred.
fn without_deferral(release: &str) -> String {
    if is_deferral_safe(release) {
        return String::new();
    }
    format!(
        "; without deferred task work, which costs some speed: io_uring of kernel {release} may hang \
         when a process ends (fixed in 6.6.122, 6.12.67, 6.19)"
    )
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

/// Returns the features of NBD on this host, or the reason why it is unusable. If `load` is false, an
/// unloaded module is only searched for.
fn probe_nbd(load: bool) -> Result<String, String> {
    if !load && !is_loaded(NBD_MODULE) {
        modprobe(NBD_MODULE, &["--dry-run"]).map_err(|missing| missing.to_string())?;
        return Ok("the module nbd can be loaded".into());
    }
    load_nbd().map_err(|missing| missing.to_string())?;
    nbd::driver_answers().map_err(|error| {
        format!(
            "the module nbd is loaded, but its netlink family cannot be used: {error}; it is in the host's \
             network namespace only"
        )
    })?;
    Ok("NBD through generic netlink".into())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_report_names_a_kernel_whose_rings_may_hang() {
        assert_eq!(without_deferral("6.12.67"), "");
        let slower = without_deferral("6.12.66");
        assert!(slower.contains("kernel 6.12.66 may hang") && slower.contains("6.12.67"), "{slower}");
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
    fn a_driver_that_fails_is_explained_with_a_remedy() {
        assert!(explain_ublk(&io::Error::from_raw_os_error(libc::EACCES), "6.12").contains("run as root"));
        assert!(explain_ublk(&crate::wait::timed_out(ANSWER_LIMIT), "6.12").contains("no answer within 5s"));
    }
}
