//! Computes the columns that kubectl shows of a volume, because kubectl cannot compute anything itself.

use super::VolumeReconciler;
use crate::NodeName;
use crate::objects::{
    ConditionType, CurrentState, Display, Engine, Finding, VolumeSpec, VolumeState, VolumeStatus,
};
use crate::reconcile::quiet_left;

const GIB: u64 = 1 << 30;
/// Less of a change is not worth a write.
const LEAST_CHANGE_BYTES: u64 = 64 << 20;
/// The divisor for the other minimum: changes of less than this part of the stored value are not stored.
const LEAST_CHANGE_PART: u64 = 64;
/// The reason of [`ConditionType::EngineCurrent`] if it does not hold.
const NEEDS_UPGRADE: &str = "EngineNeedsUpgrade";
/// The conditions in the order of their importance for the display.
const BY_WEIGHT: [ConditionType; 7] = [
    ConditionType::Accepted,
    ConditionType::Healthy,
    ConditionType::Granted,
    ConditionType::Scheduled,
    ConditionType::Settled,
    ConditionType::Expanded,
    ConditionType::EngineCurrent,
];

impl VolumeReconciler<'_> {
    /// Updates the displayed fields. A start does not change them as long as its steps are not stored.
    pub(super) fn show(&mut self) {
        self.record_program();
        self.status.observe_generation();
        if self.status.decided().state == VolumeState::Attaching
            && !quiet_left(self.context, Some(self.stored)).is_zero()
        {
            return;
        }
        if let Some(found) = self.objects.allocated_bytes()
            && is_noticeable(self.status.decided().actual_size, found)
        {
            self.status.set_actual_size(found);
        }
        let shown = display(&self.stored.spec, self.status.decided(), self.objects.engine());
        self.status.set_display(shown);
    }

    /// Records whether the engine runs the program that is installed on its node. A volume whose engine
    /// always did has no such condition. Until the programs are compared, the condition stays as it is.
    fn record_program(&mut self) {
        let running =
            self.objects.engine().filter(|engine| engine.status.current_state == CurrentState::Running);
        let has_condition = self.status.condition(ConditionType::EngineCurrent).is_some();
        let finding = match running.map(|engine| (engine, engine.status.needs_upgrade)) {
            Some((engine, Some(true))) => upgrade_finding(engine),
            Some((_, Some(false))) | None if has_condition => Finding::Well,
            _ => return,
        };
        self.status.set(ConditionType::EngineCurrent, finding);
    }
}

fn upgrade_finding(engine: &Engine) -> Finding {
    let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
    let message = format!(
        "the engine runs another program than the one that is installed on node {node}; shorthornctl upgrade \
         engines replaces it, and the device stays in use"
    );
    Finding::wrong(NEEDS_UPGRADE, message)
}

/// Returns true if the allocated bytes of replicas differ enough from the stored value to be stored. The rule
/// lets people see a volume fill, but costs a volume only some hundred writes in all.
#[must_use]
pub fn is_noticeable(stored_bytes: Option<u64>, found_bytes: u64) -> bool {
    let Some(stored_bytes) = stored_bytes else { return found_bytes > 0 };
    let least_bytes = LEAST_CHANGE_BYTES.max(stored_bytes / LEAST_CHANGE_PART);
    stored_bytes.abs_diff(found_bytes) >= least_bytes
}

fn display(spec: &VolumeSpec, status: &VolumeStatus, engine: Option<&Engine>) -> Display {
    let is_served = matches!(status.state, VolumeState::Attached | VolumeState::Detaching);
    let engine = engine.filter(|engine| is_served && engine.status.is_serving());
    let replicas = match engine {
        Some(engine) => {
            let members = engine.status.replica_mode_map.keys().filter(|id| engine.status.has_member(**id));
            format!("{}/{}", members.count(), spec.number_of_replicas)
        }
        None => spec.number_of_replicas.to_string(),
    };
    let wrong = |kind: &ConditionType| status.conditions.get(*kind).filter(|condition| !condition.status);
    let reason = BY_WEIGHT.iter().find_map(wrong).map(|condition| condition.reason.clone());
    Display {
        size: gibibytes(spec.size),
        actual_size: status.actual_size.map(gibibytes).unwrap_or_default(),
        replicas,
        reason: reason.unwrap_or_default(),
    }
}

/// Formats a size like Kubernetes, in Gi, with as many digits as matter.
fn gibibytes(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) {
        return format!("{}Gi", bytes / GIB);
    }
    let hundredths = (u128::from(bytes) * 100).div_ceil(u128::from(GIB));
    match (hundredths / 100, hundredths % 100) {
        (0..=9, _) => format!("{}.{:02}Gi", hundredths / 100, hundredths % 100),
        (whole, rest) => format!("{whole}.{}Gi", rest / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_gi() {
        for (bytes, text) in [
            (10 * GIB, "10Gi"),
            (GIB + GIB / 2, "1.50Gi"),
            (4096, "0.01Gi"),
            (64 << 20, "0.07Gi"),
            (10 * GIB + GIB / 4, "10.2Gi"),
            (16 << 40, "16384Gi"),
            (u64::MAX, "17179869184.0Gi"),
        ] {
            assert_eq!(gibibytes(bytes), text);
        }
    }

    #[test]
    fn a_size_is_stored_if_it_differs_noticeably() {
        let differs = |stored_bytes, found_bytes| is_noticeable(Some(stored_bytes), found_bytes);
        assert!(is_noticeable(None, 4096) && !is_noticeable(None, 0) && !differs(4096, 8192));
        assert!(differs(4096, 4096 + LEAST_CHANGE_BYTES) && differs(GIB, GIB / 2));
        assert!(!differs(1 << 40, (1 << 40) + GIB), "a thousandth of it");
        assert!(differs(1 << 40, (1 << 40) + (1 << 34)));
        let (mut stored, mut writes) = (None, 0);
        for found in (0..16 << 40_u64).step_by(1 << 26) {
            if is_noticeable(stored, found) {
                (stored, writes) = (Some(found), writes + 1);
            }
        }
        assert!(writes < 600, "{writes} writes while the largest volume fills");
    }
}
