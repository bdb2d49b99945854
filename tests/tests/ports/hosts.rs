//! Two hosts with TLS, each a network namespace of this machine.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use shorthorn_tests::network::{Network, address};
use shorthorn_tests::{binary, until, until_whole};

use crate::scan::{Listening, inside, listening};
use crate::{AGENT, CONTROLLER, LIMIT, VOLUME};

/// Two hosts with TLS: a controller on the first, an agent on each.
pub struct Hosts {
    children: Vec<Child>,
    pub token: String,
    pub dir: tempfile::TempDir,
    // Last: its end kills all processes on the hosts.
    pub network: Network,
}

impl Hosts {
    pub fn start() -> Result<Hosts> {
        let dir = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let mut hosts =
            Hosts { children: Vec::new(), token: String::new(), dir, network: Network::create(2)? };
        let (store, socket) = (hosts.path("store.redb"), format!("unix://{}", hosts.path("ctl").display()));
        let mut controller = hosts.on(0, "shorthorn-controller")?;
        controller.arg("serve").arg("--store").arg(store).args(["--listen", &socket]);
        controller.args(["--tls-listen", &format!("{}:{CONTROLLER}", address(0))]);
        controller.args(["--storage-minimal-available-percentage", "0"]);
        hosts.children.push(controller.spawn()?);
        for host in 0..2 {
            hosts.start_agent(host)?;
        }
        hosts.token = hosts.ctl(&["node", "token", "spare"])?.trim().to_owned();
        for place in ["n0", "n1"] {
            let disk = hosts.path(place).join("disk");
            hosts.ctl(&["disk", "add", place, disk.to_str().context("a path that is not UTF-8")?])?;
        }
        Ok(hosts)
    }

    /// Starts the agent of a host, which joins by a token.
    fn start_agent(&mut self, host: usize) -> Result<()> {
        let (name, ip) = (format!("n{host}"), address(host));
        let dir = self.path(&name);
        fs::create_dir_all(dir.join("disk"))?;
        let path = |name: &str| dir.join(name).display().to_string();
        let config = format!(
            "node_name = \"{name}\"\nlisten = [\"unix:{}\", \"tcp:{ip}:{AGENT}\"]\ndata_address = \"{ip}\"\n\
             state_dir = \"{}\"\nruntime_dir = \"{}\"\ndevice_dir = \"{}\"\ntls_dir = \"{}\"\n\
             instances = \"children\"\ncsi = \"off\"\n",
            path("sock"),
            path("s"),
            path("r"),
            path("dev"),
            path("tls"),
        );
        let file = dir.join("agent.toml");
        fs::write(&file, config)?;
        let token = self.ctl(&["node", "token", &name])?;
        let controller = format!("{}:{CONTROLLER}", address(0));
        let mut join = self.on(host, "shorthorn-agent")?;
        join.args(["join", "--token", token.trim(), "--controller", &controller, "--config"]).arg(&file);
        ensure!(join.status()?.success(), "node {name} does not join");
        let agent = self.on(host, "shorthorn-agent")?.args(["serve", "--config"]).arg(&file).spawn()?;
        self.children.push(agent);
        self.ctl(&["node", "add", &name, "--address", &format!("{ip}:{AGENT}")]).map(drop)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn on(&self, host: usize, program: &str) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network.file(host).display())).arg(binary(program)?);
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Runs shorthornctl until it works.
    pub fn ctl(&self, arguments: &[&str]) -> Result<String> {
        until(&format!("answer to shorthornctl {}", arguments.join(" ")), LIMIT, || {
            let mut command = Command::new(binary("shorthornctl")?);
            command.arg("--server").arg(format!("unix://{}", self.path("ctl").display())).args(arguments);
            let output = command.stdin(Stdio::null()).output()?;
            let stderr = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{}", stderr.trim());
            Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
        })
    }

    pub fn engine(&self) -> PathBuf {
        self.path("n0/r/engine").join(format!("{VOLUME}.control"))
    }

    /// Creates a volume with a replica on each host, and attaches it to the first.
    pub fn serve_volume(&self) -> Result<()> {
        self.ctl(&[
            "volume",
            "create",
            VOLUME,
            "--size",
            "64MiB",
            "--frontend",
            "socket",
            "--replicas",
            "2",
        ])?;
        self.ctl(&["volume", "attach", VOLUME, "--node", "n0"])?;
        until_whole(&self.engine(), LIMIT).map(drop)
    }

    /// Returns the secret of the volume, as the engine's spec file has it.
    pub fn volume_secret(&self) -> Result<String> {
        let file = self.path("n0/s/instances/engine").join(format!("{VOLUME}.json"));
        let spec: serde_json::Value = serde_json::from_slice(&fs::read(&file)?)?;
        let secret = spec["secret"].as_str().filter(|secret| secret.len() >= 32);
        secret.map(str::to_owned).with_context(|| format!("{} has no secret as a text", file.display()))
    }

    /// Does `work` in the network of a host.
    pub fn inside<T: Send>(&self, host: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(&self.network, host, work)
    }

    /// Returns the listening sockets of a host.
    pub fn listening(&self, host: usize) -> Result<Vec<Listening>> {
        self.inside(host, listening)
    }

    /// Returns the ports of a host that other hosts reach.
    pub fn reachable(&self, host: usize) -> Result<Vec<SocketAddr>> {
        let addresses = self.listening(host)?.into_iter().map(|socket| socket.address);
        Ok(addresses.filter(|address| !address.ip().is_loopback()).collect())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
