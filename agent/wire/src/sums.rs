//! Messages about the sums of snapshots' layers, and about repairs of data that does not match them.
//!
//! Layers are named by their images, not by numbers: a chain may change between two requests.

use serde::{Deserialize, Serialize};
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES};

use crate::handshake::encode_text;
use crate::header::{FrameError, Header, Opcode};

/// The size of a piece: a layer has one sum for each. The last piece may be shorter.
pub const SUM_PIECE_BYTES: u64 = MAX_IO_BYTES as u64;
/// The sum of a piece in which a layer has no block at all.
pub const EMPTY_SUM: u32 = 1;
/// The maximum bytes that one patch repairs, so that it fits a frame with the list of its blocks.
pub const PATCH_BYTES_MAX: u32 = MAX_IO_BYTES / 2;

/// A run of blocks that a layer has, inside a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummedRun {
    /// The first block, counted from the start of the piece.
    pub first_block: u32,
    /// Length of the run in blocks of 4096 bytes.
    pub blocks: u32,
    /// CRC-32C of their data.
    pub crc32c: u32,
}

/// Returns the sum of a piece of a layer with these blocks, in runs of maximum length. The sum depends on the
/// set of blocks and on their data, because a hole and zeroes differ. Never 0.
#[must_use]
pub fn piece_sum(runs: impl IntoIterator<Item = SummedRun>) -> u32 {
    let add = |sum, word: u32| crc32c::crc32c_append(sum, &word.to_le_bytes());
    let sum = runs
        .into_iter()
        .fold(0, |sum, run| [run.first_block, run.blocks, run.crc32c].into_iter().fold(sum, add));
    sum.max(EMPTY_SUM)
}

/// Requests the checks of a snapshot's layer in a range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRange {
    /// Name of the image file.
    pub image: String,
    /// The start of the range: a multiple of [`SUM_PIECE_BYTES`].
    pub offset_bytes: u64,
    /// The length in bytes: [`SUM_PIECE_BYTES`], or up to the end of the volume.
    pub length_bytes: u32,
}

/// The checks of a snapshot's layer in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCheck {
    /// The current sum; none if the layer cannot be read there.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub sum: Option<u32>,
    /// The sum that the replica has kept, if it has kept one.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub kept: Option<u32>,
    /// The next piece in which the layer has blocks, or had when its sums were kept.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub next_bytes: Option<u64>,
}

/// Sums to keep of a snapshot's layer. The first message has `is_first`, and only after the one with
/// `is_last` they are kept, durably. Pieces without a message have no blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepSums {
    /// Name of the image file.
    pub image: String,
    /// True if this message replaces all earlier ones.
    pub is_first: bool,
    /// True if this is the last message; the sums are stored then.
    pub is_last: bool,
    /// Index of the piece of the first sum, from 0.
    pub first_piece: u32,
    /// The sums of this piece and of those behind it, at most [`KeepSums::SUMS_MAX`]; 0 if a sum is not
    /// known.
    pub sums: Vec<u32>,
}

impl KeepSums {
    /// The most sums in one message, so that it fits a control frame.
    pub const SUMS_MAX: usize = 1000;
}

/// The correct content of a part of a snapshot's layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPatch {
    /// Name of the image file.
    pub image: String,
    /// The start of the part: a multiple of [`BLOCK_BYTES`].
    pub offset_bytes: u64,
    /// The length in bytes: whole blocks, at most [`PATCH_BYTES_MAX`].
    pub length_bytes: u32,
    /// First block, counted from the start of the part, and count of each run of blocks that the layer has;
    /// it has no others. In order.
    pub runs: Vec<(u32, u32)>,
}

impl LayerPatch {
    /// Returns true if runs and lengths fit each other, with so much data.
    fn fits(&self, data_bytes: usize) -> bool {
        let block_bytes = u32::try_from(BLOCK_BYTES).unwrap_or(u32::MAX);
        let mut end = 0;
        let mut blocks = 0;
        for (first, count) in &self.runs {
            let Some(next) = first.checked_add(*count).filter(|_| *first >= end && *count > 0) else {
                return false;
            };
            (end, blocks) = (next, blocks + count);
        }
        self.length_bytes > 0
            && self.length_bytes <= PATCH_BYTES_MAX
            && self.length_bytes.is_multiple_of(block_bytes)
            && self.offset_bytes.is_multiple_of(BLOCK_BYTES)
            && end <= self.length_bytes / block_bytes
            && data_bytes as u64 == u64::from(blocks) * BLOCK_BYTES
    }
}

/// Returns header and text of [`Opcode::RepairLayer`]: the patch as JSON, a line feed, and the data of its
/// runs.
#[must_use]
pub fn encode_patch(id: u64, patch: &LayerPatch, data: &[u8]) -> (Header, Vec<u8>) {
    debug_assert!(patch.fits(data.len()), "{patch:?} with {} bytes", data.len());
    let (header, mut text) = encode_text(Header::request(Opcode::RepairLayer, id, 0, 0), patch);
    text.push(b'\n');
    text.extend_from_slice(data);
    let length_bytes = u32::try_from(text.len()).unwrap_or(u32::MAX);
    (Header { length_bytes, data_check: crc32c::crc32c(&text), ..header }, text)
}

/// Decodes the result of [`encode_patch`] after its check.
///
/// # Errors
/// [`FrameError::DataCheck`] or [`FrameError::Text`].
pub fn decode_patch<'a>(header: &Header, text: &'a [u8]) -> Result<(LayerPatch, &'a [u8]), FrameError> {
    header.check_data(crc32c::crc32c(text))?;
    let bad = || FrameError::Text(header.opcode);
    // JSON that is written here has no line feed.
    let end = text.iter().position(|byte| *byte == b'\n').ok_or_else(bad)?;
    let patch: LayerPatch = serde_json::from_slice(&text[..end]).map_err(|_| bad())?;
    let data = &text[end + 1..];
    if patch.fits(data.len()) { Ok((patch, data)) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first_block: u32, blocks: u32, crc32c: u32) -> SummedRun {
        SummedRun { first_block, blocks, crc32c }
    }

    #[test]
    fn a_sum_distinguishes_holes_from_zeroes_and_is_never_zero() {
        assert_eq!(piece_sum([]), EMPTY_SUM);
        let zeroes = crc32c::crc32c(&[0; 4096]);
        let sums = [
            piece_sum([]),
            piece_sum([run(0, 1, zeroes)]),
            piece_sum([run(1, 1, zeroes)]),
            piece_sum([run(0, 2, zeroes)]),
            piece_sum([run(0, 1, zeroes), run(1, 1, zeroes)]),
            piece_sum([run(0, 1, 7)]),
        ];
        for (at, sum) in sums.iter().enumerate() {
            assert!(*sum != 0 && !sums[..at].contains(sum), "{sums:?}");
        }
        assert_eq!(piece_sum([run(3, 2, 0x1234_5678)]), 0x10fe_6577, "kept in files: it must not change");
    }

    fn patch(runs: &[(u32, u32)]) -> LayerPatch {
        let image = "volume-snap-a.img".to_owned();
        LayerPatch { image, offset_bytes: 8192, length_bytes: 16384, runs: runs.to_vec() }
    }

    #[test]
    fn patches_and_back() {
        let data = [b'\n'; 3 * 4096];
        let whole = patch(&[(0, 1), (2, 2)]);
        let (header, text) = encode_patch(9, &whole, &data);
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        assert_eq!(decode_patch(&header, &text), Ok((whole, &data[..])));
        let (header, mut text) = encode_patch(9, &patch(&[]), &[]);
        assert_eq!(decode_patch(&header, &text), Ok((patch(&[]), &[][..])), "all of it becomes a hole");
        text[3] ^= 1;
        assert!(matches!(decode_patch(&header, &text), Err(FrameError::DataCheck { .. })));
    }

    #[test]
    fn patches_that_do_not_fit_are_refused() {
        let decoded = |patch: &LayerPatch, data_bytes: usize| {
            let mut text = serde_json::to_vec(patch).unwrap();
            text.push(b'\n');
            text.resize(text.len() + data_bytes, 0);
            let mut header = Header::request(Opcode::RepairLayer, 1, 0, 0);
            header.data_check = crc32c::crc32c(&text);
            decode_patch(&header, &text).is_ok()
        };
        assert!(decoded(&patch(&[(0, 1), (3, 1)]), 8192));
        assert!(!decoded(&patch(&[(0, 1), (3, 1)]), 4096), "too little data");
        assert!(!decoded(&patch(&[(0, 2), (1, 1)]), 12288), "they overlap");
        assert!(!decoded(&patch(&[(0, 0)]), 0));
        assert!(!decoded(&patch(&[(3, 2)]), 8192), "over the end");
        assert!(!decoded(&patch(&[(u32::MAX, 2)]), 8192));
        assert!(!decoded(&LayerPatch { offset_bytes: 512, ..patch(&[]) }, 0));
        assert!(!decoded(&LayerPatch { length_bytes: 0, ..patch(&[]) }, 0));
        assert!(!decoded(&LayerPatch { length_bytes: PATCH_BYTES_MAX + 4096, ..patch(&[]) }, 0));
    }

    #[test]
    fn the_longest_messages_fit() {
        let image = format!("volume-snap-{}.img", "x".repeat(230));
        let sums = vec![u32::MAX; KeepSums::SUMS_MAX];
        let keep =
            KeepSums { image: image.clone(), is_first: false, is_last: false, first_piece: u32::MAX, sums };
        let (header, _) = encode_text(Header::request(Opcode::KeepSums, 1, 0, 0), &keep);
        assert!(Header::decode(&header.encode()).is_ok());
        let runs: Vec<_> = (0..PATCH_BYTES_MAX / 8192).map(|n| (2 * n + 1, 1)).collect();
        let data = vec![0; runs.len() * 4096];
        let patch = LayerPatch { image, offset_bytes: 1 << 60, length_bytes: PATCH_BYTES_MAX, runs };
        assert!(Header::decode(&encode_patch(u64::MAX, &patch, &data).0.encode()).is_ok());
        let all = vec![0; PATCH_BYTES_MAX as usize];
        let whole = LayerPatch { runs: vec![(0, PATCH_BYTES_MAX / 4096)], ..patch };
        assert!(Header::decode(&encode_patch(u64::MAX, &whole, &all).0.encode()).is_ok());
    }
}
