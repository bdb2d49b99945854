use std::thread;

use shorthorn_recovery::{LinkError, ReplicaLink};
use shorthorn_types::{Members, RegionsOf, ReplicaId, View, ViewId};
use shorthorn_wire::{Extent, RegionsPage, RegionsQuery, ReplicaReport, WireLayer};

use nix::sys::socket::{Backlog, bind, listen};

use super::*;

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(60);

fn pair(timeout: Duration) -> (ReplicaConnection, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ReplicaConnection::new(ReplicaSocket::Unix(ours), timeout).unwrap(), theirs)
}

#[test]
fn the_wait_for_a_listener_that_accepts_no_connection_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let path = path.to_str().unwrap();
    let waiting: Vec<_> = (0..3).map(|_| connect_unix(path, Duration::from_millis(50))).collect();
    let errors: Vec<_> = waiting.iter().filter_map(|one| one.as_ref().err()).map(io::Error::kind).collect();
    assert!(waiting[0].is_ok() && errors.contains(&io::ErrorKind::WouldBlock), "{waiting:?}");
}

/// Answers one request with `text`.
fn answer_with(text: &(impl Serialize + Sync)) -> ReplicaConnection {
    let (mut connection, mut theirs) = pair(LIMIT);
    let nonces = (CHALLENGE.nonce, Nonce::new([6; 32]));
    connection.session = Some(Session::of_engine(&SECRET, nonces.0, nonces.1, &claim()));
    let mut session = Session::of_replica(&SECRET, nonces.0, nonces.1, &claim());
    let text = serde_json::to_value(text).unwrap();
    thread::spawn(move || {
        let mut bytes = [0; HEADER_BYTES];
        theirs.read_exact(&mut bytes).unwrap();
        let request = session.decode(&bytes).unwrap();
        let mut question = vec![0; request.data_bytes() as usize];
        theirs.read_exact(&mut question).unwrap();
        let (header, answer) = encode_text(request.response(Ok(())), &text);
        theirs.write_all(&[&session.encode(&header)[..], &answer].concat()).unwrap();
    });
    connection
}

const SECRET: Secret = Secret::new([3; 32]);
const CHALLENGE: Challenge = Challenge { nonce: Nonce::new([5; 32]), encrypted: false };

fn claim() -> EngineClaim {
    EngineClaim {
        volume: "v1".parse().unwrap(),
        replica: ReplicaId::from_random(7),
        generation: Generation::new(3, 1),
        queue: 0,
    }
}

fn welcome() -> Welcome {
    let committed = View {
        id: ViewId { generation: Generation::new(2, 0), number: 1 },
        members: Members::new([ReplicaId::from_random(7)]).unwrap(),
    };
    let report = ReplicaReport { committed, proposed: Vec::new() };
    let tracks = Members::default();
    Welcome { run: 7, size_bytes: 1 << 30, report, lost_cache: false, rebuilding: false, tracks, stamp: None }
}

/// Runs a handshake with a replica whose answer to the hello is made by `answer`: an errno or success,
/// and a text. Returns the result of the handshake.
fn handshake_with<T: Serialize>(
    answer: impl Fn(&Hello) -> (Result<(), Errno>, T) + Send,
) -> Result<Welcome, ConnectError> {
    let (mut connection, mut theirs) = pair(LIMIT);
    thread::scope(|scope| {
        scope.spawn(move || {
            let (header, text) = encode_text(Challenge::HEADER, &CHALLENGE);
            theirs.write_all(&[&header.encode()[..], &text].concat()).unwrap();
            let mut bytes = [0; HEADER_BYTES];
            theirs.read_exact(&mut bytes).unwrap();
            let request = Header::decode(&bytes).unwrap();
            let mut text = vec![0; request.data_bytes() as usize];
            theirs.read_exact(&mut text).unwrap();
            let (outcome, text) = answer(&decode_text(&request, &text).unwrap());
            let (header, text) = encode_text(request.response(outcome), &text);
            theirs.write_all(&[&header.encode()[..], &text].concat()).unwrap();
        });
        connection.handshake(claim(), &SECRET)
    })
}

fn session_of(hello: &Hello, secret: &Secret) -> Session {
    Session::of_replica(secret, CHALLENGE.nonce, hello.nonce, &hello.claim)
}

#[test]
fn a_replica_that_has_the_secret_is_believed() {
    let answer = |hello: &Hello| {
        assert!(hello.is_proven(&CHALLENGE, &SECRET));
        (Ok(()), session_of(hello, &SECRET).prove_welcome(&welcome()))
    };
    assert_eq!(handshake_with(answer).unwrap(), welcome());
}

#[test]
fn a_welcome_without_proof_is_refused() {
    let other = Secret::new([4; 32]);
    let of_other_secret =
        handshake_with(|hello| (Ok(()), session_of(hello, &other).prove_welcome(&welcome())));
    // A welcome that was recorded at an earlier opening: the nonce of that engine was another one.
    let replayed = handshake_with(|hello| {
        let earlier = Hello { nonce: Nonce::new([8; 32]), ..hello.clone() };
        (Ok(()), session_of(&earlier, &SECRET).prove_welcome(&welcome()))
    });
    let of_other_queue = handshake_with(|hello| {
        let other = Hello { claim: EngineClaim { queue: 1, ..claim() }, ..hello.clone() };
        (Ok(()), session_of(&other, &SECRET).prove_welcome(&welcome()))
    });
    // The engine's own proof sent back.
    let reflected = handshake_with(|hello| {
        let welcome = serde_json::to_string(&welcome()).unwrap();
        (Ok(()), serde_json::json!({ "welcome": welcome, "proof": hello.proof }))
    });
    for result in [of_other_secret, replayed, of_other_queue, reflected] {
        let error = result.unwrap_err();
        assert!(matches!(error, ConnectError::Unproven(Unproven::Welcome)), "{error}");
        assert!(!error.is_refusal() && error.deposed_by().is_none() && !error.is_lasting());
    }
}

#[test]
fn only_a_proven_and_newer_holder_deposes() {
    let newer = Generation::new(4, 0);
    let refused = |secret: Secret, holder: Generation| {
        handshake_with(move |hello| {
            let holder = Some(session_of(hello, &secret).prove_holder(holder));
            (Err(Errno::NOT_PERMITTED), Refusal { message: "fenced".into(), holder })
        })
    };
    let error = refused(SECRET, newer).unwrap_err();
    assert_eq!(error.deposed_by(), Some(newer), "{error}");
    for lie in [refused(Secret::new([4; 32]), newer), refused(SECRET, Generation::new(3, 1))] {
        let error = lie.unwrap_err();
        assert!(matches!(error, ConnectError::Unproven(_)) && error.deposed_by().is_none(), "{error}");
    }
    let bare = handshake_with(|_| {
        (Err(Errno::NOT_PERMITTED), serde_json::json!({ "message": "fenced", "holder": newer }))
    });
    let error = bare.unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
}

#[test]
fn pages_that_cannot_be_are_refused() {
    let query = ExtentsQuery { layer: 0, from_bytes: 0 };
    let extent = |length_bytes| Extent { offset_bytes: 0, length_bytes };
    let page = |length_bytes| ExtentsPage { extents: vec![extent(length_bytes)], next_bytes: None };
    let list = |length_bytes| answer_with(&page(length_bytes)).list_extents(query, || 8192);
    assert_eq!(list(4096).unwrap(), page(4096));
    for bad in [512, 12288] {
        let error = list(bad).unwrap_err();
        assert!(matches!(error, ConnectError::Page(_)) && error.is_of_replica(), "{error}");
    }

    let layers = |size_bytes| LayerList {
        layers: vec![WireLayer { image: "volume-head-000.img".into(), meta: String::new(), size_bytes }],
    };
    assert_eq!(answer_with(&layers(8192)).list_layers(|| 8192).unwrap(), layers(8192));
    let error = answer_with(&layers(1 << 62)).list_layers(|| 8192).unwrap_err();
    assert!(matches!(error, ConnectError::Page(_)), "{error}");

    let piece = LayerRange { image: String::new(), offset_bytes: 0, length_bytes: 1 << 20 };
    let check = LayerCheck { sum: Some(1), kept: None, next_bytes: Some(4096) };
    let error = answer_with(&check).check_layer(&piece).unwrap_err();
    assert!(matches!(error, ConnectError::Page(_)), "{error}");

    let query = RegionsQuery { of: RegionsOf::Intent, from: 0, size_bytes: Some(1 << 30) };
    let endless = RegionsPage { kept: true, runs: vec![], next: Some(1), stamp: 0 };
    let error = finish(answer_with(&endless).regions_page(query)).unwrap_err();
    assert!(matches!(error, ConnectError::Page(_)), "{error}");
}

#[test]
fn all_pages_of_a_set_have_one_deadline() {
    let query = |from| RegionsQuery { of: RegionsOf::Intent, from, size_bytes: Some(1 << 30) };
    let page = RegionsPage { kept: true, runs: vec![], next: None, stamp: 0 };
    let mut late = answer_with(&page);
    late.pages_deadline = Some(Instant::now());
    let error = finish(late.regions_page(query(1))).unwrap_err();
    assert!(error.to_string().contains("in time"), "{error}");
    // The first page begins another set.
    let mut new = answer_with(&page);
    new.pages_deadline = Some(Instant::now());
    assert_eq!(finish(new.regions_page(query(0))).unwrap(), page);
}

#[test]
fn an_exchange_that_is_over_sends_nothing_more_and_the_next_one_has_its_time() {
    let (mut connection, mut theirs) = pair(LIMIT);
    connection.set_deadline(Some(Instant::now()));
    let error = connection.write_all_in_time(&[1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    connection.set_deadline(None);
    connection.write_all_in_time(&[2]).unwrap();
    let mut byte = [0];
    theirs.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [2]);
}

#[test]
fn an_answer_that_trickles_in_is_late() {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let (mut connection, mut theirs) = pair(TIMEOUT);
    let trickle = thread::spawn(move || {
        let pause = TIMEOUT / 2;
        (0..64).take_while(|_| theirs.write_all(&[0]).is_ok()).for_each(|_| thread::sleep(pause));
    });
    let begin = Instant::now();
    let error = connection.read_all(&mut [0; 64]).unwrap_err();
    assert!(matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut), "{error}");
    // All of it would take 32 times the limit.
    assert!(begin.elapsed() < 16 * TIMEOUT, "{:?}", begin.elapsed());
    drop(connection);
    trickle.join().unwrap();
}

#[test]
fn an_answer_in_two_parts_leaves_the_time_for_the_next() {
    let (mut connection, mut theirs) = pair(LIMIT);
    theirs.write_all(&[1; 3]).unwrap();
    let rest = thread::spawn(move || theirs.write_all(&[1; 5]).map(|()| theirs).unwrap());
    let mut data = [0; 8];
    connection.read_all(&mut data).unwrap();
    let _theirs = rest.join().unwrap();
    let ReplicaSocket::Unix(stream) = &connection.stream else { unreachable!() };
    assert_eq!((data, stream.read_timeout().unwrap()), ([1; 8], Some(LIMIT)));
}

/// Returns a connection over TCP that has to encrypt, and the socket of the replica.
fn encrypting() -> (ReplicaConnection, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let mut connection = ReplicaConnection::open(&address, LIMIT).unwrap();
    connection.require_encryption(true);
    (connection, listener.accept().unwrap().0)
}

#[test]
fn nothing_is_sent_in_clear_to_a_replica_that_does_not_encrypt() {
    let (mut connection, mut theirs) = encrypting();
    let (header, text) = encode_text(Challenge::HEADER, &CHALLENGE);
    theirs.write_all(&[&header.encode()[..], &text].concat()).unwrap();
    let error = connection.handshake(claim(), &SECRET).unwrap_err();
    assert!(matches!(error, ConnectError::Encryption(EncryptionError::NotOffered)), "{error}");
    assert!(!error.is_lasting() && !error.is_of_replica());
    drop(connection);
    let mut sent = Vec::new();
    theirs.read_to_end(&mut sent).unwrap();
    assert!(sent.is_empty(), "{sent:?}");
}

#[test]
fn a_unix_socket_is_never_encrypted() {
    let (mut connection, _theirs) = pair(LIMIT);
    connection.require_encryption(true);
    assert!(!connection.is_to_encrypt);
}

#[test]
fn a_replica_that_cannot_encrypt_is_quoted() {
    let (mut connection, mut theirs) = encrypting();
    let refusal = Refusal { message: "no module".to_owned(), holder: None };
    let hello = Header::request(Opcode::Hello, 0, 0, 0);
    let (header, text) = encode_text(hello.response(Err(Errno::INVALID)), &refusal);
    let frame = [&header.encode()[..], &text].concat();
    theirs.write_all(&frame[5..]).unwrap();
    let declined = connection.declined(frame[..5].try_into().unwrap());
    assert!(matches!(&declined, EncryptionError::Declined(message) if message == "no module"), "{declined}");
    theirs.write_all(&[0; HEADER_BYTES]).unwrap();
    let nonsense = connection.declined(*b"HTTP/");
    assert!(matches!(nonsense, EncryptionError::Tls(shorthorn_tls::TlsError::NotTls(_))), "{nonsense}");
}
