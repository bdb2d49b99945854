//! Calls on the files of one directory, always relative to its descriptor, never through a link.

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

/// Files are for whoever runs the replica, and nobody else.
const FILE_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);

/// No document of ours or of Longhorn's is longer.
const DOCUMENT_MAX_BYTES: u64 = 64 << 20;

/// Written out, so that its blocks can be had back by removing it.
const RESERVE_FILE: &str = "shorthorn.reserve";
/// Room for every document of a replica twice, for a file of regions (33 pages at most), and for the journal of
/// the file system to be content.
const RESERVE_BYTES: usize = 256 << 10;

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    fd: File,
}

/// What a file is.
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

    /// The path of a file, for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn error(&self, action: &'static str, name: &str, source: impl Into<io::Error>) -> StoreError {
        StoreError::io(action, self.path_of(name), source)
    }

    /// The names of all regular files.
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
                // Some file systems do not tell.
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

    /// A file without a name in this directory.
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

    /// The content of a document, if it is there.
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

    /// Does what needs a little space. Where the file system is full the reserve is given up for it: a
    /// full disk fails writes of data, and must not keep a replica from closing, opening, or storing a view.
    pub fn with_reserve<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(error) if error.errno() == shorthorn_types::Errno::NO_SPACE => {
                self.unlink(RESERVE_FILE)?;
                let result = attempt();
                self.keep_reserve();
                result
            }
            result => result,
        }
    }

    /// Sets a little space aside, or as much of it as there is.
    pub fn keep_reserve(&self) {
        let has_reserve =
            matches!(self.stat(RESERVE_FILE), Ok(Some(stat)) if stat.size_bytes >= RESERVE_BYTES as u64);
        if !has_reserve && let Err(error) = self.try_write(RESERVE_FILE, &[0; RESERVE_BYTES]) {
            // A full disk has no room for it: the next opening tries again.
            drop(error);
        }
    }

    fn try_write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = self.open_file(name, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        file.write_all(bytes).map_err(|error| self.error("write", name, error))
    }

    pub fn create_sparse(&self, name: &str, size_bytes: u64) -> Result<()> {
        let file = self.open_file(name, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL)?;
        file.set_len(size_bytes).map_err(|error| self.error("set the size of", name, error))
    }

    /// Makes the file longer; never shorter.
    pub fn grow(&self, name: &str, size_bytes: u64) -> Result<()> {
        let file = self.open_file(name, OFlag::O_RDWR)?;
        let now_bytes = stat_of(&file).map_err(|error| self.error("look at", name, error))?.size_bytes;
        if now_bytes >= size_bytes {
            return Ok(());
        }
        file.set_len(size_bytes).map_err(|error| self.error("set the size of", name, error))
    }

    pub fn sync_file(&self, name: &str) -> Result<()> {
        self.open_file(name, OFlag::O_RDONLY)?.sync_all().map_err(|error| self.error("sync", name, error))
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        renameat(self.fd.as_fd(), from, self.fd.as_fd(), to)
            .map_err(|errno| self.error("rename", from, errno))
    }

    pub fn link(&self, from: &str, to: &str) -> Result<()> {
        linkat(self.fd.as_fd(), from, self.fd.as_fd(), to, AtFlags::empty())
            .map_err(|errno| self.error("link", from, errno))
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
        self.fd.sync_all().map_err(|error| StoreError::io("sync", &self.path, error))
    }

    /// Replaces a document durably.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temp = shorthorn_chain::temp_name(name);
        self.write(&temp, bytes)?;
        self.sync_file(&temp)?;
        self.rename(&temp, name)?;
        self.sync()
    }
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
