//! Finds the root directory of kubelet.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PROGRAM: &str = "kubelet";
/// The default directory of kubelet, k3s and RKE2.
const DEFAULT: &str = "/var/lib/kubelet";
/// Distributions that have it elsewhere: MicroK8s, whose kubelet is not a process of its own, and k0s.
const ELSEWHERE: [&str; 2] = ["/var/snap/microk8s/common/var/lib/kubelet", "/var/lib/k0s/kubelet"];

/// Finds the directory.
#[derive(Debug)]
pub struct Finder {
    configured: Option<PathBuf>,
    proc: PathBuf,
    known: Vec<PathBuf>,
    /// The user whose kubelet is believed.
    owner: u32,
}

/// The agent acts as root in the directory of the kubelet, so no other user may choose it.
const ROOT: u32 = 0;

impl Finder {
    /// Creates a finder, which trusts `configured`.
    pub fn new(configured: Option<PathBuf>) -> Finder {
        let known = ELSEWHERE.iter().chain([&DEFAULT]).map(PathBuf::from).collect();
        Finder { configured, proc: "/proc".into(), known, owner: ROOT }
    }

    /// Returns the directory, if it exists: the configured one, else that of the running kubelet, else that
    /// of a distribution.
    pub fn find(&self) -> Option<PathBuf> {
        if let Some(root) = &self.configured {
            return root.is_dir().then(|| root.clone());
        }
        let running = running(&self.proc, self.owner);
        running.into_iter().chain(self.known.iter().cloned()).find(|root| root.is_dir())
    }

    /// Returns the paths on which the directory may appear.
    pub fn candidates(&self) -> Vec<PathBuf> {
        match &self.configured {
            Some(root) => vec![root.clone()],
            None => self.known.clone(),
        }
    }

    /// Returns the path on which the directory is made if none is known.
    pub fn first_candidate(&self) -> PathBuf {
        self.configured.clone().unwrap_or_else(|| DEFAULT.into())
    }
}

/// Returns the directories of the kubelets of `owner` that run on this host; not of those in containers,
/// whose paths mean something else.
fn running(proc: &Path, owner: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(proc) else { return Vec::new() };
    let processes = entries.flatten().map(|entry| entry.path());
    let processes = processes
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().iter().all(u8::is_ascii_digit)));
    let of = |process: PathBuf| {
        if fs::metadata(&process).ok()?.uid() != owner {
            return None;
        }
        // First its short name: reading the command line of a process that hangs can hang, too.
        if fs::read(process.join("comm")).ok()?.trim_ascii() != PROGRAM.as_bytes() {
            return None;
        }
        let root = root_of(&fs::read(process.join("cmdline")).ok()?)?;
        sees_our_files(&process).then_some(root)
    };
    processes.filter_map(of).collect()
}

fn sees_our_files(process: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    identity(Path::new("/")).is_some_and(|ours| identity(&process.join("root")) == Some(ours))
}

/// Returns the directory that a command line means, if it is that of a kubelet.
fn root_of(cmdline: &[u8]) -> Option<PathBuf> {
    let mut arguments = cmdline.split(|byte| *byte == 0);
    let program = Path::new(OsStr::from_bytes(arguments.next()?));
    if program.file_name() != Some(OsStr::new(PROGRAM)) {
        return None;
    }
    let mut root = Path::new(DEFAULT);
    while let Some(argument) = arguments.next() {
        let name = argument.strip_prefix(b"-").unwrap_or(argument);
        let name = name.strip_prefix(b"-").unwrap_or(name);
        let value = match name.strip_prefix(b"root-dir") {
            Some(b"") => arguments.next(),
            Some(rest) => rest.strip_prefix(b"="),
            None => None,
        };
        if let Some(value) = value {
            root = Path::new(OsStr::from_bytes(value));
        }
    }
    root.is_absolute().then(|| root.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &[&str]) -> Option<PathBuf> {
        root_of(arguments.join("\0").as_bytes())
    }

    #[test]
    fn command_lines() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(of(&["/usr/bin/kubelet", "--v=2"]), path(DEFAULT));
        assert_eq!(
            of(&["/usr/bin/kubelet", "--v=2", "--root-dir=/data/kubelet", "--x"]),
            path("/data/kubelet")
        );
        assert_eq!(of(&["kubelet", "--root-dir", "/data/kubelet"]), path("/data/kubelet"));
        assert_eq!(of(&["kubelet", "-root-dir=/a", "--root-dir=/b"]), path("/b"), "the last one counts");
        assert_eq!(of(&["kubelet", "--root-directory=/a"]), path(DEFAULT));
        assert_eq!(of(&["kubelet", "--root-dir=a"]), None);
        assert_eq!(of(&["vim", "/etc/kubelet", "--root-dir=/a"]), None);
        assert_eq!(of(&["kubelet-exporter"]), None);
        assert_eq!(of(&[""]), None);
    }

    fn process(proc: &Path, pid: &str, root: &Path, arguments: &[&str]) {
        let folder = proc.join(pid);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("comm"), "kubelet\n").unwrap();
        fs::write(folder.join("cmdline"), arguments.join("\0")).unwrap();
        std::os::unix::fs::symlink(root, folder.join("root")).unwrap();
    }

    #[test]
    fn the_root_of_a_running_kubelet_is_preferred() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["proc", "known", "running", "contained"] {
            fs::create_dir(path(name)).unwrap();
        }
        let owner = fs::metadata(path("proc")).unwrap().uid();
        let known = vec![path("none"), path("known")];
        let mut finder = Finder { configured: None, proc: path("proc"), known, owner };
        assert_eq!(finder.find(), Some(path("known")));
        let option = |name: &str| format!("--root-dir={}", path(name).display());
        // A kubelet in a container of this host, as kind has them.
        process(&path("proc"), "70", dir.path(), &["/kubelet", &option("contained")]);
        assert_eq!(finder.find(), Some(path("known")));
        process(&path("proc"), "71", Path::new("/"), &["/kubelet", &option("running")]);
        assert_eq!(finder.find(), Some(path("running")));
        finder.owner = owner + 1;
        assert_eq!(finder.find(), Some(path("known")), "any user can name a program kubelet");
        finder.configured = Some(path("missing"));
        assert_eq!(finder.find(), None, "the configured directory does not exist yet");
        fs::create_dir(path("missing")).unwrap();
        assert_eq!(finder.find(), Some(path("missing")));
    }
}
