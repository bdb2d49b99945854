//! Detects Longhorn on this host: it would delete Shorthorn's replicas on its disks as orphans, and its
//! devices have the same paths.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of this host's processes.
pub const PROC: &str = "/proc";
/// The directory of Longhorn's devices.
const DEVICES: &str = "/dev/longhorn";
/// The programs of Longhorn that a host with it always runs.
const PROGRAMS: [&str; 2] = ["longhorn-manager", "longhorn-instance-manager"];

/// Returns the first process of Longhorn in `proc`, which is the folder of processes: the name of its
/// program.
pub fn running(proc: &Path) -> Option<&'static str> {
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let processes = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_number));
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .find_map(|line| program(&line))
}

/// Returns the warnings for a host on which Longhorn runs, with these disks of Shorthorn. Longhorn may take a
/// disk at any time, and then uses the identity that is there. Reads no disk, because one may hang.
pub fn warnings(proc: &Path, device_dir: &Path, disks: &BTreeSet<PathBuf>) -> Vec<String> {
    let Some(program) = running(proc) else { return Vec::new() };
    let devices = (device_dir == Path::new(DEVICES)).then(|| {
        format!(
            "{program} runs on this host, and both make devices in {DEVICES}: no volume of one may have the \
             name of a volume of the other. Unless you are about to remove Longhorn, set device_dir of the \
             agent to another directory"
        )
    });
    let of_disk = |disk: &PathBuf| {
        format!(
            "{program} runs on this host: if {} is a disk of its node too, its deletion of orphans removes \
             replicas of Shorthorn. Remove the disk from the node in Longhorn, or stop Longhorn on this host",
            disk.display()
        )
    };
    devices.into_iter().chain(disks.iter().map(of_disk)).collect()
}

/// Returns the reason why a directory that has the identity of a Longhorn disk cannot become a Shorthorn
/// disk; none if it can.
pub fn objection(proc: &Path, path: &Path, identity_file: &str) -> Option<String> {
    let program = running(proc)?;
    let path = path.display();
    Some(format!(
        "{program} runs on this host, and {path} is a disk of Longhorn ({identity_file}): its deletion of \
         orphans would remove replicas of Shorthorn. In Longhorn, disable scheduling on the disk, evict its \
         replicas and remove it from the node; then delete {path}/{identity_file} and add the disk again. Or \
         stop Longhorn on this host first"
    ))
}

/// Returns the program of Longhorn that a command line is of. It may be the second word, behind an
/// interpreter or an init.
fn program(command_line: &[u8]) -> Option<&'static str> {
    let words = command_line.split(|byte| *byte == 0).take(3);
    let mut names = words.filter_map(|word| std::str::from_utf8(word).ok()?.rsplit('/').next());
    names.find_map(|name| PROGRAMS.into_iter().find(|program| *program == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longhorn_is_known_by_its_processes() {
        let proc = tempfile::tempdir().unwrap();
        let process = |name: &str, line: &str| {
            let folder = proc.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("cmdline"), line.replace(' ', "\0")).unwrap();
        };
        process("1", "/sbin/init ");
        process("12", "vi /doc/longhorn-manager.txt ");
        process("self", "longhorn-manager daemon ");
        fs::create_dir(proc.path().join("77")).unwrap();
        let disks = BTreeSet::from(["/data/a", "/data/b"].map(PathBuf::from));
        let warned = |device_dir: &str, disks| warnings(proc.path(), Path::new(device_dir), disks);
        assert_eq!(running(proc.path()), None);
        assert!(warned(DEVICES, &disks).is_empty());
        process("99", "/tini -- /usr/local/sbin/longhorn-manager -d daemon ");
        assert_eq!(running(proc.path()), Some("longhorn-manager"));
        let none = BTreeSet::new();
        assert_eq!(warned(DEVICES, &none).len(), 1);
        assert!(warned("/dev/shorthorn", &none).is_empty());
        // A disk that Longhorn begins to use later looks as before.
        let of_disks = warned("/dev/shorthorn", &disks);
        assert_eq!(of_disks.len(), 2);
        for (warning, disk) in of_disks.iter().zip(["/data/a", "/data/b"]) {
            assert!(warning.contains(disk) && warning.contains("orphans"), "{warning}");
        }
    }
}
