//! The filters of LVM. Without a filter, LVM reads the devices of volumes whenever it searches for volume
//! groups. Those that a guest has made inside a volume would appear on this host, and could be activated
//! here.

use std::process::{Command, Stdio};

use crate::check::facts::{Facts, LvmSettings};
use crate::check::finding::{HostFinding, passed, warned};

/// The frontends with a name of device of their own, and the beginning of that name. The disks of iSCSI have
/// names of any disk: udev knows them, LVM's filters do not.
const NAMES: [(&str, &str); 2] = [("ublk", "ublkb"), ("nbd", "nbd")];
/// The directory of the links to all devices of volumes.
const LINKS: &str = "longhorn";
/// The patterns that reject the devices of volumes.
const REJECTED: &str = r#""r|^/dev/ublkb[0-9]+|", "r|^/dev/nbd[0-9]+|", "r|^/dev/longhorn/|""#;

/// Asks LVM for its settings; none if it is not installed.
pub fn settings() -> Option<LvmSettings> {
    let of = |key: &str| {
        let mut command = Command::new("lvmconfig");
        command.args(["--typeconfig", "full", &format!("devices/{key}")]);
        let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        // An earlier LVM does not know each key: then it has the value of none.
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Some(value_of(&text, key).unwrap_or_default().to_owned())
    };
    let (global_filter, filter) = (of("global_filter")?, of("filter")?);
    let uses_devices_file = of("use_devicesfile")?.trim() == "1";
    Some(LvmSettings { global_filter, filter, uses_devices_file })
}

/// Returns the value of `KEY=VALUE` in the output of lvmconfig.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(key)?.trim_start().strip_prefix('=').map(str::trim))
}

/// Judges the filters.
pub fn judge(facts: &Facts) -> Vec<HostFinding> {
    let Some(settings) = &facts.block_tools.lvm else { return Vec::new() };
    if settings.uses_devices_file {
        return vec![passed("lvm", "LVM reads only the devices of its devices file".to_owned())];
    }
    let usable = facts.frontends.iter().filter(|(_, usable, _)| *usable);
    let names = usable.filter_map(|(name, ..)| NAMES.iter().find(|(frontend, _)| frontend == name));
    let filters = [&settings.global_filter, &settings.filter];
    let read: Vec<&str> = names
        .map(|(_, device)| *device)
        .filter(|device| !filters.iter().any(|filter| rejects(filter, device)))
        .collect();
    if read.is_empty() {
        return vec![passed("lvm", "LVM does not read the devices of volumes".to_owned())];
    }
    let message = format!(
        "the filters of LVM accept /dev/{}*: volume groups that a guest makes inside a volume appear on this \
         host",
        read.join("*, /dev/")
    );
    vec![warned("lvm", message, remedy(&settings.global_filter))]
}

/// Returns true if the first pattern that concerns the device rejects it. A pattern concerns it if it matches
/// all devices, or contains the beginning of its name or the directory of the links.
fn rejects(filter: &str, device: &str) -> bool {
    for pattern in filter.split('"').skip(1).step_by(2) {
        let mut characters = pattern.chars();
        let (Some(action), Some(_mark)) = (characters.next(), characters.next()) else { continue };
        let expression = characters.as_str();
        let expression = &expression[..expression.len().saturating_sub(1)];
        let is_all = [".*", "", "^.*", "/.*", "^/dev/.*"].contains(&expression);
        if is_all || expression.contains(device) || expression.contains(LINKS) {
            return action == 'r';
        }
    }
    false
}

/// Returns the command that puts the patterns before those that are set.
fn remedy(global_filter: &str) -> String {
    let set = global_filter.trim().trim_start_matches('[').trim_end_matches(']').trim();
    // A shell, or printf, would read these.
    if set.contains(['\'', '\\', '%']) {
        return format!(
            "lvmconfig --typeconfig full devices/global_filter  # put {REJECTED} before it in \
             /etc/lvm/lvm.conf"
        );
    }
    let set = if set.is_empty() { String::new() } else { format!(", {set}") };
    format!(
        "printf 'devices {{\\n\\tglobal_filter = [ {REJECTED}{set} ]\\n}}\\n' >>/etc/lvm/lvmlocal.conf && \
         lvmconfig --validate"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Level;

    const ALL: &str = "[\"a|.*|\"]";

    fn judged(global_filter: &str, filter: &str) -> HostFinding {
        let mut facts = Facts {
            frontends: vec![
                ("ublk".to_owned(), true, String::new()),
                ("nbd".to_owned(), false, String::new()),
                ("iscsi".to_owned(), true, String::new()),
            ],
            ..Facts::default()
        };
        facts.block_tools.lvm = Some(LvmSettings {
            global_filter: global_filter.to_owned(),
            filter: filter.to_owned(),
            uses_devices_file: false,
        });
        let mut found = judge(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    #[test]
    fn lvm_without_a_filter_is_a_warning() {
        for (global_filter, filter, level) in [
            (ALL, ALL, Level::Warned),
            ("", "", Level::Warned),
            ("[\"r|^/dev/ublkb[0-9]+|\"]", ALL, Level::Passed),
            (ALL, "[\"a|^/dev/sda|\", \"r|^/dev/ublkb|\"]", Level::Passed),
            (ALL, "[\"a|^/dev/sda|\", \"r|.*|\"]", Level::Passed),
            ("[\"r/^.dev.longhorn/\"]", ALL, Level::Passed),
            // The first one that concerns it decides.
            ("[\"a|.*|\", \"r|^/dev/ublkb|\"]", ALL, Level::Warned),
            ("[\"r|^/dev/nbd|\"]", ALL, Level::Warned),
        ] {
            let found = judged(global_filter, filter);
            assert_eq!(found.level, level, "{global_filter} {filter}: {found:?}");
        }
    }

    #[test]
    fn the_remedy_keeps_the_patterns_that_are_set() {
        let remedy = judged("[\"a|.*|\"]", "").remedy;
        assert!(remedy.starts_with("printf 'devices {\\n\\tglobal_filter = [ \"r|^/dev/ublkb"), "{remedy}");
        assert!(remedy.contains("/dev/longhorn/|\", \"a|.*|\" ]"), "{remedy}");
        let remedy = judged("[\"a|/dev/o'neil|\"]", "").remedy;
        assert!(remedy.starts_with("lvmconfig ") && remedy.contains("lvm.conf"), "{remedy}");
    }

    #[test]
    fn a_devices_file_suffices_and_a_host_without_lvm_has_no_finding() {
        let mut facts = Facts::default();
        assert!(judge(&facts).is_empty());
        facts.block_tools.lvm = Some(LvmSettings { uses_devices_file: true, ..LvmSettings::default() });
        assert_eq!(judge(&facts)[0].level, Level::Passed);
    }

    #[test]
    fn settings_are_read_as_lvm_prints_them() {
        let text = "global_filter=[\"a|.*|\"]\n";
        assert_eq!(value_of(text, "global_filter"), Some("[\"a|.*|\"]"));
        assert_eq!(value_of("\tuse_devicesfile = 1", "use_devicesfile"), Some("1"));
        assert_eq!(value_of(text, "filter"), None);
    }
}
