//! The engines of several volumes are replaced by one command, or by two.

use crate::support::agent::FakeAgent;
use crate::support::cluster::Cluster;
use tonic::Code;

const UPGRADE: [&str; 4] = ["upgrade", "engines", "--timeout", "3"];

/// Volumes with one replica and an engine on each of these nodes, whose engines need to be replaced.
async fn outdated(nodes: &[&str]) -> Cluster {
    let cluster = Cluster::start(nodes).await;
    for (node, agent) in nodes.iter().zip(&cluster.agents) {
        cluster.ok(&["volume", "create", node, "--size", "1GiB", "--replicas", "1"]).await;
        cluster.ok(&["volume", "attach", node, "--node", node]).await;
        agent.engine(node, |engine| engine.needs_upgrade = Some(true));
    }
    for node in nodes {
        cluster.until(node, "outdated", |volume| volume["engine"]["needsUpgrade"] == true).await;
    }
    cluster
}

/// Returns the output and the errors of a command that may fail, and its exit code.
async fn run(cluster: &Cluster) -> (String, String, Option<i32>) {
    let done = cluster.run(&UPGRADE).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&done.stdout), text(&done.stderr), done.status.code())
}

fn upgrades(cluster: &Cluster) -> Vec<u32> {
    cluster.agents.iter().map(FakeAgent::upgrades).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_commands_at_the_same_time_replace_each_engine_once() {
    let cluster = outdated(&["a", "b"]).await;
    let ((one, _, one_code), (two, _, two_code)) = tokio::join!(run(&cluster), run(&cluster));
    assert_eq!((one_code, two_code), (Some(0), Some(0)), "{one}{two}");
    assert_eq!(upgrades(&cluster), [1, 1], "{one}{two}");
    assert_eq!(format!("{one}{two}").matches("the engine is replaced").count(), 2, "{one}{two}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_dies_meanwhile_is_asked_again() {
    let cluster = outdated(&["a"]).await;
    // First before it has done anything, then after the replacement of the engine.
    cluster.agents[0].fail_upgrades(&[(Code::Unknown, true), (Code::Internal, true), (Code::Unknown, false)]);
    let (said, problem, code) = run(&cluster).await;
    assert_eq!(code, Some(0), "{said}{problem}");
    assert!(said.contains("volume a on node a: the engine is replaced"), "{said}");
    assert_eq!(upgrades(&cluster), [1]);
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_cannot_be_replaced_do_not_hold_up_the_others() {
    let cluster = outdated(&["a", "b", "c"]).await;
    cluster.agents[0].fail_upgrades(&[(Code::FailedPrecondition, true)]);
    cluster.agents[1].fail_upgrades(&[(Code::Unavailable, true); 1000]);
    let (said, problem, code) = run(&cluster).await;
    assert_eq!(code, Some(1), "{said}{problem}");
    assert!(said.contains("volume c on node c: the engine is replaced"), "{said}");
    for engine in ["the engine of volume a on node a: ", "the engine of volume b on node b: "] {
        assert!(problem.contains(engine), "{problem}");
    }
    assert!(problem.contains("1 of 3 engines are replaced, 2 failed, and 0 were left alone"), "{problem}");
    cluster.agents[1].fail_upgrades(&[]);
    let (said, problem, code) = run(&cluster).await;
    assert_eq!((code, upgrades(&cluster)), (Some(0), vec![1, 1, 1]), "{said}{problem}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_not_compared_is_not_reported_as_current() {
    let cluster = outdated(&["a"]).await;
    cluster.agents[0].engine("a", |engine| engine.needs_upgrade = None);
    cluster.until("a", "not compared", |volume| volume["engine"]["needsUpgrade"].is_null()).await;
    let wide = cluster.ok(&["volume", "list", "-o", "wide"]).await;
    assert!(wide.contains("unknown"), "{wide}");
    let plan = cluster.ok(&["upgrade", "engines", "--dry-run"]).await;
    assert!(plan.contains("volume a on node a: the program is not compared yet"), "{plan}");
    let (said, problem, code) = run(&cluster).await;
    assert_eq!(code, Some(1), "{said}{problem}");
    assert!(problem.contains("the programs of 1 engines are not compared"), "{problem}");
    assert!(said.is_empty(), "{said}");
    assert_eq!(upgrades(&cluster), [0]);
    cluster.check();
}
