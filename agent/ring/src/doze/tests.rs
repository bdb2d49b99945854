//! Threads that wait in rings for requests that may never come: the host must not count them as waiting for a
//! disk, and no wake-up may be lost.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::QUIET;
use crate::{Arena, Ring, TaskWork, Token, Wake, Waker};

/// The number of threads, above the usual number of waiting tasks on a test machine.
const THREADS: usize = 200;
const LIMIT: Duration = Duration::from_secs(30);
const TOKEN: Token = Token { source: 1, kind: 2, index: 3, tag: 4 };
/// The kernels that count every wait in a ring as one for a disk; stable ones before may do so too.
const COUNTS_SINCE: (u32, u32) = (6, 5);
const ROUNDS: u32 = 20_000;

/// Makes a ring that the test is about.
type Make = fn() -> Ring;

fn as_the_kernel_has_it() -> Ring {
    Ring::new(4).unwrap()
}

fn without_the_flag() -> Ring {
    Ring::new(4).unwrap().on_an_older_kernel(Some(QUIET))
}

fn without_any_way() -> Ring {
    Ring::new(4).unwrap().on_an_older_kernel(None)
}

#[test]
fn idle_rings_are_no_wait_for_a_disk() {
    let mut makes: Vec<(Make, bool)> = vec![(as_the_kernel_has_it, false), (without_the_flag, false)];
    if kernel() >= COUNTS_SINCE {
        // This shows that the test can see the difference.
        makes.push((without_any_way, true));
    }
    for (make, is_counted) in makes {
        let (sender, ready) = mpsc::channel();
        let threads: Vec<_> = (0..THREADS)
            .map(|at| wait_in_a_ring(make, sender.clone(), (at % 2 == 0).then_some(10 * LIMIT)))
            .collect();
        let wakers: Vec<(String, Waker)> = (0..THREADS).map(|_| next(&ready)).collect();
        until("all threads wait", || wakers.iter().all(|(task, _)| is_waiting(task)));
        // Other programs wait for disks now and then.
        until(&format!("the kernel counts as it should on {:?}", kernel()), || {
            (blocked() >= THREADS / 2) == is_counted
        });
        wakers.iter().for_each(|(_, waker)| waker.wake());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn wait_in_a_ring(
    make: Make,
    sender: Sender<(String, Waker)>,
    timeout: Option<Duration>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut ring = make();
        let (wake, waker) = Wake::new().unwrap();
        wake.arm(&mut ring, TOKEN);
        let task = std::fs::read_link("/proc/thread-self").unwrap();
        sender.send((format!("/proc/{}/stat", task.display()), waker)).unwrap();
        let mut out = Vec::new();
        while out.is_empty() {
            ring.wait(timeout, &mut out).unwrap();
        }
    })
}

fn next<T>(ready: &Receiver<T>) -> T {
    ready.recv_timeout(LIMIT).expect("a thread waits for ever")
}

fn is_waiting(task: &str) -> bool {
    let stat = std::fs::read_to_string(task).unwrap();
    // The name of the task, in parentheses, may hold anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

/// Returns the number of tasks of the host that wait for a disk.
fn blocked() -> usize {
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let line = stat.lines().find_map(|line| line.strip_prefix("procs_blocked ")).unwrap();
    line.parse().unwrap()
}

fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn until(wanted: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < LIMIT, "never: {wanted}; {} tasks are blocked", blocked());
        thread::yield_now();
    }
}

/// Wakes a ring that has no time limit thousands of times, at random moments of its way into poll(2) and out
/// of it. A lost wake-up is a thread that waits for ever.
#[test]
fn no_wake_up_is_lost() {
    for task_work in [TaskWork::Deferred, TaskWork::Cooperative] {
        let (sender, told) = mpsc::channel();
        let (wake_sender, wakers) = mpsc::channel();
        let (pipe, mut writer) = std::io::pipe().unwrap();
        let thread = thread::spawn(move || {
            // Each wait goes into poll(2) at once.
            let mut ring = Ring::with(4, task_work).unwrap().on_an_older_kernel(Some(Duration::ZERO));
            let (wake, waker) = Wake::new().unwrap();
            wake_sender.send(waker).unwrap();
            let byte = Arena::new(1, 4096).unwrap().buf(0).part(0, 1);
            let from_pipe = Token { kind: 9, ..TOKEN };
            wake.arm(&mut ring, TOKEN);
            ring.read_signal(pipe.as_raw_fd(), byte, from_pipe);
            let (mut rounds, mut out) = (0, Vec::new());
            while rounds < ROUNDS {
                out.clear();
                ring.wait(None, &mut out).unwrap();
                for completion in &out {
                    rounds += 1;
                    if completion.token == TOKEN {
                        wake.arm(&mut ring, TOKEN);
                    } else {
                        assert_eq!(completion.count().unwrap(), 1);
                        ring.read_signal(pipe.as_raw_fd(), byte, from_pipe);
                    }
                    sender.send(()).unwrap();
                }
            }
        });
        let waker = next(&wakers);
        for round in 0..ROUNDS {
            // A different moment in each round.
            (0..round % 997).for_each(|_| std::hint::spin_loop());
            if round % 2 == 0 {
                waker.wake()
            } else {
                writer.write_all(b"x").unwrap()
            }
            next(&told);
        }
        thread.join().unwrap();
    }
}

/// Only a ring without other operations waits in poll(2): a disk's own are waits for a disk.
#[test]
fn a_ring_with_work_is_not_idle() {
    let mut ring = without_the_flag();
    let (wake, waker) = Wake::new().unwrap();
    wake.arm(&mut ring, TOKEN);
    assert!(ring.is_idle());
    let arena = Arena::new(1, 4096).unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let read = Token { kind: 9, ..TOKEN };
    ring.read(file.as_raw_fd(), arena.buf(0), 0, read);
    assert!(!ring.is_idle());
    let mut out = Vec::new();
    ring.wait(None, &mut out).unwrap();
    assert_eq!((out[0].token, out[0].count().unwrap()), (read, 4096));
    assert!(ring.is_idle());
    waker.wake();
    out.clear();
    ring.wait(None, &mut out).unwrap();
    assert_eq!(out[0].token, TOKEN);
}

/// The limit of a wait holds in poll(2) too, again and again.
#[test]
fn an_idle_wait_ends_by_itself() {
    let mut ring = without_the_flag();
    let (wake, _waker) = Wake::new().unwrap();
    wake.arm(&mut ring, TOKEN);
    let (mut out, limit) = (Vec::new(), 3 * QUIET);
    for _ in 0..3 {
        let begin = Instant::now();
        ring.wait(Some(limit), &mut out).unwrap();
        assert!(out.is_empty() && begin.elapsed() >= limit, "{out:?} after {:?}", begin.elapsed());
    }
}
