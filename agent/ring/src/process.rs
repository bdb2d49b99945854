use std::io;

/// The measures of [`protect_thread`] that failed. Each is a warning, not an error: the volume works without
/// it until the host runs out of memory.
#[derive(Debug, Default)]
pub struct ProtectionReport {
    /// PR_SET_IO_FLUSHER failed: needs CAP_SYS_RESOURCE and Linux 5.6.
    pub io_flusher: Option<io::Error>,
    /// mlockall failed: needs CAP_IPC_LOCK or a larger RLIMIT_MEMLOCK.
    pub memory_lock: Option<io::Error>,
}

const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Has allocations of the calling thread, and of all that it starts, never wait for write-back through this
/// process: see PR_SET_IO_FLUSHER in prctl(2). Returns why that is not possible: it needs CAP_SYS_RESOURCE
/// and Linux 5.6.
#[must_use]
pub fn protect_allocations() -> Option<io::Error> {
    // SAFETY: prctl with these arguments reads and writes no memory of ours.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    (result != 0).then(io::Error::last_os_error)
}

/// Prepares the calling thread to serve a block device under memory pressure. Calls [`protect_allocations`],
/// and keeps the touched memory of the process from being swapped out (mlockall with MCL_ONFAULT: untouched
/// buffers cost nothing).
#[must_use]
pub fn protect_thread() -> ProtectionReport {
    // SAFETY: mlockall with these arguments reads and writes no memory of ours.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    let memory_lock = (locked != 0).then(io::Error::last_os_error);
    ProtectionReport { io_flusher: protect_allocations(), memory_lock }
}
