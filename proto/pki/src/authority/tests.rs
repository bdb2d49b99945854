use std::time::Duration;

use shorthorn_types::status::RollOverPhase;

use super::*;
use crate::LEAF_SECONDS;
use crate::trust::Usage;

fn at(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000 + seconds))
}

fn authority() -> Authority {
    Authority::create(ClusterId::new("c0ffee").unwrap(), at(0)).unwrap()
}

fn node(name: &str) -> Role {
    Role::node(name).unwrap()
}

#[test]
fn a_certificate_is_good_for_its_role_in_its_time() {
    let mut authority = authority();
    let identity = authority.issue(&node("a"), at(100)).unwrap();
    let trust = authority.trust().unwrap();
    let leaf = &identity.chain()[0];
    let verify = |usage, role: &Role, now| trust.verify(leaf, usage, Some(role), at(now));
    assert_eq!(verify(Usage::Server, &node("a"), 100).unwrap().name.role, node("a"));
    // A host whose clock is late by less than the back-dating.
    verify(Usage::Server, &node("a"), 0).unwrap();
    let other_name = verify(Usage::Server, &node("b"), 100);
    assert!(matches!(other_name, Err(TrustError::Role { .. })), "{other_name:?}");
    let as_client = verify(Usage::Client, &node("a"), 100);
    assert!(matches!(as_client, Err(TrustError::Chain(_))), "{as_client:?}");
    let expired = verify(Usage::Server, &node("a"), 101 + LEAF_SECONDS);
    assert!(matches!(expired, Err(TrustError::Chain(webpki::Error::CertExpired { .. }))), "{expired:?}");
    let early = trust.verify(
        leaf,
        Usage::Server,
        None,
        UnixTime::since_unix_epoch(Duration::from_secs(1_799_999_000)),
    );
    assert!(matches!(early, Err(TrustError::Chain(webpki::Error::CertNotValidYet { .. }))), "{early:?}");
}

#[test]
fn certificates_of_other_clusters_are_refused() {
    let mut other = Authority::create(ClusterId::new("c0ffee").unwrap(), at(0)).unwrap();
    let identity = other.issue(&Role::Controller, at(0)).unwrap();
    let trust = authority().trust().unwrap();
    let foreign = trust.verify(&identity.chain()[0], Usage::Client, None, at(0));
    assert!(matches!(foreign, Err(TrustError::Chain(webpki::Error::UnknownIssuer))), "{foreign:?}");
    // The same CA for two clusters, as after copying its state.
    let shared: Vec<Vec<u8>> = other.trust().unwrap().authorities().iter().map(|der| der.to_vec()).collect();
    let trust = Trust::new(ClusterId::new("other").unwrap(), 1, shared, []).unwrap();
    let copied = trust.verify(&identity.chain()[0], Usage::Client, None, at(0));
    assert!(matches!(copied, Err(TrustError::Cluster { .. })), "{copied:?}");
}

#[test]
fn a_leaf_signs_nothing() {
    let mut authority = authority();
    let stolen = authority.issue(&node("a"), at(0)).unwrap();
    let key = stolen.key().unwrap();
    let issuer = Issuer::from_ca_cert_der(&stolen.chain()[0], key.0).unwrap();
    let serial = Serial::draw().unwrap();
    let params =
        leaf_params(authority.cluster(), &Role::Controller, &serial, at(0), at(0).as_secs() + 60).unwrap();
    let forged = params.signed_by(&PrivateKey::generate().unwrap().0, &issuer).unwrap();
    let trust = authority.trust().unwrap();
    assert!(trust.verify(forged.der(), Usage::Client, None, at(0)).is_err());
}

#[test]
fn revoking_a_node_revokes_each_of_its_certificates_and_survives_storage() {
    let mut authority = authority();
    let first = authority.issue(&node("a"), at(0)).unwrap();
    let second = authority.issue(&node("a"), at(1)).unwrap();
    let other = authority.issue(&node("b"), at(1)).unwrap();
    let before = authority.trust().unwrap().version();
    assert_eq!(authority.revoke(|issued| issued.role == node("a"), at(2)).unwrap(), 2);
    let nothing = authority.revoke(|issued| issued.role == node("a"), at(2));
    assert!(matches!(nothing, Err(AuthorityError::NothingToRevoke)));
    let authority = Authority::from_json(&authority.to_json().unwrap()).unwrap();
    let trust = authority.trust().unwrap();
    assert!(trust.version() > before);
    for revoked in [&first, &second] {
        let found = trust.verify(&revoked.chain()[0], Usage::Server, None, at(2));
        assert!(matches!(found, Err(TrustError::Revoked(_))), "{found:?}");
    }
    trust.verify(&other.chain()[0], Usage::Server, None, at(2)).unwrap();
}

#[test]
fn a_node_with_too_many_certificates_enrols_again_after_they_are_revoked() {
    let mut authority = authority();
    for _ in 0..ISSUED_PER_ROLE_MAX {
        authority.issue(&node("a"), at(0)).unwrap();
    }
    assert!(matches!(authority.issue(&node("a"), at(0)), Err(AuthorityError::TooManyIssued)));
    authority.issue(&node("b"), at(0)).unwrap();
    authority.revoke(|issued| issued.role == node("a"), at(1)).unwrap();
    authority.issue(&node("a"), at(1)).unwrap();
}

#[test]
fn certificates_of_nodes_are_short_lived_and_those_of_administrators_outlast_them() {
    let mut authority = authority();
    let mut days = |role: &Role| {
        let identity = authority.issue(role, at(0)).unwrap();
        (identity.certificate().not_after - at(0).as_secs()) / 86_400
    };
    let admin = Role::Admin("ann".to_owned());
    assert_eq!([node("a"), Role::Controller, admin].map(|role| days(&role)), [14, 14, 90]);
}

#[test]
fn a_restored_ca_gets_a_newer_list_than_the_last_published_one() {
    let mut authority = authority();
    let version = |authority: &Authority| authority.trust().unwrap().version();
    let restored = version(&authority);
    authority.outdate(restored + 7);
    assert_eq!(version(&authority), restored + 8);
    authority.outdate(restored);
    authority.outdate(u64::MAX);
    assert_eq!(version(&authority), restored + 8, "an old list, and a lie");
}

#[test]
fn a_clock_that_is_ahead_loses_no_revocation() {
    let mut authority = authority();
    let stolen = authority.issue(&node("a"), at(0)).unwrap();
    authority.revoke(|_| true, at(1)).unwrap();
    authority.issue(&node("b"), at(2)).unwrap();
    // The clock jumps ahead by 100 days, and the CA signs.
    authority.issue(&node("c"), at(LEAF_SECONDS + 10 * 86_400)).unwrap();
    let trust = authority.trust().unwrap();
    let verified = trust.verify(&stolen.chain()[0], Usage::Server, None, at(3));
    assert!(matches!(verified, Err(TrustError::Revoked(_))), "{verified:?}");
    // The time is right again. A certificate that seemed to be expired can still be revoked.
    assert_eq!(authority.revoke(|issued| issued.role == node("b"), at(3)).unwrap(), 1);
}

#[test]
fn records_of_expired_certificates_are_bounded() {
    let mut authority = authority();
    for second in 0..3 {
        authority.issue(&node("a"), at(second)).unwrap();
    }
    authority.issue(&node("b"), at(LEAF_SECONDS + 10)).unwrap();
    assert_eq!(authority.issued().len(), 2, "the newest of each role");
    authority.issue(&node("b"), at(2 * LEAF_SECONDS + 3)).unwrap();
    let roles: Vec<&Role> = authority.issued().iter().map(|issued| &issued.role).collect();
    assert_eq!(roles, [&node("b"), &node("b")], "nothing is kept for ever");
    let revoked = |number: u64| Revoked { serial: Serial::draw().unwrap(), not_after: at(number).as_secs() };
    authority.revoked = (0..EXPIRED_REVOKED_MAX as u64 + 5).map(revoked).collect();
    authority.revoked.push(revoked(3 * LEAF_SECONDS));
    authority.prune(at(2 * LEAF_SECONDS + 3));
    assert_eq!(authority.revoked.len(), EXPIRED_REVOKED_MAX + 1);
    let oldest = authority.revoked.iter().map(|revoked| revoked.not_after).min();
    assert_eq!(oldest, Some(at(5).as_secs()), "the oldest are removed first");
}

/// Nodes may be replaced by new ones with other names all the time.
#[test]
fn records_of_expired_certificates_leave_room_for_valid_ones() {
    let mut authority = authority();
    let signer = authority.pin().unwrap();
    let expired = |number: u64| Issued {
        serial: Serial::draw().unwrap(),
        role: node(&format!("old-{number}")),
        not_after: at(number).as_secs(),
        signer,
    };
    let most = ISSUED_MAX as u64;
    authority.issued = (0..most).map(expired).collect();
    authority.issue(&node("new"), at(most)).unwrap();
    assert_eq!((authority.issued.len(), &authority.issued[0].role), (ISSUED_MAX, &node("old-1")));
    let revoked = |number: u64| Revoked { serial: Serial::draw().unwrap(), not_after: at(number).as_secs() };
    authority.revoked = (0..EXPIRED_REVOKED_MAX as u64).map(revoked).collect();
    let valid = REVOKED_MAX - EXPIRED_REVOKED_MAX;
    authority.revoked.extend((0..valid).map(|_| revoked(2 * most)));
    assert_eq!(authority.revoke(|issued| issued.role == node("new"), at(most)).unwrap(), 1);
    assert_eq!(authority.revoked.len(), valid + 1);
    authority.trust().unwrap();
}

#[test]
fn a_node_joins_once_by_token_and_only_under_its_name() {
    let mut authority = authority();
    let token = authority.create_token(Some("a"), 60, at(0)).unwrap();
    assert_eq!(token.pin(), authority.pin().unwrap());
    let key = PrivateKey::generate().unwrap();
    let request = CertificateRequest::from_der(&key.request("a").unwrap()).unwrap();
    assert!(authority.enrol(&token, "b", &request, at(1)).is_err());
    let chain = authority.enrol(&token, "a", &request, at(1)).unwrap();
    let identity = Identity::new(&key, chain).unwrap();
    assert_eq!(identity.certificate().name.role, node("a"));
    let other = CertificateRequest::from_der(&PrivateKey::generate().unwrap().request("a").unwrap()).unwrap();
    let replayed = authority.enrol(&token, "a", &other, at(2));
    assert!(matches!(replayed, Err(AuthorityError::Token(TokenError::Used))), "{replayed:?}");
    assert!(authority.create_token(Some("-"), 60, at(0)).is_err());
}

#[test]
fn a_revocation_ends_the_join_tokens_of_the_node() {
    let mut authority = authority();
    let token = |authority: &mut Authority, node| authority.create_token(node, 60, at(0)).unwrap();
    let [used, only_for_it, of_other] = [None, Some("a"), Some("b")].map(|node| token(&mut authority, node));
    let request = |name| {
        let key = PrivateKey::generate().unwrap();
        CertificateRequest::from_der(&key.request(name).unwrap()).unwrap()
    };
    let of_a = request("a");
    authority.enrol(&used, "a", &of_a, at(1)).unwrap();
    authority.enrol(&used, "a", &of_a, at(2)).unwrap();
    authority.revoke(|issued| issued.role == node("a"), at(3)).unwrap();
    assert!(authority.enrol(&used, "a", &of_a, at(4)).is_err(), "the answer of an enrolment is not repeated");
    assert!(authority.enrol(&only_for_it, "a", &request("a"), at(4)).is_err());
    authority.enrol(&of_other, "b", &request("b"), at(4)).unwrap();
}

#[test]
fn a_certificate_of_a_name_that_no_node_can_have_is_revoked() {
    let mut authority = authority();
    for name in ["a", "b"] {
        authority.issue(&node(name), at(0)).unwrap();
    }
    let stored = String::from_utf8(authority.to_json().unwrap()).unwrap();
    let with = |role: &str| Authority::from_json(stored.replace("\"node/b\"", role).as_bytes());
    let read = with("\"node/a..b\"").unwrap();
    let roles: Vec<Role> = read.issued().iter().map(|issued| issued.role.clone()).collect();
    assert_eq!(roles, [node("a")]);
    let serial = &authority.issued()[1].serial;
    assert_eq!(read.revoked().iter().map(|revoked| &revoked.serial).collect::<Vec<_>>(), [serial]);
    let version = |authority: &Authority| authority.trust().unwrap().version();
    assert_eq!(version(&read), version(&authority) + 1);
    let again = Authority::from_json(&read.to_json().unwrap()).unwrap();
    assert_eq!((again.revoked(), version(&again)), (read.revoked(), version(&read)), "once");
    assert_eq!(with("\"node/b\"").unwrap().issued().len(), 2);
    assert!(matches!(with("\"king/b\""), Err(AuthorityError::Stored(_))));
}

#[test]
fn a_damaged_or_mixed_state_is_refused() {
    let (one, other) = (authority(), authority());
    assert!(matches!(Authority::from_json(b"{}"), Err(AuthorityError::Stored(_))));
    assert!(matches!(Authority::from_json(b"{\"format\":2}"), Err(AuthorityError::Format(2))));
    let mut mixed: serde_json::Value = serde_json::from_slice(&one.to_json().unwrap()).unwrap();
    let other: serde_json::Value = serde_json::from_slice(&other.to_json().unwrap()).unwrap();
    mixed["signers"]["current"]["key"] = other["signers"]["current"]["key"].clone();
    let mixed = Authority::from_json(&serde_json::to_vec(&mixed).unwrap());
    assert!(matches!(mixed, Err(AuthorityError::Stored(_))), "{mixed:?}");
    let key: serde_json::Value = serde_json::from_slice(&one.to_json().unwrap()).unwrap();
    let key = key["signers"]["current"]["key"].as_str().unwrap();
    assert!(key.len() > 100 && !format!("{one:?}").contains(key));
}

#[test]
fn a_roll_over_never_leaves_a_certificate_that_is_not_trusted() {
    let mut authority = authority();
    let old = authority.issue(&node("a"), at(0)).unwrap();
    let before = authority.pin().unwrap();
    let check = |authority: &Authority, identity: &Identity| {
        authority.trust().unwrap().verify(&identity.chain()[0], Usage::Server, None, at(10)).map(drop)
    };
    authority.begin_roll_over(at(1)).unwrap();
    assert_eq!(authority.phase(), RollOverPhase::Distributing);
    assert!(authority.begin_roll_over(at(1)).is_err());
    assert_eq!(authority.pin().unwrap(), before, "the old CA signs until everybody trusts the new one");
    check(&authority, &old).unwrap();
    authority.switch_signer().unwrap();
    assert_eq!(authority.phase(), RollOverPhase::Reissuing);
    check(&authority, &old).unwrap();
    let left = authority.left_of_old(at(2));
    assert_eq!(left.len(), 1, "{left:?}");
    let error = authority.finish_roll_over(false, at(2)).unwrap_err().to_string();
    assert!(error.contains("node/a"), "{error}");
    let new = authority.issue(&node("a"), at(3)).unwrap();
    authority.finish_roll_over(false, at(3)).unwrap();
    assert_eq!(authority.phase(), RollOverPhase::Idle);
    check(&authority, &new).unwrap();
    check(&authority, &old).unwrap_err();
    assert_ne!(authority.pin().unwrap(), before);
    assert!(authority.switch_signer().is_err());
}
