//! A link against a replica that says what the test wants.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use shorthorn_types::{Errno, Members, ReplicaId};
use shorthorn_wire::Refusal;

use super::*;

const DEPTH: u16 = 4;
const GENERATION: Generation = Generation::new(3, 1);

struct Bench {
    link: Link,
    replica: UnixStream,
    ring: Ring,
    arena: Arena,
    events: Vec<Event>,
    notice: Option<Notice>,
}

impl Bench {
    fn new() -> Bench {
        let (ours, replica) = UnixStream::pair().unwrap();
        replica.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut bench = Bench {
            link: Link::new(1, 0, GENERATION, DEPTH, Some(ours.into())),
            replica,
            ring: Ring::new(8).unwrap(),
            arena: Arena::new(usize::from(DEPTH), 1 << 20).unwrap(),
            events: Vec::new(),
            notice: None,
        };
        bench.link.start(&mut bench.ring);
        bench
    }

    fn ask_read(&mut self, slot: u16, bytes: u64) -> Header {
        let range = ByteRange::new(8192, bytes).unwrap();
        let id = SlotId { queue: 0, slot };
        self.link.send(id, Operation::Read, range, 0, &self.arena, &mut self.events);
        self.link.flush(&mut self.ring);
        self.turn();
        let mut header = [0; HEADER_BYTES];
        self.replica.read_exact(&mut header).unwrap();
        Header::decode(&header).unwrap()
    }

    /// What the replica says, in one piece; then everything that has happened is taken.
    fn say(&mut self, bytes: &[u8]) {
        self.replica.write_all(bytes).unwrap();
        let before = self.events.len();
        while self.events.len() == before && self.notice.is_none() {
            self.turn();
        }
    }

    fn turn(&mut self) {
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

fn answer(request: &Header, data: &[u8]) -> Vec<u8> {
    let mut header = request.response(Ok(()));
    header.data_check = crc32c(data);
    [&header.encode()[..], data].concat()
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
        let said = answer(&request, &data);
        let writer = std::thread::spawn(move || replica.write_all(&said).unwrap());
        while bench.events.is_empty() {
            bench.turn();
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
    bench.say(&request.response(Err(Errno::NO_SPACE)).encode());
    let slot = SlotId { queue: 0, slot: 0 };
    assert_eq!(bench.events, [Event::Reply { peer: 1, slot, outcome: Err(Errno::NO_SPACE) }]);
}

#[test]
fn damaged_data_is_a_failure_of_the_replica() {
    let mut bench = Bench::new();
    let request = bench.ask_read(0, 4096);
    let mut said = answer(&request, &[7; 4096]);
    said[HEADER_BYTES + 100] ^= 1;
    bench.say(&said);
    assert!(bench.lost().contains("data check"), "{}", bench.lost());
}

#[test]
fn answers_to_what_was_not_asked_are_failures() {
    let read = Header::request(Opcode::Read, ID_REQUEST | 1, 8192, 4096);
    let far = Header::request(Opcode::Write, ID_REQUEST | 99, 8192, 4096);
    let lies = [
        (answer(&read, &[0; 4096]), "0 bytes asked for"),
        (far.response(Ok(())).encode().to_vec(), "not asked"),
        (Header::request(Opcode::Ping, ID_PING, 0, 0).encode().to_vec(), "sends a request"),
        (vec![0; HEADER_BYTES], "magic"),
    ];
    for (said, expected) in lies {
        let mut bench = Bench::new();
        bench.say(&said);
        assert!(bench.lost().contains(expected), "{} instead of {expected}", bench.lost());
    }
}

#[test]
fn more_or_less_data_than_asked_for_is_a_failure() {
    let mut bench = Bench::new();
    let mut request = bench.ask_read(0, 4096);
    request.length_bytes = 8192;
    bench.say(&answer(&request, &[0; 8192]));
    assert!(bench.lost().contains("4096 bytes asked for"), "{}", bench.lost());
}

#[test]
fn the_end_of_a_connection_is_told_once_and_closed_when_nothing_is_under_way() {
    let mut bench = Bench::new();
    bench.replica.shutdown(std::net::Shutdown::Both).unwrap();
    while bench.events.is_empty() {
        bench.turn();
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
        bench.turn();
    }
    assert_eq!(bench.events, []);
}

#[test]
fn a_stored_view_is_told_by_its_number() {
    let mut bench = Bench::new();
    let id = ViewId { generation: GENERATION, number: 7 };
    let view = View { id, members: Members::new([ReplicaId::from_random(1)]).unwrap() };
    let honoured = ReplicaReport { committed: view, proposed: Vec::new() };
    bench.link.propose(view, honoured, &mut bench.events);
    bench.say(&Header::request(Opcode::Propose, ID_PROPOSE | 7, 0, 0).response(Ok(())).encode());
    assert_eq!(bench.events, [Event::ViewStored { peer: 1, view: id }]);
}

#[test]
fn a_newer_engine_is_noticed() {
    let mut bench = Bench::new();
    let holder = Some(Generation::new(4, 0));
    let refusal = Refusal { message: "fenced".into(), holder };
    let request = Header::request(Opcode::Propose, ID_PROPOSE | 7, 0, 0);
    let (header, text) = encode_text(request.response(Err(Errno::NOT_PERMITTED)), &refusal);
    bench.say(&[&header.encode()[..], &text].concat());
    assert!(matches!(bench.notice, Some(Notice::Deposed { holder }) if holder == Generation::new(4, 0)));
}
