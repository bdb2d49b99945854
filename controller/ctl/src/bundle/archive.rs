//! Writes the file of a bundle, and removes secrets from all of its contents.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde_json::Value;
use tar::{Builder, EntryType, Header};

use super::redact;

/// The mode of the file: only its owner may read it.
const MODE: u32 = 0o600;

/// A bundle that is being written.
pub(super) struct Archive<W: Write> {
    tar: Builder<GzEncoder<W>>,
    folder: String,
    /// In seconds since 1970.
    now: u64,
    missing_entries: Vec<MissingEntry>,
}

/// A missing part of the bundle, and the reason.
#[derive(Debug, Serialize)]
struct MissingEntry {
    missing: String,
    reason: String,
}

impl Archive<File> {
    /// Creates a new file; an existing one is an error.
    pub(super) fn create(path: &Path, folder: &str, now: u64) -> io::Result<Archive<File>> {
        let file = File::options().write(true).create_new(true).mode(MODE).open(path)?;
        Ok(Archive::new(file, folder, now))
    }
}

impl<W: Write> Archive<W> {
    pub(super) fn new(writer: W, folder: &str, now: u64) -> Archive<W> {
        let tar = Builder::new(GzEncoder::new(writer, Compression::default()));
        Archive { tar, folder: folder.to_owned(), now, missing_entries: Vec::new() }
    }

    /// Adds a text after removing its secrets.
    pub(super) fn add_text(&mut self, name: &str, text: &str) -> io::Result<()> {
        self.add(name, redact::text(text).as_bytes())
    }

    /// Adds an object.
    pub(super) fn add_json(&mut self, name: &str, value: Value) -> io::Result<()> {
        let text = serde_json::to_string_pretty(&redact::value(value)).map_err(io::Error::other)?;
        self.add(name, text.as_bytes())
    }

    fn add(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(data.len() as u64);
        header.set_mode(MODE);
        header.set_mtime(self.now);
        self.tar.append_data(&mut header, format!("{}/{name}", self.folder), data)
    }

    /// Records that something is missing; the bundle is made all the same.
    pub(super) fn add_missing(&mut self, missing: &str, reason: &str) {
        self.missing_entries.push(MissingEntry { missing: missing.to_owned(), reason: reason.to_owned() });
    }

    /// Returns the missing parts, a line each.
    pub(super) fn missing(&self) -> Vec<String> {
        self.missing_entries
            .iter()
            .map(|entry| format!("{}: {}", entry.missing, redact::text(&entry.reason)))
            .collect()
    }

    /// Adds the list of missing parts, and ends the file.
    pub(super) fn finish(mut self) -> io::Result<W> {
        let missing = serde_json::to_value(&self.missing_entries).map_err(io::Error::other)?;
        self.add_json("missing.json", missing)?;
        self.tar.into_inner()?.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use flate2::read::GzDecoder;
    use serde_json::json;

    use super::*;

    fn files(bytes: &[u8]) -> BTreeMap<String, String> {
        let mut archive = tar::Archive::new(GzDecoder::new(bytes));
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (path, text)
        });
        entries.collect()
    }

    #[test]
    fn secrets_are_planted_everywhere_and_found_nowhere() {
        let secret = "S3cretOfTheCluster";
        let mut archive = Archive::new(Vec::new(), "b", 1);
        archive.add_text("logs/a.log", &format!("Authorization: Bearer {secret}\nready\n")).unwrap();
        archive.add_text("configuration.txt", &format!("password = \"{secret}\"\n")).unwrap();
        archive.add_json("volume.json", json!({ "spec": { "secret": secret, "size": "1" } })).unwrap();
        archive.add_json("events.json", json!([{ "note": format!("token={secret} was refused") }])).unwrap();
        archive.add_missing("logs", &format!("the API server refuses token={secret}"));
        assert!(!archive.missing().join("").contains(secret));
        let files = files(&archive.finish().unwrap());
        let names: Vec<&String> = files.keys().collect();
        let expected =
            ["b/configuration.txt", "b/events.json", "b/logs/a.log", "b/missing.json", "b/volume.json"];
        assert_eq!(names, expected);
        for (name, text) in &files {
            assert!(!text.contains(secret) && text.contains(redact::LEFT_OUT), "{name}: {text}");
        }
        assert!(files["b/logs/a.log"].contains("ready"));
    }

    #[test]
    fn an_existing_file_is_not_overwritten_and_a_new_one_is_private() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.tar.gz");
        Archive::create(&path, "b", 1).unwrap().finish().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        assert!(Archive::create(&path, "b", 1).is_err());
    }
}
