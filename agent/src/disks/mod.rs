//! The commands `disk discover` and `disk init`: from empty devices to disks for replicas.

mod collect;
mod device;
mod init;
mod plan;

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use shorthorn_api::v1;
use shorthorn_api::v1::node_client::NodeClient;
use tonic::transport::Endpoint;

use crate::cli::{DiscoverArgs, InitArgs};
use crate::pid_file::is_held;
use crate::serve::add_disk_offline;
use crate::serve::config::Config;
use crate::serve::listen::ListenAddress;
use device::{BlockDevice, obstacles};
use init::Mounts;
use plan::{DiskPlan, PlannedDisk};

/// The same test as sd_booted(3).
const SYSTEMD: &str = "/run/systemd/system";

/// Writes the file to review.
///
/// # Errors
/// A device cannot be examined, or the file exists.
pub fn discover(args: &DiscoverArgs) -> anyhow::Result<()> {
    let config = Config::load(args.config.as_deref())?;
    let devices = if args.devices.is_empty() {
        collect::usual_devices()?
    } else {
        args.devices.iter().map(|path| collect::device_at(path)).collect::<Result<_, _>>()?
    };
    let mut uuids = Vec::new();
    for _ in &devices {
        uuids.push(collect::draw_uuid()?);
    }
    let boot_id = collect::boot_id()?;
    let draw = || uuids.pop().unwrap_or_default();
    let text = plan::text((config.node_name.as_str(), &boot_id), &devices, args.filesystem, draw)?;
    if args.file == Path::new("-") {
        return io::stdout().write_all(text.as_bytes()).context("standard output");
    }
    let shown = args.file.display();
    // A file that is under review is not replaced.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&args.file);
    let file = file.as_mut().map_err(|error| anyhow::anyhow!("{shown}: {error}"))?;
    file.write_all(text.as_bytes()).with_context(|| shown.to_string())?;
    let message = format!(
        "{shown}: {} devices; set init = true for each one to use, then: shorthorn-agent disk init {shown}",
        devices.len()
    );
    writeln!(io::stdout(), "{message}").context("standard output")
}

/// Returns the devices of this host that may become disks, and the others with the reasons against them.
///
/// # Errors
/// sysfs cannot be read.
pub fn discovered() -> anyhow::Result<Vec<v1::DiscoveredDevice>> {
    Ok(collect::usual_devices()?.into_iter().map(shown).collect())
}

fn shown(device: BlockDevice) -> v1::DiscoveredDevice {
    let reasons = obstacles(&device, false);
    let fits = reasons.is_empty();
    let needs_consent = !fits && obstacles(&device, true).is_empty();
    let BlockDevice { name, identity, model, transport, .. } = device;
    v1::DiscoveredDevice {
        path: identity.device.display().to_string(),
        name,
        size_bytes: identity.size_bytes,
        model,
        serial: identity.serial.unwrap_or_default(),
        wwn: identity.wwn.unwrap_or_default(),
        transport: transport.unwrap_or_default(),
        fits,
        needs_consent,
        obstacles: reasons,
    }
}

/// Makes, mounts and adds the disks of a reviewed file.
///
/// # Errors
/// A device must not be used: nothing was done then. Or a step has failed: the disks before it are done.
pub fn init(args: &InitArgs) -> anyhow::Result<()> {
    let config = Config::load(args.config.as_deref())?;
    let shown = args.file.display();
    let text = fs::read_to_string(&args.file).with_context(|| shown.to_string())?;
    let plan = DiskPlan::parse(&text, config.node_name.as_str())
        .map_err(|error| anyhow::anyhow!("{shown}: {error}"))?;
    let options = init::InitOptions { same_boot: plan.boot_id == collect::boot_id()?, redo: args.redo };
    let wanted: Vec<&PlannedDisk> = plan.disks.iter().filter(|disk| disk.init).collect();
    if wanted.is_empty() {
        bail!("{shown} selects no device: set init = true for each device to use");
    }
    for disk in &wanted {
        init::check(disk, options)?;
    }
    let mut output = io::stdout();
    for disk in wanted {
        if args.dry_run {
            writeln!(output, "{} would be used", disk.device.display()).context("standard output")?;
            continue;
        }
        let mounts = if Path::new(SYSTEMD).is_dir() { Mounts::Systemd } else { Mounts::Direct };
        let done = init::init(disk, options, &args.units, &mounts)?;
        writeln!(output, "{done}").context("standard output")?;
        add(&config, &disk.mount_point)?;
        init::reload(&mounts)?;
        writeln!(output, "{} is a disk of this node", disk.mount_point.display())
            .context("standard output")?;
    }
    Ok(())
}

/// Adds a directory to the disks of this node: through the agent if it runs.
fn add(config: &Config, path: &Path) -> anyhow::Result<()> {
    let by_hand = || {
        format!(
            "{} is mounted; add it: shorthornctl disk add {} {}",
            path.display(),
            config.node_name,
            path.display()
        )
    };
    if !is_held(&config.state_dir.join("agent.pid")).with_context(by_hand)? {
        return add_disk_offline(&config.disks, &config.state_dir, path).with_context(by_hand);
    }
    let socket = config.listen.iter().find_map(|address| match address {
        ListenAddress::Unix(path) => Some(path.clone()),
        _ => None,
    });
    let socket = socket.context("the agent listens on no Unix socket").with_context(by_hand)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(add_by_agent(socket, path)).with_context(by_hand)
}

async fn add_by_agent(socket: PathBuf, path: &Path) -> anyhow::Result<()> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?.connect().await?;
    let request = v1::AddDiskRequest { path: path.display().to_string() };
    NodeClient::new(channel).add_disk(request).await?;
    Ok(())
}
