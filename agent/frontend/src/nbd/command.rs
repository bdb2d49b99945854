//! The requests of clients while they are served, and which slot belongs to which.

use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_ZERO_BYTES};

use super::protocol::{CommandKind, NbdError};

/// No slot: ends a chain.
const NONE: u16 = u16::MAX;

/// A client's request. It is cut into parts of at most a slot's data each.
#[derive(Clone, Copy, Debug)]
pub(super) struct NbdCommand {
    pub(super) connection: u16,
    pub(super) kind: CommandKind,
    pub(super) fua: bool,
    /// Zeroes are written as data: a hole is not wanted.
    pub(super) no_hole: bool,
    pub(super) cookie: u64,
    /// The start of the next part.
    pub(super) offset_bytes: u64,
    /// The bytes without a part. A FLUSH counts as one byte.
    pub(super) rest_bytes: u32,
    /// Parts that have a slot and are not done.
    pub(super) parts: u16,
    /// The first error.
    pub(super) error: Option<NbdError>,
    /// Slots of a READ whose data waits until all of it has arrived, in order.
    first_slot: u16,
    last_slot: u16,
}

impl NbdCommand {
    pub(super) fn new(connection: u16, kind: CommandKind, fua: bool, cookie: u64) -> NbdCommand {
        NbdCommand {
            connection,
            kind,
            fua,
            no_hole: false,
            cookie,
            offset_bytes: 0,
            rest_bytes: 0,
            parts: 0,
            error: None,
            first_slot: NONE,
            last_slot: NONE,
        }
    }

    /// Returns the length of the next part. Parts of a TRIM end with a block: neither of two parts would
    /// cover a divided block completely, so it would keep its data.
    pub(super) fn next_part_bytes(&self) -> u32 {
        let in_block = u32::try_from(self.offset_bytes % BLOCK_BYTES).unwrap_or(0);
        let longest = match self.kind {
            CommandKind::WriteZeroes if self.no_hole => MAX_IO_BYTES - in_block,
            CommandKind::Trim | CommandKind::WriteZeroes => MAX_ZERO_BYTES - in_block,
            _ => MAX_IO_BYTES,
        };
        self.rest_bytes.min(longest)
    }

    /// Returns true if all parts are made and done.
    pub(super) fn is_over(&self) -> bool {
        self.parts == 0 && self.rest_bytes == 0
    }
}

/// The part of a request for which a slot is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestPart {
    pub(super) command: u16,
    pub(super) offset_bytes: u64,
    pub(super) length_bytes: u32,
    next_slot: u16,
}

impl RequestPart {
    pub(super) fn new(command: u16, offset_bytes: u64, length_bytes: u32) -> RequestPart {
        RequestPart { command, offset_bytes, length_bytes, next_slot: NONE }
    }
}

/// All commands and parts of one queue, in tables of fixed size.
#[derive(Debug)]
pub(super) struct Commands {
    commands: Box<[NbdCommand]>,
    free: Vec<u16>,
    parts: Box<[RequestPart]>,
}

impl Commands {
    /// Creates room for as many commands as can be in progress: one for each slot, and one for each
    /// connection that waits for a slot.
    pub(super) fn new(slots: u16, connections: u16) -> Commands {
        let count = slots + connections;
        Commands {
            commands: vec![NbdCommand::new(0, CommandKind::Flush, false, 0); count.into()].into(),
            free: (0..count).rev().collect(),
            parts: vec![RequestPart::new(0, 0, 0); slots.into()].into(),
        }
    }

    /// Keeps `command`; `None` if the table is full, which the number of slots and connections excludes.
    pub(super) fn insert(&mut self, command: NbdCommand) -> Option<u16> {
        let id = self.free.pop()?;
        self.commands[usize::from(id)] = command;
        Some(id)
    }

    pub(super) fn get(&mut self, id: u16) -> &mut NbdCommand {
        &mut self.commands[usize::from(id)]
    }

    pub(super) fn remove(&mut self, id: u16) {
        debug_assert!(!self.free.contains(&id), "command {id} is removed twice");
        self.free.push(id);
    }

    pub(super) fn part(&self, slot: u16) -> RequestPart {
        self.parts[usize::from(slot)]
    }

    /// Uses `slot` for a part of a command.
    pub(super) fn set_part(&mut self, slot: u16, part: RequestPart) {
        self.parts[usize::from(slot)] = part;
    }

    /// Appends `slot` to the chain of its command.
    pub(super) fn chain(&mut self, slot: u16) {
        let command = &mut self.commands[usize::from(self.parts[usize::from(slot)].command)];
        if command.last_slot == NONE {
            command.first_slot = slot;
        } else {
            self.parts[usize::from(command.last_slot)].next_slot = slot;
        }
        command.last_slot = slot;
    }

    /// Takes the first slot of the chain of command `id`.
    pub(super) fn unchain(&mut self, id: u16) -> Option<u16> {
        let command = &mut self.commands[usize::from(id)];
        let slot = command.first_slot;
        if slot == NONE {
            return None;
        }
        command.first_slot = self.parts[usize::from(slot)].next_slot;
        if command.first_slot == NONE {
            command.last_slot = NONE;
        }
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_keep_their_order() {
        let mut commands = Commands::new(8, 1);
        let first = commands.insert(NbdCommand::new(0, CommandKind::Read, false, 1)).unwrap();
        let second = commands.insert(NbdCommand::new(0, CommandKind::Read, false, 2)).unwrap();
        for (slot, command) in [(7, first), (0, second), (3, first), (5, first), (1, second)] {
            commands.set_part(slot, RequestPart::new(command, 0, 512));
            commands.chain(slot);
        }
        let mut take = |id| std::iter::from_fn(|| commands.unchain(id)).collect::<Vec<_>>();
        assert_eq!(take(first), [7, 3, 5]);
        assert_eq!(take(second), [0, 1]);
        assert!(take(first).is_empty());
    }

    #[test]
    fn parts_of_a_trim_end_with_a_block() {
        let (offset_bytes, rest_bytes) = (4096 + 512, 3 * MAX_ZERO_BYTES);
        for kind in [CommandKind::Trim, CommandKind::WriteZeroes] {
            let command = NbdCommand { offset_bytes, rest_bytes, ..NbdCommand::new(0, kind, false, 1) };
            assert_eq!(command.next_part_bytes(), MAX_ZERO_BYTES - 512);
            assert_eq!(NbdCommand { offset_bytes: 8192, ..command }.next_part_bytes(), MAX_ZERO_BYTES);
            assert_eq!(NbdCommand { rest_bytes: 1024, ..command }.next_part_bytes(), 1024);
        }
        let data = NbdCommand {
            offset_bytes,
            rest_bytes,
            no_hole: true,
            ..NbdCommand::new(0, CommandKind::WriteZeroes, false, 1)
        };
        assert_eq!(data.next_part_bytes(), MAX_IO_BYTES - 512, "as much as a slot has");
        let write =
            NbdCommand { offset_bytes, rest_bytes, ..NbdCommand::new(0, CommandKind::Write, false, 1) };
        assert_eq!(write.next_part_bytes(), MAX_IO_BYTES);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut commands = Commands::new(2, 1);
        let command = NbdCommand::new(0, CommandKind::Read, false, 1);
        let ids: Vec<u16> = std::iter::from_fn(|| commands.insert(command)).collect();
        assert_eq!(ids.len(), 3);
        commands.remove(ids[1]);
        assert_eq!(commands.insert(command), Some(ids[1]));
    }
}
