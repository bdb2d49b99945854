//! The names that callers give volumes: any text, while ours are DNS labels.

use ring::digest::{Context, SHA256, digest};
use shorthorn_types::limits::MAX_VOLUME_NAME_BYTES;
use shorthorn_types::{VolumeName, VolumeNameError, hex};
use thiserror::Error;

/// The longest name that a caller may give.
pub const MAX_NAME_BYTES: usize = 128;
/// The bytes of the hash in a name: enough to make accidental collisions impossible in practice.
const HASH_BYTES: usize = 16;
/// The bytes for the readable part, besides the hash in hexadecimal and a '-'.
const READABLE_BYTES: usize = MAX_VOLUME_NAME_BYTES - 2 * HASH_BYTES - 1;
/// The readable part if the name has no usable character.
const NAMELESS: &str = "volume";

/// The reason why a text is not a name of a volume.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CsiNameError {
    /// The request has no name.
    #[error("name is missing")]
    Missing,
    /// The name is too long.
    #[error("name has {0} bytes, and the maximum is {MAX_NAME_BYTES}")]
    Length(usize),
    /// The name has a character that CSI bans.
    #[error("name has the control character {0:?} at byte {1}")]
    Character(char, usize),
    /// The mapped name is invalid.
    #[error(transparent)]
    Mapped(#[from] VolumeNameError),
}

/// Returns the name of the volume that a caller calls `csi_name`. The name stays the same if possible, as
/// with `pvc-<uuid>`. Otherwise it is the readable part and the hash.
///
/// # Errors
/// [`CsiNameError`].
pub fn volume_name(csi_name: &str) -> Result<VolumeName, CsiNameError> {
    if csi_name.is_empty() {
        return Err(CsiNameError::Missing);
    }
    if csi_name.len() > MAX_NAME_BYTES {
        return Err(CsiNameError::Length(csi_name.len()));
    }
    if let Some((at, banned)) = csi_name.char_indices().find(|(_, c)| is_banned(*c)) {
        return Err(CsiNameError::Character(banned, at));
    }
    if let Ok(name) = VolumeName::new(csi_name) {
        return Ok(name);
    }
    let hash = digest(&SHA256, csi_name.as_bytes());
    let hash = hex(&hash.as_ref()[..HASH_BYTES]);
    Ok(VolumeName::new(&format!("{}-{hash}", readable(csi_name)))?)
}

/// Returns the name of the VolumeAttachment that Kubernetes makes for a volume on one of its nodes, both as
/// the driver and Kubernetes call them. Its attach-detach controller makes it up in this way
/// (`pkg/volume/csi/csi_attacher.go`, `getAttachmentName`).
#[must_use]
pub fn attachment_name(handle: &str, driver: &str, machine: &str) -> String {
    let mut hash = Context::new(&SHA256);
    for part in [handle, driver, machine] {
        hash.update(part.as_bytes());
    }
    format!("csi-{}", hex(hash.finish().as_ref()))
}

/// Returns true for control characters other than white space.
fn is_banned(c: char) -> bool {
    c.is_control() && !matches!(c, '\t' | '\n' | '\r')
}

fn readable(csi_name: &str) -> String {
    let mut kept = String::new();
    for c in csi_name.chars().map(|c| c.to_ascii_lowercase()) {
        if kept.len() == READABLE_BYTES {
            break;
        }
        if c.is_ascii_alphanumeric() {
            kept.push(c);
        } else if !kept.is_empty() && !kept.ends_with('-') {
            kept.push('-');
        }
    }
    let kept = kept.trim_end_matches('-');
    if kept.is_empty() { NAMELESS.to_owned() } else { kept.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mapped(name: &str) -> String {
        volume_name(name).unwrap().to_string()
    }

    #[test]
    fn a_name_that_can_be_stays() {
        for name in ["pvc-6f2f6c4e-2f0a-4d53-9a5b-0c1f6a1b2c3d", "a", &"x".repeat(63)] {
            assert_eq!(mapped(name), name);
        }
    }

    #[test]
    fn another_name_is_readable_and_always_the_same() {
        // The volumes of earlier versions have to be found again: this never changes.
        assert_eq!(mapped("My Volume/1"), "my-volume-1-0ed186635ae081ed8d0aac281893f1aa");
        assert!(mapped(&"x".repeat(128)).starts_with(&"x".repeat(READABLE_BYTES)));
        assert_eq!(mapped(&"x".repeat(128)).len(), MAX_VOLUME_NAME_BYTES);
        assert!(mapped("日本").starts_with("volume-"));
        assert!(mapped("-a--b-").starts_with("a-b-"));
    }

    #[test]
    fn names_with_forbidden_characters_are_refused() {
        assert_eq!(volume_name(""), Err(CsiNameError::Missing));
        assert_eq!(volume_name(&"é".repeat(65)), Err(CsiNameError::Length(130)));
        for c in ['\0', '\u{8}', '\u{b}', '\u{c}', '\u{e}', '\u{1f}', '\u{7f}', '\u{9f}'] {
            assert_eq!(volume_name(&format!("a{c}")), Err(CsiNameError::Character(c, 1)));
        }
        assert!(volume_name("a\tb\r\nc").is_ok());
    }

    #[test]
    fn attachments_have_the_names_that_kubernetes_gives_them() {
        // printf %s pvc-1csi.shorthorn.ionode1 | sha256sum
        let known = "csi-59657096cb4e253fc160ea8c0cfa7e6b8843b92cdd76da1c025a8aba8a53f858";
        assert_eq!(attachment_name("pvc-1", "csi.shorthorn.io", "node1"), known);
    }

    proptest! {
        #[test]
        fn every_name_has_a_volume_name_of_its_own(
            one in "[a-zA-Z0-9 _./-]{1,64}|\\PC{1,32}", other in "[a-zA-Z0-9 _./-]{1,64}|\\PC{1,32}",
        ) {
            // Names that differ only in unusable characters are the likeliest to collide.
            let twin = one.to_uppercase();
            for (a, b) in [(&one, &other), (&one, &twin)] {
                let (Ok(first), Ok(second)) = (volume_name(a), volume_name(b)) else { continue };
                prop_assert_eq!(first == second, a == b, "{} and {}", first, second);
                prop_assert!(VolumeName::new(first.as_str()).is_ok());
                prop_assert_eq!(first, volume_name(a).unwrap());
            }
        }
    }
}
