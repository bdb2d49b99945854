//! Blocks of one byte each, to write and to find again.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};

use crate::{NbdClient, NbdRequest};

/// The size of a block in bytes.
pub const BLOCK_BYTES: u32 = 64 << 10;
/// Far more than an answer takes, with a start of the engine before it.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Fills a block with this byte, durably.
///
/// # Errors
/// The engine does not answer in time, or answers with an error.
pub fn write_block(client: &mut NbdClient, block: u64, byte: u8) -> Result<()> {
    let data = vec![byte; BLOCK_BYTES as usize];
    let offset = block * u64::from(BLOCK_BYTES);
    let answer = client.call(NbdRequest::Write { offset, data, fua: true }, ANSWER_LIMIT)?;
    ensure!(answer.is_ok(), "writing block {block}: errno {answer:?}");
    Ok(())
}

/// Checks that a block is full of this byte.
///
/// # Errors
/// The block has another byte, or the engine does not answer in time, or answers with an error.
pub fn ensure_block(client: &mut NbdClient, block: u64, byte: u8) -> Result<()> {
    let offset = block * u64::from(BLOCK_BYTES);
    let answer = client.call(NbdRequest::Read { offset, length: BLOCK_BYTES }, ANSWER_LIMIT)?;
    let data = answer.map_err(|errno| anyhow!("reading block {block}: errno {errno}"))?;
    let wrong = data.iter().find(|found| **found != byte);
    ensure!(wrong.is_none(), "block {block} has {wrong:?} where {byte} was written");
    Ok(())
}
