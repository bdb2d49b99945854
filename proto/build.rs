//! Generates the messages, clients and servers; needs `protoc` on the PATH.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["shorthorn/v1/node.proto", "shorthorn/v1/controller.proto"];
    tonic_prost_build::configure().compile_protos(&files, &["."])?;
    Ok(())
}
