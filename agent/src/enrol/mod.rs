//! Enrolment: this node gets its certificate. The agent makes the key, and the key never leaves the node.
//!
//! - In a Kubernetes cluster the agent makes a CertificateSigningRequest with the kubelet's certificate
//!   (`kubernetes`).
//! - Elsewhere a person runs `shorthorn-agent join` with a one-time token (`crate::join`). The token has the
//!   pin of the CA.
//!
//! The first enrolment decides which CAs the node trusts. A later one is accepted only if one of those CAs
//! has signed the certificate. After the enrolment the controller renews the certificate over its own
//! connection.

pub mod https;
pub mod kubeconfig;
pub mod kubernetes;

use std::path::{Path, PathBuf};

use shorthorn_pki::{
    Bundle, BundleError, CertificateDer, Identity, PrivateKey, Role, Trust, TrustError, UnixTime,
};
use thiserror::Error;

/// In `tls_dir`: key, certificate and trusted CAs.
const FILE: &str = "agent.pem";

/// The file with key, certificate and trusted CAs.
pub fn file_in(tls_dir: &Path) -> PathBuf {
    tls_dir.join(FILE)
}

/// A certificate that was signed for this node cannot be used.
#[derive(Debug, Error)]
pub enum AnswerError {
    /// Not a certificate, or not for the key of this node.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The certificate is not valid for the CA that came with it.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The certificate is for another node, or not for a node.
    #[error(
        "the signed certificate is for {found}, not for {expected}: check node_name in the agent's \
         configuration"
    )]
    Name {
        /// The role in the certificate.
        found: Role,
        /// The role of this node.
        expected: Role,
    },
    /// Another CA than the remembered ones.
    #[error(
        "the certificate is signed by a CA that {} does not contain ({source}): this is another cluster, or \
         an attack. To give this node to another cluster, stop the agent and remove that file",
        file.display()
    )]
    OtherAuthority {
        /// The file that remembers the CAs.
        file: PathBuf,
        /// The reason why the certificate is not accepted.
        source: TrustError,
    },
    /// The signer has sent no CA.
    #[error("the signed certificate came without its CA")]
    NoAuthority,
}

/// A signed certificate as it was received.
#[derive(Debug)]
pub struct EnrolmentAnswer {
    /// The certificate of the node, then its CA.
    pub chain: Vec<CertificateDer<'static>>,
    /// The trusted CAs, if the signer says more than its own.
    pub trust: Option<Trust>,
}

/// Checks a signed certificate against the key, the node and the remembered CAs.
///
/// # Errors
/// [`AnswerError`] names the part that does not fit.
pub fn accept(
    file: &Path,
    known: Option<&Trust>,
    node: &Role,
    key: &PrivateKey,
    answer: EnrolmentAnswer,
    now: UnixTime,
) -> Result<Bundle, AnswerError> {
    let identity = Identity::new(key, answer.chain)?;
    let leaf = identity.chain().first().ok_or(AnswerError::NoAuthority)?;
    let certificate = identity.certificate();
    if certificate.name.role != *node {
        let (found, expected) = (certificate.name.role.clone(), node.clone());
        return Err(AnswerError::Name { found, expected });
    }
    if let Some(known) = known {
        known
            .verify_server(leaf, now)
            .map_err(|source| AnswerError::OtherAuthority { file: file.to_owned(), source })?;
    }
    let trust = match (answer.trust, known) {
        (Some(new), Some(known)) if new.version() < known.version() => known.clone(),
        (Some(new), _) => new,
        (None, Some(known)) => known.clone(),
        (None, None) => {
            let authority = identity.chain().get(1).ok_or(AnswerError::NoAuthority)?;
            Trust::new(certificate.name.cluster.clone(), 0, [authority.to_vec()], [])?
        }
    };
    trust.verify_server(leaf, now)?;
    let bundle = Bundle { identity: Some(identity), trust };
    bundle.check()?;
    Ok(bundle)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shorthorn_pki::{Authority, CertificateRequest, ClusterId};

    use super::*;

    const NOW: UnixTime = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));

    struct Cluster(Authority);

    impl Cluster {
        fn new() -> Cluster {
            Cluster(Authority::create(ClusterId::new("c0ffee").unwrap(), NOW).unwrap())
        }

        fn signed(&mut self, key: &PrivateKey, name: &str) -> Vec<CertificateDer<'static>> {
            let request = CertificateRequest::from_der(&key.request(name).unwrap()).unwrap();
            let role = Role::node(name).unwrap();
            self.0.sign(&request, &role, NOW).unwrap()
        }
    }

    fn taken(
        known: Option<&Trust>,
        key: &PrivateKey,
        chain: Vec<CertificateDer<'static>>,
    ) -> Result<Bundle, String> {
        let answer = EnrolmentAnswer { chain, trust: None };
        let node = Role::node("n1").unwrap();
        accept(Path::new("/tls/agent.pem"), known, &node, key, answer, NOW).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_ca_is_remembered_and_another_one_is_refused() {
        let (mut ours, mut other) = (Cluster::new(), Cluster::new());
        let key = PrivateKey::generate().unwrap();
        let first = taken(None, &key, ours.signed(&key, "n1")).unwrap();
        assert_eq!(first.trust.authorities(), ours.0.trust().unwrap().authorities());
        taken(Some(&first.trust), &key, ours.signed(&key, "n1")).unwrap();
        let refused = taken(Some(&first.trust), &key, other.signed(&key, "n1")).unwrap_err();
        assert!(refused.contains("signed by a CA that") && refused.contains("/tls/agent.pem"), "{refused}");
    }

    #[test]
    fn a_certificate_for_another_node_or_key_is_refused() {
        let mut ours = Cluster::new();
        let (key, stranger) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let refused = taken(None, &key, ours.signed(&key, "n2")).unwrap_err();
        assert!(refused.contains("node/n2") && refused.contains("node_name"), "{refused}");
        assert!(taken(None, &key, ours.signed(&stranger, "n1")).is_err());
        assert!(taken(None, &key, Vec::new()).is_err());
        let alone = ours.signed(&key, "n1").into_iter().take(1).collect();
        assert!(taken(None, &key, alone).unwrap_err().contains("without its CA"));
    }
}
