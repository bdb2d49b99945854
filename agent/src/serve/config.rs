//! The configuration file of the agent.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use nix::sys::utsname::uname;
use serde::Deserialize;
use shorthorn_api::nonempty;
use shorthorn_logging::LogFormat;
use shorthorn_metrics::MetricsListen;
use shorthorn_types::limits::{MAX_QUEUE_DEPTH, MAX_QUEUES};
use shorthorn_types::{Label, NodeName};
use thiserror::Error;
use toml::Spanned;

use crate::serve::listen::ListenAddress;
use crate::serve::network::{DataSource, InterfaceFilter, IpNetwork};
use crate::serve::paths::absolute;

/// The default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/shorthorn/agent.toml";
/// The default address of metrics and health.
pub const DEFAULT_METRICS: MetricsListen = MetricsListen::loopback(9511);
const SIZE_MAX_BYTES: u64 = 1 << 20;
/// The maximum number of volumes: more devices than a kernel has.
const MAX_VOLUMES: u32 = 1 << 20;

/// The default rate of block checksums, [`shorthorn_control::SUM_BYTES_PER_S`], in MiB.
#[allow(clippy::cast_possible_truncation)] // it is a few
pub const SUM_MIB_PER_S: u32 = (shorthorn_control::SUM_BYTES_PER_S >> 20) as u32;
/// The default retention of the trash: a day, in which a mistaken deletion is noticed.
const TRASH_HOURS: u32 = 24;
/// The maximum retention of the trash: a year.
const TRASH_HOURS_MAX: u32 = 8784;
const TRASH_FREE_PERCENT: u32 = 10;
/// IFNAMSIZ without the zero at the end.
const INTERFACE_NAME_MAX_BYTES: usize = 15;
/// The maximum rate of sums: more than a disk reads.
const SUM_MIB_PER_S_MAX: u32 = 65_536;

/// The configuration of the agent; `packaging/agent.toml` explains every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of this node in the cluster; the host name unless the file has one.
    pub node_name: NodeName,
    /// The zone, whose nodes may fail together, if that is known.
    pub zone: Option<Label>,
    /// The addresses of the node API.
    pub listen: Vec<ListenAddress>,
    /// Key and certificate of the node API.
    pub tls_dir: PathBuf,
    /// The kubelet's identity, with which this node enrols.
    pub kubelet_kubeconfig: KubeconfigChoice,
    /// The directory of state that has to survive a reboot.
    pub state_dir: PathBuf,
    /// Sockets and pid files.
    pub runtime_dir: PathBuf,
    /// The directory of device nodes.
    pub device_dir: PathBuf,
    /// The source of the address that other nodes reach replicas at.
    pub data: DataSource,
    /// Ports of replicas on the data address.
    pub data_ports: RangeInclusive<u16>,
    /// Disks, besides those that were added through the API.
    pub disks: Vec<PathBuf>,
    /// The manager of the instances.
    pub instances: InstancesChoice,
    /// Threads of an engine.
    pub queues: u16,
    /// Requests in flight per queue.
    pub queue_depth: u16,
    /// The time after which a replica that does not answer has failed.
    pub replica_timeout_ms: u32,
    /// The rate at which each replica reads idle blocks for their sums, in MiB per second; 0: no sums are
    /// kept.
    pub sum_mib_per_s: u32,
    /// The hours for which the data of deleted replicas is kept; 0: not at all.
    pub trash_hours: u32,
    /// The free space of a disk in percent below which its trash is emptied, the oldest first.
    pub trash_free_percent: u32,
    /// The choice of running the CSI driver.
    pub csi: CsiChoice,
    /// The directory of kubelet; none: the agent finds it.
    pub kubelet_root: Option<PathBuf>,
    /// The maximum number of volumes that the CSI driver attaches; none: any number.
    pub max_volumes: Option<u32>,
    /// The address of metrics and health.
    pub metrics_listen: MetricsListen,
    /// The filter of the log.
    pub log_level: String,
    /// Text or JSON, for this agent and the processes that it starts.
    pub log_format: LogFormat,
}

/// The kubeconfig with which this node enrols in a Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KubeconfigChoice {
    /// The kubelet's, if this host has a kubelet.
    Auto,
    /// None: this node enrols with a token.
    Off,
    /// The kubeconfig at this path.
    File(PathBuf),
}

/// The manager that runs the instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InstancesChoice {
    /// Runs instances by systemd if that is PID 1.
    #[default]
    Auto,
    /// Units of systemd.
    Systemd,
    /// Processes that the agent starts.
    Children,
}

/// The choice of running the CSI driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CsiChoice {
    /// The driver runs as soon as kubelet is found.
    #[default]
    Auto,
    /// The driver runs at once.
    On,
    /// The driver never runs.
    Off,
}

/// The reason why the configuration is not usable.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// The file is not TOML, has an unknown key, or a value of the wrong type.
    #[error("{path}:{line}: {message}")]
    Content {
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        message: String,
    },
    /// No name for the node.
    #[error("this host has no usable name ({0}): set node_name in the configuration")]
    HostName(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    node_name: Option<Spanned<String>>,
    zone: Option<Spanned<String>>,
    listen: Option<Vec<Spanned<String>>>,
    tls_dir: Option<Spanned<PathBuf>>,
    kubelet_kubeconfig: Option<Spanned<String>>,
    state_dir: Option<Spanned<PathBuf>>,
    runtime_dir: Option<Spanned<PathBuf>>,
    device_dir: Option<Spanned<PathBuf>>,
    data_address: Option<Spanned<String>>,
    data_interface: Option<Spanned<String>>,
    data_network: Option<Spanned<String>>,
    data_ports: Option<Spanned<String>>,
    disks: Option<Vec<Spanned<PathBuf>>>,
    instances: InstancesChoice,
    queues: Option<Spanned<u16>>,
    queue_depth: Option<Spanned<u16>>,
    replica_timeout_ms: Option<Spanned<u32>>,
    sum_mib_per_s: Option<Spanned<u32>>,
    trash_hours: Option<Spanned<u32>>,
    trash_free_percent: Option<Spanned<u32>>,
    csi: CsiChoice,
    kubelet_root: Option<Spanned<String>>,
    max_volumes: Option<Spanned<u32>>,
    metrics_listen: Option<Spanned<String>>,
    log: LogTable,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LogTable {
    level: Option<Spanned<String>>,
    format: LogFormat,
}

/// The problem of the value at a place of the file.
struct Wrong(Range<usize>, String);

impl Config {
    /// Reads `path`; without it, the default file if that exists, else the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the file, the line and the key.
    pub fn load(path: Option<&Path>) -> Result<Config, ConfigError> {
        let optional = path.is_none();
        let path = path.unwrap_or_else(|| Path::new(DEFAULT_PATH));
        let text = match read(path) {
            Err(error) if optional && error.kind() == io::ErrorKind::NotFound => String::new(),
            other => other.map_err(|source| ConfigError::Io { path: path.to_owned(), source })?,
        };
        Config::parse(path, &text)
    }

    /// Returns true if the agent serves an address with TLS.
    #[must_use]
    pub fn listens_with_tls(&self) -> bool {
        self.listen.iter().any(|address| matches!(address, ListenAddress::Tls(_)))
    }

    /// Takes `text` as the content of the file at `path`.
    ///
    /// # Errors
    /// [`ConfigError`] names the file, the line and the key.
    pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        let content = |place: Option<Range<usize>>, message: String| {
            let end = place.map_or(0, |place| place.start.min(text.len()));
            let line = 1 + text.as_bytes()[..end].iter().filter(|byte| **byte == b'\n').count();
            ConfigError::Content { path: path.to_owned(), line, message }
        };
        let wrong = |Wrong(place, message)| content(Some(place), message);
        let mut file: File =
            toml::from_str(text).map_err(|error| content(error.span(), error.message().to_owned()))?;
        let named = unless_empty("node_name", file.node_name.take(), NodeName::new).map_err(wrong)?;
        let node_name = named.map_or_else(host_name, Ok)?;
        check(file, node_name).map_err(wrong)
    }
}

fn read(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > SIZE_MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    fs::read_to_string(path)
}

fn check(file: File, node_name: NodeName) -> Result<Config, Wrong> {
    let listen = match file.listen {
        None => vec![ListenAddress::Unix("/run/shorthorn/agent.sock".into())],
        Some(listen) => listen
            .into_iter()
            .map(|address| with("listen", address, |text| text.parse::<ListenAddress>()))
            .collect::<Result<_, _>>()?,
    };
    let disks = file.disks.unwrap_or_default().into_iter();
    let state_dir = directory("state_dir", file.state_dir, "/var/lib/shorthorn")?;
    Ok(Config {
        node_name,
        zone: unless_empty("zone", file.zone, Label::new)?,
        listen,
        tls_dir: match file.tls_dir {
            Some(dir) => with("tls_dir", dir, absolute)?,
            None => state_dir.join("tls"),
        },
        kubelet_kubeconfig: optional(
            "kubelet_kubeconfig",
            file.kubelet_kubeconfig,
            "auto",
            kubelet_kubeconfig,
        )?,
        state_dir,
        runtime_dir: directory("runtime_dir", file.runtime_dir, "/run/shorthorn")?,
        device_dir: directory("device_dir", file.device_dir, "/dev/longhorn")?,
        data: data_source(file.data_address, file.data_interface, file.data_network)?,
        data_ports: optional("data_ports", file.data_ports, "10000-14999", |text| ports(&text))?,
        disks: disks.map(|disk| with("disks", disk, absolute)).collect::<Result<_, _>>()?,
        instances: file.instances,
        queues: number("queues", file.queues, 1, 1..=MAX_QUEUES)?,
        queue_depth: number("queue_depth", file.queue_depth, 128, 1..=MAX_QUEUE_DEPTH)?,
        replica_timeout_ms: number("replica_timeout_ms", file.replica_timeout_ms, 5000, 500..=600_000)?,
        sum_mib_per_s: number("sum_mib_per_s", file.sum_mib_per_s, SUM_MIB_PER_S, 0..=SUM_MIB_PER_S_MAX)?,
        trash_hours: number("trash_hours", file.trash_hours, TRASH_HOURS, 0..=TRASH_HOURS_MAX)?,
        trash_free_percent: number(
            "trash_free_percent",
            file.trash_free_percent,
            TRASH_FREE_PERCENT,
            0..=90,
        )?,
        csi: file.csi,
        kubelet_root: optional("kubelet_root", file.kubelet_root, "", kubelet_root)?,
        max_volumes: Some(number("max_volumes", file.max_volumes, 0, 0..=MAX_VOLUMES)?)
            .filter(|max| *max > 0),
        metrics_listen: match file.metrics_listen {
            Some(text) => with("metrics_listen", text, |text| text.parse::<MetricsListen>())?,
            None => DEFAULT_METRICS,
        },
        log_level: optional("log.level", file.log.level, "info", |level| {
            shorthorn_logging::check_level(&level).map(|()| level)
        })?,
        log_format: file.log.format,
    })
}

fn with<T, U, E: ToString>(
    key: &str,
    value: Spanned<T>,
    check: impl FnOnce(T) -> Result<U, E>,
) -> Result<U, Wrong> {
    let place = value.span();
    check(value.into_inner()).map_err(|error| Wrong(place, format!("{key}: {}", error.to_string())))
}

fn optional<T, E: ToString>(
    key: &str,
    value: Option<Spanned<String>>,
    default: &str,
    check: impl FnOnce(String) -> Result<T, E>,
) -> Result<T, Wrong> {
    with(key, value.unwrap_or_else(|| Spanned::new(0..0, default.to_owned())), check)
}

/// Checks a text that may be empty, which is like an absent one.
fn unless_empty<T, E: ToString>(
    key: &str,
    value: Option<Spanned<String>>,
    check: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, Wrong> {
    optional(key, value, "", |text| nonempty(text).as_deref().map(check).transpose())
}

fn directory(key: &str, value: Option<Spanned<PathBuf>>, default: &str) -> Result<PathBuf, Wrong> {
    with(key, value.unwrap_or_else(|| Spanned::new(0..0, default.into())), absolute)
}

fn number<T: PartialOrd + std::fmt::Display>(
    key: &str,
    value: Option<Spanned<T>>,
    default: T,
    allowed: RangeInclusive<T>,
) -> Result<T, Wrong> {
    with(key, value.unwrap_or_else(|| Spanned::new(0..0, default)), |value| {
        if allowed.contains(&value) {
            return Ok(value);
        }
        Err(format!("{value} is not between {} and {}", allowed.start(), allowed.end()))
    })
}

fn data_address(text: &str) -> Result<Option<IpAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let address: IpAddr = text.parse().map_err(|_| format!("{text:?} is not an IP address"))?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(format!("{text} is not an address that other nodes could reach this one at"));
    }
    Ok(Some(address))
}

fn data_source(
    address: Option<Spanned<String>>,
    interface: Option<Spanned<String>>,
    network: Option<Spanned<String>>,
) -> Result<DataSource, Wrong> {
    let place = address.as_ref().map_or(0..0, Spanned::span);
    let address = optional("data_address", address, "", |text| data_address(&text))?;
    let interface = optional("data_interface", interface, "", |text| interface_name(&text))?;
    let network = optional("data_network", network, "", |text| match text.as_str() {
        "" => Ok(None),
        _ => IpNetwork::parse(&text).map(Some),
    })?;
    let is_filtered = interface.is_some() || network.is_some();
    match address {
        Some(_) if is_filtered => Err(Wrong(
            place,
            "data_address: use either data_address, or data_interface and data_network".to_owned(),
        )),
        Some(address) => Ok(DataSource::Fixed(address)),
        None if is_filtered => Ok(DataSource::Interfaces(InterfaceFilter { interface, network })),
        None => Ok(DataSource::Off),
    }
}

/// Checks the name of a network interface as the kernel does (dev_valid_name of net/core/dev.c).
fn interface_name(text: &str) -> Result<Option<String>, String> {
    let is_valid = text.len() <= INTERFACE_NAME_MAX_BYTES
        && !text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace())
        && text != "."
        && text != "..";
    if !is_valid {
        return Err(format!("{text:?} is not a name of an interface; for a network, use data_network"));
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

fn kubelet_root(text: String) -> Result<Option<PathBuf>, String> {
    if text.is_empty() { Ok(None) } else { absolute(text.into()).map(Some) }
}

fn kubelet_kubeconfig(text: String) -> Result<KubeconfigChoice, String> {
    match text.as_str() {
        "auto" => Ok(KubeconfigChoice::Auto),
        "off" => Ok(KubeconfigChoice::Off),
        _ => absolute(text.into()).map(KubeconfigChoice::File),
    }
}

fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let wrong = || format!("{text:?} is not a range of ports: write it like 10000-14999");
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let first: u16 = first.parse().map_err(|_| wrong())?;
    let last: u16 = last.parse().map_err(|_| wrong())?;
    if first == 0 || last < first { Err(wrong()) } else { Ok(first..=last) }
}

fn host_name() -> Result<NodeName, ConfigError> {
    let host = uname().map_err(|error| ConfigError::HostName(error.to_string()))?;
    let name = host.nodename().to_string_lossy().to_lowercase();
    NodeName::new(&name).map_err(|error| ConfigError::HostName(error.to_string()))
}

#[cfg(test)]
mod reference_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("/etc/agent.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_is_needed() {
        let config = parse("").unwrap();
        assert_eq!(config.instances, InstancesChoice::Auto);
        assert_eq!(config.node_name, host_name().unwrap());
        assert_eq!((config.zone, config.max_volumes), (None, None));
        assert_eq!(parse("max_volumes = 8").unwrap().max_volumes, Some(8));
        assert_eq!(parse("zone = \"eu-west_1.a\"").unwrap().zone, Label::new("eu-west_1.a").ok());
    }

    #[test]
    fn the_sample_says_the_defaults() {
        let sample = include_str!("../../../packaging/agent.toml");
        assert_eq!(parse(sample).unwrap(), parse("").unwrap());
        // With every key enabled the file must still be equal.
        let on = |line: &str| match line.strip_prefix('#') {
            Some(key) if !key.starts_with(' ') && key.contains('=') => key.to_owned(),
            _ => line.to_owned(),
        };
        let all: Vec<String> = sample.lines().map(on).collect();
        let mut config = parse(&all.join("\n")).unwrap();
        config.node_name = parse("").unwrap().node_name;
        assert_eq!(config, parse("").unwrap());
    }

    #[test]
    fn the_data_address_is_fixed_or_that_of_an_interface() {
        let data = |text: &str| parse(text).unwrap().data;
        assert_eq!(data(""), DataSource::Off);
        assert_eq!(data("data_address = \"fd00::1\""), DataSource::Fixed("fd00::1".parse().unwrap()));
        let filter = InterfaceFilter {
            interface: Some("eth1.7".to_owned()),
            network: Some(IpNetwork::parse("10.1.0.0/24").unwrap()),
        };
        let both = "data_interface = \"eth1.7\"\ndata_network = \"10.1.0.0/24\"";
        assert_eq!(data(both), DataSource::Interfaces(filter));
    }

    #[test]
    fn unknown_keys_are_refused_with_their_line() {
        let error = parse("node_name = \"n1\"\n\ncolour = 1\n").unwrap_err();
        assert!(error.starts_with("/etc/agent.toml:3: ") && error.contains("colour"), "{error}");
        let error = parse("[log]\nlevel = \"info\"\nloud = true\n").unwrap_err();
        assert!(error.starts_with("/etc/agent.toml:3: ") && error.contains("loud"), "{error}");
    }

    #[test]
    fn wrong_values_are_refused_with_key_and_line() {
        let cases = [
            ("\nqueues = 99", "2: queues: 99 is not between 1 and 8"),
            ("\n\nqueues = \"many\"", "3: invalid type"),
            ("state_dir = \"var\"", "1: state_dir: \"var\" is not an absolute path"),
            ("state_dir = \"/var/../etc\"", "1: state_dir: "),
            ("zone = \"-a\"", "1: zone: \"-a\" is not a tag or zone"),
            ("data_address = \"0.0.0.0\"", "1: data_address: 0.0.0.0"),
            (
                "data_interface = \"10.1.0.0/24\"",
                "1: data_interface: \"10.1.0.0/24\" is not a name of an interface",
            ),
            ("data_network = \"10.1.0.9/24\"", "1: data_network: \"10.1.0.9/24\" has bits after its prefix"),
            ("\ndata_address = \"10.1.0.9\"\ndata_interface = \"eth1\"", "2: data_address: use either"),
            ("trash_free_percent = 91", "1: trash_free_percent: 91 is not between 0 and 90"),
            ("sum_mib_per_s = 65537", "1: sum_mib_per_s: 65537 is not between 0 and 65536"),
            ("data_ports = \"9-5\"", "1: data_ports: \"9-5\""),
            ("node_name = \"A_b\"", "1: node_name: \"A_b\""),
            ("listen = [\n\"unix:/a\",\n\"tcp:0.0.0.0:1\"]", "3: listen: 0.0.0.0:1"),
            ("listen = [\"http://x\"]", "1: listen: \"http://x\""),
            ("kubelet_root = \"var\"", "1: kubelet_root: \"var\" is not an absolute path"),
            ("kubelet_kubeconfig = \"on\"", "1: kubelet_kubeconfig: \"on\" is not an absolute path"),
            ("tls_dir = \"tls\"", "1: tls_dir: \"tls\" is not an absolute path"),
            ("zone = \"a b\"", "1: zone: \"a b\" is not a tag or zone"),
            ("metrics_listen = \"9511\"", "1: metrics_listen: \"9511\""),
            ("csi = \"maybe\"", "1: unknown variant `maybe`"),
            ("instances = \"docker\"", "1: unknown variant `docker`"),
            ("[log]\nlevel = \"loud=,\"", "2: log.level: "),
        ];
        for (text, wanted) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(&format!("/etc/agent.toml:{wanted}")), "{text:?}: {error}");
        }
    }
}
