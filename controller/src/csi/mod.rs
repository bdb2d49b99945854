//! The Controller service of CSI.
//!
//! A call checks its arguments, takes the gate of its volume, stores what is wanted, and waits until the
//! reconcilers have made it so, or the caller has to hear something. Nothing is remembered beside the
//! objects: whoever asks again, also another controller, goes on from what is stored. A wait that ends
//! without success answers a code that Kubernetes does not take for final, as it all goes on.
//!
//! Every volume can be reached from every node that has an agent, so volumes have no topology of their own.

mod arguments;
mod call;
mod capacity;
mod create;
mod deadline;
mod door;
mod expand;
mod list;
mod publish;
mod server;
mod status;
mod wait;

pub use door::CsiDoor;
pub use server::CsiController;
