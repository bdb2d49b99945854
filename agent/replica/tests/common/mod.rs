//! A replica process to test, and an engine's side of a connection, blocking.
#![allow(dead_code)] // not every test uses everything

pub mod disks;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;
use shorthorn_control::{
    ProcessStatus, ReplicaSpec, ReplicaStatus, SUM_BYTES_PER_S, Secret, Unknown, store_spec,
};
use shorthorn_store::AlignedBuffer;
use shorthorn_types::{Generation, Members, ReplicaId};
use shorthorn_wire::{
    Challenge, EngineClaim, Flags, HEADER_BYTES, Header, Hello, Nonce, Opcode, ProvenWelcome, Refusal,
    Session, Welcome, decode_text, encode_text,
};

/// A time limit that is reached only by a hang.
pub const TIMEOUT: Duration = Duration::from_secs(60);
pub const SECRET: [u8; 32] = [0x5e; 32];
pub const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

pub fn generation(attach: u64) -> Generation {
    Generation::new(attach, 0)
}

/// Returns the spec of a replica with all its files under `base`.
pub fn spec(base: &Path, size_bytes: u64) -> ReplicaSpec {
    let replica = ReplicaId::from_random(7);
    ReplicaSpec {
        volume: "v1".parse().unwrap(),
        replica,
        directory: base.join("v1-00000007"),
        size_bytes,
        create: true,
        create_once: false,
        first_members: Members::new([replica, ReplicaId::from_random(8)]).unwrap(),
        secret: Secret::new(SECRET),
        data_socket: base.join("data.sock"),
        data_address: None,
        control_socket: base.join("control.sock"),
        sum_bytes_per_s: Some(SUM_BYTES_PER_S),
        encrypt_in_transit: false,
        unknown: Unknown::default(),
    }
}

/// A running replica process. Killed when dropped.
pub struct Replica {
    pub spec: ReplicaSpec,
    child: Child,
}

impl Replica {
    /// Starts a process and waits until it serves.
    pub fn start(spec: &ReplicaSpec) -> Replica {
        match Replica::try_start(spec) {
            Ok(replica) => replica,
            Err(message) => panic!("the replica did not start: {message}"),
        }
    }

    /// Starts a process and waits until it serves, or has ended and said why.
    pub fn try_start(spec: &ReplicaSpec) -> Result<Replica, String> {
        let base = spec.control_socket.parent().unwrap();
        let spec_file = base.join("spec.json");
        store_spec(&spec_file, spec).unwrap();
        let notify = base.join("notify.sock");
        let _ = std::fs::remove_file(&notify);
        let ready = UnixDatagram::bind(&notify).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_replica-under-test"))
            .arg(&spec_file)
            .env("NOTIFY_SOCKET", &notify)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        ready.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut text = [0; 100];
        loop {
            match ready.recv(&mut text) {
                Ok(count) => {
                    assert_eq!(&text[..count], b"READY=1\n");
                    return Ok(Replica { spec: spec.clone(), child });
                }
                Err(_) if child.try_wait().unwrap().is_some() => {
                    let output = child.wait_with_output().unwrap();
                    return Err(String::from_utf8_lossy(&output.stderr).into_owned());
                }
                Err(_) => {}
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal("-TERM");
        self.child.wait().unwrap()
    }

    /// Ends the process like [`Replica::terminate`], for a replica that is to be replaced.
    pub fn terminate_in_place(&mut self) -> ExitStatus {
        self.signal("-TERM");
        self.child.wait().unwrap()
    }

    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    pub fn status(&self) -> ReplicaStatus {
        let client = shorthorn_control::ControlClient::connect(&self.spec.control_socket).unwrap();
        match client.status().unwrap() {
            ProcessStatus::Replica(status) => status,
            ProcessStatus::Engine(_) => panic!("it is not an engine"),
        }
    }

    /// Opens a connection as queue 0 of an engine.
    pub fn open(&self, generation: Generation) -> Client {
        self.try_open(generation, 0).unwrap_or_else(|refusal| panic!("refused: {refusal:?}")).0
    }

    pub fn try_open(&self, generation: Generation, queue: u16) -> Result<(Client, Welcome), (i32, Refusal)> {
        let claim = self.claim(generation, queue);
        Client::open(self.connect(), &claim, SECRET).unwrap()
    }

    pub fn claim(&self, generation: Generation, queue: u16) -> EngineClaim {
        let (volume, replica) = (self.spec.volume.clone(), self.spec.replica);
        EngineClaim { volume, replica, generation, queue }
    }

    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.spec.data_socket).unwrap()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An engine's end of a connection.
pub struct Client {
    pub socket: UnixStream,
    /// The session of all twins.
    session: Arc<Mutex<Session>>,
    next_id: u64,
}

impl Client {
    /// Answers the challenge with `claim`; the proof is made with `secret`. The error is the refusal.
    pub fn open(
        mut socket: UnixStream,
        claim: &EngineClaim,
        secret: [u8; 32],
    ) -> io::Result<Result<(Client, Welcome), (i32, Refusal)>> {
        socket.set_read_timeout(Some(TIMEOUT))?;
        let (header, text) = read_frame(&mut socket)?;
        assert_eq!(header.opcode, Opcode::Challenge);
        let challenge: Challenge = decode_text(&header, &text).unwrap();
        let (nonce, secret) = (Nonce::new([9; 32]), Secret::new(secret));
        let hello = Hello::new(claim.clone(), nonce, &challenge, &secret);
        let (header, text) = encode_text(Header::request(Opcode::Hello, 77, 0, 0), &hello);
        socket.write_all(&[&header.encode()[..], &text].concat())?;
        let (header, text) = read_frame(&mut socket)?;
        assert_eq!((header.opcode, header.id, header.is_response()), (Opcode::Hello, 77, true));
        let session = Session::of_engine(&secret, challenge.nonce, nonce, claim);
        if header.status != 0 {
            let refusal: Refusal = decode_text(&header, &text).unwrap();
            if let Some(holder) = &refusal.holder {
                assert_eq!(session.take_holder(holder), Ok(holder.generation));
            }
            return Ok(Err((header.status, refusal)));
        }
        let proven: ProvenWelcome = decode_text(&header, &text).unwrap();
        let welcome = session.take_welcome(&proven).unwrap();
        let session = Arc::new(Mutex::new(session));
        Ok(Ok((Client { socket, session, next_id: 0 }, welcome)))
    }

    /// Sends a request; its id.
    pub fn send(&mut self, opcode: Opcode, flags: Flags, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.try_send(opcode, flags, offset, length, data).unwrap()
    }

    pub fn try_send(
        &mut self,
        opcode: Opcode,
        flags: Flags,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> io::Result<u64> {
        self.next_id += 1;
        let mut header = Header::request(opcode, self.next_id, offset, length);
        header.flags = flags;
        if !data.is_empty() {
            header.data_check = crc32c(data);
        }
        let header = self.encode(&header);
        self.socket.write_all(&header)?;
        self.socket.write_all(data)?;
        Ok(self.next_id)
    }

    /// Returns the bytes of the header of the next frame, which has to be sent next.
    pub fn encode(&self, header: &Header) -> [u8; HEADER_BYTES] {
        self.session.lock().unwrap().encode(header)
    }

    /// Returns another one on the same socket, for another thread to send with: one sends at a time.
    pub fn twin(client: &Client) -> Client {
        Client {
            socket: client.socket.try_clone().unwrap(),
            session: Arc::clone(&client.session),
            next_id: 1 << 32,
        }
    }

    /// Sends any bytes. The replica may have closed already.
    pub fn raw(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// Returns the next response and its data, whose check is right.
    pub fn receive(&mut self) -> io::Result<(Header, Vec<u8>)> {
        let (header, data) = self.read_frame()?;
        assert!(header.is_response());
        if header.data_bytes() > 0 {
            header.check_data(crc32c(&data)).unwrap();
        }
        Ok((header, data))
    }

    /// Sends a request and waits for its response: the data, or the errno.
    pub fn call(
        &mut self,
        opcode: Opcode,
        flags: Flags,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> Result<Vec<u8>, i32> {
        let id = self.send(opcode, flags, offset, length, data);
        let (header, data) = self.receive().unwrap();
        assert_eq!((header.id, header.opcode), (id, opcode));
        if header.status == 0 { Ok(data) } else { Err(header.status) }
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, i32> {
        self.call(Opcode::Read, Flags::NONE, offset, length, &[])
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), i32> {
        self.call(Opcode::Write, Flags::NONE, offset, u32::try_from(data.len()).unwrap(), data).map(drop)
    }

    pub fn flush(&mut self) -> Result<(), i32> {
        self.call(Opcode::Flush, Flags::NONE, 0, 0, &[]).map(drop)
    }

    pub fn ping(&mut self) -> Result<(), i32> {
        self.call(Opcode::Ping, Flags::NONE, 0, 0, &[]).map(drop)
    }

    /// Sends a control frame and waits for its response.
    pub fn send_text<T: serde::Serialize>(&mut self, opcode: Opcode, text: &T) -> Result<(), (i32, Refusal)> {
        self.next_id += 1;
        let (header, text) = encode_text(Header::request(opcode, self.next_id, 0, 0), text);
        self.socket.write_all(&[&self.encode(&header)[..], &text].concat()).unwrap();
        let (header, text) = self.read_frame().unwrap();
        assert_eq!((header.id, header.opcode), (self.next_id, opcode));
        if header.status == 0 { Ok(()) } else { Err((header.status, decode_text(&header, &text).unwrap())) }
    }

    /// Sends a control frame and waits for the text that answers it.
    pub fn ask<T: serde::Serialize, A: DeserializeOwned>(
        &mut self,
        opcode: Opcode,
        text: &T,
    ) -> Result<A, (i32, Refusal)> {
        self.next_id += 1;
        let (header, text) = encode_text(Header::request(opcode, self.next_id, 0, 0), text);
        self.socket.write_all(&[&self.encode(&header)[..], &text].concat()).unwrap();
        let (header, text) = self.read_frame().unwrap();
        assert_eq!((header.id, header.opcode), (self.next_id, opcode));
        if header.status == 0 {
            Ok(decode(&header, &text))
        } else {
            Err((header.status, decode(&header, &text)))
        }
    }

    fn read_frame(&mut self) -> io::Result<(Header, Vec<u8>)> {
        let session = &self.session;
        read_frame_with(&mut self.socket, |bytes| {
            let mut session = session.lock().unwrap();
            let header = session.decode(bytes).unwrap();
            session.advance();
            header
        })
    }

    /// Waits until the replica closes; whether it sent nothing more before.
    pub fn closed(mut self) -> bool {
        // A reset is an end too: the replica had bytes that it did not want to read.
        match self.socket.read(&mut [0; 1]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

/// Reads a frame of the opening.
pub fn read_frame(socket: &mut impl Read) -> io::Result<(Header, Vec<u8>)> {
    read_frame_with(socket, |bytes| Header::decode(bytes).unwrap())
}

fn read_frame_with(
    socket: &mut impl Read,
    decode: impl FnOnce(&[u8; HEADER_BYTES]) -> Header,
) -> io::Result<(Header, Vec<u8>)> {
    let mut bytes = [0; HEADER_BYTES];
    socket.read_exact(&mut bytes)?;
    let header = decode(&bytes);
    let mut data = vec![0; header.data_bytes() as usize];
    socket.read_exact(&mut data)?;
    Ok((header, data))
}

pub fn decode<T: DeserializeOwned>(header: &Header, text: &[u8]) -> T {
    decode_text(header, text).unwrap()
}

/// Returns the check of `data`, as the wire wants it.
pub fn crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data)
}

/// Returns `length` bytes that differ from those of every other `seed`.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Returns the directory that the tests use; on a real file system, with direct I/O.
pub fn base() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns a directory in memory, if possible: a disk would take minutes for the syncs of such a test.
pub fn base_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| base())
}

pub fn volume_meta(directory: &Path) -> serde_json::Value {
    let path: PathBuf = directory.join("volume.meta");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Changes a byte of a block of an image on the disk.
pub fn rot_in(spec: &ReplicaSpec, image: &str, block: u64) {
    let path = spec.directory.join(image);
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_DIRECT).open(path).unwrap();
    let mut bytes = AlignedBuffer::new(4096);
    file.read_exact_at(bytes.as_mut_slice(), block * BLOCK).unwrap();
    bytes.as_mut_slice()[100] ^= 1;
    file.write_all_at(bytes.as_slice(), block * BLOCK).unwrap();
}
