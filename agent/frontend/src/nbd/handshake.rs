//! The fixed newstyle negotiation as a state machine without I/O (doc/proto.md, "Handshake").

use shorthorn_types::limits::{BLOCK_BYTES, SECTOR_BYTES};

use super::protocol::{OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, transmission_flags};

/// The longest option that is looked at: a name of 4096 bytes, the longest there may be, and plenty of
/// information requests. Longer ones are skipped and refused.
const MAX_OPTION_BYTES: u32 = 8192;

const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
const FLAG_NO_ZEROES: u16 = 1 << 1;

const OPTION_HEADER_BYTES: usize = 16;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
const REP_ERR_INVALID: u32 = (1 << 31) + 3;
const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

const INFO_EXPORT: u16 = 0;
const INFO_NAME: u16 = 1;
const INFO_BLOCK_SIZE: u16 = 3;

/// The offered export, which is also the default one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) name: &'a str,
    pub(crate) size_bytes: u64,
    /// The longest READ or WRITE for a client that takes structured replies.
    pub(crate) max_request_bytes: u32,
    /// The same for a client that does not.
    pub(crate) max_simple_request_bytes: u32,
}

/// The continuation after a message of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The message is not here whole.
    Wait,
    /// Send the output and handle the next message.
    Go,
    /// Send the output and begin the transmission phase.
    Transmission,
    /// Send the output and end the connection.
    Close,
}

#[derive(Debug, PartialEq, Eq)]
enum HandshakeState {
    ClientFlags,
    Options,
    /// The data of an option that is too long passes by.
    Skipping {
        option: u32,
        rest_bytes: u32,
    },
}

/// The state of one client's negotiation.
#[derive(Debug)]
pub(crate) struct Handshake {
    state: HandshakeState,
    no_zeroes: bool,
    structured: bool,
}

/// Returns the first message of the server.
pub(crate) fn greeting() -> Vec<u8> {
    let mut out = Vec::with_capacity(18);
    out.extend(SERVER_MAGIC.to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    out
}

impl Handshake {
    /// Creates a client that was sent the [`greeting`].
    pub(crate) fn new() -> Handshake {
        Handshake { state: HandshakeState::ClientFlags, no_zeroes: false, structured: false }
    }

    /// Returns true if the client takes structured replies.
    pub(crate) fn structured(&self) -> bool {
        self.structured
    }

    /// Takes one message from the start of `input`, and appends the answer to `output`. Returns the length of
    /// the message and the continuation.
    pub(crate) fn advance(&mut self, offer: &Offer<'_>, input: &[u8], output: &mut Vec<u8>) -> (usize, Next) {
        match self.state {
            HandshakeState::ClientFlags => self.client_flags(input),
            HandshakeState::Options => self.option(offer, input, output),
            HandshakeState::Skipping { option, rest_bytes } => self.skip(option, rest_bytes, input, output),
        }
    }

    fn client_flags(&mut self, input: &[u8]) -> (usize, Next) {
        let Some((flags, _)) = input.split_first_chunk() else { return (0, Next::Wait) };
        let flags = u32::from_be_bytes(*flags);
        // Oldstyle clients end here: the first thing that they send is not a set of flags.
        if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
            return (4, Next::Close);
        }
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = HandshakeState::Options;
        (4, Next::Go)
    }

    fn option(&mut self, offer: &Offer<'_>, input: &[u8], output: &mut Vec<u8>) -> (usize, Next) {
        let Some((header, data)) = input.split_first_chunk::<OPTION_HEADER_BYTES>() else {
            return (0, Next::Wait);
        };
        let mut fields = Fields(header);
        let (Some(magic), Some(option), Some(length_bytes)) = (fields.u64(), fields.u32(), fields.u32())
        else {
            return (0, Next::Close);
        };
        if magic != OPTION_MAGIC {
            return (OPTION_HEADER_BYTES, Next::Close);
        }
        if length_bytes > MAX_OPTION_BYTES {
            if option == OPT_EXPORT_NAME {
                return (OPTION_HEADER_BYTES, Next::Close);
            }
            self.state = HandshakeState::Skipping { option, rest_bytes: length_bytes };
            return (OPTION_HEADER_BYTES, Next::Go);
        }
        let Some(data) = data.get(..length_bytes as usize) else { return (0, Next::Wait) };
        (OPTION_HEADER_BYTES + data.len(), self.answer(offer, option, data, output))
    }

    fn skip(&mut self, option: u32, rest_bytes: u32, input: &[u8], output: &mut Vec<u8>) -> (usize, Next) {
        let here = u32::try_from(input.len()).map_or(rest_bytes, |here| here.min(rest_bytes));
        if here < rest_bytes {
            self.state = HandshakeState::Skipping { option, rest_bytes: rest_bytes - here };
            return (here as usize, if here == 0 { Next::Wait } else { Next::Go });
        }
        self.state = HandshakeState::Options;
        reply(output, option, REP_ERR_TOO_BIG, &[]);
        (here as usize, Next::Go)
    }

    fn answer(&mut self, offer: &Offer<'_>, option: u32, data: &[u8], output: &mut Vec<u8>) -> Next {
        match option {
            OPT_EXPORT_NAME => return self.export_name(offer, data, output),
            OPT_ABORT => {
                reply(output, option, REP_ACK, &[]);
                return Next::Close;
            }
            OPT_LIST | OPT_STRUCTURED_REPLY if !data.is_empty() => {
                reply(output, option, REP_ERR_INVALID, b"this option has no data");
            }
            OPT_LIST => {
                let name = offer.name.as_bytes();
                let mut entry = u32::try_from(name.len()).unwrap_or(0).to_be_bytes().to_vec();
                entry.extend(name);
                reply(output, option, REP_SERVER, &entry);
                reply(output, option, REP_ACK, &[]);
            }
            OPT_STRUCTURED_REPLY => {
                self.structured = true;
                reply(output, option, REP_ACK, &[]);
            }
            OPT_INFO | OPT_GO => return self.info(offer, option, data, output),
            // STARTTLS too: a client of a Unix socket of mode 0600 needs no TLS.
            _ => reply(output, option, REP_ERR_UNSUP, &[]),
        }
        Next::Go
    }

    fn export_name(&self, offer: &Offer<'_>, name: &[u8], output: &mut Vec<u8>) -> Next {
        if !is_ours(offer, name) {
            return Next::Close; // this option knows no other way to say no
        }
        output.extend(offer.size_bytes.to_be_bytes());
        output.extend(transmission_flags::ALL.to_be_bytes());
        if !self.no_zeroes {
            output.extend([0; 124]);
        }
        Next::Transmission
    }

    fn info(&self, offer: &Offer<'_>, option: u32, data: &[u8], output: &mut Vec<u8>) -> Next {
        let Some((name, wanted)) = info_request(data) else {
            reply(output, option, REP_ERR_INVALID, b"the lengths in this option do not fit");
            return Next::Go;
        };
        if !is_ours(offer, name) {
            let text = format!("the only export here is {}", offer.name);
            reply(output, option, REP_ERR_UNKNOWN, text.as_bytes());
            return Next::Go;
        }
        let mut export = INFO_EXPORT.to_be_bytes().to_vec();
        export.extend(offer.size_bytes.to_be_bytes());
        export.extend(transmission_flags::ALL.to_be_bytes());
        reply(output, option, REP_INFO, &export);
        // Sent unasked: a client that can heed it should.
        let max = if self.structured { offer.max_request_bytes } else { offer.max_simple_request_bytes };
        let mut sizes = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [SECTOR_BYTES, BLOCK_BYTES, u64::from(max)] {
            sizes.extend(u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
        }
        reply(output, option, REP_INFO, &sizes);
        if wanted.chunks_exact(2).any(|kind| kind == INFO_NAME.to_be_bytes()) {
            let mut text = INFO_NAME.to_be_bytes().to_vec();
            text.extend(offer.name.as_bytes());
            reply(output, option, REP_INFO, &text);
        }
        reply(output, option, REP_ACK, &[]);
        if option == OPT_GO { Next::Transmission } else { Next::Go }
    }
}

fn is_ours(offer: &Offer<'_>, name: &[u8]) -> bool {
    name.is_empty() || name == offer.name.as_bytes()
}

/// Returns name and wanted information of INFO and GO; `None` if the lengths do not fit.
fn info_request(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut fields = Fields(data);
    let name_bytes = fields.u32()? as usize;
    let (name, rest) = fields.0.split_at_checked(name_bytes)?;
    fields.0 = rest;
    let wanted = usize::from(fields.u16()?);
    (fields.0.len() == wanted * 2).then_some((name, fields.0))
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
    output.extend(data);
}

/// Reads numbers from the front of a slice.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
