use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shorthorn_control::{Secret, load_spec, store_spec};
use shorthorn_types::{HumanBytes, ReplicaId, VolumeName};

use crate::cli::RunArgs;
use crate::pid_file::{PidFile, PidFileError};
use crate::run::RunError;

/// The file `volume.json`: the parameters of a volume for the life of its directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeFile {
    /// The volume for which the directory was made; another name is refused.
    pub name: VolumeName,
    pub size_bytes: u64,
    pub replicas: Vec<ReplicaId>,
    /// The secret with which replicas and engine authenticate each other.
    pub secret: Secret,
    /// Number of the newest attachment. No two engines ever have the same.
    pub attach: u64,
    /// True if the volume was ready once. From then on a missing replica directory is a lost replica, and is
    /// not made.
    pub initialised: bool,
}

/// The directory of a volume, held by this process.
#[derive(Debug)]
pub struct VolumeDir {
    path: PathBuf,
    file: VolumeFile,
    _lock: PidFile,
}

impl VolumeDir {
    /// Opens the directory that `args` name, or makes it, and the volume in it.
    ///
    /// # Errors
    /// [`RunError::Held`] if another process has it, [`RunError::Other`] if it holds another volume.
    pub fn open(args: &RunArgs) -> Result<VolumeDir, RunError> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&args.dir).map_err(RunError::at(&args.dir))?;
        let path = fs::canonicalize(&args.dir).map_err(RunError::at(&args.dir))?;
        let lock = PidFile::lock(&path.join("lock")).map_err(|error| match error {
            PidFileError::Held { pid, .. } => RunError::Held { dir: path.clone(), pid },
            PidFileError::Io { path, source } => RunError::Io { path, source },
        })?;
        let json = path.join("volume.json");
        let file = if json.try_exists().map_err(RunError::at(&json))? {
            let file: VolumeFile = load_spec(&json)?;
            check(&file, args, &path)?;
            file
        } else {
            let file = draw(args)?;
            store_spec(&json, &file)?;
            file
        };
        Ok(VolumeDir { path, file, _lock: lock })
    }

    /// Returns the directory, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the parameters of the volume.
    pub fn file(&self) -> &VolumeFile {
        &self.file
    }

    pub fn replica_dir(&self, replica: ReplicaId) -> PathBuf {
        self.path.join("replicas").join(format!("{}-{replica}", self.file.name))
    }

    /// Takes the next number for an attachment, durably, before any engine can show it to a replica.
    ///
    /// # Errors
    /// [`RunError::Spec`].
    pub fn raise_attach(&mut self) -> Result<(), RunError> {
        self.file.attach += 1;
        self.store()
    }

    /// Does the same above `used`, the number for which a replica was opened. True: it was not above that
    /// before, as this file is older than the replicas.
    ///
    /// # Errors
    /// [`RunError::Spec`].
    pub fn raise_attach_above(&mut self, used: u64) -> Result<bool, RunError> {
        if self.file.attach > used {
            return Ok(false);
        }
        self.file.attach = used + 1;
        self.store()?;
        Ok(true)
    }

    /// Stores durably that the volume was ready once.
    ///
    /// # Errors
    /// [`RunError::Spec`].
    pub fn set_initialised(&mut self) -> Result<(), RunError> {
        if self.file.initialised {
            return Ok(());
        }
        self.file.initialised = true;
        self.store()
    }

    fn store(&self) -> Result<(), RunError> {
        Ok(store_spec(&self.path.join("volume.json"), &self.file)?)
    }
}

/// Makes a directory for this user only, if it is missing.
pub fn private_dir(path: &Path) -> Result<(), RunError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(path).map_err(RunError::at(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(RunError::at(path))
}

fn check(file: &VolumeFile, args: &RunArgs, dir: &Path) -> Result<(), RunError> {
    let other =
        |what, found: String, wanted: String| RunError::Other { dir: dir.to_owned(), what, found, wanted };
    if file.name != args.name {
        return Err(other("name", file.name.to_string(), args.name.to_string()));
    }
    if file.size_bytes != args.size.0 {
        let bytes = |bytes: u64| format!("{} ({bytes} bytes)", HumanBytes(bytes));
        return Err(other("size", bytes(file.size_bytes), bytes(args.size.0)));
    }
    if file.replicas.len() != usize::from(args.replicas) {
        return Err(other("number of replicas", file.replicas.len().to_string(), args.replicas.to_string()));
    }
    Ok(())
}

/// Draws the identity of a new volume.
fn draw(args: &RunArgs) -> Result<VolumeFile, RunError> {
    let mut replicas: Vec<ReplicaId> = Vec::new();
    while replicas.len() < usize::from(args.replicas) {
        let id = ReplicaId::from_random(u64::from_le_bytes(random()?));
        if !replicas.contains(&id) {
            replicas.push(id);
        }
    }
    Ok(VolumeFile {
        name: args.name.clone(),
        size_bytes: args.size.0,
        replicas,
        secret: Secret::new(random()?),
        attach: 0,
        initialised: false,
    })
}

fn random<const N: usize>() -> Result<[u8; N], RunError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| RunError::doing("cannot get random numbers")(io::Error::other(error)))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{AgentCommand, Cli};

    fn args(dir: &Path, more: &[&str]) -> RunArgs {
        let dir = dir.to_str().unwrap();
        let words = ["shorthorn-agent", "run", "v1", "--dir", dir].into_iter().chain(more.iter().copied());
        match Cli::try_parse_from(words).unwrap().command {
            AgentCommand::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn continues_with_an_existing_volume() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path(), &["--size", "1GiB"]);
        let mut first = VolumeDir::open(&args).unwrap();
        first.raise_attach().unwrap();
        first.set_initialised().unwrap();
        assert!(!first.raise_attach_above(0).unwrap());
        let written = first.file().clone();
        assert_eq!((written.attach, written.initialised, written.replicas.len()), (1, true, 3));
        drop(first);
        let mut second = VolumeDir::open(&args).unwrap();
        assert_eq!(second.file(), &written);
        assert!(second.raise_attach_above(1).unwrap() && !second.raise_attach_above(1).unwrap());
        assert_eq!(second.file().attach, 2);
    }

    #[test]
    fn refuses_another_volume() {
        let dir = tempfile::tempdir().unwrap();
        VolumeDir::open(&args(dir.path(), &["--size", "1GiB"])).unwrap();
        let size = VolumeDir::open(&args(dir.path(), &["--size", "2GiB"])).unwrap_err().to_string();
        assert!(
            size.contains("whose size is 1 GiB (1073741824 bytes), not 2 GiB (2147483648 bytes)"),
            "{size}"
        );
        let count = args(dir.path(), &["--size", "1GiB", "--replicas", "2"]);
        let count = VolumeDir::open(&count).unwrap_err().to_string();
        assert!(count.contains("whose number of replicas is 3, not 2"), "{count}");
    }

    #[test]
    fn errors_name_the_file_and_its_line() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("volume.json"), "{\n\"name\": \"v1\",\n\"colour\": 1}").unwrap();
        let text = VolumeDir::open(&args(dir.path(), &["--size", "1GiB"])).unwrap_err().to_string();
        assert!(text.contains("volume.json") && text.contains("line 3"), "{text}");
    }
}
