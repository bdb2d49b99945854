//! A call as kubelet's gRPC library for Go sends it, byte by byte: no client in Rust sends such an
//! `:authority`.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::LIMIT;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const STREAM: u32 = 1;
/// Far more than a server says before it answers.
const FRAMES_MAX: usize = 100;
/// The message without any field: not compressed, no bytes.
const EMPTY_MESSAGE: [u8; 5] = [0; 5];

/// Calls `method` of the server at `path` with an empty message, and returns the message of the answer.
pub fn call(path: &Path, method: &str) -> Vec<u8> {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frame(HEADERS, END_HEADERS, STREAM, &headers(&authority(path), method)));
    bytes.extend(frame(DATA, END_STREAM, STREAM, &EMPTY_MESSAGE));
    stream.write_all(&bytes).unwrap();
    for _ in 0..FRAMES_MAX {
        match read_frame(&mut stream) {
            (DATA, payload) => return payload[EMPTY_MESSAGE.len()..].to_vec(),
            (RST_STREAM, code) => panic!("the call is refused with the code {code:?}"),
            _ => {}
        }
    }
    panic!("{FRAMES_MAX} frames and no answer")
}

/// Returns the authority that Go derives from the dialled path (`encodeAuthority` in grpc-go).
fn authority(path: &Path) -> String {
    let escape = |byte: &u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(byte) => {
            char::from(*byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    };
    path.as_os_str().as_bytes().iter().map(escape).collect()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn read_frame(stream: &mut UnixStream) -> (u8, Vec<u8>) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut payload).unwrap();
    (head[3], payload)
}

/// Encodes headers by RFC 7541, without its tables if that is shorter.
fn headers(authority: &str, method: &str) -> Vec<u8> {
    let (post, http, path, authority_name, content_type) = (0x83, 0x86, 0x04, 0x01, [0x0f, 0x10]);
    let mut block = vec![post, http, path];
    block.extend(text(method));
    block.push(authority_name);
    block.extend(text(authority));
    block.extend(content_type);
    block.extend(text("application/grpc"));
    block.push(0);
    block.extend(text("te"));
    block.extend(text("trailers"));
    block
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    match u8::try_from(text.len()) {
        Ok(length) if length < 0x7f => bytes.push(length),
        _ => {
            bytes.push(0x7f);
            let mut left = text.len() - 0x7f;
            while left >= 0x80 {
                bytes.push(u8::try_from(left % 0x80).unwrap() | 0x80);
                left /= 0x80;
            }
            bytes.push(u8::try_from(left).unwrap());
        }
    }
    bytes.extend(text.as_bytes());
    bytes
}
