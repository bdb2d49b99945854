//! Names in certificates: `shorthorn://CLUSTER/controller`, `shorthorn://CLUSTER/node/NAME` and
//! `shorthorn://CLUSTER/admin/NAME`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shorthorn_types::{NodeName, NodeNameError, checked_text};
use thiserror::Error;

use crate::{ADMIN_SECONDS, LEAF_SECONDS};

const SCHEME: &str = "shorthorn://";
const CLUSTER_MAX_BYTES: usize = 64;
const ADMIN_MAX_BYTES: usize = 64;

/// The id of a cluster, as the controller's store has it.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClusterId(String);

/// The part that the holder of a certificate plays.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A controller of the cluster.
    Controller,
    /// The agent of the node with this name.
    Node(NodeName),
    /// An administrator with shorthornctl.
    Admin(String),
}

impl Role {
    /// Returns the lifetime of certificates of this role.
    #[must_use]
    pub const fn lifetime_seconds(&self) -> u64 {
        match self {
            Role::Controller | Role::Node(_) => LEAF_SECONDS,
            Role::Admin(_) => ADMIN_SECONDS,
        }
    }
}

/// The identity in a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CertificateName {
    /// The cluster that the holder belongs to.
    pub cluster: ClusterId,
    /// The role of the holder in the cluster.
    pub role: Role,
}

/// A text is not a name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CertificateNameError {
    /// No cluster has this id.
    #[error("{0:?} is not a cluster id: use 1 to 64 letters, digits, '-' and '.'")]
    Cluster(String),
    /// No node has this name.
    #[error(transparent)]
    Node(#[from] NodeNameError),
    /// No administrator has this name.
    #[error("{0:?} is not a name of an administrator: use 1 to 64 letters, digits, '-', '.', '_' and '@'")]
    Admin(String),
    /// Not one of the known forms.
    #[error(
        "{0:?} is not a name of a certificate: expected shorthorn://CLUSTER/ROLE, with the role controller, \
         node/NAME or admin/NAME"
    )]
    Uri(String),
}

/// Shortens a text of an unknown client for an error.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

fn is_made_of(text: &str, max_bytes: usize, allowed: impl Fn(u8) -> bool) -> bool {
    !text.is_empty() && text.len() <= max_bytes && text.bytes().all(allowed)
}

impl ClusterId {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`CertificateNameError::Cluster`].
    pub fn new(text: &str) -> Result<ClusterId, CertificateNameError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
        if !is_made_of(text, CLUSTER_MAX_BYTES, allowed) {
            return Err(CertificateNameError::Cluster(shown(text)));
        }
        Ok(ClusterId(text.to_owned()))
    }
}

checked_text!(ClusterId, CertificateNameError);

impl Role {
    /// The role of the node with this name.
    ///
    /// # Errors
    /// [`CertificateNameError::Node`].
    pub fn node(name: &str) -> Result<Role, CertificateNameError> {
        Ok(Role::Node(NodeName::new(name)?))
    }

    /// The role of the administrator with this name.
    ///
    /// # Errors
    /// [`CertificateNameError::Admin`].
    pub fn admin(name: &str) -> Result<Role, CertificateNameError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._@".contains(&byte);
        if !is_made_of(name, ADMIN_MAX_BYTES, allowed) {
            return Err(CertificateNameError::Admin(shown(name)));
        }
        Ok(Role::Admin(name.to_owned()))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Controller => f.write_str("controller"),
            Role::Node(name) => write!(f, "node/{name}"),
            Role::Admin(name) => write!(f, "admin/{name}"),
        }
    }
}

impl FromStr for Role {
    type Err = CertificateNameError;
    fn from_str(text: &str) -> Result<Role, CertificateNameError> {
        if text == "controller" {
            return Ok(Role::Controller);
        }
        match text.split_once('/') {
            Some(("node", name)) => Role::node(name),
            Some(("admin", name)) => Role::admin(name),
            _ => Err(CertificateNameError::Uri(shown(text))),
        }
    }
}

impl fmt::Display for CertificateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.cluster, self.role)
    }
}

impl FromStr for CertificateName {
    type Err = CertificateNameError;
    fn from_str(text: &str) -> Result<CertificateName, CertificateNameError> {
        let rest = text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/'));
        let (cluster, role) = rest.ok_or_else(|| CertificateNameError::Uri(shown(text)))?;
        Ok(CertificateName { cluster: ClusterId::new(cluster)?, role: role.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for good in [
            "shorthorn://c0ffee/controller",
            "shorthorn://c0ffee/node/worker-1.example",
            "shorthorn://c0ffee/admin/ann@example.com",
        ] {
            assert_eq!(good.parse::<CertificateName>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "shorthorn://",
            "shorthorn:///controller",
            "shorthorn://c/",
            "shorthorn://c/Controller",
            "shorthorn://c/controller/",
            "shorthorn://c/node/",
            "shorthorn://c/node/a/b",
            "shorthorn://c/node/-a",
            "shorthorn://c/node/a..b",
            "shorthorn://c/node/A",
            "shorthorn://c/node/a\0",
            "shorthorn://c/admin/",
            "spiffe://c/controller",
        ] {
            assert!(bad.parse::<CertificateName>().is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_has_two_readings(
            text in "(shorthorn://)?[a-c./]{0,12}(controller|node/|admin/)?[a-cA./@]{0,8}"
        ) {
            if let Ok(name) = text.parse::<CertificateName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
