//! The support bundle.

mod archive;
mod cluster;
mod controller;
mod redact;

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use shorthorn_api::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use self::archive::Archive;
use super::error::CtlError;
use super::output;
use super::reach::ClusterAccess;
use super::status::VERSION;

/// The unit of the controller, whose log is on this host if it runs here.
const UNIT: &str = "shorthorn-controller";

/// The options of the bundle.
#[derive(Clone, Debug, Args)]
pub struct BundleArgs {
    /// The file to write, which must not exist [default: shorthorn-support-TIME.tar.gz]
    pub file: Option<PathBuf>,
    /// Number of lines from the end of each log; 0: no logs
    #[arg(long, value_name = "NUMBER", default_value_t = 10_000)]
    pub log_lines: u32,
}

/// Writes the bundle, and returns its description. Unavailable parts are recorded in it and reported.
pub(super) async fn write(
    args: BundleArgs,
    client: &ControllerClient<Channel>,
    cluster: Option<&ClusterAccess>,
) -> Result<String, CtlError> {
    let now = jiff::Timestamp::now();
    let stamp = now.strftime("%Y%m%dT%H%M%SZ").to_string();
    let folder = format!("shorthorn-support-{stamp}");
    let path = args.file.unwrap_or_else(|| PathBuf::from(format!("{folder}.tar.gz")));
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let failed = |error: std::io::Error| CtlError::Output(format!("{}: {error}", path.display()));
    let mut archive = Archive::create(&path, &folder, seconds).map_err(failed)?;
    let written = fill(&mut archive, args.log_lines, client, cluster).await;
    let missing = archive.missing();
    match written.and_then(|()| archive.finish()).and_then(|file| file.sync_all()) {
        Ok(()) => {}
        Err(error) => {
            // An incomplete bundle is of no use.
            let _ = std::fs::remove_file(&path);
            return Err(failed(error));
        }
    }
    for missing in &missing {
        output::complain(&format!("not in the bundle: {missing}"))?;
    }
    Ok(format!("wrote {}. Known secrets are removed: check the file before you send it", shown(&path)))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

async fn fill(
    archive: &mut Archive<File>,
    log_lines: u32,
    client: &ControllerClient<Channel>,
    cluster: Option<&ClusterAccess>,
) -> std::io::Result<()> {
    archive.add_json("shorthornctl.json", json!({ "version": VERSION }))?;
    controller::gather(archive, client).await?;
    match cluster {
        Some(cluster) => cluster::gather(archive, cluster, log_lines).await?,
        None if log_lines > 0 => add_journal(archive, log_lines).await?,
        None => {}
    }
    if log_lines > 0 {
        archive.add_missing(
            "logs of the agents",
            "agents do not hand them out: journalctl -u shorthorn-agent on each node",
        );
    }
    Ok(())
}

/// Adds the log of a controller on this host.
async fn add_journal(archive: &mut Archive<File>, lines: u32) -> std::io::Result<()> {
    let mut command = tokio::process::Command::new("journalctl");
    command.args(["--unit", UNIT, "--no-pager", "--output", "short-iso", "--lines", &lines.to_string()]);
    match command.output().await {
        Ok(output) if output.status.success() => {
            archive.add_text("logs/controller.log", &String::from_utf8_lossy(&output.stdout))
        }
        Ok(output) => {
            archive.add_missing("logs/controller.log", String::from_utf8_lossy(&output.stderr).trim());
            Ok(())
        }
        Err(error) => {
            archive.add_missing("logs/controller.log", &format!("journalctl: {error}"));
            Ok(())
        }
    }
}
