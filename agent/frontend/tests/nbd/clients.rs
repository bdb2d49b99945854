//! The clients that people use.

use std::io;
use std::path::Path;
use std::process::{Command, Output};

use super::{SIZE, Server};

/// Runs a client to its end and returns its standard output.
fn run(package: &str, program: &str, arguments: &[&str]) -> String {
    let output = match Command::new(program).args(arguments).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            panic!("{program} is missing: install Debian's package {package}")
        }
        other => other.unwrap(),
    };
    let Output { status, stdout, stderr } = output;
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{program} {arguments:?}: {status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

fn random_file(dir: &Path, bytes: u64) -> String {
    let path = dir.join("random");
    let mut source = io::Read::take(std::fs::File::open("/dev/urandom").unwrap(), bytes);
    io::copy(&mut source, &mut std::fs::File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn nbdinfo_shows_the_export() {
    let server = Server::new(1, 64);
    let text = run("libnbd-bin", "nbdinfo", &["--json", "--list", &server.uri()]);
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-name"], "vol-1");
    assert_eq!(export["export-size"], SIZE);
    for (key, value) in [
        ("can_flush", true),
        ("can_fua", true),
        ("can_trim", true),
        ("can_zero", true),
        ("can_multi_conn", true),
        ("can_fast_zero", false),
        ("can_df", false),
        ("is_read_only", false),
    ] {
        assert_eq!(export[key], value, "{key} in {text}");
    }
    assert_eq!(export["block_size_minimum"], 512);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 << 20);
    // The default export is the same one, and no other exists.
    let socket = server.dir.path().join("sock");
    let default =
        run("libnbd-bin", "nbdinfo", &["--size", &format!("nbd+unix://?socket={}", socket.display())]);
    assert_eq!(default.trim(), SIZE.to_string());
    let other = format!("nbd+unix:///other?socket={}", socket.display());
    assert!(!Command::new("nbdinfo").arg(other).output().unwrap().status.success());
    server.stop();
}

#[test]
fn nbdcopy_copies_in_and_out() {
    let server = Server::new(2, 32);
    let source = random_file(server.dir.path(), SIZE);
    let back = server.dir.path().join("back");
    run("libnbd-bin", "nbdcopy", &["--flush", "--request-size=33554432", &source, &server.uri()]);
    run("libnbd-bin", "nbdcopy", &[&server.uri(), back.to_str().unwrap()]);
    run("diffutils", "cmp", &[&source, back.to_str().unwrap()]);
    assert!(server.volume.flushes() > 0);
    server.stop();
}

#[test]
fn qemu_reads_writes_discards_and_compares() {
    let server = Server::new(2, 32);
    let io = |command: &str| {
        let text = run("qemu-utils", "qemu-io", &["-f", "raw", "-d", "unmap", "-c", command, &server.uri()]);
        assert!(!text.contains("failed"), "{command}: {text}");
    };
    io("write -P 7 0 40M");
    io("write -P 8 -f 512 5120");
    io("read -P 7 5632 30M");
    io("write -z -u 1M 2M");
    io("read -P 0 1M 2M");
    io("discard 8M 4M");
    io("read -P 0 8M 4M");
    io("flush");
    let source = random_file(server.dir.path(), 64 << 20);
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &source, &server.uri()];
    run("qemu-utils", "qemu-img", &convert);
    let compare = ["compare", "-f", "raw", "-F", "raw", &source, &server.uri()];
    run("qemu-utils", "qemu-img", &compare);
    server.stop();
}

#[test]
fn fio_verifies_with_many_jobs() {
    let server = Server::new(2, 16);
    let uri = format!("--uri={}", server.uri());
    run(
        "fio",
        "fio",
        &[
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bssplit=512/20:4k/50:64k/20:1m/10",
            "--iodepth=32",
            "--verify=crc32c",
            "--size=32m",
            "--offset_increment=32m",
            "--numjobs=4",
            "--name=verify",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--allow_file_create=0",
        ],
    );
    server.stop();
}
