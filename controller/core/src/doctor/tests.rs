use super::*;
use crate::example::{DISK, Example, VERSION, now, status_of_engine};
use crate::objects;
use crate::observed::{EnginePhase, EngineStatus, ObservedEngine};

/// The programs of all remedies.
const COMMANDS: [&str; 7] = ["apt", "ip", "modprobe", "sed", "shorthorn-agent", "shorthornctl", "systemctl"];

fn examine_it(example: &Example) -> Vec<Check> {
    let controller =
        ControllerInfo { version: VERSION, feature_level: 1, limits: SchedulingLimits::default() };
    examine(&example.cluster, &example.agents, controller)
}

/// Returns the only check that has not passed, and its finding.
fn ill(example: &Example) -> (&'static str, CheckOutcome, SetupFinding) {
    let checks = examine_it(example);
    let mut ill = checks.iter().filter(|check| check.outcome() != CheckOutcome::Passed);
    let check = ill.next().expect("something is found");
    assert_eq!(ill.next(), None);
    assert_eq!(check.findings.len(), 1, "{check:?}");
    (check.name, check.outcome(), check.findings[0].clone())
}

fn assert_ill(change: impl FnOnce(&mut Example), name: &str, outcome: CheckOutcome, words: &[&str]) {
    let mut example = Example::new();
    change(&mut example);
    let (found, severity, finding) = ill(&example);
    assert_eq!((found, severity), (name, outcome), "{finding:?}");
    let program = finding.fix.split(' ').next().unwrap_or_default();
    assert!(COMMANDS.contains(&program), "{program:?} begins {:?}", finding.fix);
    let text = format!("{} | {}", finding.message, finding.fix);
    for word in words {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn a_cluster_that_is_well_passes_every_check() {
    for check in examine_it(&Example::new()) {
        assert_eq!(check.outcome(), CheckOutcome::Passed, "{check:?}");
    }
}

#[test]
fn each_check_finds_its_problem_and_names_the_remedy() {
    use CheckOutcome::{Failed, Warned};
    assert_ill(
        |example| example.info("b").version = "0.9.0".to_owned(),
        "agent-versions",
        Warned,
        &["node b is version 0.9.0", "on node b"],
    );
    assert_ill(|example| example.info("b").feature_level = 0, "agent-versions", Warned, &["lacks features"]);
    assert_ill(
        |example| {
            let version = Some("0.9.0".to_owned());
            let status = EngineStatus { version, ..status_of_engine(1, EnginePhase::Serving) };
            example.engine_says(ObservedEngine::of(1, status));
        },
        "engine-versions",
        Warned,
        &["engine of volume v is version 0.9.0", "shorthornctl upgrade engines"],
    );
    assert_ill(
        |example| {
            example.engine_says(ObservedEngine { needs_upgrade: Some(true), ..ObservedEngine::default() });
        },
        "engine-versions",
        Warned,
        &["engine of volume v runs another build", "shorthornctl upgrade engines"],
    );
    assert_ill(
        |example| example.info("c").warnings.push("a Longhorn manager runs here".to_owned()),
        "hosts",
        Warned,
        &["node c: a Longhorn manager"],
    );
    assert_ill(
        |example| {
            let ublk = &mut example.info("a").frontends[0];
            (ublk.usable, ublk.reason) = (false, "no module".to_owned());
        },
        "frontends",
        Warned,
        &["ublk: no module", "modprobe"],
    );
    assert_ill(
        |example| example.info("a").data_address = None,
        "data-addresses",
        Failed,
        &["data_interface"],
    );
    assert_ill(
        |example| example.info("b").data_address = Some("10.0.0.97".to_owned()),
        "data-addresses",
        Warned,
        &["a and b both have"],
    );
}

#[test]
fn each_check_of_disks_finds_its_problem_and_names_the_remedy() {
    use CheckOutcome::{Failed, Warned};
    let disk = |change: fn(&mut crate::observed::ObservedDisk)| {
        move |example: &mut Example| change(example.agent("c").disks.get_mut(DISK).unwrap())
    };
    assert_ill(
        disk(|disk| disk.problem = Some("read-only".to_owned())),
        "disks",
        Failed,
        &["disk drain c /disk"],
    );
    assert_ill(disk(|disk| disk.available_bytes = 5 << 30), "disks", Warned, &["5 % free", "below 10 %"]);
    assert_ill(
        disk(|disk| disk.uuid = Some("disk-of-a".to_owned())),
        "disks",
        Warned,
        &["identity of disk /disk of node a"],
    );
    assert_ill(|example| example.agent("c").disks.clear(), "disks", Warned, &["disk add c"]);
    assert_ill(
        |example| example.node("c").spec.allow_scheduling = false,
        "places",
        Warned,
        &["2 nodes accept replicas", "wants 3"],
    );
}

#[test]
fn volumes_fail_if_they_cannot_serve_and_warn_if_they_serve_with_less() {
    use CheckOutcome::{Failed, Warned};
    for (robustness, outcome) in [(Robustness::Faulted, Failed), (Robustness::Degraded, Warned)] {
        let change = |example: &mut Example| {
            let status = &mut example.volume().status;
            status.robustness = robustness;
            let finding = objects::Finding::wrong("Broken", "it is broken");
            status.conditions.set(ConditionType::Healthy, finding, now());
        };
        assert_ill(change, "volumes", outcome, &["it is broken", "volume why v"]);
    }
}

#[test]
fn a_node_out_of_reach_fails_and_is_judged_by_nothing_else() {
    let change = |example: &mut Example| {
        let finding = objects::Finding::wrong("AgentUnreachable", "no route");
        example.node("b").status.conditions.set(ConditionType::Ready, finding, now());
        example.volume().spec.number_of_replicas = 2;
        example.agent("b").link = crate::observed::AgentLink::Down { since: now(), reason: String::new() };
        example.info("b").version = "0.1.0".to_owned();
    };
    assert_ill(change, "agents", CheckOutcome::Failed, &["node b: no route", "node delete b"]);
}

#[test]
fn findings_are_bounded_and_the_worst_come_first() {
    let finding = |outcome| SetupFinding { outcome, message: "m".to_owned(), fix: String::new() };
    let mut all = vec![finding(CheckOutcome::Warned); 30];
    all.push(finding(CheckOutcome::Failed));
    let bounded = bounded(all);
    assert_eq!((bounded.len(), bounded[0].outcome), (FINDINGS_MAX, CheckOutcome::Failed));
    assert!(bounded[FINDINGS_MAX - 1].message.contains("11 more"));
}
