//! The engines of a fleet are replaced after their program was upgraded, under loads that check every answer.
//! Each host is a network namespace of this machine.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{
    Guest, GuestOptions, Load, NbdClient, compare_exports, under_load, until, until_whole,
};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
/// The volumes, each attached to the host of its index.
const VOLUMES: [&str; 3] = ["va", "vb", "vc"];

struct Fleet {
    hosts: Hosts,
    folder: tempfile::TempDir,
}

/// Three hosts with a volume on each, whose engines run the program that was installed first.
fn fleet() -> Result<Fleet> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), VOLUMES.len())?;
    for (host, volume) in VOLUMES.into_iter().enumerate() {
        let size = ["--size", "64MiB", "--frontend", "socket", "--replicas", "3"];
        hosts.ctl(&[&["volume", "create", volume][..], &size].concat())?;
        hosts.ctl(&["volume", "attach", volume, "--node", &name(host)])?;
        until_whole(&hosts.engine_control(host, volume), LIMIT)?;
    }
    Ok(Fleet { hosts, folder })
}

impl Fleet {
    /// Replaces the program and the agents of all hosts, as the package does.
    fn upgrade_agents(&mut self) -> Result<()> {
        self.hosts.install_other_build()?;
        for host in 0..VOLUMES.len() {
            self.hosts.kill_agent(host)?;
            self.hosts.start_agent(host)?;
        }
        Ok(())
    }

    fn guest(&self, host: usize) -> Result<Guest<NbdClient>> {
        let options = GuestOptions { sectors: 8192, ..GuestOptions::new(fastrand::u64(..)) };
        Ok(Guest::new(self.hosts.client(host, VOLUMES[host])?, options))
    }

    fn engine(&self, host: usize) -> Result<i32> {
        let engines = self.hosts.processes(host, "engine")?;
        ensure!(engines.len() == 1, "host {host} has engines {engines:?}");
        Ok(engines[0])
    }

    fn engines(&self) -> Result<Vec<i32>> {
        (0..VOLUMES.len()).map(|host| self.engine(host)).collect()
    }

    /// Waits until exactly these volumes are shown to need an upgrade.
    fn await_outdated(&self, volumes: &[&str]) -> Result<()> {
        until(&format!("{volumes:?} as those to upgrade"), LIMIT, || {
            let list = self.hosts.ctl(&["volume", "list", "--output", "json"])?;
            let list: Vec<Value> = serde_json::from_str(&list)?;
            let outdated: Vec<&str> = list
                .iter()
                .filter(|volume| volume["engine"]["needsUpgrade"] == true)
                .filter_map(|volume| volume["name"].as_str())
                .collect();
            ensure!(outdated == volumes, "outdated are {outdated:?}");
            Ok(Some(()))
        })
    }

    /// Runs `body` under a load on each volume, and compares all replicas at the end.
    fn under_loads(&mut self, body: impl FnOnce(&mut Fleet, &[&Load]) -> Result<()>) -> Result<()> {
        let (a, b, c) = (self.guest(0)?, self.guest(1)?, self.guest(2)?);
        under_load(a, |a| under_load(b, |b| under_load(c, |c| body(self, &[a, b, c])).map(drop)).map(drop))?;
        for volume in VOLUMES {
            let directories = self.hosts.directories(volume)?;
            self.hosts.ctl(&["volume", "detach", volume])?;
            compare_exports(&directories, self.folder.path())?;
        }
        Ok(())
    }
}

fn answers(loads: &[&Load]) -> Result<()> {
    loads.iter().try_for_each(|load| load.wait_for_answers(100, LIMIT).map(drop))
}

#[test]
fn a_fleet_is_upgraded_while_the_controller_is_replaced() -> Result<()> {
    fleet()?.under_loads(|fleet, loads| {
        answers(loads)?;
        fleet.await_outdated(&[])?;
        let before = fleet.engines()?;
        fleet.upgrade_agents()?;
        fleet.await_outdated(&VOLUMES)?;
        ensure!(fleet.engines()? == before, "an engine was replaced by the upgrade of the agents");
        let wide = fleet.hosts.ctl(&["volume", "list", "--output", "wide"])?;
        ensure!(wide.contains("NEEDS-UPGRADE") && wide.contains("EngineNeedsUpgrade"), "{wide}");
        let shown = fleet.hosts.ctl(&["volume", "inspect", VOLUMES[0]])?;
        ensure!(shown.contains("shorthornctl upgrade engines"), "{shown}");
        let plan = fleet.hosts.ctl(&["upgrade", "engines", "--dry-run", "--node", &name(1)])?;
        ensure!(plan.trim() == "volume vb on node n1", "{plan}");

        let mut upgrade = fleet.hosts.ctl_command(&["upgrade", "engines"])?;
        let upgrade = upgrade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        until("first engine of the new program", LIMIT, || {
            Ok((fleet.hosts.processes(0, "engine")? != before[..1]).then_some(()))
        })?;
        fleet.hosts.kill_controller()?;
        fleet.hosts.start_controller()?;
        let output = upgrade.wait_with_output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{stderr}");
        println!("{}", String::from_utf8_lossy(&output.stdout));

        fleet.await_outdated(&[])?;
        let after = fleet.engines()?;
        ensure!(after.iter().all(|engine| !before.contains(engine)), "{before:?} became {after:?}");
        answers(loads)?;
        let again = fleet.hosts.ctl(&["upgrade", "engines"])?;
        ensure!(again.contains("every engine runs the program"), "{again}");
        ensure!(fleet.engines()? == after, "a repeated command has replaced an engine");
        Ok(())
    })
}

/// The agents run on: a package that is installed without its scripts restarts nothing.
#[test]
fn a_rollback_of_the_program_is_noticed() -> Result<()> {
    let mut fleet = fleet()?;
    fleet.upgrade_agents()?;
    fleet.await_outdated(&VOLUMES)?;
    let before = fleet.engines()?;
    fleet.hosts.install_first_build()?;
    fleet.await_outdated(&[])?;
    let printed = fleet.hosts.ctl(&["upgrade", "engines"])?;
    ensure!(printed.contains("every engine runs the program"), "{printed}");
    fleet.hosts.install_other_build()?;
    fleet.await_outdated(&VOLUMES)?;
    ensure!(fleet.engines()? == before, "an engine was replaced");
    Ok(())
}

#[test]
fn an_upgrade_continues_after_a_failure_and_can_be_repeated() -> Result<()> {
    fleet()?.under_loads(|fleet, loads| {
        fleet.upgrade_agents()?;
        fleet.await_outdated(&VOLUMES)?;
        let before = fleet.engines()?;
        fleet.hosts.kill_agent(1)?;
        let refusal = fleet.hosts.refused(&["upgrade", "engines", "--timeout", "15"])?;
        ensure!(refusal.contains("the engine of volume vb on node n1"), "{refusal}");
        ensure!(
            refusal.contains("2 of 3 engines are replaced, 1 failed, and 0 were left alone"),
            "{refusal}"
        );
        let after = fleet.engines()?;
        let is_new: Vec<bool> = before.iter().zip(&after).map(|(before, after)| before != after).collect();
        ensure!(is_new == [true, false, true], "{before:?} became {after:?}");
        answers(loads)?;
        fleet.hosts.start_agent(1)?;
        // The controller connects to the agent again meanwhile.
        let printed = fleet.hosts.ctl(&["upgrade", "engines", "--max-parallel", "2"])?;
        ensure!(printed.contains("engines that are replaced: 1"), "{printed}");
        fleet.await_outdated(&[])?;
        answers(loads)
    })
}

#[test]
fn two_operators_replace_each_engine_once() -> Result<()> {
    fleet()?.under_loads(|fleet, loads| {
        fleet.upgrade_agents()?;
        fleet.await_outdated(&VOLUMES)?;
        let start = |_| -> Result<Child> {
            let mut upgrade = fleet.hosts.ctl_command(&["upgrade", "engines"])?;
            Ok(upgrade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
        };
        let commands = (0..2).map(start).collect::<Result<Vec<Child>>>()?;
        let mut printed = String::new();
        for command in commands {
            let output = command.wait_with_output()?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            printed.push_str(&String::from_utf8_lossy(&output.stdout));
        }
        ensure!(printed.matches("the engine is replaced").count() == VOLUMES.len(), "{printed}");
        fleet.await_outdated(&[])?;
        answers(loads)
    })
}
