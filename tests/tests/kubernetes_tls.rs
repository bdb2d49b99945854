//! Certificates by a real Kubernetes API server. The kubelet of a node gets one for its node only, and a lost
//! CA is not replaced. The controller is signed in with the roles of packaging/deploy.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_pki::{Certificate, PrivateKey, Role, SIGNER_NAME, chain_from_pem, request_to_pem};
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::{binary, install, until};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// A controller; killed when dropped.
struct Controller(Child);

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(api: &ApiServer, folder: &Path) -> Result<Command> {
    let mut command = Command::new(binary("shorthorn-controller")?);
    command.args(["serve", "--kubernetes", "--kubeconfig"]).arg(api.kubeconfig()?);
    command.arg("--listen").arg(format!("unix://{}", folder.join("controller.sock").display()));
    command.args(["--metrics-listen", "off"]).stdin(Stdio::null());
    Ok(command)
}

/// The output of base64 with these arguments.
fn base64(arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
    let mut command = Command::new("base64");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("starting base64")?;
    child.stdin.take().context("base64 has no input")?.write_all(input)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "base64: {}", output.status);
    Ok(output.stdout)
}

/// Makes a request as the kubelet of node m1 does for an agent.
fn ask(api: &ApiServer, name: &str, node: &str, key: &PrivateKey) -> Result<()> {
    let pem = request_to_pem(&key.request(node)?);
    let request = String::from_utf8(base64(&["-w0"], pem.as_bytes())?)?;
    let body = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": { "name": name },
        "spec": {
            "request": request,
            "signerName": SIGNER_NAME,
            "usages": ["digital signature", "server auth"],
        },
    });
    let answer = api.call_as_kubelet("POST", REQUESTS, Some(&body))?;
    ensure!(answer.code == 201, "{answer:?}");
    Ok(())
}

fn until_request(api: &ApiServer, name: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    until("request that is decided", LIMIT, || {
        let request = api.ok("GET", &format!("{REQUESTS}/{name}"), None)?;
        ensure!(is_so(&request["status"]), "{request:#}");
        Ok(Some(request))
    })
}

#[test]
fn a_kubelet_gets_a_certificate_for_its_node_and_a_lost_ca_is_not_replaced() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let api = ApiServer::start(&folder.path().join("api"))?;
    install(&api)?;
    let controller = Controller(command(&api, folder.path())?.spawn()?);
    let key = PrivateKey::generate()?;
    ask(&api, "good", "m1", &key)?;
    ask(&api, "other", "m2", &key)?;
    let signed = until_request(&api, "good", |status| status["certificate"].is_string())?;
    let certificate = signed["status"]["certificate"].as_str().unwrap_or_default();
    let chain = chain_from_pem(&base64(&["-d"], certificate.as_bytes())?)?;
    ensure!(chain.len() == 2, "certificate and CA, not {}", chain.len());
    let found = Certificate::from_der(&chain[0])?;
    ensure!(found.name.role == Role::node("m1")? && found.public == key.public(), "{found:?}");
    let denied = until_request(&api, "other", |status| status["conditions"][0]["type"] == "Denied")?;
    ensure!(denied["status"]["certificate"].is_null(), "{denied:#}");
    let message = denied["status"]["conditions"][0]["message"].as_str().unwrap_or_default();
    ensure!(message.contains("names \"m2\""), "{message}");

    let path = format!("/api/v1/namespaces/{NAMESPACE}/secrets/shorthorn-ca");
    api.ok("DELETE", &path, None)?;
    let kept = api.find(&path)?.context("nothing keeps the Secret")?;
    ensure!(kept["metadata"]["deletionTimestamp"].is_string(), "{kept:#}");
    drop(controller);
    api.ok("PATCH", &path, Some(&json!({ "metadata": { "finalizers": null } })))?;
    ensure!(api.find(&path)?.is_none(), "the Secret stays");
    // The lease of the controller before has to end first.
    let output = command(&api, folder.path())?.output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && text.contains("Secret shorthorn-ca is lost"), "{text}");
    ensure!(api.find(&path)?.is_none(), "another CA is made");
    Ok(())
}
