//! The Controller service of CSI.
//!
//! A call checks its arguments, takes the gate of its volume, and stores the desired state. Then it waits
//! until the reconcilers have reached that state, or the caller has to get an error. Nothing is remembered
//! beside the objects: a repeated call, also at another controller, continues from the stored state. A wait
//! that ends without success returns a code that Kubernetes does not take for final, because the work
//! continues.
//!
//! Every volume can be reached from every node that has an agent, so volumes have no topology of their own.

mod arguments;
mod call;
mod capacity;
mod capacity_cache;
mod create;
mod deadline;
mod expand;
mod list;
mod publish;
mod server;
mod standby;
mod status;
mod wait;

pub use server::CsiController;
pub use standby::CsiStandby;
