//! Generates the messages, clients and servers; needs `protoc` on the PATH, with the
//! common types of Protocol Buffers (package libprotobuf-dev).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "shorthorn/v1/node.proto",
        "shorthorn/v1/controller.proto",
        "shorthorn/v1/tls.proto",
        "csi/v1/csi.proto",
        "pluginregistration/v1/registration.proto",
    ];
    let descriptors = std::path::PathBuf::from(std::env::var("OUT_DIR")?).join("descriptors.bin");
    tonic_prost_build::configure().file_descriptor_set_path(descriptors).compile_protos(&files, &["."])?;
    Ok(())
}
