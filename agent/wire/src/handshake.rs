use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use shorthorn_types::{Members, ReplicaReport, Secret, View};

use crate::engine_claim::{EngineClaim, Holder, derive};
use crate::header::{FrameError, Header, MAX_TEXT_BYTES, Opcode};
use crate::mac::Mac;
use crate::proof::{Nonce, Proof};

/// First frame of a connection, from the replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The nonce of the replica.
    pub nonce: Nonce,
    /// True if the handshake of TLS comes next. This frame is not encrypted, and nothing proves it: an engine
    /// that has to encrypt ends the handshake without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// The claim of the engine, and the proof that it has the volume's secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The volume, the replica, the generation and the queue.
    pub claim: EngineClaim,
    /// The nonce of the engine, which the replica's proofs cover.
    pub nonce: Nonce,
    /// An HMAC with the volume's secret over both nonces and the claim.
    pub proof: Proof,
}

/// The replica takes the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Drawn at random by each run of the replica's process. An engine does not combine answers and
    /// connections of two runs. The replica may have lost power in between, and with it data that was not
    /// flushed.
    pub run: u64,
    /// Size of the volume as the replica has it.
    pub size_bytes: u64,
    /// The views that it knows.
    pub report: ReplicaReport,
    /// True if the host was restarted, or the disk has failed, while the replica's data was not durable. Its
    /// unflushed writes may be lost. Such a replica is the last choice as the source of a copy.
    #[serde(default)]
    pub lost_cache: bool,
    /// True if the replica is being rebuilt: it lacks data, whatever its views say.
    #[serde(default)]
    pub rebuilding: bool,
    /// The replicas whose missed regions it keeps.
    #[serde(default)]
    pub tracks: Members,
    /// The newest stamp that it was sent, as its disk has kept it: see
    /// [`is_current`](shorthorn_types::is_current).
    #[serde(default)]
    pub stamp: Option<u32>,
}

/// The replica does not take the engine, or not this request; the status of the frame has the errno.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// The reason, for people.
    pub message: String,
    /// The generation that holds the volume, if that is the reason. An engine that believes it ends for good,
    /// so it needs a proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
}

/// A proposed view, or the mark that it is committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewMessage {
    /// The proposed or committed view.
    pub view: View,
    /// The report on which the engine has based the view: the replica takes it over.
    pub basis: ReplicaReport,
}

impl Hello {
    /// Creates the hello that answers `challenge`. `nonce` was drawn for it alone.
    #[must_use]
    pub fn new(claim: EngineClaim, nonce: Nonce, challenge: &Challenge, secret: &Secret) -> Hello {
        let proof = Proof::of(&mac_of_hello(secret, challenge, nonce, &claim));
        Hello { claim, nonce, proof }
    }

    /// Returns true if the engine has the volume's secret, and means this connection.
    #[must_use]
    pub fn is_proven(&self, challenge: &Challenge, secret: &Secret) -> bool {
        self.proof.is(&mac_of_hello(secret, challenge, self.nonce, &self.claim))
    }
}

fn mac_of_hello(secret: &Secret, challenge: &Challenge, nonce: Nonce, claim: &EngineClaim) -> Mac {
    derive(secret, "shorthorn-2 hello", challenge.nonce, nonce, claim)
}

/// Returns header and text of a control frame; `request` is the request that it answers, if it does.
///
/// The text is at most [`Opcode::text_max_bytes`] long: the messages are bounded by the number of members, of
/// proposed views, of runs or of extents. Only a list of layers may be longer, which its sender has to look
/// at.
#[must_use]
pub fn encode_text<T: Serialize>(header: Header, text: &T) -> (Header, Vec<u8>) {
    let bytes = serde_json::to_vec(text).unwrap_or_default();
    debug_assert!(
        bytes.len() <= MAX_TEXT_BYTES as usize || header.opcode.text_max_bytes() > MAX_TEXT_BYTES,
        "a control text is over its bound"
    );
    let length_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let data_check = crc32c::crc32c(&bytes);
    (Header { offset_bytes: 0, length_bytes, data_check, ..header }, bytes)
}

/// Reads the text of a control frame, after its check.
///
/// # Errors
/// [`FrameError::DataCheck`] or [`FrameError::Text`].
pub fn decode_text<T: DeserializeOwned>(header: &Header, bytes: &[u8]) -> Result<T, FrameError> {
    header.check_data(crc32c::crc32c(bytes))?;
    serde_json::from_slice(bytes).map_err(|_| FrameError::Text(header.opcode))
}

impl Challenge {
    /// The header that precedes the challenge.
    pub const HEADER: Header = Header::request(Opcode::Challenge, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, Members, ReplicaId, ViewId};

    use super::*;
    use crate::session::Session;

    #[test]
    fn the_longest_view_message_fits() {
        let generation = Generation::new(u64::MAX, u32::MAX).of_nonce(u64::MAX);
        let id = ViewId { generation, number: u32::MAX };
        let members = Members::new((0..8).map(|n| ReplicaId::from_random(n * 1_000_003))).unwrap();
        let view = View { id, members };
        let basis = ReplicaReport { committed: view, proposed: vec![view; 16] };
        let (header, bytes) =
            encode_text(Header::request(Opcode::Propose, 1, 0, 0), &ViewMessage { view, basis });
        assert!(Header::decode(&header.encode()).is_ok());
        assert!(decode_text::<ViewMessage>(&header, &bytes).is_ok());
    }

    #[test]
    fn the_longest_welcome_fits_with_its_proof() {
        let generation = Generation::new(u64::MAX, u32::MAX).of_nonce(u64::MAX);
        let id = ViewId { generation, number: u32::MAX };
        let members = Members::new((0..8).map(|n| ReplicaId::from_random(n * 1_000_003))).unwrap();
        let view = View { id, members };
        let report = ReplicaReport { committed: view, proposed: vec![view; 16] };
        let (lost_cache, rebuilding, stamp) = (false, false, Some(u32::MAX));
        let welcome = Welcome {
            run: u64::MAX,
            size_bytes: u64::MAX,
            report,
            lost_cache,
            rebuilding,
            tracks: members,
            stamp,
        };
        let claim = EngineClaim {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(7),
            generation,
            queue: 0,
        };
        let nonce = Nonce::new([7; 32]);
        let session = Session::of_engine(&Secret::new([3; 32]), nonce, nonce, &claim);
        let request = Header::request(Opcode::Hello, 1, 0, 0);
        let (header, bytes) = encode_text(request.response(Ok(())), &session.prove_welcome(&welcome));
        assert!(Header::decode(&header.encode()).is_ok(), "{} bytes", bytes.len());
        assert_eq!(session.take_welcome(&decode_text(&header, &bytes).unwrap()), Ok(welcome));
    }

    #[test]
    fn a_challenge_without_encryption_is_that_of_earlier_versions() {
        let challenge = Challenge { nonce: Nonce::new([7; 32]), encrypted: false };
        let (_, plain) = encode_text(Challenge::HEADER, &challenge);
        assert_eq!(plain, format!(r#"{{"nonce":"{}"}}"#, "07".repeat(32)).into_bytes());
        let (header, bytes) = encode_text(Challenge::HEADER, &Challenge { encrypted: true, ..challenge });
        assert!(decode_text::<Challenge>(&header, &bytes).unwrap().encrypted);
    }

    #[test]
    fn damaged_texts_are_refused() {
        let challenge = Challenge { nonce: Nonce::new([7; 32]), encrypted: false };
        let (header, mut bytes) = encode_text(Challenge::HEADER, &challenge);
        assert!(decode_text::<Challenge>(&header, &bytes).is_ok());
        assert_eq!(decode_text::<Welcome>(&header, &bytes), Err(FrameError::Text(Opcode::Challenge)));
        bytes[3] ^= 1;
        assert!(matches!(decode_text::<Challenge>(&header, &bytes), Err(FrameError::DataCheck { .. })));
    }
}
