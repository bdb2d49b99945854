//! Devices of the kernel that an engine has left behind which does not come back.

use std::path::Path;

use shorthorn_types::VolumeName;

use crate::{FrontendError, node, remove_nbd_leftovers, ublk};

/// Takes every device of `volume` away, and their names in `device_dir`. Requests that wait there fail, and whoever has it
/// mounted sees errors: without that they would wait for ever, and so would whoever unmounts it.
///
/// # Errors
/// [`FrontendError::Refused`] where a living process serves one.
pub fn discard(volume: &VolumeName, device_dir: &Path) -> Result<(), FrontendError> {
    ublk::remove_leftovers(volume)?;
    remove_nbd_leftovers(volume, device_dir)?;
    let dead = |node: &node::DeviceNode| node.volume == *volume && !node.live;
    for found in node::scan(device_dir)?.into_iter().filter(dead) {
        node::remove(device_dir, volume, found.device)?;
    }
    Ok(())
}
