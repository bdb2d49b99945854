//! The program that a process runs, compared with the installed one.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The program of this process, also if its file was replaced or removed.
const OWN: &str = "/proc/self/exe";
/// The most comparisons in a row while the file of the installed program changes.
const COMPARISONS_MAX: usize = 3;
/// The bytes that are compared at a time.
const PIECE_BYTES: usize = 64 << 10;

/// The comparison of the program of an engine with the installed one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Comparison {
    /// The process has not shown yet that it runs the engine.
    #[default]
    NotBegun,
    /// The programs are being compared.
    UnderWay,
    /// The programs cannot be compared: their versions count.
    ByVersion,
    /// The programs were compared.
    Done {
        /// True if the process runs another program.
        differs: bool,
    },
}

impl Comparison {
    /// Returns true if an engine that reports that version runs another program than the installed one; none
    /// if that is not known.
    pub fn needs_upgrade(self, version: Option<&str>) -> Option<bool> {
        let is_other_version = version.is_some_and(|version| version != env!("CARGO_PKG_VERSION"));
        match self {
            Comparison::Done { differs } => Some(differs),
            _ if is_other_version => Some(true),
            Comparison::ByVersion if version.is_some() => Some(false),
            Comparison::NotBegun | Comparison::UnderWay | Comparison::ByVersion => None,
        }
    }
}

/// Returns the path of the program that new processes run: the file of this one, which an upgrade has
/// replaced.
pub fn installed() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_else(|_| OWN.into());
    let program = without_suffix(&program);
    if program.exists() { program } else { OWN.into() }
}

/// The file of the installed program at one moment. It changes when a package replaces the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstalledFile {
    device: u64,
    inode: u64,
    size_bytes: u64,
    changed: (i64, i64),
}

/// Returns the file of the installed program; none if it cannot be seen.
pub fn installed_file() -> Option<InstalledFile> {
    file_at(&installed())
}

fn file_at(path: &Path) -> Option<InstalledFile> {
    let found = path.metadata().ok()?;
    let changed = (found.ctime(), found.ctime_nsec());
    Some(InstalledFile { device: found.dev(), inode: found.ino(), size_bytes: found.len(), changed })
}

/// Returns the path of a program without the suffix that Linux adds if the file was replaced or removed.
fn without_suffix(program: &Path) -> PathBuf {
    let path = program.as_os_str().as_bytes();
    OsStr::from_bytes(path.strip_suffix(b" (deleted)").unwrap_or(path)).into()
}

/// Returns true if the process runs another program than the installed one. A copy of the same build is the
/// same program, as after the package was installed again. Compares again if the package replaces the file
/// meanwhile.
///
/// # Errors
/// The process has ended, or the agent may not read its program.
pub fn differs(pid: i32) -> io::Result<bool> {
    let mut file = installed_file();
    let mut differs = have_other_content(Path::new(&format!("/proc/{pid}/exe")), &installed());
    for _ in 1..COMPARISONS_MAX {
        let now = installed_file();
        if now == file {
            break;
        }
        file = now;
        differs = have_other_content(Path::new(&format!("/proc/{pid}/exe")), &installed());
    }
    differs
}

fn have_other_content(one: &Path, other: &Path) -> io::Result<bool> {
    let named = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"))
    };
    let (mut one, mut other) =
        (File::open(one).map_err(named(one))?, File::open(other).map_err(named(other))?);
    let (first, second) = (one.metadata()?, other.metadata()?);
    if (first.dev(), first.ino()) == (second.dev(), second.ino()) {
        return Ok(false);
    }
    if first.len() != second.len() {
        return Ok(true);
    }
    let (mut piece, mut other_piece) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    let mut left_bytes = first.len();
    while left_bytes > 0 {
        let bytes = usize::try_from(left_bytes).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        one.read_exact(&mut piece[..bytes])?;
        other.read_exact(&mut other_piece[..bytes])?;
        if piece[..bytes] != other_piece[..bytes] {
            return Ok(true);
        }
        left_bytes -= bytes as u64;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_engine_is_current_once_it_was_compared() {
        let own = Some(env!("CARGO_PKG_VERSION"));
        let other = Some("0.0.9");
        for comparison in [Comparison::NotBegun, Comparison::UnderWay] {
            assert_eq!(comparison.needs_upgrade(own), None, "another build may have the same version");
            assert_eq!(comparison.needs_upgrade(other), Some(true));
        }
        let by_version = [own, other, None].map(|version| Comparison::ByVersion.needs_upgrade(version));
        assert_eq!(by_version, [Some(false), Some(true), None]);
        for differs in [true, false] {
            assert_eq!(Comparison::Done { differs }.needs_upgrade(other), Some(differs));
        }
    }

    #[test]
    fn a_replaced_program_has_its_path() {
        for path in ["/usr/bin/shorthorn-agent", "/usr/bin/shorthorn-agent (deleted)"] {
            assert_eq!(without_suffix(Path::new(path)), Path::new("/usr/bin/shorthorn-agent"));
        }
    }

    #[test]
    fn programs_differ_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let long = vec![7; 3 * PIECE_BYTES + 1];
        let mut changed = long.clone();
        *changed.last_mut().unwrap() = 8;
        let old = file("old", &long);
        assert!(!have_other_content(&old, &old).unwrap());
        assert!(!have_other_content(&old, &file("copy", &long)).unwrap());
        assert!(have_other_content(&old, &file("changed", &changed)).unwrap(), "the last byte differs");
        assert!(have_other_content(&old, &file("short", &long[1..])).unwrap());
        let missing = have_other_content(&old, &folder.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("/none: "), "{missing}");
    }

    #[test]
    fn a_replaced_file_is_another_one_also_with_the_same_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        assert_eq!(file_at(&path), None);
        fs::write(&path, "a").unwrap();
        let first = file_at(&path);
        assert!(first.is_some() && first == file_at(&path));
        fs::write(folder.path().join("new"), "a").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_ne!(first, file_at(&path));
    }

    #[test]
    fn this_process_runs_the_installed_program() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!differs(own).unwrap());
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = differs(i32::try_from(other.id()).unwrap());
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(found.unwrap());
    }
}
