//! QEMU's machine protocol: one command at a time, events kept until asked for.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Longest wait for the answer to a command. QEMU answers within milliseconds,
/// except on a machine where everything waits for its turn.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The maximum number of kept events, so that unread ones (of a guest that resets in a loop) do not pile up.
const EVENTS_KEPT: usize = 256;

#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    line: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Reads the greeting of QEMU on the other end of the socket.
    pub fn connect(stream: UnixStream) -> Result<Self> {
        let mut qmp = Self { reader: BufReader::new(stream), line: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.read_message(Instant::now() + ANSWER_LIMIT)?;
        if greeting.get("QMP").is_none() {
            bail!("the greeting of QEMU is {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        self.reader
            .get_mut()
            .write_all(request.as_bytes())
            .with_context(|| format!("cannot send {command} to QEMU"))?;
        let deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            let mut message =
                self.read_message(deadline).with_context(|| format!("no answer from QEMU to {command}"))?;
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                bail!("QEMU refused {command}: {}", error["desc"]);
            }
            self.keep_event(message);
        }
    }

    /// Waits until one of the named events has come, and returns it.
    pub fn wait_event(&mut self, names: &[&str], deadline: Instant) -> Result<Value> {
        let is_wanted = |event: &Value| event["event"].as_str().is_some_and(|name| names.contains(&name));
        loop {
            if let Some(position) = self.events.iter().position(is_wanted)
                && let Some(event) = self.events.remove(position)
            {
                return Ok(event);
            }
            let message = self
                .read_message(deadline)
                .with_context(|| format!("waiting for QEMU's event {}", names.join(" or ")))?;
            self.keep_event(message);
        }
    }

    /// Forgets the events that have come so far.
    pub fn clear_events(&mut self) {
        self.events.clear();
    }

    fn keep_event(&mut self, message: Value) {
        if self.events.len() == EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(message);
    }

    fn read_message(&mut self, deadline: Instant) -> Result<Value> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("time limit reached");
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            // The bytes that were read before a time-out stay in `line`.
            match self.reader.read_until(b'\n', &mut self.line) {
                Ok(0) => bail!("QEMU has ended"),
                Ok(_) if self.line.ends_with(b"\n") => {
                    let message =
                        serde_json::from_slice(&self.line).context("QEMU sent something that is not JSON");
                    self.line.clear();
                    return message;
                }
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error).context("cannot read from QEMU"),
            }
        }
    }
}
