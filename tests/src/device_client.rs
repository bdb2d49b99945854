use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::nbd_client::{NbdCompletion, NbdRequest};

/// The alignment of buffers for O_DIRECT.
const ALIGN_BYTES: usize = 4096;
const EIO: u32 = 5;

nix::ioctl_write_ptr_bad!(
    /// BLKDISCARD: offset and length in bytes.
    discard,
    nix::request_code_none!(0x12, 119),
    [u64; 2]
);
nix::ioctl_write_ptr_bad!(
    /// BLKZEROOUT: the same.
    zero_out,
    nix::request_code_none!(0x12, 127),
    [u64; 2]
);

/// A client of a block device: each request in flight has its own waiting thread. The kernel outlives the
/// engine.
#[derive(Debug)]
pub struct DeviceClient {
    requests: Sender<(u64, NbdRequest)>,
    answers: Receiver<(u64, Result<Vec<u8>, u32>)>,
    outstanding: BTreeMap<u64, NbdRequest>,
    next_cookie: u64,
}

impl DeviceClient {
    /// Opens a device for `depth` requests in flight. The threads of the client end with it, once the kernel
    /// has answered the requests.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn open(device: &Path, depth: usize) -> Result<DeviceClient> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_DIRECT).open(device);
        let file = Arc::new(file.with_context(|| format!("opening {}", device.display()))?);
        let (requests, asked) = channel::<(u64, NbdRequest)>();
        let (answered, answers) = channel();
        let asked = Arc::new(Mutex::new(asked));
        for _ in 0..depth {
            let (file, asked, answered) = (Arc::clone(&file), Arc::clone(&asked), answered.clone());
            thread::spawn(move || {
                loop {
                    let next = asked.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((cookie, request)) = next else { return };
                    if answered
                        .send((cookie, execute(&file, &request).map_err(|error| errno_of(&error))))
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
        Ok(DeviceClient { requests, answers, outstanding: BTreeMap::new(), next_cookie: 1 })
    }

    /// Requests without an answer, by their cookies.
    #[must_use]
    pub fn outstanding(&self) -> &BTreeMap<u64, NbdRequest> {
        &self.outstanding
    }

    /// Gives a request to the device.
    pub fn submit(&mut self, request: NbdRequest) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        // The threads end only with this client.
        let _ = self.requests.send((cookie, request.clone()));
        self.outstanding.insert(cookie, request);
        cookie
    }

    /// Waits for the next answer; none if `limit` passes before.
    ///
    /// # Errors
    /// The threads have panicked.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>> {
        match self.answers.recv_timeout(limit) {
            Ok((cookie, outcome)) => {
                let request = self.outstanding.remove(&cookie).context("an answer to nothing")?;
                Ok(Some(NbdCompletion { cookie, request, outcome }))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("the threads of a device's client have ended"),
        }
    }
}

fn errno_of(error: &io::Error) -> u32 {
    error.raw_os_error().and_then(|errno| errno.try_into().ok()).unwrap_or(EIO)
}

fn execute(file: &File, request: &NbdRequest) -> io::Result<Vec<u8>> {
    match request {
        NbdRequest::Read { offset, length } => {
            let (mut buffer, place) = aligned(*length as usize);
            file.read_exact_at(&mut buffer[place.clone()], *offset)?;
            return Ok(buffer[place].to_vec());
        }
        NbdRequest::Write { offset, data, fua } => {
            let (mut buffer, place) = aligned(data.len());
            buffer[place.clone()].copy_from_slice(data);
            file.write_all_at(&buffer[place], *offset)?;
            make_durable(file, *fua)?;
        }
        NbdRequest::Flush => file.sync_data()?,
        NbdRequest::Trim { offset, length } => {
            // SAFETY: the kernel reads two numbers, which live until the call returns.
            unsafe { discard(file.as_raw_fd(), &[*offset, u64::from(*length)]) }?;
        }
        NbdRequest::WriteZeroes { offset, length, fua } => {
            // SAFETY: as above.
            unsafe { zero_out(file.as_raw_fd(), &[*offset, u64::from(*length)]) }?;
            make_durable(file, *fua)?;
        }
    }
    Ok(Vec::new())
}

fn make_durable(file: &File, fua: bool) -> io::Result<()> {
    if fua { file.sync_data() } else { Ok(()) }
}

/// Returns a buffer, and the range of `bytes` in it that begins at a whole page.
fn aligned(bytes: usize) -> (Vec<u8>, Range<usize>) {
    let buffer = vec![0; bytes + ALIGN_BYTES];
    let first = buffer.as_ptr().align_offset(ALIGN_BYTES);
    (buffer, first..first + bytes)
}
