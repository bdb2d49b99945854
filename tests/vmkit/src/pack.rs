//! Files for the guest, laid end to end on a disk: the fastest way in.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Each file starts at a multiple of this, and the disk is one long.
const ALIGNMENT: u64 = 4096;

/// Writes the pack; returns the place of each file on it and in the guest.
pub fn write<P: AsRef<Path>>(files: &[(P, &str, u32)], target: &Path) -> Result<Vec<Value>> {
    let file = File::create_new(target).with_context(|| format!("cannot create {}", target.display()))?;
    let mut pack = Pack { file, length: 0, entries: Vec::new() };
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
        let mut source = File::open(host).with_context(|| format!("cannot open {}", host.display()))?;
        self.file.seek(SeekFrom::Start(self.length)).context("cannot seek in the pack")?;
        let length = io::copy(&mut source, &mut self.file)
            .with_context(|| format!("cannot copy {}", host.display()))?;
        self.entries.push(json!({ "path": guest, "mode": mode, "offset": self.length, "length": length }));
        self.length = (self.length + length).next_multiple_of(ALIGNMENT);
        Ok(())
    }
}
