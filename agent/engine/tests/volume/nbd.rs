//! A client of NBD on a Unix socket, just large enough to write and read a block.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::LIMIT;

const CLIENT_FIXED_NEWSTYLE: u32 = 1;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
const FLAG_FUA: u16 = 1;

/// The head of a request.
fn head(flags: u16, command: u16, offset: u64, length: u32) -> Vec<u8> {
    let mut head = 0x2560_9513_u32.to_be_bytes().to_vec();
    head.extend(flags.to_be_bytes());
    head.extend(command.to_be_bytes());
    head.extend(7u64.to_be_bytes());
    head.extend(offset.to_be_bytes());
    head.extend(length.to_be_bytes());
    head
}

pub struct Nbd {
    stream: UnixStream,
    pub size_bytes: u64,
}

impl Nbd {
    pub fn connect(socket: &Path, export: &str) -> Nbd {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut nbd = Nbd { stream, size_bytes: 0 };
        assert_eq!(&nbd.take::<16>(), b"NBDMAGICIHAVEOPT");
        nbd.take::<2>();
        let mut hello = CLIENT_FIXED_NEWSTYLE.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(OPT_GO.to_be_bytes());
        hello.extend(u32::try_from(export.len() + 6).unwrap().to_be_bytes());
        hello.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend(0u16.to_be_bytes());
        nbd.stream.write_all(&hello).unwrap();
        loop {
            let head = nbd.take::<20>();
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
            nbd.stream.read_exact(&mut data).unwrap();
            if kind == REP_ACK {
                return nbd;
            }
            assert!(kind < 1 << 31, "the export is refused: {}", String::from_utf8_lossy(&data));
            if data[..2] == [0, 0] {
                nbd.size_bytes = u64::from_be_bytes(data[2..10].try_into().unwrap());
            }
        }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn reply(&mut self) {
        let reply = self.take::<16>();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes(), "a simple reply");
        assert_eq!(reply[4..8], [0; 4], "the request fails");
    }

    /// Writes `data`, durably; false where the server has gone.
    pub fn try_write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut frame = head(FLAG_FUA, CMD_WRITE, offset, u32::try_from(data.len()).unwrap());
        frame.extend(data);
        let mut reply = [0; 16];
        let done = self.stream.write_all(&frame).and_then(|()| self.stream.read_exact(&mut reply));
        done.is_ok() && reply[4..8] == [0; 4]
    }

    pub fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.stream.write_all(&head(0, CMD_READ, offset, u32::try_from(length).unwrap())).unwrap();
        self.reply();
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data).unwrap();
        data
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // The server may have gone.
        let _ = self.stream.write_all(&head(0, CMD_DISC, 0, 0));
    }
}
