//! Checks the setup of a cluster, as far as the controller and its agents know it. Each check has its remedy.

use std::collections::BTreeMap;

use shorthorn_types::status::{CheckOutcome, Frontend};

use crate::left_out_objects::LeftOut;
use crate::objects::{ConditionType, Key, Node, Robustness, Volume};
use crate::observed::{AgentInfo, Agents, Detail, ObservedAgent};
use crate::scheduler::SchedulingLimits;
use crate::{ClusterState, NodeName};

/// The most findings of one check that are listed; more are counted in the last one.
const FINDINGS_MAX: usize = 20;

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The name for programs.
    pub name: &'static str,
    /// The subject of the check, for people.
    pub title: &'static str,
    /// The problems; empty if the check has passed.
    pub findings: Vec<SetupFinding>,
}

/// A problem of the setup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupFinding {
    /// The severity of the problem.
    pub outcome: CheckOutcome,
    /// The problem, in a sentence.
    pub message: String,
    /// The remedy: a command that can be copied, and advice behind a `#`.
    pub fix: String,
}

impl Check {
    /// Returns the worst of its findings.
    #[must_use]
    pub fn outcome(&self) -> CheckOutcome {
        self.findings.iter().map(|finding| finding.outcome).max().unwrap_or(CheckOutcome::Passed)
    }
}

/// The controller that runs the checks.
#[derive(Clone, Copy, Debug)]
pub struct ControllerInfo<'a> {
    /// The release, which agents are to have too.
    pub version: &'a str,
    /// The level of features that agents of its release have.
    pub feature_level: u32,
    /// The limits of the use of disks.
    pub limits: SchedulingLimits,
}

/// Runs all checks.
#[must_use]
pub fn examine(cluster: &ClusterState, agents: &Agents, controller: ControllerInfo<'_>) -> Vec<Check> {
    let doctor = Doctor { cluster, agents, controller };
    let checks: [(&str, &str, Vec<SetupFinding>); 10] = [
        ("objects", "stored objects can be used", doctor.objects()),
        ("agents", "agents answer", doctor.agents_answer()),
        ("agent-versions", "agents are of the controller's version", doctor.agent_versions()),
        ("engine-versions", "engines run the installed program", doctor.engine_versions()),
        ("hosts", "agents report no warnings", doctor.warnings()),
        ("frontends", "nodes can create devices", doctor.frontends()),
        ("data-addresses", "nodes reach each other's replicas", doctor.data_addresses()),
        ("disks", "disks can be used and have room", doctor.disks()),
        ("places", "replicas have places", doctor.places()),
        ("volumes", "volumes are served and complete", doctor.volumes()),
    ];
    checks
        .into_iter()
        .map(|(name, title, findings)| Check { name, title, findings: bounded(findings) })
        .collect()
}

/// Returns the worst findings first, at most [`FINDINGS_MAX`].
fn bounded(mut findings: Vec<SetupFinding>) -> Vec<SetupFinding> {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.outcome));
    let more = findings.len().saturating_sub(FINDINGS_MAX);
    findings.truncate(FINDINGS_MAX);
    if let (Some(last), true) = (findings.last_mut(), more > 0) {
        last.message.push_str(&format!(" (and {more} more like these)"));
    }
    findings
}

fn failed(message: String, fix: String) -> SetupFinding {
    SetupFinding { outcome: CheckOutcome::Failed, message, fix }
}

fn warned(message: String, fix: String) -> SetupFinding {
    SetupFinding { outcome: CheckOutcome::Warned, message, fix }
}

struct Doctor<'a> {
    cluster: &'a ClusterState,
    agents: &'a Agents,
    controller: ControllerInfo<'a>,
}

impl<'a> Doctor<'a> {
    fn nodes(&self) -> impl Iterator<Item = (&'a str, &'a Node)> {
        self.cluster.nodes.iter().map(|(name, node)| (name.as_str(), node))
    }

    /// Returns the nodes whose agents answer, with their observed states.
    fn seen(&self) -> impl Iterator<Item = (&'a str, &'a ObservedAgent)> {
        let agents = self.agents;
        let synced = move |(name, _): (&'a str, &'a Node)| {
            let agent = NodeName::new(name).ok().and_then(|name| agents.get(&name))?;
            agent.is_synced().then_some((name, agent))
        };
        self.nodes().filter_map(synced)
    }

    fn infos(&self) -> impl Iterator<Item = (&'a str, &'a AgentInfo)> {
        self.seen().filter_map(|(name, agent)| Some((name, agent.info.as_ref()?)))
    }

    fn objects(&self) -> Vec<SetupFinding> {
        let unusable = |(key, left_out): (&Key, &LeftOut)| {
            let message = format!("{key} cannot be used: {}", left_out.why);
            failed(message, left_out.remedy.clone())
        };
        self.cluster.left_out().iter().map(unusable).collect()
    }

    fn agents_answer(&self) -> Vec<SetupFinding> {
        if self.cluster.nodes.is_empty() {
            let fix = "shorthornctl node add NAME --address HOST:PORT  # or start the controller with --node \
                       NAME=URL";
            return vec![failed("no node is known".to_owned(), fix.to_owned())];
        }
        let away = |(name, node): (&str, &Node)| {
            let ready = node.status.conditions.get(ConditionType::Ready);
            let ready = ready.filter(|ready| !ready.status)?;
            let fix = format!(
                "systemctl status shorthorn-agent  # on node {name}; if it never comes back: shorthornctl \
                 node delete {name}"
            );
            Some(failed(format!("node {name}: {}", ready.message), fix))
        };
        self.nodes().filter_map(away).collect()
    }

    fn agent_versions(&self) -> Vec<SetupFinding> {
        let ControllerInfo { version, feature_level, .. } = self.controller;
        let other = |(name, info): (&str, &AgentInfo)| {
            let fix = format!(
                "apt install ./shorthorn-agent_*.deb  # of {version}, on node {name}; or upgrade the \
                 controller to {}",
                info.version
            );
            if info.feature_level < feature_level {
                let message = format!(
                    "the agent of node {name} ({}) lacks features that this controller uses: some calls are \
                     refused",
                    info.version
                );
                return Some(warned(message, fix));
            }
            let message =
                format!("the agent of node {name} is version {}, the controller {version}", info.version);
            (info.version != version).then(|| warned(message, fix))
        };
        self.infos().filter_map(other).collect()
    }

    fn engine_versions(&self) -> Vec<SetupFinding> {
        let mut findings = Vec::new();
        for (node, agent) in self.seen() {
            let Some(installed) = agent.info.as_ref().map(|info| info.version.as_str()) else { continue };
            for (key, instance) in &agent.instances {
                let Detail::Engine(engine) = &instance.detail else { continue };
                let volume = &key.name;
                let other = engine.version().filter(|version| *version != installed);
                let message = if let Some(version) = other {
                    format!("the engine of volume {volume} is version {version}, node {node} has {installed}")
                } else if engine.needs_upgrade == Some(true) {
                    format!("the engine of volume {volume} runs another build than node {node} has")
                } else {
                    continue;
                };
                findings
                    .push(warned(message, "shorthornctl upgrade engines  # devices stay in use".to_owned()));
            }
        }
        findings
    }

    fn warnings(&self) -> Vec<SetupFinding> {
        let of_node = |(name, info): (&'a str, &'a AgentInfo)| {
            info.warnings.iter().map(move |warning| {
                warned(
                    format!("node {name}: {warning}"),
                    format!("shorthorn-agent check  # on node {name}: it has the command for each"),
                )
            })
        };
        self.infos().flat_map(of_node).collect()
    }

    fn frontends(&self) -> Vec<SetupFinding> {
        let without = |(name, info): (&str, &AgentInfo)| {
            let mut devices = info.frontends.iter().filter(|frontend| frontend.name != Frontend::Socket);
            if devices.clone().any(|frontend| frontend.usable) {
                return None;
            }
            let reasons: Vec<String> =
                devices.by_ref().map(|frontend| format!("{}: {}", frontend.name, frontend.reason)).collect();
            let message = format!("node {name} cannot create devices ({})", reasons.join("; "));
            let fix =
                format!("modprobe ublk_drv || modprobe nbd || apt install tgt open-iscsi  # on node {name}");
            Some(warned(message, fix))
        };
        self.infos().filter_map(without).collect()
    }

    fn data_addresses(&self) -> Vec<SetupFinding> {
        if self.cluster.nodes.len() < 2 {
            return Vec::new();
        }
        let mut findings = Vec::new();
        let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, info) in self.infos() {
            let Some(address) = info.data_address.as_deref() else {
                findings.push(failed(
                    format!("no other node reaches the replicas on node {name}"),
                    format!(
                        "sed -i '1i data_interface = \"eth1\"' /etc/shorthorn/agent.toml && systemctl \
                         restart shorthorn-agent  # on node {name}, with the interface that others reach"
                    ),
                ));
                continue;
            };
            if let Some(other) = owners.insert(address, name) {
                findings.push(warned(
                    format!("nodes {other} and {name} both have the data_address {address}"),
                    "ip -br address  # on both: set different addresses in /etc/shorthorn/agent.toml"
                        .to_owned(),
                ));
            }
        }
        findings
    }

    fn disks(&self) -> Vec<SetupFinding> {
        let mut findings = Vec::new();
        let mut owners: BTreeMap<&str, (&str, &str)> = BTreeMap::new();
        for (node, agent) in self.seen() {
            if agent.disks.is_empty() {
                findings.push(warned(
                    format!("node {node} has no disk: it gets no replicas"),
                    format!("shorthornctl disk add {node} PATH"),
                ));
            }
            for (path, disk) in &agent.disks {
                if let Some(problem) = &disk.problem {
                    let fix = format!("shorthornctl disk drain {node} {path}  # or repair it");
                    findings.push(failed(format!("disk {path} of node {node}: {problem}"), fix));
                    continue;
                }
                if let Some(uuid) = &disk.uuid
                    && let Some((node_of_other, other)) = owners.insert(uuid, (node, path.as_str()))
                {
                    findings.push(warned(
                        format!(
                            "disk {path} of node {node} has the identity of disk {other} of node \
                             {node_of_other}"
                        ),
                        format!(
                            "shorthornctl disk drain {node} {path}  # if it is the copy; format it before use"
                        ),
                    ));
                }
                findings.extend(self.fullness(node, path, disk.total_bytes, disk.available_bytes));
            }
        }
        findings
    }

    fn fullness(
        &self,
        node: &str,
        path: &str,
        total_bytes: u64,
        available_bytes: u64,
    ) -> Option<SetupFinding> {
        let percent = u128::from(available_bytes) * 100 / u128::from(total_bytes.max(1));
        let least = self.controller.limits.storage_minimal_available_percentage;
        (percent < u128::from(least)).then(|| {
            warned(
                format!(
                    "disk {path} of node {node} has {percent} % free: below {least} % it gets no new replica"
                ),
                format!("shorthornctl disk drain {node} {path}  # or make room there, or add a disk"),
            )
        })
    }

    fn places(&self) -> Vec<SetupFinding> {
        let open = self.nodes().filter(|(_, node)| {
            node.spec.allow_scheduling && node.status.conditions.is_true(ConditionType::Ready)
        });
        let open = open.count();
        let mut findings = Vec::new();
        let apart = self.cluster.volumes.values().filter(|volume| !volume.spec.replica_soft_anti_affinity);
        if let Some(most) = apart.max_by_key(|volume| volume.spec.number_of_replicas) {
            let (name, wanted) = (&most.metadata.name, most.spec.number_of_replicas as usize);
            if open < wanted {
                findings.push(warned(
                    format!(
                        "{open} nodes accept replicas, but volume {name} wants {wanted} on different nodes"
                    ),
                    "shorthornctl node list  # uncordon or add nodes: a lost replica could not be replaced"
                        .to_owned(),
                ));
            }
        }
        let unscheduled =
            self.cluster.volumes.values().filter_map(|volume| wrong(volume, ConditionType::Scheduled));
        findings.extend(unscheduled.map(|(name, message)| {
            failed(format!("volume {name}: {message}"), format!("shorthornctl volume why {name}"))
        }));
        findings
    }

    fn volumes(&self) -> Vec<SetupFinding> {
        let mut findings = Vec::new();
        for volume in self.cluster.volumes.values() {
            if let Some((name, message)) = wrong(volume, ConditionType::Accepted) {
                findings.push(warned(
                    format!("volume {name}: {message}"),
                    format!("shorthornctl volume why {name}"),
                ));
            }
            let (message, name) = match (wrong(volume, ConditionType::Healthy), volume.status.robustness) {
                (Some((name, message)), Robustness::Degraded | Robustness::Faulted) => (message, name),
                _ => continue,
            };
            let (message, fix) =
                (format!("volume {name}: {message}"), format!("shorthornctl volume why {name}"));
            findings.push(match volume.status.robustness {
                Robustness::Faulted => failed(message, fix),
                _ => warned(message, fix),
            });
        }
        findings
    }
}

/// Returns name and message, if the condition of the volume does not hold.
fn wrong(volume: &Volume, kind: ConditionType) -> Option<(&str, &str)> {
    let condition = volume.status.conditions.get(kind).filter(|condition| !condition.status)?;
    Some((volume.metadata.name.as_str(), condition.message.as_str()))
}

#[cfg(test)]
mod tests;
