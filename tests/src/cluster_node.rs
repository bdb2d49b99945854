//! A node of a cluster: a virtual machine with the programs and units installed as by a package. The
//! controller reaches its agent on a port of this host. The test reaches the agent's sockets for kubelet in
//! the same way.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use shorthorn_testkit::free_port;
use shorthorn_vmkit::{HOST_SIDE, Kernel, Lan};

use crate::{Caller, VmHost, until};

/// The socket that the controller calls. To a port of this host it speaks without TLS.
const AGENT: &str = "/run/shorthorn/agent.sock";
/// The sockets that kubelet calls.
const CSI: &str = "/var/lib/kubelet/plugins/csi.shorthorn.io/csi.sock";
const REGISTRATION: &str = "/var/lib/kubelet/plugins_registry/shorthorn@csi.shorthorn.io-reg.sock";
const AGENT_PORT: u16 = 9501;
const CSI_PORT: u16 = 9502;
const REGISTRATION_PORT: u16 = 9503;
/// For the whole boot of an emulated machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Emulated processors are slow: a replica that needs longer than the default is not dead there.
const REPLICA_TIMEOUT_MS: u32 = 20_000;

/// A node, gone when dropped.
#[derive(Debug)]
pub struct ClusterNode {
    /// The machine.
    pub host: VmHost,
    name: String,
    agent_port: u16,
    csi_port: u16,
    registration_port: u16,
    /// CSI, and the registration, of its agent.
    pub(crate) csi: Caller,
    pub(crate) registration: Caller,
}

impl ClusterNode {
    /// Starts a node that reaches the others on `lan`.
    ///
    /// # Errors
    /// The machine does not start, or the agent in it.
    pub fn start(name: &str, lan: &Lan) -> Result<ClusterNode> {
        let host = VmHost::bare(VmHost::options(Kernel::Ublk).name(name).lan(lan))?;
        let (agent_port, csi_port, registration_port) = (free_port()?, free_port()?, free_port()?);
        let (csi, registration) = (Caller::tcp(csi_port)?, Caller::tcp(registration_port)?);
        let name = name.to_owned();
        let node = ClusterNode { host, name, agent_port, csi_port, registration_port, csi, registration };
        node.configure()?;
        node.open_ways()?;
        Ok(node)
    }

    fn configure(&self) -> Result<()> {
        let address = self.host.vm.lan_address().context("the machine is on no network")?;
        let config = format!(
            "node_name = \"{}\"\nlisten = [\"unix:{AGENT}\"]\n\
             data_address = \"{address}\"\nreplica_timeout_ms = {REPLICA_TIMEOUT_MS}\n",
            self.name
        );
        // The directory of kubelet exists before an agent runs.
        let script = format!(
            "mkdir -p /etc/shorthorn /var/lib/kubelet/plugins_registry /var/lib/kubelet/pods\n\
             cat > /etc/shorthorn/agent.toml <<'END'\n{config}END\n\
             systemd-tmpfiles --create shorthorn.conf; systemctl daemon-reload; udevadm control --reload\n\
             systemctl enable shorthorn-agent-csi.socket shorthorn-agent-registration.socket \
             shorthorn-agent.service\nsync"
        );
        self.host.sh(&script)?;
        let started = "systemctl start shorthorn-agent-csi.socket shorthorn-agent-registration.socket && \
                       systemctl start shorthorn-agent.service";
        let outcome = self.host.vm.run(started)?;
        if !outcome.success() {
            bail!("the agent does not start:\n{outcome}\n{}", self.host.journal());
        }
        Ok(())
    }

    /// Relays to the sockets of the agent, as nothing but a port can be reached from outside.
    fn open_ways(&self) -> Result<()> {
        let relay = |port: u16, socket: &str| {
            format!(
                "systemd-run --quiet --unit=relay-{port} \
                 socat TCP-LISTEN:{port},bind={HOST_SIDE},fork,reuseaddr UNIX-CONNECT:{socket}\n"
            )
        };
        let relays = [(AGENT_PORT, AGENT), (CSI_PORT, CSI), (REGISTRATION_PORT, REGISTRATION)];
        self.host.sh(&relays.map(|(port, socket)| relay(port, socket)).concat())?;
        for (ours, theirs) in [
            (self.agent_port, AGENT_PORT),
            (self.csi_port, CSI_PORT),
            (self.registration_port, REGISTRATION_PORT),
        ] {
            self.host.vm.forward(ours, theirs)?;
        }
        Ok(())
    }

    /// Returns the `node_name` of the agent.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the agent for the controller.
    #[must_use]
    pub fn agent_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.agent_port)
    }

    /// Ends it without a word, as a power cut does.
    ///
    /// # Errors
    /// It is off.
    pub fn lose(&mut self) -> Result<()> {
        self.host.vm.power_cut()
    }

    /// Boots the node again with its disks; enabled units start by themselves.
    ///
    /// # Errors
    /// It does not come back.
    pub fn boot_again(&mut self) -> Result<()> {
        self.host.vm.cold_start()?;
        self.open_ways()?;
        until("agent after the boot", LIMIT, || {
            self.host.vm.sh("systemctl is-active shorthorn-agent.service").map(Some)
        })
        .map(drop)
        .with_context(|| self.host.journal())
    }
}
