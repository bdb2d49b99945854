//! The sockets of a device, from one engine process to the next.
//!
//! A process that ends in order stops reading each socket at the start of a request, and answers the requests
//! that it has read. Then it gives the sockets to the service manager that has started it, in the way of
//! systemd's descriptor store (sd_notify(3): FDSTORE, FDNAME). The next process gets them as in
//! sd_listen_fds(3). The kernel never sees them closed: the next process reads the requests sent meanwhile,
//! and none waits for a time-out.
//!
//! A socket carries the generation of the process that has handed it over. Only the next process takes it. A
//! process that dies may have read a part of a request, and its successor finds another generation in the
//! state file.

use std::env;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;
use sd_notify::NotifyState;
use shorthorn_frontend::QueueSocket;
use shorthorn_types::Generation;
use shorthorn_types::limits::MAX_QUEUES;

/// The environment variable by which a parent that is not systemd lists the passed descriptors:
/// `<number>:<name>`, separated by commas. It cannot say so by LISTEN_PID, as it does not know the process id
/// before the program starts.
const PASSED: &str = "SHORTHORN_DESCRIPTORS";
/// The last of the descriptors that every process has: standard error.
const LAST_STANDARD: RawFd = 2;
/// The time limit for the service manager to take descriptors: all work waits for that. systemd answers
/// within milliseconds unless it hangs.
const KEEP_LIMIT: Duration = Duration::from_secs(2);

/// The name of a socket while the service manager keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketName {
    /// The generation of the process that has handed the socket over.
    generation: Generation,
    queue: u16,
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Generation { attach, restart, nonce } = self.generation;
        write!(f, "nbd-{attach}-{restart}-{}", self.queue)?;
        if nonce == 0 { Ok(()) } else { write!(f, "-{nonce:x}") }
    }
}

impl FromStr for SocketName {
    type Err = ();

    fn from_str(text: &str) -> Result<SocketName, ()> {
        let mut numbers = text.strip_prefix("nbd-").ok_or(())?.split('-');
        let mut next = || numbers.next().ok_or(());
        let attach = next()?.parse().map_err(drop)?;
        let restart = next()?.parse().map_err(drop)?;
        let queue = next()?.parse().map_err(drop)?;
        let nonce = numbers.next().map_or(Ok(0), |nonce| u64::from_str_radix(nonce, 16)).map_err(drop)?;
        if queue >= MAX_QUEUES {
            return Err(());
        }
        let name = SocketName { generation: Generation::new(attach, restart).of_nonce(nonce), queue };
        // One way to write it: a name that is written otherwise is not ours.
        if name.to_string() == text { Ok(name) } else { Err(()) }
    }
}

/// Takes the sockets that the previous process has handed over, and removes them from the service manager. To
/// be called once. `predecessor` is the generation of that process; sockets of any other one are shut down,
/// so that the kernel knows them for dead.
pub fn take_over(predecessor: Option<Generation>) -> Vec<QueueSocket> {
    let passed = passed().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot take over the descriptors that were passed to this process");
        Vec::new()
    });
    // Before anything is read: should this process die, its successor must not find them.
    for (_, name) in &passed {
        if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]) {
            tracing::warn!(%error, name, "a socket of an ended process may stay in the descriptor store");
        }
    }
    choose(passed, predecessor)
}

/// Returns the sockets of the previous process, each queue once, and shuts the others down.
fn choose(passed: Vec<(OwnedFd, String)>, predecessor: Option<Generation>) -> Vec<QueueSocket> {
    let mut sockets: Vec<QueueSocket> = Vec::new();
    for (socket, text) in passed {
        let name = text.parse().ok().filter(|name: &SocketName| Some(name.generation) == predecessor);
        match name {
            Some(name) if sockets.iter().all(|other| other.queue != name.queue) => {
                sockets.push(QueueSocket { queue: name.queue, socket });
            }
            _ => {
                tracing::warn!(name = text, "a socket is not of the previous process and is not used");
                // A holder of a copy would keep the connection alive. The shutdown fails if it is dead
                // already.
                let _ = UnixStream::from(socket).shutdown(Shutdown::Both);
            }
        }
    }
    sockets
}

/// Returns the descriptors that were passed to this process, and their names.
fn passed() -> io::Result<Vec<(OwnedFd, String)>> {
    let mut numbers: Vec<(RawFd, String)> = sd_notify::listen_fds_with_names()?.collect();
    numbers.extend(env::var(PASSED).ok().map(|list| listed(&list)).transpose()?.unwrap_or_default());
    let own = |(number, name)| {
        // SAFETY: the parent has opened the descriptor for this process, no other code here knows its number,
        // and this is called once.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok((fd, name))
    };
    numbers.into_iter().map(own).collect()
}

/// Parses the list in [`PASSED`].
fn listed(list: &str) -> io::Result<Vec<(RawFd, String)>> {
    let bad = || io::Error::new(io::ErrorKind::InvalidInput, format!("{PASSED}={list}: <number>:<name>,…"));
    let one = |entry: &str| {
        let (number, name) = entry.split_once(':').ok_or_else(bad)?;
        let number = number.parse().ok().filter(|number| *number > LAST_STANDARD).ok_or_else(bad)?;
        Ok((number, name.to_owned()))
    };
    list.split(',').filter(|entry| !entry.is_empty()).map(one).collect()
}

/// Gives `sockets` to the service manager for the next process. If that fails they are closed with this
/// process, and the next one makes new ones, as after a crash.
pub fn hand_over(generation: Generation, sockets: Vec<QueueSocket>) {
    if sockets.is_empty() || env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let count = sockets.len();
    let kept = sockets.iter().try_for_each(|QueueSocket { queue, socket }| {
        let name = SocketName { generation, queue: *queue }.to_string();
        sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(&name)], &[socket.as_fd()])
    });
    // The service manager may not know the process of a late message any more.
    match kept.and_then(|()| barrier()) {
        Ok(()) => tracing::info!(%generation, count, "the sockets are kept for the next process"),
        Err(error) => tracing::warn!(%generation, %error, "the sockets may not be kept for the next process"),
    }
}

/// Waits until the service manager has taken all messages so far. Taking a message closes its descriptors
/// (sd_notify_barrier(3)).
fn barrier() -> io::Result<()> {
    let (ours, theirs) = pipe2(OFlag::O_CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
    drop(theirs);
    let limit = PollTimeout::try_from(KEEP_LIMIT).unwrap_or(PollTimeout::MAX);
    let mut closed = [PollFd::new(ours.as_fd(), PollFlags::empty())];
    match poll(&mut closed, limit)? {
        0 => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {KEEP_LIMIT:?}"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use proptest::prelude::*;

    use super::*;

    fn socket() -> (OwnedFd, UnixStream) {
        let (ours, kernels) = UnixStream::pair().unwrap();
        (ours.into(), kernels)
    }

    #[test]
    fn takes_the_sockets_of_the_process_before_and_no_other() {
        let predecessor = Generation::new(3, 7).of_nonce(10);
        let names =
            ["nbd-3-7-0-a", "nbd-3-7-1-b", "nbd-2-7-2-a", "nbd-3-7-2-a", "nbd-3-7-2-a", "nbd-3-7-3", "other"];
        let (passed, mut kernels): (Vec<_>, Vec<_>) = names
            .iter()
            .map(|name| {
                let (ours, kernels) = socket();
                ((ours, (*name).to_owned()), kernels)
            })
            .unzip();
        // The copies stand for those in the store.
        let _copies: Vec<OwnedFd> = passed.iter().map(|(fd, _)| fd.try_clone().unwrap()).collect();
        let chosen = choose(passed, Some(predecessor));
        assert_eq!(chosen.iter().map(|socket| socket.queue).collect::<Vec<_>>(), [0, 2]);
        let mut is_dead = |kernel: &mut UnixStream| {
            kernel.set_nonblocking(true).unwrap();
            matches!(kernel.read(&mut [0]), Ok(0))
        };
        let dead: Vec<bool> = kernels.iter_mut().map(&mut is_dead).collect();
        assert_eq!(dead, [false, true, true, false, true, true, true], "only the first of a name is used");
    }

    #[test]
    fn the_first_process_of_an_attachment_takes_nothing() {
        let (ours, mut kernels) = socket();
        assert!(choose(vec![(ours, "nbd-3-7-0".into())], None).is_empty());
        assert_eq!(kernels.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn the_list_of_passed_sockets_is_read_or_refused() {
        let two = listed("12:nbd-1-0-0,5:nbd-1-0-1").unwrap();
        assert_eq!(two, [(12, "nbd-1-0-0".to_owned()), (5, "nbd-1-0-1".to_owned())]);
        assert!(listed("").unwrap().is_empty());
        for bad in ["12", "x:a", "2:a", "-1:a"] {
            assert!(listed(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn socket_names_read_back(attach: u64, restart: u32, nonce: u64, queue in 0..MAX_QUEUES) {
            let generation = Generation::new(attach, restart).of_nonce(nonce);
            let name = SocketName { generation, queue };
            prop_assert_eq!(name.to_string().parse(), Ok(name));
        }

        #[test]
        fn other_texts_are_not_names_of_sockets(text in "(nbd-)?[-+0-9a-fA-F]{0,12}") {
            if let Ok(name) = text.parse::<SocketName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
