use std::io;

/// What [`protect_thread`] could not do; each is a warning, not an error: the volume works without it
/// until the host runs out of memory.
#[derive(Debug, Default)]
pub struct ProtectionReport {
    /// PR_SET_IO_FLUSHER failed: needs CAP_SYS_RESOURCE and Linux 5.6.
    pub io_flusher: Option<io::Error>,
    /// mlockall failed: needs CAP_IPC_LOCK or a larger RLIMIT_MEMLOCK.
    pub memory_lock: Option<io::Error>,
}

const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Makes the calling thread fit to serve a block device under memory pressure: its allocations never wait
/// for write-back through ourselves (PR_SET_IO_FLUSHER, see prctl(2)), and what the process has touched
/// stays in memory (mlockall with MCL_ONFAULT: untouched buffers cost nothing).
#[must_use]
pub fn protect_thread() -> ProtectionReport {
    let check = |result: libc::c_int| (result != 0).then(io::Error::last_os_error);
    // SAFETY: prctl and mlockall with these arguments read and write no memory of ours.
    unsafe {
        ProtectionReport {
            io_flusher: check(libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0)),
            memory_lock: check(libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT)),
        }
    }
}
