use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::ConnectionTrafficSecrets;
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use shorthorn_types::{Secret, hex};

use super::*;
use crate::keys::{End, seed};

const SECRET: Secret = Secret::new([7; 32]);
/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(60);
/// Half of the stack of the threads in engine and replica that do a handshake.
const STACK_BYTES: usize = 128 << 10;

type Outcome = Result<Keys, TlsError>;

fn pair() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    for socket in [&ours, &theirs] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (ours, theirs)
}

fn serve(secret: &Secret, socket: &mut (impl Read + Write)) -> Outcome {
    let first = first_record(socket)?;
    ReplicaTls::new(secret)?.handshake(first, socket)
}

fn first_record(socket: &mut impl Read) -> Result<Vec<u8>, TlsError> {
    let mut start = [0; RECORD_HEADER_BYTES];
    socket.read_exact(&mut start)?;
    read_record(start, socket)
}

/// Runs a handshake of an engine and a replica; returns the results of both.
fn shake(of_engine: Secret, of_replica: Secret) -> (Outcome, Outcome) {
    let (mut engine, mut replica) = pair();
    let threads = || thread::Builder::new().stack_size(STACK_BYTES);
    let serving = threads().spawn(move || serve(&of_replica, &mut replica)).unwrap();
    let opening = threads().spawn(move || EngineTls::new(&of_engine)?.handshake(&mut engine)).unwrap();
    (opening.join().unwrap(), serving.join().unwrap())
}

/// Returns number, key and initialisation vector of a direction.
fn parts((number, secrets): &(u64, ConnectionTrafficSecrets)) -> (u64, Vec<u8>, Vec<u8>) {
    let ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } = secrets else { panic!("another cipher") };
    (*number, key.as_ref().to_vec(), iv.as_ref().to_vec())
}

#[test]
fn seeds_are_those_of_all_versions() {
    let secret = Secret::new(std::array::from_fn(|at| u8::try_from(at).unwrap()));
    // Computed with HMAC-SHA-256 of Python, by RFC 5869.
    for (end, wanted) in [
        (End::Engine, "94ac73108bd4516b37a1d13e54e583f5d1e3d0c5619359a9c39948986de83668"),
        (End::Replica, "62bfd49d885e793ba49c55011bb624ff31b6f9a80505522447d9af303afff56f"),
    ] {
        assert_eq!(hex(&seed(&secret, end).unwrap()), wanted, "{end:?}");
    }
}

#[test]
fn both_ends_get_the_same_keys_and_new_ones_each_time() {
    let mut earlier = Vec::new();
    for _ in 0..2 {
        let (engine, replica) = shake(SECRET, SECRET);
        let (engine, replica) = (engine.unwrap(), replica.unwrap());
        let (out, back) = (parts(&engine.secrets().tx), parts(&engine.secrets().rx));
        assert_eq!(out, parts(&replica.secrets().rx));
        assert_eq!(back, parts(&replica.secrets().tx));
        assert_eq!((out.0, back.0), (0, 0), "no record was sent with them");
        assert!(out.1 != back.1 && !earlier.contains(&out.1), "a key is used twice");
        earlier.extend([out.1, back.1]);
        assert!(!format!("{engine:?}").contains(char::is_numeric));
    }
}

#[test]
fn bytes_behind_the_handshake_stay_in_the_socket() {
    let (mut engine, mut replica) = pair();
    let serving = thread::spawn(move || {
        serve(&SECRET, &mut replica).unwrap();
        replica.write_all(b"from the replica").unwrap();
        let mut rest = Vec::new();
        replica.read_to_end(&mut rest).unwrap();
        rest
    });
    EngineTls::new(&SECRET).unwrap().handshake(&mut engine).unwrap();
    engine.write_all(b"from the engine").unwrap();
    let mut first = [0; 16];
    engine.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"from the replica");
    drop(engine);
    assert_eq!(serving.join().unwrap(), b"from the engine");
}

#[test]
fn an_end_with_another_secret_gets_nothing() {
    let (engine, replica) = shake(SECRET, Secret::new([8; 32]));
    assert!(matches!(engine, Err(TlsError::Stranger)), "{engine:?}");
    assert!(matches!(replica, Err(TlsError::Refused(_))), "{replica:?}");
}

#[test]
fn an_engine_with_another_key_gets_nothing() {
    // It accepts every replica with the secret, and shows a key of its own.
    let (mut engine, mut replica) = pair();
    let serving = thread::spawn(move || serve(&SECRET, &mut replica));
    let mut config = keys::client_config(&SECRET).unwrap();
    let stranger = keys::client_config(&Secret::new([8; 32])).unwrap();
    config.client_auth_cert_resolver = stranger.client_auth_cert_resolver;
    // An engine has its keys before the replica has looked at its proof.
    let opened = EngineTls::from(config).handshake(&mut engine);
    let refused = serving.join().unwrap();
    assert!(matches!(refused, Err(TlsError::Stranger)), "{opened:?}, {refused:?}");
}

#[test]
fn an_engine_cannot_pass_for_a_replica() {
    // It has the secret, and shows its own key.
    let (mut engine, mut replica) = pair();
    let serving = thread::spawn(move || {
        let first = first_record(&mut replica).unwrap();
        let mut config = keys::server_config(&SECRET).unwrap();
        let own = AlwaysResolvesServerRawPublicKeys::new(keys::certified(&SECRET, End::Engine).unwrap());
        config.cert_resolver = Arc::new(own);
        ReplicaTls::from(config).handshake(first, &mut replica)
    });
    let outcome = EngineTls::new(&SECRET).unwrap().handshake(&mut engine);
    assert!(matches!(outcome, Err(TlsError::Stranger)), "{outcome:?}");
    assert!(serving.join().unwrap().is_err());
}

#[test]
fn a_silent_end_costs_no_more_than_the_time_of_a_read() {
    let (mut engine, replica) = pair();
    engine.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let begun = Instant::now();
    let outcome = EngineTls::new(&SECRET).unwrap().handshake(&mut engine);
    assert!(matches!(outcome, Err(TlsError::Io(_))), "{outcome:?}");
    assert!(begun.elapsed() < LIMIT);
    drop(replica);
}

#[test]
fn an_end_that_is_gone_is_an_error() {
    let (mut engine, replica) = pair();
    drop(replica);
    assert!(matches!(EngineTls::new(&SECRET).unwrap().handshake(&mut engine), Err(TlsError::Io(_))));
}

/// Returns the outcome of a replica that receives these bytes and then nothing more.
fn serve_bytes(bytes: &[u8]) -> Outcome {
    let (mut engine, mut replica) = pair();
    engine.write_all(bytes).unwrap();
    engine.shutdown(std::net::Shutdown::Write).unwrap();
    serve(&SECRET, &mut replica)
}

#[test]
fn nonsense_is_refused() {
    for (bytes, is_tls) in [
        (&b"SHRN\x02\0\0\0\0\0"[..], false),
        (b"GET / HTTP/1.1\r\n\r\n", false),
        // Longer than a record may be.
        (&[22, 3, 1, 0x41, 0x01, 0, 0], false),
        // Not a message of the handshake.
        (&[22, 3, 1, 0, 4, 9, 0, 0, 0], true),
        // Data before the handshake.
        (&[23, 3, 3, 0, 4, 1, 2, 3, 4], true),
    ] {
        let outcome = serve_bytes(bytes);
        let expected = match outcome {
            Err(TlsError::NotTls(start)) => !is_tls && bytes.starts_with(&start),
            Err(TlsError::Protocol(_)) => is_tls,
            _ => false,
        };
        assert!(expected, "{bytes:?}: {outcome:?}");
    }
}

#[test]
fn a_handshake_of_many_small_records_ends() {
    // A client hello of 16 KiB, a byte in each record.
    let mut bytes = Vec::new();
    for byte in [1, 0, 0x40, 0].into_iter().chain([0; 100]) {
        bytes.extend([22, 3, 1, 0, 1, byte]);
    }
    let outcome = serve_bytes(&bytes);
    assert!(matches!(outcome, Err(TlsError::TooLong | TlsError::Protocol(_))), "{outcome:?}");
}

#[test]
fn the_kernel_encrypts_or_the_remedy_is_named() {
    if let Err(error) = check_kernel() {
        let text = error.to_string();
        assert!(text.contains("modprobe tls"), "{text}");
        println!("this kernel has no TLS; the tests in virtual machines cover it: {text}");
        return;
    }
    over_the_kernel();
}

/// Sends data both ways through the kernel.
fn over_the_kernel() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut engine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut replica, _) = listener.accept().unwrap();
    let serving = thread::spawn(move || {
        prepare_kernel(&replica).unwrap();
        serve(&SECRET, &mut replica).unwrap().give_to_kernel(&replica).unwrap();
        let mut data = vec![0; 100_000];
        replica.read_exact(&mut data).unwrap();
        replica.write_all(&data).unwrap();
    });
    prepare_kernel(&engine).unwrap();
    let keys = EngineTls::new(&SECRET).unwrap().handshake(&mut engine).unwrap();
    keys.give_to_kernel(&engine).unwrap();
    let data: Vec<u8> = (0..100_000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
    engine.write_all(&data).unwrap();
    let mut echo = Vec::new();
    engine.read_to_end(&mut echo).unwrap();
    serving.join().unwrap();
    assert!(echo == data);
}

#[test]
fn plain_and_encrypted_connections_prove_different_secrets() {
    assert_eq!(connection_secret(&SECRET, false).bytes(), SECRET.bytes());
    // As OpenSSL computes it: printf 'shorthorn-2 encrypted connections' | openssl dgst -sha256 -mac HMAC
    // -macopt hexkey:0707…
    let digits = hex(connection_secret(&SECRET, true).bytes());
    assert_eq!(digits, "918f74587c59560a24e7c5b1af407bbba69f199fa5a95a68870a52e18c8eb9cb");
}
