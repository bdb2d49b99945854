use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Instant;

use shorthorn_core::{Operation, Request};
use shorthorn_ring::{Arena, Ring};

use super::super::protocol::RequestHeader;
use super::*;

const BLOCK_BYTES: usize = 4096;
const BLOCKS: usize = 64;
const DEPTH: u16 = 8;
const READ: u16 = 0;
const WRITE: u16 = 1;
/// The time after which a test has failed.
const LIMIT: Duration = Duration::from_secs(20);
/// Requests that the process leaves undone until it has to do them, so that a handover always finds some.
const LEFT_UNDONE: usize = 3;

/// A process that serves one queue of a volume in memory.
struct Process {
    queue: KernelQueue,
    ring: Ring,
    arena: Arena,
    requests: Vec<Request>,
    volume: Arc<Mutex<Vec<u8>>>,
    undone: Vec<Request>,
}

impl Process {
    fn start(ours: OwnedFd, volume: &Arc<Mutex<Vec<u8>>>) -> Process {
        let export = Export::new("v1".parse().unwrap(), (BLOCKS * BLOCK_BYTES) as u64);
        let mut service =
            NbdConnections::new(ConnectionContext::new(export, DEPTH, CONNECTIONS), CONNECTIONS);
        let first = service.add(ours, FirstPhase::Transmission);
        let (sender, closed) = (mpsc::channel().0, Arc::default());
        let mut process = Process {
            queue: KernelQueue { service, first, broken: false, is_quiesced: false, sender, closed },
            ring: Ring::new(64).unwrap(),
            arena: Arena::new(DEPTH.into(), MAX_IO_BYTES as usize).unwrap(),
            requests: Vec::new(),
            volume: Arc::clone(volume),
            undone: Vec::new(),
        };
        process.with_queue(|queue, io| queue.start(io).unwrap());
        process
    }

    fn with_queue(&mut self, act: impl FnOnce(&mut KernelQueue, &mut QueueIo<'_>)) {
        let Process { ring, arena, requests, .. } = self;
        let mut io = QueueIo { ring, arena, requests, refusals: &mut Vec::new() };
        act(&mut self.queue, &mut io);
        self.undone.append(&mut self.requests);
    }

    /// Handles all events, completes all but the first requests, the last one first, and sends the answers.
    /// Without any event it completes all requests, because events may depend on them.
    fn run_once(&mut self, left_undone: usize) {
        let mut completions = Vec::new();
        self.ring.wait(Some(Duration::from_millis(1)), &mut completions).unwrap();
        let left_undone = if completions.is_empty() { 0 } else { left_undone };
        for completion in completions {
            self.with_queue(|queue, io| queue.on_completion(io, completion).unwrap());
        }
        while self.undone.len() > left_undone {
            let request = self.undone.pop().unwrap();
            self.execute(request);
            self.with_queue(|queue, io| queue.complete(io, request.slot, Ok(())));
        }
        self.with_queue(|queue, io| queue.flush(io));
    }

    fn execute(&self, request: Request) {
        let mut volume = self.volume.lock().unwrap();
        let range =
            usize::try_from(request.range.offset()).unwrap()..usize::try_from(request.range.end()).unwrap();
        let buffer = self.arena.buf(request.slot.into()).part(0, range.len());
        match request.operation {
            Operation::Read => buffer.copy_from(&volume[range]),
            Operation::Write { .. } => buffer.copy_to(&mut volume[range]),
            other => panic!("unexpected command: {other:?}"),
        }
    }

    fn quiesce(&mut self) {
        self.with_queue(KernelQueue::quiesce);
    }

    /// Returns the socket once it is handed over.
    fn hand_over(mut self) -> OwnedFd {
        self.quiesce();
        let deadline = Instant::now() + LIMIT;
        loop {
            self.run_once(LEFT_UNDONE);
            if let Quiesced::At(socket) = self.queue.quiesced() {
                return socket;
            }
            assert!(Instant::now() < deadline, "it never comes to the start of a request");
        }
    }
}

fn request(kind: u16, cookie: u64, block: usize, data: &[u8]) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((block as u64 * BLOCK_BYTES as u64).to_be_bytes());
    bytes.extend(u32::try_from(BLOCK_BYTES).unwrap().to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Returns the cookie of the next reply, which must be a success.
fn reply(kernel: &mut UnixStream) -> u64 {
    let mut header = [0; 16];
    kernel.read_exact(&mut header).unwrap();
    assert_eq!(&header[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "a simple reply without an error");
    u64::from_be_bytes(header[8..].try_into().unwrap())
}

fn pair() -> (OwnedFd, UnixStream) {
    let (ours, kernels) = driver_link::pair().unwrap();
    let kernels = UnixStream::from(kernels);
    kernels.set_read_timeout(Some(LIMIT)).unwrap();
    kernels.set_write_timeout(Some(LIMIT)).unwrap();
    (ours, kernels)
}

fn volume() -> Arc<Mutex<Vec<u8>>> {
    Arc::new(Mutex::new(vec![0; BLOCKS * BLOCK_BYTES]))
}

#[test]
fn a_request_that_has_begun_is_finished_and_the_next_one_left_in_the_socket() {
    let data = [7; BLOCK_BYTES];
    let first = request(WRITE, 1, 5, &data);
    // In the middle of the header, right behind it, in the middle of the data; and at the start of a request.
    for cut in [0, 10, RequestHeader::BYTES, 3000] {
        let ((ours, mut kernel), volume) = (pair(), volume());
        let mut process = Process::start(ours, &volume);
        kernel.write_all(&first[..cut]).unwrap();
        process.run_once(0);
        process.quiesce();
        for _ in 0..5 {
            process.run_once(0);
            let is_quiesced = matches!(process.queue.quiesced(), Quiesced::At(_));
            assert!(!is_quiesced || cut == 0, "parked {cut} bytes into a request");
        }
        if cut > 0 {
            kernel.write_all(&first[cut..]).unwrap();
        }
        kernel.write_all(&request(READ, 2, 5, &[])).unwrap();
        let socket = process.hand_over();
        if cut > 0 {
            assert_eq!(reply(&mut kernel), 1);
        } else {
            volume.lock().unwrap()[5 * BLOCK_BYTES..6 * BLOCK_BYTES].fill(7);
        }
        kernel.set_nonblocking(true).unwrap();
        assert!(kernel.read(&mut [0]).is_err(), "the second request was not read: {cut}");
        kernel.set_nonblocking(false).unwrap();
        let mut next = Process::start(socket, &volume);
        let mut read = vec![0; BLOCK_BYTES];
        let answered = thread::spawn(move || {
            assert_eq!(reply(&mut kernel), 2);
            kernel.read_exact(&mut read).unwrap();
            read
        });
        while !answered.is_finished() {
            next.run_once(0); // ends by the time-out of the other end at the latest
        }
        assert_eq!(answered.join().unwrap(), data);
    }
}

/// The unanswered requests of the kernel's end of a connection.
#[derive(Default)]
struct Waiting {
    /// By block: the cookie, whether it is a write, and the content of the block after it.
    blocks: Vec<Option<(u64, bool, u8)>>,
    content: Vec<u8>,
}

/// Reads every reply: each request has one, and a read shows the last write that was answered.
fn check_replies(
    mut kernel: UnixStream,
    waiting: &(Mutex<Waiting>, Condvar),
    answered: &AtomicUsize,
    total: usize,
) {
    for _ in 0..total {
        let cookie = reply(&mut kernel);
        let mut state = waiting.0.lock().unwrap();
        let block = state.blocks.iter().position(|sent| sent.is_some_and(|(sent, ..)| sent == cookie));
        let block = block.expect("an answer to something that is not asked, or for the second time");
        let (_, is_write, content) = state.blocks[block].take().unwrap();
        if is_write {
            state.content[block] = content;
        } else {
            let mut data = vec![0; BLOCK_BYTES];
            kernel.read_exact(&mut data).unwrap();
            assert!(
                data.iter().all(|byte| *byte == state.content[block]),
                "block {block} of request {cookie}"
            );
        }
        waiting.1.notify_all();
        answered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Sends requests in pieces, as many as there are free blocks, even if the server does not read them.
fn send_requests(mut kernel: UnixStream, waiting: &(Mutex<Waiting>, Condvar), total: usize) {
    let mut random = 12345_u32;
    let mut next = move |limit: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) as usize % limit
    };
    for cookie in 1..=total as u64 {
        let (block, is_write, content) = (next(BLOCKS), next(3) > 0, u8::try_from(next(256)).unwrap());
        let state = waiting.0.lock().unwrap();
        let is_busy = |state: &mut Waiting| state.blocks[block].is_some();
        let (mut state, waited) = waiting.1.wait_timeout_while(state, LIMIT, is_busy).unwrap();
        assert!(
            !waited.timed_out(),
            "request {cookie} waits for an answer to the one before for block {block}"
        );
        state.blocks[block] = Some((cookie, is_write, content));
        drop(state);
        let data = vec![content; if is_write { BLOCK_BYTES } else { 0 }];
        let bytes = request(if is_write { WRITE } else { READ }, cookie, block, &data);
        let cut = next(bytes.len());
        for piece in [&bytes[..cut], &bytes[cut..]] {
            kernel.write_all(piece).unwrap();
            thread::yield_now();
        }
    }
}

#[test]
fn no_request_is_lost_or_answered_twice_over_many_handovers() {
    const TOTAL: usize = 20_000;
    const BETWEEN: usize = 300;
    let ((ours, kernel), volume) = (pair(), volume());
    let state = Waiting { blocks: vec![None; BLOCKS], content: vec![0; BLOCKS] };
    let waiting = (Mutex::new(state), Condvar::new());
    let answered = AtomicUsize::new(0);
    thread::scope(|scope| {
        // The kernel's end stays open to the end: a connection that is closed is not handed over.
        let (sender, reader) = (kernel.try_clone().unwrap(), kernel.try_clone().unwrap());
        scope.spawn(|| send_requests(sender, &waiting, TOTAL));
        let replies = scope.spawn(|| check_replies(reader, &waiting, &answered, TOTAL));
        let (mut socket, mut handovers) = (ours, 0);
        while !replies.is_finished() {
            let mut process = Process::start(socket, &volume);
            let enough = answered.load(Ordering::SeqCst) + BETWEEN;
            while !replies.is_finished() && answered.load(Ordering::SeqCst) < enough {
                process.run_once(LEFT_UNDONE);
            }
            socket = process.hand_over();
            handovers += 1;
        }
        assert!(handovers >= TOTAL / BETWEEN / 2, "{handovers} handovers");
    });
    assert_eq!(answered.into_inner(), TOTAL);
}

fn device(kernel_id: Option<u32>) -> NbdDevice {
    let volume: VolumeName = "v1".parse().unwrap();
    NbdDevice {
        export: Export::new(volume.clone(), 1 << 20),
        backend: backend_of(&volume),
        volume,
        device_dir: "/nowhere".into(),
        record: DeviceRecord { kind: FrontendKind::Nbd, kernel_id, queues: 1, depth: DEPTH },
        kernel_ends: Vec::new(),
        broken: None,
        closed: Arc::default(),
        refuses_requests: false,
        number: None,
    }
}

#[test]
fn the_size_waits_for_the_next_attachment_on_kernels_that_freeze_the_queue() {
    let mut device = device(None);
    let is_denied = kernel_release::nbd_resize_deny_reason(&kernel_release::release()).is_some();
    let resized = device.resize(2 << 20);
    assert_eq!(matches!(resized, Err(FrontendError::Unsupported { .. })), is_denied, "{resized:?}");
    assert_eq!(device.size_bytes(), if is_denied { 1 << 20 } else { 2 << 20 });
}

#[test]
fn a_device_that_is_not_ours_any_more_is_not_disconnected() {
    // No kernel makes as many devices, so this number has no identifier.
    device(Some(1 << 30)).stop().unwrap();
}
