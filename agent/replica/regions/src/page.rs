//! The format of a page of a set on the disk.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, "SHRNREGS" |
//! | 8 | 4 | format, 1 |
//! | 12 | 4 | number of the page in the set |
//! | 16 | 8 | which set: the id of the replica that misses, or "intent" and two zeroes |
//! | 24 | 8 | number of writes of the set |
//! | 32 | 8 | bytes of a region |
//! | 40 | 8 | the epoch of the directory in which it was written |
//! | 48 | 8 | size of the volume that the set was made for; 0 in pages of versions without expansion |
//! | 56 | 4 | the stamp that is kept with the set; 0 in pages of versions that kept none |
//! | 60 | 4 | CRC-32C of the page with zeroes in this field |
//! | 64 | 4032 | one bit for each region, the lowest of the first byte first |
//!
//! Numbers are little-endian. Another page without any bit follows those of the set, with the next number: a
//! new stamp is written to it. The stamp of the page that was written last counts. The stamp of the intent
//! set is unknown if the last page is damaged or missing.

use thiserror::Error;

/// Length of a page, and the unit in which sets are written.
pub const PAGE_BYTES: usize = 4096;
const HEADER_BYTES: usize = 64;
const SIZE_AT: usize = 48;
const STAMP_AT: usize = 56;
const CHECK_AT: usize = 60;
/// The 64-bit words of bits in a page.
pub(crate) const PAGE_WORDS: usize = (PAGE_BYTES - HEADER_BYTES) / 8;
/// The number of regions for which a page has a bit.
pub const REGIONS_PER_PAGE: u32 = 32_256;
const _: () = assert!(REGIONS_PER_PAGE as usize == 64 * PAGE_WORDS);

const MAGIC: &[u8; 8] = b"SHRNREGS";
const FORMAT: u32 = 1;
/// The largest version of a page. No set is written as often, and a larger one would leave no next number.
const VERSION_MAX: u64 = u64::MAX / 2;

pub(crate) type PageBits = [u64; PAGE_WORDS];

/// The variable fields of the header of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageHeader {
    pub set: [u8; 8],
    pub page: u32,
    pub version: u64,
    pub region_bytes: u64,
    pub epoch: u64,
    pub size_bytes: u64,
    pub stamp: u32,
}

/// The content of a page, which may differ each time it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageContent {
    pub version: u64,
    pub stamp: u32,
    pub bits: PageBits,
}

/// The reason why bytes are not the expected page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PageDamage {
    /// The file ends before it.
    #[error("the page is cut off")]
    Short,
    /// The checksum does not match: a crash has torn the page, or it is damaged.
    #[error("the page is torn or damaged")]
    Check,
    /// The page is of another format, set, place or volume.
    #[error("the page belongs to another set or volume")]
    Other,
    /// Another program may have changed the volume since the page was written.
    #[error("the page is older than possible changes of the directory by another program")]
    Outdated,
}

impl PageHeader {
    pub fn encode(&self, bits: &PageBits, out: &mut [u8; PAGE_BYTES]) {
        out[..HEADER_BYTES].fill(0);
        out[0..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        out[12..16].copy_from_slice(&self.page.to_le_bytes());
        out[16..24].copy_from_slice(&self.set);
        out[24..32].copy_from_slice(&self.version.to_le_bytes());
        out[32..40].copy_from_slice(&self.region_bytes.to_le_bytes());
        out[40..48].copy_from_slice(&self.epoch.to_le_bytes());
        out[SIZE_AT..SIZE_AT + 8].copy_from_slice(&self.size_bytes.to_le_bytes());
        out[STAMP_AT..STAMP_AT + 4].copy_from_slice(&self.stamp.to_le_bytes());
        for (target, word) in out[HEADER_BYTES..].chunks_exact_mut(8).zip(bits) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        let check = crc32c::crc32c(out);
        out[CHECK_AT..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
    }

    /// Reads the page that should be this one, in any version and with any stamp.
    pub fn decode(&self, bytes: &[u8]) -> Result<PageContent, PageDamage> {
        let bytes = checked(bytes)?;
        let mut bits = [0; PAGE_WORDS];
        for (word, at) in bits.iter_mut().zip((HEADER_BYTES..).step_by(8)) {
            *word = u64_at(bytes, at);
        }
        let version = u64_at(bytes, 24);
        let mut stamp = [0; 4];
        stamp.copy_from_slice(&bytes[STAMP_AT..STAMP_AT + 4]);
        let stamp = u32::from_le_bytes(stamp);
        if u64_at(bytes, 40) != self.epoch {
            return Err(PageDamage::Outdated);
        }
        // The rest of the header has to equal that of a page written here.
        let mut expected = [0; PAGE_BYTES];
        let size_bytes = if u64_at(bytes, SIZE_AT) == 0 { 0 } else { self.size_bytes };
        PageHeader { version, size_bytes, stamp, ..*self }.encode(&bits, &mut expected);
        if expected != *bytes || version > VERSION_MAX {
            Err(PageDamage::Other)
        } else {
            Ok(PageContent { version, stamp, bits })
        }
    }
}

/// Returns the size of the volume that a file of a set was made for, from its first page. None if that is
/// damaged, or of a version without the size.
pub(crate) fn made_for(file: &[u8]) -> Option<u64> {
    let page = checked(file).ok().filter(|page| page.starts_with(MAGIC))?;
    Some(u64_at(page, SIZE_AT)).filter(|size_bytes| *size_bytes != 0)
}

/// Returns the page at the beginning of `bytes`, if it is whole.
fn checked(bytes: &[u8]) -> Result<&[u8; PAGE_BYTES], PageDamage> {
    let bytes: &[u8; PAGE_BYTES] =
        bytes.get(..PAGE_BYTES).and_then(|bytes| bytes.try_into().ok()).ok_or(PageDamage::Short)?;
    let mut unchecked = *bytes;
    unchecked[CHECK_AT..HEADER_BYTES].fill(0);
    if crc32c::crc32c(&unchecked).to_le_bytes() != bytes[CHECK_AT..HEADER_BYTES] {
        return Err(PageDamage::Check);
    }
    Ok(bytes)
}

fn u64_at(page: &[u8; PAGE_BYTES], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&page[at..at + 8]);
    u64::from_le_bytes(field)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: PageHeader = PageHeader {
        set: *b"0000000a",
        page: 3,
        version: 9,
        region_bytes: 1 << 16,
        epoch: 5,
        size_bytes: 0x0302_0000,
        stamp: 0x0605_0404,
    };

    fn encoded() -> [u8; PAGE_BYTES] {
        let mut bits = [0; PAGE_WORDS];
        bits[0] = 0x8000_0000_0000_0001;
        bits[PAGE_WORDS - 1] = 7;
        let mut bytes = [0xff; PAGE_BYTES];
        HEADER.encode(&bits, &mut bytes);
        bytes
    }

    #[test]
    fn the_format_stays() {
        let bytes = encoded();
        assert_eq!(&bytes[..24], b"SHRNREGS\x01\0\0\0\x03\0\0\x000000000a");
        assert_eq!(&bytes[24..48], b"\x09\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\x05\0\0\0\0\0\0\0");
        assert_eq!(&bytes[48..60], &[0, 0, 2, 3, 0, 0, 0, 0, 4, 4, 5, 6]);
        assert_eq!((made_for(&bytes), made_for(&bytes[1..])), (Some(0x0302_0000), None));
        assert_eq!((bytes[64], bytes[71], bytes[PAGE_BYTES - 8]), (1, 0x80, 7));
        assert_eq!(REGIONS_PER_PAGE, 32256);
    }

    #[test]
    fn every_kind_of_damage_is_noticed() {
        let good = encoded();
        let PageContent { version, stamp, bits } = HEADER.decode(&good).unwrap();
        assert_eq!((version, stamp, bits[PAGE_WORDS - 1]), (9, 0x0605_0404, 7));
        assert_eq!(HEADER.decode(&good[..4095]), Err(PageDamage::Short));
        assert_eq!(HEADER.decode(&[0; PAGE_BYTES]), Err(PageDamage::Check));
        for at in 0..PAGE_BYTES {
            let mut bad = good;
            bad[at] ^= 0x10;
            assert_eq!(HEADER.decode(&bad), Err(PageDamage::Check), "byte {at}");
        }
        for other in [
            PageHeader { page: 4, ..HEADER },
            PageHeader { set: *b"0000000b", ..HEADER },
            PageHeader { region_bytes: 1 << 17, ..HEADER },
            PageHeader { size_bytes: 0x0402_0000, ..HEADER },
        ] {
            assert_eq!(other.decode(&good), Err(PageDamage::Other));
        }
        assert_eq!(PageHeader { epoch: 6, ..HEADER }.decode(&good), Err(PageDamage::Outdated));
    }

    #[test]
    fn pages_of_a_version_that_does_not_say_the_size_are_taken() {
        let mut bytes = [0; PAGE_BYTES];
        PageHeader { size_bytes: 0, ..HEADER }.encode(&[1; PAGE_WORDS], &mut bytes);
        let found = HEADER.decode(&bytes).unwrap();
        assert_eq!((found.version, found.bits), (9, [1; PAGE_WORDS]));
        assert_eq!(made_for(&bytes), None);
    }
}
