//! Tests a link against a replica that sends scripted messages.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use shorthorn_types::limits::{ENGINE_FLIGHT_BYTES_MAX, ENGINE_FLIGHT_REQUESTS_MAX, MAX_IO_BYTES};
use shorthorn_types::{Errno, MarkAction, Members, RegionsOf, ReplicaId, Secret};
use shorthorn_wire::{EngineClaim, Holder, Nonce, Refusal, Session, decode_text};

use super::*;
use crate::main_loop::COPY_SLOTS;

const DEPTH: u16 = 4;
const COPIES: u16 = 2;
const GENERATION: Generation = Generation::new(3, 1);

const SECRET: Secret = Secret::new([3; 32]);
const NONCES: [Nonce; 2] = [Nonce::new([5; 32]), Nonce::new([6; 32])];

fn claim() -> EngineClaim {
    let (volume, replica) = ("v1".parse().unwrap(), ReplicaId::from_random(7));
    EngineClaim { volume, replica, generation: GENERATION, queue: 0 }
}

pub fn ready(socket: UnixStream) -> ReadyConnection {
    let session = Session::of_engine(&SECRET, NONCES[0], NONCES[1], &claim());
    ReadyConnection { socket: socket.into(), session }
}

/// Returns the replica's end.
fn session() -> Session {
    Session::of_replica(&SECRET, NONCES[0], NONCES[1], &claim())
}

struct Bench {
    link: QueueLink,
    replica: UnixStream,
    session: Session,
    ring: Ring,
    arena: Arena,
    events: Vec<Event>,
    notice: Option<Notice>,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(LinkSlots { depth: DEPTH, copies: COPIES })
    }

    fn with(slots: LinkSlots) -> Bench {
        let (ours, replica) = UnixStream::pair().unwrap();
        replica.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut bench = Bench {
            link: QueueLink::new(1, 0, GENERATION, slots),
            replica,
            session: session(),
            ring: Ring::new(8).unwrap(),
            arena: Arena::new(usize::from(slots.depth + slots.copies), 1 << 20).unwrap(),
            events: Vec::new(),
            notice: None,
        };
        assert!(bench.link.connect(ready(ours)));
        bench.link.start(&mut bench.ring);
        bench
    }

    fn ask_read(&mut self, slot: u16, bytes: u64) -> Header {
        self.ask(Operation::Read, slot, bytes, 0)
    }

    fn ask(&mut self, operation: Operation, slot: u16, bytes: u64, buffer_offset: u32) -> Header {
        self.send(operation, slot, bytes, buffer_offset);
        self.request()
    }

    fn send(&mut self, operation: Operation, slot: u16, bytes: u64, buffer_offset: u32) {
        let range = ByteRange::new(8192, bytes).unwrap();
        let id = SlotId { queue: 0, slot };
        let data =
            self.arena.buf(usize::from(slot)).part(buffer_offset as usize, usize::try_from(bytes).unwrap());
        self.link.send(id, operation, range, (data, buffer_offset), data.crc32c(), &mut self.events);
    }

    fn request(&mut self) -> Header {
        self.link.flush(&mut self.ring);
        self.run_once();
        let mut header = [0; HEADER_BYTES];
        self.replica.read_exact(&mut header).unwrap();
        let request = self.session.decode(&header).unwrap();
        self.session.advance();
        request
    }

    /// Returns a frame of the replica.
    fn frame(&mut self, header: &Header, data: &[u8]) -> Vec<u8> {
        [&self.session.encode(header)[..], data].concat()
    }

    fn answer(&mut self, request: &Header, data: &[u8]) -> Vec<u8> {
        let mut header = request.response(Ok(()));
        header.data_check = crc32c(data);
        self.frame(&header, data)
    }

    /// Sends `bytes` from the replica in one piece, and then handles all that has happened.
    fn say(&mut self, bytes: &[u8]) {
        self.replica.write_all(bytes).unwrap();
        let before = self.events.len();
        while self.events.len() == before && self.notice.is_none() {
            self.run_once();
        }
    }

    fn run_once(&mut self) {
        let mut completions = Vec::new();
        self.ring.wait(Some(Duration::from_secs(10)), &mut completions).unwrap();
        assert!(!completions.is_empty(), "nothing happens");
        for completion in completions {
            let notice = self.link.on_completion(completion, &mut self.ring, &self.arena, &mut self.events);
            self.notice = self.notice.take().or(notice);
        }
    }

    fn lost(&self) -> &str {
        match self.events.as_slice() {
            [Event::Lost { peer: 1, reason }] => reason,
            other => panic!("{other:?} instead of the loss of the replica"),
        }
    }
}

fn crc32c(data: &[u8]) -> u32 {
    let arena = Arena::new(1, data.len()).unwrap();
    arena.buf(0).copy_from(data);
    arena.buf(0).part(0, data.len()).crc32c()
}

#[test]
fn data_of_a_read_lands_in_its_slot() {
    for bytes in [512, 4096, 1 << 20] {
        let mut bench = Bench::new();
        let request = bench.ask_read(2, bytes as u64);
        assert_eq!((request.opcode, request.offset_bytes), (Opcode::Read, 8192));
        let data: Vec<u8> = (0..bytes).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut replica = bench.replica.try_clone().unwrap();
        let said = bench.answer(&request, &data);
        let writer = std::thread::spawn(move || replica.write_all(&said).unwrap());
        while bench.events.is_empty() {
            bench.run_once();
        }
        writer.join().unwrap();
        let slot = SlotId { queue: 0, slot: 2 };
        assert_eq!(bench.events, [Event::Reply { peer: 1, slot, outcome: Ok(()) }]);
        let mut found = vec![0; bytes];
        bench.arena.buf(2).copy_to(&mut found);
        assert!(found == data);
    }
}

#[test]
fn an_error_is_passed_on() {
    let mut bench = Bench::new();
    let request = bench.ask_read(0, 4096);
    let said = bench.frame(&request.response(Err(Errno::NO_SPACE)), &[]);
    bench.say(&said);
    let slot = SlotId { queue: 0, slot: 0 };
    assert_eq!(bench.events, [Event::Reply { peer: 1, slot, outcome: Err(Errno::NO_SPACE) }]);
}

#[test]
fn a_ping_answered_with_an_error_is_reported_as_failed() {
    for outcome in [Ok(()), Err(Errno::IO)] {
        let mut bench = Bench::new();
        bench.link.ping(&mut bench.events);
        let request = bench.request();
        let said = bench.frame(&Header { data_check: 77, ..request.response(outcome) }, &[]);
        bench.say(&said);
        let reported = match outcome {
            Ok(()) => Event::Pong { peer: 1, queue: 0, free_mib: Some(77) },
            Err(errno) => Event::PingFailed { peer: 1, queue: 0, errno },
        };
        assert_eq!(bench.events, [reported]);
    }
}

#[test]
fn damaged_data_is_a_failure_of_the_replica() {
    let mut bench = Bench::new();
    let request = bench.ask_read(0, 4096);
    let mut said = bench.answer(&request, &[7; 4096]);
    said[HEADER_BYTES + 100] ^= 1;
    bench.say(&said);
    assert!(bench.lost().contains("data check"), "{}", bench.lost());
}

#[test]
fn answers_without_their_request_are_failures() {
    let read = Header::request(Opcode::Read, ID_REQUEST | 1, 8192, 4096);
    let far = Header::request(Opcode::Write, ID_REQUEST | 99, 8192, 4096);
    let mut replica = Bench::new();
    let lies = [
        (replica.answer(&read, &[0; 4096]), "0 bytes asked for"),
        (session().encode(&far.response(Ok(()))).to_vec(), "not sent"),
        (session().encode(&Header::request(Opcode::Ping, ID_PING, 0, 0)).to_vec(), "sends a request"),
        (vec![0; HEADER_BYTES], "magic"),
    ];
    for (said, expected) in lies {
        let mut bench = Bench::new();
        bench.say(&said);
        assert!(bench.lost().contains(expected), "{} instead of {expected}", bench.lost());
    }
}

/// A slot has the data of an earlier request until that of a read has arrived.
#[test]
fn a_success_of_another_operation_does_not_answer_a_read() {
    for opcode in [Opcode::Discard, Opcode::Write, Opcode::Verify] {
        let mut bench = Bench::new();
        let read = bench.ask_read(1, 4096);
        let lie = Header { opcode, ..read.response(Ok(())) };
        let said = bench.frame(&lie, &[]);
        bench.say(&said);
        assert!(bench.lost().contains("does not fit the operation Read"), "{}", bench.lost());
    }
}

#[test]
fn an_answer_that_is_repeated_or_forged_acknowledges_nothing() {
    for forge in [
        |_: &mut Bench, answer: &[u8], _: &Header| answer.to_vec(),
        |_: &mut Bench, _: &[u8], other: &Header| other.response(Ok(())).encode().to_vec(),
        |bench: &mut Bench, _: &[u8], other: &Header| {
            let _missing =
                bench.session.encode(&Header::request(Opcode::Ping, ID_PING, 0, 0).response(Ok(())));
            bench.session.encode(&other.response(Ok(()))).to_vec()
        },
        |_: &mut Bench, _: &[u8], other: &Header| session().encode(&other.response(Ok(()))).to_vec(),
    ] {
        let mut bench = Bench::new();
        let flush = bench.ask(Operation::Flush, 0, 4096, 0);
        let answer = bench.frame(&flush.response(Ok(())), &[]);
        bench.say(&answer);
        let slot = SlotId { queue: 0, slot: 0 };
        assert_eq!(bench.events, [Event::Reply { peer: 1, slot, outcome: Ok(()) }]);
        bench.events.clear();
        // The same slot asks again, so the answer of before would fit it.
        let again = bench.ask(Operation::Flush, 0, 4096, 0);
        assert_eq!(again, flush);
        let forged = forge(&mut bench, &answer, &again);
        bench.say(&forged);
        assert!(bench.lost().contains("keyed check of frame 1 is wrong"), "{}", bench.lost());
    }
}

#[test]
fn more_or_less_data_than_asked_for_is_a_failure() {
    let mut bench = Bench::new();
    let mut request = bench.ask_read(0, 4096);
    request.length_bytes = 8192;
    let said = bench.answer(&request, &[0; 8192]);
    bench.say(&said);
    assert!(bench.lost().contains("4096 bytes asked for"), "{}", bench.lost());
}

#[test]
fn the_end_of_a_connection_is_reported_once_and_closed_when_nothing_is_under_way() {
    let mut bench = Bench::new();
    bench.replica.shutdown(std::net::Shutdown::Both).unwrap();
    while bench.events.is_empty() {
        bench.run_once();
    }
    assert!(bench.lost().contains("closed"));
    assert_eq!(bench.link.take_closed(), Some(Event::Closed { peer: 1, queue: 0 }));
    assert_eq!(bench.link.take_closed(), None);
}

#[test]
fn a_link_in_use_is_not_closed_before_its_operations_have_ended() {
    let mut bench = Bench::new();
    bench.link.close();
    assert_eq!(bench.link.take_closed(), None, "a receive is under way");
    while bench.link.take_closed().is_none() {
        bench.run_once();
    }
    assert_eq!(bench.events, []);
}

#[test]
fn a_stored_view_is_reported_by_its_number() {
    let mut bench = Bench::new();
    let id = ViewId { generation: GENERATION, number: 7 };
    let view = View { id, members: Members::new([ReplicaId::from_random(1)]).unwrap() };
    let honoured = ReplicaReport { committed: view, proposed: Vec::new() };
    bench.link.propose(view, honoured, &mut bench.events);
    let stored = Header::request(Opcode::Propose, ID_PROPOSE | 7, 0, 0).response(Ok(()));
    let said = bench.frame(&stored, &[]);
    bench.say(&said);
    assert_eq!(bench.events, [Event::ViewStored { peer: 1, view: id }]);
}

fn refusal_of_a_proposal(holder: Holder) -> Vec<u8> {
    let refusal = Refusal { message: "fenced".into(), holder: Some(holder) };
    let request = Header::request(Opcode::Propose, ID_PROPOSE | 7, 0, 0);
    let (header, text) = encode_text(request.response(Err(Errno::NOT_PERMITTED)), &refusal);
    [&session().encode(&header)[..], &text].concat()
}

#[test]
fn a_newer_engine_is_noticed() {
    let mut bench = Bench::new();
    let newer = Generation::new(4, 0);
    bench.say(&refusal_of_a_proposal(session().prove_holder(newer)));
    assert!(matches!(bench.notice, Some(Notice::Deposed { holder }) if holder == newer));
}

#[test]
fn a_newer_engine_without_proof_is_a_failure_of_the_replica() {
    let mut bench = Bench::new();
    let proof = session().prove_holder(Generation::new(4, 0)).proof;
    bench.say(&refusal_of_a_proposal(Holder { generation: Generation::new(5, 0), proof }));
    assert!(bench.notice.is_none());
    assert!(bench.lost().contains("without a proof"), "{}", bench.lost());
}

#[test]
fn zero_blocks_of_a_copy_are_found() {
    let mut bench = Bench::new();
    let request = bench.ask(Operation::Read, DEPTH, 64 << 10, 4096);
    let mut data = vec![0; 64 << 10];
    data[3 * 4096 + 4095] = 1;
    data[15 * 4096] = 1;
    let said = bench.answer(&request, &data);
    bench.say(&said);
    let slot = SlotId { queue: 0, slot: DEPTH };
    let zeroes = [0xffff & !(1 << 3) & !(1 << 15), 0, 0, 0];
    assert_eq!(bench.events, [Event::CopyRead { peer: 1, slot, zeroes }]);
    let mut found = vec![9; 64 << 10];
    bench.arena.buf(usize::from(DEPTH)).part(4096, 64 << 10).copy_to(&mut found);
    assert!(found == data, "the data is where it was asked to be");
}

#[test]
fn parts_of_a_copy_are_sent_from_their_place_in_the_slot() {
    let mut bench = Bench::new();
    bench.arena.buf(usize::from(DEPTH)).part(8192, 4096).copy_from(&[5; 4096]);
    let request = bench.ask(Operation::Write { fua: false }, DEPTH, 4096, 8192);
    assert_eq!(request.data_check, crc32c(&[5; 4096]));
    let mut data = [0; 4096];
    bench.replica.read_exact(&mut data).unwrap();
    assert_eq!(data, [5; 4096]);
}

#[test]
fn a_check_comes_without_data() {
    let mut bench = Bench::new();
    let request = bench.ask(Operation::Verify, DEPTH + 1, 64 << 10, 0);
    assert_eq!((request.opcode, request.length_bytes), (Opcode::Verify, 64 << 10));
    let slot = SlotId { queue: 0, slot: DEPTH + 1 };
    for is_confirmed in [false, true] {
        let mut said = request.response(Ok(()));
        said.data_check = 0x1234_5678;
        if is_confirmed {
            said.flags = said.flags.with(Flags::CHECKED);
        }
        let said = bench.frame(&said, &[]);
        bench.say(&said);
        let check = VolumeCheck { sum: 0x1234_5678, is_confirmed };
        assert_eq!(bench.events.pop(), Some(Event::Verified { peer: 1, slot, outcome: Ok(check) }));
    }
}

#[test]
fn a_mark_is_reported_by_its_number() {
    let mut bench = Bench::new();
    let change = MarkRegions {
        of: RegionsOf::Intent,
        action: MarkAction::Clear,
        runs: vec![(3, 2), (9, 1)],
        stamp: 0,
        size_bytes: None,
    };
    bench.link.mark(70_000, &change, &mut bench.events);
    let request = bench.request();
    let mut text = vec![0; request.data_bytes() as usize];
    bench.replica.read_exact(&mut text).unwrap();
    assert_eq!(decode_text::<MarkRegions>(&request, &text).unwrap(), change);
    let said = bench.frame(&request.response(Ok(())), &[]);
    bench.say(&said);
    assert_eq!(bench.events, [Event::Marked { peer: 1, mark: 70_000 }]);
}

#[test]
fn another_connection_takes_the_place_of_one_that_is_gone() {
    let mut bench = Bench::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(!bench.link.connect(ready(ours.try_clone().unwrap())), "the place is taken");
    bench.link.close();
    while bench.link.take_closed().is_none() {
        bench.run_once();
    }
    assert!(bench.link.connect(ready(ours)));
    (bench.replica, bench.session, bench.events) = (theirs, session(), Vec::new());
    bench.link.start(&mut bench.ring);
    let request = bench.ask_read(1, 4096);
    let said = bench.answer(&request, &[7; 4096]);
    bench.say(&said);
    let slot = SlotId { queue: 0, slot: 1 };
    assert_eq!(bench.events, [Event::Reply { peer: 1, slot, outcome: Ok(()) }]);
}

#[test]
fn a_request_on_a_connection_that_is_gone_is_answered() {
    let mut bench = Bench::new();
    bench.link.close();
    while bench.link.take_closed().is_none() {
        bench.run_once();
    }
    let range = ByteRange::new(0, 4096).unwrap();
    let data = (bench.arena.buf(0).part(0, 4096), 0);
    bench.link.send(SlotId { queue: 0, slot: 0 }, Operation::Read, range, data, 0, &mut bench.events);
    assert!(bench.lost().contains("no connection"), "{}", bench.lost());
    // The core drops it then, and waits to hear that nothing is under way.
    bench.link.close();
    assert_eq!(bench.link.take_closed(), Some(Event::Closed { peer: 1, queue: 0 }));
}

/// The longest queue in front of a PING or a proposal. It has the frontend's writes in flight, a write of
/// each copy slot, the headers of all requests, and the control frames before it.
const AHEAD_BYTES_MAX: u64 = {
    let copies = COPY_SLOTS as u64;
    let requests = 2 * ENGINE_FLIGHT_REQUESTS_MAX as u64 + copies;
    let control = CONTROL_FRAMES as u64 * (HEADER_BYTES as u64 + MAX_TEXT_BYTES as u64);
    ENGINE_FLIGHT_BYTES_MAX + copies * MAX_IO_BYTES as u64 + requests * HEADER_BYTES as u64 + control
};

/// The least `replica_timeout_ms` that agent.toml may have.
const REPLICA_TIMEOUT_MIN_MS: u64 = 500;

/// docs/consistency.md states the bound and the time that it takes.
#[test]
fn the_queue_before_a_ping_is_short() {
    const GIGABIT_BYTES_PER_MS: u64 = 1_000_000_000 / 8 / 1000;
    assert_eq!(AHEAD_BYTES_MAX >> 10, (13 << 10) + 15, "in KiB");
    // A replica at the end of such a link is not late for it, with the smallest replica_timeout_ms.
    const { assert!(AHEAD_BYTES_MAX / GIGABIT_BYTES_PER_MS < REPLICA_TIMEOUT_MIN_MS / 4) };
}

/// All that the core lets be in flight is queued first: half of the requests are reads. The bytes of the
/// stream are counted, so that the speed of the machine does not matter.
#[test]
fn a_ping_waits_for_no_more_than_the_requests_in_flight() {
    let requests = u16::try_from(ENGINE_FLIGHT_REQUESTS_MAX).unwrap();
    let mut bench = Bench::with(LinkSlots { depth: 2 * requests, copies: COPY_SLOTS });
    let write_bytes = ENGINE_FLIGHT_BYTES_MAX / u64::from(requests);
    for slot in 0..requests {
        bench.send(Operation::Read, slot, write_bytes, 0);
        bench.send(Operation::Write { fua: false }, requests + slot, write_bytes, 0);
    }
    for copy in 0..COPY_SLOTS {
        bench.send(Operation::Write { fua: false }, 2 * requests + copy, u64::from(MAX_IO_BYTES), 0);
    }
    bench.link.ping(&mut bench.events);
    let mut replica = bench.replica.try_clone().unwrap();
    let mut session = session();
    let counting = std::thread::spawn(move || {
        let mut ahead_bytes = 0;
        loop {
            let mut header = [0; HEADER_BYTES];
            replica.read_exact(&mut header).unwrap();
            let header = session.decode(&header).unwrap();
            session.advance();
            if header.opcode == Opcode::Ping {
                return ahead_bytes;
            }
            let mut data = vec![0; header.data_bytes() as usize];
            replica.read_exact(&mut data).unwrap();
            ahead_bytes += (HEADER_BYTES + data.len()) as u64;
        }
    });
    while !counting.is_finished() {
        bench.link.flush(&mut bench.ring);
        let mut completions = Vec::new();
        bench.ring.wait(Some(Duration::from_millis(10)), &mut completions).unwrap();
        for completion in completions {
            bench.link.on_completion(completion, &mut bench.ring, &bench.arena, &mut bench.events);
        }
    }
    let ahead_bytes = counting.join().unwrap();
    let data_bytes = ENGINE_FLIGHT_BYTES_MAX + u64::from(COPY_SLOTS) * u64::from(MAX_IO_BYTES);
    assert!((data_bytes..=AHEAD_BYTES_MAX).contains(&ahead_bytes), "{ahead_bytes} bytes");
    assert_eq!(bench.events, []);
}
