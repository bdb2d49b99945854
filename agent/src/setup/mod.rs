//! `shorthorn-agent setup`: from the installed package to a node that serves.
//!
//! The command writes agent.toml if that is still the packaged file, and makes the directories of the disks.
//! With a token it gets a certificate. Then it starts the units and checks the host. It can be repeated after
//! each interruption.

mod plan;

use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use shorthorn_pki::{JoinToken, Trust};

use crate::check::{self, Level};
use crate::cli::{JoinArgs, SetupArgs};
use crate::enrol::file_in;
use crate::join;
use crate::on_host::files;
use crate::serve::config::{Config, CsiChoice, DEFAULT_PATH};
use crate::serve::paths::absolute;
use crate::serve::tls::now;
use plan::{Plan, Wanted};

const AGENT_UNIT: &str = "shorthorn-agent.service";
/// The sockets of the CSI driver.
const SOCKET_UNITS: [&str; 2] = ["shorthorn-agent-csi.socket", "shorthorn-agent-registration.socket"];
/// Addresses for documentation (RFC 5737, RFC 3849). Nothing is sent there.
const ELSEWHERE: [(&str, &str); 2] = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
/// The mode of a new configuration file, as the package has it.
const CONFIG_MODE: u32 = 0o644;

/// Sets this node up. Returns the exit code: that of the check.
///
/// # Errors
/// A step has failed, and the later ones were not taken.
pub fn setup(args: &SetupArgs) -> anyhow::Result<u8> {
    let file = args.config.clone().unwrap_or_else(|| DEFAULT_PATH.into());
    let disks = args.disks.iter().map(|disk| absolute(disk.clone())).collect::<Result<Vec<_>, _>>();
    let disks = disks.map_err(anyhow::Error::msg).context("--disk")?;
    let found = match fs::read_to_string(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.with_context(|| file.display().to_string())?,
    };
    let address = match args.address {
        Some(address) => address,
        None => own_address()?,
    };
    let wanted = Wanted {
        node_name: args.node_name.as_deref(),
        address,
        data_interface: args.data_interface.as_deref(),
        disks: &disks,
    };
    let plan = plan::plan(&found, &wanted).with_context(|| file.display().to_string())?;
    let text = match &plan {
        Plan::Write(text) => text,
        Plan::Keep => &found,
    };
    let config = Config::parse(&file, text)?;
    say(format_args!("this is node {} at {address}", config.node_name))?;
    let setup = Setup { args, file: &file, config: &config };
    if args.dry_run {
        return setup.show(&plan).map(|()| 0);
    }
    setup.make_disks()?;
    setup.write(&plan)?;
    setup.join()?;
    setup.start()?;
    setup.check()
}

struct Setup<'a> {
    args: &'a SetupArgs,
    file: &'a Path,
    config: &'a Config,
}

impl Setup<'_> {
    /// Says which steps would be taken.
    fn show(&self, plan: &Plan) -> anyhow::Result<()> {
        for disk in self.config.disks.iter().filter(|disk| !disk.exists()) {
            say(format_args!("would create the directory {}", disk.display()))?;
        }
        if let Plan::Write(text) = plan {
            say(format_args!("would write {}:", self.file.display()))?;
            let is_set = |line: &&str| !line.is_empty() && !line.starts_with('#');
            for line in text.lines().filter(is_set) {
                say(format_args!("    {line}"))?;
            }
        }
        if let Some(controller) = &self.args.controller
            && self.trust_of_certificate().is_none()
        {
            say(format_args!("would join the cluster of {controller}"))?;
        }
        say(format_args!("would enable and start {}", self.units().join(" ")))
    }

    fn make_disks(&self) -> anyhow::Result<()> {
        for disk in self.config.disks.iter().filter(|disk| !disk.exists()) {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(disk);
            made.with_context(|| disk.display().to_string())?;
            say(format_args!("created the directory {}", disk.display()))?;
        }
        Ok(())
    }

    fn write(&self, plan: &Plan) -> anyhow::Result<()> {
        let Plan::Write(text) = plan else {
            return say(format_args!("{} has these settings already", self.file.display()));
        };
        let mode = fs::metadata(self.file).map_or(CONFIG_MODE, |found| found.permissions().mode() & 0o777);
        files::put(self.file, text.as_bytes(), mode)?;
        say(format_args!("wrote {}", self.file.display()))
    }

    fn join(&self) -> anyhow::Result<()> {
        let (Some(token), Some(controller)) = (&self.args.token, &self.args.controller) else {
            return Ok(());
        };
        if let Some(trust) = self.trust_of_certificate() {
            let pin = join::token_of(token)?.parse::<JoinToken>()?.pin();
            let file = file_in(&self.config.tls_dir);
            ensure!(
                trust.pins().contains(&pin),
                "this node has a certificate of cluster {}, and the token is of another cluster: release the \
                 node there, and then remove {} to join",
                trust.cluster(),
                file.display()
            );
            return say("this node has a certificate already: the token is not used");
        }
        let config = Some(self.file.to_owned());
        say(join::join(&JoinArgs { token: token.clone(), controller: controller.clone(), config })?)
    }

    /// Returns the CAs of the valid certificate of this node; none if it has no such certificate.
    fn trust_of_certificate(&self) -> Option<Trust> {
        let bundle = shorthorn_pki::load(&file_in(&self.config.tls_dir)).ok().flatten()?;
        let identity = bundle.identity?;
        (!identity.certificate().is_expired(now())).then_some(bundle.trust)
    }

    /// Returns the units. A host that joins by a token has no kubelet, which the sockets are for.
    fn units(&self) -> Vec<&'static str> {
        let has_sockets = match self.config.csi {
            CsiChoice::On => true,
            CsiChoice::Auto => self.args.token.is_none(),
            CsiChoice::Off => false,
        };
        SOCKET_UNITS.into_iter().filter(|_| has_sockets).chain([AGENT_UNIT]).collect()
    }

    /// Starts the units with the new settings. systemd refuses to start a socket whose service runs. Engines
    /// and replicas are units of their own, which continue.
    fn start(&self) -> anyhow::Result<()> {
        let units = self.units();
        systemctl(&["stop", AGENT_UNIT])?;
        systemctl(&[&["enable", "--now"][..], &units[..]].concat())?;
        say(format_args!("enabled and started {}", units.join(" ")))
    }

    /// Checks the host. Returns the exit code of the command check.
    fn check(&self) -> anyhow::Result<u8> {
        let findings = check::findings(Some(self.file));
        let ill: Vec<_> = findings.iter().filter(|finding| finding.level != Level::Passed).cloned().collect();
        if ill.is_empty() {
            say("all checks of this host pass")?;
        } else {
            say(check::text(&ill).trim_end())?;
        }
        Ok(check::exit_code(&ill))
    }
}

/// Writes a line about a step.
fn say(line: impl Display) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{line}").context("standard output")
}

/// Returns the address of this host for connections to others: that of the default route.
fn own_address() -> anyhow::Result<IpAddr> {
    for (any, elsewhere) in ELSEWHERE {
        let found = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(elsewhere)?;
            socket.local_addr()
        });
        if let Ok(found) = found
            && !found.ip().is_loopback()
            && !found.ip().is_unspecified()
        {
            return Ok(found.ip());
        }
    }
    bail!("this host has no default route: give the address of this node by --address")
}

fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("systemctl").args(arguments).stdin(Stdio::null()).output();
    let output = output.context("systemctl: without systemd, run shorthorn-agent serve")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let call = arguments.join(" ");
    ensure!(
        output.status.success(),
        "systemctl {call}: {}; journalctl -u {AGENT_UNIT} has the log of the agent",
        said.trim()
    );
    Ok(())
}
