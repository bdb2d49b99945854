//! The settings that `setup` writes. Nothing here reads a file.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};

use crate::on_host::settings::{NodeSettings, complete};

/// The configuration file of the package.
const PACKAGED: &str = include_str!("../../../packaging/agent.toml");
/// The port of the node API, at which a controller in Kubernetes expects it.
const PORT: u16 = 9501;

/// The settings that a person wants.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The name of the node; none: the name of the host.
    pub node_name: Option<&'a str>,
    /// The address of the node API, and of the replicas unless there is an interface.
    pub address: IpAddr,
    /// The interface of the replicas.
    pub data_interface: Option<&'a str>,
    /// The directories of the disks.
    pub disks: &'a [PathBuf],
}

/// The plan for the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The file gets this text.
    Write(String),
    /// The file has these settings already.
    Keep,
}

/// Plans the content of the configuration file, of which `found` is the present one; empty if it is missing.
///
/// # Errors
/// `found` is not TOML, or was changed and has other settings.
pub fn plan(found: &str, wanted: &Wanted<'_>) -> anyhow::Result<Plan> {
    let set: toml::Table = toml::from_str(found).context("the present settings")?;
    let base = if found.trim().is_empty() { PACKAGED } else { found };
    if has_no_key(&set) {
        return Ok(Plan::Write(with_settings(base, wanted)?));
    }
    let mut differences = Vec::new();
    for (key, value) in toml::from_str::<toml::Table>(&with_settings("", wanted)?)? {
        match set.get(&key) {
            Some(present) if *present == value => {}
            Some(present) => differences.push(format!("{key} is {present}, not {value}")),
            None => differences.push(format!("{key} is not set, and would be {value}")),
        }
    }
    if differences.is_empty() {
        return Ok(Plan::Keep);
    }
    bail!(
        "the file was changed, and setup does not overwrite it: {}. Edit it, or restore the file of the \
         package",
        differences.join("; ")
    )
}

/// Returns true if the file sets nothing, like the one of the package, in which every key is a comment.
fn has_no_key(table: &toml::Table) -> bool {
    table.values().all(|value| value.as_table().is_some_and(has_no_key))
}

/// Returns `base` with the wanted settings before it.
fn with_settings(base: &str, wanted: &Wanted<'_>) -> anyhow::Result<String> {
    let mut given = String::new();
    if let Some(interface) = wanted.data_interface {
        given.push_str(&format!("data_interface = {}\n", toml::Value::from(interface)));
    }
    let disks: Vec<toml::Value> = wanted.disks.iter().map(|disk| disk.display().to_string().into()).collect();
    given.push_str(&format!("disks = {}\n", toml::Value::from(disks)));
    if !base.is_empty() {
        given.push('\n');
        given.push_str(base);
    }
    let node = NodeSettings {
        writer: "shorthorn-agent setup",
        name: wanted.node_name,
        address: wanted.address,
        port: PORT,
        metrics_port: None,
    };
    complete(&given, &node)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::serve::config::Config;

    fn wanted(disks: &[PathBuf]) -> Wanted<'_> {
        Wanted { node_name: None, address: [192, 0, 2, 11].into(), data_interface: None, disks }
    }

    fn parsed(text: &str) -> Config {
        Config::parse(Path::new("/agent.toml"), text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn the_packaged_file_gets_the_settings_and_keeps_its_comments() {
        let disks = [PathBuf::from("/var/lib/longhorn"), "/data/b".into()];
        for found in ["", PACKAGED] {
            let Plan::Write(text) = plan(found, &wanted(&disks)).unwrap() else { panic!("nothing to write") };
            assert!(text.ends_with(PACKAGED), "{text}");
            let expected = "listen = [\"unix:/run/shorthorn/agent.sock\", \"tcp:192.0.2.11:9501\"]\n\
                 data_address = \"192.0.2.11\"\ndisks = [\"/var/lib/longhorn\", \"/data/b\"]\n";
            assert_eq!(parsed(&text), parsed(expected));
            assert_eq!(plan(&text, &wanted(&disks)).unwrap(), Plan::Keep, "a second run");
        }
    }

    #[test]
    fn an_interface_takes_the_place_of_the_data_address() {
        let disks = [PathBuf::from("/data/a")];
        let wanted = Wanted { node_name: Some("n1"), data_interface: Some("eth1"), ..wanted(&disks) };
        let Plan::Write(text) = plan(PACKAGED, &wanted).unwrap() else { panic!("nothing to write") };
        let expected = "node_name = \"n1\"\ndata_interface = \"eth1\"\ndisks = [\"/data/a\"]\n\
             listen = [\"unix:/run/shorthorn/agent.sock\", \"tcp:192.0.2.11:9501\"]\n";
        assert_eq!(parsed(&text), parsed(expected));
    }

    #[test]
    fn a_file_that_was_changed_stays_and_its_differences_are_named() {
        let disks = [PathBuf::from("/data/a")];
        let found = "data_address = \"192.0.2.11\"\ndisks = [\"/data/b\"]\nqueues = 2\n";
        let error = plan(found, &wanted(&disks)).unwrap_err().to_string();
        for part in ["disks is [\"/data/b\"], not [\"/data/a\"]", "listen is not set"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!error.contains("data_address is") && !error.contains("queues"), "{error}");
        // Further keys do not matter.
        let found = format!("{}queues = 2\n", with_settings("", &wanted(&disks)).unwrap());
        assert_eq!(plan(&found, &wanted(&disks)).unwrap(), Plan::Keep);
        assert!(plan("queues 2", &wanted(&disks)).is_err());
    }
}
