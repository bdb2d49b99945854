//! Join tokens: `ID.SECRET.PIN`. A token lets one node get its first certificate, once, until it expires. The
//! pin lets the node recognise the controller before it trusts a CA.

use std::fmt;
use std::str::FromStr;

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use shorthorn_types::{from_hex, hex};
use thiserror::Error;

use crate::role::Role;
use crate::trust::Pin;

const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 32;
/// The time for which a node whose answer got lost may repeat its request with the same key.
pub(crate) const REPEAT_SECONDS: u64 = 10 * 60;
/// Tokens that can be open at a time.
pub(crate) const TOKENS_MAX: usize = 1000;
/// The longest life of a token.
pub(crate) const TTL_MAX_SECONDS: u64 = 30 * 24 * 3600;

/// A token as its user has it.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    id: String,
    secret: [u8; SECRET_BYTES],
    pin: Pin,
}

/// A token as the controller stores it, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredToken {
    id: String,
    secret_sha256: String,
    /// The node that it is for; none: any.
    node: Option<String>,
    /// Seconds since 1970.
    expires: u64,
    used: Option<Use>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Use {
    node: String,
    key_sha256: String,
    /// Seconds since 1970.
    at: u64,
}

/// A token is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenError {
    /// Not a token.
    #[error("not a join token: expected ID.SECRET.PIN, as shorthornctl node token prints it")]
    Form,
    /// Not known, or of a wrong secret. One error for both, so that ids cannot be guessed.
    #[error("the join token is not valid: create one with shorthornctl node token")]
    Unknown,
    /// Too late.
    #[error("the join token is expired: create one with shorthornctl node token")]
    Expired,
    /// A second use.
    #[error("the join token was used already: create one with shorthornctl node token")]
    Used,
    /// The token is for another node.
    #[error("the join token is for another node than {0:?}: create one with shorthornctl node token {0}")]
    OtherNode(String),
    /// Too many are open.
    #[error("{TOKENS_MAX} join tokens are open: wait until some expire")]
    TooMany,
    /// The system has no random numbers.
    #[error("cannot get random numbers from the system")]
    Random,
}

impl JoinToken {
    pub(crate) fn draw(pin: Pin) -> Result<JoinToken, TokenError> {
        let (mut id, mut secret) = ([0; ID_BYTES], [0; SECRET_BYTES]);
        let random = SystemRandom::new();
        random.fill(&mut id).map_err(|_| TokenError::Random)?;
        random.fill(&mut secret).map_err(|_| TokenError::Random)?;
        Ok(JoinToken { id: hex(&id), secret, pin })
    }

    /// The CA of the controller that takes the token.
    #[must_use]
    pub fn pin(&self) -> Pin {
        self.pin
    }

    /// The public part, for logs.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The token with its secret: only for its user and for the controller.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{}.{}.{}", self.id, hex(&self.secret), self.pin)
    }

    fn secret_sha256(&self) -> String {
        hex(digest(&SHA256, &self.secret).as_ref())
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({}, hidden)", self.id)
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<JoinToken, TokenError> {
        let mut parts = text.split('.');
        let (Some(id), Some(secret), Some(pin), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Form);
        };
        let is_id = from_hex(id).is_some_and(|bytes| bytes.len() == ID_BYTES);
        let secret = from_hex(secret).and_then(|bytes| bytes.try_into().ok());
        match (is_id, secret, pin.parse()) {
            (true, Some(secret), Ok(pin)) => Ok(JoinToken { id: id.to_owned(), secret, pin }),
            _ => Err(TokenError::Form),
        }
    }
}

impl StoredToken {
    pub(crate) fn new(
        token: &JoinToken,
        node: Option<String>,
        ttl_seconds: u64,
        now: UnixTime,
    ) -> StoredToken {
        StoredToken {
            id: token.id.clone(),
            secret_sha256: token.secret_sha256(),
            node,
            expires: now.as_secs().saturating_add(ttl_seconds.min(TTL_MAX_SECONDS)),
            used: None,
        }
    }

    /// Returns true if the token is for this node only, or the node has used it.
    pub(crate) fn is_of(&self, role: &Role) -> bool {
        let Role::Node(node) = role else { return false };
        let names = [self.node.as_deref(), self.used.as_ref().map(|used| used.node.as_str())];
        names.contains(&Some(node.as_str()))
    }

    /// Returns true if the token cannot be used any more, not even by a repeated request.
    pub(crate) fn is_over(&self, now: UnixTime) -> bool {
        let last = self.used.as_ref().map_or(self.expires, |used| used.at.saturating_add(REPEAT_SECONDS));
        now.as_secs() > last.max(self.expires)
    }
}

/// Uses up `token` for the node and its public key.
pub(crate) fn redeem(
    stored: &mut [StoredToken],
    token: &JoinToken,
    node: &str,
    public_key: &[u8],
    now: UnixTime,
) -> Result<(), TokenError> {
    // Digests are compared: the time of the comparison says nothing about the secret.
    let presented = token.secret_sha256();
    let is_it = |stored: &&mut StoredToken| stored.id == token.id && stored.secret_sha256 == presented;
    let stored = stored.iter_mut().find(is_it).ok_or(TokenError::Unknown)?;
    if stored.node.as_ref().is_some_and(|only| only != node) {
        return Err(TokenError::OtherNode(node.to_owned()));
    }
    let key_sha256 = hex(digest(&SHA256, public_key).as_ref());
    if let Some(used) = &stored.used {
        let is_same = used.node == node && used.key_sha256 == key_sha256;
        let is_soon = now.as_secs() <= used.at.saturating_add(REPEAT_SECONDS);
        return if is_same && is_soon { Ok(()) } else { Err(TokenError::Used) };
    }
    if now.as_secs() > stored.expires {
        return Err(TokenError::Expired);
    }
    stored.used = Some(Use { node: node.to_owned(), key_sha256, at: now.as_secs() });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(1_000_000 + seconds))
    }

    fn one(node: Option<&str>) -> (JoinToken, Vec<StoredToken>) {
        let token = JoinToken::draw(Pin::of(b"ca")).unwrap();
        let stored = vec![StoredToken::new(&token, node.map(str::to_owned), 60, at(0))];
        (token, stored)
    }

    #[test]
    fn a_token_is_good_once_and_for_a_repetition_of_the_same_request() {
        let (token, mut stored) = one(None);
        redeem(&mut stored, &token, "a", b"key", at(60)).unwrap();
        redeem(&mut stored, &token, "a", b"key", at(60 + REPEAT_SECONDS)).unwrap();
        for (node, key, when) in [("a", "other", 61), ("b", "key", 61), ("a", "key", 61 + REPEAT_SECONDS)] {
            let again = redeem(&mut stored, &token, node, key.as_bytes(), at(when));
            assert_eq!(again, Err(TokenError::Used), "{node} {key} {when}");
        }
        assert!(!stored[0].is_over(at(60 + REPEAT_SECONDS)));
        assert!(stored[0].is_over(at(61 + REPEAT_SECONDS)));
    }

    #[test]
    fn a_token_is_refused_late_elsewhere_or_with_another_secret() {
        let (token, mut stored) = one(Some("a"));
        assert_eq!(redeem(&mut stored, &token, "a", b"k", at(61)), Err(TokenError::Expired));
        assert_eq!(redeem(&mut stored, &token, "b", b"k", at(1)), Err(TokenError::OtherNode("b".into())));
        let mut guessed = token.clone();
        guessed.secret[0] ^= 1;
        assert_eq!(redeem(&mut stored, &guessed, "a", b"k", at(1)), Err(TokenError::Unknown));
        assert_eq!(redeem(&mut [], &token, "a", b"k", at(1)), Err(TokenError::Unknown));
        redeem(&mut stored, &token, "a", b"k", at(1)).unwrap();
    }

    #[test]
    fn a_token_is_read_as_it_is_printed_and_hidden_in_logs() {
        let (token, stored) = one(None);
        let text = token.reveal();
        assert_eq!(text.parse::<JoinToken>().unwrap(), token);
        assert!(!format!("{token:?} {stored:?}").contains(text.split('.').nth(1).unwrap()));
    }

    proptest! {
        #[test]
        fn every_text_is_read_or_refused(text in "[0-9a-f.]{0,160}|.{0,40}") {
            if let Ok(token) = text.parse::<JoinToken>() {
                prop_assert_eq!(token.reveal(), text);
            }
        }
    }
}
