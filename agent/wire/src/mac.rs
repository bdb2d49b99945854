//! Message authentication codes (HMAC-SHA-256) made with the secret of a volume, and names derived from it.

use ring::hmac;
use shorthorn_types::{SECRET_BYTES, hex};

/// The length of a code in bytes.
pub(crate) const MAC_BYTES: usize = 32;

/// Returns the MAC of a text under a label without a line feed.
pub(crate) fn mac(key: &[u8; SECRET_BYTES], label: &str, content: &str) -> Mac {
    Mac { key: hmac::Key::new(hmac::HMAC_SHA256, key), message: format!("{label}\n{content}") }
}

/// Identifies the volume of the secret, without revealing the secret: 16 hexadecimal digits of an
/// HMAC-SHA-256. A former volume of the same name has another fingerprint.
#[must_use]
pub fn fingerprint(secret: &[u8; SECRET_BYTES]) -> String {
    // Names of state files have it: it must not change.
    let digest = mac(secret, "shorthorn-1", "fingerprint\n").digest();
    hex(&digest[..8])
}

/// Returns a password for the `purpose` of a volume: 32 hexadecimal digits of an HMAC-SHA-256. Neither the
/// secret nor the password of another purpose can be computed from it.
#[must_use]
pub fn derived_password(secret: &[u8; SECRET_BYTES], purpose: &str) -> String {
    // Sessions of living volumes have it: it must not change.
    let digest = mac(secret, "shorthorn-1", &format!("password\n{purpose}\n")).digest();
    hex(&digest[..16])
}

/// Returns the fingerprint of a volume's secret for its replica directories: 64 hexadecimal digits of an
/// HMAC-SHA-256. The secret cannot be computed from it.
///
/// With `encrypted`, it is that of a volume whose connections are encrypted. So a release that does not know
/// of encryption finds the directory of another volume, instead of serving it in clear.
#[must_use]
pub fn directory_fingerprint(secret: &[u8; SECRET_BYTES], encrypted: bool) -> String {
    // Replica directories have it: it must not change.
    let content = if encrypted { "encrypted replica directory\n" } else { "replica directory\n" };
    hex(&mac(secret, "shorthorn-1", content).digest())
}

/// The key and the message of an HMAC-SHA-256.
pub(crate) struct Mac {
    key: hmac::Key,
    message: String,
}

impl Mac {
    pub(crate) fn digest(&self) -> [u8; MAC_BYTES] {
        let tag = hmac::sign(&self.key, self.message.as_bytes());
        let mut digest = [0; MAC_BYTES];
        digest.copy_from_slice(tag.as_ref());
        digest
    }

    /// Compares in a time that does not reveal the place of the difference.
    pub(crate) fn is(&self, digest: &[u8; MAC_BYTES]) -> bool {
        hmac::verify(&self.key, self.message.as_bytes(), digest).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: [u8; SECRET_BYTES] = [3; SECRET_BYTES];

    #[test]
    fn fingerprints_stay_as_they_are() {
        // As OpenSSL computes it: printf 'shorthorn-1\nfingerprint\n' | openssl dgst -sha256 -mac HMAC
        // -macopt hexkey:0303…
        assert_eq!(fingerprint(&SECRET), "b0c03de4980e5acf");
        // The same of 'replica directory\n'.
        let of_directory = directory_fingerprint(&SECRET, false);
        assert_eq!(of_directory, "0becc64bb67df0c8d4500f10ff2a939593609ee82f223dc67a2a508386a2a912");
        // The same of 'encrypted replica directory\n'.
        let of_directory = directory_fingerprint(&SECRET, true);
        assert_eq!(of_directory, "b56843ea30c0ee102b77f6d223975022c409b4d057564ebfb0f3d71d307843cc");
    }
}
