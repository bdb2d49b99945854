//! The kernel's NBD driver over generic netlink: connect, reconnect, resize, disconnect (linux/nbd-netlink.h,
//! linux/netlink.h, linux/genetlink.h).
//!
//! A call runs inside send(2), in the kernel, and may wait for locks and for requests in flight. Never call
//! from a thread that serves the device.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt::ReceiveTimeout,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// The kernel answers inside send(2), so an answer that has not come after this many seconds never comes.
const ANSWER_LIMIT_S: i64 = 5;
/// Longer than any answer: two numbers and an echo of the request's header.
const ANSWER_BYTES: usize = 4096;

const FAMILY_NAME: &str = "nbd";
const NBD_VERSION: u8 = 1;
const CMD_CONNECT: u8 = 1;
const CMD_DISCONNECT: u8 = 2;
const CMD_RECONFIGURE: u8 = 3;

const ATTR_INDEX: u16 = 1;
const ATTR_SIZE_BYTES: u16 = 2;
const ATTR_BLOCK_SIZE_BYTES: u16 = 3;
const ATTR_TIMEOUT: u16 = 4;
const ATTR_SERVER_FLAGS: u16 = 5;
const ATTR_SOCKETS: u16 = 7;
const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
const ATTR_BACKEND_IDENTIFIER: u16 = 10;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// The driver answers EBADF to it.
const NO_DESCRIPTOR: RawFd = -1;

const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLA_F_NESTED: u16 = 1 << 15;
const NLA_TYPE_MASK: u16 = !(3 << 14);
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const MESSAGE_HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;

/// The parameters of a new device.
#[derive(Debug)]
pub(super) struct NewDevice<'a> {
    pub(super) size_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) server_flags: u64,
    pub(super) timeout_s: u64,
    pub(super) dead_connection_timeout_s: u64,
    pub(super) backend: &'a str,
    pub(super) sockets: &'a [OwnedFd],
}

/// A conversation with the NBD driver.
#[derive(Debug)]
pub(super) struct NbdDriver {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl NbdDriver {
    /// Finds the driver.
    ///
    /// # Errors
    /// ENOENT if the module `nbd` is not loaded.
    pub(super) fn open() -> io::Result<NbdDriver> {
        NbdDriver::of_family(FAMILY_NAME)
    }

    fn of_family(name: &str) -> io::Result<NbdDriver> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkGeneric,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(ANSWER_LIMIT_S))?;
        let mut driver = NbdDriver { socket, family: GENL_ID_CTRL, sequence: 0 };
        let mut attributes = Attributes::default();
        attributes.text(CTRL_ATTR_FAMILY_NAME, name);
        let answer = driver.call(CTRL_CMD_GETFAMILY, 1, &attributes)?;
        let id = attribute(&answer, CTRL_ATTR_FAMILY_ID).and_then(|value| value.first_chunk().copied());
        driver.family = u16::from_ne_bytes(id.ok_or_else(|| unexpected("no number of the family"))?);
        Ok(driver)
    }

    /// Makes a device on a free number, and returns the number.
    pub(super) fn connect(&mut self, device: &NewDevice<'_>) -> io::Result<u32> {
        let mut attributes = Attributes::default();
        attributes.u64(ATTR_SIZE_BYTES, device.size_bytes);
        attributes.u64(ATTR_BLOCK_SIZE_BYTES, device.block_bytes);
        attributes.u64(ATTR_SERVER_FLAGS, device.server_flags);
        attributes.u64(ATTR_TIMEOUT, device.timeout_s);
        attributes.u64(ATTR_DEAD_CONN_TIMEOUT, device.dead_connection_timeout_s);
        attributes.text(ATTR_BACKEND_IDENTIFIER, device.backend);
        attributes.sockets(device.sockets.iter().map(AsRawFd::as_raw_fd));
        let answer = self.call(CMD_CONNECT, NBD_VERSION, &attributes)?;
        let index = attribute(&answer, ATTR_INDEX).and_then(|value| value.first_chunk().copied());
        Ok(u32::from_ne_bytes(index.ok_or_else(|| unexpected("no number of the new device"))?))
    }

    /// Offers `socket` to device `index` in place of a dead one. Returns whether the driver has taken it.
    ///
    /// The driver answers the same if it has taken a socket and if none was dead. So a descriptor that is not
    /// a socket follows. The driver searches the list until it finds no dead socket. It reaches that
    /// descriptor, and refuses it, only if it has taken the one before (nbd_genl_reconfigure in
    /// drivers/block/nbd.c).
    pub(super) fn reconnect(
        &mut self,
        index: u32,
        backend: &str,
        socket: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        let mut attributes = Attributes::for_device(index, backend);
        attributes.sockets([socket.as_raw_fd(), NO_DESCRIPTOR].into_iter());
        match self.call(CMD_RECONFIGURE, NBD_VERSION, &attributes) {
            Ok(_) => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Changes the size of device `index`. On newer kernels the call waits for requests in flight: see
    /// `kernel_release::nbd_resize_deny_reason`.
    pub(super) fn resize(&mut self, index: u32, backend: &str, size_bytes: u64) -> io::Result<()> {
        let mut attributes = Attributes::for_device(index, backend);
        attributes.u64(ATTR_SIZE_BYTES, size_bytes);
        self.call(CMD_RECONFIGURE, NBD_VERSION, &attributes).map(drop)
    }

    /// Ends device `index`: requests in flight and later ones fail.
    pub(super) fn disconnect(&mut self, index: u32) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.u32(ATTR_INDEX, index);
        self.call(CMD_DISCONNECT, NBD_VERSION, &attributes).map(drop)
    }

    /// Sends a command and waits for its acknowledgement; returns the attributes of the answer before that.
    fn call(&mut self, command: u8, version: u8, attributes: &Attributes) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let message = message(self.family, self.sequence, command, version, &attributes.0);
        let sent = send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        if sent != message.len() {
            return Err(unexpected("a message that was sent in part"));
        }
        let mut buffer = vec![0; ANSWER_BYTES];
        let mut answer = Vec::new();
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for received in NetlinkMessages(&buffer[..length]) {
                if received.sequence != self.sequence {
                    continue; // the late end of an earlier call
                }
                if received.kind != NLMSG_ERROR {
                    answer = received.body.get(GENERIC_HEADER_BYTES..).unwrap_or_default().to_vec();
                    continue;
                }
                let code =
                    received.body.first_chunk().ok_or_else(|| unexpected("an error without a number"))?;
                return match i32::from_ne_bytes(*code) {
                    0 => Ok(answer),
                    code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                };
            }
        }
    }
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel answered with {what}"))
}

/// Attributes as bytes, each padded to four.
#[derive(Debug, Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn for_device(index: u32, backend: &str) -> Attributes {
        let mut attributes = Attributes::default();
        attributes.u32(ATTR_INDEX, index);
        attributes.text(ATTR_BACKEND_IDENTIFIER, backend);
        attributes
    }

    fn bytes(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len());
        debug_assert!(length.is_ok(), "an attribute of {} bytes", value.len());
        self.0.extend(length.unwrap_or(u16::MAX).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn u32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    fn u64(&mut self, kind: u16, value: u64) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes);
    }

    fn nested(&mut self, kind: u16, inner: &Attributes) {
        self.bytes(kind | NLA_F_NESTED, &inner.0);
    }

    fn sockets(&mut self, sockets: impl Iterator<Item = RawFd>) {
        let mut items = Attributes::default();
        for socket in sockets {
            let mut item = Attributes::default();
            item.bytes(SOCK_FD, &socket.to_ne_bytes());
            items.nested(SOCK_ITEM, &item);
        }
        self.nested(ATTR_SOCKETS, &items);
    }
}

/// Returns a generic netlink request that wants an acknowledgement.
fn message(family: u16, sequence: u32, command: u8, version: u8, attributes: &[u8]) -> Vec<u8> {
    let length = MESSAGE_HEADER_BYTES + GENERIC_HEADER_BYTES + attributes.len();
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend([0; 4]); // the kernel fills in the port of the sender
    message.extend([command, version, 0, 0]);
    message.extend(attributes);
    message
}

struct NetlinkMessage<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages in a buffer, up to the first incomplete one.
struct NetlinkMessages<'a>(&'a [u8]);

impl<'a> Iterator for NetlinkMessages<'a> {
    type Item = NetlinkMessage<'a>;

    fn next(&mut self) -> Option<NetlinkMessage<'a>> {
        let header: &[u8; MESSAGE_HEADER_BYTES] = self.0.first_chunk()?;
        let length = u32::from_ne_bytes(*header.first_chunk()?) as usize;
        let body = self.0.get(MESSAGE_HEADER_BYTES..length)?;
        let kind = u16::from_ne_bytes(*header[4..].first_chunk()?);
        let sequence = u32::from_ne_bytes(*header[8..].first_chunk()?);
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(NetlinkMessage { kind, sequence, body })
    }
}

/// Returns the value of the first attribute `kind` in `bytes`.
fn attribute(mut bytes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let header: &[u8; ATTRIBUTE_HEADER_BYTES] = bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes(*header.first_chunk()?));
        let value = bytes.get(ATTRIBUTE_HEADER_BYTES..length)?;
        if u16::from_ne_bytes(*header[2..].first_chunk()?) & NLA_TYPE_MASK == kind {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[cfg(target_endian = "little")]
    #[test]
    fn a_request_by_its_bytes() {
        let mut attributes = Attributes::for_device(3, "ab");
        attributes.sockets([7, 8].into_iter());
        let expected: &[&[u8]] = &[
            &[68, 0, 0, 0, 0x21, 0, 5, 0, 9, 0, 0, 0, 0, 0, 0, 0],
            &[3, 1, 0, 0],
            &[8, 0, 1, 0, 3, 0, 0, 0],
            &[7, 0, 10, 0, b'a', b'b', 0, 0],
            &[28, 0, 7, 0x80],
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 7, 0, 0, 0],
            &[12, 0, 1, 0x80, 8, 0, 1, 0, 8, 0, 0, 0],
        ];
        let expected = expected.concat();
        let message = message(0x21, 9, CMD_RECONFIGURE, NBD_VERSION, &attributes.0);
        assert_eq!(usize::from(message[0]), message.len());
        assert_eq!(message[1..], expected[1..]);
    }

    #[test]
    fn attributes_are_found_again() {
        let mut attributes = Attributes::default();
        attributes.text(2, "oddly");
        attributes.u64(3, 5);
        attributes.nested(4, &Attributes::default());
        attributes.u32(5, 77);
        assert_eq!(attribute(&attributes.0, 2), Some(&b"oddly\0"[..]));
        assert_eq!(attribute(&attributes.0, 4), Some(&[][..]));
        assert_eq!(attribute(&attributes.0, 5), Some(&77u32.to_ne_bytes()[..]));
        assert_eq!(attribute(&attributes.0, 6), None);
    }

    /// Asks the controller of generic netlink, which every kernel has, for a family that does not exist.
    #[test]
    fn the_kernel_answers_netlink_requests() {
        assert_eq!(NbdDriver::of_family("nlctrl").unwrap().family, GENL_ID_CTRL);
        assert_eq!(NbdDriver::of_family("shorthorn").unwrap_err().raw_os_error(), Some(libc::ENOENT));
        match NbdDriver::open() {
            Ok(driver) => assert!(driver.family > GENL_ID_CTRL),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}"),
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..100), kind: u16
        ) {
            let _ = attribute(&bytes, kind);
            // Each message takes at least its header, so this ends.
            prop_assert!(NetlinkMessages(&bytes).count() <= bytes.len() / MESSAGE_HEADER_BYTES + 1);
        }
    }
}
