//! Engines and replicas start from the spec files of an earlier release, as after an update under attached
//! volumes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use common::{AgentProcess, LIMIT, agent};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use shorthorn_testkit::nbd::Nbd;
use shorthorn_testkit::waiting::wait_for;
use tempfile::TempDir;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/control/tests/releases/0.1.0");
/// The replicas in these files.
const REPLICAS: [&str; 2] = ["rq81b6uw", "mm7fsbka"];

/// Returns a file as the release has written it.
fn written(file: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(Path::new(FOLDER).join(file)).unwrap()).unwrap()
}

/// A host with paths of its own. Everything else in the files is as the release has written it.
struct Host(TempDir);

impl Host {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn store(&self, name: &str, spec: &Value) -> PathBuf {
        let file = self.path(name);
        fs::write(&file, spec.to_string()).unwrap();
        file
    }

    /// Starts a replica. The release has written `create` at the first start, and not after it.
    fn replica(&self, id: &str, create: bool) -> AgentProcess {
        let mut spec = written("replica.json");
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        for (key, value) in [
            ("replica", json!(id)),
            ("directory", json!(self.path(&format!("v1-{id}")))),
            ("create", json!(create)),
            ("data_socket", json!(self.path(&format!("{id}.data")))),
            ("data_address", json!(format!("127.0.0.1:{port}"))),
            ("control_socket", json!(self.path(&format!("{id}.control")))),
        ] {
            assert!(!spec[key].is_null(), "the release has no {key}");
            spec[key] = value;
        }
        let file = self.store(&format!("{id}.json"), &spec);
        AgentProcess::start(agent().args(["replica", "serve", "--spec"]).arg(file))
    }

    fn engine(&self, attach: u64) -> AgentProcess {
        let mut spec = written("engine.json");
        let address = |id: &str| json!([format!("unix:{}", self.path(&format!("{id}.data")).display())]);
        for replica in spec["replicas"].as_array_mut().unwrap() {
            replica["addresses"] = address(replica["replica"].as_str().unwrap());
        }
        for (key, value) in [
            ("attach", json!(attach)),
            ("state_file", json!(self.path("engine.state"))),
            ("control_socket", json!(self.path("engine.control"))),
            ("frontend_socket", json!(self.path("nbd"))),
            ("device_dir", json!(self.path("dev"))),
        ] {
            assert!(!spec[key].is_null(), "the release has no {key}");
            spec[key] = value;
        }
        AgentProcess::start(agent().args(["engine", "--spec"]).arg(self.store("engine.json", &spec)))
    }

    fn client(&self) -> Nbd {
        wait_for("engine that serves", LIMIT, || Nbd::connect(&self.path("nbd"), "v1"))
    }
}

fn end(process: &mut AgentProcess) {
    process.signal(Signal::SIGTERM);
    assert!(process.ended().success(), "{}", process.log_so_far());
}

#[test]
fn engines_and_replicas_start_from_the_specs_of_an_earlier_release() {
    let host = Host(TempDir::new().unwrap());
    let attach = written("engine.json")["attach"].as_u64().unwrap();
    let data = vec![7; 64 << 10];
    let mut replicas = REPLICAS.map(|id| host.replica(id, true));
    let mut engine = host.engine(attach);
    let mut client = host.client();
    client.write(0, &data).unwrap();
    client.flush().unwrap();
    drop(client);
    end(&mut engine);
    replicas.iter_mut().for_each(end);
    // The next start finds the directories.
    let _replicas = REPLICAS.map(|id| host.replica(id, false));
    let _engine = host.engine(attach + 1);
    assert_eq!(host.client().read(0, data.len()).unwrap(), data);
}
