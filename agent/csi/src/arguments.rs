//! What comes in a request, checked before anything else happens.

use std::path::{Component, Path, PathBuf};

use shorthorn_proto::csi::v1;
use shorthorn_proto::csi::v1::volume_capability::{AccessType, MountVolume, access_mode::Mode};
use shorthorn_types::VolumeName;

use crate::error::CsiError;
use crate::filesystem::FsKind;

/// PATH_MAX without the byte that ends it.
const PATH_MAX_BYTES: usize = 4095;
const MOUNT_FLAGS_MAX: usize = 64;
/// All flags together have to fit into the page that mount(2) takes.
const MOUNT_FLAGS_MAX_BYTES: usize = 3 << 10;

/// What a volume is to be used as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub access: Access,
    mode: Mode,
}

/// How it is to be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// As a device.
    Block,
    /// As a file system.
    Mount(MountWish),
}

/// Which file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountWish {
    /// None: the one that is there; of an empty device, the default.
    pub kind: Option<FsKind>,
    /// Passed on as they are.
    pub flags: Vec<String>,
}

impl Capability {
    /// Whether nobody may write: the mode says so, or a mount flag.
    pub(crate) fn is_read_only(&self) -> bool {
        let flag = match &self.access {
            Access::Block => false,
            Access::Mount(wish) => {
                wish.flags.iter().filter_map(|flag| options(flag)).flatten().any(|one| one == "ro")
            }
        };
        flag || matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }

    /// Whether it may be published in one place only.
    pub(crate) fn has_one_target(&self) -> bool {
        use Mode::{SingleNodeReaderOnly, SingleNodeSingleWriter, SingleNodeWriter};
        matches!(self.mode, SingleNodeSingleWriter | SingleNodeWriter | SingleNodeReaderOnly)
    }
}

/// The name of the volume.
pub(crate) fn volume(id: &str) -> Result<VolumeName, CsiError> {
    if id.is_empty() {
        return Err(CsiError::Invalid("volume_id is missing".into()));
    }
    VolumeName::new(id).map_err(|error| CsiError::Invalid(format!("volume_id: {error}")))
}

/// A path: absolute, without "." and "..", and of characters that can be shown.
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
        return wrong("is no absolute path without \"..\"");
    }
    if text.chars().any(char::is_control) {
        return wrong("has control characters");
    }
    Ok(path.to_owned())
}

/// Where a volume is said to be. None: no volume can be there.
pub(crate) fn volume_path(text: &str) -> Result<Option<PathBuf>, CsiError> {
    match path("volume_path", text) {
        Err(error) if text.is_empty() => Err(error),
        checked => Ok(checked.ok()),
    }
}

/// How the volume is to be used.
pub(crate) fn capability(capability: Option<v1::VolumeCapability>) -> Result<Capability, CsiError> {
    let missing = |what: &str| CsiError::Invalid(format!("volume_capability{what} is missing"));
    let capability = capability.ok_or_else(|| missing(""))?;
    let mode = capability.access_mode.ok_or_else(|| missing(".access_mode"))?;
    let mode = match Mode::try_from(mode.mode) {
        Ok(Mode::Unknown) | Err(_) => {
            return Err(CsiError::Invalid(format!("access mode {} is not known", mode.mode)));
        }
        Ok(mode) => mode,
    };
    let access = match capability.access_type.ok_or_else(|| missing(".access_type"))? {
        AccessType::Block(_) => Access::Block,
        AccessType::Mount(wish) => Access::Mount(mount_wish(wish)?),
    };
    Ok(Capability { access, mode })
}

fn mount_wish(wish: MountVolume) -> Result<MountWish, CsiError> {
    if !wish.volume_mount_group.is_empty() {
        // ext4 and xfs have no such mount option, and VOLUME_MOUNT_GROUP is not announced.
        return Err(CsiError::Invalid("volume_mount_group is not supported".into()));
    }
    let kind = match wish.fs_type.as_str() {
        "" => None,
        name => Some(FsKind::of(name).ok_or_else(|| {
            let hint = "use ext4 or xfs";
            CsiError::Invalid(format!("file system {name:?} is not supported: {hint}"))
        })?),
    };
    let bytes: usize = wish.mount_flags.iter().map(|flag| flag.len() + 1).sum();
    if wish.mount_flags.len() > MOUNT_FLAGS_MAX || bytes > MOUNT_FLAGS_MAX_BYTES {
        return Err(CsiError::Invalid("there are too many mount flags".into()));
    }
    wish.mount_flags.iter().try_for_each(|flag| mount_flag(flag))?;
    Ok(MountWish { kind, flags: wish.mount_flags })
}

/// A flag goes to mount(8) as it is, but must not make it do something other than mounting that device there.
fn mount_flag(flag: &str) -> Result<(), CsiError> {
    const OTHERS: [&str; 17] = [
        "bind",
        "rbind",
        "move",
        "remount",
        "loop",
        "offset",
        "sizelimit",
        "helper",
        "uhelper",
        "shared",
        "slave",
        "private",
        "unbindable",
        "rshared",
        "rslave",
        "rprivate",
        "runbindable",
    ];
    // The flag itself may be secret: it is not repeated.
    if flag.chars().any(char::is_control) || options(flag).is_none() {
        return Err(CsiError::Invalid("a mount flag has control characters or an open quote".into()));
    }
    for option in options(flag).into_iter().flatten() {
        let name = option.split('=').next().unwrap_or_default();
        if OTHERS.contains(&name) || name.starts_with("X-mount") {
            return Err(CsiError::Invalid(format!("mount flag {name:?} is not allowed")));
        }
    }
    Ok(())
}

/// The options of a list. Commas in double quotes, as in an SELinux context with categories, do not separate. None where a
/// quote is not closed.
pub(crate) fn options(list: &str) -> Option<Vec<&str>> {
    let mut quoted = false;
    let separates = |c: char| {
        quoted ^= c == '"';
        c == ',' && !quoted
    };
    let options = list.split(separates).collect();
    let closed = list.chars().filter(|c| *c == '"').count() % 2 == 0;
    closed.then_some(options)
}

/// The size that is asked for at least; 0: none.
pub(crate) fn required_bytes(range: Option<v1::CapacityRange>) -> Result<u64, CsiError> {
    let v1::CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
    let size = |bytes: i64| {
        u64::try_from(bytes).map_err(|_| CsiError::Invalid(format!("capacity_range: {bytes} is no size")))
    };
    let (required, limit) = (size(required_bytes)?, size(limit_bytes)?);
    if limit != 0 && required > limit {
        let message = format!("capacity_range: {required} bytes are required, and {limit} are the limit");
        return Err(CsiError::OutOfRange(message));
    }
    Ok(required)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(fs_type: &str, flags: &[&str]) -> v1::VolumeCapability {
        let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        v1::VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume {
                fs_type: fs_type.into(),
                mount_flags,
                ..MountVolume::default()
            })),
            access_mode: Some(v1::volume_capability::AccessMode { mode: Mode::SingleNodeWriter.into() }),
        }
    }

    #[test]
    fn paths_stay_where_they_point() {
        for good in ["/a", "/var/lib/kubelet/pods/x/volumes/kubernetes.io~csi/pvc-1/mount", "/a b"] {
            assert_eq!(path("p", good).unwrap(), Path::new(good));
        }
        let long = format!("/{}", "x".repeat(PATH_MAX_BYTES));
        for bad in ["", "/", "a", "./a", "/a/../b", "/..", "/a\nb", "/a\0b", long.as_str()] {
            assert!(matches!(path("p", bad), Err(CsiError::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn file_systems_that_nobody_can_make_are_refused() {
        let kind = |name: &str| match capability(Some(mount(name, &[])))?.access {
            Access::Mount(wish) => Ok::<_, CsiError>(wish.kind),
            Access::Block => panic!("a mount"),
        };
        assert_eq!(kind("").unwrap(), None);
        assert_eq!(kind("xfs").unwrap(), Some(FsKind::Xfs));
        for bad in ["ntfs", "EXT4", "../ext4", "ext4 "] {
            assert!(matches!(kind(bad), Err(CsiError::Invalid(_))), "{bad}");
        }
    }

    #[test]
    fn mount_flags_that_would_do_something_else_are_refused() {
        let context = r#"context="system_u:object_r:container_file_t:s0:c1,c2""#;
        for good in ["noatime", "discard,nosuid", "commit=5", context] {
            assert!(capability(Some(mount("ext4", &[good]))).is_ok(), "{good}");
        }
        for bad in [
            "bind",
            "noatime,remount",
            "loop=/dev/loop0",
            "X-mount.subdir=/x",
            "a\nb",
            "context=\"x,bind",
            "rshared",
        ] {
            assert!(matches!(capability(Some(mount("ext4", &[bad]))), Err(CsiError::Invalid(_))), "{bad}");
        }
        assert!(capability(Some(mount("ext4", &["x"; 65]))).is_err());
    }

    #[test]
    fn commas_in_quotes_do_not_separate() {
        assert_eq!(options("a,b=c"), Some(vec!["a", "b=c"]));
        assert_eq!(options(r#"a,context="x:c1,c2",b"#), Some(vec!["a", r#"context="x:c1,c2""#, "b"]));
        assert_eq!(options(r#"context="x"#), None);
    }

    #[test]
    fn modes_say_who_may_write_where() {
        let of = |mode: Mode| {
            let access_mode = Some(v1::volume_capability::AccessMode { mode: mode.into() });
            let capability =
                capability(Some(v1::VolumeCapability { access_mode, ..mount("", &[]) })).unwrap();
            (capability.is_read_only(), capability.has_one_target())
        };
        assert_eq!(of(Mode::SingleNodeWriter), (false, true));
        assert_eq!(of(Mode::SingleNodeReaderOnly), (true, true));
        assert_eq!(of(Mode::MultiNodeReaderOnly), (true, false));
        assert_eq!(of(Mode::MultiNodeSingleWriter), (false, false));
        assert_eq!(of(Mode::MultiNodeMultiWriter), (false, false));
        assert_eq!(of(Mode::SingleNodeSingleWriter), (false, true));
        assert_eq!(of(Mode::SingleNodeMultiWriter), (false, false));
    }

    #[test]
    fn a_mount_flag_can_make_it_read_only() {
        let read_only = |flag: &str| capability(Some(mount("ext4", &[flag]))).unwrap().is_read_only();
        assert!(read_only("ro") && read_only("noatime,ro"));
        assert!(!read_only("errors=remount-ro") && !read_only(r#"context="x,ro""#));
    }

    #[test]
    fn sizes_have_to_fit_together() {
        let of = |required_bytes, limit_bytes| {
            required_bytes_of(v1::CapacityRange { required_bytes, limit_bytes })
        };
        assert_eq!(of(5, 0).unwrap(), 5);
        assert_eq!(required_bytes(None).unwrap(), 0);
        assert!(matches!(of(-1, 0), Err(CsiError::Invalid(_))));
        assert!(matches!(of(5, 4), Err(CsiError::OutOfRange(_))));
    }

    fn required_bytes_of(range: v1::CapacityRange) -> Result<u64, CsiError> {
        required_bytes(Some(range))
    }
}
