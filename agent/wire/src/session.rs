//! Keys and proofs that both ends of one connection derive from the volume's secret.

use std::fmt;

use serde::{Deserialize, Serialize};
use shorthorn_types::{Generation, Secret};
use siphasher::sip::SipHasher24;
use thiserror::Error;

use crate::engine_claim::{EngineClaim, Holder, derive};
use crate::handshake::Welcome;
use crate::header::{FrameError, HEADER_BYTES, Header};
use crate::mac::{MAC_BYTES, Mac, mac};
use crate::proof::{Nonce, Proof};

/// The replica has not proven that it has the volume's secret. Nothing that it says counts.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unproven {
    /// The welcome of the replica.
    #[error(
        "the welcome does not prove the volume's secret. Find out which process answers at this address, and \
         whether it was started with the secret of this volume"
    )]
    Welcome,
    /// The welcome is proven, but this version cannot read it.
    #[error("this version cannot read the welcome: run the same version on both hosts")]
    Text,
    /// The generation that it refuses the engine for.
    #[error(
        "a refusal names generation {0} as the holder of the volume, without a proof of the volume's secret. \
         Find out which process answers at this address, and whether it was started with the secret of this \
         volume"
    )]
    Holder(Generation),
    /// The generation that it refuses the engine for is not newer.
    #[error(
        "a refusal names generation {holder}, which does not depose generation {own}: look for faults of \
         that replica"
    )]
    NotNewer {
        /// The generation that the replica names.
        holder: Generation,
        /// The generation of the engine.
        own: Generation,
    },
}

/// A [`Welcome`] with the proof that the replica has the volume's secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProvenWelcome {
    /// The welcome as JSON: the proof is over these very bytes.
    welcome: String,
    proof: Proof,
}

/// The keys of one end of one connection. Both ends derive them from the volume's secret, from a nonce of
/// each, and from all that the hello claims. So nothing that is proven with them proves anything on another
/// connection, of another queue, or for a replica or an engine of another name.
///
/// All replicas of a volume have the same secret. A proof thus shows that a process with the secret has
/// answered as the replica that the hello names. It does not show that the process is not another replica of
/// the volume.
pub struct Session {
    /// The generation of the engine.
    generation: Generation,
    /// Proves the replica's answer to the hello, and that a newer engine exists.
    answers: [u8; MAC_BYTES],
    sends: Direction,
    receives: Direction,
}

/// The frames in one direction after the opening. Each has a number, which is not sent.
struct Direction {
    key: SipHasher24,
    /// The number of the next frame.
    number: u64,
}

impl Session {
    /// Returns the engine's end of the connection on which the replica has sent `challenge` as its nonce, and
    /// the engine `nonce` with `claim`.
    #[must_use]
    pub fn of_engine(secret: &Secret, challenge: Nonce, nonce: Nonce, claim: &EngineClaim) -> Session {
        let key = |label| derive(secret, label, challenge, nonce, claim).digest();
        Session {
            generation: claim.generation,
            answers: key("shorthorn-2 answers"),
            sends: Direction::new(&key("shorthorn-2 frames to replica")),
            receives: Direction::new(&key("shorthorn-2 frames to engine")),
        }
    }

    /// Returns the replica's end of the same connection.
    #[must_use]
    pub fn of_replica(secret: &Secret, challenge: Nonce, nonce: Nonce, claim: &EngineClaim) -> Session {
        let Session { generation, answers, sends, receives } =
            Session::of_engine(secret, challenge, nonce, claim);
        Session { generation, answers, sends: receives, receives: sends }
    }

    /// Returns the bytes of the header of the next frame that this end sends.
    #[must_use]
    pub fn encode(&mut self, header: &Header) -> [u8; HEADER_BYTES] {
        let bytes = header.encode_keyed(|bytes| self.sends.check(bytes));
        self.sends.number += 1;
        bytes
    }

    /// Reads and checks the header of the next frame that this end receives. It stays the next one until
    /// [`Session::advance`].
    ///
    /// # Errors
    /// [`FrameError`] has the problem; the connection has to be closed.
    pub fn decode(&self, bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let check = self.receives.check(&mut { *bytes });
        Header::decode_keyed(bytes, self.receives.number, check)
    }

    /// Completes the frame whose header was read: the next one is another.
    pub fn advance(&mut self) {
        self.receives.number += 1;
    }

    /// Returns the welcome of a replica, with its proof.
    #[must_use]
    pub fn prove_welcome(&self, welcome: &Welcome) -> ProvenWelcome {
        let welcome = serde_json::to_string(welcome).unwrap_or_default();
        let proof = Proof::of(&self.mac_of_welcome(&welcome));
        ProvenWelcome { welcome, proof }
    }

    /// Returns the welcome of the replica.
    ///
    /// # Errors
    /// [`Unproven`]: the replica does not have the secret, or has made this proof for another connection.
    pub fn take_welcome(&self, proven: &ProvenWelcome) -> Result<Welcome, Unproven> {
        if !proven.proof.is(&self.mac_of_welcome(&proven.welcome)) {
            return Err(Unproven::Welcome);
        }
        serde_json::from_str(&proven.welcome).map_err(|_| Unproven::Text)
    }

    /// Returns the generation that a replica refuses the engine for, with its proof.
    #[must_use]
    pub fn prove_holder(&self, generation: Generation) -> Holder {
        Holder { generation, proof: Proof::of(&self.mac_of_holder(generation)) }
    }

    /// Returns the generation of the newer engine in a refusal.
    ///
    /// # Errors
    /// [`Unproven`]: then the engine must not believe that it is deposed.
    pub fn take_holder(&self, holder: &Holder) -> Result<Generation, Unproven> {
        if !holder.proof.is(&self.mac_of_holder(holder.generation)) {
            return Err(Unproven::Holder(holder.generation));
        }
        if holder.generation <= self.generation {
            return Err(Unproven::NotNewer { holder: holder.generation, own: self.generation });
        }
        Ok(holder.generation)
    }

    fn mac_of_welcome(&self, welcome: &str) -> Mac {
        mac(&self.answers, "welcome", welcome)
    }

    fn mac_of_holder(&self, holder: Generation) -> Mac {
        mac(&self.answers, "holder", &holder.to_string())
    }
}

impl Direction {
    /// Creates the state of a direction. SipHash has keys of 16 bytes.
    fn new(key: &[u8; MAC_BYTES]) -> Direction {
        let (key, _) = key.split_first_chunk().unwrap_or((&[0; 16], &[]));
        Direction { key: SipHasher24::new_with_key(key), number: 0 }
    }

    /// Returns the keyed check of the next frame, whose header this is. Its number takes the place of the
    /// check meanwhile.
    fn check(&self, header: &mut [u8; HEADER_BYTES]) -> u64 {
        if let Some(end) = header.last_chunk_mut() {
            *end = self.number.to_le_bytes();
        }
        self.key.hash(header)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("generation", &self.generation).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Members, ReplicaId, ReplicaReport, View, ViewId};

    use super::*;
    use crate::handshake::{Challenge, Hello};
    use crate::header::Opcode;

    const SECRET: Secret = Secret::new([3; 32]);
    const CHALLENGE: Challenge = Challenge { nonce: Nonce::new([5; 32]), encrypted: false };
    const NONCE: Nonce = Nonce::new([6; 32]);

    fn claim() -> EngineClaim {
        EngineClaim {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(7),
            generation: Generation::new(3, 1),
            queue: 0,
        }
    }

    fn session() -> Session {
        Session::of_engine(&SECRET, CHALLENGE.nonce, NONCE, &claim())
    }

    fn replica() -> Session {
        Session::of_replica(&SECRET, CHALLENGE.nonce, NONCE, &claim())
    }

    fn welcome() -> Welcome {
        let id = ViewId { generation: Generation::new(2, 0), number: 1 };
        let view = View { id, members: Members::new([ReplicaId::from_random(7)]).unwrap() };
        Welcome {
            run: 7,
            size_bytes: 1 << 30,
            report: ReplicaReport { committed: view, proposed: vec![view] },
            lost_cache: false,
            rebuilding: false,
            tracks: Members::default(),
            stamp: Some(4),
        }
    }

    /// Returns all connections that differ from [`session`] in one thing.
    fn others() -> Vec<(Secret, Nonce, Nonce, EngineClaim)> {
        let with = |claim| (SECRET, CHALLENGE.nonce, NONCE, claim);
        vec![
            (Secret::new([4; 32]), CHALLENGE.nonce, NONCE, claim()),
            (SECRET, Nonce::new([9; 32]), NONCE, claim()),
            (SECRET, CHALLENGE.nonce, Nonce::new([9; 32]), claim()),
            (SECRET, NONCE, CHALLENGE.nonce, claim()),
            with(EngineClaim { volume: "v2".parse().unwrap(), ..claim() }),
            with(EngineClaim { replica: ReplicaId::from_random(8), ..claim() }),
            with(EngineClaim { generation: Generation::new(3, 2), ..claim() }),
            with(EngineClaim { generation: Generation::new(3, 1).of_nonce(4), ..claim() }),
            with(EngineClaim { queue: 1, ..claim() }),
        ]
    }

    #[test]
    fn a_hello_is_proven_for_one_challenge_and_as_it_is() {
        let hello = Hello::new(claim(), NONCE, &CHALLENGE, &SECRET);
        assert!(hello.is_proven(&CHALLENGE, &SECRET));
        for (secret, challenge, nonce, claim) in others() {
            let other = Hello { claim, nonce, ..hello.clone() };
            assert!(!other.is_proven(&Challenge { nonce: challenge, ..CHALLENGE }, &secret), "{other:?}");
        }
    }

    #[test]
    fn a_welcome_is_proven_on_one_connection_and_as_it_is() {
        let proven = replica().prove_welcome(&welcome());
        assert_eq!(session().take_welcome(&proven), Ok(welcome()));
        for (secret, challenge, nonce, claim) in others() {
            let other = Session::of_engine(&secret, challenge, nonce, &claim);
            assert_eq!(other.take_welcome(&proven), Err(Unproven::Welcome), "{claim:?}");
        }
        for at in 0..proven.welcome.len() {
            let mut changed = proven.clone();
            changed.welcome.replace_range(at..=at, "#");
            assert_eq!(session().take_welcome(&changed), Err(Unproven::Welcome), "byte {at}");
            changed.welcome.truncate(at);
            assert_eq!(session().take_welcome(&changed), Err(Unproven::Welcome), "{at} bytes");
        }
        let longer = ProvenWelcome { welcome: format!("{} ", proven.welcome), ..proven };
        assert_eq!(session().take_welcome(&longer), Err(Unproven::Welcome));
    }

    #[test]
    fn no_proof_is_valid_in_place_of_another() {
        let hello = Hello::new(claim(), NONCE, &CHALLENGE, &SECRET);
        let mut proven = replica().prove_welcome(&welcome());
        let holder = replica().prove_holder(Generation::new(4, 0));
        for proof in [hello.proof, holder.proof] {
            proven.proof = proof;
            assert_eq!(session().take_welcome(&proven), Err(Unproven::Welcome));
        }
        let as_welcome = ProvenWelcome { welcome: "4.0".into(), proof: holder.proof };
        assert_eq!(session().take_welcome(&as_welcome), Err(Unproven::Welcome));
        let reflected = Holder { generation: Generation::new(4, 0), proof: hello.proof };
        assert_eq!(session().take_holder(&reflected), Err(Unproven::Holder(reflected.generation)));
    }

    #[test]
    fn a_holder_is_proven_on_one_connection_and_is_newer() {
        let newer = Generation::new(4, 0);
        let holder = replica().prove_holder(newer);
        assert_eq!(session().take_holder(&holder), Ok(newer));
        for (secret, challenge, nonce, claim) in others() {
            let other = Session::of_engine(&secret, challenge, nonce, &claim);
            assert_eq!(other.take_holder(&holder), Err(Unproven::Holder(newer)), "{claim:?}");
        }
        let other = Holder { generation: Generation::new(5, 0), ..holder };
        assert_eq!(session().take_holder(&other), Err(Unproven::Holder(other.generation)));
        let own = claim().generation;
        for holder in [own, Generation::new(3, 0)] {
            let proven = replica().prove_holder(holder);
            assert_eq!(session().take_holder(&proven), Err(Unproven::NotNewer { holder, own }));
        }
    }

    fn write(id: u64) -> Header {
        Header { data_check: 7, ..Header::request(Opcode::Write, id, 4096, 512) }
    }

    /// Takes the frame at its end, if it is good.
    fn take(session: &mut Session, bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let header = session.decode(bytes)?;
        session.advance();
        Ok(header)
    }

    #[test]
    fn frames_are_received_in_their_order() {
        let (mut engine, mut replica) = (session(), replica());
        let sent = [1, 2, 2, 3].map(|id| engine.encode(&write(id)));
        assert_ne!(sent[1], sent[2], "the same request twice has two checks");
        for (bytes, id) in sent.iter().zip([1, 2, 2, 3]) {
            assert_eq!(replica.decode(bytes), Ok(write(id)), "reading does not take it");
            assert_eq!(take(&mut replica, bytes), Ok(write(id)));
        }
        let answer = write(1).response(Ok(()));
        assert_eq!(take(&mut engine, &replica.encode(&answer)), Ok(answer));
    }

    #[test]
    fn a_frame_is_good_at_one_place_only() {
        let (mut engine, mut replica) = (session(), replica());
        let sent = [1, 2, 3].map(|id| engine.encode(&write(id)));
        let refused = |number| Err(FrameError::KeyedCheck { number });
        assert_eq!(take(&mut replica, &sent[1]), refused(0), "one is missing");
        assert_eq!(take(&mut replica, &sent[0]), Ok(write(1)));
        assert_eq!(take(&mut replica, &sent[0]), refused(1), "once more");
        assert_eq!(take(&mut replica, &sent[2]), refused(1), "out of order");
        assert_eq!(take(&mut engine, &sent[0]), refused(0), "sent back to its sender");
        assert_eq!(take(&mut replica, &write(2).encode()), refused(1), "made without a key");
    }

    #[test]
    fn no_bit_of_a_frame_can_change() {
        let mut engine = session();
        let sent = engine.encode(&write(1));
        for bit in 0..HEADER_BYTES * 8 {
            let mut changed = sent;
            changed[bit / 8] ^= 1 << (bit % 8);
            // An attacker makes the CRC fit.
            let crc = crc32c::crc32c(&changed[..36]);
            if bit < 36 * 8 {
                changed[36..40].copy_from_slice(&crc.to_le_bytes());
            }
            let error = replica().decode(&changed).unwrap_err();
            let is_early = matches!(
                error,
                FrameError::Magic(_) | FrameError::Version(_) | FrameError::HeaderCheck { .. }
            );
            let early = [0..40, 36 * 8..40 * 8].iter().any(|bits| bits.contains(&bit));
            assert_eq!(is_early, early, "bit {bit}: {error}");
        }
    }

    #[test]
    fn a_frame_is_good_on_one_connection_only() {
        let sent = session().encode(&write(1));
        for (secret, challenge, nonce, claim) in others() {
            let other = Session::of_replica(&secret, challenge, nonce, &claim);
            assert_eq!(other.decode(&sent), Err(FrameError::KeyedCheck { number: 0 }), "{claim:?}");
        }
    }

    #[test]
    fn the_keyed_check_is_siphash_2_4_of_header_and_number() {
        let mut engine = session();
        engine.sends = Direction {
            key: SipHasher24::new_with_key(&std::array::from_fn(|at| u8::try_from(at).unwrap())),
            number: 0x1f,
        };
        let sent = engine.encode(&write(1));
        let mut message = sent;
        message[40..].copy_from_slice(&[0x1f, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(message[..8], *b"SHRN\x02\x04\0\0");
        assert_eq!(u64::from_le_bytes(sent[40..].try_into().unwrap()), siphash_2_4(&message));
        // The vector of the paper, for a message of 15 bytes.
        assert_eq!(
            siphash_2_4(&std::array::from_fn::<u8, 15, _>(|at| u8::try_from(at).unwrap())),
            0xa129_ca61_49be_45e5
        );
    }

    /// Computes the SipHash as in its paper, with the key of the bytes 0 to 15.
    fn siphash_2_4(message: &[u8]) -> u64 {
        let (k0, k1) = (0x0706_0504_0302_0100_u64, 0x0f0e_0d0c_0b0a_0908_u64);
        let mut v = [
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ];
        let round = |v: &mut [u64; 4]| {
            v[0] = v[0].wrapping_add(v[1]);
            v[2] = v[2].wrapping_add(v[3]);
            v[1] = v[1].rotate_left(13) ^ v[0];
            v[3] = v[3].rotate_left(16) ^ v[2];
            v[0] = v[0].rotate_left(32);
            v[2] = v[2].wrapping_add(v[1]);
            v[0] = v[0].wrapping_add(v[3]);
            v[1] = v[1].rotate_left(17) ^ v[2];
            v[3] = v[3].rotate_left(21) ^ v[0];
            v[2] = v[2].rotate_left(32);
        };
        let mut padded = message.to_vec();
        padded.resize(message.len() / 8 * 8 + 7, 0);
        padded.push(u8::try_from(message.len() % 256).unwrap());
        for word in padded.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            v[3] ^= word;
            round(&mut v);
            round(&mut v);
            v[0] ^= word;
        }
        v[2] ^= 0xff;
        (0..4).for_each(|_| round(&mut v));
        v[0] ^ v[1] ^ v[2] ^ v[3]
    }

    #[test]
    fn keys_are_never_debugged() {
        assert_eq!(
            format!("{:?}", session()),
            "Session { generation: Generation { attach: 3, restart: 1, nonce: 0 }, .. }"
        );
    }
}
