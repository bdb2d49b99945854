//! The real controller and the real shorthornctl around agents in memory.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shorthorn_testkit::binary;
use shorthorn_testkit::metrics::own_address;
use shorthorn_testkit::waiting::wait_for_async;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::agent::{FakeAgent, Truth};

/// No single step of a test takes longer, on the busiest machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Nodes a, b, … with a controller.
pub struct Cluster {
    pub directory: tempfile::TempDir,
    pub agents: Vec<FakeAgent>,
    pub truth: Arc<Mutex<Truth>>,
    /// The address of the controller's metrics and health.
    pub metrics: SocketAddr,
    /// The address of its API for a port-forward.
    pub forward: SocketAddr,
    serving: Vec<JoinHandle<()>>,
    controller: Option<Child>,
    /// The time that the controller waits for a replica before it replaces it; takes effect at its next
    /// start.
    pub replace_after_s: u64,
    /// True if volumes may be created with fewer replicas than requested; most tests expect the refusal.
    pub degraded_creation: bool,
}

impl Cluster {
    /// Agents with one disk each, and a controller that is ready.
    pub async fn start(nodes: &[&str]) -> Cluster {
        let truth = Arc::default();
        let mut cluster = Cluster {
            directory: tempfile::tempdir().unwrap(),
            agents: nodes.iter().map(|name| FakeAgent::new(name, Arc::clone(&truth))).collect(),
            truth,
            metrics: own_address(),
            forward: own_address(),
            serving: Vec::new(),
            controller: None,
            replace_after_s: 600,
            degraded_creation: false,
        };
        for agent in &cluster.agents {
            cluster.serving.push(agent.serve(&cluster.path(&agent.name)));
        }
        cluster.start_controller().await;
        for node in nodes {
            cluster.retry(&["disk", "add", node, "/var/lib/longhorn"]).await;
        }
        cluster
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn server(&self) -> String {
        format!("unix://{}", self.path("controller.sock").display())
    }

    pub fn controller_command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
        command.arg("serve").arg("--store").arg(self.path("store.redb")).args(["--listen", &self.server()]);
        for agent in &self.agents {
            let url = format!("{}=unix://{}", agent.name, self.path(&agent.name).display());
            command.args(["--node", &url]);
        }
        command.args(["--forward-listen", &self.forward.to_string()]);
        command.args(["--csi-listen", &format!("unix://{}", self.path("csi.sock").display())]);
        command.args(["--replica-replace-after-s", &self.replace_after_s.to_string()]);
        let degraded = self.degraded_creation.to_string();
        command.args(["--allow-volume-creation-with-degraded-availability", &degraded]);
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Starts the controller and waits until it says that it is ready, as systemd does.
    pub async fn start_controller(&mut self) {
        let notify = self.path("notify.sock");
        let _ = std::fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify).unwrap();
        let mut command = self.controller_command();
        command.args(["--metrics-listen", &self.metrics.to_string()]);
        let child = command.env("NOTIFY_SOCKET", &notify).spawn().unwrap();
        self.controller = Some(child);
        let mut buffer = [0; 64];
        let length = timeout(LIMIT, socket.recv(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer[..length], b"READY=1\n");
    }

    /// Kills the controller with SIGKILL.
    pub async fn kill_controller(&mut self) {
        let mut child = self.controller.take().unwrap();
        child.kill().await.unwrap();
    }

    /// Stops the controller with SIGTERM; it must end well.
    pub async fn stop_controller(&mut self) {
        let mut child = self.controller.take().unwrap();
        let pid = child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
        let status = timeout(LIMIT, child.wait()).await.unwrap().unwrap();
        assert!(status.success(), "{status}");
    }

    /// Stops the agent of `node`; everything else on the node continues.
    pub fn stop_agent(&mut self, node: usize) {
        self.serving[node].abort();
        self.agents[node].hang_up();
        let _ = std::fs::remove_file(self.path(&self.agents[node].name));
    }

    pub fn start_agent(&mut self, node: usize) {
        self.serving[node] = self.agents[node].serve(&self.path(&self.agents[node].name));
    }

    pub fn ctl(&self, words: &[&str]) -> Command {
        let mut command = Command::new(binary("shorthornctl").unwrap());
        command.env("SHORTHORN_SERVER", self.server()).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    pub async fn run(&self, words: &[&str]) -> Output {
        timeout(LIMIT * 2, self.ctl(words).output()).await.unwrap().unwrap()
    }

    /// Returns the standard output of a command that must work.
    pub async fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words).await;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {error}");
        assert!(error.is_empty(), "{words:?} succeeded and says: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns exit code and standard error of a command that must fail.
    pub async fn fails(&self, words: &[&str]) -> (i32, String) {
        let output = self.run(words).await;
        assert!(!output.status.success(), "{words:?} should fail");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// Tries until it works.
    pub async fn retry(&self, words: &[&str]) {
        wait_for_async(&format!("{words:?} succeeds"), LIMIT, async || {
            let output = self.run(words).await;
            let error = || String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() { Ok(()) } else { Err(error()) }
        })
        .await;
    }

    pub async fn inspect(&self, volume: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&["volume", "inspect", volume, "-o", "json"]).await).unwrap()
    }

    /// Waits until the volume looks like that.
    pub async fn until(
        &self,
        volume: &str,
        what: &str,
        seen: impl Fn(&serde_json::Value) -> bool,
    ) -> serde_json::Value {
        wait_for_async(what, LIMIT, async || {
            let shown = self.inspect(volume).await;
            if seen(&shown) { Ok(shown) } else { Err(shown) }
        })
        .await
    }

    /// Waits until nothing runs on any node: replicas stop in the background.
    pub async fn until_stopped(&self) {
        wait_for_async("all instances are stopped", LIMIT, async || {
            let running: Vec<String> = self.agents.iter().flat_map(|agent| agent.running()).collect();
            if running.is_empty() { Ok(()) } else { Err(running) }
        })
        .await;
    }

    /// Fails if a forbidden event has happened.
    pub fn check(&self) {
        let truth = self.truth.lock().unwrap();
        assert!(truth.violations.is_empty(), "{:#?}", truth.violations);
    }
}
