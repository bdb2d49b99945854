//! Replica directories by hand, without any daemon.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use shorthorn_store::{ExportTarget, export as export_volume, inspect as inspect_directory};

use crate::cli::{ExportArgs, InspectArgs, OutputFormat};

/// Shows the content of a replica directory.
pub fn inspect(args: &InspectArgs) -> anyhow::Result<()> {
    let found = inspect_directory(&args.dir)?;
    let text = match args.output {
        OutputFormat::Text => found.to_string(),
        OutputFormat::Json => serde_json::to_string_pretty(&found)?,
    };
    writeln!(io::stdout(), "{}", text.trim_end()).context("standard output")?;
    anyhow::ensure!(found.usable, "{} cannot be used as it is", args.dir.display());
    Ok(())
}

/// Writes the volume that a replica directory has as a raw image.
pub fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let target = if args.file == Path::new("-") {
        ExportTarget::Stream(Box::new(io::stdout()))
    } else {
        ExportTarget::File(args.file.clone())
    };
    let done = export_volume(&args.dir, args.snapshot.as_deref(), target, |_, _| {})?;
    if done.was_dirty {
        tracing::warn!("{} was not closed cleanly: the last writes may be missing", args.dir.display());
    }
    tracing::info!(size_bytes = done.size_bytes, data_bytes = done.data_bytes, "exported");
    Ok(())
}
