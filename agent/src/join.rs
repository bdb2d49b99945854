//! `shorthorn-agent join`: the first certificate of a node that has no kubelet.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use shorthorn_api::v1;
use shorthorn_api::v1::controller_tls_client::ControllerTlsClient;
use shorthorn_pki::{CertificateDer, Connector, JoinToken, Pin, PrivateKey, Role, Trust};
use tonic::transport::Endpoint;

use crate::cli::JoinArgs;
use crate::enrol::{EnrolmentAnswer, accept, file_in};
use crate::serve::config::Config;
use crate::serve::tls::{now, trust};

/// The longest that the controller may take. It signs at once, but its store may wait for a disk.
const LIMIT: Duration = Duration::from_secs(30);
const TOKEN_MAX_BYTES: u64 = 4096;
/// In `tls_dir`: the key of a call whose answer was not stored. The controller accepts a second use of the
/// token with the same key only.
const KEY_FILE: &str = "join.key";

/// Gets a certificate with a token. Returns a sentence about it.
pub fn join(args: &JoinArgs) -> anyhow::Result<String> {
    let config = Config::load(args.config.as_deref())?;
    let token: JoinToken = token_of(&args.token)?.parse()?;
    let node = Role::Node(config.node_name.clone());
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&config.tls_dir);
    made.with_context(|| config.tls_dir.display().to_string())?;
    let file = file_in(&config.tls_dir);
    let known = shorthorn_pki::load(&file)?.map(|bundle| bundle.trust);
    let (key, key_file) = key_in(&config.tls_dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let enrolled = enrol(&token, &args.controller, config.node_name.as_str(), &key);
    let certificates = runtime.block_on(async { tokio::time::timeout(LIMIT, enrolled).await });
    let certificates = certificates
        .with_context(|| format!("{} does not answer within {} s", args.controller, LIMIT.as_secs()))??;
    let list = certificates.trust.context("the controller has sent no list of certificate authorities")?;
    let trust = trust(list)?;
    check_pin(&trust, token.pin())?;
    let chain = certificates.chain.into_iter().map(CertificateDer::from).collect();
    let answer = EnrolmentAnswer { chain, trust: Some(trust) };
    let bundle = accept(&file, known.as_ref(), &node, &key, answer, now())?;
    shorthorn_pki::store(&file, &bundle)?;
    fs::remove_file(&key_file).with_context(|| key_file.display().to_string())?;
    let cluster = bundle.trust.cluster();
    Ok(format!(
        "node {} has joined cluster {cluster}: {} has its certificate",
        config.node_name,
        file.display()
    ))
}

fn check_pin(trust: &Trust, pin: Pin) -> anyhow::Result<()> {
    let is_there = trust.pins().contains(&pin);
    ensure!(is_there, "the controller's certificate authorities do not include the one of the token, {pin}");
    Ok(())
}

async fn enrol(
    token: &JoinToken,
    controller: &str,
    node_name: &str,
    key: &PrivateKey,
) -> anyhow::Result<v1::Certificates> {
    let endpoint = Endpoint::from_shared(format!("http://{controller}"))
        .with_context(|| format!("{controller:?} is not HOST:PORT"))?;
    let connector = Connector::pinned(token.pin())?;
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.map_err(|error| anyhow::anyhow!("{}", causes(&error)))?;
    let request = v1::EnrollRequest {
        token: token.reveal(),
        node_name: node_name.to_owned(),
        csr: key.request(node_name)?,
    };
    match ControllerTlsClient::new(channel).enroll(request).await {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) => bail!("the controller at {controller} refuses: {}", status.message()),
    }
}

/// An error with its causes: tonic's own text says little.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = cause.source();
    }
    text
}

/// The token of the argument: itself, or the content of a file.
pub fn token_of(argument: &str) -> anyhow::Result<String> {
    let Some(path) = argument.strip_prefix('@') else { return Ok(argument.trim().to_owned()) };
    let mut text = String::new();
    let read = if path == "-" {
        io::stdin().lock().take(TOKEN_MAX_BYTES).read_to_string(&mut text)
    } else {
        fs::File::open(path).and_then(|file| file.take(TOKEN_MAX_BYTES).read_to_string(&mut text))
    };
    read.with_context(|| format!("the token in {path}"))?;
    Ok(text.trim().to_owned())
}

/// The key of an earlier call, or a new one.
fn key_in(dir: &Path) -> anyhow::Result<(PrivateKey, PathBuf)> {
    let path = dir.join(KEY_FILE);
    match fs::read(&path) {
        Ok(der) => {
            if let Ok(key) = PrivateKey::from_pkcs8(&der) {
                return Ok((key, path));
            }
            // It was being written when the command was killed: no call was made with it.
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).context(path.display().to_string()),
    }
    let key = PrivateKey::generate()?;
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let written = made.and_then(|mut file| {
        file.write_all(key.to_pkcs8())?;
        file.sync_all()?;
        fs::File::open(dir)?.sync_all()
    });
    written.with_context(|| path.display().to_string())?;
    Ok((key, path))
}
