//! Calls whose controller is killed.

use std::time::Duration;

use shorthorn_testkit::Random;
use tokio::time::{Instant, sleep};
use tonic::Code;

use super::caller;
use crate::support::cluster::{Cluster, LIMIT};
use crate::support::csi::*;

/// Makes a call while the controller is killed under it once or twice; repeats it until it works.
async fn under_fire<F: Future<Output = Code> + Send + 'static>(
    cluster: &mut Cluster,
    random: &mut Random,
    what: &str,
    call: impl Fn(Caller) -> F,
) {
    let mut kills = random.below(2) + 1;
    let deadline = Instant::now() + LIMIT;
    loop {
        let calling = tokio::spawn(call(caller(cluster)));
        while kills > 0 {
            kills -= 1;
            // When the kill comes is the random part of this test; nothing waits for it.
            sleep(Duration::from_micros(random.below(25_000))).await;
            cluster.kill_controller().await;
            cluster.start_controller().await;
        }
        match calling.await.unwrap() {
            Code::Ok => return,
            // A connection that broke has no code of ours.
            Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal => {}
            code => panic!("{what}: {code:?}"),
        }
        assert!(Instant::now() < deadline, "{what} never works");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_controller_is_killed_is_repeated_to_the_same_end() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    for seed in 1..=4 {
        let mut random = Random::new(seed);
        let name = format!("Volume {seed}");
        let request = create(&name);
        under_fire(&mut cluster, &mut random, "create", |mut csi| {
            let request = request.clone();
            async move { code(&csi.create(request).await) }
        })
        .await;
        let ids = caller(&cluster).ids().await;
        let [id] = ids.as_slice() else { panic!("{ids:?}") };
        for node in ["a", "c"] {
            under_fire(&mut cluster, &mut random, "publish", |mut csi| {
                let request = publish(id, node);
                async move { code(&csi.publish(request).await) }
            })
            .await;
            let volume = cluster.inspect(id).await;
            assert_eq!((&volume["state"], &volume["robustness"]), (&"attached".into(), &"healthy".into()));
            under_fire(&mut cluster, &mut random, "unpublish", |mut csi| {
                let id = id.clone();
                async move { code(&csi.unpublish(&id, node).await) }
            })
            .await;
            cluster.until_stopped().await;
        }
        under_fire(&mut cluster, &mut random, "delete", |mut csi| {
            let id = id.clone();
            async move { code(&csi.delete(&id).await) }
        })
        .await;
        assert!(cluster.agents.iter().all(|agent| agent.directories().is_empty()));
        cluster.check();
    }
}
