//! A volume without a daemon, and a replica directory without any process.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_testkit::docs::Script;
use shorthorn_tests::{LocalVolume, binary, ensure_has};

use super::{ended_with, system};

const TEST: &str = "tests/tests/pages/local.rs";

/// Starts the volume as the page says, and looks at it.
fn start(script: &mut Script, folder: &Path) -> Result<LocalVolume> {
    script.set("/var/tmp/v1", &folder.join("v1").display().to_string());
    script.leave_out("make build", "the programs are there")?;
    let words = script.next("target/fast/shorthorn-agent run v1")?;
    let volume = LocalVolume::start_with(&words[1..])?;
    ensure!(volume.ready.replicas.len() == 3, "{:?}", volume.ready);
    let printed = system(&script.next("nbdinfo")?, folder)?;
    ensure_has(&printed, &["export-size: 1073741824"])?;
    Ok(volume)
}

#[test]
fn the_first_look_works_as_the_readme_says() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let mut script = Script::read("README.md", TEST)?;
    start(&mut script, folder.path())?.stop()?;
    script.finish()
}

#[test]
fn a_volume_without_a_daemon_works_as_its_page_says() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let mut script = Script::read("docs/first-volume.md", TEST)?;
    let volume = start(&mut script, folder.path())?;
    system(&script.next("fio")?, folder.path()).context("fio saw wrong data")?;
    let directories = volume.directories();
    volume.stop()?;

    script.set("DIR", &directories[0].display().to_string());
    let agent = |words: &[String]| -> Result<Command> {
        let mut command = Command::new(binary("shorthorn-agent")?);
        command.args(&words[1..]).current_dir(folder.path());
        Ok(command)
    };
    let words = script.next("shorthorn-agent replica inspect")?;
    let printed = ended_with(&agent(&words)?.output()?, "replica inspect", 0)?;
    let shown: Value = serde_json::from_str(&printed).context(printed)?;
    ensure!(shown["usable"] == true && shown["volume"].is_object(), "{shown:#}");
    // The volume has no snapshot: the optional argument is left out.
    let without = |words: Vec<String>| -> Vec<String> {
        words.into_iter().filter(|word| word != "--snapshot" && word != "NAME").collect()
    };
    let words = without(script.next("shorthorn-agent replica export")?);
    ended_with(&agent(&words)?.output()?, "replica export", 0)?;
    let words = without(script.next("shorthorn-agent replica export")?);
    ensure!(words.last().is_some_and(|word| word == "-"), "{words:?}");
    let piped = File::create(folder.path().join("piped"))?;
    ended_with(&agent(&words)?.stdout(piped).output()?, "replica export to standard output", 0)?;
    system(&["cmp", "FILE", "piped"].map(str::to_owned), folder.path())?;
    script.finish()
}
