//! Arguments of CSI calls. Any message is refused, or gives values within their limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use shorthorn_api::csi::v1::{CapacityRange, VolumeCapability};
use shorthorn_csi::{VolumeAccess, capability, options, size_range};
use shorthorn_types::VolumeName;

fuzz_target!(|data: &[u8]| {
    if let Ok(range) = CapacityRange::decode(data) {
        if let Ok(size) = size_range(Some(range)) {
            assert!(size.limit_bytes.is_none() || size.required_bytes <= size.limit_bytes);
        }
    }
    if let Ok(wanted) = VolumeCapability::decode(data) {
        if let Ok(capability) = capability(Some(wanted)) {
            let _ = (capability.is_read_only(), capability.is_multi_node(), capability.has_one_target());
            if let VolumeAccess::Mount(mount) = &capability.access {
                assert!(mount.flags.iter().all(|flag| !flag.contains('\0')));
            }
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = options(text);
    if let Ok(name) = VolumeName::new(text) {
        assert!(!name.to_string().contains('/'));
    }
});
