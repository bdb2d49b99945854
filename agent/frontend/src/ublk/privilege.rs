//! A queue's thread without the capability CAP_SYS_ADMIN (capset(2), linux/capability.h).
//!
//! A thread that serves a device may lack this capability when it fetches its tags. Then the driver keeps the
//! kernel from reading a partition table (`ublk_mark_io_ready` and `ublk_ctrl_start_dev` in
//! drivers/block/ublk_drv.c; 6.1, 6.12 and later). The table may be that of a virtual machine, and does not
//! concern the host. `partx -a` still makes partitions.

use std::io;

const VERSION_3: u32 = 0x2008_0522;
const CAP_SYS_ADMIN: u32 = 21;

#[repr(C)]
struct Header {
    version: u32,
    thread: i32,
}

/// The sets of the first 32 capabilities; another one of these follows for the rest.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Drops the capability for the calling thread, and for threads that it starts from now on. They do not need
/// it: commands to the driver come from the main thread.
pub(super) fn drop_sys_admin() -> io::Result<()> {
    let mut header = Header { version: VERSION_3, thread: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: the kernel reads the header and writes the sets, of which version 3 has two.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) })?;
    sets[0].effective &= !(1 << CAP_SYS_ADMIN);
    // SAFETY: the kernel reads both.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) })
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    /// Returns the effective capabilities of the calling thread.
    fn effective() -> u64 {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn only_the_calling_thread_gives_it_up_and_nothing_else() {
        let before = effective();
        let after = thread::spawn(|| drop_sys_admin().map(|()| effective())).join().unwrap().unwrap();
        assert_eq!(after, before & !(1 << CAP_SYS_ADMIN));
        assert_eq!(effective(), before);
    }
}
