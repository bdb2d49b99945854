//! The command upgrade engines: replaces the engines that run another program than the installed one.
//!
//! The engines themselves show which of them are left, so the command can be repeated, and another controller
//! may answer meanwhile. The agents compare the programs again before each replacement, so two commands at
//! the same time replace each engine once.

mod replace;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tonic::Status;
use tonic::transport::Channel;

use super::calls::limited;
use super::error::CtlError;
use super::format::{Format, seconds};
use super::output;
use replace::{FailedReplacement, One, is_passing, is_serving, needs_upgrade};

/// The number of volumes in a request.
const PAGE: u32 = 500;
/// The interval of reading the list while agents compare programs.
const LIST_EVERY: Duration = Duration::from_secs(1);
/// The longest that the command waits at the end for agents to compare programs. An agent reads the program
/// of each engine for that, which a busy disk delays.
const COMPARE_LIMIT: Duration = Duration::from_secs(30);
/// The most volumes that a message names.
const NAMES_MAX: usize = 10;

#[derive(Debug, Subcommand)]
pub enum UpgradeCommand {
    /// Replaces engines whose program differs from the one that is installed on their node. Devices stay in
    /// use. Reports engines that cannot be replaced, and continues with the others. Stops if a new engine
    /// does not serve as well as the former one. Can be repeated
    Engines(EnginesArgs),
}

/// Arguments of upgrade engines.
#[derive(Debug, Args)]
pub struct EnginesArgs {
    /// Maximum number of engines that are replaced at the same time, on all nodes together
    #[arg(
        long, value_name = "NUMBER", default_value = "1", value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_parallel: u32,
    /// Replaces only engines on this node; can be repeated
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Shows the engines that would be replaced, and replaces none
    #[arg(long)]
    pub dry_run: bool,
    /// Maximum seconds to replace one engine and to wait until its volume is as healthy as before
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub timeout: Duration,
}

/// An engine that was replaced, for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Replaced {
    volume: String,
    #[serde(rename = "nodeID")]
    node: String,
    /// The pause of requests; absent if the answer was lost with its controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_ms: Option<u64>,
    /// True if the programs are not compared yet, in a plan.
    #[serde(rename = "unknown", skip_serializing_if = "std::ops::Not::not")]
    is_unknown: bool,
}

impl Replaced {
    const fn new(volume: String, node: String) -> Replaced {
        Replaced { volume, node, pause_ms: None, is_unknown: false }
    }
}

/// Volumes by the comparison of the programs of their engines.
#[derive(Debug, Default)]
struct EnginesByProgram {
    outdated: Vec<v1::Volume>,
    /// The agents have not compared them yet.
    unknown: Vec<v1::Volume>,
}

/// Replaces the engines of `args`.
pub(super) async fn run(
    client: &ControllerClient<Channel>,
    server: &str,
    format: Format,
    command: UpgradeCommand,
) -> Result<String, CtlError> {
    let UpgradeCommand::Engines(args) = command;
    let found = find(client, &args.nodes).await.map_err(|status| CtlError::of(&status, server))?;
    if args.dry_run {
        return plan(format, found);
    }
    let mut rollout = Rollout {
        client: client.clone(),
        server: server.to_owned(),
        format,
        args,
        begun: BTreeSet::new(),
        waiting: VecDeque::new(),
        done: Vec::new(),
        failures: Vec::new(),
        unknown: Vec::new(),
        is_stopped: false,
    };
    rollout.run(found).await?;
    rollout.result()
}

/// The replacement of many engines.
struct Rollout {
    client: ControllerClient<Channel>,
    server: String,
    format: Format,
    args: EnginesArgs,
    /// The names of the volumes whose turn has come.
    begun: BTreeSet<String>,
    waiting: VecDeque<v1::Volume>,
    done: Vec<Replaced>,
    failures: Vec<String>,
    /// The names of the volumes whose engines are not compared yet.
    unknown: Vec<String>,
    is_stopped: bool,
}

impl Rollout {
    /// Replaces the engines in `found`, and those that further lists show. Each volume has one turn.
    async fn run(&mut self, mut found: EnginesByProgram) -> Result<(), CtlError> {
        let mut unknown_until = None;
        loop {
            found.outdated.retain(|volume| !self.begun.contains(&volume.name));
            if !found.outdated.is_empty() {
                self.replace_all(found.outdated).await?;
                unknown_until = None;
            } else if !found.unknown.is_empty() {
                let limit = COMPARE_LIMIT.min(self.args.timeout);
                let until = *unknown_until.get_or_insert_with(|| Instant::now() + limit);
                if Instant::now() >= until {
                    self.unknown = found.unknown.into_iter().map(|volume| volume.name).collect();
                    return Ok(());
                }
                sleep(LIST_EVERY).await;
            } else {
                return Ok(());
            }
            if self.is_stopped {
                return Ok(());
            }
            found = self.find_again().await?;
        }
    }

    /// Reads the list, also while the controller is replaced.
    async fn find_again(&self) -> Result<EnginesByProgram, CtlError> {
        let deadline = Instant::now() + self.args.timeout;
        loop {
            match find(&self.client, &self.args.nodes).await {
                Ok(found) => return Ok(found),
                Err(status) if is_passing(&status, false) && Instant::now() < deadline => {
                    sleep(LIST_EVERY).await;
                }
                Err(status) => return Err(CtlError::of(&status, &self.server)),
            }
        }
    }

    async fn replace_all(&mut self, outdated: Vec<v1::Volume>) -> Result<(), CtlError> {
        // The healthy ones first: one that does not serve is waited for.
        let (serving, sick): (Vec<_>, Vec<_>) = outdated.into_iter().partition(is_serving);
        self.waiting.extend(serving.into_iter().chain(sick));
        let mut running = JoinSet::new();
        loop {
            while !self.is_stopped
                && running.len() < usize::try_from(self.args.max_parallel).unwrap_or(usize::MAX)
                && let Some(volume) = self.waiting.pop_front()
            {
                self.begun.insert(volume.name.clone());
                let (client, server) = (self.client.clone(), self.server.clone());
                let deadline = Instant::now() + self.args.timeout;
                let (volume, node) = (volume.name, volume.current_node);
                running.spawn(One { client, server, volume, node, deadline }.replace());
            }
            // Those that have begun are waited for, also if no other one is to begin.
            match running.join_next().await {
                Some(Ok(Ok(one))) => self.take(one)?,
                Some(Ok(Err(failure))) => self.fail(failure)?,
                Some(Err(lost)) => {
                    self.fail(FailedReplacement { sentence: lost.to_string(), is_general: true })?
                }
                None => return Ok(()),
            }
        }
    }

    fn take(&mut self, one: Option<Replaced>) -> Result<(), CtlError> {
        let Some(one) = one else { return Ok(()) };
        if self.format.is_for_people() {
            output::print(&line(&one))?;
        }
        self.done.push(one);
        Ok(())
    }

    fn fail(&mut self, failure: FailedReplacement) -> Result<(), CtlError> {
        output::complain(&failure.sentence)?;
        self.failures.push(failure.sentence);
        self.is_stopped |= failure.is_general;
        Ok(())
    }

    fn result(self) -> Result<String, CtlError> {
        let text = shown(self.format, &self.done)?;
        let Some(problem) = self.problem() else { return Ok(text) };
        if !self.format.is_for_people() {
            output::print(&text)?;
        }
        Err(CtlError::Incomplete(problem))
    }

    /// Returns the summary if something is left to do.
    fn problem(&self) -> Option<String> {
        let Rollout { done, failures, waiting, unknown, .. } = self;
        let mut parts = Vec::new();
        if !failures.is_empty() {
            let all = done.len() + failures.len() + waiting.len();
            parts.push(format!(
                "{} of {all} engines are replaced, {} failed, and {} were left alone",
                done.len(),
                failures.len(),
                waiting.len()
            ));
        }
        if !unknown.is_empty() {
            let mut names = unknown[..unknown.len().min(NAMES_MAX)].join(", ");
            if unknown.len() > NAMES_MAX {
                names.push_str(", …");
            }
            parts.push(format!(
                "the programs of {} engines are not compared with the installed ones yet: volumes {names}",
                unknown.len()
            ));
        }
        let remedy = "after the repair, replace the rest with another shorthornctl upgrade engines";
        (!parts.is_empty()).then(|| format!("{}; {remedy}", parts.join("; ")))
    }
}

/// Returns the volumes on these nodes, or on all, whose engines run another program than the installed one,
/// or may do so.
async fn find(client: &ControllerClient<Channel>, nodes: &[String]) -> Result<EnginesByProgram, Status> {
    let (mut client, mut found, mut page_token) =
        (client.clone(), EnginesByProgram::default(), String::new());
    loop {
        let request = v1::ListVolumesRequest { page_size: PAGE, page_token, ..Default::default() };
        let page = client.list_volumes(limited(request)).await?.into_inner();
        for volume in page.volumes {
            let is_wanted = nodes.is_empty() || nodes.contains(&volume.current_node);
            if !is_wanted || volume.current_node.is_empty() {
                continue;
            }
            match needs_upgrade(&volume) {
                Some(true) => found.outdated.push(volume),
                Some(false) => {}
                None => found.unknown.push(volume),
            }
        }
        if page.next_page_token.is_empty() {
            return Ok(found);
        }
        page_token = page.next_page_token;
    }
}

fn line(one: &Replaced) -> String {
    let pause = one.pause_ms.map_or_else(String::new, |ms| format!("; requests waited for {ms} ms"));
    format!("volume {} on node {}: the engine is replaced{pause}", one.volume, one.node)
}

fn plan(format: Format, found: EnginesByProgram) -> Result<String, CtlError> {
    let engine = |volume: v1::Volume| Replaced::new(volume.name, volume.current_node);
    let outdated = found.outdated.into_iter().map(engine);
    let unknown = found.unknown.into_iter().map(|volume| Replaced { is_unknown: true, ..engine(volume) });
    let engines: Vec<Replaced> = outdated.chain(unknown).collect();
    if !format.is_for_people() || engines.is_empty() {
        return shown(format, &engines);
    }
    let remark = |one: &Replaced| if one.is_unknown { ": the program is not compared yet" } else { "" };
    Ok(engines
        .iter()
        .map(|one| format!("volume {} on node {}{}\n", one.volume, one.node, remark(one)))
        .collect())
}

fn shown(format: Format, engines: &[Replaced]) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return output::for_programs(format, &engines);
    }
    Ok(if engines.is_empty() {
        "every engine runs the program that is installed on its node".to_owned()
    } else {
        format!("engines that are replaced: {}", engines.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_is_shown_as_text_and_json() {
        let one = Replaced { pause_ms: Some(40), ..Replaced::new("v".to_owned(), "n1".to_owned()) };
        assert_eq!(line(&one), "volume v on node n1: the engine is replaced; requests waited for 40 ms");
        assert_eq!(shown(Format::Table, std::slice::from_ref(&one)).unwrap(), "engines that are replaced: 1");
        assert!(shown(Format::Table, &[]).unwrap().contains("every engine"));
        let json: serde_json::Value = serde_json::from_str(&shown(Format::Json, &[one]).unwrap()).unwrap();
        assert_eq!((&json[0]["nodeID"], &json[0]["pauseMs"]), (&"n1".into(), &40.into()));
    }

    #[test]
    fn a_plan_names_the_engines_that_are_not_compared() {
        let volume = |name: &str| v1::Volume {
            name: name.to_owned(),
            current_node: "n1".to_owned(),
            ..v1::Volume::default()
        };
        let found = || EnginesByProgram { outdated: vec![volume("a")], unknown: vec![volume("b")] };
        assert_eq!(
            plan(Format::Table, found()).unwrap(),
            "volume a on node n1\nvolume b on node n1: the program is not compared yet\n"
        );
        let json: serde_json::Value = serde_json::from_str(&plan(Format::Json, found()).unwrap()).unwrap();
        assert_eq!((&json[0]["unknown"], &json[1]["unknown"]), (&serde_json::Value::Null, &true.into()));
        assert!(plan(Format::Table, EnginesByProgram::default()).unwrap().contains("every engine"));
    }
}
