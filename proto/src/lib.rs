//! The gRPC interfaces of Shorthorn: the node API of the agent and the API of the controller.
//! The `.proto` files beside this crate are the contract and its documentation.

/// Version 1 of both interfaces.
pub mod v1 {
    #![allow(clippy::all)]
    tonic::include_proto!("shorthorn.v1");
}
