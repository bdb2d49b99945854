//! Gets the first certificate of this node, and another one if it has expired.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_pki::{BundleError, chain_from_pem};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::enrol::EnrolmentAnswer;
use crate::enrol::https::{ApiServer, HttpsError};
use crate::enrol::kubeconfig::{self, KubeconfigError};
use crate::enrol::kubernetes::{self, CsrError};
use crate::serve::blocking;
use crate::serve::config::KubeconfigChoice;
use crate::serve::error::NodeError;
use crate::serve::tls::{NodeCertificateError, NodeTls, name_of};

/// Time between two checks of the file that `shorthorn-agent join` replaces. The command waits until the
/// agent has taken the file.
const FILE_EVERY: Duration = Duration::from_secs(2);
/// Time between two checks of a node that needs no enrolment or cannot enrol by itself. Such a change is
/// rare, and nothing waits for it.
const IDLE: Duration = Duration::from_secs(60);
/// The pause after an attempt that has failed, at first and at most.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// The pause after a denied request, which an administrator has to resolve. Each attempt is a new request
/// that he has to look at.
const DENIED_PAUSE: Duration = Duration::from_secs(600);

#[derive(Debug, Error)]
enum EnrolError {
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    #[error(transparent)]
    Https(#[from] HttpsError),
    #[error(transparent)]
    Csr(#[from] CsrError),
    #[error("the certificate in the CertificateSigningRequest cannot be read: {0}")]
    Chain(#[from] BundleError),
    #[error(transparent)]
    Tls(#[from] NodeCertificateError),
}

/// Enrols this node whenever that is needed, and follows the file, until the agent stops.
pub async fn keep_enrolled(tls: Arc<NodeTls>, choice: KubeconfigChoice, mut stopping: watch::Receiver<bool>) {
    tokio::select! {
        () = follow_file(&tls) => {}
        () = enrol(&tls, &choice) => {}
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
}

async fn follow_file(tls: &Arc<NodeTls>) {
    loop {
        sleep(FILE_EVERY).await;
        let tls = Arc::clone(tls);
        let reload = move || {
            tls.reload();
            Ok(())
        };
        if let Err(error @ NodeError::Unavailable(_)) = blocking(reload).await {
            tracing::debug!("{error}");
        }
    }
}

async fn enrol(tls: &NodeTls, choice: &KubeconfigChoice) {
    let mut pause = PAUSE;
    let mut has_warned = false;
    loop {
        if !tls.has_to_enrol() {
            (pause, has_warned) = (PAUSE, false);
            sleep(IDLE).await;
            continue;
        }
        let Some(file) = kubeconfig_of(choice) else {
            if !has_warned {
                tracing::warn!(
                    "this node has no valid certificate, and no kubelet to get one with: run shorthorn-agent \
                     join"
                );
            }
            has_warned = true;
            sleep(IDLE).await;
            continue;
        };
        match enrol_once(tls, &file).await {
            Ok(()) => pause = PAUSE,
            Err(error) => {
                let is_denied =
                    matches!(error, EnrolError::Csr(CsrError::Denied { .. }) | EnrolError::Tls(_));
                let wait = if is_denied { DENIED_PAUSE } else { pause };
                tracing::warn!(wait_s = wait.as_secs(), "this node has no valid certificate: {error}");
                sleep(wait).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// The kubeconfig to enrol with.
pub fn kubeconfig_of(choice: &KubeconfigChoice) -> Option<PathBuf> {
    match choice {
        KubeconfigChoice::Off => None,
        KubeconfigChoice::Auto => kubeconfig::find(),
        KubeconfigChoice::File(path) => Some(path.clone()),
    }
}

async fn enrol_once(tls: &NodeTls, file: &std::path::Path) -> Result<(), EnrolError> {
    // Each time: kubelet renews its certificate.
    let identity = kubeconfig::load(file)?;
    let server = ApiServer::new(&identity)?;
    let signed = kubernetes::request(&server, name_of(tls.node())).await?;
    let chain = chain_from_pem(&signed.chain)?;
    tls.enrolled(&signed.key, EnrolmentAnswer { chain, trust: None })?;
    Ok(())
}
