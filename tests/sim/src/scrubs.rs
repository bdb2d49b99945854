//! Scrubs that an operator orders beside requests. Some only report, and some are stopped midway.

use std::num::NonZeroU64;

use shorthorn_checker::Micros;
use shorthorn_core::{Event, Operation, ScrubConfig};
use shorthorn_types::ByteRange;

use crate::Sabotage;
use crate::engine::{OrderedScrubs, verifies_reads};
use crate::occurrence::{Mend, Occurrence};
use crate::simulation::Simulation;

impl Simulation {
    /// Starts a scrub at the engine that serves, and stops it after a while.
    pub fn scrub_for(&mut self, repair: bool, bytes_per_s: u64, for_us: Micros) -> bool {
        let Some(engine) = self.guest.engine else { return false };
        let number = self.fresh();
        if !self.order_scrub(
            engine,
            number,
            ScrubConfig { bytes_per_s: NonZeroU64::new(bytes_per_s), repair },
        ) {
            return false;
        }
        self.after(for_us, Occurrence::Mend(Mend::Scrub(engine, number)));
        true
    }

    /// Starts a scrub. Returns false if the engine does not serve.
    pub fn order_scrub(&mut self, engine: u64, number: u64, scrub: ScrubConfig) -> bool {
        let is_sabotaged = self.options.sabotage == Some(Sabotage::ReportsRepair);
        let Some(process) = self.engines.get_mut(&engine).filter(|process| process.core.is_some()) else {
            return false;
        };
        let may_repair = process.scrubs.may_repair || scrub.repair;
        process.scrubs = OrderedScrubs { number, may_repair, ..OrderedScrubs::default() };
        let scrub = ScrubConfig { repair: scrub.repair || is_sabotaged, ..scrub };
        self.trace(|| format!("engine {engine} scrubs the volume: {scrub:?}"));
        self.apply(engine, Event::Scrub(Some(scrub)));
        true
    }

    /// Stops a scrub, unless it has been replaced by another one.
    pub fn stop_scrub(&mut self, engine: u64, number: u64) {
        let is_sabotaged = self.options.sabotage == Some(Sabotage::ScrubsGoOn);
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let is_running =
            process.core.as_ref().is_some_and(|core| core.copy_progress().scrub_at_bytes.is_some());
        if process.scrubs.number != number || !is_running {
            return;
        }
        process.scrubs.is_stopped = true;
        self.count("scrubs stopped");
        self.trace(|| format!("engine {engine}: the scrub is stopped"));
        if !is_sabotaged {
            self.apply(engine, Event::Scrub(None));
        }
    }

    /// Checks a request of a scrub. Engines that verify reads compare and repair other blocks, too.
    pub fn look_at_scrub(&mut self, engine: u64, operation: Operation, range: ByteRange) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        if operation != Operation::Verify || verifies_reads(engine) || !process.scrubs.is_stopped {
            return;
        }
        if *process.scrubs.last_check.get_or_insert(range) != range {
            self.violate(format!("engine {engine} compares {range} after the end of its scrub"));
        }
    }

    /// Checks the report of a scrub.
    pub fn look_at_report(&mut self, engine: u64, range: ByteRange, repaired: bool) {
        let Some(process) = self.engines.get(&engine) else { return };
        if repaired && !verifies_reads(engine) && !process.scrubs.may_repair {
            self.violate(format!("engine {engine} repairs {range}, and is only to report"));
        }
    }
}
