//! The interface of the ublk driver: numbers and structures of `linux/ublk_cmd.h`.
//!
//! Sizes and offsets are checked against that header by the tests below. All integers are in the byte order
//! of the machine.

use std::mem::size_of;

/// Asks for the features of the driver (Linux 6.5).
pub(crate) const CMD_GET_FEATURES: u32 = control(READ, 0x13);
/// Asks for the [`DeviceInfo`] of a device.
pub(crate) const CMD_GET_DEV_INFO: u32 = control(READ, 0x02);
/// Makes a device: the character device only.
pub(crate) const CMD_ADD_DEV: u32 = control(READ | WRITE, 0x04);
/// Deletes a device and waits until its character device is closed.
pub(crate) const CMD_DEL_DEV: u32 = control(READ | WRITE, 0x05);
/// Deletes a device without that wait (Linux 6.7).
pub(crate) const CMD_DEL_DEV_ASYNC: u32 = control(READ, 0x14);
/// Makes the block device, once every tag of every queue was fetched.
pub(crate) const CMD_START_DEV: u32 = control(READ | WRITE, 0x06);
/// Takes the block device away.
pub(crate) const CMD_STOP_DEV: u32 = control(READ | WRITE, 0x07);
/// Sets the [`Params`] of a device that was never started.
pub(crate) const CMD_SET_PARAMS: u32 = control(READ | WRITE, 0x08);
/// Makes a quiesced device ready for a new server.
pub(crate) const CMD_START_USER_RECOVERY: u32 = control(READ | WRITE, 0x10);
/// Lets a quiesced device continue, once every tag of every queue was fetched.
pub(crate) const CMD_END_USER_RECOVERY: u32 = control(READ | WRITE, 0x11);
/// Changes the size of a started device (Linux 6.16).
pub(crate) const CMD_UPDATE_SIZE: u32 = control(READ | WRITE, 0x15);

/// Takes the next request of a tag; the first command of every tag.
pub(crate) const IO_FETCH_REQ: u32 = queue(0x20);
/// Answers the request of a tag and takes its next one.
pub(crate) const IO_COMMIT_AND_FETCH_REQ: u32 = queue(0x21);

/// The result of a fetch with a request.
pub(crate) const IO_RES_OK: i32 = 0;
/// Result of a fetch: there will be no more.
pub(crate) const IO_RES_ABORT: i32 = -libc::ENODEV;

/// Requests wait while the device has no server, and it can get a new one.
pub(crate) const F_USER_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had not answered are sent again.
pub(crate) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// The commands above instead of the bare numbers of Linux 6.0 to 6.3.
pub(crate) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// The driver has [`CMD_UPDATE_SIZE`].
pub(crate) const F_UPDATE_SIZE: u64 = 1 << 10;

/// [`DeviceInfo::state`]: no block device.
pub(crate) const STATE_DEAD: u16 = 0;
/// [`DeviceInfo::state`]: served.
pub(crate) const STATE_LIVE: u16 = 1;
/// [`DeviceInfo::state`]: the server is gone and requests wait.
pub(crate) const STATE_QUIESCED: u16 = 2;

/// The bits of [`IoDescriptor::op_flags`] that hold the operation.
pub(crate) const IO_OP_MASK: u32 = 0xff;
pub(crate) const IO_OP_READ: u32 = 0;
pub(crate) const IO_OP_WRITE: u32 = 1;
pub(crate) const IO_OP_FLUSH: u32 = 2;
pub(crate) const IO_OP_DISCARD: u32 = 3;
pub(crate) const IO_OP_WRITE_ZEROES: u32 = 5;
/// Durable before it is answered.
pub(crate) const IO_F_FUA: u32 = 1 << 13;
/// Zeroes that are written have to take space.
pub(crate) const IO_F_NOUNMAP: u32 = 1 << 15;

/// [`ParamBasic::attributes`]: writes need a FLUSH to become durable.
pub(crate) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// [`ParamBasic::attributes`]: single writes can be made durable.
pub(crate) const ATTR_FUA: u32 = 1 << 3;
/// [`Params::types`]: [`Params::basic`] is set.
pub(crate) const PARAM_TYPE_BASIC: u32 = 1 << 0;
/// [`Params::types`]: [`Params::discard`] is set.
pub(crate) const PARAM_TYPE_DISCARD: u32 = 1 << 1;

/// The depth for which the driver lays out the descriptors of a queue, for any real depth.
const MAX_QUEUE_DEPTH: usize = 4096;
/// The queue of a command that is for no queue.
const NO_QUEUE: u16 = u16::MAX;

// _IOC of asm-generic/ioctl.h.
const WRITE: u32 = 1;
const READ: u32 = 2;
const fn ioc(direction: u32, number: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}
const fn control(direction: u32, number: u32) -> u32 {
    ioc(direction, number, 32)
}
const fn queue(number: u32) -> u32 {
    ioc(READ | WRITE, number, 16)
}

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceInfo {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_bytes: u32,
    /// N of /dev/ublkbN; all ones lets the driver choose.
    pub id: u32,
    pub server_pid: i32,
    pub pad1: u32,
    /// `UBLK_F_*`: the requested features, and in the answer the granted ones.
    pub flags: u64,
    /// Kept by the driver for the server and not looked at.
    pub server_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved: [u64; 2],
}

/// `struct ublk_param_basic`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParamBasic {
    pub attributes: u32,
    pub logical_block_shift: u8,
    pub physical_block_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub device_sectors: u64,
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParamDiscard {
    pub alignment: u32,
    pub granularity: u32,
    pub max_discard_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved: u16,
}

/// The first members of `struct ublk_params`; its `len` says how many there are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Params {
    pub length_bytes: u32,
    pub types: u32,
    pub basic: ParamBasic,
    pub discard: ParamDiscard,
    /// To the end of the alignment.
    pub pad: u32,
}

/// `struct ublksrv_io_desc`: a request, at the place of its tag in the descriptor area of its queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IoDescriptor {
    pub op_flags: u32,
    pub sectors: u32,
    pub start_sector: u64,
    pub address: u64,
}

/// `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlCommand {
    /// The number of the device.
    pub id: u32,
    /// The length of the data at `address`.
    pub length_bytes: u16,
    /// The address of the command's data.
    pub address: u64,
    /// The one argument that is not at `address`.
    pub value: u64,
}

impl ControlCommand {
    /// Returns the bytes in a 128-byte submission.
    pub(crate) fn encode(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&self.id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&NO_QUEUE.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.length_bytes.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_io_cmd`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IoCommand {
    pub queue: u16,
    /// The tag in the queue.
    pub tag: u16,
    /// Answer to the request: bytes, or a negative errno.
    pub result: i32,
    /// The address of the data of the next request.
    pub address: u64,
}

impl IoCommand {
    /// Returns the bytes in a submission.
    pub(crate) fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_ne_bytes());
        bytes
    }
}

/// Returns the length of the descriptor area of a queue with `depth` tags, in whole pages.
pub(crate) fn descriptor_bytes(depth: usize, page_bytes: usize) -> usize {
    (depth * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

/// Returns the offset of the descriptor area of `queue` in the character device, for mmap.
pub(crate) fn descriptor_offset(queue: u16, page_bytes: usize) -> usize {
    usize::from(queue) * descriptor_bytes(MAX_QUEUE_DEPTH, page_bytes)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The numbers as the macros of the header give them, worked out with a C compiler.
    #[test]
    fn commands_are_those_of_the_header() {
        let numbers = [
            (CMD_GET_FEATURES, 0x8020_7513),
            (CMD_GET_DEV_INFO, 0x8020_7502),
            (CMD_ADD_DEV, 0xc020_7504),
            (CMD_DEL_DEV, 0xc020_7505),
            (CMD_DEL_DEV_ASYNC, 0x8020_7514),
            (CMD_START_DEV, 0xc020_7506),
            (CMD_STOP_DEV, 0xc020_7507),
            (CMD_SET_PARAMS, 0xc020_7508),
            (CMD_START_USER_RECOVERY, 0xc020_7510),
            (CMD_END_USER_RECOVERY, 0xc020_7511),
            (CMD_UPDATE_SIZE, 0xc020_7515),
            (IO_FETCH_REQ, 0xc010_7520),
            (IO_COMMIT_AND_FETCH_REQ, 0xc010_7521),
        ];
        for (ours, header) in numbers {
            assert_eq!(ours, header, "{ours:#x} {header:#x}");
        }
    }

    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!(size_of::<DeviceInfo>(), 64);
        assert_eq!(offset_of!(DeviceInfo, max_io_bytes), 8);
        assert_eq!(offset_of!(DeviceInfo, server_pid), 16);
        assert_eq!(offset_of!(DeviceInfo, flags), 24);
        assert_eq!(offset_of!(DeviceInfo, server_flags), 32);
        assert_eq!(offset_of!(DeviceInfo, owner_uid), 40);
        assert_eq!(size_of::<ParamBasic>(), 32);
        assert_eq!(offset_of!(ParamBasic, logical_block_shift), 4);
        assert_eq!(offset_of!(ParamBasic, max_sectors), 8);
        assert_eq!(offset_of!(ParamBasic, device_sectors), 16);
        assert_eq!(size_of::<ParamDiscard>(), 20);
        assert_eq!(offset_of!(ParamDiscard, max_discard_segments), 16);
        assert_eq!(offset_of!(Params, basic), 8);
        assert_eq!(offset_of!(Params, discard), 40);
        assert_eq!(size_of::<IoDescriptor>(), 24);
        assert_eq!(offset_of!(IoDescriptor, start_sector), 8);
        assert_eq!(offset_of!(IoDescriptor, address), 16);
    }

    #[test]
    fn commands_are_encoded_field_by_field() {
        let control =
            ControlCommand { id: 0x0102_0304, length_bytes: 64, address: 0x0506, value: 7 }.encode();
        assert_eq!(control[0..4], 0x0102_0304_u32.to_ne_bytes());
        assert_eq!(control[4..6], [0xff, 0xff]);
        assert_eq!(control[6..8], 64_u16.to_ne_bytes());
        assert_eq!(control[8..16], 0x0506_u64.to_ne_bytes());
        assert_eq!(control[16..24], 7_u64.to_ne_bytes());
        assert_eq!(control[24..], [0; 56]);
        let io = IoCommand { queue: 1, tag: 0x0203, result: -5, address: 0x0405 }.encode();
        assert_eq!(io[0..2], 1_u16.to_ne_bytes());
        assert_eq!(io[2..4], 0x0203_u16.to_ne_bytes());
        assert_eq!(io[4..8], (-5_i32).to_ne_bytes());
        assert_eq!(io[8..16], 0x0405_u64.to_ne_bytes());
    }

    #[test]
    fn descriptor_areas_follow_one_another() {
        assert_eq!(descriptor_bytes(128, 4096), 4096);
        assert_eq!(descriptor_bytes(256, 4096), 8192);
        assert_eq!(descriptor_bytes(256, 65536), 65536);
        assert_eq!(descriptor_offset(0, 4096), 0);
        assert_eq!(descriptor_offset(2, 4096), 2 * 98304);
        assert_eq!(descriptor_offset(1, 65536), 131_072);
    }
}
