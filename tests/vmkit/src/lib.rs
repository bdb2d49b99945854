//! Virtual machines with a real kernel, for tests.
//!
//! A [`Vm`] is a clone of a *template*: a machine that was booted once, saved while it ran, and is mapped
//! copy-on-write by every clone. So a clean machine runs its first command about a second after
//! [`Vm::start`], even under software emulation. Missing parts (the disk image, a template) are built first,
//! once per machine.
//!
//! ```text
//! let vm = Vm::start(VmOptions::new(Kernel::Ublk))?;
//! vm.sh("modprobe ublk_drv && test -c /dev/ublk-control")?;
//! ```
//!
//! Every wait has a limit, and every error names the console log. A VM disappears with the value, or with the
//! process that started it, however that ends.

mod agent;
mod cache;
mod check;
mod console;
mod disk;
mod image;
mod kernel;
mod lan;
mod machine;
mod pack;
mod process;
mod qemu;
mod qmp;
mod template;
mod terminal;
mod vm;

pub use agent::{GuestCommand, Output, RunningCommand, Stream};
pub use check::check_template;
pub use disk::{DataDisk, Durability, FileSystem};
pub use image::Image;
pub use kernel::Kernel;
pub use lan::Lan;
pub use process::wait_at_most;
pub use template::{Template, prepare};
pub use terminal::{interactive_shell, print as print_output};
pub use vm::{HOST_SIDE, Vm, VmOptions};
