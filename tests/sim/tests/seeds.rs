//! Runs the simulation over many seeds, and checks that it notices when a rule is left out.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

/// The first of some seeds that meet every event of the simulation, also the rare ones.
const FIRST_SEED: &str = "8000";
const SEEDS: u64 = 1200;
/// The duration of running new seeds.
const FRESH_SECONDS: u64 = 60;

/// A sabotage has to be noticed within as many seeds. The rarest one is noticed in one of some hundred.
const SABOTAGE_SEEDS: u64 = 4000;
const SABOTAGES: [&str; 40] = [
    "no-second-attempt",
    "holes-show-through",
    "stale-sectors",
    "holes-unkept",
    "unread-is-final",
    "refusals-believed",
    "merged-forgotten",
    "others-unread",
    "lost-unreported",
    "holes-unseen",
    "early-forgetting",
    "repairs-cure",
    "repairs-end-sums",
    "reports-repair",
    "scrubs-go-on",
    "repairs-uncover",
    "reports-forgotten",
    "merges-unrecorded",
    "unread-pages",
    "untracked-rot",
    "forgotten-rot",
    "no-intent",
    "lying-flush",
    "serve-before-fenced",
    "no-resync",
    "not-paused",
    "rebuilding-skipped",
    "clear-without-flush",
    "pauses-unnoticed",
    "no-range-table",
    "no-give-back",
    "old-proposals",
    "no-stamps",
    "end-unrecorded",
    "no-offenders",
    "first-source",
    "unchecked-lists",
    "unchecked-layers",
    "unchecked-sources",
    "sums-before-look",
];

fn simulate(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_shorthorn-sim");
    Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn nothing_is_lost_whatever_breaks() {
    let count = SEEDS.to_string();
    let output = simulate(&["--seed", FIRST_SEED, "--count", &count, "--jobs", "0", "--assert-coverage"]);
    println!("{}", text(&output));
    assert!(output.status.success(), "{}", text(&output));
}

/// Returns a number that differs for every commit; without git, for every second.
fn base_of_this_commit() -> u64 {
    let head =
        Command::new("git").args(["rev-parse", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let hash = head.ok().filter(|head| head.status.success()).and_then(|head| {
        let digits: String = text(&head).chars().take(11).collect();
        u64::from_str_radix(&digits, 16).ok()
    });
    hash.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() << 20)
    })
}

#[test]
fn nothing_is_lost_in_seeds_that_are_new() {
    let (base, seconds) = (base_of_this_commit().to_string(), FRESH_SECONDS.to_string());
    let output = simulate(&["--seed", &base, "--seconds", &seconds, "--jobs", "0"]);
    println!("from seed {base} on: {}", text(&output));
    assert!(output.status.success(), "from seed {base} on: {}", text(&output));
}

#[test]
fn scripts_that_failed_once_pass() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept");
    let mut kept: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| path.display().to_string())
        .collect();
    kept.sort();
    assert!(!kept.is_empty());
    let arguments: Vec<&str> =
        ["--shrink-runs", "0", "--script"].into_iter().chain(kept.iter().map(String::as_str)).collect();
    let output = simulate(&arguments);
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_seed_and_its_script_replay_the_same_way() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, simulate(&["--seed", "11", "--print"]).stdout).unwrap();
    let path = file.path().display().to_string();
    let strip = |output: &Output| {
        text(output).lines().filter(|line| !line.contains(" s; ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let first = strip(&simulate(&["--seed", "11", "--trace"]));
    assert!(first.len() > 20, "{first:?}");
    assert_eq!(first, strip(&simulate(&["--seed", "11", "--trace"])));
    assert_eq!(first, strip(&simulate(&["--script", &path, "--trace"])));
}

#[test]
fn a_failure_is_shrunk_to_a_script_that_fails() {
    let sabotage = ["--sabotage", "no-resync", "--failures", "1"];
    let output = simulate(&[&["--count", "300", "--shrink-runs", "100"], &sabotage[..]].concat());
    let shrunk = text(&output);
    let script = shrunk.lines().find(|line| line.starts_with('{')).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, script).unwrap();
    let path = file.path().display().to_string();
    let again = simulate(&[&["--shrink-runs", "0", "--script", &path], &sabotage[..]].concat());
    assert!(!again.status.success(), "{shrunk}");
    assert!(script.matches("at_us").count() < 12, "{shrunk}");
}

/// Seeds meet these too seldom.
fn script_for(sabotage: &str) -> Option<&'static str> {
    match sabotage {
        "unchecked-layers" => Some("rot-in-a-snapshot"),
        "others-unread" | "lost-unreported" => Some("a-block-that-all-have-lost"),
        "refusals-believed" => Some("a-member-that-refuses-a-block"),
        "merged-forgotten" => Some("a-lost-block-that-is-merged"),
        "early-forgetting" => Some("known-rot-and-no-space"),
        "unread-is-final" => Some("blocks-that-no-member-alone-can-read"),
        "merges-unrecorded" => Some("a-merged-block-and-another-program"),
        "repairs-uncover" => Some("zeroes-over-blocks-that-vanish"),
        "reports-forgotten" => Some("rot-without-space-under-a-scrub"),
        "unread-pages" => Some("a-page-of-sums-that-is-not-in-memory"),
        "holes-unseen" => Some("blocks-that-vanish"),
        "pauses-unnoticed" => Some("an-engine-that-is-isolated-and-paused"),
        "holes-unkept" => Some("a-repair-without-space"),
        _ => None,
    }
}

#[test]
fn a_rule_that_is_left_out_is_noticed() {
    let count = SABOTAGE_SEEDS.to_string();
    let seeds = ["--count", &count, "--jobs", "0", "--failures", "1"];
    for sabotage in SABOTAGES {
        let script =
            script_for(sabotage).map(|name| format!("{}/kept/{name}.json", env!("CARGO_MANIFEST_DIR")));
        let run = script.as_ref().map(|script| vec!["--script", script]).unwrap_or_else(|| seeds.to_vec());
        let output = simulate(&[&run[..], &["--shrink-runs", "0", "--sabotage", sabotage]].concat());
        // A sabotage that the program does not know fails too.
        let is_noticed = !output.status.success() && text(&output).contains(" failed, ");
        assert!(is_noticed, "the checker did not notice {sabotage}: {}", text(&output));
    }
}
