//! The command upgrade engines: replaces the engines that run another program than the installed one.
//!
//! The engines themselves show which of them are left, so the command can be repeated, and another controller
//! may answer meanwhile.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_types::status::EnginePhase;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::calls::limited;
use super::error::{CtlError, is_unreachable};
use super::format::{Format, seconds};
use super::output;

/// The longest that the agent may take to replace one engine.
const UPGRADE_LIMIT: Duration = Duration::from_secs(150);
/// The interval of queries for the state of a volume.
const POLL: Duration = Duration::from_millis(300);
/// The number of volumes in a request.
const PAGE: u32 = 500;

/// Commands for upgrades.
#[derive(Debug, Subcommand)]
pub enum UpgradeCommand {
    /// Replaces the engines that run another program than their node has, after an upgrade of its package.
    /// Devices stay in use. Stops at the first failure, and can be repeated
    Engines(EnginesArgs),
}

/// Arguments of upgrade engines.
#[derive(Debug, Args)]
pub struct EnginesArgs {
    /// Maximum number of engines that are replaced at the same time, on all nodes together
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_parallel: u32,
    /// Replaces only engines on this node; can be given several times
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Shows the engines that need it, and replaces none
    #[arg(long)]
    pub dry_run: bool,
    /// Maximum seconds to wait until the volume of an engine is as healthy as before
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
}

/// The standing of a volume whose engine is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The engine runs the former program.
    Former,
    /// The engine runs the installed program, and the volume is not as healthy as before.
    Recovering,
    /// The engine runs the installed program, and the volume is as healthy as before.
    Done,
    /// The volume was detached or has moved: its next engine is a new process.
    Gone,
}

/// Replaces the engines of `args`.
pub(super) async fn run(
    client: &ControllerClient<Channel>,
    server: &str,
    format: Format,
    command: UpgradeCommand,
) -> Result<String, CtlError> {
    let UpgradeCommand::Engines(args) = command;
    let mut waiting = outdated(client, &args.nodes).await.map_err(|status| CtlError::of(&status, server))?;
    let all = waiting.len();
    if args.dry_run {
        return shown(format, &waiting.iter().map(|volume| replaced(volume, None)).collect::<Vec<_>>(), true);
    }
    waiting.reverse();
    let mut running = JoinSet::new();
    let (mut done, mut failure) = (Vec::new(), None);
    loop {
        while failure.is_none()
            && running.len() < usize::try_from(args.max_parallel).unwrap_or(usize::MAX)
            && let Some(volume) = waiting.pop()
        {
            let deadline = Instant::now() + args.timeout;
            let one = One { client: client.clone(), server: server.to_owned(), volume, deadline };
            running.spawn(one.replace());
        }
        match running.join_next().await {
            Some(Ok(Ok(one))) => {
                if format.is_for_people() {
                    output::print(&line(&one))?;
                }
                done.push(one);
            }
            // Those that have begun are waited for; none begins after a failure.
            Some(Ok(Err(error))) => failure = failure.or(Some(error)),
            Some(Err(lost)) => failure = failure.or_else(|| Some(lost.to_string())),
            None => break,
        }
    }
    match failure {
        None => shown(format, &done, false),
        Some(failure) => Err(CtlError::Incomplete(format!(
            "{failure}. {} of {all} engines are replaced, and {} were left alone; after the repair, replace \
             the rest with another shorthornctl upgrade engines",
            done.len(),
            waiting.len()
        ))),
    }
}

/// Returns the volumes on these nodes, or on all, whose engines run another program than the installed one.
async fn outdated(client: &ControllerClient<Channel>, nodes: &[String]) -> Result<Vec<v1::Volume>, Status> {
    let (mut client, mut found, mut page_token) = (client.clone(), Vec::new(), String::new());
    loop {
        let request = v1::ListVolumesRequest { page_size: PAGE, page_token, ..Default::default() };
        let page = client.list_volumes(limited(request)).await?.into_inner();
        found.extend(page.volumes.into_iter().filter(|volume| {
            let is_wanted = nodes.is_empty() || nodes.contains(&volume.current_node);
            is_wanted && !volume.current_node.is_empty() && needs_upgrade(volume)
        }));
        if page.next_page_token.is_empty() {
            return Ok(found);
        }
        page_token = page.next_page_token;
    }
}

fn needs_upgrade(volume: &v1::Volume) -> bool {
    volume.engine.as_ref().is_some_and(|engine| engine.needs_upgrade == Some(true))
}

/// Returns the number of members of the view.
fn members(volume: &v1::Volume) -> usize {
    let mode =
        |replica: &&v1::Replica| replica.shown_mode() == Some(shorthorn_types::status::MemberMode::Member);
    volume.replicas.iter().filter(mode).count()
}

/// Returns the standing of the volume that was `before`.
fn standing(before: &v1::Volume, now: &v1::Volume) -> Standing {
    if now.attach != before.attach || now.current_node != before.current_node {
        return Standing::Gone;
    }
    let phase = now.engine.as_ref().and_then(v1::Engine::known_phase);
    let is_serving = phase == Some(EnginePhase::Serving);
    let is_whole = now.robustness == "healthy"
        || (before.robustness != "healthy" && is_serving && members(now) >= members(before));
    match (needs_upgrade(now), is_serving && is_whole) {
        (true, _) => Standing::Former,
        (false, true) => Standing::Done,
        (false, false) => Standing::Recovering,
    }
}

/// An engine to replace.
struct One {
    client: ControllerClient<Channel>,
    server: String,
    volume: v1::Volume,
    deadline: Instant,
}

impl One {
    /// Replaces the engine, and waits until its volume is as healthy as before.
    async fn replace(mut self) -> Result<Replaced, String> {
        let mut pause_ms = None;
        // The answer of an order may be lost with its controller: the engine shows whether it is done.
        let mut last = None;
        while pause_ms.is_none() && self.look().await?.is_none_or(|standing| standing == Standing::Former) {
            self.check_deadline(last.as_ref())?;
            match self.order().await {
                Ok(upgraded) => pause_ms = Some(upgraded.pause_ms),
                Err(status) if is_passing(&status, last.is_some()) => last = Some(status),
                Err(status) => return Err(self.sentence(&CtlError::of(&status, &self.server).to_string())),
            }
            if last.is_some() && pause_ms.is_none() {
                sleep(POLL).await;
            }
        }
        while !matches!(self.look().await?, Some(Standing::Done | Standing::Gone)) {
            if Instant::now() >= self.deadline {
                let why =
                    "the new engine serves not as well as the former one in time: shorthornctl volume why";
                return Err(self.sentence(&format!("{why} {} has the reason", self.volume.name)));
            }
            sleep(POLL).await;
        }
        Ok(replaced(&self.volume, pause_ms))
    }

    async fn order(&mut self) -> Result<v1::UpgradeEngineResponse, Status> {
        let mut request = tonic::Request::new(v1::GetVolumeRequest { name: self.volume.name.clone() });
        request.set_timeout(UPGRADE_LIMIT);
        Ok(self.client.upgrade_volume_engine(request).await?.into_inner())
    }

    /// Returns the standing of the volume; none if no controller answers at the moment.
    async fn look(&mut self) -> Result<Option<Standing>, String> {
        let request = limited(v1::GetVolumeRequest { name: self.volume.name.clone() });
        match self.client.get_volume(request).await {
            Ok(now) => Ok(Some(standing(&self.volume, now.get_ref()))),
            Err(status) if status.code() == Code::NotFound => Ok(Some(Standing::Gone)),
            Err(status) if is_passing(&status, false) && Instant::now() < self.deadline => Ok(None),
            Err(status) => Err(self.sentence(&CtlError::of(&status, &self.server).to_string())),
        }
    }

    fn check_deadline(&self, last: Option<&Status>) -> Result<(), String> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let why = last.map_or("no controller answers", Status::message);
        Err(self.sentence(&format!("not replaced in time: {why}")))
    }

    fn sentence(&self, problem: &str) -> String {
        format!("the engine of volume {} on node {}: {problem}", self.volume.name, self.volume.current_node)
    }
}

/// Returns true if the call can succeed when it is repeated. `was_lost`: the answer of an earlier one is not
/// known, so that the engine may be starting.
fn is_passing(status: &Status, was_lost: bool) -> bool {
    let starts = was_lost && status.code() == Code::FailedPrecondition;
    starts || is_unreachable(status) || matches!(status.code(), Code::Unavailable | Code::Cancelled)
}

fn replaced(volume: &v1::Volume, pause_ms: Option<u64>) -> Replaced {
    Replaced { volume: volume.name.clone(), node: volume.current_node.clone(), pause_ms }
}

fn line(one: &Replaced) -> String {
    let pause = one.pause_ms.map_or_else(String::new, |ms| format!("; requests waited for {ms} ms"));
    format!("volume {} on node {}: its engine is replaced{pause}", one.volume, one.node)
}

fn shown(format: Format, engines: &[Replaced], is_plan: bool) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return output::for_programs(format, &engines);
    }
    if is_plan && !engines.is_empty() {
        let lines = engines.iter().map(|one| format!("volume {} on node {}\n", one.volume, one.node));
        return Ok(lines.collect());
    }
    let (number, verb) = (engines.len(), if is_plan { "need to be" } else { "are" });
    Ok(if number == 0 {
        "every engine runs the program that is installed on its node".to_owned()
    } else {
        format!("engines that {verb} replaced: {number}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(needs_upgrade: bool, phase: EnginePhase, robustness: &str) -> v1::Volume {
        let needs_upgrade = Some(needs_upgrade);
        let engine = v1::Engine { needs_upgrade, ..v1::Engine::default() }.with_phase(phase);
        v1::Volume {
            name: "v".to_owned(),
            attach: 3,
            current_node: "n1".to_owned(),
            robustness: robustness.to_owned(),
            engine: Some(engine),
            ..v1::Volume::default()
        }
    }

    #[test]
    fn an_engine_is_done_when_its_volume_is_as_healthy_as_before() {
        use EnginePhase::{Serving, Starting};
        let before = volume(true, Serving, "healthy");
        let now = |volume: v1::Volume| standing(&before, &volume);
        assert_eq!(now(before.clone()), Standing::Former);
        assert_eq!(now(volume(false, Starting, "unknown")), Standing::Recovering);
        assert_eq!(now(volume(false, Serving, "degraded")), Standing::Recovering, "it was healthy");
        assert_eq!(now(volume(false, Serving, "healthy")), Standing::Done);
        assert_eq!(now(v1::Volume { attach: 4, ..before.clone() }), Standing::Gone);
        assert_eq!(now(v1::Volume { current_node: String::new(), ..before.clone() }), Standing::Gone);
        // A volume that lacks a replica needs no more than it had.
        let degraded = volume(true, Serving, "degraded");
        assert_eq!(standing(&degraded, &volume(false, Serving, "degraded")), Standing::Done);
        assert_eq!(standing(&degraded, &volume(false, Starting, "unknown")), Standing::Recovering);
    }

    #[test]
    fn a_refusal_ends_the_command_and_a_lost_controller_does_not() {
        assert!(is_passing(&Status::unavailable("the agent does not answer"), false));
        let refused = Status::failed_precondition("the engine does not serve");
        assert!(!is_passing(&refused, false));
        assert!(is_passing(&refused, true), "it may be the new engine, which starts");
        assert!(!is_passing(&Status::not_found("no such volume"), true));
    }

    #[test]
    fn people_and_programs_see_each_engine() {
        let one = Replaced { volume: "v".to_owned(), node: "n1".to_owned(), pause_ms: Some(40) };
        assert_eq!(line(&one), "volume v on node n1: its engine is replaced; requests waited for 40 ms");
        assert_eq!(
            shown(Format::Table, std::slice::from_ref(&one), false).unwrap(),
            "engines that are replaced: 1"
        );
        assert!(shown(Format::Table, &[], true).unwrap().contains("every engine"));
        let json: serde_json::Value =
            serde_json::from_str(&shown(Format::Json, &[one], false).unwrap()).unwrap();
        assert_eq!((&json[0]["nodeID"], &json[0]["pauseMs"]), (&"n1".into(), &40.into()));
    }
}
