//! Kills the real controller with SIGKILL, again and again, while everything continues.

use std::time::Duration;

use crate::support::cluster::{Cluster, LIMIT};
use shorthorn_testkit::Random;
use tokio::time::{Instant, sleep, timeout};

/// Runs a command while the controller is killed under it up to three times; repeats it until it works.
async fn under_fire(cluster: &mut Cluster, random: &mut Random, words: &[&str]) {
    let deadline = Instant::now() + LIMIT;
    let mut kills = random.below(3) + 1;
    loop {
        let child = cluster.ctl(words).spawn().unwrap();
        while kills > 0 {
            kills -= 1;
            // When the kill comes is the random part of this test; nothing waits for it.
            sleep(Duration::from_micros(random.below(25_000))).await;
            cluster.kill_controller().await;
            cluster.start_controller().await;
        }
        let output = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        // A deletion that was done before the kill is not found the second time.
        if output.status.success() || (words[1] == "delete" && output.status.code() == Some(3)) {
            return;
        }
        assert_eq!(output.status.code(), Some(5), "{words:?}: {error}");
        assert!(Instant::now() < deadline, "{words:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_controller_continues_its_work_at_its_next_start() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut attach = 0;
    for seed in 1..=6 {
        let mut random = Random::new(seed);
        under_fire(&mut cluster, &mut random, &["volume", "create", "v", "--size", "1GiB"]).await;
        for node in ["a", "c"] {
            under_fire(&mut cluster, &mut random, &["volume", "attach", "v", "--node", node]).await;
            let volume = cluster.inspect("v").await;
            assert_eq!(volume["robustness"], "healthy", "{volume:#}");
            assert!(volume["attach"].as_u64().unwrap() > attach, "{volume:#}");
            attach = volume["attach"].as_u64().unwrap();
            under_fire(&mut cluster, &mut random, &["volume", "detach", "v"]).await;
        }
        under_fire(&mut cluster, &mut random, &["volume", "delete", "v", "--yes"]).await;
        attach = 0;
        // The name may be used again at once, with a new expected state.
        cluster.check();
        *cluster.truth.lock().unwrap() = Default::default();
        assert!(cluster.agents.iter().all(|agent| agent.running().is_empty()));
        assert!(cluster.agents.iter().all(|agent| agent.directories().is_empty()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_changes_nothing_for_an_attached_volume() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let starts = |cluster: &Cluster| cluster.agents.iter().map(|agent| agent.starts()).sum::<u32>();
    let (before, started) = (cluster.inspect("v").await, starts(&cluster));
    for _ in 0..3 {
        cluster.kill_controller().await;
        cluster.start_controller().await;
        // A second volume shows that the new controller is at work with both agents.
        cluster.retry(&["volume", "create", "w", "--size", "1GiB", "--replicas", "2"]).await;
        cluster.ok(&["volume", "delete", "w", "--yes"]).await;
        assert_eq!(cluster.inspect("v").await, before);
    }
    assert_eq!(starts(&cluster), started);
    // The agents too.
    for node in 0..2 {
        cluster.stop_agent(node);
        cluster.start_agent(node);
    }
    cluster.retry(&["disk", "add", "a", "/other"]).await;
    cluster.retry(&["disk", "add", "b", "/other"]).await;
    assert_eq!(cluster.inspect("v").await, before);
    assert_eq!(starts(&cluster), started);
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.check();
}
