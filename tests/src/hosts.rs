//! Hosts without virtual machines: each is a network namespace with an agent in it. A controller reaches the
//! agents over their Unix sockets, and the engines reach the replicas of other hosts over links that a test
//! can cut.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use shorthorn_control::{EnginePhase, EngineSpec, EngineStatus, load_spec};

use crate::network::{Network, address};
use crate::{NbdClient, binary, engine_status, until};

const LIMIT: Duration = Duration::from_secs(120);
/// Long enough for a loaded machine to answer, short enough to be waited for in a test.
const REPLICA_TIMEOUT_MS: u32 = 2000;

/// Hosts `n0`, `n1`, … with an agent and a disk each, and a controller.
#[derive(Debug)]
pub struct Hosts {
    dir: PathBuf,
    agents: Vec<Option<Child>>,
    controller: Option<Child>,
    /// The flags for the store of the controller.
    store: Vec<String>,
    /// The number of agents that the flags name.
    named: usize,
    /// True if the agents follow the address of eth0; false if their configuration has it.
    follow: bool,
    /// The address of the controller.
    server: String,
    /// Path of shorthorn-agent.
    agent_program: PathBuf,
    // Last: its end kills all processes on the hosts.
    network: Network,
}

impl Hosts {
    /// Starts everything with its files below `dir`, whose path must be short.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start(dir: &Path, hosts: usize) -> Result<Hosts> {
        let store = dir.join("store.redb").display().to_string();
        Hosts::start_with_store(dir, hosts, hosts, vec!["--store".to_owned(), store])
    }

    /// Starts like [`Hosts::start`], with agents that follow the address of their interface.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start_following(dir: &Path, hosts: usize) -> Result<Hosts> {
        let store = vec!["--store".to_owned(), dir.join("store.redb").display().to_string()];
        Hosts::start_all(dir, hosts, (hosts, store), true)
    }

    /// Starts like [`Hosts::start`], with flags for the store of the controller. Other flags name the
    /// addresses of the first `named` agents only.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start_with_store(dir: &Path, hosts: usize, named: usize, store: Vec<String>) -> Result<Hosts> {
        Hosts::start_all(dir, hosts, (named, store), false)
    }

    fn start_all(
        dir: &Path,
        hosts: usize,
        (named, store): (usize, Vec<String>),
        follow: bool,
    ) -> Result<Hosts> {
        let network = Network::create(hosts)?;
        let agents = (0..hosts).map(|_| None).collect();
        let server = format!("unix://{}", dir.join("ctl.sock").display());
        let (dir, controller) = (dir.to_owned(), None);
        let agent_program = binary("shorthorn-agent")?;
        let mut hosts =
            Hosts { dir, agents, controller, store, named, follow, server, agent_program, network };
        for host in 0..hosts.agents.len() {
            hosts.write_config(host)?;
            hosts.start_agent(host)?;
        }
        hosts.start_controller()?;
        for host in 0..hosts.agents.len() {
            let disk = hosts.host_dir(host).join("disk");
            hosts.ctl(&["disk", "add", &name(host), text(&disk)?])?;
        }
        Ok(hosts)
    }

    fn host_dir(&self, host: usize) -> PathBuf {
        self.dir.join(name(host))
    }

    fn write_config(&self, host: usize) -> Result<()> {
        let dir = self.host_dir(host);
        fs::create_dir_all(dir.join("disk"))?;
        let path = |name: &str| dir.join(name).display().to_string();
        let config = format!(
            "node_name = \"{}\"\nlisten = [\"unix:{}\"]\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
             device_dir = \"{}\"\ninstances = \"children\"\ncsi = \"off\"\n{}\n\
             replica_timeout_ms = {REPLICA_TIMEOUT_MS}\n",
            name(host),
            path("sock"),
            path("s"),
            path("r"),
            path("dev"),
            if self.follow {
                "data_interface = \"eth0\"".to_owned()
            } else {
                format!("data_address = \"{}\"", address(host))
            }
        );
        Ok(fs::write(dir.join("agent.toml"), config)?)
    }

    /// Returns a command on a host: with its network.
    fn on(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network.file(host).display())).arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// Installs another build of the agent's program on all hosts. Agents that are started later run it.
    /// Engines and replicas keep the former one.
    ///
    /// # Errors
    /// The program cannot be copied.
    pub fn install_other_build(&mut self) -> Result<()> {
        let installed = self.dir.join("shorthorn-agent");
        let copy = self.dir.join("shorthorn-agent.new");
        fs::copy(&self.agent_program, &copy)?;
        // Bytes behind the last section of an ELF file do not matter.
        fs::OpenOptions::new().append(true).open(&copy)?.write_all(b"another build")?;
        fs::rename(&copy, &installed)?;
        self.agent_program = installed;
        Ok(())
    }

    /// Installs the first build of the agent's program again, in the place of the other one. Agents that run
    /// are not started again.
    ///
    /// # Errors
    /// No other build was installed, or the program cannot be copied.
    pub fn install_first_build(&self) -> Result<()> {
        let first = binary("shorthorn-agent")?;
        ensure!(self.agent_program != first, "no other build is installed");
        let copy = self.dir.join("shorthorn-agent.old");
        fs::copy(first, &copy)?;
        Ok(fs::rename(&copy, &self.agent_program)?)
    }

    /// Starts the agent of a host.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_agent(&mut self, host: usize) -> Result<()> {
        let config = self.host_dir(host).join("agent.toml");
        let child = self.on(host, &self.agent_program).args(["serve", "--config"]).arg(config).spawn()?;
        self.agents[host] = Some(child);
        Ok(())
    }

    /// Kills the agent of a host with SIGKILL. Its child processes continue.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_agent(&mut self, host: usize) -> Result<()> {
        kill(self.agents[host].take().context("the agent does not run")?)
    }

    /// Starts the controller and waits until it answers.
    ///
    /// # Errors
    /// It does not.
    pub fn start_controller(&mut self) -> Result<()> {
        self.controller = Some(self.controller_command(&self.server)?.spawn()?);
        self.await_controller()
    }

    /// Starts the controller again if it has ended, as systemd does.
    ///
    /// # Errors
    /// It does not answer.
    pub fn keep_controller(&mut self) -> Result<()> {
        let controller = self.controller.as_mut().context("the controller does not run")?;
        if let Some(status) = controller.try_wait()? {
            println!("the controller has ended with {status}; it is started again");
            return self.start_controller();
        }
        self.await_controller()
    }

    /// Takes another controller, which was started as [`Hosts::controller_command`] says, for the one to ask.
    ///
    /// # Errors
    /// It does not answer.
    pub fn take_controller(&mut self, controller: Child, listen: &str) -> Result<()> {
        self.controller = Some(controller);
        listen.clone_into(&mut self.server);
        self.await_controller()
    }

    fn await_controller(&self) -> Result<()> {
        until("controller that answers", LIMIT, || self.try_ctl(&["node", "list"]).map(Some)).map(drop)
    }

    /// Returns a controller of these hosts that listens there.
    ///
    /// # Errors
    /// The program cannot be built.
    pub fn controller_command(&self, listen: &str) -> Result<Command> {
        let mut command = Command::new(binary("shorthorn-controller")?);
        command.arg("serve").args(&self.store);
        command.args(["--listen", listen]).stdin(Stdio::null());
        // These tests do not depend on the free space of this machine's disk.
        command.args(["--storage-minimal-available-percentage", "0"]);
        for host in 0..self.named {
            command.args(["--node", &format!("{}={}", name(host), agent_url(&self.dir, host))]);
        }
        Ok(command)
    }

    /// Kills the controller with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_controller(&mut self) -> Result<()> {
        kill(self.controller.take().context("the controller does not run")?)
    }

    /// Ends the controller in order: it gives its lease back.
    ///
    /// # Errors
    /// It does not run, or does not end.
    pub fn stop_controller(&mut self) -> Result<()> {
        let mut controller = self.controller.take().context("the controller does not run")?;
        crate::signal(i32::try_from(controller.id())?, Signal::SIGTERM)?;
        let status = controller.wait()?;
        ensure!(status.success(), "the controller has ended with {status}");
        Ok(())
    }

    fn try_ctl(&self, arguments: &[&str]) -> Result<String> {
        let output = self.ctl_command(arguments)?.output().context("starting shorthornctl")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "shorthornctl {}: {}", arguments.join(" "), stderr.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns a shorthornctl for these hosts.
    ///
    /// # Errors
    /// The program does not exist.
    pub fn ctl_command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(binary("shorthornctl")?);
        command.env("SHORTHORN_SERVER", &self.server).args(arguments).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs shorthornctl until it works: agents and controller may just have been started.
    ///
    /// # Errors
    /// It never does.
    pub fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let what = format!("answer to shorthornctl {}", arguments.join(" "));
        until(&what, LIMIT, || self.try_ctl(arguments).map(Some))
    }

    /// Returns the message of shorthornctl, which must refuse.
    ///
    /// # Errors
    /// The command succeeds.
    pub fn refused(&self, arguments: &[&str]) -> Result<String> {
        match self.try_ctl(arguments) {
            Ok(printed) => bail!("shorthornctl {} is not refused: {printed}", arguments.join(" ")),
            Err(error) => Ok(error.to_string()),
        }
    }

    /// Returns the output of shorthornctl for a volume.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn inspect(&self, volume: &str) -> Result<Value> {
        let shown = self.ctl(&["volume", "inspect", volume, "--output", "json"])?;
        serde_json::from_str(&shown).with_context(|| format!("reading {shown}"))
    }

    /// Cuts the link of a host, or heals it.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_link(&self, host: usize, up: bool) -> Result<()> {
        self.network.set_link(host, up)
    }

    /// Limits the speed of a host's link in each direction.
    ///
    /// # Errors
    /// The host does not exist, or the kernel cannot do that.
    pub fn limit_rate(&self, host: usize, mbit_per_s: u32) -> Result<()> {
        self.network.limit_rate(host, mbit_per_s)
    }

    /// Sets the interface of a host down or up.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_interface(&self, host: usize, up: bool) -> Result<()> {
        self.network.set_interface(host, up)
    }

    /// Gives the interface of a host another address, with its prefix, instead of all that it has.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_address(&self, host: usize, address: &str) -> Result<()> {
        self.network.set_address(host, address)
    }

    /// Returns the processes of a volume on a host whose command line has all these words: `engine`, or
    /// `replica`.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn processes(&self, host: usize, role: &str) -> Result<Vec<i32>> {
        let is_one = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes())
        };
        Ok(self.network.processes(host)?.into_iter().filter(is_one).collect())
    }

    /// Returns the control socket of the engine of a volume on a host.
    #[must_use]
    pub fn engine_control(&self, host: usize, volume: &str) -> PathBuf {
        self.host_dir(host).join("r/engine").join(format!("{volume}.control"))
    }

    /// Returns the status of a volume's engine on a host.
    ///
    /// # Errors
    /// It does not answer.
    pub fn engine_status(&self, host: usize, volume: &str) -> Result<EngineStatus> {
        engine_status(&self.engine_control(host, volume))
    }

    /// Returns a client of a volume on a host.
    ///
    /// # Errors
    /// Its engine does not answer.
    pub fn client(&self, host: usize, volume: &str) -> Result<NbdClient> {
        let socket = self.host_dir(host).join("r/engine").join(format!("{volume}.nbd"));
        NbdClient::connect(&socket, volume, LIMIT)
    }

    /// Starts an engine of the next attachment on another host by hand. A controller that does not reach
    /// the host of the first one does the same.
    ///
    /// # Errors
    /// The first host has never had the volume, or the engine does not serve.
    pub fn attach_by_hand(&self, volume: &str, from: usize, to: usize) -> Result<HandMadeEngine> {
        let spec_file = self.host_dir(from).join("s/instances/engine").join(format!("{volume}.json"));
        let mut spec: EngineSpec = load_spec(&spec_file)?;
        let dir = self.host_dir(to).join("by-hand");
        fs::create_dir_all(&dir)?;
        spec.attach += 1;
        spec.state_file = dir.join("state.json");
        spec.control_socket = dir.join("control");
        spec.frontend_socket = dir.join("nbd");
        for replica in &mut spec.replicas {
            // These hosts share sockets of files, unlike real hosts.
            replica.addresses.retain(|address| address.starts_with("tcp:"));
            replica.local = false;
        }
        for (host, replica) in self.tcp_addresses(volume)? {
            let known = spec.replicas.iter_mut().find(|known| known.replica.to_string() == replica);
            let known = known.with_context(|| format!("replica {replica} is not the engine's"))?;
            known.addresses = vec![host];
        }
        let file = dir.join("spec.json");
        shorthorn_control::store_spec(&file, &spec)?;
        let child = self.on(to, &self.agent_program).args(["engine", "--spec"]).arg(file).spawn()?;
        Ok(HandMadeEngine { child, dir, volume: volume.to_owned() })
    }

    /// Returns the addresses of a volume's replicas for engines on other hosts, with their ids.
    fn tcp_addresses(&self, volume: &str) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for host in 0..self.agents.len() {
            let folder = self.host_dir(host).join("s/instances/replica");
            for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
                let spec: shorthorn_control::ReplicaSpec = load_spec(&entry?.path())?;
                let address = spec.data_address.filter(|_| spec.volume.as_str() == volume);
                found.extend(address.map(|address| (format!("tcp:{address}"), spec.replica.to_string())));
            }
        }
        Ok(found)
    }

    /// Returns the replica directories of a volume, of all hosts.
    ///
    /// # Errors
    /// A disk cannot be read.
    pub fn directories(&self, volume: &str) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for host in 0..self.agents.len() {
            for entry in fs::read_dir(self.host_dir(host).join("disk/replicas"))? {
                let path = entry?.path();
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if name.strip_prefix(volume).is_some_and(|rest| rest.starts_with('-')) {
                    found.push(path);
                }
            }
        }
        Ok(found)
    }

    /// Detaches a volume and waits until none of its processes is left.
    ///
    /// # Errors
    /// It stays.
    pub fn detach(&self, volume: &str) -> Result<()> {
        self.ctl(&["volume", "detach", volume])?;
        until("end of all processes", LIMIT, || {
            for host in 0..self.agents.len() {
                let left = [self.processes(host, "engine")?, self.processes(host, "replica")?].concat();
                ensure!(left.is_empty(), "{left:?} on {}", name(host));
            }
            Ok(Some(()))
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let agents = self.agents.iter_mut().filter_map(Option::take);
        for child in agents.chain(self.controller.take()) {
            let _ = kill(child);
        }
    }
}

/// An engine that no agent knows.
#[derive(Debug)]
pub struct HandMadeEngine {
    child: Child,
    dir: PathBuf,
    volume: String,
}

impl HandMadeEngine {
    /// Returns a client of it, if it serves already.
    ///
    /// # Errors
    /// It has ended, or its socket does not work.
    pub fn try_client(&mut self) -> Result<Option<NbdClient>> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the engine has ended with {status}");
        }
        match self.status() {
            Ok(status) if status.phase == EnginePhase::Serving => {
                NbdClient::connect(&self.dir.join("nbd"), &self.volume, LIMIT).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the status of the engine.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<EngineStatus> {
        engine_status(&self.dir.join("control"))
    }
}

impl Drop for HandMadeEngine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the address of a host's agent; `dir` is the common directory of all agents.
#[must_use]
pub fn agent_url(dir: &Path, host: usize) -> String {
    format!("unix://{}", dir.join(name(host)).join("sock").display())
}

/// Returns the node name that the agent of a host uses.
#[must_use]
pub fn name(host: usize) -> String {
    format!("n{host}")
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

fn kill(mut child: Child) -> Result<()> {
    child.kill()?;
    child.wait()?;
    Ok(())
}
