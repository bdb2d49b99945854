use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn disk(path: &str, total_gib: u64, scheduled_gib: u64) -> DiskCandidate {
    DiskCandidate {
        path: path.to_owned(),
        uuid: format!("uuid-{path}"),
        refusal: None,
        total_bytes: total_gib * GIB,
        reserved_bytes: total_gib * GIB / 100 * RESERVED_PERCENT,
        scheduled_bytes: scheduled_gib * GIB,
        same_volume: 0,
    }
}

fn node(name: &str, disks: Vec<DiskCandidate>) -> NodeCandidate {
    NodeCandidate { name: NodeName::new(name).unwrap(), refusal: None, excused: 0, disks }
}

fn request(size_gib: u64, soft_anti_affinity: bool) -> Request {
    Request { size_bytes: size_gib * GIB, soft_anti_affinity }
}

fn places(result: &Result<Vec<Placement>, Refusal>) -> Vec<String> {
    let placements = result.as_ref().unwrap().iter();
    placements.map(|placement| format!("{}{}", placement.node, placement.disk_path)).collect()
}

#[test]
fn takes_the_most_free_first_and_each_node_once() {
    let mut nodes = [
        node("a", vec![disk("/1", 100, 50), disk("/2", 100, 10)]),
        node("b", vec![disk("/1", 100, 0)]),
        node("c", vec![disk("/1", 100, 80)]),
        node("d", vec![disk("/1", 100, 20)]),
    ];
    assert_eq!(places(&place(&request(5, false), &mut nodes, 3)), ["b/1", "a/2", "d/1"]);
}

#[test]
fn soft_anti_affinity_spreads_over_nodes_then_disks() {
    let mut nodes =
        [node("a", vec![disk("/1", 100, 0), disk("/2", 100, 60)]), node("b", vec![disk("/1", 100, 70)])];
    assert_eq!(places(&place(&request(5, true), &mut nodes, 4)), ["a/1", "b/1", "a/2", "b/1"]);
}

#[test]
fn what_is_there_counts() {
    let mut nodes = [node("a", vec![disk("/1", 100, 0)]), node("b", vec![disk("/1", 100, 50)])];
    nodes[0].disks[0].same_volume = 1;
    assert_eq!(places(&place(&request(5, false), &mut nodes, 2)), ["b/1"]);
}

#[test]
fn a_refusal_names_every_node_and_its_reason() {
    let mut closed = node("closed", vec![disk("/1", 100, 0)]);
    closed.refusal = Some("it is not ready: no answer".to_owned());
    let mut broken = node("broken", vec![disk("/1", 100, 0)]);
    broken.disks[0].refusal = Some("read-only".to_owned());
    let full = node("full", vec![disk("/1", 100, 86)]);
    let mut nodes = [closed, broken, full, node("empty", vec![]), node("good", vec![disk("/1", 100, 0)])];
    let refusal = place(&request(5, false), &mut nodes, 2).unwrap_err();
    assert_eq!((refusal.placed, refusal.wanted, refusal.by_node.len()), (1, 2, 5));
    let text = refusal.to_string();
    for reason in [
        "1 of 2 replicas have a place",
        "closed: it is not ready: no answer",
        "broken: disk /1 is not usable: read-only",
        "full: disk /1 can promise 4.0 GiB more, 5.0 GiB are needed",
        "empty: it has no disk: run shorthornctl disk add empty PATH",
        "good: it has a replica of this volume already",
    ] {
        assert!(text.contains(reason), "{reason:?} in {text:?}");
    }
    assert!(place(&request(5, false), &mut [], 1).unwrap_err().to_string().contains("--node"));
}

#[test]
fn capacity_is_exact_to_the_byte() {
    let mut exact = disk("/1", 100, 0);
    exact.scheduled_bytes = exact.free_bytes() - 5 * GIB;
    assert!(place(&request(5, false), &mut [node("a", vec![exact.clone()])], 1).is_ok());
    exact.scheduled_bytes += 1;
    assert!(place(&request(5, false), &mut [node("a", vec![exact])], 1).is_err());
}

proptest! {
    #[test]
    fn never_breaks_its_rules(
        sizes in prop::collection::vec(prop::collection::vec((1u64..200, 0u64..250), 0..4), 0..8),
        wanted in 1u32..9,
        size in 1u64..50,
        soft: bool,
    ) {
        let mut nodes: Vec<NodeCandidate> = Vec::new();
        for (at, disks) in sizes.iter().enumerate() {
            let disks = disks.iter().enumerate();
            let disks = disks.map(|(at, (total, scheduled))| disk(&format!("/{at}"), *total, *scheduled));
            nodes.push(node(&format!("n{at}"), disks.collect()));
        }
        let before = nodes.clone();
        let fits = |disk: &DiskCandidate| disk.free_bytes() >= size * GIB;
        match place(&request(size, soft), &mut nodes, wanted) {
            Ok(placements) => {
                prop_assert_eq!(placements.len(), wanted as usize);
                for (node, old) in nodes.iter().zip(&before) {
                    prop_assert!(soft || node.same_volume() <= 1);
                    for (disk, old) in node.disks.iter().zip(&old.disks) {
                        let taken = u64::from(disk.same_volume) * size * GIB;
                        prop_assert!(disk.same_volume == 0 || taken <= old.free_bytes());
                    }
                }
            }
            Err(refusal) => {
                prop_assert_eq!(refusal.by_node.len(), nodes.len());
                prop_assert!(refusal.by_node.values().all(|reason| !reason.is_empty()));
                let nodes_with_room = before.iter().filter(|node| node.disks.iter().any(fits)).count();
                prop_assert!(nodes_with_room < wanted as usize);
            }
        }
    }
}
