use hmac::{Hmac, KeyInit, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, VolumeName};

use crate::header::{FrameError, Header, MAX_TEXT_BYTES, Opcode};

/// First frame of a connection, from the replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// 32 random bytes in hexadecimal, new for every connection.
    pub nonce: String,
}

/// Who the engine is and whom it means to talk to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The volume that the engine serves.
    pub volume: VolumeName,
    /// The replica that it expects at this address.
    pub replica: ReplicaId,
    /// Of this engine. Lower ones than the replica has seen are refused.
    pub generation: Generation,
    /// Which of the engine's queues this connection serves, from 0.
    pub queue: u16,
    /// [`proof`] over the fields above and the nonce, in hexadecimal.
    pub proof: String,
}

/// The replica takes the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Size of the volume as the replica has it.
    pub size_bytes: u64,
    /// The views that it knows.
    pub report: ReplicaReport,
    /// Whether the host has been restarted, or the disk has failed, since the replica last had everything durable: what was
    /// written and not flushed then may be gone. Such a replica is the last choice as the source of a copy.
    #[serde(default)]
    pub lost_cache: bool,
    /// Whether it is being rebuilt: it lacks data, whatever its views say.
    #[serde(default)]
    pub rebuilding: bool,
    /// The replicas whose missed regions it keeps.
    #[serde(default)]
    pub tracks: Members,
    /// The newest stamp that it was sent, as its disk has kept it: see [`is_current`](shorthorn_types::is_current).
    #[serde(default)]
    pub stamp: Option<u32>,
}

/// The replica does not take the engine, or not this request; the status of the frame has the errno.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Why, for people.
    pub message: String,
    /// The generation that holds the volume, where that is the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Generation>,
}

/// A proposed view, or the mark that it is committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewMessage {
    /// The view.
    pub view: View,
    /// What the engine knew when it made it: the replica takes that over.
    pub basis: ReplicaReport,
}

/// The proof that the engine has the volume's secret: HMAC-SHA-256 over the nonce and what the hello claims.
#[must_use]
pub fn proof(secret: &[u8], nonce: &str, hello: &Hello) -> String {
    // A key of any length is fine for HMAC: the error of new_from_slice cannot occur.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else { return String::new() };
    let Hello { volume, replica, generation, queue, .. } = hello;
    mac.update(format!("shorthorn-1\n{nonce}\n{volume}\n{replica}\n{generation}\n{queue}\n").as_bytes());
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tells the volume of that secret from another one that had its name before, and does not tell the secret: 16 hexadecimal
/// digits of an HMAC-SHA-256.
#[must_use]
pub fn fingerprint(secret: &[u8]) -> String {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else { return String::new() };
    mac.update(b"shorthorn-1\nfingerprint\n");
    mac.finalize().into_bytes().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Compares two proofs in a time that does not tell where they differ.
#[must_use]
pub fn proofs_equal(one: &str, other: &str) -> bool {
    let different = one.bytes().zip(other.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && different == 0 && !one.is_empty()
}

/// Header and text of a control frame; `request` is the request that it answers, if it does.
///
/// The text is at most [`Opcode::text_max_bytes`] long: the messages are bounded by the number of members, of
/// proposed views, of runs or of extents. Only a list of layers may be longer, which its sender has to look at.
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
    /// The header that goes before it.
    pub const HEADER: Header = Header::request(Opcode::Challenge, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Members, ViewId};

    use super::*;

    fn hello() -> Hello {
        Hello {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(7),
            generation: Generation::new(3, 1),
            queue: 0,
            proof: String::new(),
        }
    }

    #[test]
    fn a_proof_binds_every_field() {
        let mine = proof(b"secret", "nonce", &hello());
        assert_eq!(mine.len(), 64);
        assert!(proofs_equal(&mine, &proof(b"secret", "nonce", &hello())));
        let others = [
            proof(b"Secret", "nonce", &hello()),
            proof(b"secret", "other", &hello()),
            proof(b"secret", "nonce", &Hello { volume: "v2".parse().unwrap(), ..hello() }),
            proof(b"secret", "nonce", &Hello { replica: ReplicaId::from_random(8), ..hello() }),
            proof(b"secret", "nonce", &Hello { generation: Generation::new(3, 2), ..hello() }),
            proof(b"secret", "nonce", &Hello { generation: Generation::new(3, 1).of_nonce(4), ..hello() }),
            proof(b"secret", "nonce", &Hello { queue: 1, ..hello() }),
        ];
        for other in others {
            assert!(!proofs_equal(&mine, &other));
        }
        assert!(!proofs_equal("", ""));
    }

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
    fn damaged_texts_are_refused() {
        let (header, mut bytes) = encode_text(Challenge::HEADER, &Challenge { nonce: "ab".into() });
        assert!(decode_text::<Challenge>(&header, &bytes).is_ok());
        assert_eq!(decode_text::<Welcome>(&header, &bytes), Err(FrameError::Text(Opcode::Challenge)));
        bytes[3] ^= 1;
        assert!(matches!(decode_text::<Challenge>(&header, &bytes), Err(FrameError::DataCheck { .. })));
    }
}
