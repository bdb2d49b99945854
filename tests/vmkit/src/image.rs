//! The disk image, kernels and initramfs that all VMs boot.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache;
use crate::kernel::{Accelerator, Kernel, QEMU};
use crate::process::wait_at_most;

const BUILD_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../vm/build-image");

/// A guest that does not boot under KVM hangs rather than fails. If KVM works, the probe is over in about a
/// second.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// The line that the probe's guest prints on its console.
const PROBE_OK: &str = "SHORTHORN-PROBE-OK";

/// An image in the cache. It is not removed while this value lives.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
    accelerator: Accelerator,
    _in_use: std::sync::Arc<File>,
}

impl Image {
    /// Opens the image built from the recipe in `tests/vm`; builds it first if need be.
    pub fn open() -> Result<Self> {
        static OPENED: Mutex<Option<Image>> = Mutex::new(None);
        // A panic elsewhere cannot leave a half-made value behind.
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*opened {
            return Ok(image.clone());
        }
        let dir = build(&[])?;
        let in_use = cache::lock_file(&dir.join("in-use"))?;
        in_use.lock_shared().context("cannot lock the image")?;
        let accelerator = probed_accelerator(&dir)?;
        let image = Self { dir, accelerator, _in_use: in_use.into() };
        *opened = Some(image.clone());
        Ok(image)
    }

    /// Looks for newer packages and builds a new image if there are any.
    pub fn refresh() -> Result<()> {
        build(&["--refresh"]).map(drop)
    }

    /// Removes unused images of other recipes.
    pub fn remove_others(&self) -> Result<()> {
        let parent = cache::root()?.join("images");
        let paths = fs::read_dir(&parent)
            .with_context(|| format!("cannot read {}", parent.display()))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>>>()?;
        let (links, images): (Vec<_>, Vec<_>) = paths.into_iter().partition(|path| path.is_symlink());
        for path in images {
            // Without this file the image is still being built.
            if path == self.dir || !path.join("complete").exists() {
                continue;
            }
            let in_use = cache::lock_file(&path.join("in-use"))?;
            if cache::try_lock(&in_use)? {
                cache::remove_dir(&path)?;
            }
        }
        for link in links.into_iter().filter(|link| !link.exists()) {
            fs::remove_file(&link).with_context(|| format!("cannot remove {}", link.display()))?;
        }
        Ok(())
    }

    /// Returns the folder that holds everything of this image, its templates too.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    pub(crate) fn root_disk(&self) -> PathBuf {
        self.dir.join("root.img")
    }

    pub(crate) fn kernel_dir(&self, kernel: Kernel) -> PathBuf {
        kernel_dir(&self.dir, kernel)
    }

    /// Returns the exact version of a guest's kernel, as `uname -r` prints it.
    pub fn kernel_version(&self, kernel: Kernel) -> Result<String> {
        let path = self.kernel_dir(kernel).join("version");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.trim().to_owned())
    }
}

fn kernel_dir(image: &Path, kernel: Kernel) -> PathBuf {
    image.join("kernels").join(kernel.build())
}

fn build(arguments: &[&str]) -> Result<PathBuf> {
    let output = Command::new(BUILD_SCRIPT)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {BUILD_SCRIPT}"))?;
    if !output.status.success() {
        bail!("{BUILD_SCRIPT} failed ({}): its messages are on standard error", output.status);
    }
    let dir = String::from_utf8(output.stdout).context("the image's path is not UTF-8")?;
    Ok(PathBuf::from(dir.trim_end()))
}

/// Checks whether guests really boot under KVM here, once per image.
fn probed_accelerator(dir: &Path) -> Result<Accelerator> {
    let record = dir.join("accelerator");
    let lock = cache::lock_file(&dir.join("accelerator.lock"))?;
    lock.lock().context("cannot lock the probe for KVM")?;
    match fs::read_to_string(&record).as_deref() {
        Ok("kvm") => return Ok(Accelerator::Kvm),
        Ok("tcg") => return Ok(Accelerator::Tcg),
        _ => {}
    }
    let accelerator = if kvm_boots(dir)? { Accelerator::Kvm } else { Accelerator::Tcg };
    fs::write(&record, accelerator.name()).with_context(|| format!("cannot write {}", record.display()))?;
    Ok(accelerator)
}

fn kvm_boots(dir: &Path) -> Result<bool> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(false);
    }
    let console = dir.join("kvm-probe.log");
    let kernel = kernel_dir(dir, Kernel::Ublk);
    let mut qemu = Command::new(QEMU)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-machine", "q35,accel=kvm", "-cpu", "host", "-smp", "2", "-m", "512M"])
        .arg("-serial")
        .arg(format!("file:{}", console.display()))
        .arg("-kernel")
        .arg(kernel.join("vmlinuz"))
        .arg("-initrd")
        .arg(kernel.join("initramfs.gz"))
        .args(["-append", "console=ttyS0 quiet shorthorn.probe"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {QEMU}"))?;
    if wait_at_most(&mut qemu, PROBE_LIMIT)?.is_none() {
        qemu.kill().context("cannot end QEMU")?;
        qemu.wait().context("cannot wait for QEMU")?;
    }
    Ok(fs::read_to_string(&console).is_ok_and(|text| text.contains(PROBE_OK)))
}
