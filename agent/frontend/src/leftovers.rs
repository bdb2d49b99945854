//! Devices of the kernel whose engine has ended and does not come back.

use std::path::Path;

use shorthorn_types::VolumeName;

use crate::{FrontendError, node, remove_iscsi_leftovers, remove_nbd_leftovers, ublk};

/// Removes every device of `volume`, and their nodes in `device_dir`. Waiting requests fail, and their users
/// get errors. Otherwise the requests, and an unmount, would wait for ever.
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
