//! Compares the reference of the configuration with `packaging/agent.toml`, which explains each key.

use shorthorn_testkit::docs::{blocks_read_by, check_generated, table};

use super::*;

const SAMPLE: &str = include_str!("../../../../packaging/agent.toml");

/// A key with its default and its explanation.
struct Key {
    name: String,
    default: String,
    meaning: String,
}

fn keys() -> Vec<Key> {
    let (mut keys, mut table, mut meaning) = (Vec::new(), String::new(), Vec::new());
    for line in SAMPLE.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            table = format!("{name}.");
        } else if let Some(text) = line.strip_prefix("# ") {
            meaning.push(text);
        } else if let Some((name, default)) = line.strip_prefix('#').and_then(|line| line.split_once(" = ")) {
            let (name, default) = (format!("{table}{name}"), default.to_owned());
            keys.push(Key { name, default, meaning: meaning.join(" ") });
        }
        if !line.starts_with("# ") {
            meaning.clear();
        }
    }
    keys
}

/// Returns the keys that `text` may have beside an unknown one, from the error about that.
fn accepted(text: &str) -> Vec<String> {
    let error = toml::from_str::<File>(text).unwrap_err().message().to_owned();
    let (_, names) = error.split_once("expected one of ").or_else(|| error.split_once("expected ")).unwrap();
    names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_sample_explains_every_key() {
    let of_log = accepted("[log]\nunknown = 1\n").into_iter().map(|key| format!("log.{key}"));
    let known: Vec<String> =
        accepted("unknown = 1\n").into_iter().filter(|key| key != "log").chain(of_log).collect();
    let explained: Vec<String> = keys().into_iter().map(|key| key.name).collect();
    assert_eq!(explained, known);
    assert!(keys().iter().all(|key| !key.meaning.is_empty()), "a key has no explanation");
}

#[test]
fn the_documentation_has_every_key() {
    let rows = keys()
        .into_iter()
        .map(|Key { name, default, meaning }| vec![format!("`{name}`"), format!("`{default}`"), meaning]);
    let made = table(&["Key", "Default", "Meaning"], &rows.collect::<Vec<_>>());
    check_generated("docs/reference/agent-toml.md", "agent.toml", &made);
}

#[test]
fn lines_of_the_documentation_are_accepted() {
    let test = "agent/src/serve/config/reference_tests.rs";
    for block in blocks_read_by("docs/install.md", test).unwrap() {
        let read = toml::from_str::<File>(&block.text);
        assert!(read.is_ok(), "{}\n{}", block.text, read.unwrap_err());
    }
}
