//! A volume that is one file in memory, behind any frontend: the smallest thing that plays the engine.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use shorthorn_core::{Operation, Request};
use shorthorn_frontend::{QueueFrontend, QueueIo, SOURCE};
use shorthorn_ring::{Arena, Completion, Ring, Token, WakeReceiver, Waker};
use shorthorn_types::limits::MAX_IO_BYTES;
use shorthorn_types::{ByteRange, Errno};

const ENGINE: u8 = SOURCE + 1;
const DONE: u8 = 0;
const WOKEN: u8 = 1;

/// The volume, and its controls for tests.
#[derive(Debug)]
pub struct Volume {
    file: File,
    stop: AtomicBool,
    hold: AtomicBool,
    bad_from: AtomicU64,
    bad_to: AtomicU64,
    held: Mutex<usize>,
    changed: Condvar,
    flushes: AtomicU64,
}

impl Volume {
    /// Creates a volume with the data of `file`, which has to be on tmpfs or the like.
    pub fn new(file: File) -> Arc<Volume> {
        Arc::new(Volume {
            file,
            stop: AtomicBool::new(false),
            hold: AtomicBool::new(false),
            bad_from: AtomicU64::new(0),
            bad_to: AtomicU64::new(0),
            held: Mutex::new(0),
            changed: Condvar::new(),
            flushes: AtomicU64::new(0),
        })
    }

    /// Returns the file with the data.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Requests that touch this range fail with EIO.
    pub fn set_bad(&self, range: std::ops::Range<u64>) {
        self.bad_from.store(range.start, Ordering::SeqCst);
        self.bad_to.store(range.end, Ordering::SeqCst);
    }

    /// Returns the number of completed flushes.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::SeqCst)
    }

    /// Waits until exactly `count` requests are held.
    pub fn wait_for_held(&self, count: usize) {
        let held = self.held.lock().unwrap();
        let limit = std::time::Duration::from_secs(30);
        let (held, _) = self.changed.wait_timeout_while(held, limit, |held| *held != count).unwrap();
        assert_eq!(*held, count, "requests that are held");
    }

    fn is_bad(&self, range: ByteRange) -> bool {
        range.offset() < self.bad_to.load(Ordering::SeqCst)
            && range.end() > self.bad_from.load(Ordering::SeqCst)
    }
}

/// Threads that serve a volume, one for each queue.
pub struct Host {
    volume: Arc<Volume>,
    threads: Vec<(Waker, JoinHandle<io::Result<()>>)>,
}

impl Host {
    /// Serves `volume` through `queues`, with `depth` slots each.
    pub fn start(volume: &Arc<Volume>, queues: Vec<Box<dyn QueueFrontend>>, depth: u16) -> Host {
        let threads = queues
            .into_iter()
            .map(|queue| {
                let (wake, waker) = WakeReceiver::new().unwrap();
                let volume = Arc::clone(volume);
                let (started, ready) = std::sync::mpsc::channel();
                let thread = std::thread::spawn(move || {
                    let mut thread = Thread::new(volume, queue, depth, wake)?;
                    let result = thread.start();
                    started.send(()).unwrap();
                    result.and_then(|()| thread.run())
                });
                ready.recv().expect("the queue starts");
                (waker, thread)
            })
            .collect();
        Host { volume: Arc::clone(volume), threads }
    }

    /// Makes requests wait for [`Host::release`].
    pub fn hold(&self) {
        self.volume.hold.store(true, Ordering::SeqCst);
    }

    /// Completes the held requests.
    pub fn release(&self) {
        self.volume.hold.store(false, Ordering::SeqCst);
        for (waker, _) in &self.threads {
            waker.wake();
        }
    }

    /// Ends the threads.
    pub fn stop(self) {
        self.volume.stop.store(true, Ordering::SeqCst);
        for (waker, thread) in self.threads {
            waker.wake();
            thread.join().unwrap().unwrap();
        }
    }
}

struct Thread {
    volume: Arc<Volume>,
    queue: Box<dyn QueueFrontend>,
    wake: WakeReceiver,
    ring: Ring,
    arena: Arena,
    requests: Vec<Request>,
    held: VecDeque<Request>,
    /// The request in each slot, to catch a slot that is used twice.
    in_flight: Vec<Option<Request>>,
}

impl Thread {
    fn new(
        volume: Arc<Volume>,
        queue: Box<dyn QueueFrontend>,
        depth: u16,
        wake: WakeReceiver,
    ) -> io::Result<Thread> {
        Ok(Thread {
            volume,
            queue,
            wake,
            ring: Ring::new(256)?,
            arena: Arena::new(depth.into(), MAX_IO_BYTES as usize)?,
            requests: Vec::with_capacity(depth.into()),
            held: VecDeque::new(),
            in_flight: vec![None; depth.into()],
        })
    }

    fn start(&mut self) -> io::Result<()> {
        self.wake.arm(&mut self.ring, Token { source: ENGINE, kind: WOKEN, index: 0, tag: 0 });
        self.with_queue(|queue, io| queue.start(io))
    }

    fn run(&mut self) -> io::Result<()> {
        let mut completions = Vec::new();
        while !self.volume.stop.load(Ordering::SeqCst) {
            self.ring.wait(None, &mut completions)?;
            for completion in completions.drain(..) {
                self.take(completion)?;
            }
            self.with_queue(|queue, io| queue.flush(io));
        }
        Ok(())
    }

    fn take(&mut self, completion: Completion) -> io::Result<()> {
        match (completion.token.source, completion.token.kind) {
            (SOURCE, _) => self.with_queue(|queue, io| queue.on_completion(io, completion)),
            (_, WOKEN) => {
                self.wake.arm(&mut self.ring, completion.token);
                for request in std::mem::take(&mut self.held) {
                    self.set_held(|held| held - 1);
                    self.execute(request);
                }
                Ok(())
            }
            _ => {
                self.done(completion);
                Ok(())
            }
        }
    }

    fn with_queue<T>(&mut self, work: impl FnOnce(&mut dyn QueueFrontend, &mut QueueIo<'_>) -> T) -> T {
        let Thread { ring, arena, requests, .. } = self;
        let mut io = QueueIo { ring, arena, requests, refusals: &mut Vec::new() };
        let result = work(&mut *self.queue, &mut io);
        for request in std::mem::take(&mut self.requests) {
            let before = self.in_flight[usize::from(request.slot)].replace(request);
            assert!(before.is_none(), "{request:?} in the slot of {before:?}");
            if self.volume.hold.load(Ordering::SeqCst) {
                self.held.push_back(request);
                self.set_held(|held| held + 1);
            } else {
                self.execute(request);
            }
        }
        result
    }

    fn set_held(&self, change: impl FnOnce(usize) -> usize) {
        let mut held = self.volume.held.lock().unwrap();
        *held = change(*held);
        self.volume.changed.notify_all();
    }

    fn execute(&mut self, request: Request) {
        let fd = self.volume.file.as_raw_fd();
        let token = Token { source: ENGINE, kind: DONE, index: request.slot, tag: 0 };
        let (offset, length) = (request.range.offset(), request.range.length());
        let buf = || self.arena.buf(request.slot.into()).part(0, usize::try_from(length).unwrap());
        match request.operation {
            Operation::Read => self.ring.read(fd, buf(), offset, token),
            Operation::Write { fua } => self.ring.write(fd, buf(), offset, fua, token),
            Operation::Flush => self.ring.fdatasync(fd, token),
            Operation::Verify | Operation::CheckedRead | Operation::WriteRot => {
                unreachable!("no frontend asks for it")
            }
            Operation::Discard | Operation::WriteZeroes { .. } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                self.ring.fallocate(fd, mode, offset, length, token);
            }
        }
    }

    fn done(&mut self, completion: Completion) {
        let slot = completion.token.index;
        let request = self.in_flight[usize::from(slot)].take().expect("a request in the slot");
        if request.operation == Operation::Flush {
            self.volume.flushes.fetch_add(1, Ordering::SeqCst);
        }
        let outcome = match completion.count() {
            _ if self.volume.is_bad(request.range) => Err(Errno::IO),
            Err(error) => Err(Errno::of(&error)),
            Ok(count) => {
                let data = matches!(request.operation, Operation::Read | Operation::Write { .. });
                if data && count as u64 != request.range.length() { Err(Errno::IO) } else { Ok(()) }
            }
        };
        self.with_queue(|queue, io| queue.complete(io, slot, outcome));
    }
}
