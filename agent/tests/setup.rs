//! Tests the command setup in a folder, with a systemctl that only records its calls.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

const PACKAGED: &str = include_str!("../../packaging/agent.toml");

struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    /// Makes a host with the packaged configuration. `systemctl` is the rest of the script.
    fn new(systemctl: &str) -> Host {
        let host = Host { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(host.path("bin")).unwrap();
        let program = host.path("bin/systemctl");
        let calls = host.path("calls");
        fs::write(&program, format!("#!/bin/sh\necho \"$*\" >>{}\n{systemctl}\n", calls.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(host.path("agent.toml"), PACKAGED).unwrap();
        fs::set_permissions(host.path("agent.toml"), fs::Permissions::from_mode(0o640)).unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn setup(&self, arguments: &[&str]) -> Output {
        let search = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-agent"));
        command.arg("setup").arg("--config").arg(self.path("agent.toml"));
        command.args(["--address", "192.0.2.11", "--disk"]).arg(self.path("disks/a"));
        command.args(arguments).env("PATH", search).output().unwrap()
    }

    fn config(&self) -> String {
        fs::read_to_string(self.path("agent.toml")).unwrap()
    }

    /// Returns the calls of systemctl so far.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

const CALLS: [&str; 2] = [
    "stop shorthorn-agent.service",
    "enable --now shorthorn-agent-csi.socket shorthorn-agent-registration.socket shorthorn-agent.service",
];

#[test]
fn a_node_is_set_up_by_one_command_that_can_be_repeated() {
    let host = Host::new("");
    let output = host.setup(&[]);
    let shown = text(&output);
    for step in ["created the directory", "wrote ", "enabled and started"] {
        assert!(shown.contains(step), "{step} is missing: {shown}");
    }
    // The checks of this host end it: their worst finding is the exit code, and 1 a warning.
    assert!(shown.contains("kernel") || shown.contains("all checks") || shown.contains("warned"), "{shown}");
    assert!(host.path("disks/a").is_dir());
    let config = host.config();
    for line in ["data_address = \"192.0.2.11\"", "\"tcp:192.0.2.11:9501\"", "disks/a\"]"] {
        assert!(config.contains(line), "{line}: {config}");
    }
    assert!(config.ends_with(PACKAGED));
    let mode = fs::metadata(host.path("agent.toml")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640, "the mode stays");
    assert_eq!(host.calls(), CALLS);

    let shown = text(&host.setup(&[]));
    assert!(shown.contains("has these settings already") && !shown.contains("created the"), "{shown}");
    assert_eq!(host.config(), config);
    assert_eq!(host.calls(), [CALLS, CALLS].concat());
}

#[test]
fn a_dry_run_changes_nothing() {
    let host = Host::new("");
    let output = host.setup(&["--dry-run", "--controller", "192.0.2.10:9521", "--token", "T"]);
    let shown = text(&output);
    assert!(output.status.success(), "{shown}");
    for step in
        ["would create the directory", "would write", "    listen = [", "join the cluster of 192.0.2.10"]
    {
        assert!(shown.contains(step), "{step} is missing: {shown}");
    }
    // A host that joins by a token has no kubelet.
    assert!(shown.contains("enable and start shorthorn-agent.service"), "{shown}");
    assert!(!host.path("disks").exists() && host.calls().is_empty());
    assert_eq!(host.config(), PACKAGED);
}

#[test]
fn a_changed_configuration_stays() {
    let host = Host::new("");
    let changed = format!("data_address = \"192.0.2.99\"\n{PACKAGED}");
    fs::write(host.path("agent.toml"), &changed).unwrap();
    let output = host.setup(&[]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("data_address is \"192.0.2.99\", not \"192.0.2.11\""), "{shown}");
    assert_eq!(host.config(), changed);
    assert!(!host.path("disks").exists() && host.calls().is_empty());
}

#[test]
fn a_unit_that_does_not_start_is_an_error() {
    let host = Host::new("case $1 in enable) echo 'Job failed' >&2; exit 1;; esac");
    let output = host.setup(&[]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("Job failed") && shown.contains("journalctl"), "{shown}");
}

#[test]
fn a_token_that_is_refused_starts_nothing() {
    let host = Host::new("");
    let output = host.setup(&["--controller", "127.0.0.1:1", "--token", "no-token"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(host.calls().is_empty());
    let output = host.setup(&["--token", "no-token"]);
    assert!(text(&output).contains("--controller"), "{}", text(&output));
}
