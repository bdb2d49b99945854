//! The kernels that a guest may boot, and the programs that execute it.

use std::fmt;

/// The program of the virtual machine.
pub const QEMU: &str = "qemu-system-x86_64";

/// The kernel that the guest boots, by the block drivers that it offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Debian 13's, Linux 6.12: ublk and NBD.
    Ublk,
    /// Debian 12's, Linux 6.1: NBD, no ublk.
    Nbd,
    /// The newest kernel in Debian's archive: ublk and NBD.
    Newest,
    /// Debian 13's without both drivers: only iSCSI is left.
    Iscsi,
}

impl Kernel {
    /// Returns the name on command lines and of templates.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Newest => "newest",
            Self::Iscsi => "iscsi",
        }
    }

    /// Returns the kernel of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Ublk, Self::Nbd, Self::Newest, Self::Iscsi].into_iter().find(|kernel| kernel.name() == name)
    }

    /// Returns the name in the disk image.
    pub(crate) fn build(self) -> &'static str {
        match self {
            Self::Ublk | Self::Iscsi => "debian13",
            Self::Nbd => "debian12",
            Self::Newest => "newest",
        }
    }

    /// Returns true if it has the driver ublk.
    pub(crate) fn has_ublk(self) -> bool {
        matches!(self, Self::Ublk | Self::Newest)
    }

    /// Returns true if it has the driver nbd.
    pub(crate) fn has_nbd(self) -> bool {
        self != Self::Iscsi
    }

    /// Returns the part of its command line that hides drivers.
    pub(crate) fn blacklist(self) -> &'static str {
        match self {
            Self::Ublk | Self::Nbd | Self::Newest => "",
            Self::Iscsi => " module_blacklist=ublk_drv,nbd",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The executor of the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}
