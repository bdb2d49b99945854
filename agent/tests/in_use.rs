//! A real agent does not stop an engine whose device is in use. A loop device stands for the device of the
//! volume, at its place. An engine can make a device only with a driver of the kernel. Needs root.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::node::{REPLICAS, connect, pid, start_volume, stop};
use common::{AgentProcess, agent, lives};
use shorthorn_api::v1::InstanceKind;
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_testkit::devices::{BindMount, LoopDevice, run};
use tempfile::TempDir;
use tonic::Code;
use tonic::transport::Channel;

fn start(dir: &TempDir) -> AgentProcess {
    let path = |name: &str| dir.path().join(name).display().to_string();
    let config = format!(
        "node_name = \"n1\"\nlisten = [\"unix:{}\"]\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
         device_dir = \"{}\"\ninstances = \"children\"\ncsi = \"off\"\n",
        path("sock"),
        path("s"),
        path("r"),
        path("dev")
    );
    let file = dir.path().join("agent.toml");
    fs::write(&file, config).unwrap();
    AgentProcess::start(agent().arg("serve").arg("--config").arg(file))
}

/// Stops the engine, which has to be refused with the user's name.
async fn refused(client: &mut NodeClient<Channel>, engine: u32, user: &str) {
    let answer = client.stop_instance(stop(InstanceKind::Engine, "v1", 0)).await.unwrap_err();
    assert_eq!(answer.code(), Code::FailedPrecondition, "{user}: {answer}");
    let message = answer.message();
    assert!(message.contains("dev/v1 is in use") && message.contains(user), "{user}: {message}");
    assert!(lives(engine), "{user}: the engine was stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_not_stopped_while_its_device_has_any_user() {
    let dir = TempDir::new().unwrap();
    let agent = start(&dir);
    agent.wait_for_log(": ready node=");
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mut client = connect(&dir.path().join("sock")).await.unwrap();
    let engine = pid(&start_volume(&disk, "socket", &mut client).await);

    let file = dir.path().join("content");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let device = LoopDevice::of(&file);
    let node = dir.path().join("dev/v1");
    fs::create_dir_all(dir.path().join("dev")).unwrap();
    run("cp", &[Path::new("--archive"), device.path(), &node]);

    // A database or qemu: it does not open the device exclusively.
    let opened = fs::File::open(&node).unwrap();
    refused(&mut client, engine, &format!("opened by process {} (", std::process::id())).await;
    drop(opened);

    let holder = LoopDevice::of(&node);
    refused(&mut client, engine, &format!("held by the loop device {}", holder.name())).await;
    drop(holder);

    // As kubelet publishes a device to a pod.
    let target = dir.path().join("published");
    fs::File::create(&target).unwrap();
    let bound = BindMount::new(&node, &target);
    refused(&mut client, engine, &format!("the device node is mounted at {}", bound.target().display()))
        .await;
    drop(bound);

    client.stop_instance(stop(InstanceKind::Engine, "v1", 0)).await.unwrap();
    for id in REPLICAS {
        client.stop_instance(stop(InstanceKind::Replica, &format!("v1-{id}"), 0)).await.unwrap();
    }
    assert!(!lives(engine));
}
