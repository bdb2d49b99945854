//! Generates the messages, clients and servers; needs `protoc` on the PATH, with the
//! common types of Protocol Buffers (package libprotobuf-dev).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "shorthorn/v1/node.proto",
        "shorthorn/v1/controller.proto",
        "csi/v1/csi.proto",
        "pluginregistration/v1/registration.proto",
    ];
    tonic_prost_build::configure().compile_protos(&files, &["."])?;
    Ok(())
}
