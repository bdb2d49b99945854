//! The gRPC interfaces: the node API of the agent, the API of the controller, and the interfaces between
//! Kubernetes and a storage driver. The `.proto` files beside this crate are the contracts and their
//! documentation.

mod status;

pub use status::{ViewError, nonempty, nonzero, report};

/// The header of a call to an agent that says which cluster the controller is of that makes it.
pub const CLUSTER_HEADER: &str = "shorthorn-cluster";

/// The header of a call to an agent that says which leader makes it, as a number that rises with every
/// leader. Absent: the controller is the only one by its store, or of an earlier release.
pub const LEADER_HEADER: &str = "shorthorn-leader";

/// Levels of agents, as GetNode shows them: the abilities of later releases beyond those that all agents
/// have.
pub mod level {
    /// The agent knows which cluster its node belongs to.
    pub const CLUSTERS: u32 = 1;
    /// The agent moves deleted replicas to the trash of their disk, with the record of the request.
    pub const TRASH: u32 = CLUSTERS;
    /// The agent refuses a request for a disk that is not mounted, or that another disk has replaced.
    pub const DISK_IDENTITY: u32 = CLUSTERS;
    /// The agent starts engines and replicas that encrypt in transit.
    pub const ENCRYPTION: u32 = 2;
    /// The agent binds a restored replica to the new secret of its volume.
    pub const REBINDING: u32 = ENCRYPTION;
    /// The level of this release.
    pub const NEWEST: u32 = ENCRYPTION;
}

/// The path of each method of our own interfaces, like `/shorthorn.v1.Node/GetNode`.
///
/// # Errors
/// Never happens: the descriptors are made by the build.
pub fn method_paths() -> Result<Vec<String>, prost::DecodeError> {
    use prost::Message;
    let descriptors = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    let files = prost_types::FileDescriptorSet::decode(descriptors.as_slice())?.file;
    let ours = files.iter().filter(|file| file.package() == "shorthorn.v1");
    let services = ours.flat_map(|file| &file.service);
    Ok(services
        .flat_map(|service| {
            let path = |method: &prost_types::MethodDescriptorProto| {
                format!("/shorthorn.v1.{}/{}", service.name(), method.name())
            };
            service.method.iter().map(path)
        })
        .collect())
}

/// Version 1 of our own interfaces.
pub mod v1 {
    #![allow(clippy::all)]
    tonic::include_proto!("shorthorn.v1");
}

/// The Container Storage Interface.
pub mod csi {
    /// Version 1, as of 1.12.
    pub mod v1 {
        #![allow(clippy::all)]
        tonic::include_proto!("csi.v1");
    }
}

/// The registration of a driver with kubelet.
pub mod pluginregistration {
    #![allow(clippy::all)]
    tonic::include_proto!("pluginregistration");
}
