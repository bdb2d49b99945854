//! Tests the command check on this host.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::fs;
use std::process::{Command, Output};

fn check(config: &str, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("agent.toml");
    fs::write(&file, config.replace("DIR", folder.path().to_str().unwrap())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-agent"));
    command.arg("check").arg("--config").arg(&file).args(arguments);
    command.output().unwrap()
}

const CONFIG: &str = "node_name = \"n1\"\nstate_dir = \"DIR/s\"\nlisten = [\"unix:DIR/sock\"]\n\
     metrics_listen = \"off\"\ncsi = \"off\"\n";

#[test]
fn the_exit_code_is_that_of_the_worst_finding() {
    let missing = format!("{CONFIG}disks = [\"DIR/missing\"]\n");
    let output = check(&missing, &["--output", "json"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = findings.as_array().unwrap();
    let disk = findings.iter().find(|finding| finding["check"] == "disks").unwrap();
    assert_eq!(disk["level"], "failed");
    assert!(disk["message"].as_str().unwrap().contains("no such directory"), "{disk}");
    assert!(!disk["remedy"].as_str().unwrap().is_empty());
    assert!(findings.iter().any(|finding| finding["check"] == "kernel"), "{findings:?}");
}

#[test]
fn a_wrong_configuration_is_a_finding() {
    let output = check("colour = 1\n", &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.starts_with("failed  config") && text.contains("colour"), "{text}");
}

#[test]
fn a_host_that_cannot_be_checked_is_a_finding() {
    // The agent's folder cannot be read, as by a user other than root.
    let output = check(&CONFIG.replace("DIR/s\"", "DIR/agent.toml\""), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("failed  host") && text.contains("as root"), "{text}");
    assert!(!text.contains("another program"), "{text}");
}

#[test]
fn a_port_that_another_program_has_is_found() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let config = format!("{CONFIG}\n").replace("\"off\"\ncsi", &format!("\"{address}\"\ncsi"));
    let output = check(&config, &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("another program listens on {address}")), "{text}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_check_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("s");
    let config = CONFIG.replace("DIR/s\"", &format!("{}\"", state.display()));
    check(&config, &[]);
    assert!(!state.exists());
}

/// A file system whose server never answers, like NFS without its server.
struct DeadFileSystem {
    point: std::path::PathBuf,
    _server: fs::File,
}

impl DeadFileSystem {
    fn mount(point: &std::path::Path) -> DeadFileSystem {
        use std::os::fd::AsRawFd;
        fs::create_dir(point).unwrap();
        let server = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("dead"), point, Some("fuse"), flags, Some(options.as_str())).unwrap();
        DeadFileSystem { point: point.to_owned(), _server: server }
    }
}

impl Drop for DeadFileSystem {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.point, nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_dead_file_system_is_a_finding_and_delays_no_other() {
    assert!(nix::unistd::geteuid().is_root(), "a mount needs root");
    let folder = tempfile::tempdir().unwrap();
    let (dead, missing) = (folder.path().join("dead"), folder.path().join("missing"));
    let _mounted = DeadFileSystem::mount(&dead);
    let disks = format!("{CONFIG}disks = [\"{}\", \"{}\"]\n", dead.display(), missing.display());
    let begin = std::time::Instant::now();
    let output = check(&disks, &["--output", "json"]);
    assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{:?}", begin.elapsed());
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let messages: Vec<&str> =
        findings.as_array().unwrap().iter().filter_map(|finding| finding["message"].as_str()).collect();
    let of = |path: &std::path::Path, text: &str| {
        let path = path.display().to_string();
        messages.iter().any(|message| message.contains(&path) && message.contains(text))
    };
    assert!(of(&dead, "does not answer"), "{messages:?}");
    assert!(of(&missing, "no such directory"), "{messages:?}");
}
