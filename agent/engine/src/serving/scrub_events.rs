//! Scrubs: their status, their findings and their end.

use shorthorn_control::ScrubStatus;
use shorthorn_core::{Event, PeerIndex};
use shorthorn_types::ByteRange;

use super::Serving;
use super::scrubs::Difference;
use crate::events::{Done, ScrubFinding, ScrubProgress};

impl Serving<'_> {
    pub(super) fn publish_scrub(&self, change: impl FnOnce(&mut ScrubStatus)) {
        self.publish(|engine| engine.change_scrub(change));
    }

    pub(super) fn scrub_found(&mut self, range: ByteRange, odd: &[PeerIndex], repaired: bool) {
        let odd: Vec<String> =
            odd.iter().filter_map(|peer| self.replica(*peer)).map(|replica| replica.to_string()).collect();
        let odd = odd.join(" ");
        let last = format!("{range}: {odd}{}", if repaired { ", repaired" } else { "" });
        let found = Difference::new(range, odd, repaired);
        let unlogged = self.scrubs.found(found);
        self.log_differences(unlogged);
        self.count_found(repaired, last);
    }

    /// Logs the differences of the scrub, which has ended.
    pub(super) fn log_all_differences(&mut self) {
        let differences = self.scrubs.take_all();
        self.log_differences(differences);
    }

    pub(super) fn log_differences(&self, differences: impl IntoIterator<Item = Difference>) {
        for Difference { odd, repaired, count, first, last } in differences {
            let volume = &self.spec.volume;
            tracing::error!(%volume, count, %first, %last, odd, repaired, "the members have different data");
        }
    }

    fn count_found(&self, repaired: bool, last: String) {
        self.publish(|engine| engine.count_found(repaired, last));
    }

    pub(super) fn scrub_progress(&mut self, scrub: u64, progress: ScrubProgress) {
        if !self.scrubs.compares_snapshots(scrub) {
            return; // it was stopped
        }
        match progress {
            ScrubProgress::At { snapshot, offset_bytes } => self.publish_scrub(|scrub| {
                (scrub.snapshot, scrub.at_bytes) = (Some(snapshot), offset_bytes);
            }),
            ScrubProgress::Found(finding) => self.snapshot_differs(finding),
            ScrubProgress::Ended { incomplete } => self.snapshots_done(incomplete),
        }
    }

    fn snapshot_differs(&self, finding: ScrubFinding) {
        let ScrubFinding { snapshot, range, odd, done } = finding;
        let name =
            |peer: &PeerIndex| self.replica(*peer).map(|replica| replica.to_string()).unwrap_or_default();
        let replicas = odd.iter().map(name).collect::<Vec<_>>().join(" ");
        let what = match &done {
            Done::Repaired { from } => format!("repaired from {}", name(from)),
            Done::Reported => "not repaired: repair was not requested".to_owned(),
            Done::Undecided => "not repaired: no majority".to_owned(),
            Done::Failed(reason) => format!("not repaired: {reason}"),
        };
        let repaired = matches!(done, Done::Repaired { .. });
        let (volume, offset_bytes, length_bytes) = (&self.spec.volume, range.offset(), range.length());
        tracing::error!(
            %volume, replicas, snapshot, offset_bytes, length_bytes, repaired, done = what,
            "a snapshot has rot"
        );
        self.count_found(repaired, format!("snapshot {snapshot} at {range}: {replicas}, {what}"));
    }

    /// Starts the scrub of the volume after that of the snapshots.
    fn snapshots_done(&mut self, incomplete: Option<String>) {
        let Some(config) = self.scrubs.begin_volume() else { return };
        let volume = &self.spec.volume;
        match &incomplete {
            None => tracing::info!(%volume, "the scrub has compared all snapshots"),
            Some(reason) => tracing::warn!(%volume, reason, "the scrub has not compared all snapshots"),
        }
        self.publish_scrub(|scrub| {
            (scrub.snapshot, scrub.at_bytes) = (None, 0);
            if let Some(reason) = incomplete {
                scrub.last = Some(format!("not every snapshot was compared: {reason}"));
            }
        });
        self.shared().send_to_core(Event::Scrub(Some(config)));
    }

    pub(super) fn scrub_done(&mut self) {
        if !self.scrubs.end_volume() {
            return; // of one that was stopped
        }
        self.log_all_differences();
        let size_bytes = self.spec.size_bytes;
        self.publish(|engine| engine.complete_scrub(size_bytes));
        tracing::info!(volume = %self.spec.volume, "the scrub has compared everything");
    }
}
