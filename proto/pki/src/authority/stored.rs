//! Reading a stored CA, whose records may have names that this release refuses.

use serde::{Deserialize, Deserializer};

use super::roll_over::RollOver;
use super::{Authority, Issued, Revoked};
use crate::role::{CertificateNameError, ClusterId, Role};
use crate::serial::Serial;
use crate::token::StoredToken;
use crate::trust::Pin;

/// The CA as [`Authority::to_json`] writes it.
#[derive(Deserialize)]
pub(super) struct StoredAuthority {
    format: u32,
    cluster: ClusterId,
    version: u64,
    signers: RollOver,
    issued: Vec<StoredRecord>,
    revoked: Vec<Revoked>,
    tokens: Vec<StoredToken>,
}

impl StoredAuthority {
    /// Returns the CA, which has revoked the certificates of names that no node can have.
    pub(super) fn into_authority(self) -> Authority {
        let StoredAuthority { format, cluster, version, signers, issued, revoked, tokens } = self;
        let (issued, impossible) = kept_and_impossible(issued);
        let mut authority = Authority { format, cluster, version, signers, issued, revoked, tokens };
        authority.revoke_all(impossible);
        authority
    }
}

/// A record of a certificate that the CA gave out.
#[derive(Deserialize)]
struct StoredRecord {
    serial: Serial,
    /// None for a name that no node can have.
    #[serde(deserialize_with = "possible_role")]
    role: Option<Role>,
    not_after: u64,
    signer: Pin,
}

/// Reads a role; none for a name that no node can have.
fn possible_role<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Role>, D::Error> {
    match String::deserialize(deserializer)?.parse::<Role>() {
        Ok(role) => Ok(Some(role)),
        Err(CertificateNameError::Node(_)) => Ok(None),
        Err(error) => Err(serde::de::Error::custom(error)),
    }
}

/// Separates the records from the certificates of names that no node can have. Earlier releases signed `a..b`
/// for a client that was not an agent. Peers of these releases accept it unless it is revoked.
fn kept_and_impossible(records: Vec<StoredRecord>) -> (Vec<Issued>, Vec<Revoked>) {
    let (mut kept, mut impossible) = (Vec::with_capacity(records.len()), Vec::new());
    for StoredRecord { serial, role, not_after, signer } in records {
        match role {
            Some(role) => kept.push(Issued { serial, role, not_after, signer }),
            None => impossible.push(Revoked { serial, not_after }),
        }
    }
    (kept, impossible)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::UnixTime;

    use super::*;

    /// Reads a CA whose certificates have these roles, each with its index as the end.
    fn stored(roles: &[&str]) -> serde_json::Result<StoredAuthority> {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));
        let authority = Authority::create(ClusterId::new("c0ffee").unwrap(), now).unwrap();
        let signer = authority.pin().unwrap();
        let record = |(not_after, role): (usize, &&str)| {
            let serial = Serial::draw().unwrap();
            serde_json::json!({ "serial": serial, "role": role, "not_after": not_after, "signer": signer })
        };
        let mut text = serde_json::to_value(&authority).unwrap();
        text["issued"] = roles.iter().enumerate().map(record).collect();
        serde_json::from_value(text)
    }

    #[test]
    fn records_of_impossible_names_are_revoked_and_the_others_are_kept_in_their_order() {
        let roles = ["node/a", "node/a..b", "admin/ann", "node/-", "node/c"];
        let authority = stored(&roles).unwrap().into_authority();
        let kept = authority.issued().iter().map(|issued| (issued.role.to_string(), issued.not_after));
        let expected = [("node/a", 0), ("admin/ann", 2), ("node/c", 4)];
        assert_eq!(kept.collect::<Vec<_>>(), expected.map(|(role, end)| (role.to_owned(), end)));
        let ends = authority.revoked().iter().map(|revoked| revoked.not_after);
        assert_eq!(ends.collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_record_of_an_unknown_role_is_an_error() {
        assert!(stored(&["node/a", "king/b"]).is_err());
        assert!(stored(&["node/a", "admin/"]).is_err());
    }

    #[test]
    fn a_record_without_a_role_is_an_error() {
        let mut text = serde_json::json!({ "serial": "7f", "not_after": 1 });
        text["signer"] = serde_json::to_value(Pin::of(b"a certificate")).unwrap();
        let error = serde_json::from_value::<StoredRecord>(text).err().unwrap();
        assert!(error.to_string().contains("role"), "{error}");
    }
}
