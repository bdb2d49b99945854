//! TLS of the node API: the certificate in use, addresses that are served by TLS, and renewal by the
//! controller.
//!
//! A node without a certificate serves no address by TLS. The certificate changes while the agent runs: when
//! the node enrols, when the controller renews it, and when `shorthorn-agent join` has replaced the file.

mod check;
mod enrolment;
mod incoming;
mod service;

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use shorthorn_pki::{
    Bundle, BundleError, BundleFileError, CertificateDer, Credentials, PrivateKey, Role, Trust, TrustError,
    UnixTime,
};
use shorthorn_types::NodeName;
use thiserror::Error;
use tokio::sync::watch;

use crate::enrol::{self, AnswerError, EnrolmentAnswer};

pub use check::check;
pub use enrolment::keep_enrolled;
pub use incoming::{TlsIncoming, bind};
pub use service::{TlsService, trust};

/// The node cannot use a certificate or a list of CAs.
#[derive(Debug, Error)]
pub enum NodeCertificateError {
    /// The certificate does not fit this node.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// The file cannot be read or written.
    #[error(transparent)]
    Store(#[from] BundleFileError),
    /// Key, certificate and CAs do not belong together.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The list of CAs cannot be used.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The directory cannot be made.
    #[error("{}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The file has a certificate of another node.
    #[error(
        "{} has a certificate for {found}, and this node is {expected}: check node_name, or remove the file \
         and enrol this node", path.display()
    )]
    OtherNode {
        /// Path of the file with the certificate.
        path: PathBuf,
        found: Role,
        expected: Role,
    },
    /// The file has only CAs.
    #[error("{} has no certificate: remove the file and enrol this node", .0.display())]
    NoCertificate(PathBuf),
    /// A certificate without a key.
    #[error("this agent has not made a key for that certificate: call CreateCertificateRequest first")]
    NoKey,
    /// The file remembers CAs that cannot be read.
    #[error("{0}; repair or remove the file first")]
    Unusable(String),
    /// A list of CAs for a node that trusts none.
    #[error("this node has no certificate yet: enrol it first")]
    NotEnrolled,
}

/// Distinguishes one version of the file from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    mtime: (i64, i64),
}

/// The certificate of this node.
#[derive(Debug)]
pub struct NodeTls {
    file: PathBuf,
    node: Role,
    /// Held while the certificate changes.
    change: Mutex<RenewalState>,
    /// None: this node has no certificate that can be used.
    credentials: watch::Sender<Option<Credentials>>,
}

#[derive(Debug, Default)]
struct RenewalState {
    /// The key of the last request of a controller.
    requested: Option<PrivateKey>,
    /// The file as it was read or written last.
    seen: Option<Stamp>,
    /// The reason why the file cannot be used; none if it can be used.
    problem: Option<String>,
}

impl NodeTls {
    /// Reads the certificate in `tls_dir`. A file that cannot be used is logged, and the node has no
    /// certificate then.
    pub fn open(tls_dir: &Path, node_name: &NodeName) -> Arc<NodeTls> {
        let tls = NodeTls {
            file: enrol::file_in(tls_dir),
            node: Role::Node(node_name.clone()),
            change: Mutex::default(),
            credentials: watch::Sender::new(None),
        };
        tls.reload();
        Arc::new(tls)
    }

    /// The certificate in use; none: the node has none.
    pub fn credentials(&self) -> Option<Credentials> {
        self.credentials.borrow().clone()
    }

    /// Follows whether there is a certificate.
    pub fn watch(&self) -> watch::Receiver<Option<Credentials>> {
        self.credentials.subscribe()
    }

    /// Returns the role that the certificate of this node has.
    pub fn node(&self) -> &Role {
        &self.node
    }

    /// Seconds since 1970 until which the certificate is valid; none without one.
    pub fn expiry_s(&self) -> Option<u64> {
        let bundle = self.credentials()?.current();
        Some(bundle.identity.as_ref()?.certificate().not_after)
    }

    /// Returns true if the node has to enrol, because it has no certificate or an expired one. Returns false
    /// if the file cannot be used. An operator has to examine such a file, because it may contain CAs.
    pub fn has_to_enrol(&self) -> bool {
        let is_readable = self.change().problem.is_none();
        is_readable && self.expiry_s() < Some(now().as_secs())
    }

    /// Reads the file again if it has changed, or could not be used: `chmod` changes no stamp.
    pub fn reload(&self) {
        let mut change = self.change();
        let stamp = stamp(&self.file);
        if stamp == change.seen && change.problem.is_none() {
            return;
        }
        change.seen = stamp;
        let reported = change.problem.take();
        if stamp.is_none() {
            // The file was removed for another enrolment, at the next start.
            return;
        }
        if let Err(error) = self.load() {
            let error = error.to_string();
            if reported.as_ref() != Some(&error) {
                tracing::error!("the certificate of this node cannot be used: {error}");
            }
            change.problem = Some(error);
        }
    }

    fn load(&self) -> Result<(), NodeCertificateError> {
        let bundle = load(&self.file, &self.node)?.ok_or(NodeCertificateError::NotEnrolled)?;
        self.publish(bundle)
    }

    /// Makes a key, and a request for its certificate in DER.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn request(&self) -> Result<Vec<u8>, shorthorn_pki::CertificateRequestError> {
        let key = PrivateKey::generate()?;
        let request = key.request(name_of(&self.node))?;
        self.change().requested = Some(key);
        Ok(request)
    }

    /// Takes the certificate for the key of the last [`NodeTls::request`].
    ///
    /// # Errors
    /// [`NodeCertificateError`]; the certificate of before stays in use.
    pub fn set_certificate(&self, chain: Vec<CertificateDer<'static>>) -> Result<(), NodeCertificateError> {
        let mut change = self.change();
        let leaf = chain.first();
        // A repeated call: its answer was lost.
        let has_it = |bundle: &Bundle| {
            bundle.identity.as_ref().is_some_and(|identity| identity.chain().first() == leaf)
        };
        if self.credentials().is_some_and(|credentials| has_it(&credentials.current())) {
            return Ok(());
        }
        if let Some(problem) = &change.problem {
            return Err(NodeCertificateError::Unusable(problem.clone()));
        }
        let key = change.requested.take().ok_or(NodeCertificateError::NoKey)?;
        let taken = self.take(&key, EnrolmentAnswer { chain, trust: None }, &mut change.seen);
        if taken.is_err() {
            // The right certificate may still come.
            change.requested = Some(key);
        }
        taken
    }

    /// Takes the certificate of an enrolment.
    ///
    /// # Errors
    /// [`NodeCertificateError`]; the certificate of before stays in use.
    pub fn enrolled(&self, key: &PrivateKey, answer: EnrolmentAnswer) -> Result<(), NodeCertificateError> {
        self.take(key, answer, &mut self.change().seen)
    }

    fn take(
        &self,
        key: &PrivateKey,
        answer: EnrolmentAnswer,
        seen: &mut Option<Stamp>,
    ) -> Result<(), NodeCertificateError> {
        let current = self.credentials().map(|credentials| credentials.current());
        let known = current.as_ref().map(|bundle| &bundle.trust);
        let bundle = enrol::accept(&self.file, known, &self.node, key, answer, now())?;
        self.store(bundle, seen)
    }

    /// Takes a list of trusted CAs. An older one than the present changes nothing.
    ///
    /// # Errors
    /// [`NodeCertificateError`]; the list of before stays in use.
    pub fn set_trust(&self, trust: Trust) -> Result<(), NodeCertificateError> {
        let mut change = self.change();
        let credentials = self.credentials().ok_or(NodeCertificateError::NotEnrolled)?;
        let current = credentials.current();
        let identity = current.identity.clone().ok_or(NodeCertificateError::NotEnrolled)?;
        let bundle = Bundle { identity: Some(identity), trust };
        bundle.check()?;
        if bundle.trust.version() <= current.trust.version() {
            return Ok(());
        }
        if let Some(leaf) = bundle.identity.as_ref().and_then(|identity| identity.chain().first()) {
            bundle.trust.verify_server(leaf, now())?;
        }
        self.store(bundle, &mut change.seen)
    }

    fn store(&self, bundle: Bundle, seen: &mut Option<Stamp>) -> Result<(), NodeCertificateError> {
        if let Some(dir) = self.file.parent() {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|source| NodeCertificateError::Directory { path: dir.to_owned(), source })?;
        }
        shorthorn_pki::store(&self.file, &bundle)?;
        *seen = stamp(&self.file);
        self.publish(bundle)
    }

    /// Uses the bundle for later connections.
    fn publish(&self, bundle: Bundle) -> Result<(), NodeCertificateError> {
        if let Some(identity) = &bundle.identity {
            let (serial, not_after_s) = (&identity.certificate().serial, identity.certificate().not_after);
            let trust = bundle.trust.version();
            tracing::info!(
                %serial,
                not_after_s,
                trust,
                cluster = %bundle.trust.cluster(),
                "certificate of this node"
            );
        }
        match self.credentials() {
            Some(credentials) => credentials.replace(bundle)?,
            None => drop(self.credentials.send_replace(Some(Credentials::new(bundle)?))),
        }
        Ok(())
    }

    fn change(&self) -> std::sync::MutexGuard<'_, RenewalState> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The content of the file, if it is for this node.
fn load(file: &Path, node: &Role) -> Result<Option<Bundle>, NodeCertificateError> {
    let Some(bundle) = shorthorn_pki::load(file)? else { return Ok(None) };
    let identity =
        bundle.identity.as_ref().ok_or_else(|| NodeCertificateError::NoCertificate(file.to_owned()))?;
    let found = &identity.certificate().name.role;
    if found != node {
        let (path, found, expected) = (file.to_owned(), found.clone(), node.clone());
        return Err(NodeCertificateError::OtherNode { path, found, expected });
    }
    Ok(Some(bundle))
}

fn stamp(file: &Path) -> Option<Stamp> {
    let found = fs::metadata(file).ok()?;
    Some(Stamp { inode: found.ino(), mtime: (found.mtime(), found.mtime_nsec()) })
}

/// The name of a node, as its role has it.
fn name_of(node: &Role) -> &str {
    match node {
        Role::Node(name) => name.as_str(),
        Role::Admin(name) => name,
        Role::Controller => "",
    }
}

/// The time of this host.
pub fn now() -> UnixTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    UnixTime::since_unix_epoch(since.unwrap_or(Duration::ZERO))
}
