/// The prefix of the name of a head's image; a number follows.
pub const HEAD_PREFIX: &str = "volume-head-";
/// The prefix of the name of a snapshot's image; the name of the snapshot follows.
pub const SNAPSHOT_PREFIX: &str = "volume-snap-";
/// The suffix of the name of an image.
pub const IMAGE_SUFFIX: &str = ".img";

/// The kind of a layer, by the name of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// The layer that takes all writes.
    Head,
    /// A layer that does not change.
    Snapshot,
}

impl ImageKind {
    /// Returns the kind of the image with this name, of any length; none if no image has such a name. Names
    /// of images are names of files, without a path. Any number of digits will do for a head.
    #[must_use]
    pub fn of(name: &str) -> Option<ImageKind> {
        let stem = name.strip_suffix(IMAGE_SUFFIX)?;
        if let Some(number) = stem.strip_prefix(HEAD_PREFIX) {
            let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            return is_number.then_some(ImageKind::Head);
        }
        let snapshot = stem.strip_prefix(SNAPSHOT_PREFIX)?;
        let is_file = !snapshot.is_empty() && !snapshot.contains(['/', '\0']);
        is_file.then_some(ImageKind::Snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_have_names_of_files() {
        for (name, kind) in [
            ("volume-head-000.img", Some(ImageKind::Head)),
            ("volume-head-12345678901234.img", Some(ImageKind::Head)),
            ("volume-snap-a.b.img", Some(ImageKind::Snapshot)),
            ("volume-snap-...img", Some(ImageKind::Snapshot)),
            ("volume-head-.img", None),
            ("volume-head-1a.img", None),
            ("volume-head-1/../2.img", None),
            ("volume-snap-.img", None),
            ("volume-snap-/../../x.img", None),
            ("volume-snap-a\0.img", None),
            ("../volume-snap-a.img", None),
            ("volume-snap-a.img.meta", None),
            ("/etc/passwd", None),
            ("..", None),
            ("", None),
        ] {
            assert_eq!(ImageKind::of(name), kind, "{name}");
        }
    }
}
