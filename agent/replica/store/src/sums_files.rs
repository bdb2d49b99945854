//! The files with the sums of snapshots and of blocks, by their names.

use shorthorn_chain::{ImageName, OWN_PREFIX};

use crate::directory::Directory;
use crate::error::StoreError;

/// The file with the sums of blocks.
pub(crate) const BLOCK_SUMS_FILE: &str = "shorthorn.block-sums";
/// The start of the name of such a file, after the prefix of own files.
pub(crate) const SUMS_PREFIX: &str = "sums-";

/// Removes all sums but those of snapshots for which `is_there` is true.
pub(crate) fn sweep_sums(
    directory: &Directory,
    is_there: impl Fn(&ImageName) -> bool,
) -> Result<(), StoreError> {
    let image = |name: &str| {
        let snapshot = name.strip_prefix(OWN_PREFIX)?.strip_prefix(SUMS_PREFIX)?;
        Some(ImageName::parse(&format!("volume-snap-{snapshot}.img")))
    };
    let names = directory.list()?;
    let is_stale =
        |name: &&String| image(name).is_some_and(|image| !image.is_some_and(|image| is_there(&image)));
    let stale: Vec<&String> = names.iter().filter(is_stale).collect();
    if stale.is_empty() {
        return Ok(());
    }
    stale.into_iter().try_for_each(|name| directory.unlink(name))?;
    directory.sync()
}
