//! Devices of the kernel that an engine has left behind which does not come back.

use std::path::Path;

use shorthorn_types::VolumeName;

use crate::{FrontendError, node, remove_iscsi_leftovers, remove_nbd_leftovers, ublk};

/// Removes every device of `volume`, and their names in `device_dir`. Requests that wait there fail, and
/// their users see errors: otherwise they would wait for ever, and so would an unmount.
///
/// # Errors
/// [`FrontendError::Refused`] if a living process serves one.
pub fn discard(volume: &VolumeName, device_dir: &Path) -> Result<(), FrontendError> {
    ublk::remove_leftovers(volume, device_dir)?;
    remove_nbd_leftovers(volume, device_dir)?;
    remove_iscsi_leftovers(volume, device_dir)?;
    let dead = |node: &node::DeviceNode| node.volume == *volume && !node.live;
    for found in node::scan(device_dir)?.into_iter().filter(dead) {
        node::remove(device_dir, volume, found.device)?;
    }
    Ok(())
}
