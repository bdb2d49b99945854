//! The required part of systemd's D-Bus interface, and the names of instances in it.

use shorthorn_api::v1::InstanceKind;
use zbus::OwnedObjectPath;

use crate::serve::instance::InstanceId;

/// Returns the unit of an instance. Names of volumes and replicas need no escaping: they are DNS labels.
pub fn unit_of(id: &InstanceId) -> String {
    let template = if id.kind() == InstanceKind::Engine { "shorthorn-engine" } else { "shorthorn-replica" };
    format!("{template}@{}.service", id.name())
}

#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
pub trait Manager {
    /// Subscribes to signals, which are not sent otherwise.
    fn subscribe(&self) -> zbus::Result<()>;
    /// Returns the object of a unit, which need not be loaded.
    fn load_unit(&self, name: &str) -> zbus::Result<OwnedObjectPath>;
    /// Answers with the job.
    fn start_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    /// Answers with the job.
    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    /// Answers with the job.
    fn restart_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    fn reset_failed_unit(&self, name: &str) -> zbus::Result<()>;
    /// Signals that a job is done; the result is `done` if it was successful.
    #[zbus(signal)]
    fn job_removed(&self, id: u32, job: OwnedObjectPath, unit: String, result: String) -> zbus::Result<()>;
}

#[zbus::proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
pub trait Unit {
    #[zbus(property(emits_changed_signal = "false"))]
    fn active_state(&self) -> zbus::Result<String>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn sub_state(&self) -> zbus::Result<String>;
    /// Returns the number and object of the job that is queued or runs for the unit; the number is 0 if it
    /// has none.
    #[zbus(property(emits_changed_signal = "false"))]
    fn job(&self) -> zbus::Result<(u32, OwnedObjectPath)>;
}

#[zbus::proxy(interface = "org.freedesktop.systemd1.Service", default_service = "org.freedesktop.systemd1")]
pub trait Service {
    #[zbus(property(emits_changed_signal = "false"), name = "MainPID")]
    fn main_pid(&self) -> zbus::Result<u32>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn result(&self) -> zbus::Result<String>;
}
