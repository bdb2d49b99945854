//! The cache folder: images, templates, and the folders of running VMs.
//!
//! The user of a folder holds a lock on a file beside or in it. The kernel drops the lock with the process,
//! so that the remains of a killed test are found and removed.

use std::borrow::Cow;
use std::env;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

/// Returns `$SHORTHORN_CACHE/vm`, by default `~/.cache/shorthorn/vm`.
pub fn root() -> Result<PathBuf> {
    if let Some(path) = env::var_os("SHORTHORN_CACHE") {
        return Ok(PathBuf::from(path).join("vm"));
    }
    let home = env::var_os("HOME").context("neither SHORTHORN_CACHE nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cache/shorthorn/vm"))
}

/// Opens a lock file, making it if need be.
pub fn lock_file(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open the lock file {}", path.display()))
}

/// Tries to lock the file for this process alone.
pub fn try_lock(file: &File) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error).context("cannot lock"),
    }
}

/// The folder of one running VM, removed with this value.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: File,
}

impl RunDir {
    /// Makes a folder for a VM and removes the folders of ended ones.
    pub fn create(name: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);

        let parent = root()?.join("run");
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        // Between making a folder and locking it, another process could take it for
        // an abandoned one.
        let sweep_lock = lock_file(&parent.join(".lock"))?;
        sweep_lock.lock().context("cannot lock the folder of running VMs")?;
        sweep(&parent)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}-{number}-{name}", process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let lock = lock_file(&path.join("lock"))?;
        if !try_lock(&lock)? {
            bail!("{} is locked by another process", path.display());
        }
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder's name, unlike that of any other VM's.
    pub fn name(&self) -> Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // A failure does no harm: the next VM removes the rest.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn sweep(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent)? {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        match OpenOptions::new().write(true).open(path.join("lock")) {
            Ok(lock) if !try_lock(&lock)? => {}
            Ok(_) => remove_dir(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => remove_dir(&path)?,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot open {}", path.display()));
            }
        }
    }
    Ok(())
}

/// Removes a folder that may be gone already.
pub fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        // Its owner removes it at this very moment.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.with_context(|| format!("cannot remove {}", path.display())),
    }
}
