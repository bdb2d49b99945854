//! Reads, writes and the rest, against plain bytes.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::{BTreeMap, HashMap};

use common::*;
use shorthorn_store::{OpenOptions, Store};
use shorthorn_testkit::Random;
use shorthorn_types::limits::{MAX_IO_BYTES, MAX_ZERO_BYTES};
use shorthorn_wire::{Flags, HEADER_BYTES, Header, Opcode};

const SIZE: u64 = 64 * MIB;
/// Data in flight that the replica takes with one more request. Of a client that waits until more is taken,
/// and reads no answer meanwhile, it would take no more. It takes 4 MiB, and has answers in its hands until
/// all that it sends with them are sent: they may be as many again.
const DATA_BYTES_MAX: usize = 1 << 20;

/// A request in flight, and the expected content of a read.
struct Pending {
    opcode: Opcode,
    offset: usize,
    data: Vec<u8>,
}

/// Random requests, many in flight at once, none of which overlaps another in a 4-KiB block; compared with
/// bytes in memory.
struct Model {
    random: Random,
    bytes: Vec<u8>,
    pending: HashMap<u64, Pending>,
    /// Blocks that a request in flight has.
    busy: Vec<bool>,
}

impl Model {
    fn new(seed: u64) -> Model {
        println!("to repeat this: SEED={seed}");
        let blocks = usize::try_from(SIZE / 4096).unwrap();
        Model {
            random: Random::new(seed),
            bytes: vec![0; blocks * 4096],
            pending: HashMap::new(),
            busy: vec![false; blocks],
        }
    }

    /// Returns a range of sectors whose blocks nothing in flight has.
    fn free_range(&mut self, max_sectors: u64) -> Option<(usize, usize)> {
        let sectors = 1 + self.random.below(max_sectors);
        let offset = self.random.below(SIZE / 512 - sectors + 1) * 512;
        let (start, end) =
            (usize::try_from(offset).unwrap(), usize::try_from(offset + sectors * 512).unwrap());
        let blocks = &mut self.busy[start / 4096..end.div_ceil(4096)];
        if blocks.iter().any(|busy| *busy) {
            return None;
        }
        blocks.fill(true);
        Some((start, end))
    }

    fn send(&mut self, client: &mut Client) {
        let opcode = match self.random.below(100) {
            0..35 => Opcode::Read,
            35..75 => Opcode::Write,
            75..80 => Opcode::Flush,
            80..88 => Opcode::Discard,
            88..97 => Opcode::WriteZeroes,
            _ => Opcode::Ping,
        };
        let sectors = match (opcode, self.random.below(20)) {
            (Opcode::Flush | Opcode::Ping, _) => 0,
            (Opcode::Discard | Opcode::WriteZeroes, 0) => u64::from(MAX_ZERO_BYTES) / 512 / 4,
            (_, 0) => u64::from(MAX_IO_BYTES) / 512,
            (_, 1..6) => 200,
            _ => 20,
        };
        if sectors == 0 {
            let id = client.send(opcode, Flags::NONE, 0, 0, &[]);
            self.pending.insert(id, Pending { opcode, offset: 0, data: Vec::new() });
            return;
        }
        let Some((start, end)) = self.free_range(sectors) else { return };
        let data = match opcode {
            Opcode::Read => self.bytes[start..end].to_vec(),
            Opcode::Write => pattern(self.random.below(1 << 32), end - start),
            _ => vec![0; end - start],
        };
        let flags =
            if self.random.below(10) == 0 && opcode != Opcode::Read { Flags::FUA } else { Flags::NONE };
        let payload = if opcode == Opcode::Write { &data[..] } else { &[] };
        let id = client.send(opcode, flags, start as u64, u32::try_from(end - start).unwrap(), payload);
        self.pending.insert(id, Pending { opcode, offset: start, data });
    }

    fn receive(&mut self, client: &mut Client) {
        let (header, found) = client.receive().unwrap();
        let Pending { opcode, offset, data } = self.pending.remove(&header.id).unwrap();
        assert_eq!((header.opcode, header.status), (opcode, 0), "{header}");
        let range = offset..offset + data.len();
        match opcode {
            Opcode::Read => assert!(found == data, "{header} shows something else than was written"),
            Opcode::Write | Opcode::WriteZeroes => self.bytes[range.clone()].copy_from_slice(&data),
            Opcode::Discard => {
                let (start, end) = (range.start.next_multiple_of(4096), range.end / 4096 * 4096);
                self.bytes[start..end.max(start)].fill(0);
            }
            _ => {}
        }
        if !range.is_empty() {
            self.busy[range.start / 4096..range.end.div_ceil(4096)].fill(false);
        }
    }

    fn pending_bytes(&self) -> usize {
        let has_data = |pending: &&Pending| matches!(pending.opcode, Opcode::Read | Opcode::Write);
        self.pending.values().filter(has_data).map(|pending| pending.data.len()).sum()
    }

    fn run(&mut self, requests: usize, client: &mut Client) {
        for _ in 0..requests {
            self.send(client);
            while self.pending.len() >= 64
                || self.pending_bytes() > DATA_BYTES_MAX
                || (self.random.below(3) == 0 && !self.pending.is_empty())
            {
                self.receive(client);
            }
        }
    }

    fn check_all(&mut self, client: &mut Client) {
        while !self.pending.is_empty() {
            self.receive(client);
        }
        for (n, expected) in self.bytes.chunks(MAX_IO_BYTES as usize).enumerate() {
            let offset = n as u64 * u64::from(MAX_IO_BYTES);
            let found = client.read(offset, u32::try_from(expected.len()).unwrap()).unwrap();
            let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
            assert_eq!(differs.map(|at| offset + at as u64), None, "the first byte that differs");
        }
    }
}

#[test]
fn random_requests_in_flight_together() {
    let seed = std::env::var("SEED")
        .map_or_else(|_| u64::from(std::process::id()) << 20, |seed| seed.parse().unwrap());
    let base = base();
    let replica = Replica::start(&spec(base.path(), SIZE));
    let mut model = Model::new(seed);
    let mut client = replica.open(generation(1));
    model.run(3000, &mut client);
    model.check_all(&mut client);
    let spec = replica.spec.clone();
    assert!(replica.terminate().success());
    let replica = Replica::start(&spec);
    model.check_all(&mut replica.open(generation(2)));
}

/// Repeats the test on a directory with a snapshot below the head. A partial write, discard or zeroing must
/// neither show nor lose the data below.
#[test]
fn random_requests_above_a_snapshot() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    assert!(Replica::start(&spec).terminate().success());
    let mut model = Model::new(0x5eed);
    {
        let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
        for offset in (0..SIZE).step_by(3 << 20) {
            let data = pattern(offset, 1 << 20);
            store.write_at(&data, offset, false).unwrap();
            model.bytes[usize::try_from(offset).unwrap()..][..data.len()].copy_from_slice(&data);
        }
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        store.close().unwrap();
    }
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    model.run(3000, &mut client);
    model.check_all(&mut client);
}

#[test]
fn parts_of_blocks_leave_the_rest_alone() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut client = replica.open(generation(1));
    let mut expected = pattern(1, 64 << 10);
    client.write(0, &expected).unwrap();
    for (n, (offset, length)) in
        [(512, 512), (4096 - 512, 1024), (8192, 4096), (10_240, 7 * 4096), (0, 512)].into_iter().enumerate()
    {
        let data = pattern(100 + n as u64, length);
        client.write(offset as u64, &data).unwrap();
        expected[offset..offset + length].copy_from_slice(&data);
        assert!(client.read(0, 64 << 10).unwrap() == expected, "after {length} bytes at {offset}");
        assert!(client.read(offset as u64, u32::try_from(length).unwrap()).unwrap() == data);
    }
}

#[test]
fn many_of_the_largest_requests_are_served() {
    // No block is in two of them, though none begins with one.
    const STRIDE: u64 = MIB + 8192;
    let base = base();
    let replica = Replica::start(&spec(base.path(), 128 * MIB));
    let mut client = replica.open(generation(1));
    // Sends ten times the maximum of the replica, from a sender that does not read meanwhile.
    let mut sender = Client::twin(&client);
    let data: Vec<Vec<u8>> = (0..80).map(|n| pattern(n, 1 << 20)).collect();
    let sent = data.clone();
    let thread = std::thread::spawn(move || {
        for (n, data) in sent.iter().enumerate() {
            let offset = n as u64 * STRIDE + 512;
            sender.send(Opcode::Write, Flags::NONE, offset, MAX_IO_BYTES, data);
        }
    });
    for _ in 0..80 {
        assert_eq!(client.receive().unwrap().0.outcome(), Ok(()));
    }
    thread.join().unwrap();
    for n in 0..80u64 {
        client.send(Opcode::Read, Flags::NONE, n * STRIDE + 512, MAX_IO_BYTES, &[]);
    }
    for _ in 0..80 {
        let (header, found) = client.receive().unwrap();
        assert!(found == data[usize::try_from(header.offset_bytes / STRIDE).unwrap()]);
    }
}

#[test]
fn requests_past_the_end_of_the_volume_are_refused() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut client = replica.open(generation(1));
    assert_eq!(client.read(MIB, 512), Err(libc::EINVAL));
    assert_eq!(client.write(MIB - 512, &[1; 1024]), Err(libc::EINVAL));
    for opcode in [Opcode::Discard, Opcode::WriteZeroes] {
        assert_eq!(client.call(opcode, Flags::NONE, MIB - 4096, 8192, &[]), Err(libc::EINVAL));
    }
    assert_eq!(client.write(MIB - 512, &[1; 512]), Ok(()));
    assert_eq!(client.read(MIB - 512, 512), Ok(vec![1; 512]));
}

#[test]
fn damaged_data_is_not_written() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    // Small data comes with its header, large data is received in place.
    for length in [4096u32, 256 << 10] {
        let mut client = replica.open(generation(1));
        let data = pattern(u64::from(length), length as usize);
        client.write(0, &data).unwrap();
        let mut header = Header::request(Opcode::Write, 9, 0, length);
        header.data_check = crc32c(&data) ^ 1;
        client.raw(&client.encode(&header));
        client.raw(&vec![7; length as usize]);
        assert!(client.closed(), "the connection is of no more use");
        assert!(replica.open(generation(1)).read(0, length).unwrap() == data);
    }
}

#[test]
fn damaged_and_senseless_frames_end_the_connection() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let read = Header::request(Opcode::Read, 1, 0, 512);
    let frames: [fn(&Client, &Header) -> [u8; HEADER_BYTES]; 5] = [
        |client, read| {
            let mut damaged = client.encode(read);
            damaged[20] ^= 1;
            damaged
        },
        |client, read| client.encode(&read.response(Ok(()))),
        |client, _| client.encode(&Header::request(Opcode::Hello, 1, 0, 0)),
        |client, _| client.encode(&Header::request(Opcode::Challenge, 1, 0, 0)),
        |client, _| client.encode(&Header::request(Opcode::Propose, 1, 0, 0)),
    ];
    for frame in frames {
        let mut client = replica.open(generation(1));
        let bytes = frame(&client, &read);
        client.raw(&bytes);
        assert!(client.closed());
    }
    replica.open(generation(1)).ping().unwrap();
}

/// Makes a header of this one, which was sent once in these bytes.
type Forge = fn(&Client, Header, [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES];

/// All of this is possible on the way between engine and replica without the volume's secret.
#[test]
fn requests_that_are_repeated_or_forged_change_nothing() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let (old, new) = (pattern(1, 4096), pattern(2, 4096));
    let header = |data: &[u8]| {
        let length = u32::try_from(data.len()).unwrap();
        Header { data_check: crc32c(data), ..Header::request(Opcode::Write, 9, 0, length) }
    };
    let forgeries: [(&str, Forge); 4] = [
        ("once more", |_, _, sent| sent),
        ("without a key", |_, header, _| header.encode()),
        ("after one that is missing", |client, header, _| {
            let _missing = client.encode(&header);
            client.encode(&header)
        }),
        ("to another range", |client, header, _| {
            let mut bytes = client.encode(&Header { offset_bytes: 4096, ..header });
            bytes[..40].copy_from_slice(&header.encode()[..40]);
            bytes
        }),
    ];
    for (how, forge) in forgeries {
        let mut client = replica.open(generation(1));
        let sent = client.encode(&header(&old));
        client.raw(&[&sent[..], &old].concat());
        assert_eq!(client.receive().unwrap().0.outcome(), Ok(()));
        client.write(0, &new).unwrap();
        let forged = forge(&client, header(&old), sent);
        client.raw(&[&forged[..], &old].concat());
        assert!(client.closed(), "{how}: the connection is of no more use");
        assert!(replica.open(generation(1)).read(0, 4096).unwrap() == new, "{how}");
    }
}

/// Breaks the promise of an engine not to send such requests. Only the overlapped data is undefined; nothing
/// else may change.
#[test]
fn overlapping_requests_harm_nothing_but_themselves() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut client = replica.open(generation(1));
    let around = pattern(1, 1 << 20);
    client.write(0, &around).unwrap();
    for round in 0..20 {
        for n in 0..32 {
            let data = pattern(round * 100 + n, 16 << 10);
            match n % 4 {
                3 => client.send(Opcode::WriteZeroes, Flags::NONE, (64 << 10) + 512, 16 << 10, &[]),
                2 => client.send(Opcode::Discard, Flags::NONE, 64 << 10, 16 << 10, &[]),
                _ => client.send(Opcode::Write, Flags::NONE, (64 << 10) + n * 512, 16 << 10, &data),
            };
        }
        for _ in 0..32 {
            assert_eq!(client.receive().unwrap().0.outcome(), Ok(()));
        }
    }
    let found = client.read(0, 1 << 20).unwrap();
    assert!(found[..64 << 10] == around[..64 << 10] && found[128 << 10..] == around[128 << 10..]);
}

/// Requests without number from one engine's queue do not keep the others from being served.
#[test]
fn a_queue_that_does_not_read_its_answers_does_not_block_others() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), 64 * MIB));
    let mut greedy = replica.open(generation(1));
    greedy.socket.set_nonblocking(true).unwrap();
    let read = |id| Header::request(Opcode::Read, id, 0, MAX_IO_BYTES);
    let mut sent = 0;
    // Until the replica stops reading from it: then it has all that it may have in flight.
    loop {
        let request = greedy.encode(&read(sent));
        if std::io::Write::write_all(&mut greedy.socket, &request).is_err() {
            break;
        }
        sent += 1;
    }
    let (mut modest, _) = replica.try_open(generation(1), 1).unwrap();
    for n in 0..50 {
        let data = pattern(n, 8192);
        modest.write(32 * MIB + n * 8192, &data).unwrap();
        assert!(modest.read(32 * MIB + n * 8192, 8192).unwrap() == data);
        modest.flush().unwrap();
    }
    greedy.socket.set_nonblocking(false).unwrap();
    for _ in 0..sent {
        assert_eq!(greedy.receive().unwrap().1.len(), MAX_IO_BYTES as usize);
    }
}
