//! Documents and file names of a replica directory. Any bytes are refused, or mean the same when they are
//! written again. The values of unknown fields are not compared: numbers beyond 64 bits are rounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shorthorn_chain::{DiskMeta, ImageName, OperationIntent, VolumeMeta, classify, with_check, without_check};

fuzz_target!(|data: &[u8]| {
    if let Ok(volume) = VolumeMeta::parse(data) {
        let written = volume.to_bytes();
        let mut again = VolumeMeta::parse(&written).expect("a written document");
        assert!(again.unknown.keys().eq(volume.unknown.keys()));
        again.unknown = volume.unknown.clone();
        assert_eq!(again, volume);
        let checked = with_check(written.clone());
        assert_eq!(without_check("x", &checked).expect("a checked document"), written);
    }
    if let Ok(disk) = DiskMeta::parse("x", data) {
        let mut again = DiskMeta::parse("x", &disk.to_bytes()).expect("a written document");
        assert!(again.unknown.keys().eq(disk.unknown.keys()));
        again.unknown = disk.unknown.clone();
        assert_eq!(again, disk);
        let _ = disk.below_bytes();
    }
    if let Ok(intent) = OperationIntent::parse(data) {
        assert_eq!(OperationIntent::parse(&intent.to_bytes()).expect("a written document"), intent);
    }
    let _ = without_check("x", data);
    let Ok(name) = std::str::from_utf8(data) else { return };
    let _ = classify(name);
    if let Some(image) = ImageName::parse(name) {
        assert_eq!(image.to_string(), name);
        assert!(!name.contains('/') && !name.contains('\0'));
    }
});
