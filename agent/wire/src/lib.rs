//! The protocol between an engine and its replicas, as a pure codec.
//!
//! A connection carries frames: a [`Header`] of 48 bytes, little-endian, and `data` behind it if the
//! opcode has some. Requests are pipelined and answered out of order. A response repeats the request's opcode
//! and id, with [`Flags::RESPONSE`] set and an errno (0 is success) in `status`.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic, "SHRN" |
//! | 4 | 1 | version, 2 |
//! | 5 | 1 | opcode |
//! | 6 | 2 | flags |
//! | 8 | 8 | request id |
//! | 16 | 8 | offset in the volume, bytes |
//! | 24 | 4 | length, bytes: of the range, or of the text that a control frame carries |
//! | 28 | 4 | status: an errno in a response; the number of the layer in READ_LAYER and WRITE_LAYER; 0 else |
//! | 32 | 4 | CRC-32C of the data behind the header, 0 without data |
//! | 36 | 4 | CRC-32C of bytes 0 to 35: tells damage from malice, and another version from both |
//! | 40 | 8 | keyed check: SipHash-2-4 of bytes 0 to 39 and the frame's number (8 bytes); 0 in the opening |
//!
//! Bytes 0 to 39 mean the same in every version of the protocol. So each end can say that the other one
//! speaks another version.
//!
//! Opening: the replica sends CHALLENGE with a nonce. The engine answers HELLO: the volume, the replica, its
//! generation, a nonce of its own, and the proof that it has the volume's secret. The replica answers WELCOME
//! (the response to HELLO) with the proof that it has the secret too. Or it sends a response with an errno
//! and a text, and closes. Only then other frames are taken. A refusal that names a newer generation counts
//! only with a proof: see [`Session`].
//!
//! If the volume encrypts in transit, CHALLENGE says so on connections between hosts. The handshake of TLS
//! comes next, and HELLO and all later frames are inside of its records (`shorthorn_tls`).
//!
//! From then on every frame has a keyed check. Each direction of each connection has a key of its own, and
//! its frames have the numbers 0, 1, 2, …, which are not sent. So a frame does not pass, and ends the
//! connection, if it is repeated, left out, moved, or sent back to its sender. Neither does a frame of
//! another connection, or one that was made without the secret.
//!
//! Limits: the keyed check covers the data behind the header only by its CRC-32C, which is not a MAC. An
//! attacker in the network between two hosts can read everything. The attacker cannot change the order, kind,
//! range, length or outcome of frames. But the attacker can replace text or data by another one with the same
//! CRC. Only encryption in transit protects from that. All replicas of a volume have the same secret. A
//! faulty replica that answers at the address of another one can therefore impersonate it.
//!
//! The engine promises that no two requests over all its connections are in flight at once if they modify
//! data and overlap, rounded to [`shorthorn_types::limits::BLOCK_BYTES`].
#![forbid(unsafe_code)]

mod engine_claim;
mod handshake;
mod header;
mod layers;
mod mac;
mod pages;
mod proof;
mod regions;
mod session;
mod sums;

pub use engine_claim::{EngineClaim, Holder};
pub use handshake::{Challenge, Hello, Refusal, ViewMessage, Welcome, decode_text, encode_text};
pub use header::{Flags, FrameError, HEADER_BYTES, Header, MAX_LAYERS_TEXT_BYTES, MAX_TEXT_BYTES, Opcode};
pub use layers::{CopyEnd, CopyState, Extent, ExtentsPage, ExtentsQuery, LayerList, WireLayer};
pub use mac::{derived_password, directory_fingerprint, fingerprint};
pub use pages::BadPage;
pub use proof::{HexError, Nonce, Proof};
pub use regions::{CONTROL_QUEUE, ExpandReplica, RegionsPage, RegionsQuery};
pub use session::{ProvenWelcome, Session, Unproven};
pub use shorthorn_types::ReplicaReport;
pub use sums::{
    EMPTY_SUM, KeepSums, LayerCheck, LayerPatch, LayerRange, PATCH_BYTES_MAX, SUM_PIECE_BYTES, SummedRun,
    decode_patch, encode_patch, piece_sum,
};
