//! Clients that know the protocol byte by byte, and break it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_frontend::{FrontendError, prepare_socket};

use super::{SIZE, Server, spec};

const MIB: usize = 1 << 20;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZERO: u16 = 6;
const FUA: u16 = 1;

impl Server {
    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn client(&self, structured: bool) -> Client {
        let mut stream = self.raw();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        if structured {
            stream.write_all(b"IHAVEOPT\0\0\0\x08\0\0\0\0").unwrap();
            let mut ack = [0; 20];
            stream.read_exact(&mut ack).unwrap();
            assert_eq!(&ack[8..], b"\0\0\0\x08\0\0\0\x01\0\0\0\0");
        }
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x05vol-1").unwrap();
        let mut export = [0; 10];
        stream.read_exact(&mut export).unwrap();
        assert_eq!(&export[..8], SIZE.to_be_bytes());
        Client { stream, structured }
    }
}

#[derive(Debug, PartialEq)]
struct Reply {
    cookie: u64,
    error: u32,
    data: Vec<u8>,
}

struct Client {
    stream: UnixStream,
    structured: bool,
}

impl Client {
    fn header(kind: u16, flags: u16, cookie: u64, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
        bytes
    }

    fn send(&mut self, kind: u16, flags: u16, cookie: u64, offset: u64, length: usize) {
        self.stream.write_all(&Client::header(kind, flags, cookie, offset, length)).unwrap();
    }

    fn send_write(&mut self, cookie: u64, offset: u64, data: &[u8]) {
        self.send(WRITE, 0, cookie, offset, data.len());
        self.stream.write_all(data).unwrap();
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Returns the next simple reply, with `data` bytes of data if it is not an error.
    fn reply(&mut self, data: usize) -> Reply {
        assert_eq!(self.take(), 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(self.take());
        let cookie = u64::from_be_bytes(self.take());
        let mut bytes = vec![0; if error == 0 { data } else { 0 }];
        self.stream.read_exact(&mut bytes).unwrap();
        Reply { cookie, error, data: bytes }
    }

    /// Returns all chunks of the answer to a READ at `offset`, put together.
    fn chunks(&mut self, cookie: u64, offset: u64, length: usize) -> Reply {
        let (mut data, mut error, mut covered) = (vec![0; length], 0, 0);
        loop {
            assert_eq!(self.take(), 0x668e_33efu32.to_be_bytes());
            let flags = u16::from_be_bytes(self.take());
            let kind = u16::from_be_bytes(self.take());
            assert_eq!(u64::from_be_bytes(self.take()), cookie);
            let bytes = u32::from_be_bytes(self.take()) as usize;
            match kind {
                1 => {
                    let at = usize::try_from(u64::from_be_bytes(self.take()) - offset).unwrap();
                    self.stream.read_exact(&mut data[at..at + bytes - 8]).unwrap();
                    covered += bytes - 8;
                }
                0x8001 => {
                    error = u32::from_be_bytes(self.take());
                    assert_eq!((self.take(), bytes), ([0, 0], 6));
                }
                other => panic!("chunk of type {other}"),
            }
            if flags == 1 {
                assert!(error != 0 || covered == length, "{covered} of {length}");
                return Reply { cookie, error, data };
            }
        }
    }

    fn read(&mut self, cookie: u64, offset: u64, length: usize) -> Reply {
        self.send(READ, 0, cookie, offset, length);
        if self.structured { self.chunks(cookie, offset, length) } else { self.reply(length) }
    }

    fn error_of(&mut self, kind: u16, flags: u16, offset: u64, length: usize) -> u32 {
        self.send(kind, flags, 5, offset, length);
        self.reply(0).error
    }

    fn assert_closed(mut self) {
        assert_eq!(self.stream.read(&mut [0; 1]).unwrap_or(0), 0, "the connection is open");
    }
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length.div_ceil(8))
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .take(length)
        .collect()
}

#[test]
fn writes_are_read_back_at_every_size() {
    let server = Server::new(1, 64);
    for structured in [false, true] {
        let mut client = server.client(structured);
        for (n, length) in
            [512, 4096, 65024, MIB - 512, MIB, MIB + 512, 3 * MIB + 512, 32 * MIB].into_iter().enumerate()
        {
            let cookie = n as u64 + 100;
            let data = pattern(cookie + u64::from(structured), length);
            client.send_write(cookie, 1024, &data);
            assert_eq!(client.reply(0), Reply { cookie, error: 0, data: vec![] });
            assert!(client.read(cookie + 50, 1024, length) == Reply { cookie: cookie + 50, error: 0, data });
        }
    }
    server.stop();
}

#[test]
fn trim_zeroes_and_flush() {
    let server = Server::new(1, 8);
    let mut client = server.client(false);
    for kind in [TRIM, ZERO] {
        for flags in [0, FUA] {
            client.send_write(1, 0, &pattern(1, 8 * MIB));
            assert_eq!(client.reply(0).error, 0);
            // More than one part of it, and more than a READ may have
            let before = server.volume.flushes();
            assert_eq!(client.error_of(kind, flags, 512, 128 * MIB), 0);
            assert_eq!(server.volume.flushes() - before, u64::from(kind == TRIM && flags == FUA));
            let back = client.read(2, 0, 4096).data;
            assert_eq!(back[..512], pattern(1, 512));
            assert!(back[512..].iter().all(|byte| *byte == 0));
        }
    }
    let before = server.volume.flushes();
    assert_eq!(client.error_of(FLUSH, 0, 0, 0), 0);
    assert_eq!(server.volume.flushes(), before + 1);
    server.stop();
}

#[test]
fn zeroes_without_a_hole_take_space() {
    const NO_HOLE: u16 = 2;
    let server = Server::new(1, 8);
    let allocated = || server.volume.file().metadata().unwrap().blocks() * 512;
    let mut client = server.client(false);
    client.send_write(1, 0, &pattern(1, 8192));
    assert_eq!(client.reply(0).error, 0);
    let length = 5 * MIB + 512;
    assert_eq!(client.error_of(ZERO, NO_HOLE | FUA, 512, length), 0);
    assert!(allocated() >= length as u64, "{} bytes take {}", length, allocated());
    let back = client.read(2, 0, 8192).data;
    assert_eq!(back[..512], pattern(1, 8192)[..512]);
    assert!(back[512..].iter().all(|byte| *byte == 0));
    assert_eq!(client.error_of(ZERO, 0, 0, 6 * MIB), 0);
    assert_eq!(allocated(), 0, "without the flag there is a hole");
    server.stop();
}

#[test]
fn bad_requests_get_their_errors_and_the_connection_lives_on() {
    const INVALID: u32 = 22;
    const NO_SPACE: u32 = 28;
    let server = Server::new(1, 8);
    for structured in [false, true] {
        let mut client = server.client(structured);
        assert_eq!(client.read(1, 1, 512).error, INVALID);
        assert_eq!(client.read(1, SIZE, 512).error, INVALID);
        assert_eq!(client.read(1, 0, 33 * MIB).error, INVALID);
        client.send_write(1, SIZE - 512, &[1; 1024]);
        assert_eq!(client.reply(0).error, NO_SPACE);
        client.send_write(1, 100, &vec![1; 3 * MIB]);
        assert_eq!(client.reply(0).error, INVALID);
        client.send_write(1, 0, &vec![1; 33 * MIB]);
        assert_eq!(client.reply(0).error, INVALID);
        assert_eq!(client.error_of(TRIM, 0, SIZE - 512, 1024), INVALID);
        assert_eq!(client.error_of(ZERO, 0, SIZE - 512, 1024), NO_SPACE);
        assert_eq!(client.error_of(TRIM, 2, 0, 512), INVALID);
        assert_eq!(client.error_of(7, 0, 0, 512), INVALID);
        assert_eq!(client.error_of(4711, 0, 0, 0), INVALID);
        // Nothing of it was written.
        assert_eq!(client.read(1, 0, 4096).data, [0; 4096]);
        client.send(DISCONNECT, 0, 0, 0, 0);
        client.assert_closed();
    }
    server.stop();
}

#[test]
fn an_error_of_the_volume_is_the_answer_to_the_whole_request() {
    const EIO: u32 = 5;
    let server = Server::new(1, 8);
    let bad = 5 * MIB as u64 / 2;
    server.volume.set_bad(bad..bad + 1);
    for structured in [false, true] {
        let mut client = server.client(structured);
        assert_eq!(client.read(7, 0, 5 * MIB).error, EIO);
        assert_eq!(client.read(7, bad - 512, 512).error, 0);
        client.send_write(8, 0, &vec![3; 16 * MIB]);
        assert_eq!(client.reply(0), Reply { cookie: 8, error: EIO, data: vec![] });
        client.send_write(9, 0, &[4; 512]);
        assert_eq!(client.reply(0).error, 0);
        assert_eq!(client.error_of(ZERO, 0, 0, 64 * MIB), EIO);
    }
    server.stop();
}

#[test]
fn invalid_requests_end_the_connection() {
    let server = Server::new(1, 8);
    let mut client = server.client(false);
    client.stream.write_all(&[0x55; 28]).unwrap();
    client.assert_closed();
    // An oldstyle client waits for the export at once and then sends requests.
    let mut oldstyle = server.raw();
    oldstyle.write_all(&Client::header(READ, 0, 1, 0, 512)).unwrap();
    let mut all = Vec::new();
    let _ = oldstyle.read_to_end(&mut all); // a reset says the same as an end
    assert!(all.len() <= 18, "only the greeting");
    server.client(false).read(1, 0, 512);
    server.stop();
}

#[test]
fn more_requests_than_slots_are_all_answered() {
    let server = Server::new(1, 4);
    let mut client = server.client(false);
    let mut sender = Client { stream: client.stream.try_clone().unwrap(), structured: false };
    server.host().hold();
    let writing = thread::spawn(move || {
        for n in 0..500u64 {
            sender.send_write(n, n * 4096, &pattern(n, 4096));
        }
    });
    server.volume.wait_for_held(4);
    server.host().release();
    let mut cookies: Vec<u64> = (0..500).map(|_| client.reply(0).cookie).collect();
    writing.join().unwrap();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..500).collect::<Vec<_>>());
    for n in 0..500 {
        assert!(client.read(n, n * 4096, 4096).data == pattern(n, 4096), "write {n}");
    }
    server.stop();
}

#[test]
fn large_requests_are_split_if_slots_are_few() {
    let server = Server::new(1, 2);
    let mut clients: Vec<Client> = vec![server.client(true)];
    let data = pattern(9, 32 * MIB);
    clients[0].send_write(1, 4096, &data);
    assert_eq!(clients[0].reply(0).error, 0);
    assert!(clients[0].read(2, 4096, 32 * MIB).data == data);
    drop(clients);
    // Without structured replies a READ needs all its slots at once, which the handshake says.
    let mut client = server.client(false);
    assert_eq!(client.read(3, 4096, 2 * MIB).data, data[..2 * MIB]);
    assert_eq!(client.read(3, 4096, 3 * MIB).error, 22);
    server.stop();
}

#[test]
fn a_stalled_client_does_not_delay_others() {
    let server = Server::new(1, 16);
    // One sends half a write, one never reads its replies, one has not even said a word.
    let mut half = server.client(false);
    half.send(WRITE, 0, 1, 0, MIB);
    half.stream.write_all(&vec![7; MIB / 2]).unwrap();
    let mut deaf = server.client(false);
    for n in 0..200 {
        deaf.send(READ, 0, n, 0, MIB);
    }
    let mute = server.raw();
    let mut client = server.client(false);
    for n in 0..100 {
        assert_eq!(client.read(n, 4096, 64 << 10).error, 0);
    }
    half.stream.write_all(&vec![7; MIB / 2]).unwrap();
    assert_eq!(half.reply(0).error, 0);
    assert_eq!(client.read(1, 0, MIB).data, vec![7; MIB]);
    assert_eq!(server.device.in_use().unwrap(), format!("4 NBD clients of {}", server.path().display()));
    drop((deaf, mute));
    server.stop();
}

#[test]
fn buffers_of_a_lost_client_are_not_reused_early() {
    let server = Server::new(1, 8);
    server.host().hold();
    let mut lost = server.client(false);
    for n in 0..4 {
        lost.send_write(n, n * MIB as u64, &vec![0x11; MIB]);
    }
    server.volume.wait_for_held(4);
    lost.send(WRITE, 0, 9, 8 * MIB as u64, MIB);
    lost.stream.write_all(&[0x22; 1000]).unwrap();
    drop(lost);
    // Another client uses all slots that are left, several times over.
    let mut other = server.client(false);
    let mut sender = Client { stream: other.stream.try_clone().unwrap(), structured: false };
    let writing = thread::spawn(move || {
        for n in 16..64 {
            sender.send_write(n, n * MIB as u64, &vec![0x33; MIB]);
        }
    });
    server.volume.wait_for_held(4 + 4);
    server.host().release();
    for _ in 16..64 {
        assert_eq!(other.reply(0).error, 0);
    }
    writing.join().unwrap();
    let mut byte = [0; 1];
    for n in 0..4 {
        for at in [0, MIB - 1] {
            server.volume.file().read_exact_at(&mut byte, (n * MIB + at) as u64).unwrap();
            assert_eq!(byte, [0x11], "write {n} at {at}");
        }
    }
    server.volume.file().read_exact_at(&mut byte, 8 * MIB as u64).unwrap();
    assert_eq!(byte, [0], "a write that never came whole");
    server.stop();
}

#[test]
fn a_disconnect_waits_for_the_answers() {
    let server = Server::new(1, 8);
    server.host().hold();
    let mut client = server.client(true);
    client.send_write(1, 0, &[1; 4096]);
    client.send(READ, 0, 2, 4096, 4096);
    client.send(DISCONNECT, 0, 3, 0, 0);
    server.volume.wait_for_held(2);
    server.host().release();
    assert_eq!(client.reply(0), Reply { cookie: 1, error: 0, data: vec![] });
    assert_eq!(client.chunks(2, 4096, 4096).error, 0);
    client.assert_closed();
    server.stop();
}

#[test]
fn a_client_that_has_closed_its_side_gets_its_answers() {
    let server = Server::new(1, 8);
    server.host().hold();
    let mut client = server.client(true);
    client.send_write(1, 0, &[1; 4096]);
    client.send(READ, 0, 2, 4096, 4096);
    // The beginning of a request that never comes whole.
    client.stream.write_all(&[0x25, 0x60]).unwrap();
    client.stream.shutdown(Shutdown::Write).unwrap();
    server.volume.wait_for_held(2);
    server.host().release();
    assert_eq!(client.reply(0), Reply { cookie: 1, error: 0, data: vec![] });
    assert_eq!(client.chunks(2, 4096, 4096).error, 0);
    client.assert_closed();
    server.stop();
}

#[test]
fn many_clients_on_many_queues() {
    let server = Server::new(2, 64);
    let threads: Vec<_> = (0..32u64)
        .map(|n| {
            let mut client = server.client(n % 2 == 0);
            thread::spawn(move || {
                let base = n * 8 * MIB as u64;
                for round in 0..40u64 {
                    let data = pattern(n << 32 | round, usize::try_from(512 << (round % 12)).unwrap());
                    client.send_write(round, base, &data);
                    assert_eq!(client.reply(0).error, 0);
                    assert!(client.read(round, base, data.len()).data == data, "client {n} round {round}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    server.stop();
}

#[test]
fn clients_beyond_the_bound_wait_for_their_turn() {
    let server = Server::new(1, 8); // room for two
    let first = server.client(false);
    let second = server.client(false);
    let mut third = server.raw();
    third.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(third.read(&mut [0; 18]).is_err(), "no greeting yet");
    drop(first);
    third.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    third.read_exact(&mut [0; 18]).unwrap();
    drop(second);
    server.stop();
}

/// Returns a client that has connected and says nothing.
fn silent(server: &Server) -> UnixStream {
    let mut silent = server.raw();
    silent.read_exact(&mut [0; 18]).unwrap();
    silent
}

fn is_open(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn a_client_that_chooses_no_export_makes_room_after_a_while() {
    let server = Server::new(1, 12); // room for three
    let mut served = server.client(false);
    let begin = Instant::now();
    let [oldest, second] = [silent(&server), silent(&server)];
    // The next one waits in the backlog of the listening socket until the oldest has had its time.
    let newest = silent(&server);
    let waited = begin.elapsed();
    assert!(waited >= Duration::from_secs(10), "a young client was ended after {waited:?}");
    assert_eq!([&oldest, &second, &newest].map(is_open), [false, true, true]);
    assert_eq!(served.read(1, 0, 512).error, 0, "a client that is served stays");
    server.stop();
}

#[test]
fn a_stop_answers_running_requests_and_closes_all_connections() {
    let mut server = Server::new(2, 16);
    let mut busy = server.client(false);
    let idle = server.client(false);
    let negotiating = server.raw();
    server.host().hold();
    busy.send(READ, 0, 77, 0, 512);
    server.volume.wait_for_held(1);
    let mut device = server.device;
    let stopping = thread::spawn(move || {
        device.stop().unwrap();
        device
    });
    idle.assert_closed();
    server.host.as_ref().unwrap().release();
    assert_eq!(busy.reply(512).cookie, 77);
    busy.assert_closed();
    server.device = stopping.join().unwrap();
    assert_eq!(server.device.in_use(), None);
    drop(negotiating);
    assert!(UnixStream::connect(server.dir.path().join("sock")).is_err());
    server.host.take().unwrap().stop();
}

#[test]
fn the_path_is_taken_only_from_the_dead() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let taken = |path: &Path| match prepare_socket(&spec(path, 1, 8)) {
        Err(FrontendError::System { action, .. }) => action,
        other => panic!("{other:?}"),
    };
    drop(UnixListener::bind(&path).unwrap());
    let mut stale = prepare_socket(&spec(&path, 1, 8)).unwrap();
    stale.device.go_live().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(taken(&path).contains("another process serves it"));
    // Someone replaces it: stop leaves that one alone.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    stale.device.stop().unwrap();
    assert!(taken(&path).contains("not a socket"));
    let long = dir.path().join("x".repeat(108));
    assert!(taken(&long).contains("shorter directory"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

/// The kernel ends the ring of a killed process later than the process: until then its socket listens.
#[test]
fn a_socket_that_the_kernel_closes_soon_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let dying = UnixListener::bind(&path).unwrap();
    let ending = std::thread::spawn(move || drop(dying.accept().unwrap()));
    // The first connection is closed without a greeting, and the second one has no listener.
    prepare_socket(&spec(&path, 1, 8)).unwrap();
    ending.join().unwrap();
}

#[test]
fn a_larger_volume_shows_to_new_clients() {
    let mut server = Server::new(1, 8);
    let mut old = server.client(false);
    assert_ne!(old.read(1, SIZE, 512).error, 0);
    server.volume.file().set_len(2 * SIZE).unwrap();
    server.device.resize(2 * SIZE).unwrap();
    assert_eq!(old.read(1, SIZE, 512).error, 0);
    let mut raw = server.raw();
    raw.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut greeting = [0; 28];
    raw.read_exact(&mut greeting).unwrap();
    assert_eq!(greeting[18..26], (2 * SIZE).to_be_bytes());
    server.stop();
}
