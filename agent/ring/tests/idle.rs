//! Threads that wait in rings for requests that may never come: the host must not count them as waiting for a
//! disk.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_ring::{Ring, Token, WakeReceiver, Waker};

/// The number of threads, above the usual number of waiting tasks on a test machine.
const THREADS: usize = 200;
const LIMIT: Duration = Duration::from_secs(30);
const TOKEN: Token = Token { source: 1, kind: 2, index: 3, tag: 4 };
/// The first kernel that distinguishes the two waits.
const NO_IOWAIT_SINCE: (u32, u32) = (6, 15);

#[test]
fn idle_rings_do_not_count_as_waiting_for_a_disk() {
    let (sender, ready) = mpsc::channel();
    let threads: Vec<_> =
        (0..THREADS).map(|at| wait_in_a_ring(sender.clone(), (at % 2 == 0).then_some(10 * LIMIT))).collect();
    let wakers: Vec<(String, Waker)> = (0..THREADS).map(|_| next(&ready)).collect();
    let is_new = kernel() >= NO_IOWAIT_SINCE;
    until("all threads wait", || wakers.iter().all(|(task, _)| is_waiting(task)));
    // Other programs wait for disks now and then.
    until(&format!("the kernel counts as it should on {:?}", kernel()), || {
        (blocked() < THREADS / 2) == is_new
    });
    wakers.iter().for_each(|(_, waker)| waker.wake());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn wait_in_a_ring(sender: Sender<(String, Waker)>, timeout: Option<Duration>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut ring = Ring::new(4).unwrap();
        let (wake, waker) = WakeReceiver::new().unwrap();
        wake.arm(&mut ring, TOKEN);
        let task = std::fs::read_link("/proc/thread-self").unwrap();
        sender.send((format!("/proc/{}/stat", task.display()), waker)).unwrap();
        let mut out = Vec::new();
        while out.is_empty() {
            ring.wait(timeout, &mut out).unwrap();
        }
    })
}

fn next(ready: &Receiver<(String, Waker)>) -> (String, Waker) {
    ready.recv_timeout(LIMIT).expect("a thread has not begun")
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
