//! An interactive root shell in a VM, on the terminal of this process.

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use serde_json::json;

use crate::agent::{Stream, write_frame};
use crate::vm::Vm;

/// The interval of reading the size of the window.
const SIZE_INTERVAL_MS: u16 = 500;
/// The maximum duration of a session at a test VM.
const SESSION_LIMIT: Duration = Duration::from_secs(24 * 3600);
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

nix::ioctl_read_bad!(get_window_size, libc::TIOCGWINSZ, libc::winsize);

/// Runs a shell until the user leaves it; returns its exit status. Without a terminal
/// the shell runs the commands on standard input.
pub fn interactive_shell(vm: &Vm) -> Result<i32> {
    let tty = io::stdin().is_terminal();
    let argv = if tty { vec!["/bin/bash", "-l"] } else { vec!["/bin/bash"] };
    let term = std::env::var("TERM").unwrap_or_else(|_| "dumb".to_owned());
    let request = json!({ "op": "run", "argv": argv, "tty": tty, "env": { "TERM": term } });
    let session = vm.agent().start(&request, CONNECT_LIMIT, Some(Box::new(print)))?;
    let to_guest = session.sender();
    let raw_mode = tty.then(RawMode::enter).transpose()?;
    // Ends with the process: a read from the terminal cannot be called off.
    thread::spawn(move || {
        // The main thread sees the connection end as well.
        let _ = forward_input(tty, &mut &*to_guest);
    });
    let output = session.wait(SESSION_LIMIT);
    drop(raw_mode);
    Ok(output?.status)
}

/// Writes a command's output to this process's own.
pub fn print(stream: Stream, bytes: &[u8]) {
    // The reader may be gone; the command in the guest continues all the same.
    let _ = match stream {
        Stream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        Stream::Stderr => io::stderr().lock().write_all(bytes),
    };
}

fn forward_input(tty: bool, to_guest: &mut impl Write) -> Result<()> {
    let stdin = io::stdin();
    let mut buffer = [0; 16 * 1024];
    let mut size = None;
    loop {
        if tty {
            let now = window_size();
            if now != size
                && let Some((rows, columns)) = now
            {
                size = now;
                write_frame(to_guest, b'w', format!("{rows} {columns}").as_bytes())?;
            }
            let mut polled = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            let ready = poll(&mut polled, PollTimeout::from(SIZE_INTERVAL_MS));
            if matches!(ready, Ok(0) | Err(nix::errno::Errno::EINTR)) {
                continue;
            }
        }
        let length = stdin.lock().read(&mut buffer).context("cannot read standard input")?;
        write_frame(to_guest, b'i', &buffer[..length])?;
        if length == 0 {
            return Ok(());
        }
    }
}

fn window_size() -> Option<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel writes one `winsize` through the pointer, which is valid.
    unsafe { get_window_size(libc::STDIN_FILENO, &raw mut size) }.ok()?;
    Some((size.ws_row, size.ws_col))
}

/// A terminal that passes every key on unchanged, until this value is dropped.
struct RawMode(Termios);

impl RawMode {
    fn enter() -> Result<Self> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin).context("cannot read the terminal's mode")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&stdin, SetArg::TCSANOW, &raw).context("cannot set the terminal's mode")?;
        Ok(Self(before))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // No other way is left.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.0);
    }
}
