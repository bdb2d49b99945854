//! The commands of pages for users, as each page has them and in its order. They run against real agents,
//! engines and replicas on hosts that are network namespaces of this machine. Needs root.

mod backup;
mod daily;
mod install_hosts;
mod local;
mod lost_node;
mod maintenance;
mod replace_disk;
mod troubleshooting;
mod upgrade;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_testkit::docs::Script;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{until, until_whole};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";

struct Cluster {
    hosts: Hosts,
    folder: tempfile::TempDir,
}

impl Cluster {
    fn start(hosts: usize) -> Result<Cluster> {
        let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        Ok(Cluster { hosts: Hosts::start(folder.path(), hosts)?, folder })
    }

    /// Makes [`VOLUME`] and attaches it to a host.
    fn attach_new(&self, replicas: &str, host: usize) -> Result<()> {
        self.attach_new_named(VOLUME, replicas, host)
    }

    fn attach_new_named(&self, volume: &str, replicas: &str, host: usize) -> Result<()> {
        let size = ["--size", "64MiB", "--frontend", "socket", "--replicas", replicas];
        self.hosts.ctl(&[&["volume", "create", volume][..], &size].concat())?;
        self.hosts.ctl(&["volume", "attach", volume, "--node", &name(host)])?;
        until_whole(&self.hosts.engine_control(host, volume), LIMIT)?;
        self.until_shown(volume, "healthy volume", |shown| shown["robustness"] == "healthy").map(drop)
    }

    fn until_shown(&self, volume: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
        until(what, LIMIT, || {
            let shown = self.hosts.inspect(volume)?;
            ensure!(is_so(&shown), "{shown:#}");
            Ok(Some(shown))
        })
    }

    /// Returns the nodes of the replicas of a volume, sorted.
    fn nodes_of(&self, volume: &str) -> Result<Vec<String>> {
        let shown = self.hosts.inspect(volume)?;
        let replicas = shown["replicas"].as_array().context("no replicas")?.iter();
        let mut nodes: Vec<String> =
            replicas.filter_map(|replica| Some(replica["nodeID"].as_str()?.to_owned())).collect();
        nodes.sort();
        Ok(nodes)
    }

    /// Returns a host other than the first one that has a replica of [`VOLUME`].
    fn other_host(&self) -> Result<usize> {
        let nodes = self.nodes_of(VOLUME)?;
        (1..3).find(|host| nodes.contains(&name(*host))).with_context(|| format!("only {nodes:?}"))
    }

    /// Returns the directory of the disk of a host.
    fn disk(&self, host: usize) -> String {
        self.folder.path().join(name(host)).join("disk").display().to_string()
    }

    /// Waits until the controller shows a node as ready, or as not ready.
    fn until_ready(&self, host: usize, ready: bool) -> Result<()> {
        until("state of the node", LIMIT, || {
            let list: Value = serde_json::from_str(&self.hosts.ctl(&["node", "list", "-o", "json"])?)?;
            let nodes = list.as_array().context("no list")?.iter();
            let node = nodes.clone().find(|node| node["name"] == name(host)).context("no such node")?;
            let conditions = node["conditions"].as_array().context("no conditions")?.iter();
            let state = conditions.clone().find(|condition| condition["type"] == "Ready");
            ensure!(state.is_some_and(|state| state["status"] == ready), "{node:#}");
            Ok(Some(()))
        })
    }
}

/// A page whose commands a test runs.
struct Page {
    script: Script,
}

impl Page {
    fn read(page: &str, test: &str) -> Result<Page> {
        Ok(Page { script: Script::read(page, test)? })
    }

    /// Runs the next command, a shorthornctl that ends with this code, with further arguments.
    fn run(&mut self, cluster: &Cluster, start: &str, further: &[&str], code: i32) -> Result<String> {
        let words = self.script.next(&format!("shorthornctl {start}"))?;
        let words = words.iter().skip(1).map(String::as_str).chain(further.iter().copied());
        let mut command = cluster.hosts.ctl_command(&words.collect::<Vec<_>>())?;
        let output = command.current_dir(cluster.folder.path()).output()?;
        ended_with(&output, start, code)
    }

    /// Runs the next command, a shorthornctl that succeeds.
    fn ctl(&mut self, cluster: &Cluster, start: &str) -> Result<String> {
        self.run(cluster, start, &[], 0)
    }

    /// Runs the next command, a shorthornctl, at a terminal on which `answer` is typed.
    fn at_terminal(&mut self, cluster: &Cluster, start: &str, answer: &str) -> Result<String> {
        let words = self.script.next(&format!("shorthornctl {start}"))?;
        let words: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
        let called = cluster.hosts.ctl_command(&words)?;
        let line = [called.get_program()].into_iter().chain(called.get_args());
        let line: Vec<String> = line.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        // util-linux: a terminal for the command.
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &line.join(" "), "/dev/null"]);
        command.envs(called.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting script")?;
        writeln!(child.stdin.take().context("no standard input")?, "{answer}")?;
        let printed = ended_with(&child.wait_with_output()?, start, 0)?;
        ensure!(printed.contains("Type its name to continue"), "{start} does not ask: {printed}");
        Ok(printed)
    }
}

/// Returns both outputs of a command that ended with this code.
fn ended_with(output: &Output, command: &str, code: i32) -> Result<String> {
    let printed = [&output.stdout[..], &output.stderr[..]].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    ensure!(output.status.code() == Some(code), "{command}: {}, not {code}\n{printed}", output.status);
    Ok(printed)
}

/// Runs a program of the system, which has to succeed.
fn system(words: &[String], folder: &Path) -> Result<String> {
    let (program, arguments) = words.split_first().context("no command")?;
    let output = Command::new(program).args(arguments).current_dir(folder).stdin(Stdio::null()).output();
    ended_with(&output.with_context(|| format!("starting {program}"))?, program, 0)
}
