//! Checks the arguments of a request before anything else happens.

use std::path::{Component, Path, PathBuf};

use shorthorn_csi::CsiError;
use shorthorn_types::VolumeName;

/// PATH_MAX without the byte that ends it.
const PATH_MAX_BYTES: usize = 4095;

/// Parses the volume id of a CSI call, which is the name of the volume.
pub(crate) fn volume(id: &str) -> Result<VolumeName, CsiError> {
    if id.is_empty() {
        return Err(CsiError::Invalid("volume_id is missing".into()));
    }
    VolumeName::new(id).map_err(|error| CsiError::Invalid(format!("volume_id: {error}")))
}

/// Returns a path: absolute, without "." and "..", and of characters that can be shown.
pub(crate) fn path(field: &str, text: &str) -> Result<PathBuf, CsiError> {
    let wrong = |what: &str| Err(CsiError::Invalid(format!("{field} {what}")));
    if text.is_empty() {
        return wrong("is missing");
    }
    if text.len() > PATH_MAX_BYTES {
        return wrong("is longer than a path can be");
    }
    let path = Path::new(text);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir);
    if !path.is_absolute() || path.file_name().is_none() || !path.components().all(plain) {
        return wrong("is not an absolute path without \"..\"");
    }
    if text.chars().any(char::is_control) {
        return wrong("has control characters");
    }
    Ok(path.to_owned())
}

/// Returns the path of a volume in a request. None: no volume can be there.
pub(crate) fn volume_path(text: &str) -> Result<Option<PathBuf>, CsiError> {
    match path("volume_path", text) {
        Err(error) if text.is_empty() => Err(error),
        checked => Ok(checked.ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_plain_paths_are_accepted() {
        for good in ["/a", "/var/lib/kubelet/pods/x/volumes/kubernetes.io~csi/pvc-1/mount", "/a b"] {
            assert_eq!(path("p", good).unwrap(), Path::new(good));
        }
        let long = format!("/{}", "x".repeat(PATH_MAX_BYTES));
        for bad in ["", "/", "a", "./a", "/a/../b", "/..", "/a\nb", "/a\0b", long.as_str()] {
            assert!(matches!(path("p", bad), Err(CsiError::Invalid(_))), "{bad:?}");
        }
    }
}
