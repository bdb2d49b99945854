//! A Kubernetes API server with its etcd, on loopback ports, for one test, and Kubernetes' own controllers of
//! volumes where a test wants them. `tests/apiserver/build` makes the programs, or the variable
//! `SHORTHORN_APISERVER_DIR` names a folder with programs of another version.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use shorthorn_testkit::free_port;

use crate::until;

const BUILD_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/apiserver/build");
/// The environment variable for a folder with other programs: kube-apiserver, kube-controller-manager, and
/// etcd if that of this machine is too old for them.
const PROGRAMS_DIR: &str = "SHORTHORN_APISERVER_DIR";
/// The first minor version of Kubernetes with admission policies in version 1 of their API.
pub const POLICIES_SINCE: u32 = 30;
/// The first minor version without unencrypted ports, and so without flags for them.
const ONLY_SECURE_PORTS_SINCE: u32 = 24;
/// The longest start of the API server, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// The longest that curl waits for an answer, in seconds.
const CURL_LIMIT_S: &str = "20";
/// The namespace of the tests.
pub const NAMESPACE: &str = "shorthorn-system";
/// The user who may do everything.
const ADMIN: &str = "admin";
/// The kubelet of node m1.
const KUBELET: &str = "system:node:m1";
/// The controllers of Kubernetes that deal with volumes.
const VOLUME_CONTROLLERS: [&str; 5] = [
    "persistentvolume-binder",
    "attachdetach",
    "persistentvolume-expander",
    "pvc-protection",
    "pv-protection",
];
/// The service account of the controller, as the API server names it.
pub const CONTROLLER: &str = "system:serviceaccount:shorthorn-system:shorthorn-controller";

/// An API server; killed, with its etcd, when dropped.
#[derive(Debug)]
pub struct ApiServer {
    programs: PathBuf,
    minor: u32,
    dir: PathBuf,
    etcd_port: u16,
    port: u16,
    etcd: Option<Child>,
    server: Option<Child>,
    manager: Option<Child>,
}

/// The result of a call.
#[derive(Debug)]
pub struct ApiResponse {
    /// The status of HTTP.
    pub code: u16,
    /// The object, or why not.
    pub body: Value,
}

impl ApiServer {
    /// Starts one with its files in `dir`, and waits until it is ready.
    ///
    /// # Errors
    /// Its programs cannot be built, or it does not come up.
    pub fn start(dir: &Path) -> Result<ApiServer> {
        let programs = programs()?;
        let minor = minor_version(&programs)?;
        fs::create_dir_all(dir)?;
        let (etcd_port, port) = (free_port()?, free_port()?);
        let mut server = ApiServer {
            programs,
            minor,
            dir: dir.to_owned(),
            etcd_port,
            port,
            etcd: None,
            server: None,
            manager: None,
        };
        server.write_files()?;
        server.start_etcd()?;
        server.start_server()?;
        Ok(server)
    }

    /// Returns the minor version of Kubernetes, like 20 for 1.20.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// True if the API server has admission policies. Such a version has CEL rules in definitions, too.
    #[must_use]
    pub fn has_policies(&self) -> bool {
        self.minor >= POLICIES_SINCE
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn write_files(&self) -> Result<()> {
        let tokens = format!(
            "{ADMIN}-token,{ADMIN},1,system:masters\n{KUBELET}-token,{KUBELET},3,system:nodes\n\
             {CONTROLLER}-token,{CONTROLLER},2,\"system:serviceaccounts,system:serviceaccounts:{NAMESPACE}\"\n\
             "
        );
        fs::write(self.file("tokens.csv"), tokens)?;
        let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
                      - level: Metadata\n";
        fs::write(self.file("audit.yaml"), policy)?;
        let made = Command::new("openssl")
            .args(["genpkey", "-quiet", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out"])
            .arg(self.file("sa.key"))
            .stderr(Stdio::null())
            .status()
            .context("starting openssl")?;
        ensure!(made.success(), "openssl makes no key: {made}");
        Ok(())
    }

    fn start_etcd(&mut self) -> Result<()> {
        let client = format!("http://127.0.0.1:{}", self.etcd_port);
        let peer = format!("http://127.0.0.1:{}", free_port()?);
        let other = self.programs.join("etcd");
        let mut command = Command::new(if other.exists() { other } else { "etcd".into() });
        command.arg("--data-dir").arg(self.file("etcd")).args(["--unsafe-no-fsync", "--log-level", "error"]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        self.etcd = Some(self.spawn(command, "etcd.log")?);
        Ok(())
    }

    /// Starts the API server, after [`ApiServer::kill`] too, and waits until it is ready.
    ///
    /// # Errors
    /// It does not come up; its log is in the message.
    pub fn start_server(&mut self) -> Result<()> {
        let mut command = Command::new(self.programs.join("kube-apiserver"));
        command.arg(format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port));
        command.arg(format!("--secure-port={}", self.port));
        command.args([
            "--bind-address=127.0.0.1",
            // A network namespace may have no default route, by which it would look for an address.
            "--advertise-address=127.0.0.1",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
        ]);
        command.args(["--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none"]);
        // No controller manager makes the tokens that it asks for.
        command.args(["--disable-admission-plugins=ServiceAccount", "--profiling=false"]);
        command.args(["--service-account-issuer=https://kubernetes.default.svc"]);
        for (flag, name) in [
            ("cert-dir", "certs"),
            ("token-auth-file", "tokens.csv"),
            ("service-account-key-file", "sa.key"),
            ("service-account-signing-key-file", "sa.key"),
            ("audit-policy-file", "audit.yaml"),
            ("audit-log-path", "audit.log"),
        ] {
            command.arg(format!("--{flag}={}", self.file(name).display()));
        }
        self.server = Some(self.spawn(command, "apiserver.log")?);
        let ready = until("API server that is ready", LIMIT, || {
            self.ensure_runs()?;
            let answer = self.call("GET", "/readyz", None)?;
            ensure!(answer.code == 200, "{:?}", answer.body);
            Ok(Some(()))
        });
        ready.with_context(|| self.log_tail())
    }

    /// Starts the controllers of Kubernetes for volumes once the API server is ready. They bind claims,
    /// attach and detach volumes, and protect volumes in use from deletion. No other controller runs, so only
    /// the test evicts pods or judges nodes.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_controller_manager(&mut self) -> Result<()> {
        self.start_controllers(&VOLUME_CONTROLLERS)
    }

    /// Starts these controllers of Kubernetes.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_controllers(&mut self, controllers: &[&str]) -> Result<()> {
        let mut command = Command::new(self.programs.join("kube-controller-manager"));
        let kubeconfig = self.kubeconfig_of("manager.kubeconfig", ADMIN)?;
        command.arg("--kubeconfig").arg(kubeconfig);
        command.arg(format!("--controllers={}", controllers.join(",")));
        // No ports: it has no clients. And only one runs.
        command.args(["--secure-port=0", "--leader-elect=false"]);
        if self.minor < ONLY_SECURE_PORTS_SINCE {
            command.arg("--port=0");
        }
        self.manager = Some(self.spawn(command, "manager.log")?);
        Ok(())
    }

    fn ensure_runs(&self) -> Result<()> {
        let pid = self.server.as_ref().map(Child::id).context("the API server was not started")?;
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        ensure!(!state.is_empty() && !state.contains(") Z "), "the API server has ended");
        Ok(())
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.file("apiserver.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(15).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    fn spawn(&self, mut command: Command, log: &str) -> Result<Child> {
        let log = File::options().create(true).append(true).open(self.file(log))?;
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        command.spawn().with_context(|| format!("starting {program}"))
    }

    /// Kills the API server with SIGKILL; its stored objects stay.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut server = self.server.take().context("the API server does not run")?;
        server.kill()?;
        server.wait()?;
        Ok(())
    }

    /// Returns the kubeconfig of the controller's service account.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self) -> Result<PathBuf> {
        self.kubeconfig_of("kubeconfig", CONTROLLER)
    }

    /// Returns the kubeconfig of the administrator.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn admin_kubeconfig(&self) -> Result<PathBuf> {
        self.kubeconfig_of("admin.kubeconfig", ADMIN)
    }

    fn kubeconfig_of(&self, name: &str, user: &str) -> Result<PathBuf> {
        let path = self.file(name);
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters:\n- name: test\n  cluster:\n    server: https://127.0.0.1:{}\n    \
             certificate-authority: {}\n\
             users:\n- name: test\n  user:\n    token: {user}-token\n\
             contexts:\n- name: test\n  context:\n    cluster: test\n    user: test\n",
            self.port,
            self.file("certs/apiserver.crt").display()
        );
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Makes a call as the administrator. PATCH is a merge patch.
    ///
    /// # Errors
    /// The API server does not answer.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<ApiResponse> {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        self.send(ADMIN, method, path, kind, &body.map(Value::to_string).unwrap_or_default())
    }

    /// A call as the kubelet of node m1.
    ///
    /// # Errors
    /// The API server does not answer.
    pub fn call_as_kubelet(&self, method: &str, path: &str, body: Option<&Value>) -> Result<ApiResponse> {
        let body = body.map(Value::to_string).unwrap_or_default();
        self.send(KUBELET, method, path, "application/json", &body)
    }

    /// A call as the service account of the controller.
    ///
    /// # Errors
    /// The API server does not answer.
    pub fn call_as_controller(&self, method: &str, path: &str, body: Option<&Value>) -> Result<ApiResponse> {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        self.send(CONTROLLER, method, path, kind, &body.map(Value::to_string).unwrap_or_default())
    }

    /// Makes the objects of a file with YAML documents. Since 1.25, a field that the API server does not know
    /// is an error.
    ///
    /// # Errors
    /// One is refused, or of a kind that no test has needed yet.
    pub fn apply(&self, documents: &str) -> Result<()> {
        for document in documents.split("\n---\n").filter(|text| text.contains("kind:")) {
            let path = path_of(document)?;
            let path = format!("{path}?fieldValidation=Strict");
            let answer = self.send(ADMIN, "POST", &path, "application/yaml", document)?;
            ensure!((200..300).contains(&answer.code), "POST {path}: {} {}", answer.code, answer.body);
        }
        Ok(())
    }

    fn send(&self, user: &str, method: &str, path: &str, kind: &str, body: &str) -> Result<ApiResponse> {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", CURL_LIMIT_S, "--request", method]);
        command.arg("--cacert").arg(self.file("certs/apiserver.crt"));
        command.args(["--header", &format!("Authorization: Bearer {user}-token")]);
        command.args(["--header", &format!("Content-Type: {kind}"), "--write-out", "\n%{http_code}"]);
        command.args(["--data-binary", "@-"]).arg(format!("https://127.0.0.1:{}{path}", self.port));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting curl")?;
        let mut input = child.stdin.take().context("curl has no input")?;
        input.write_all(body.as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{method} {path}: {}", stderr.trim());
        let text = String::from_utf8(output.stdout)?;
        let (body, code) = text.rsplit_once('\n').context("curl says no status")?;
        let body = serde_json::from_str(body).unwrap_or_else(|_| Value::from(body));
        Ok(ApiResponse { code: code.parse()?, body })
    }

    /// Makes a call that must work.
    ///
    /// # Errors
    /// It is refused.
    pub fn ok(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.call(method, path, body)?;
        if !(200..300).contains(&answer.code) {
            bail!("{method} {path}: {} {}", answer.code, answer.body);
        }
        Ok(answer.body)
    }

    /// Returns the path of our objects of a kind, like `volumes`, or of one of them, like `volumes/a`.
    #[must_use]
    pub fn path(what: &str) -> String {
        format!("/apis/shorthorn.io/v1alpha1/namespaces/{NAMESPACE}/{what}")
    }

    /// Returns an object of any kind, if it is there.
    ///
    /// # Errors
    /// The API server does not answer, or refuses.
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        let answer = self.call("GET", path, None)?;
        match answer.code {
            200 => Ok(Some(answer.body)),
            404 => Ok(None),
            code => bail!("GET {path}: {code} {}", answer.body),
        }
    }

    /// Returns one of Shorthorn's objects, if it exists.
    ///
    /// # Errors
    /// The API server does not answer, or refuses.
    pub fn get(&self, what: &str) -> Result<Option<Value>> {
        self.find(&ApiServer::path(what))
    }

    /// Returns the names of our objects of a kind.
    ///
    /// # Errors
    /// The API server does not answer, or refuses.
    pub fn names(&self, kind: &str) -> Result<Vec<String>> {
        let list = self.ok("GET", &ApiServer::path(kind), None)?;
        let items = list["items"].as_array().context("no list")?;
        Ok(items
            .iter()
            .map(|item| item["metadata"]["name"].as_str().unwrap_or_default().to_owned())
            .collect())
    }

    /// Returns the calls of the controller that the API server has answered so far, as verb and object,
    /// without watches and calls for the lease.
    ///
    /// # Errors
    /// The audit log cannot be read.
    pub fn controller_calls(&self) -> Result<Vec<String>> {
        let log = fs::read_to_string(self.file("audit.log"))?;
        let ours = log.lines().filter(|line| line.contains(CONTROLLER));
        let events = ours.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let calls = events.filter_map(|event| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (verb, object) = (text(&event["verb"]), &event["objectRef"]);
            let resource = text(&object["resource"]);
            let is_ours = event["user"]["username"] == CONTROLLER && verb != "watch" && resource != "leases";
            let part = if object["subresource"].is_null() { "" } else { "/status" };
            is_ours.then(|| format!("{verb} {resource}{part} {}", text(&object["name"])))
        });
        Ok(calls.collect())
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for child in [self.manager.take(), self.server.take(), self.etcd.take()].into_iter().flatten() {
            let mut child = child;
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the folder of the programs; builds them first if need be.
fn programs() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os(PROGRAMS_DIR) {
        return Ok(folder.into());
    }
    let output = Command::new(BUILD_SCRIPT)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {BUILD_SCRIPT}"))?;
    ensure!(output.status.success(), "{BUILD_SCRIPT} failed: its messages are on standard error");
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim_end()))
}

/// Returns the minor version of the API server in a folder.
fn minor_version(programs: &Path) -> Result<u32> {
    let program = programs.join("kube-apiserver");
    let output = Command::new(&program)
        .arg("--version")
        .output()
        .with_context(|| format!("starting {}: does {PROGRAMS_DIR} name its folder?", program.display()))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let minor =
        printed.trim().strip_prefix("Kubernetes v1.").and_then(|rest| rest.split('.').next()?.parse().ok());
    minor.with_context(|| {
        format!("{} --version prints no version of Kubernetes: {printed:?}", program.display())
    })
}

/// Returns the path at which objects of the document's kind are created.
fn path_of(document: &str) -> Result<String> {
    let kind =
        document.lines().find_map(|line| line.strip_prefix("kind: ")).context("a document without a kind")?;
    Ok(match kind.trim() {
        "Namespace" => "/api/v1/namespaces".to_owned(),
        "ServiceAccount" => format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts"),
        "Role" => format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"),
        "RoleBinding" => format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings"),
        "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles".to_owned(),
        "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned(),
        "Deployment" => format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments"),
        "StorageClass" => "/apis/storage.k8s.io/v1/storageclasses".to_owned(),
        "Service" => format!("/api/v1/namespaces/{NAMESPACE}/services"),
        "NetworkPolicy" => format!("/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"),
        "PodDisruptionBudget" => format!("/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"),
        "CSIDriver" => "/apis/storage.k8s.io/v1/csidrivers".to_owned(),
        "CustomResourceDefinition" => "/apis/apiextensions.k8s.io/v1/customresourcedefinitions".to_owned(),
        "ValidatingAdmissionPolicy" => {
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies".to_owned()
        }
        "ValidatingAdmissionPolicyBinding" => {
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings".to_owned()
        }
        other => bail!("the tests make no {other} yet"),
    })
}
