use shorthorn_types::{ByteRange, Errno};

use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::SlotId;

/// A request of the frontend that is completed with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The slot whose next [`Output::Complete`](crate::Output::Complete) has the error.
    pub slot: SlotId,
    /// The operation as the frontend has submitted it.
    pub operation: Operation,
    /// The range of the operation; empty for a flush.
    pub range: ByteRange,
    /// The errno that the frontend answers.
    pub errno: Errno,
    /// Replicas, rot, or a volume that refuses every request.
    pub cause: Cause,
}

/// The reason why a request is completed with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Replicas have answered with it: the last member, or the members without space.
    Replicas(Blamed),
    /// The members hold rot there, and no other member is left.
    Rot(Blamed),
    /// The volume refuses every request: see
    /// [`CoreConfig::refuses_requests`](crate::CoreConfig::refuses_requests).
    LostWrites,
}

/// The replicas that have caused an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blamed(pub(crate) PeerMask);

impl Blamed {
    /// Returns the replicas in the order of their indices.
    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        self.0.iter()
    }
}
