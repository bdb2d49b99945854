//! The settings of a node, completed by those that differ from node to node. Nothing here reads a file.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use anyhow::Context;

/// The keys that set the address at which other nodes reach the replicas; one of them is enough.
const DATA_KEYS: [&str; 3] = ["data_address", "data_interface", "data_network"];

/// The settings that a node knows and the settings of the cluster do not.
#[derive(Clone, Copy, Debug)]
pub struct NodeSettings<'a> {
    /// The command that writes them.
    pub writer: &'a str,
    pub name: Option<&'a str>,
    pub address: IpAddr,
    /// The port of the API.
    pub port: u16,
    /// The port of the metrics on the address; none: the default address.
    pub metrics_port: Option<u16>,
}

/// Returns `given`, in the format of agent.toml, with the keys of the node that it lacks.
///
/// # Errors
/// `given` is not TOML.
pub fn complete(given: &str, node: &NodeSettings<'_>) -> anyhow::Result<String> {
    let keys: toml::Table = toml::from_str(given).context("settings")?;
    let lacks = |names: &[&str]| names.iter().all(|name| !keys.contains_key(*name));
    let at = |port: u16| SocketAddr::new(node.address, port);
    let mut added = format!("# Written by {}.\n", node.writer);
    let mut add = |key: &str, value: toml::Value| {
        // A string takes every text.
        let _ = writeln!(added, "{key} = {value}");
    };
    if let Some(name) = node.name.filter(|_| lacks(&["node_name"])) {
        add("node_name", name.into());
    }
    if lacks(&["listen"]) {
        let addresses = ["unix:/run/shorthorn/agent.sock".to_owned(), format!("tcp:{}", at(node.port))];
        add("listen", addresses.to_vec().into());
    }
    if lacks(&DATA_KEYS) {
        add("data_address", node.address.to_string().into());
    }
    if let Some(port) = node.metrics_port.filter(|_| lacks(&["metrics_listen"])) {
        add("metrics_listen", at(port).to_string().into());
    }
    // Before the given text, which may end with a table.
    added.push_str(given);
    Ok(added)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::serve::config::Config;

    fn completed(given: &str, address: &str, metrics_port: Option<u16>) -> Config {
        let address = address.parse().unwrap();
        let node = NodeSettings { writer: "a test", name: Some("n1"), address, port: 9501, metrics_port };
        let text = complete(given, &node).unwrap();
        Config::parse(Path::new("/agent.toml"), &text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn expected(text: &str) -> Config {
        Config::parse(Path::new("/agent.toml"), text).unwrap()
    }

    #[test]
    fn keys_of_the_node_are_added_before_tables() {
        let config = completed("queues = 2\n[log]\nlevel = \"debug\"\n", "192.0.2.11", None);
        let wanted = "node_name = \"n1\"\n\
             listen = [\"unix:/run/shorthorn/agent.sock\", \"tcp:192.0.2.11:9501\"]\n\
             data_address = \"192.0.2.11\"\nqueues = 2\n[log]\nlevel = \"debug\"\n";
        assert_eq!(config, expected(wanted));
    }

    #[test]
    fn an_address_of_ipv6_gets_its_brackets() {
        let config = completed("", "fd00::1", Some(9511));
        let wanted = "node_name = \"n1\"\n\
             listen = [\"unix:/run/shorthorn/agent.sock\", \"tcp:[fd00::1]:9501\"]\n\
             data_address = \"fd00::1\"\nmetrics_listen = \"[fd00::1]:9511\"\n";
        assert_eq!(config, expected(wanted));
    }

    #[test]
    fn given_keys_stay() {
        let given = "node_name = \"other\"\nlisten = [\"unix:/run/s\"]\ndata_interface = \"eth1\"\n\
             metrics_listen = \"off\"\n";
        assert_eq!(completed(given, "192.0.2.11", Some(9511)), expected(given));
    }

    #[test]
    fn invalid_toml_is_refused() {
        let address = [127, 0, 0, 1].into();
        let node = NodeSettings { writer: "a test", name: None, address, port: 9501, metrics_port: None };
        assert!(complete("queues 2", &node).is_err());
    }
}
