//! Files for the guest, laid end to end on a disk: the fastest way in.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Each file starts at a multiple of this, and the disk is one long.
const ALIGNMENT: u64 = 4096;

/// The magic number of an ELF file.
const ELF: [u8; 4] = *b"\x7fELF";

/// Writes the pack; returns the place of each file on it and in the guest.
pub fn write<P: AsRef<Path>>(files: &[(P, &str, u32)], target: &Path) -> Result<Vec<Value>> {
    let file = File::create_new(target).with_context(|| format!("cannot create {}", target.display()))?;
    let mut pack = Pack { file, length: 0, entries: Vec::new(), stripped: target.with_extension("stripped") };
    for (host, guest, mode) in files {
        let host = host.as_ref();
        if !guest.starts_with('/') {
            bail!("{guest} is not an absolute path");
        }
        if host.is_dir() {
            pack.add_dir(host, guest)?;
        } else {
            pack.add_file(host, guest, *mode)?;
        }
    }
    pack.file
        .set_len(pack.length.max(ALIGNMENT))
        .with_context(|| format!("cannot extend {}", target.display()))?;
    Ok(pack.entries)
}

struct Pack {
    file: File,
    length: u64,
    entries: Vec<Value>,
    /// The place of a program without symbols, while it is added.
    stripped: PathBuf,
}

impl Pack {
    /// Adds the content of a folder, with the files' own modes.
    fn add_dir(&mut self, host: &Path, guest: &str) -> Result<()> {
        let entries = fs::read_dir(host).with_context(|| format!("cannot read {}", host.display()))?;
        for entry in entries {
            let path = entry.with_context(|| format!("cannot read {}", host.display()))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                bail!("{} is not UTF-8", path.display());
            };
            let guest = format!("{}/{name}", guest.trim_end_matches('/'));
            let metadata = fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
            if metadata.is_dir() {
                self.add_dir(&path, &guest)?;
            } else {
                self.add_file(&path, &guest, metadata.permissions().mode() & 0o7777)?;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, host: &Path, guest: &str, mode: u32) -> Result<()> {
        let mut source = self.source(host)?;
        self.file.seek(SeekFrom::Start(self.length)).context("cannot seek in the pack")?;
        let length = io::copy(&mut source, &mut self.file)
            .with_context(|| format!("cannot copy {}", host.display()))?;
        self.entries.push(json!({ "path": guest, "mode": mode, "offset": self.length, "length": length }));
        self.length = (self.length + length).next_multiple_of(ALIGNMENT);
        Ok(())
    }

    /// Opens the file to add: a program without its symbols. Those are most of a program that was built for
    /// tests, and an emulated machine takes seconds to copy them.
    fn source(&self, host: &Path) -> Result<File> {
        let open = |path: &Path| File::open(path).with_context(|| format!("cannot open {}", path.display()));
        let mut source = open(host)?;
        if !is_elf(&mut source).with_context(|| format!("cannot read {}", host.display()))? {
            return Ok(source);
        }
        let output = Command::new("strip").arg("-o").arg(&self.stripped).arg(host).output();
        let output = output.context("cannot run strip: install the package binutils")?;
        if !output.status.success() {
            bail!("strip {} failed: {}", host.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        let source = open(&self.stripped)?;
        // The open file stays.
        fs::remove_file(&self.stripped)
            .with_context(|| format!("cannot remove {}", self.stripped.display()))?;
        Ok(source)
    }
}

/// Returns true if the file is a program or a library. It is at its start afterwards.
fn is_elf(file: &mut File) -> io::Result<bool> {
    let mut start = Vec::with_capacity(ELF.len());
    file.take(ELF.len() as u64).read_to_end(&mut start)?;
    file.rewind()?;
    Ok(start == ELF)
}
