//! Calls on the files of one directory, always relative to its descriptor, never through a link.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::error::StoreError;

type Result<T> = std::result::Result<T, StoreError>;

/// The mode of new files: only the user of the replica process may access them.
const FILE_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);

/// No document of ours or of Longhorn's is longer.
const DOCUMENT_MAX_BYTES: u64 = 64 << 20;

/// Written out, so that its blocks can be had back by removing it.
pub(crate) const RESERVE_FILE: &str = "shorthorn.reserve";
/// Room for every document of a replica twice, and for three files of regions (33 pages at most). The journal
/// of the file system also needs room. A member on a full disk has to begin an out-of-sync set for each other
/// replica that leaves.
const RESERVE_BYTES: usize = 512 << 10;
const RESERVE_PIECE_BYTES: usize = 4096;

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    fd: File,
}

/// The metadata of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileStat {
    pub inode: u64,
    pub size_bytes: u64,
    pub allocated_bytes: u64,
    pub mtime_ns: i128,
    pub ctime_ns: i128,
}

impl Directory {
    pub fn open(path: &Path) -> Result<Directory> {
        let fd = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags((OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).bits())
            .open(path)
            .map_err(|error| StoreError::io("open the directory", path, error))?;
        Ok(Directory { path: path.to_owned(), fd })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file, for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn error(&self, action: &'static str, name: &str, source: impl Into<io::Error>) -> StoreError {
        StoreError::io(action, self.path_of(name), source)
    }

    /// Returns the names of all regular files.
    pub fn list(&self) -> Result<Vec<String>> {
        let failed = |errno: Errno| StoreError::io("list", &self.path, errno);
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut entries = Dir::openat(self.fd.as_fd(), ".", flags, Mode::empty()).map_err(failed)?;
        let mut names = Vec::new();
        for entry in entries.iter() {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let regular = match entry.file_type() {
                Some(kind) => kind == Type::File,
                // Some file systems do not report it.
                None => self
                    .open_path(name)?
                    .is_some_and(|file| file.metadata().is_ok_and(|found| found.is_file())),
            };
            if regular {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    pub fn open_file(&self, name: &str, flags: OFlag) -> Result<File> {
        let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        let fd = openat(self.fd.as_fd(), name, flags, FILE_MODE)
            .map_err(|errno| self.error("open", name, errno))?;
        Ok(File::from(fd))
    }

    /// Returns a file without a name in this directory.
    pub fn open_unnamed(&self, flags: OFlag) -> nix::Result<File> {
        let flags = flags | OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        openat(self.fd.as_fd(), ".", flags, FILE_MODE).map(File::from)
    }

    pub fn stat(&self, name: &str) -> Result<Option<FileStat>> {
        match self.open_path(name)? {
            Some(file) => stat_of(&file).map(Some).map_err(|error| self.error("look at", name, error)),
            None => Ok(None),
        }
    }

    fn open_path(&self, name: &str) -> Result<Option<File>> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        match openat(self.fd.as_fd(), name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(self.error("look at", name, errno)),
        }
    }

    /// Returns the content of a document, if it exists.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        if self.open_path(name)?.is_none() {
            return Ok(None);
        }
        let file = self.open_file(name, OFlag::O_RDONLY)?;
        let mut bytes = Vec::new();
        file.take(DOCUMENT_MAX_BYTES)
            .read_to_end(&mut bytes)
            .map_err(|error| self.error("read", name, error))?;
        Ok(Some(bytes))
    }

    /// Creates or truncates the file and writes `bytes`.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.with_reserve(|| self.try_write(name, bytes))
    }

    /// Does an operation that needs a little space. If the file system is full, the reserve is given up for
    /// it. A full disk fails writes of data, and must not keep a replica from closing, opening, or storing a
    /// view. Not only content needs space: a new name may need another block of the directory. `attempt` can
    /// be repeated.
    pub fn with_reserve<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(error) if is_full(error.errno()) => {
                self.unlink(RESERVE_FILE)?;
                let result = attempt();
                // Freed space can be used again only once that is on the disk. The kernel reports a write
                // error once, and this one may be of an operation that has just succeeded. Only a lack of
                // space is left to the next attempt.
                let synced = self.fd.sync_all().map_err(|error| self.error("sync", ".", error));
                self.keep_reserve();
                match synced {
                    Err(error) if !is_full(error.errno()) => result.and(Err(error)),
                    _ => result,
                }
            }
            result => result,
        }
    }

    /// Sets a little space aside, or as much of it as there is.
    pub fn keep_reserve(&self) {
        let has_reserve =
            matches!(self.stat(RESERVE_FILE), Ok(Some(stat)) if stat.size_bytes >= RESERVE_BYTES as u64);
        if !has_reserve && let Err(error) = self.write_reserve() {
            // A full disk has no room for all of it: the next opening tries again.
            drop(error);
        }
    }

    /// Writes the reserve in pieces: a file system may take nothing of a large write that does not fit.
    fn write_reserve(&self) -> Result<()> {
        let mut file = self.open_file(RESERVE_FILE, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        let piece = [0; RESERVE_PIECE_BYTES];
        (0..RESERVE_BYTES / RESERVE_PIECE_BYTES)
            .try_for_each(|_| file.write_all(&piece))
            .map_err(|error| self.error("write", RESERVE_FILE, error))
    }

    fn try_write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = self.open_file(name, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        file.write_all(bytes).map_err(|error| self.error("write", name, error))
    }

    pub fn create_sparse(&self, name: &str, size_bytes: u64) -> Result<()> {
        let create = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
        let file = self.with_reserve(|| self.open_file(name, create))?;
        self.set_size(&file, name, size_bytes)
    }

    fn set_size(&self, file: &File, name: &str, size_bytes: u64) -> Result<()> {
        let set = || file.set_len(size_bytes).map_err(|error| self.error("set the size of", name, error));
        self.with_reserve(set)
    }

    /// Makes the file longer; never shorter.
    pub fn grow(&self, name: &str, size_bytes: u64) -> Result<()> {
        let file = self.open_file(name, OFlag::O_RDWR)?;
        let now_bytes = stat_of(&file).map_err(|error| self.error("look at", name, error))?.size_bytes;
        if now_bytes >= size_bytes {
            return Ok(());
        }
        self.set_size(&file, name, size_bytes)
    }

    /// Makes the content of a file durable. A sync without space has failed, with unknown losses.
    pub fn sync_file(&self, name: &str) -> Result<()> {
        self.open_file(name, OFlag::O_RDONLY)?.sync_all().map_err(|error| self.error("sync", name, error))
    }

    /// Makes the content of a document durable that holds these bytes. Some file systems allocate its space
    /// only then: if none is left, the document is written again. A second sync alone could succeed without
    /// meaning.
    pub fn sync_document(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let has_failed = Cell::new(false);
        self.with_reserve(|| {
            if has_failed.replace(true) {
                self.try_write(name, bytes)?;
            }
            self.sync_file(name)
        })
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.with_reserve(|| {
            renameat(self.fd.as_fd(), from, self.fd.as_fd(), to)
                .map_err(|errno| self.error("rename", from, errno))
        })
    }

    pub fn link(&self, from: &str, to: &str) -> Result<()> {
        self.with_reserve(|| {
            linkat(self.fd.as_fd(), from, self.fd.as_fd(), to, AtFlags::empty())
                .map_err(|errno| self.error("link", from, errno))
        })
    }

    /// Takes the name away; it need not be there.
    pub fn unlink(&self, name: &str) -> Result<()> {
        match unlinkat(self.fd.as_fd(), name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(self.error("remove", name, errno)),
        }
    }

    /// Makes all names durable.
    pub fn sync(&self) -> Result<()> {
        self.with_reserve(|| self.fd.sync_all().map_err(|error| StoreError::io("sync", &self.path, error)))
    }

    /// Replaces a document durably.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temp = shorthorn_chain::temp_name(name);
        self.write(&temp, bytes)?;
        self.sync_document(&temp, bytes)?;
        self.rename(&temp, name)?;
        self.sync()
    }
}

/// Returns true if something has failed for lack of space, which the reserve may give.
pub(crate) fn is_full(errno: shorthorn_types::Errno) -> bool {
    errno == shorthorn_types::Errno::NO_SPACE || errno.raw() == nix::libc::EDQUOT
}

pub(crate) fn stat_of(file: &File) -> io::Result<FileStat> {
    let metadata = file.metadata()?;
    let time = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    Ok(FileStat {
        inode: metadata.ino(),
        size_bytes: metadata.len(),
        allocated_bytes: metadata.blocks() * 512,
        mtime_ns: time(metadata.mtime(), metadata.mtime_nsec()),
        ctime_ns: time(metadata.ctime(), metadata.ctime_nsec()),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;

    /// A small ext4 in a file, unmounted when dropped; none if it cannot be mounted here.
    pub struct SmallDisk(tempfile::TempDir);

    impl SmallDisk {
        pub fn mount() -> Option<SmallDisk> {
            let disk = SmallDisk(tempfile::tempdir().unwrap());
            let image = disk.0.path().join("image");
            File::create(&image).unwrap().set_len(16 << 20).unwrap();
            std::fs::create_dir(disk.point()).unwrap();
            let succeeds =
                |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
            let options = ["-q", "-F", "-m", "0", "-b", "4096", "-N", "2048"];
            let is_made = succeeds(Command::new("mkfs.ext4").args(options).arg(&image))
                && succeeds(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(disk.point()));
            if !is_made {
                println!("skipped: no ext4 can be made or mounted here");
            }
            is_made.then_some(disk)
        }

        fn point(&self) -> PathBuf {
            self.0.path().join("mount")
        }

        /// Makes a directory of a replica with a reserve and a document.
        pub fn directory(&self) -> Directory {
            let path = self.point().join("replica");
            std::fs::create_dir(&path).unwrap();
            let directory = Directory::open(&path).unwrap();
            directory.keep_reserve();
            directory.replace("document", b"content").unwrap();
            directory.sync_file(RESERVE_FILE).unwrap();
            directory
        }

        /// Takes every block, and all room that the blocks of the directory have for names.
        pub fn fill(&self, directory: &Directory, round: usize) {
            let mut filler =
                File::options().create(true).append(true).open(self.point().join("filler")).unwrap();
            while filler.write_all(&[0x55; 64 << 10]).is_ok() {}
            // Continues until the file system has no delayed allocations left.
            let mut failures = 0;
            while failures < 3 {
                filler.sync_data().unwrap();
                failures = if filler.write_all(&[0x55; 4096]).is_ok() { 0 } else { failures + 1 };
            }
            for width in [200, 40, 8] {
                let link = |n| {
                    let name = format!("{round}{n:0width$}");
                    std::fs::hard_link(directory.path_of("document"), directory.path_of(&name))
                };
                let error = (0..).find_map(|n| link(n).err()).unwrap();
                assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
            }
        }
    }

    impl Drop for SmallDisk {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.point()).output();
        }
    }

    #[test]
    fn new_names_have_the_reserve_on_a_full_disk() {
        let Some(disk) = SmallDisk::mount() else { return };
        let directory = disk.directory();
        let long = |kind: &str| format!("{kind}{:0200}", 0);
        type NewName = fn(&Directory, &str) -> Result<()>;
        let names: [(&str, NewName); 4] = [
            ("link", |directory, name| directory.link("document", name)),
            ("rename", |directory, name| directory.rename("document", name)),
            ("create", |directory, name| directory.create_sparse(name, 1 << 30)),
            ("replace", |directory, name| directory.replace(name, b"content")),
        ];
        for (round, (kind, new_name)) in names.into_iter().enumerate() {
            disk.fill(&directory, round);
            new_name(&directory, &long(kind)).unwrap();
            assert!(directory.stat(&long(kind)).unwrap().is_some(), "{kind}");
            directory.sync().unwrap();
            if kind == "rename" {
                std::fs::rename(directory.path_of(&long(kind)), directory.path_of("document")).unwrap();
            }
        }
    }
}
