//! The commands of kubectl on a page, run against the API server.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Result, ensure};
use shorthorn_testkit::docs::{self, Script};

use crate::cluster::Cluster;

/// The longest that kubectl waits for a deletion, in seconds.
const KUBECTL_LIMIT_S: &str = "60";

/// The commands of a page that were not tried yet, and a kubectl for them.
pub struct Documented {
    pub script: Script,
    folder: PathBuf,
    kubeconfig: PathBuf,
    kubectl: PathBuf,
}

impl Documented {
    pub fn new(cluster: &Cluster, script: Script) -> Result<Documented> {
        let tools = Command::new(docs::root().join("packaging/chart/tools")).output()?;
        ensure!(tools.status.success(), "{}", String::from_utf8_lossy(&tools.stderr));
        let tools = PathBuf::from(String::from_utf8(tools.stdout)?.trim_end());
        Ok(Documented {
            script,
            folder: cluster.folder.path().to_owned(),
            kubeconfig: cluster.api.admin_kubeconfig()?,
            kubectl: tools.join("kubectl"),
        })
    }

    /// Takes the next command, which has to be one of kubectl, without starting it.
    pub fn command(&mut self, start: &str) -> Result<Command> {
        let words = self.script.next(&format!("kubectl {start}"))?;
        let mut command = Command::new("timeout");
        command.arg(KUBECTL_LIMIT_S).arg(&self.kubectl).args(&words[1..]);
        command.current_dir(docs::root()).env("KUBECONFIG", &self.kubeconfig);
        // For its cache.
        command.env("HOME", &self.folder);
        Ok(command)
    }

    /// Runs the next command, which has to be one of kubectl.
    pub fn kubectl(&mut self, start: &str) -> Result<Output> {
        Ok(self.command(start)?.output()?)
    }

    /// Runs the next command, which has to succeed, and returns its standard output.
    pub fn kubectl_succeeds(&mut self, start: &str) -> Result<String> {
        let output = self.kubectl(start)?;
        ensure!(output.status.success(), "{start}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }
}
