//! The file systems that `disk init` makes.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// A file system that `init` makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Filesystem {
    /// XFS.
    #[default]
    Xfs,
    /// The ext4 file system, by mkfs.ext4.
    Ext4,
}

impl Filesystem {
    /// Returns the name of the type.
    pub const fn as_str(self) -> &'static str {
        match self {
            Filesystem::Xfs => "xfs",
            Filesystem::Ext4 => "ext4",
        }
    }

    /// Returns the program that makes it and its arguments, without a flag that would make it overwrite
    /// another file system.
    pub fn make(self, uuid: &str, device: &Path) -> (&'static str, Vec<String>) {
        let device = device.display().to_string();
        match self {
            Filesystem::Xfs => {
                let uuid = format!("uuid={uuid}");
                ("mkfs.xfs", ["-q", "-b", "size=4096", "-m", &uuid, &device].map(str::to_owned).into())
            }
            // The reserve of root is not available to the agent, which keeps a reserve of its own.
            Filesystem::Ext4 => {
                let arguments = ["-q", "-b", "4096", "-m", "0", "-U", uuid, &device];
                ("mkfs.ext4", arguments.map(str::to_owned).into())
            }
        }
    }
}
