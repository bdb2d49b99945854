//! The command node can-reboot.

use std::time::Duration;

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;

use super::args::CanRebootArgs;
use super::calls::limited;
use super::error::{CtlError, is_unreachable};
use super::format::Format;
use super::output::{for_programs, print};
use super::wait::ProgressLine;

/// The interval of queries.
const POLL: Duration = Duration::from_secs(1);

/// The answer, for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RebootOutput {
    can_reboot: bool,
    holds: Vec<HoldOutput>,
}

/// A volume that holds it up, for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HoldOutput {
    volume: String,
    is_engine: bool,
    message: String,
}

/// Says so if it can; else an error has the volumes that hold it up.
pub(super) async fn can_reboot(
    client: &mut ControllerClient<Channel>,
    server: &str,
    format: Format,
    args: CanRebootArgs,
) -> Result<String, CtlError> {
    let deadline = Instant::now() + args.timeout;
    let progress = ProgressLine::start();
    loop {
        let request = limited(v1::CheckRebootRequest { node: args.name.clone() });
        match client.check_reboot(request).await {
            Ok(answer) => {
                let mut holds = answer.into_inner().holds;
                holds.retain(|hold| !(args.before_drain && hold.is_engine));
                if holds.is_empty() {
                    return yes(format, &args.name);
                }
                let text = no(&args.name, &holds);
                if !args.wait {
                    drop(progress);
                    show(format, holds)?;
                    return Err(CtlError::Refused(text));
                }
                progress.say(&format!("waiting for {} volumes: {}", holds.len(), holds[0].message));
                if timeout_at(deadline, sleep(POLL)).await.is_err() {
                    return Err(CtlError::Timeout(text));
                }
            }
            // A controller that restarts comes back.
            Err(error) if args.wait && is_unreachable(&error) && Instant::now() < deadline => {
                progress.say(error.message());
                sleep(POLL).await;
            }
            Err(error) => return Err(CtlError::of(&error, server)),
        }
    }
}

fn yes(format: Format, node: &str) -> Result<String, CtlError> {
    match format {
        Format::Table => Ok(format!("node {node} can be restarted")),
        format => for_programs(format, &RebootOutput { can_reboot: true, holds: Vec::new() }),
    }
}

/// Programs get the answer on standard output all the same.
fn show(format: Format, holds: Vec<v1::RebootHold>) -> Result<(), CtlError> {
    let output = |hold: v1::RebootHold| HoldOutput {
        volume: hold.volume,
        is_engine: hold.is_engine,
        message: hold.message,
    };
    match format {
        Format::Table => Ok(()),
        format => {
            let holds = holds.into_iter().map(output).collect();
            print(&for_programs(format, &RebootOutput { can_reboot: false, holds })?)
        }
    }
}

fn no(node: &str, holds: &[v1::RebootHold]) -> String {
    let lines = holds.iter().map(|hold| format!("\n- volume {}: {}", hold.volume, hold.message));
    format!("node {node} cannot be restarted now:{}", lines.collect::<String>())
}
