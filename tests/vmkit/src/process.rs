//! Child processes that cannot outlive this one.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use anyhow::{Context, Result, anyhow};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};

type SpawnRequest = (Command, Sender<io::Result<Child>>);

/// Starts a child that is killed when this process ends, however it ends, and that
/// inherits the descriptor `inherited`.
///
/// The kernel sends the signal when the *thread* that forked the child ends, and a
/// test harness ends one thread per test. So all children are forked by one thread
/// that lives as long as the process.
pub fn spawn_tied(mut command: Command, inherited: OwnedFd) -> Result<Child> {
    let parent = Pid::from_raw(i32::try_from(process::id()).context("process id")?);
    let raw = inherited.as_raw_fd();
    let prepare = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have ended before the line above: then the signal would never come.
        if getppid() != parent {
            return Err(io::Error::other("the parent process is gone"));
        }
        // SAFETY: `inherited` is open in the parent until the child was started.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(raw) };
        fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes three system calls and
    // allocates only to report an error that ends the child.
    unsafe { command.pre_exec(prepare) };

    let (reply_to, reply) = mpsc::channel();
    spawner().send((command, reply_to)).map_err(|_| anyhow!("the thread that starts processes is gone"))?;
    let child = reply.recv().context("the thread that starts processes is gone")??;
    drop(inherited);
    Ok(child)
}

fn spawner() -> Sender<SpawnRequest> {
    static SPAWNER: OnceLock<Sender<SpawnRequest>> = OnceLock::new();
    SPAWNER
        .get_or_init(|| {
            let (sender, requests) = mpsc::channel::<SpawnRequest>();
            thread::spawn(move || {
                for (mut command, reply_to) in requests {
                    // The caller is gone only if it panicked; its child must end too.
                    if let Err(unsent) = reply_to.send(command.spawn())
                        && let Ok(mut child) = unsent.0
                    {
                        let _ = child.kill();
                        let _ = child.wait();
                    }
                }
            });
            sender
        })
        .clone()
}

/// Between two checks whether a child has ended: std has no wait with a time limit.
const END_CHECK_PAUSE: Duration = Duration::from_millis(5);

/// Waits for a child to end, at most `limit`.
pub fn wait_at_most(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a child process")? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(END_CHECK_PAUSE);
    }
}
