use shorthorn_types::{ByteRange, Errno};

use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::SlotId;

/// A request of the frontend that is completed with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The slot of the request.
    pub slot: SlotId,
    /// The operation that failed.
    pub operation: Operation,
    /// About which bytes. Of a flush it is empty.
    pub range: ByteRange,
    /// The errno that the frontend answers.
    pub errno: Errno,
    /// The reason of the error.
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
    /// Returns each of them.
    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        self.0.iter()
    }
}
