//! The gRPC interfaces: the node API of the agent and the API of the controller, which are ours, and those that
//! Kubernetes speaks with a storage driver. The `.proto` files beside this crate are the contracts and their documentation.

/// The header of a call to an agent that says which cluster the controller is of that makes it.
pub const CLUSTER_HEADER: &str = "shorthorn-cluster";

/// What agents of later releases can do beyond what all can, as the level that GetNode shows.
pub mod level {
    /// The agent knows which cluster its node belongs to.
    pub const CLUSTERS: u32 = 1;
    /// That of this release.
    pub const NEWEST: u32 = CLUSTERS;
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

/// How a driver makes itself known to kubelet.
pub mod pluginregistration {
    #![allow(clippy::all)]
    tonic::include_proto!("pluginregistration");
}
