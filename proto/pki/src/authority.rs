//! The CA of a cluster. Its state is one value, which the controller stores as a whole before it hands out a
//! result.

mod roll_over;
mod stored;

use std::collections::BTreeMap;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize, Serializer};
use shorthorn_types::status::RollOverPhase;
use shorthorn_types::{from_hex, hex};
use thiserror::Error;
use time::OffsetDateTime;

use crate::bundle::{BundleError, Identity};
use crate::key::PrivateKey;
use crate::request::{CertificateRequest, CertificateRequestError};
use crate::role::{CertificateName, CertificateNameError, ClusterId, Role};
use crate::serial::Serial;
use crate::token::{JoinToken, StoredToken, TOKENS_MAX, TokenError, redeem};
use crate::trust::{Pin, REVOKED_MAX, Trust, TrustError};
use crate::{AUTHORITY_SECONDS, BACKDATED_SECONDS};

use roll_over::RollOver;
use stored::StoredAuthority;

const FORMAT: u32 = 1;
/// Certificates that can be valid at a time.
const ISSUED_MAX: usize = 16_384;
/// Certificates of one role that can be valid at a time: a node in a loop does not use up the others' room.
const ISSUED_PER_ROLE_MAX: usize = 256;

/// Revocations of expired certificates that are kept, in case the clock is ahead. Each is a line of every
/// trust list.
const EXPIRED_REVOKED_MAX: usize = 1024;

/// More changes of the trust list than happen between a backup and its restore.
const VERSIONS_MAX: u64 = 1 << 32;

/// The CA: its keys, and the certificates and tokens that it gave out.
#[derive(Clone, Debug, Serialize)]
pub struct Authority {
    format: u32,
    cluster: ClusterId,
    /// Counts changes of the trust list.
    version: u64,
    pub(crate) signers: RollOver,
    issued: Vec<Issued>,
    revoked: Vec<Revoked>,
    tokens: Vec<StoredToken>,
}

/// A certificate that the CA gave out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Issued {
    /// The serial number of the certificate.
    pub serial: Serial,
    /// The role of its holder.
    #[serde(serialize_with = "role_text")]
    pub role: Role,
    /// Seconds since 1970 until which it is valid.
    pub not_after: u64,
    /// The CA that signed it.
    pub signer: Pin,
}

/// A certificate that counts no more although it is not expired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// The serial number of the certificate.
    pub serial: Serial,
    /// Seconds since 1970 after which the entry is removed.
    pub not_after: u64,
}

/// The CA refuses, or cannot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// The request is not for a certificate of that kind.
    #[error(transparent)]
    Request(#[from] CertificateRequestError),
    /// The name is not valid.
    #[error(transparent)]
    Name(#[from] CertificateNameError),
    /// The token is refused.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The trust list cannot be made.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// Key and certificate do not fit.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The stored CA cannot be read.
    #[error("the stored CA cannot be read: {0}; restore its backup")]
    Stored(String),
    /// The stored CA is one of a later release.
    #[error("the stored CA has format {0}, this controller knows {FORMAT}: use a newer one")]
    Format(u32),
    /// Signing failed.
    #[error("cannot sign a certificate: {0}")]
    Sign(String),
    /// More than the CA keeps a record of.
    #[error(
        "{ISSUED_MAX} certificates are valid, or {ISSUED_PER_ROLE_MAX} of this role: revoke those of the \
         role, or wait until some expire"
    )]
    TooManyIssued,
    /// More than a trust list has room for.
    #[error("{REVOKED_MAX} certificates are revoked: wait until some expire, or roll the CA over")]
    TooManyRevoked,
    /// No valid certificate fits the request to revoke.
    #[error("no valid certificate has this serial number or is of this role: see shorthornctl tls show")]
    NothingToRevoke,
    /// The CA expires.
    #[error("the CA expires within a minute: roll it over with shorthornctl tls roll-over")]
    Expired,
    /// Another roll-over is under way.
    #[error("a roll-over is in phase {0}: continue it")]
    RollOver(RollOverPhase),
    /// The phase cannot end.
    #[error("the roll-over cannot continue: {0}")]
    NotReady(String),
}

impl Authority {
    /// Makes the CA of a new cluster.
    ///
    /// # Errors
    /// [`AuthorityError::Sign`] if the system has no random numbers.
    pub fn create(cluster: ClusterId, now: UnixTime) -> Result<Authority, AuthorityError> {
        let signers = RollOver::new(Signer::create(&cluster, now)?);
        let (issued, revoked, tokens) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Authority { format: FORMAT, cluster, version: 1, signers, issued, revoked, tokens })
    }

    /// Reads a stored CA.
    ///
    /// # Errors
    /// [`AuthorityError::Stored`] and [`AuthorityError::Format`].
    pub fn from_json(text: &[u8]) -> Result<Authority, AuthorityError> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let failed = |error: serde_json::Error| AuthorityError::Stored(error.to_string());
        let head: Head = serde_json::from_slice(text).map_err(failed)?;
        if head.format != FORMAT {
            return Err(AuthorityError::Format(head.format));
        }
        let stored: StoredAuthority = serde_json::from_slice(text).map_err(failed)?;
        let authority = stored.into_authority();
        for signer in authority.signers.trusted() {
            let public = signer.key()?.public();
            let parsed = x509_parser::parse_x509_certificate(&signer.der()?)
                .map(|(_, parsed)| parsed.public_key().raw == public.as_slice());
            if !parsed.unwrap_or(false) {
                return Err(AuthorityError::Stored("a key does not belong to its certificate".to_owned()));
            }
        }
        authority.trust()?;
        Ok(authority)
    }

    /// The CA as it is stored, private keys included.
    ///
    /// # Errors
    /// [`AuthorityError::Stored`] never happens for a CA that could be read.
    pub fn to_json(&self) -> Result<Vec<u8>, AuthorityError> {
        serde_json::to_vec(self).map_err(|error| AuthorityError::Stored(error.to_string()))
    }

    /// Returns the identity of the cluster, which every certificate names.
    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.cluster
    }

    /// The trust list for everybody.
    ///
    /// # Errors
    /// [`AuthorityError::Trust`] if a stored certificate is damaged.
    pub fn trust(&self) -> Result<Trust, AuthorityError> {
        let authorities = self.signers.trusted().map(Signer::der).collect::<Result<Vec<_>, _>>()?;
        let revoked = self.revoked.iter().map(|revoked| revoked.serial.clone());
        Ok(Trust::new(self.cluster.clone(), self.version, authorities, revoked)?)
    }

    /// The pin of the CA that signs.
    ///
    /// # Errors
    /// [`AuthorityError::Stored`] if the stored certificate is damaged.
    pub fn pin(&self) -> Result<Pin, AuthorityError> {
        Ok(Pin::of(&self.signers.current.der()?))
    }

    /// The certificates with a record: the valid ones, the revoked ones included, and some that are expired.
    #[must_use]
    pub fn issued(&self) -> &[Issued] {
        &self.issued
    }

    /// The revoked certificates.
    #[must_use]
    pub fn revoked(&self) -> &[Revoked] {
        &self.revoked
    }

    /// Returns true if the certificate with this serial number is revoked.
    #[must_use]
    pub fn is_revoked(&self, serial: &Serial) -> bool {
        self.revoked.iter().any(|revoked| revoked.serial == *serial)
    }

    /// Signs the public key of `request` for `role`: leaf first, then the CA. The caller has decided that the
    /// sender has that role, and compared the names.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn sign(
        &mut self,
        request: &CertificateRequest,
        role: &Role,
        now: UnixTime,
    ) -> Result<Vec<CertificateDer<'static>>, AuthorityError> {
        self.sign_key(&request.public, role, now)
    }

    /// Makes a key and a certificate for `role`.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn issue(&mut self, role: &Role, now: UnixTime) -> Result<Identity, AuthorityError> {
        let key = PrivateKey::generate()?;
        let chain = self.sign_key(&key.0, role, now)?;
        Ok(Identity::new(&key, chain)?)
    }

    fn sign_key(
        &mut self,
        public: &impl PublicKeyData,
        role: &Role,
        now: UnixTime,
    ) -> Result<Vec<CertificateDer<'static>>, AuthorityError> {
        self.prune(now);
        self.make_room(now);
        let of_role = self.issued.iter().filter(|issued| issued.role == *role);
        // Revoked ones give no room for an attack, and a holder whose certificates were revoked enrols again.
        let of_role = of_role.filter(|issued| !self.is_revoked(&issued.serial)).count();
        if self.issued.len() >= ISSUED_MAX || of_role >= ISSUED_PER_ROLE_MAX {
            return Err(AuthorityError::TooManyIssued);
        }
        let signer = &self.signers.current;
        let authority = CertificateDer::from(signer.der()?);
        let serial = Serial::draw().map_err(|_| AuthorityError::Sign("no random numbers".to_owned()))?;
        let not_after = now.as_secs().saturating_add(role.lifetime_seconds()).min(signer.not_after);
        if not_after < now.as_secs().saturating_add(60) {
            return Err(AuthorityError::Expired);
        }
        let params = leaf_params(&self.cluster, role, &serial, now, not_after)?;
        let issuer =
            Issuer::from_ca_cert_der(&authority, signer.key()?.0).map_err(|error| sign_error(&error))?;
        let leaf = params.signed_by(public, &issuer).map_err(|error| sign_error(&error))?;
        // A controller makes its own at each start. Nothing is gained by revoking it: it has the CA.
        if *role != Role::Controller {
            let signer = Pin::of(&authority);
            self.issued.push(Issued { serial, role: role.clone(), not_after, signer });
        }
        Ok(vec![leaf.der().clone(), authority])
    }

    /// Revokes the certificate with this serial, or the certificates of this role. Returns their number.
    ///
    /// # Errors
    /// [`AuthorityError::NothingToRevoke`].
    pub fn revoke(
        &mut self,
        is_meant: impl Fn(&Issued) -> bool,
        now: UnixTime,
    ) -> Result<usize, AuthorityError> {
        self.prune(now);
        let is_meant = |issued: &&Issued| is_meant(issued) && !self.is_revoked(&issued.serial);
        let issued: Vec<&Issued> = self.issued.iter().filter(is_meant).collect();
        let meant: Vec<Revoked> = issued
            .iter()
            .map(|issued| Revoked { serial: issued.serial.clone(), not_after: issued.not_after })
            .collect();
        let roles: Vec<Role> = issued.iter().map(|issued| issued.role.clone()).collect();
        if meant.is_empty() {
            return Err(AuthorityError::NothingToRevoke);
        }
        if self.revoked.len() + meant.len() > REVOKED_MAX {
            // Those of expired certificates are only kept in case the clock is ahead.
            self.revoked.retain(|revoked| revoked.not_after >= now.as_secs());
        }
        if self.revoked.len() + meant.len() > REVOKED_MAX {
            return Err(AuthorityError::TooManyRevoked);
        }
        self.version += 1;
        let count = meant.len();
        self.revoked.extend(meant);
        // Its holder may have the token too, and would get another certificate by a repeated enrolment.
        self.tokens.retain(|token| !roles.iter().any(|role| token.is_of(role)));
        Ok(count)
    }

    /// Makes a join token for `node`, or for any node.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn create_token(
        &mut self,
        node: Option<&str>,
        ttl_seconds: u64,
        now: UnixTime,
    ) -> Result<JoinToken, AuthorityError> {
        self.prune(now);
        if let Some(node) = node {
            Role::node(node)?;
        }
        if self.tokens.len() >= TOKENS_MAX {
            return Err(TokenError::TooMany.into());
        }
        let token = JoinToken::draw(self.pin()?)?;
        self.tokens.push(StoredToken::new(&token, node.map(str::to_owned), ttl_seconds, now));
        Ok(token)
    }

    /// Uses up `token` and signs the request of the node.
    ///
    /// # Errors
    /// [`AuthorityError`] says why the node does not join.
    pub fn enrol(
        &mut self,
        token: &JoinToken,
        node: &str,
        request: &CertificateRequest,
        now: UnixTime,
    ) -> Result<Vec<CertificateDer<'static>>, AuthorityError> {
        let role = Role::node(node)?;
        request.check_names(node)?;
        redeem(&mut self.tokens, token, node, &request.public(), now)?;
        self.sign(request, &role, now)
    }

    /// Removes records of which nothing can come any more. The trust list only gets shorter by it.
    ///
    /// The clock may be ahead, and with the right time a removed record would let a certificate count again.
    /// So expired records are kept for a while: the last [`EXPIRED_REVOKED_MAX`] revocations, and the newest
    /// certificate of each role for another lifetime.
    fn prune(&mut self, now: UnixTime) {
        let now_s = now.as_secs();
        // Later ones replace earlier ones.
        let newest: BTreeMap<String, Serial> =
            self.issued.iter().map(|issued| (issued.role.to_string(), issued.serial.clone())).collect();
        self.issued.retain(|issued| {
            let is_newest = newest.get(&issued.role.to_string()) == Some(&issued.serial);
            let kept_s = if is_newest { issued.role.lifetime_seconds() } else { 0 };
            issued.not_after.saturating_add(kept_s) >= now_s
        });
        let mut expired: Vec<u64> =
            self.revoked.iter().map(|revoked| revoked.not_after).filter(|end| *end < now_s).collect();
        if let Some(surplus) = expired.len().checked_sub(EXPIRED_REVOKED_MAX).filter(|surplus| *surplus > 0) {
            expired.sort_unstable();
            let oldest_kept = expired.get(surplus).copied().unwrap_or_default();
            self.revoked.retain(|revoked| revoked.not_after >= oldest_kept);
        }
        self.tokens.retain(|token| !token.is_over(now));
    }

    /// Removes the oldest records of expired certificates if the list has no room for one more certificate.
    fn make_room(&mut self, now: UnixTime) {
        let now_s = now.as_secs();
        let surplus = (self.issued.len() + 1).saturating_sub(ISSUED_MAX);
        let ends = self.issued.iter().map(|issued| issued.not_after).filter(|end| *end < now_s);
        let mut expired: Vec<u64> = ends.collect();
        expired.sort_unstable();
        if let Some(last) = expired.into_iter().take(surplus).next_back() {
            self.issued.retain(|issued| issued.not_after > last);
        }
    }

    /// The end of the CA that signs, in seconds since 1970.
    #[must_use]
    pub fn expires_at_s(&self) -> u64 {
        self.signers.current.not_after
    }

    /// Makes the trust list newer than version `known`, which a peer has. A CA that was restored from a
    /// backup is older than the lists of the nodes, and an older list never replaces a newer one. A version
    /// that no list can have changes nothing.
    pub fn outdate(&mut self, known: u64) {
        if known >= self.version && known - self.version < VERSIONS_MAX {
            self.version = known.saturating_add(1);
        }
    }

    /// Revokes certificates of which no record is kept. If a trust list lacks room for all, the first ones
    /// count.
    fn revoke_all(&mut self, certificates: Vec<Revoked>) {
        let room = REVOKED_MAX.saturating_sub(self.revoked.len());
        let new: Vec<Revoked> =
            certificates.into_iter().filter(|new| !self.is_revoked(&new.serial)).take(room).collect();
        if !new.is_empty() {
            self.version += 1;
            self.revoked.extend(new);
        }
    }

    /// Has everybody take the trust list again.
    pub(crate) fn raise_version(&mut self) {
        self.version += 1;
    }
}

fn leaf_params(
    cluster: &ClusterId,
    role: &Role,
    serial: &Serial,
    now: UnixTime,
    not_after: u64,
) -> Result<CertificateParams, AuthorityError> {
    let name = CertificateName { cluster: cluster.clone(), role: role.clone() };
    let mut params = CertificateParams::default();
    params.not_before = date(now.as_secs().saturating_sub(BACKDATED_SECONDS))?;
    params.not_after = date(not_after)?;
    params.serial_number = Some(SerialNumber::from_slice(serial.as_bytes()));
    params.distinguished_name = common_name(&role.to_string());
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = match role {
        Role::Controller => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        // Agents dial nothing with it.
        Role::Node(_) => vec![ExtendedKeyUsagePurpose::ServerAuth],
        Role::Admin(_) => vec![ExtendedKeyUsagePurpose::ClientAuth],
    };
    let text = |text: String| text.try_into().map_err(|error| sign_error(&error));
    params.subject_alt_names.push(SanType::URI(text(name.to_string())?));
    if let Role::Node(node) = role {
        params.subject_alt_names.push(SanType::DnsName(text(node.to_string())?));
    }
    Ok(params)
}

fn sign_error(error: &rcgen::Error) -> AuthorityError {
    AuthorityError::Sign(error.to_string())
}

fn date(seconds: u64) -> Result<OffsetDateTime, AuthorityError> {
    let date =
        i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    date.ok_or_else(|| AuthorityError::Sign(format!("no date is {seconds} s after 1970")))
}

fn common_name(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

/// A key that signs.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Signer {
    /// PKCS#8 in hexadecimal digits.
    key: String,
    /// DER in hexadecimal digits.
    certificate: String,
    /// Seconds since 1970 until which it is valid.
    pub(crate) not_after: u64,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Signer {
    pub(crate) fn create(cluster: &ClusterId, now: UnixTime) -> Result<Signer, AuthorityError> {
        let key = PrivateKey::generate()?;
        let serial = Serial::draw().map_err(|_| AuthorityError::Sign("no random numbers".to_owned()))?;
        let not_after = now.as_secs().saturating_add(AUTHORITY_SECONDS);
        let mut params = CertificateParams::default();
        params.not_before = date(now.as_secs().saturating_sub(BACKDATED_SECONDS))?;
        params.not_after = date(not_after)?;
        params.serial_number = Some(SerialNumber::from_slice(serial.as_bytes()));
        // Two CAs of a roll-over differ in their names.
        params.distinguished_name = common_name(&format!("Shorthorn CA {cluster} {serial}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key.0).map_err(|error| sign_error(&error))?;
        Ok(Signer { key: hex(key.to_pkcs8()), certificate: hex(certificate.der()), not_after })
    }

    pub(crate) fn der(&self) -> Result<Vec<u8>, AuthorityError> {
        let der = from_hex(&self.certificate);
        der.ok_or_else(|| AuthorityError::Stored("a certificate that is not hexadecimal digits".to_owned()))
    }

    fn key(&self) -> Result<PrivateKey, AuthorityError> {
        let der = from_hex(&self.key);
        let der =
            der.ok_or_else(|| AuthorityError::Stored("a key that is not hexadecimal digits".to_owned()))?;
        Ok(PrivateKey::from_pkcs8(&der)?)
    }
}

/// Writes a role as the text that certificates have.
fn role_text<S: Serializer>(role: &Role, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(role)
}

#[cfg(test)]
mod tests;
