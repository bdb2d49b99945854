//! The claim of an engine, and the other words of a handshake that proofs are about.

use serde::{Deserialize, Serialize};
use shorthorn_types::{Generation, ReplicaId, Secret, VolumeName};

use crate::mac::{Mac, mac};
use crate::proof::{Nonce, Proof};

/// The identity of the engine, and of the replica that it wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineClaim {
    /// The volume that the engine serves.
    pub volume: VolumeName,
    /// The replica that it expects at this address.
    pub replica: ReplicaId,
    /// The generation of this engine. The replica refuses lower ones than it has seen.
    pub generation: Generation,
    /// The index of the engine's queue that this connection serves, from 0.
    pub queue: u16,
}

/// The generation that holds a replica, with the proof that a process with the volume's secret says so to
/// this engine.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Holder {
    /// The named generation.
    pub generation: Generation,
    /// See [`Session::prove_holder`](crate::Session::prove_holder).
    pub proof: Proof,
}

/// Returns a MAC over both nonces and all claims of the engine. None of the fields has a line feed, so no two
/// different lists of fields give the same text.
pub(crate) fn derive(
    secret: &Secret,
    label: &str,
    challenge: Nonce,
    nonce: Nonce,
    claim: &EngineClaim,
) -> Mac {
    let (challenge, nonce) = (String::from(challenge), String::from(nonce));
    let EngineClaim { volume, replica, generation, queue } = claim;
    mac(secret.bytes(), label, &format!("{challenge}\n{nonce}\n{volume}\n{replica}\n{generation}\n{queue}\n"))
}
