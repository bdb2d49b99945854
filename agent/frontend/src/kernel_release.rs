//! The release of the running kernel, and the faults of releases that frontends avoid.

use std::fs;

/// Returns the release of the running kernel, as in uname -r.
pub(crate) fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim_end().to_owned()
}

/// Returns the reason why ublk must not be touched on the kernel of this `release` (uname -r), or none.
///
/// Kernels with commit 529d4d632788 and without 011af85ccd87 follow a null pointer on the first ADD_DEV. The
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
        "the kernel {release} crashes when a ublk device is created (fixed by commit 011af85ccd87); {fix}"
    ))
}

/// Returns true for 6.18.4 and 6.18.5 of kernel.org, and the kernels that distributions build of them.
fn is_stable_oops(release: &str) -> bool {
    ["6.18.4", "6.18.5"].iter().any(|bad| {
        release.strip_prefix(bad).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Returns true for Ubuntu's kernels for clouds that may crash, as in `6.17.0-1015-azure`. On Azure, builds
/// 1015 to 1018 are known to crash. On AWS, no 6.17 is known not to crash.
fn is_ubuntu_oops(release: &str) -> bool {
    let Some(build) = release.strip_prefix("6.17.0-") else { return false };
    match build.split_once('-') {
        Some((_, "aws")) => true,
        Some((number, "azure")) => number.parse::<u32>().is_ok_and(|number| (1015..=1018).contains(&number)),
        _ => false,
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

/// Returns the reason why a live NBD device must not be resized on the kernel of this `release` (uname -r),
/// or none.
///
/// Since commit 242a49e5c878 (Linux 6.9) the driver freezes the queue for a change of the size. The caller
/// waits for every request in flight. It cannot be killed, and it holds locks that each call to the driver
/// needs. If the requests wait for the next engine, that engine waits for these locks. Enterprise kernels
/// (`el`) have a block layer of another version than their number, and count as if they had that commit.
pub(crate) fn nbd_resize_deny_reason(release: &str) -> Option<String> {
    let is_old = matches!(version(release), [Some(5), ..] | [Some(6), Some(..=8), _]);
    if is_old && !release.contains(".el") {
        return None;
    }
    Some(format!(
        "the NBD driver of kernel {release} cannot resize a device in use safely; detach the volume and \
         attach it again"
    ))
}

/// Returns the first three numbers of a `release` (uname -r).
pub(crate) fn version(release: &str) -> [Option<u32>; 3] {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    std::array::from_fn(|_| numbers.next().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_with_safe_deferral_are_recognised() {
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
    fn live_nbd_devices_are_resized_only_by_drivers_that_do_not_freeze_them() {
        for release in ["6.1.0-40-amd64", "6.8.0-45-generic", "6.6.122", "5.15.0-119-generic"] {
            assert_eq!(nbd_resize_deny_reason(release), None, "{release}");
        }
        for release in [
            "6.9.0",
            "6.9-rc1",
            "6.12.95+deb13-amd64",
            "6.17.0-35-generic",
            "7.0.1-arch1-1",
            "16.1.0",
            "5.14.0-503.el9.x86_64",
            "6.12.0-55.el10.x86_64",
            "",
            "linux",
        ] {
            let reason = nbd_resize_deny_reason(release).unwrap_or_default();
            assert!(reason.contains(&format!("kernel {release} cannot resize a device in use")), "{release}");
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
    fn other_kernels_are_accepted() {
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
}
