//! The findings of an opening.

use crate::info::Provenance;

/// The state in which an opening found the directory, and its repairs.
#[derive(Debug)]
pub(crate) struct Opening {
    was_dirty: bool,
    provenance: Provenance,
    repairs: Vec<String>,
}

impl Opening {
    pub fn new(was_dirty: bool, provenance: Provenance, repairs: Vec<String>) -> Opening {
        Opening { was_dirty, provenance, repairs }
    }

    /// Returns true if the directory had not been closed cleanly.
    pub fn was_dirty(&self) -> bool {
        self.was_dirty
    }

    /// Returns the last user of the directory.
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    pub fn repairs(&self) -> &[String] {
        &self.repairs
    }

    /// Adds a repair that the opening made last.
    pub fn add_repair(&mut self, repair: String) {
        self.repairs.push(repair);
    }
}
