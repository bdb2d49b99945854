//! Keeps sums of snapshots' layers beside them in `shorthorn.sums-<snapshot>`.
//!
//! The caller decides on their contents. A file of sums belongs to one file of one layer, and is removed with
//! the layer. It has the inode and size of that file, and the epoch in which it was written. The time of the
//! layer's last change is not included: the sums have to find a layer that was changed unnoticed.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, "SHRNSUMS" |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | length of a piece, bytes |
//! | 16 | 8 | size of the layer, bytes |
//! | 24 | 8 | inode of the layer |
//! | 32 | 8 | epoch |
//! | 40 | 4 | CRC-32C of the name of the image |
//! | 44 | 4 | number of the sums that follow |
//! | 48 | 4 each | the sums; 0: not known |
//! | last | 4 | CRC-32C of all before |

use shorthorn_chain::{FileIndex, ImageName, META_SUFFIX, OWN_PREFIX, temp_name};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::image::Image;
use crate::medium::Medium;
use crate::sums_files::SUMS_PREFIX;

type Result<T> = std::result::Result<T, StoreError>;

const MAGIC: &[u8; 8] = b"SHRNSUMS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 48;
const CHECK_BYTES: usize = 4;
const SUM_BYTES: usize = 4;
/// The most sums that are kept of one layer, which bounds file and memory to 32 MiB.
const SUMS_MAX: usize = 8 << 20;
const NAME_MAX_BYTES: usize = 255;

/// The sums of a layer, one for each piece of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSums {
    /// The length of a piece in bytes.
    pub piece_bytes: u32,
    /// The sum of each piece, in the packed form of the file: see [`LayerSums::piece`].
    pub sums: Vec<u32>,
}

/// The sums found for a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundSums {
    /// The layer has no sums, or those of a former file of this name.
    None,
    /// The sums of this very file.
    Kept(LayerSums),
    /// A file that is not as it was written, and why not.
    Damaged(String),
}

/// The file and layer of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Subject {
    size_bytes: u64,
    inode: u64,
    epoch: u64,
    name_crc32c: u32,
}

/// The packed form of a sum that is not known.
const SUM_UNKNOWN: u32 = 0;

impl LayerSums {
    /// Returns the sum of the piece of that number; the inner option is none if the sum is not known. None:
    /// the layer ends before the piece.
    #[must_use]
    pub fn piece(&self, number: usize) -> Option<Option<u32>> {
        self.sums.get(number).map(|sum| Some(*sum).filter(|sum| *sum != SUM_UNKNOWN))
    }

    /// Makes room for a layer of `size_bytes`, each sum as `sum`. None if the layer is too large for its
    /// sums to be kept.
    #[must_use]
    pub fn new(size_bytes: u64, piece_bytes: u32, sum: u32) -> Option<LayerSums> {
        let pieces = usize::try_from(size_bytes.div_ceil(u64::from(piece_bytes))).ok()?;
        (pieces <= SUMS_MAX).then(|| LayerSums { piece_bytes, sums: vec![sum; pieces] })
    }

    fn encode(&self, subject: Subject) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.sums.len() * SUM_BYTES + CHECK_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.piece_bytes.to_le_bytes());
        bytes.extend_from_slice(&subject.size_bytes.to_le_bytes());
        bytes.extend_from_slice(&subject.inode.to_le_bytes());
        bytes.extend_from_slice(&subject.epoch.to_le_bytes());
        bytes.extend_from_slice(&subject.name_crc32c.to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(self.sums.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.sums.iter().for_each(|sum| bytes.extend_from_slice(&sum.to_le_bytes()));
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        bytes
    }

    /// Returns the sums, if they are about `subject`.
    fn decode(bytes: &[u8], subject: Subject) -> FoundSums {
        let damaged = |reason: &str| FoundSums::Damaged(reason.to_owned());
        let Some(body_bytes) = bytes.len().checked_sub(CHECK_BYTES).filter(|body| *body >= HEADER_BYTES)
        else {
            return damaged("the file is too short");
        };
        let (body, check) = bytes.split_at(body_bytes);
        if u32_at(check, 0) != crc32c::crc32c(body) {
            return damaged("the checksum is wrong");
        }
        if &body[..8] != MAGIC || u32_at(body, 8) != VERSION {
            return damaged("this version does not know its format");
        }
        let found = Subject {
            size_bytes: u64_at(body, 16),
            inode: u64_at(body, 24),
            epoch: u64_at(body, 32),
            name_crc32c: u32_at(body, 40),
        };
        if found != subject {
            return FoundSums::None;
        }
        let sums: Vec<u32> = body[HEADER_BYTES..].chunks_exact(SUM_BYTES).map(|sum| u32_at(sum, 0)).collect();
        let piece_bytes = u32_at(body, 12);
        let pieces = subject.size_bytes.div_ceil(u64::from(piece_bytes.max(1)));
        let is_whole = u32_at(body, 44) as usize == sums.len() && sums.len() as u64 == pieces;
        if !is_whole || body.len() != HEADER_BYTES + sums.len() * SUM_BYTES {
            return damaged("the number of sums is not that of pieces");
        }
        FoundSums::Kept(LayerSums { piece_bytes, sums })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Returns the file for the sums of a snapshot; none if its name would make it something else to Longhorn, or
/// is too long.
fn file_of(image: &ImageName) -> Option<String> {
    let name = format!("{OWN_PREFIX}{SUMS_PREFIX}{}", image.snapshot_name()?);
    let is_ours = !name.ends_with(META_SUFFIX) && !name.contains("volume-head");
    (is_ours && temp_name(&name).len() <= NAME_MAX_BYTES).then_some(name)
}

/// The layers of the snapshots of a chain, and the sums that are kept of them.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotLayers<'a> {
    medium: &'a Medium,
    image: &'a Image,
    epoch: u64,
    /// True if the layers are being copied: none counts then.
    is_copying: bool,
}

impl<'a> SnapshotLayers<'a> {
    pub(crate) fn new(
        medium: &'a Medium,
        image: &'a Image,
        epoch: u64,
        is_copying: bool,
    ) -> SnapshotLayers<'a> {
        SnapshotLayers { medium, image, epoch, is_copying }
    }

    /// Returns the layer of a snapshot of the chain, by the name of its image. An incomplete copy of a layer
    /// does not count.
    #[must_use]
    pub fn find(&self, image: &str) -> Option<FileIndex> {
        self.name(image).and_then(|image| self.image.find(image))
    }

    /// Returns the size of that layer.
    #[must_use]
    pub fn size_bytes(&self, image: &str) -> Option<u64> {
        let image = self.name(image)?;
        Some(self.image.layout().disks().get(image)?.size_bytes)
    }

    fn name(&self, image: &str) -> Option<&'a ImageName> {
        let is_head = image == self.image.head_name().as_str();
        let found = self.image.layout().chain().iter().find(|name| name.as_str() == image);
        found.filter(|_| !is_head && !self.is_copying)
    }

    fn known_layer(&self, image: &str) -> Result<&'a ImageName> {
        self.name(image).ok_or_else(|| StoreError::NoSnapshotLayer(image.to_owned()))
    }

    fn subject(&self, image: &ImageName) -> Result<Option<Subject>> {
        let Some(stat) = self.medium.directory().stat(image.as_str())? else { return Ok(None) };
        let name_crc32c = crc32c::crc32c(image.as_str().as_bytes());
        let (size_bytes, inode, epoch) = (stat.size_bytes, stat.inode, self.epoch);
        Ok(Some(Subject { size_bytes, inode, epoch, name_crc32c }))
    }

    /// Returns the sums that are kept of a snapshot's layer.
    ///
    /// # Errors
    /// The layer does not exist, or an I/O error.
    pub fn load_sums(&self, image: &str) -> Result<FoundSums> {
        let image = self.known_layer(image)?;
        let (Some(name), Some(subject)) = (file_of(image), self.subject(image)?) else {
            return Ok(FoundSums::None);
        };
        let longest_bytes = HEADER_BYTES + SUMS_MAX * SUM_BYTES + CHECK_BYTES;
        match self.medium.directory().stat(&name)? {
            None => return Ok(FoundSums::None),
            Some(stat) if stat.size_bytes > longest_bytes as u64 => {
                return Ok(FoundSums::Damaged("the file is too long".to_owned()));
            }
            Some(_) => {}
        }
        let bytes = self.medium.directory().read(&name)?.unwrap_or_default();
        Ok(LayerSums::decode(&bytes, subject))
    }

    /// Keeps the sums of a snapshot's layer, durably.
    ///
    /// # Errors
    /// The layer does not exist or cannot have sums, or an I/O error; the former sums still exist then.
    pub fn save_sums(&self, image: &str, sums: &LayerSums) -> Result<()> {
        self.medium.check_writable()?;
        let image = self.known_layer(image)?;
        let (Some(name), Some(subject)) = (file_of(image), self.subject(image)?) else {
            return Err(StoreError::NoSnapshotLayer(image.to_string()));
        };
        self.medium.directory().replace(&name, &sums.encode(subject)).inspect_err(|_| {
            // The partial file does not count, but takes space; the next opening removes it too.
            let _ = self.medium.directory().unlink(&temp_name(&name));
        })
    }

    /// Checks that `runs` of a snapshot's layer can be repaired in `range`, and returns its file.
    pub(crate) fn check_repair(
        &self,
        image: &str,
        range: ByteRange,
        runs: &[ByteRange],
    ) -> Result<FileIndex> {
        self.image.check_no_fold()?;
        let layer = self.known_layer(image)?;
        let index = self.image.find(layer).ok_or_else(|| StoreError::NoSnapshotLayer(image.to_owned()))?;
        range.check(self.image.size_bytes())?;
        let layer_bytes = self.size_bytes(image).unwrap_or(0).next_multiple_of(BLOCK_BYTES);
        for run in runs {
            run.check(layer_bytes)?;
        }
        Ok(index)
    }
}

/// Removes the sums of a snapshot's layer before the layer changes or is deleted.
pub(crate) fn drop_sums(directory: &Directory, image: &ImageName) -> Result<()> {
    let Some(name) = file_of(image) else { return Ok(()) };
    if directory.stat(&name)?.is_some() {
        directory.unlink(&name)?;
        directory.sync()?;
    }
    Ok(())
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// Sums that are accepted are those of a file with this content.
    pub fn check(bytes: &[u8]) {
        if bytes.len() < HEADER_BYTES {
            return;
        }
        let mut file = bytes.to_vec();
        file.extend_from_slice(&crc32c::crc32c(bytes).to_le_bytes());
        let subject = Subject {
            size_bytes: u64_at(bytes, 16),
            inode: u64_at(bytes, 24),
            epoch: u64_at(bytes, 32),
            name_crc32c: u32_at(bytes, 40),
        };
        if let FoundSums::Kept(sums) = LayerSums::decode(&file, subject) {
            assert_eq!(sums.encode(subject), file);
        }
        assert!(!matches!(LayerSums::decode(bytes, subject), FoundSums::None));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SUBJECT: Subject = Subject { size_bytes: (2 << 20) + 512, inode: 77, epoch: 5, name_crc32c: 9 };

    fn mend(bytes: &mut [u8]) {
        let body_bytes = bytes.len() - CHECK_BYTES;
        let check = crc32c::crc32c(&bytes[..body_bytes]).to_le_bytes();
        bytes[body_bytes..].copy_from_slice(&check);
    }

    fn sums() -> LayerSums {
        LayerSums { piece_bytes: 1 << 20, sums: vec![1, 0, 0x0102_0304] }
    }

    #[test]
    fn a_sum_of_zero_is_not_known() {
        let pieces = [0, 1, 2, 3].map(|number| sums().piece(number));
        assert_eq!(pieces, [Some(Some(1)), Some(None), Some(Some(0x0102_0304)), None]);
    }

    #[test]
    fn the_format_is_fixed() {
        let bytes = sums().encode(SUBJECT);
        assert_eq!(&bytes[..16], b"SHRNSUMS\x01\0\0\0\0\0\x10\0");
        assert_eq!(&bytes[16..32], &[0, 2, 0x20, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[32..48], &[5, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(&bytes[48..60], &[1, 0, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(&bytes[60..], crc32c::crc32c(&bytes[..60]).to_le_bytes());
        assert_eq!(LayerSums::decode(&bytes, SUBJECT), FoundSums::Kept(sums()));
    }

    #[test]
    fn any_damage_is_noticed_and_another_file_has_none() {
        let bytes = sums().encode(SUBJECT);
        let is_damaged = |bytes: &[u8]| matches!(LayerSums::decode(bytes, SUBJECT), FoundSums::Damaged(_));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(is_damaged(&bad) && is_damaged(&bytes[..at]), "byte {at}");
        }
        let mut short = LayerSums { sums: vec![1, 2], ..sums() }.encode(SUBJECT);
        assert!(is_damaged(&short), "a sum is missing");
        short.clear();
        assert!(is_damaged(&short));
        for other in [
            Subject { size_bytes: 4096, ..SUBJECT },
            Subject { inode: 78, ..SUBJECT },
            Subject { epoch: 6, ..SUBJECT },
            Subject { name_crc32c: 1, ..SUBJECT },
        ] {
            assert_eq!(LayerSums::decode(&bytes, other), FoundSums::None);
        }
    }

    #[test]
    fn names_of_sum_files_are_unknown_to_longhorn() {
        let name =
            |snapshot: &str| file_of(&ImageName::parse(&format!("volume-snap-{snapshot}.img")).unwrap());
        assert_eq!(name("a"), Some("shorthorn.sums-a".to_owned()));
        assert_eq!(name("a.meta"), None);
        assert_eq!(name("xvolume-head"), None);
        assert_eq!(name(&"x".repeat(239)), None);
        assert_eq!(file_of(&ImageName::head(3)), None);
    }

    #[test]
    fn too_large_a_layer_has_no_sums() {
        assert_eq!(LayerSums::new(8 << 40, 1 << 20, 1).map(|sums| sums.sums.len()), Some(8 << 20));
        assert_eq!(LayerSums::new((8 << 40) + 1, 1 << 20, 1), None);
    }

    proptest! {
        #[test]
        fn random_bytes_are_not_sums(bytes in proptest::collection::vec(any::<u8>(), 0..120), mends: bool) {
            let mut bytes = bytes;
            if mends && bytes.len() >= CHECK_BYTES {
                mend(&mut bytes);
            }
            prop_assert!(!matches!(LayerSums::decode(&bytes, SUBJECT), FoundSums::Kept(_)));
        }

        /// Tests changed sums with a valid check, as an attacker makes them. Accepted sums have one entry for
        /// each piece, and are written again unchanged.
        #[test]
        fn changed_sums_are_refused_or_written_again(
            changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
            cut in 0usize..12,
            mends: bool,
        ) {
            let whole = sums().encode(SUBJECT);
            let mut bytes = whole.clone();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len() - cut);
            if mends {
                mend(&mut bytes);
            }
            if let FoundSums::Kept(found) = LayerSums::decode(&bytes, SUBJECT) {
                prop_assert!(mends || bytes == whole);
                prop_assert_eq!(found.encode(SUBJECT), bytes);
            }
        }
    }
}
