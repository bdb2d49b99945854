//! Opens a connection, up to the point at which the engine has proven its identity.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use shorthorn_control::Secret;
use shorthorn_replica_core::QueueId;
use shorthorn_tls::{RECORD_HEADER_BYTES, ReplicaTls, TlsError, prepare_kernel, read_record};
use shorthorn_types::{Errno, Generation, ReplicaId, VolumeName};
use shorthorn_wire::{
    CONTROL_QUEUE, Challenge, FrameError, HEADER_BYTES, Header, Hello, Nonce, Opcode, Refusal, Session,
    decode_text, encode_text,
};
use thiserror::Error;

use crate::handshakes::Origin;

/// The identity of this replica, and the secret that an engine has to prove.
#[derive(Debug)]
pub(crate) struct ReplicaIdentity {
    pub volume: VolumeName,
    pub replica: ReplicaId,
    pub secret: Secret,
    /// Encrypts connections of other hosts; none if the volume does not ask for it.
    pub tls: Option<ReplicaTls>,
}

/// The reason why a connection was not opened.
#[derive(Debug, Error)]
pub(crate) enum HandshakeError {
    /// The peer has closed the connection or is too slow, or a call on the socket failed.
    #[error("the connection failed during the handshake: {0}")]
    Io(#[from] io::Error),
    /// The peer does not speak the protocol.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The first frame of the peer is not a hello.
    #[error("received {0:?} instead of a hello")]
    NoHello(Opcode),
    /// The engine wants another volume or replica.
    #[error(
        "this is replica {replica} of volume {volume}, not replica {asked_replica} of volume {asked_volume}"
    )]
    OtherIdentity {
        volume: VolumeName,
        replica: ReplicaId,
        asked_volume: VolumeName,
        asked_replica: ReplicaId,
    },
    /// The engine does not know the secret.
    #[error("the proof is wrong: the engine does not have the secret of volume {0}")]
    Proof(VolumeName),
    /// The number of the queue is above the maximum.
    #[error("queue {0} is out of bounds: the last one is {CONTROL_QUEUE}")]
    Queue(u16),
    /// The engine has not begun to encrypt.
    #[error(
        "volume {0} encrypts in transit, and the engine does not: upgrade shorthorn-agent on the node of the \
         engine, then attach the volume again"
    )]
    Plain(VolumeName),
    /// The connection could not be encrypted.
    #[error(transparent)]
    Encryption(#[from] TlsError),
    /// The generation has attachment 0, which no engine has.
    #[error("generation {} precedes every engine: attachments are numbered from 1", Generation::NEVER)]
    Generation,
}

impl HandshakeError {
    /// Returns the errno of the answer; none if the peer gets no answer.
    fn errno(&self) -> Option<Errno> {
        match self {
            HandshakeError::Io(_) | HandshakeError::Frame(_) | HandshakeError::NoHello(_) => None,
            HandshakeError::OtherIdentity { .. } => Some(Errno::new(libc::ENXIO)),
            HandshakeError::Proof(_) | HandshakeError::Plain(_) | HandshakeError::Encryption(_) => {
                Some(Errno::new(libc::EACCES))
            }
            HandshakeError::Queue(_) | HandshakeError::Generation => Some(Errno::INVALID),
        }
    }
}

/// An engine that has proven its identity, and waits for the answer to its hello.
#[derive(Debug)]
pub(crate) struct Proven {
    /// The hello, for the answer.
    pub header: Header,
    pub queue_id: QueueId,
    /// Proves the answer, and makes and reads all frames after it.
    pub session: Session,
}

/// Sends the challenge, encrypts the connection if the volume needs it, and receives and checks the hello,
/// all within `timeout`. Sends a refusal if a check fails.
///
/// # Errors
/// [`HandshakeError`]; the connection is to be dropped.
pub(crate) fn handshake(
    socket: &UnixStream,
    origin: Origin,
    identity: &ReplicaIdentity,
    nonce: [u8; 32],
    timeout: Duration,
) -> Result<Proven, HandshakeError> {
    let mut socket = Deadline { socket, end: Instant::now() + timeout };
    let tls = identity.tls.as_ref().filter(|_| origin != Origin::Local);
    let challenge = Challenge { nonce: Nonce::new(nonce), encrypted: tls.is_some() };
    let (header, text) = encode_text(Challenge::HEADER, &challenge);
    socket.write_all(&[&header.encode()[..], &text].concat())?;
    if let Some(tls) = tls {
        encrypt(&mut socket, identity, tls)?;
    }
    let (header, hello) = read_hello(&mut socket)?;
    let checked = identity.check(&hello, &challenge);
    if let Err(error) = &checked
        && let Some(errno) = error.errno()
    {
        let refusal = Refusal { message: error.to_string(), holder: None };
        socket.write_all(&refusal_frame(&header, errno, &refusal))?;
    }
    checked?;
    let queue_id = QueueId { generation: hello.claim.generation, queue: hello.claim.queue };
    let session = Session::of_replica(&identity.secret, challenge.nonce, hello.nonce, &hello.claim);
    Ok(Proven { header, queue_id, session })
}

/// Returns the frame that refuses the hello of `header`.
pub(crate) fn refusal_frame(header: &Header, errno: Errno, refusal: &Refusal) -> Vec<u8> {
    let (header, text) = encode_text(header.response(Err(errno)), refusal);
    [&header.encode()[..], &text].concat()
}

/// Encrypts the connection. If the engine does not encrypt, or the kernel cannot, sends a refusal in clear.
fn encrypt(
    socket: &mut Deadline<'_>,
    identity: &ReplicaIdentity,
    tls: &ReplicaTls,
) -> Result<(), HandshakeError> {
    let prepared = prepare_kernel(socket.socket);
    let mut start = [0; RECORD_HEADER_BYTES];
    socket.read_exact(&mut start)?;
    let (header, error) = match (read_record(start, socket), prepared) {
        (Ok(record), Ok(())) => {
            let keys = tls.handshake(record, socket)?;
            return Ok(keys.give_to_kernel(socket.socket)?);
        }
        (Ok(_), Err(error)) => (Header::request(Opcode::Hello, 0, 0, 0), error.into()),
        // It is read to its end: a close with unread bytes is a reset, which may overtake the refusal.
        (Err(TlsError::NotTls(_)), _) => {
            let (header, _) = read_hello(&mut (&start[..]).chain(&mut *socket))?;
            (header, HandshakeError::Plain(identity.volume.clone()))
        }
        (Err(error), _) => return Err(error.into()),
    };
    let refusal = Refusal { message: error.to_string(), holder: None };
    socket.write_all(&refusal_frame(&header, Errno::new(libc::EACCES), &refusal))?;
    Err(error)
}

fn read_hello(socket: &mut impl Read) -> Result<(Header, Hello), HandshakeError> {
    let mut bytes = [0; HEADER_BYTES];
    socket.read_exact(&mut bytes)?;
    let header = Header::decode(&bytes)?;
    if header.opcode != Opcode::Hello || header.is_response() {
        return Err(HandshakeError::NoHello(header.opcode));
    }
    // At most MAX_TEXT_BYTES, as the header was decoded.
    let mut text = vec![0; header.length_bytes as usize];
    socket.read_exact(&mut text)?;
    let hello = decode_text(&header, &text)?;
    Ok((header, hello))
}

impl ReplicaIdentity {
    fn check(&self, hello: &Hello, challenge: &Challenge) -> Result<(), HandshakeError> {
        let claim = &hello.claim;
        if (&claim.volume, claim.replica) != (&self.volume, self.replica) {
            return Err(HandshakeError::OtherIdentity {
                volume: self.volume.clone(),
                replica: self.replica,
                asked_volume: claim.volume.clone(),
                asked_replica: claim.replica,
            });
        }
        if claim.queue > CONTROL_QUEUE {
            return Err(HandshakeError::Queue(claim.queue));
        }
        if claim.generation == Generation::NEVER {
            return Err(HandshakeError::Generation);
        }
        // Last, because this check is the most expensive one.
        if !hello.is_proven(challenge, &self.secret) {
            return Err(HandshakeError::Proof(self.volume.clone()));
        }
        Ok(())
    }
}

/// A socket with one deadline for all reads and writes together, so that a slow peer cannot prolong a
/// handshake.
struct Deadline<'a> {
    socket: &'a UnixStream,
    end: Instant,
}

impl Deadline<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Deadline<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(self.left()?))?;
        let mut socket = self.socket;
        socket.read(buf)
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        let mut socket = self.socket;
        socket.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use shorthorn_wire::EngineClaim;

    use shorthorn_tls::connection_secret;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const NONCE: Nonce = Nonce::new([6; 32]);

    fn identity() -> ReplicaIdentity {
        let replica = ReplicaId::from_random(7);
        ReplicaIdentity { volume: "v1".parse().unwrap(), replica, secret: Secret::new([3; 32]), tls: None }
    }

    fn claim() -> EngineClaim {
        let generation = Generation::new(2, 1);
        EngineClaim {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(7),
            generation,
            queue: 1,
        }
    }

    /// Runs a handshake in which an engine answers the challenge with `claim`, its proof made with `secret`.
    /// Returns the result, and the answer to the engine.
    fn open(
        claim: EngineClaim,
        secret: [u8; 32],
    ) -> (Result<Proven, HandshakeError>, Option<(Header, Refusal)>) {
        open_with(Origin::Local, &identity(), claim, secret)
    }

    fn open_with(
        origin: Origin,
        identity: &ReplicaIdentity,
        claim: EngineClaim,
        secret: [u8; 32],
    ) -> (Result<Proven, HandshakeError>, Option<(Header, Refusal)>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let engine = thread::spawn(move || {
            let (_, challenge) = read_frame::<Challenge>(&mut theirs).unwrap();
            assert_eq!(challenge.nonce, Nonce::new([5; 32]));
            let hello = Hello::new(claim, NONCE, &challenge, &Secret::new(secret));
            let (header, text) = encode_text(Header::request(Opcode::Hello, 9, 0, 0), &hello);
            theirs.write_all(&header.encode()).unwrap();
            theirs.write_all(&text).unwrap();
            read_frame::<Refusal>(&mut theirs)
        });
        let opened = handshake(&ours, origin, identity, [5; 32], TIMEOUT);
        drop(ours);
        (opened, engine.join().unwrap())
    }

    fn read_frame<T: serde::de::DeserializeOwned>(socket: &mut impl Read) -> Option<(Header, T)> {
        let mut bytes = [0; HEADER_BYTES];
        socket.read_exact(&mut bytes).ok()?;
        let header = Header::decode(&bytes).unwrap();
        let mut text = vec![0; header.data_bytes() as usize];
        socket.read_exact(&mut text).unwrap();
        Some((header, decode_text(&header, &text).unwrap()))
    }

    #[test]
    fn accepts_an_engine_that_proves_the_secret() {
        let (opened, refusal) = open(claim(), [3; 32]);
        let Proven { queue_id, session, .. } = opened.unwrap();
        assert_eq!(queue_id, QueueId { generation: Generation::new(2, 1), queue: 1 });
        assert!(refusal.is_none());
        let mut engine = Session::of_engine(&identity().secret, Nonce::new([5; 32]), NONCE, &claim());
        let request = Header::request(Opcode::Flush, 1, 0, 0);
        assert_eq!(session.decode(&engine.encode(&request)), Ok(request), "both have the same keys");
    }

    #[test]
    fn refuses_with_errno_and_reason() {
        let stranger = EngineClaim { volume: "v2".parse().unwrap(), ..claim() };
        let other = EngineClaim { replica: ReplicaId::from_random(8), ..claim() };
        let cases = [
            (stranger, [3; 32], libc::ENXIO, "of volume v1, not"),
            (other, [3; 32], libc::ENXIO, "this is replica 00000007"),
            (claim(), [4; 32], libc::EACCES, "the proof is wrong"),
            (EngineClaim { queue: 9, ..claim() }, [3; 32], libc::EINVAL, "queue 9 is out of bounds"),
            (
                EngineClaim { generation: Generation::NEVER, ..claim() },
                [3; 32],
                libc::EINVAL,
                "generation 0.0",
            ),
        ];
        for (claim, secret, errno, words) in cases {
            let (opened, refusal) = open(claim, secret);
            assert!(opened.is_err());
            let (header, refusal) = refusal.unwrap();
            assert_eq!((header.opcode, header.id, header.status), (Opcode::Hello, 9, errno));
            assert!(refusal.message.contains(words), "{}", refusal.message);
            assert!(!refusal.message.contains("0303"), "{}", refusal.message);
        }
    }

    fn encrypted() -> ReplicaIdentity {
        let secret = connection_secret(&identity().secret, true);
        ReplicaIdentity { tls: Some(ReplicaTls::new(&secret).unwrap()), secret, ..identity() }
    }

    const REMOTE: Origin = Origin::Remote(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));

    #[test]
    fn a_plain_engine_of_another_host_is_refused_with_a_reason() {
        let (opened, refusal) = open_with(REMOTE, &encrypted(), claim(), [3; 32]);
        assert!(matches!(opened, Err(HandshakeError::Plain(_))), "{opened:?}");
        let (header, refusal) = refusal.unwrap();
        assert_eq!((header.id, header.status), (9, libc::EACCES));
        assert!(refusal.message.contains("encrypts in transit"), "{}", refusal.message);
        // An engine over the Unix socket has to encrypt too: it might copy the data to other hosts in clear.
        assert!(open_with(Origin::Local, &encrypted(), claim(), [3; 32]).0.is_err());
        let secret = *encrypted().secret.bytes();
        assert!(open_with(Origin::Local, &encrypted(), claim(), secret).0.is_ok());
        assert!(open_with(REMOTE, &identity(), claim(), [3; 32]).0.is_ok());
    }

    #[test]
    fn a_kernel_that_cannot_encrypt_is_reported_to_the_engine() {
        // No kernel encrypts a Unix socket.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let engine = thread::spawn(move || {
            assert!(read_frame::<Challenge>(&mut theirs).unwrap().1.encrypted);
            theirs.write_all(&[22, 3, 1, 0, 4, 1, 0, 0, 0]).unwrap();
            read_frame::<Refusal>(&mut theirs)
        });
        let opened = handshake(&ours, REMOTE, &encrypted(), [5; 32], TIMEOUT);
        assert!(matches!(opened, Err(HandshakeError::Encryption(TlsError::Kernel(_)))), "{opened:?}");
        drop(ours);
        let (header, refusal) = engine.join().unwrap().unwrap();
        assert_eq!((header.opcode, header.status), (Opcode::Hello, libc::EACCES));
        assert!(refusal.message.contains("modprobe tls"), "{}", refusal.message);
    }

    #[test]
    fn the_deadline_is_for_the_whole_opening() {
        drip(Origin::Local, identity());
        drip(REMOTE, encrypted());
    }

    fn drip(origin: Origin, identity: ReplicaIdentity) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let dripping = thread::spawn(move || {
            let byte = Header::request(Opcode::Hello, 9, 0, 200).encode();
            for at in 0.. {
                let gone = theirs.write_all(&byte[at % HEADER_BYTES..][..1]).is_err();
                if gone
                    || stopped.recv_timeout(Duration::from_millis(20))
                        != Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                {
                    return;
                }
            }
        });
        let begun = Instant::now();
        assert!(matches!(
            handshake(&ours, origin, &identity, [5; 32], Duration::from_millis(200)),
            Err(HandshakeError::Io(_))
        ));
        assert!(begun.elapsed() < TIMEOUT);
        drop((ours, stop));
        dripping.join().unwrap();
    }
}
