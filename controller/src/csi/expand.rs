//! Making volumes larger.

use std::sync::atomic::{AtomicU64, Ordering};

use shorthorn_api::csi::v1;
use shorthorn_controller_core::csi;
use shorthorn_controller_core::objects::{ConditionType, NEXT_ATTACH, Volume, VolumeState};
use shorthorn_csi::{CsiError, SizeRange, VolumeAccess, size_range};
use tokio::time::Instant;

use super::status::IntoCsiError;
use super::{CsiController, arguments};
use crate::store::change;

impl CsiController {
    pub(super) async fn expand(
        &self,
        request: v1::ControllerExpandVolumeRequest,
        deadline: Instant,
    ) -> Result<v1::ControllerExpandVolumeResponse, CsiError> {
        arguments::volume_id(&request.volume_id)?;
        let range = size_range(request.capacity_range)?;
        if range == SizeRange::default() {
            return Err(CsiError::Invalid("capacity_range is missing".into()));
        }
        let capability =
            request.volume_capability.map(|wanted| arguments::usable(Some(wanted))).transpose()?;
        let volume = arguments::existing_volume_id(&request.volume_id)?;
        let pass = self.enter(&volume)?;
        let name = volume.as_str();
        // The size of the last decision, which is the valid one.
        let wanted_bytes = AtomicU64::new(0);
        change(self.store.as_ref(), |cluster| {
            let (change, awaited_bytes) = csi::expand(
                cluster,
                name,
                range.required_bytes,
                range.limit_bytes,
                self.settings.scheduling,
            )?;
            wanted_bytes.store(awaited_bytes, Ordering::Relaxed);
            Ok(change)
        })
        .await
        .map_err(|error: crate::store::ChangeError<csi::SizedError>| error.into_csi_error())?;
        let wanted_bytes = wanted_bytes.into_inner();
        // The volume grows with or without a waiting caller: a waiting one does not block other calls.
        drop(pass);
        let grown = self.wait(&volume, deadline, |cluster| match cluster.volumes.get(name) {
            Some(volume) if volume.current_size_bytes() >= wanted_bytes => {
                Some(Ok((volume.current_size_bytes(), false)))
            }
            Some(volume) => grows_later(volume).then_some(Ok((wanted_bytes, true))),
            None if csi::is_unknown(cluster, name) => None,
            None => Some(Err(CsiError::NotFound(format!("volume {name} was deleted meanwhile")))),
        });
        let (size_bytes, grows_later) = grown.await??;
        // The device of a node has its size by now, or when it is made again. Its content is another matter;
        // if the capability is not given, the node finds it out.
        let is_device = capability.is_some_and(|capability| capability.access == VolumeAccess::Block);
        Ok(v1::ControllerExpandVolumeResponse {
            capacity_bytes: i64::try_from(size_bytes).unwrap_or(i64::MAX),
            node_expansion_required: grows_later || !is_device,
        })
    }
}

/// Returns true if the device in use keeps its size until the volume is attached again. The call returns no
/// error then: the external-resizer would not ask again for as long as a pod uses the claim. That includes a
/// later pod, for which the volume has grown. Kubelet asks at each mount, and gets an error of the node
/// service while the device has its old size.
fn grows_later(volume: &Volume) -> bool {
    let expanded = volume.status.conditions.get(ConditionType::Expanded);
    volume.status.state == VolumeState::Attached
        && expanded.is_some_and(|expanded| !expanded.status && expanded.reason == NEXT_ATTACH)
}
