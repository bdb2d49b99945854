//! The cluster as a whole.

use shorthorn_api::v1;
use shorthorn_controller_core::doctor::{self, Check, ControllerInfo};
use shorthorn_controller_core::overview::{Issues, Overview};

use super::server::Api;

/// The version of this controller.
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Api {
    pub(super) fn overview(&self) -> v1::Overview {
        let found = Overview::of(&self.store.state(), &self.fleet.agents(), VERSION);
        let version = |found: shorthorn_controller_core::overview::Version| v1::ProgramVersion {
            program: found.program.to_owned(),
            version: found.version,
            count: found.count,
            names: found.names,
            differs: found.differs,
        };
        v1::Overview {
            version: VERSION.to_owned(),
            cluster: self.store.cluster().to_owned(),
            volumes: found.volumes.all,
            attached: found.volumes.attached,
            healthy: found.volumes.healthy,
            degraded: found.volumes.degraded,
            faulted: found.volumes.faulted,
            nodes: found.nodes,
            ready_nodes: found.ready_nodes,
            closed_nodes: found.closed_nodes,
            total_bytes: found.space.total_bytes,
            available_bytes: found.space.available_bytes,
            scheduled_bytes: found.space.scheduled_bytes,
            wrong: Some(issues(found.wrong)),
            waiting: Some(issues(found.waiting)),
            versions: found.versions.into_iter().map(version).collect(),
        }
    }

    pub(super) fn examine(&self) -> v1::Examination {
        let controller = ControllerInfo {
            version: VERSION,
            feature_level: shorthorn_api::level::NEWEST,
            limits: self.settings.scheduling,
        };
        let checks = doctor::examine(&self.store.state(), &self.fleet.agents(), controller);
        v1::Examination { checks: checks.into_iter().map(check).collect() }
    }
}

fn issues(issues: Issues) -> v1::Matters {
    let listed = issues.listed.into_iter().map(|issue| v1::Matter {
        about: issue.about,
        reason: issue.reason,
        message: issue.message,
    });
    v1::Matters { listed: listed.collect(), more: issues.more }
}

fn check(check: Check) -> v1::Check {
    let outcome = check.outcome();
    let findings = check.findings.into_iter().map(|finding| {
        let (message, fix) = (finding.message, finding.fix);
        v1::CheckFinding { message, fix, ..v1::CheckFinding::default() }.with_outcome(finding.outcome)
    });
    v1::Check {
        name: check.name.to_owned(),
        title: check.title.to_owned(),
        findings: findings.collect(),
        ..v1::Check::default()
    }
    .with_outcome(outcome)
}
