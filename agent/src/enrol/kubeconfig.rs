//! The identity of the kubelet on this host: where its API server is, and its client certificate.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use thiserror::Error;

/// The kubeconfigs of kubelets: kubeadm, k3s, RKE2, k0s, MicroK8s.
const KUBECONFIGS: [&str; 5] = [
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/lib/k0s/kubelet.conf",
    "/var/snap/microk8s/current/credentials/kubelet.config",
];
/// Certificate and key of a kubelet that renews its certificate, if its kubeconfig does not name them.
const ROTATED: &str = "/var/lib/kubelet/pki/kubelet-client-current.pem";
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The identity of the kubelet cannot be used.
#[derive(Debug, Error)]
pub enum KubeconfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The content cannot be used.
    #[error("{}: {reason}", path.display())]
    Content {
        path: PathBuf,
        /// The missing part, or the error.
        reason: String,
    },
}

/// An API server, and how the kubelet authenticates to it.
#[derive(Clone, PartialEq, Eq)]
pub struct KubeletIdentity {
    /// Path of the kubeconfig.
    pub file: PathBuf,
    /// `https://HOST:PORT`.
    pub server: String,
    /// Name in the server's certificate, if it is not the host.
    pub server_name: Option<String>,
    /// The certificates of the cluster's authority, in PEM.
    pub authority: Vec<u8>,
    /// The kubelet's certificate with its chain, in PEM.
    pub certificate: Vec<u8>,
    /// The key of the kubelet's certificate, in PEM.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for KubeletIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeletIdentity")
            .field("file", &self.file)
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    current_context: Option<String>,
}

#[derive(Debug, Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    tls_server_name: Option<String>,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Debug, Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
}

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User").finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize)]
struct NamedContext {
    name: String,
    context: ContextEntry,
}

#[derive(Debug, Deserialize)]
struct ContextEntry {
    cluster: String,
    user: String,
}

/// The kubeconfig of the kubelet on this host.
pub fn find() -> Option<PathBuf> {
    KUBECONFIGS.iter().map(PathBuf::from).find(|path| path.exists())
}

/// Reads a kubeconfig, and the files that it names.
///
/// # Errors
/// [`KubeconfigError`] names the file.
pub fn load(path: &Path) -> Result<KubeletIdentity, KubeconfigError> {
    load_with(path, Path::new(ROTATED))
}

fn load_with(path: &Path, rotated: &Path) -> Result<KubeletIdentity, KubeconfigError> {
    let wrong = |reason: String| KubeconfigError::Content { path: path.to_owned(), reason };
    let text = String::from_utf8(read(path)?).map_err(|_| wrong("the file is not UTF-8".into()))?;
    let file: File = serde_saphyr::from_str(&text).map_err(|error| wrong(first_line(&error.to_string())))?;
    let (cluster, user) = chosen(&file)
        .ok_or_else(|| wrong("the current context has no cluster, or no user, in the file".into()))?;
    if !cluster.server.starts_with("https://") {
        return Err(wrong(format!("the server {:?} does not begin with https://", cluster.server)));
    }
    let base = path.parent().unwrap_or_else(|| Path::new("/"));
    let authority = document(
        &cluster.certificate_authority_data,
        &cluster.certificate_authority,
        base,
        "certificate-authority-data",
        path,
    )?
    .ok_or_else(|| wrong("the file names no certificate-authority".into()))?;
    let (cert, key) = (&user.client_certificate, &user.client_key);
    let cert = document(&user.client_certificate_data, cert, base, "client-certificate-data", path)?;
    let key = document(&user.client_key_data, key, base, "client-key-data", path)?;
    let (certificate, key) = match (cert, key) {
        (Some(certificate), Some(key)) => (certificate, key),
        (Some(both), None) => (both.clone(), both),
        _ if rotated.exists() => {
            let both = read(rotated)?;
            (both.clone(), both)
        }
        _ => {
            return Err(wrong(
                "the user has no client certificate (it may use a token or a plug-in): enrol this node with \
                 shorthorn-agent join"
                    .into(),
            ));
        }
    };
    let (server, server_name) = (cluster.server.clone(), cluster.tls_server_name.clone());
    Ok(KubeletIdentity { file: path.to_owned(), server, server_name, authority, certificate, key })
}

/// The cluster and the user of the current context. A file without contexts has one of each.
fn chosen(file: &File) -> Option<(&Cluster, &User)> {
    let current = file.current_context.as_deref().unwrap_or_default();
    let context = file.contexts.iter().find(|context| context.name == current);
    match context.or_else(|| file.contexts.first()).map(|named| &named.context) {
        Some(context) => {
            let cluster = file.clusters.iter().find(|cluster| cluster.name == context.cluster)?;
            let user = file.users.iter().find(|user| user.name == context.user)?;
            Some((&cluster.cluster, &user.user))
        }
        None => Some((&file.clusters.first()?.cluster, &file.users.first()?.user)),
    }
}

/// Returns the document in the kubeconfig itself, or else the content of the file that the kubeconfig names.
fn document(
    data: &Option<String>,
    file: &Option<PathBuf>,
    base: &Path,
    key: &str,
    path: &Path,
) -> Result<Option<Vec<u8>>, KubeconfigError> {
    match (data.as_deref().filter(|data| !data.is_empty()), file) {
        (Some(data), _) => {
            let compact: String = data.split_whitespace().collect();
            let decoded = BASE64_STANDARD.decode(compact).map_err(|error| KubeconfigError::Content {
                path: path.to_owned(),
                reason: format!("{key}: {error}"),
            })?;
            Ok(Some(decoded))
        }
        (None, Some(file)) => read(&base.join(file)).map(Some),
        (None, None) => Ok(None),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, KubeconfigError> {
    let failed = |source| KubeconfigError::Io { path: path.to_owned(), source };
    if fs::metadata(path).map_err(failed)?.len() > FILE_MAX_BYTES {
        return Err(failed(io::ErrorKind::FileTooLarge.into()));
    }
    fs::read(path).map_err(failed)
}

/// Parsers of YAML show the place in several lines, which may be secret.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, files: &[(&str, &str)]) -> Result<KubeletIdentity, String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        let path = dir.path().join("kubelet.conf");
        fs::write(&path, text).unwrap();
        load_with(&path, &dir.path().join("current.pem")).map_err(|error| error.to_string())
    }

    /// A kubeconfig as kubeadm writes it.
    const KUBEADM: &str = "apiVersion: v1\nkind: Config\nclusters:\n- cluster:\n    \
        certificate-authority-data: Q0E=\n    server: https://10.0.0.1:6443\n  name: kubernetes\ncontexts:\n\
        - context:\n    cluster: kubernetes\n    user: system:node:n1\n  name: system:node:n1@kubernetes\n\
        current-context: system:node:n1@kubernetes\npreferences: {}\n\
        users:\n- name: system:node:n1\n  user:\n    \
        client-certificate: pair.pem\n    client-key: pair.pem\n";
    /// A kubeconfig as k3s writes it.
    const K3S: &str = "apiVersion: v1\nclusters:\n- cluster:\n    server: https://127.0.0.1:6444\n    \
        certificate-authority: ca.crt\n  name: local\ncontexts:\n- context:\n    cluster: local\n    \
        namespace: default\n    user: user\n  name: Default\ncurrent-context: Default\nkind: Config\n\
        preferences: {}\n\
        users:\n- name: user\n  user:\n    client-certificate: c.crt\n    client-key: c.key\n";

    #[test]
    fn kubeconfigs_of_kubelets_are_read() {
        let kubeadm = parsed(KUBEADM, &[("pair.pem", "both")]).unwrap();
        assert_eq!(kubeadm.server, "https://10.0.0.1:6443");
        assert_eq!(
            (kubeadm.authority, kubeadm.certificate, kubeadm.key),
            (b"CA".into(), b"both".into(), b"both".into())
        );
        let k3s = parsed(K3S, &[("ca.crt", "ca"), ("c.crt", "cert"), ("c.key", "key")]).unwrap();
        assert_eq!(k3s.server, "https://127.0.0.1:6444");
        assert_eq!((k3s.authority, k3s.certificate, k3s.key), (b"ca".into(), b"cert".into(), b"key".into()));
    }

    #[test]
    fn a_user_without_a_certificate_has_the_renewed_one_or_has_to_join() {
        let token = K3S.replace("client-certificate: c.crt\n    client-key: c.key", "token: secret");
        let refused = parsed(&token, &[("ca.crt", "ca")]).unwrap_err();
        assert!(refused.contains("shorthorn-agent join") && !refused.contains("secret"), "{refused}");
        let rotated = parsed(&token, &[("ca.crt", "ca"), ("current.pem", "pair")]).unwrap();
        assert_eq!((rotated.certificate, rotated.key), (b"pair".into(), b"pair".into()));
    }

    #[test]
    fn wrong_files_are_refused_by_name() {
        for (text, wanted) in [
            ("clusters: 1", "kubelet.conf"),
            ("clusters: []\nusers: []\n", "no cluster"),
            (&KUBEADM.replace("https://", "http://"), "https://"),
            (&KUBEADM.replace("Q0E=", "???"), "certificate-authority-data"),
            (KUBEADM, "pair.pem"),
        ] {
            let refused = parsed(text, &[]).unwrap_err();
            assert!(refused.contains(wanted), "{text:?}: {refused}");
        }
    }
}
