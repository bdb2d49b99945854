//! Checks the requested use of a volume before anything else happens.

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::{AccessType, MountVolume, access_mode::Mode};

use crate::error::CsiError;

const MOUNT_FLAGS_MAX: usize = 64;
/// All flags together have to fit into the page that mount(2) takes.
const MOUNT_FLAGS_MAX_BYTES: usize = 3 << 10;

/// The requested use of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// A block device, or a file system with its mount flags.
    pub access: VolumeAccess,
    mode: Mode,
}

/// The form in which a pod gets a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeAccess {
    /// The volume is used as a block device.
    Block,
    /// The volume is used as a file system.
    Mount(MountSpec),
}

/// The requested file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSpec {
    /// The requested file system. None: the existing one, or the default on an empty device.
    pub kind: Option<FsKind>,
    /// Passed on as they are.
    pub flags: Vec<String>,
}

impl Capability {
    /// Returns true if the mode, or a mount flag, forbids writes.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        let flag = match &self.access {
            VolumeAccess::Block => false,
            VolumeAccess::Mount(wanted) => {
                wanted.flags.iter().filter_map(|flag| options(flag)).flatten().any(|one| one == "ro")
            }
        };
        flag || matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }

    /// Returns true if several nodes may have the volume at the same time. No volume can be used so.
    #[must_use]
    pub fn is_multi_node(&self) -> bool {
        use Mode::{MultiNodeMultiWriter, MultiNodeReaderOnly, MultiNodeSingleWriter};
        matches!(self.mode, MultiNodeReaderOnly | MultiNodeSingleWriter | MultiNodeMultiWriter)
    }

    /// Returns true if it may be published in one place only.
    #[must_use]
    pub fn has_one_target(&self) -> bool {
        use Mode::{SingleNodeReaderOnly, SingleNodeSingleWriter, SingleNodeWriter};
        matches!(self.mode, SingleNodeSingleWriter | SingleNodeWriter | SingleNodeReaderOnly)
    }
}

/// Returns the requested use of the volume.
///
/// # Errors
/// [`CsiError::Invalid`] names the missing field, or the value that can never work.
pub fn capability(capability: Option<v1::VolumeCapability>) -> Result<Capability, CsiError> {
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
        AccessType::Block(_) => VolumeAccess::Block,
        AccessType::Mount(wanted) => VolumeAccess::Mount(mount_spec(wanted)?),
    };
    Ok(Capability { access, mode })
}

fn mount_spec(wanted: MountVolume) -> Result<MountSpec, CsiError> {
    if !wanted.volume_mount_group.is_empty() {
        // ext4 and xfs have no such mount option, and VOLUME_MOUNT_GROUP is not announced.
        return Err(CsiError::Invalid("volume_mount_group is not supported".into()));
    }
    let kind = match wanted.fs_type.as_str() {
        "" => None,
        name => Some(FsKind::of(name).ok_or_else(|| {
            let hint = "use ext4 or xfs";
            CsiError::Invalid(format!("file system {name:?} is not supported: {hint}"))
        })?),
    };
    let bytes: usize = wanted.mount_flags.iter().map(|flag| flag.len() + 1).sum();
    if wanted.mount_flags.len() > MOUNT_FLAGS_MAX || bytes > MOUNT_FLAGS_MAX_BYTES {
        return Err(CsiError::Invalid("too many mount flags".into()));
    }
    wanted.mount_flags.iter().try_for_each(|flag| mount_flag(flag))?;
    Ok(MountSpec { kind, flags: wanted.mount_flags })
}

/// Returns an error if the flag could make mount(8), which gets it unchanged, do more than mount that device
/// there.
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

/// Returns the options of a list. Commas in double quotes, as in an SELinux context with categories, do not
/// separate. None if a quote is not closed.
pub fn options(list: &str) -> Option<Vec<&str>> {
    let mut quoted = false;
    let separates = |c: char| {
        quoted ^= c == '"';
        c == ',' && !quoted
    };
    let options = list.split(separates).collect();
    let closed = list.chars().filter(|c| *c == '"').count() % 2 == 0;
    closed.then_some(options)
}

/// A kind of file system that volumes can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsKind {
    /// The default file system.
    Ext4,
    /// The other one.
    Xfs,
}

impl FsKind {
    /// Returns the kind of that name.
    #[must_use]
    pub fn of(name: &str) -> Option<FsKind> {
        match name {
            "ext4" => Some(FsKind::Ext4),
            "xfs" => Some(FsKind::Xfs),
            _ => None,
        }
    }

    /// Returns the name of the file system.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FsKind::Ext4 => "ext4",
            FsKind::Xfs => "xfs",
        }
    }
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
    fn unknown_file_systems_are_refused() {
        let kind = |name: &str| match capability(Some(mount(name, &[])))?.access {
            VolumeAccess::Mount(wanted) => Ok::<_, CsiError>(wanted.kind),
            VolumeAccess::Block => panic!("a mount"),
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
    fn modes_determine_readers_writers_and_targets() {
        let of = |mode: Mode| {
            let access_mode = Some(v1::volume_capability::AccessMode { mode: mode.into() });
            let capability =
                capability(Some(v1::VolumeCapability { access_mode, ..mount("", &[]) })).unwrap();
            (capability.is_read_only(), capability.has_one_target(), capability.is_multi_node())
        };
        assert_eq!(of(Mode::SingleNodeWriter), (false, true, false));
        assert_eq!(of(Mode::SingleNodeReaderOnly), (true, true, false));
        assert_eq!(of(Mode::MultiNodeReaderOnly), (true, false, true));
        assert_eq!(of(Mode::MultiNodeSingleWriter), (false, false, true));
        assert_eq!(of(Mode::MultiNodeMultiWriter), (false, false, true));
        assert_eq!(of(Mode::SingleNodeSingleWriter), (false, true, false));
        assert_eq!(of(Mode::SingleNodeMultiWriter), (false, false, false));
    }

    #[test]
    fn a_mount_flag_can_make_it_read_only() {
        let read_only = |flag: &str| capability(Some(mount("ext4", &[flag]))).unwrap().is_read_only();
        assert!(read_only("ro") && read_only("noatime,ro"));
        assert!(!read_only("errors=remount-ro") && !read_only(r#"context="x,ro""#));
    }
}
