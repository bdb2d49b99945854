//! Parts of the support bundle from the controller.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use serde_json::Value;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use super::archive::Archive;
use crate::calls::limited;
use crate::doctor::{self, CheckOutput};
use crate::format::Format;
use crate::list::{ListKind, ListOptions, Lister};
use crate::status;

/// The maximum number of unhealthy volumes whose explanation is collected.
const EXPLAINED_MAX: usize = 200;

pub(super) async fn gather(
    archive: &mut Archive<File>,
    client: &ControllerClient<Channel>,
) -> io::Result<()> {
    let volumes = ListKind::Volumes { namespace: String::new(), workloads: true };
    let replicas = ListKind::Replicas { volume: String::new(), node: String::new() };
    let mut ill = Vec::new();
    for (name, what) in [("volumes", volumes), ("replicas", replicas), ("nodes", ListKind::Nodes)] {
        let lister = Lister { client: client.clone(), what, options: ListOptions::default() };
        let file = format!("controller/{name}.json");
        match lister.list().await {
            Ok(Ok(list)) => {
                let fields = list.into_fields();
                if name == "volumes" {
                    ill = fields.iter().filter(|volume| is_ill(volume)).filter_map(name_of).collect();
                }
                archive.add_json(&file, Value::Array(fields))?;
            }
            Ok(Err(status)) => archive.add_missing(&file, status.message()),
            Err(error) => archive.add_missing(&file, &error.to_string()),
        }
    }
    add_status(archive, client.clone()).await?;
    add_trash(archive, client.clone()).await?;
    explain(archive, client.clone(), ill).await?;
    diagnose(archive, client.clone()).await
}

fn name_of(volume: &Value) -> Option<String> {
    volume["name"].as_str().map(str::to_owned)
}

/// Returns true if there is more to say of it than its state.
fn is_ill(volume: &Value) -> bool {
    let conditions = volume["conditions"].as_array();
    conditions.is_some_and(|conditions| conditions.iter().any(|condition| condition["status"] == false))
}

async fn add_status(archive: &mut Archive<File>, mut client: ControllerClient<Channel>) -> io::Result<()> {
    match client.get_overview(limited(v1::GetOverviewRequest {})).await {
        Ok(overview) => {
            let text = status::text(Format::Table, overview.into_inner()).map_err(io::Error::other)?;
            archive.add_text("status.txt", &text)?;
        }
        Err(status) => archive.add_missing("status.txt", status.message()),
    }
    match client.examine(limited(v1::ExamineRequest {})).await {
        Ok(found) => {
            let checks: Vec<CheckOutput> = found.into_inner().checks.into_iter().map(Into::into).collect();
            archive
                .add_text("doctor.txt", &doctor::text(Format::Table, &checks).map_err(io::Error::other)?)?;
        }
        Err(status) => archive.add_missing("doctor.txt", status.message()),
    }
    Ok(())
}

async fn add_trash(archive: &mut Archive<File>, client: ControllerClient<Channel>) -> io::Result<()> {
    let what = ListKind::Trash { volume: String::new() };
    match (Lister { client, what, options: ListOptions::default() }).list().await {
        Ok(Ok(list)) => {
            let table = list.text(Format::Table).map_err(io::Error::other)?;
            let text = std::iter::once(table).chain(list.warnings).collect::<Vec<_>>().join("\n");
            archive.add_text("trash.txt", &text)?;
        }
        Ok(Err(status)) => archive.add_missing("trash.txt", status.message()),
        Err(error) => archive.add_missing("trash.txt", &error.to_string()),
    }
    Ok(())
}

async fn explain(
    archive: &mut Archive<File>,
    mut client: ControllerClient<Channel>,
    ill: Vec<String>,
) -> io::Result<()> {
    let mut explained = serde_json::Map::new();
    for name in ill.iter().take(EXPLAINED_MAX) {
        match client.explain_volume(limited(v1::GetVolumeRequest { name: name.clone() })).await {
            Ok(why) => {
                explained
                    .insert(name.clone(), serde_json::to_value(why.into_inner()).map_err(io::Error::other)?);
            }
            Err(status) => archive.add_missing(&format!("why of {name}"), status.message()),
        }
    }
    archive.add_json("controller/why.json", Value::Object(explained))
}

async fn diagnose(archive: &mut Archive<File>, mut client: ControllerClient<Channel>) -> io::Result<()> {
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut stream = match client.get_diagnostics(limited(v1::GetDiagnosticsRequest {})).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => {
            archive.add_missing("metrics and configuration of the controller", status.message());
            return Ok(());
        }
    };
    loop {
        match stream.message().await {
            Ok(Some(part)) => files.entry(part.file).or_default().extend(part.data),
            Ok(None) => break,
            Err(status) => {
                archive.add_missing("metrics and configuration of the controller", status.message());
                break;
            }
        }
    }
    for (name, data) in files {
        // A name is not a path.
        let name = name.replace('/', "_");
        archive.add_text(&format!("controller/{name}"), &String::from_utf8_lossy(&data))?;
    }
    Ok(())
}
