use proptest::prelude::*;

use super::*;
use crate::{Labels, labels};

const GIB: u64 = 1 << 30;

fn disk(path: &str, total_gib: u64, scheduled_gib: u64) -> DiskCandidate {
    DiskCandidate {
        path: path.to_owned(),
        uuid: format!("uuid-{path}"),
        total_bytes: total_gib * GIB,
        available_bytes: total_gib * GIB,
        reserved_bytes: total_gib * GIB / 100 * RESERVED_PERCENT,
        scheduled_bytes: scheduled_gib * GIB,
        ..DiskCandidate::default()
    }
}

fn node(name: &str, disks: Vec<DiskCandidate>) -> NodeCandidate {
    let name = NodeName::new(name).unwrap();
    NodeCandidate {
        name,
        zone: None,
        tags: Labels::new(),
        cordoned: false,
        machine_cordoned: false,
        evicted: false,
        not_ready: None,
        is_busy: false,
        disks,
    }
}

/// Returns a node with one empty disk of 100 GiB.
fn plain(name: &str) -> NodeCandidate {
    node(name, vec![disk("/1", 100, 0)])
}

fn in_zone(zone: &str, node: NodeCandidate) -> NodeCandidate {
    NodeCandidate { zone: Some(zone.parse().unwrap()), ..node }
}

/// Returns the same with `replicas` replicas of the volume on its first disk.
fn used(mut node: NodeCandidate, replicas: u32) -> NodeCandidate {
    node.disks[0].same_volume = replicas;
    node
}

fn request(size_gib: u64) -> PlacementRequest {
    PlacementRequest {
        size_bytes: size_gib * GIB,
        zone_soft_anti_affinity: true,
        disk_soft_anti_affinity: true,
        ..PlacementRequest::default()
    }
}

fn soft(size_gib: u64) -> PlacementRequest {
    PlacementRequest { soft_anti_affinity: true, ..request(size_gib) }
}

fn places_of(result: &Result<Vec<Placement>, PlacementRefusal>) -> Vec<String> {
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
    assert_eq!(places_of(&schedule(&request(5), &mut nodes, 0, 3)), ["b/1", "a/2", "d/1"]);
}

#[test]
fn soft_anti_affinity_spreads_over_nodes_then_disks() {
    let mut nodes =
        [node("a", vec![disk("/1", 100, 0), disk("/2", 100, 60)]), node("b", vec![disk("/1", 100, 70)])];
    assert_eq!(places_of(&schedule(&soft(5), &mut nodes, 0, 4)), ["a/1", "b/1", "a/2", "b/1"]);
}

#[test]
fn existing_replicas_count_in_a_placement() {
    let mut nodes = [used(plain("a"), 1), node("b", vec![disk("/1", 100, 50)])];
    assert_eq!(places_of(&schedule(&request(5), &mut nodes, 1, 2)), ["b/1"]);
}

/// A filter that removes the only node for a request, the beginning of the reason, and of the summary.
type FilterCase = (Filter, PlacementRequest, NodeCandidate, &'static str, &'static str);

fn cases_of_node_filters() -> Vec<FilterCase> {
    let tagged = PlacementRequest { node_selector: labels(["fast", "new"]).unwrap(), ..request(5) };
    vec![
        (
            Filter::Cordon,
            request(5),
            NodeCandidate { cordoned: true, ..plain("n") },
            "cordoned",
            "1 is cordoned",
        ),
        (
            Filter::Cordon,
            request(5),
            NodeCandidate { machine_cordoned: true, ..plain("n") },
            "cordoned in Kubernetes",
            "1 is cordoned",
        ),
        (
            Filter::Ready,
            request(5),
            NodeCandidate { not_ready: Some("it is not ready: no answer".to_owned()), ..plain("n") },
            "it is not ready: no answer",
            "1 is not ready",
        ),
        (
            Filter::NodeTags,
            tagged,
            NodeCandidate { tags: labels(["fast", "old"]).unwrap(), ..plain("n") },
            "lacks tag new",
            "1 lacks tags fast, new",
        ),
        (
            Filter::HasDisk,
            request(5),
            node("n", vec![]),
            "node without a disk: run shorthornctl disk add n PATH",
            "1 has no disk",
        ),
    ]
}

fn cases_of_anti_affinity() -> Vec<FilterCase> {
    let hard_zones = PlacementRequest { zone_soft_anti_affinity: false, ..soft(5) };
    let hard_disks = PlacementRequest { disk_soft_anti_affinity: false, ..soft(5) };
    vec![
        (
            Filter::ZoneAntiAffinity,
            hard_zones.clone(),
            in_zone("z", used(plain("n"), 1)),
            "zone z already has a replica of this volume",
            "1 is in a zone that has a replica",
        ),
        (
            Filter::ZoneAntiAffinity,
            hard_zones,
            used(plain("n"), 1),
            "node without a zone, and",
            "1 is in a zone",
        ),
        (
            Filter::NodeAntiAffinity,
            request(5),
            used(plain("n"), 1),
            "node already has a replica of this volume (replicaSoftAntiAffinity allows more)",
            "1 has a replica of this volume already",
        ),
        (
            Filter::DiskAntiAffinity,
            hard_disks,
            used(plain("n"), 1),
            "disk /1 has a replica of this volume already",
            "1 has no disk without a replica",
        ),
    ]
}

fn cases_of_disk_filters() -> Vec<FilterCase> {
    let ssd = PlacementRequest { disk_selector: labels(["ssd"]).unwrap(), ..request(5) };
    let copying = PlacementRequest { used_bytes: 5 * GIB, ..request(5) };
    let with_disk = |change: fn(&mut DiskCandidate)| {
        let mut node = plain("n");
        change(&mut node.disks[0]);
        node
    };
    vec![
        (
            Filter::DiskUsable,
            request(5),
            with_disk(|disk| disk.refusal = Some("read-only".to_owned())),
            "disk /1 is not usable: read-only",
            "1 has no usable disk",
        ),
        (
            Filter::DiskTags,
            ssd,
            with_disk(|disk| disk.tags = labels(["hdd"]).unwrap()),
            "disk /1 lacks tag ssd",
            "1 has no disk with tag ssd",
        ),
        (
            Filter::MinimalAvailable,
            request(5),
            with_disk(|disk| disk.available_bytes = 10 * GIB - 1),
            "disk /1 has 9.9 GiB free, and 10.0 GiB (10 %) have to stay free",
            "1 has too little free space",
        ),
        (
            Filter::MinimalAvailable,
            copying,
            with_disk(|disk| disk.available_bytes = 15 * GIB - 1),
            "disk /1 has 14.9 GiB free, and 10.0 GiB (10 %) have to stay free",
            "1 has too little free space",
        ),
        (
            Filter::Capacity,
            request(5),
            node("n", vec![disk("/1", 100, 86)]),
            "disk /1 can schedule 4.0 GiB more, 5.0 GiB are needed",
            "1 has no disk that can schedule 5.0 GiB more",
        ),
    ]
}

#[test]
fn every_filter_removes_a_place_with_a_reason() {
    let cases = [cases_of_node_filters(), cases_of_anti_affinity(), cases_of_disk_filters()];
    for (filter, request, node, reason, summary) in cases.into_iter().flatten() {
        let present = node.same_volume();
        let refusal = schedule(&request, &mut [node], present, present + 1).unwrap_err();
        let removal = &refusal.by_node[&NodeName::new("n").unwrap()];
        assert_eq!(removal.filter, filter, "{removal:?}");
        assert!(removal.reason.starts_with(reason), "{reason:?} in {removal:?}");
        assert!(refusal.summary.starts_with(&format!("1 node: {summary}")), "{summary:?} in {refusal:?}");
    }
}

/// Each case is just on the good side of its filter.
#[test]
fn a_place_that_passes_all_filters_takes_a_replica() {
    let mut exact = disk("/1", 100, 0);
    exact.scheduled_bytes = exact.room_bytes(SchedulingLimits::default()) - 5 * GIB;
    exact.available_bytes = 10 * GIB;
    exact.tags = labels(["ssd", "new"]).unwrap();
    let good = NodeCandidate { tags: labels(["fast"]).unwrap(), ..node("a", vec![exact.clone()]) };
    let wanted = PlacementRequest {
        node_selector: labels(["fast"]).unwrap(),
        disk_selector: labels(["ssd"]).unwrap(),
        zone_soft_anti_affinity: false,
        disk_soft_anti_affinity: false,
        ..request(5)
    };
    assert!(schedule(&wanted, &mut [good.clone()], 0, 1).is_ok());
    let other_zone = in_zone("z", used(plain("b"), 1));
    assert_eq!(places_of(&schedule(&wanted, &mut [good, other_zone], 1, 2)), ["a/1"]);
    exact.scheduled_bytes += 1;
    assert!(schedule(&request(5), &mut [node("a", vec![exact])], 0, 1).is_err());
}

#[test]
fn scheduled_bytes_exceed_the_disk_only_by_the_percentage() {
    let percent = |percent| {
        let limits =
            SchedulingLimits { storage_over_provisioning_percentage: percent, ..SchedulingLimits::default() };
        disk("/1", 100, 40).room_bytes(limits) / GIB
    };
    assert_eq!((percent(100), percent(200), percent(50), percent(10)), (50, 140, 5, 0));
}

#[test]
fn machines_that_are_cordoned_in_kubernetes_take_replicas_if_that_is_configured() {
    let mut wanted = request(5);
    wanted.limits.disable_scheduling_on_cordoned_node = false;
    let machine = NodeCandidate { machine_cordoned: true, ..plain("a") };
    assert!(place_one(&wanted, &mut [machine.clone()], 0).is_ok());
    assert!(place_one(&wanted, &mut [NodeCandidate { cordoned: true, ..machine }], 0).is_err());
}

#[test]
fn lost_replicas_that_are_excused_keep_no_other_away() {
    let strict =
        PlacementRequest { zone_soft_anti_affinity: false, disk_soft_anti_affinity: false, ..request(5) };
    let mut lost = used(plain("a"), 1);
    assert!(place_one(&strict, &mut [lost.clone()], 1).is_err());
    lost.disks[0].excused = 1;
    assert!(place_one(&strict, &mut [lost], 1).is_ok());
}

#[test]
fn a_replica_that_leaves_its_node_keeps_no_other_away_from_its_zone() {
    let hard_zones = PlacementRequest { zone_soft_anti_affinity: false, ..request(5) };
    let mut leaving = in_zone("x", used(plain("a"), 1));
    let mut nodes = [leaving.clone(), in_zone("x", plain("b")), in_zone("y", used(plain("c"), 1))];
    assert!(place_one(&hard_zones, &mut nodes, 2).is_err());
    (leaving.evicted, leaving.cordoned) = (true, true);
    nodes[0] = leaving;
    assert_eq!(place_one(&hard_zones, &mut nodes, 2).unwrap().node.as_str(), "b");
}

/// Checks the best place of each case. It has two disks that differ in one property, and whose names are
/// in the opposite order.
fn check_best(
    cases: impl IntoIterator<Item = (&'static str, PlacementRequest, Vec<NodeCandidate>, &'static str)>,
) {
    for (what, request, mut nodes, best) in cases {
        let present = nodes.iter().map(NodeCandidate::same_volume).sum();
        assert_eq!(places_of(&schedule(&request, &mut nodes, present, present + 1)), [best], "{what}");
    }
}

#[test]
fn every_score_of_nodes_decides_if_those_before_it_are_equal() {
    let local = PlacementRequest { local: Some(NodeName::new("b").unwrap()), ..soft(5) };
    let cases = [
        (
            "locality wins over everything",
            local.clone(),
            vec![plain("a"), node("b", vec![disk("/1", 100, 50)])],
            "b/1",
        ),
        ("one replica is local enough", local, vec![plain("a"), used(plain("b"), 1)], "a/1"),
        (
            "an unused zone, though its nodes are fuller",
            soft(5),
            vec![
                in_zone("x", used(plain("a"), 1)),
                in_zone("x", plain("b")),
                in_zone("y", node("c", vec![disk("/1", 100, 80)])),
            ],
            "c/1",
        ),
        (
            "an unused node, though another has an unused disk",
            soft(5),
            vec![
                used(node("a", vec![disk("/1", 100, 0), disk("/2", 100, 0)]), 1),
                node("b", vec![disk("/1", 100, 80)]),
            ],
            "b/1",
        ),
        (
            "the zone with fewer replicas, though on a node that has one",
            soft(5),
            vec![
                in_zone("x", plain("a")),
                in_zone("x", used(plain("b"), 2)),
                in_zone("y", used(node("c", vec![disk("/1", 100, 80)]), 1)),
            ],
            "c/1",
        ),
    ];
    check_best(cases);
}

#[test]
fn every_score_of_disks_decides_if_those_before_it_are_equal() {
    let cases = [
        (
            "an unused disk",
            soft(5),
            vec![used(node("a", vec![disk("/1", 100, 0), disk("/2", 100, 80)]), 1)],
            "a/2",
        ),
        (
            "the zone with more room, though the emptiest disk is elsewhere",
            soft(5),
            vec![
                in_zone("x", plain("a")),
                in_zone("x", node("b", vec![disk("/1", 100, 60)])),
                in_zone("y", node("c", vec![disk("/1", 100, 20)])),
            ],
            "c/1",
        ),
        (
            "the disk with more room",
            soft(5),
            vec![node("a", vec![disk("/1", 100, 1), disk("/2", 100, 0)])],
            "a/2",
        ),
        ("the first by name", soft(5), vec![plain("b"), plain("a")], "a/1"),
    ];
    check_best(cases);
}

#[test]
fn the_free_capacity_is_for_volumes_with_as_many_replicas_as_wanted() {
    let nodes = [plain("a"), plain("b"), node("c", vec![disk("/1", 100, 60)])];
    let capacities = |wanted| {
        let FreeCapacity { available_bytes, largest_bytes } = free_capacity(&request(0), &nodes, wanted);
        (available_bytes / GIB, largest_bytes / GIB)
    };
    assert_eq!([1, 2, 3, 4].map(capacities), [(210, 90), (105, 90), (70, 30), (0, 0)]);
    assert_eq!(free_capacity(&request(0), &[], 1), FreeCapacity::default());
}

#[test]
fn a_refusal_sums_up_and_names_some_nodes() {
    let mut nodes = vec![NodeCandidate { cordoned: true, ..plain("closed") }];
    nodes.extend((0..20).map(|at| plain(&format!("n{at:02}"))));
    let ssd = PlacementRequest { disk_selector: labels(["ssd"]).unwrap(), ..request(5) };
    let refusal = schedule(&ssd, &mut nodes, 0, 2).unwrap_err();
    assert_eq!((refusal.placed, refusal.wanted, refusal.by_node.len()), (0, 2, 21));
    let text = refusal.to_string();
    let start = "0 of 2 replicas have a place; 21 nodes: 20 have no disk with tag ssd, 1 is cordoned; \
                 closed: cordoned";
    assert!(text.starts_with(start), "{text}");
    assert!(text.contains("; n08: disk /1 lacks tag ssd") && !text.contains("n09"), "{text}");
    assert!(text.ends_with("; and 11 more"), "{text}");
    assert!(schedule(&request(5), &mut [], 0, 1).unwrap_err().to_string().contains("node add"));
}

#[test]
fn a_node_is_summed_up_by_the_disk_that_came_furthest() {
    let mut full = disk("/1", 100, 90);
    full.tags = labels(["ssd"]).unwrap();
    let ssd = PlacementRequest { disk_selector: labels(["ssd"]).unwrap(), ..request(5) };
    let refusal = schedule(&ssd, &mut [node("a", vec![full, disk("/2", 100, 0)])], 0, 1).unwrap_err();
    let removal = refusal.by_node.values().next().unwrap();
    assert_eq!(removal.filter, Filter::Capacity);
    assert!(
        removal.reason.contains("disk /1 can schedule 0.0 GiB")
            && removal.reason.contains("disk /2 lacks tag ssd")
    );
}

/// Returns a set of nodes with disks: (size, scheduled, free now) in GiB, a zone, a tag.
fn some_nodes() -> impl Strategy<Value = Vec<NodeCandidate>> {
    let disks = prop::collection::vec((1u64..200, 0u64..250, 0u64..200, any::<bool>()), 0..4);
    let nodes = prop::collection::vec((disks, 0u8..4, any::<bool>(), 0u8..8), 0..8);
    nodes.prop_map(|nodes| {
        let one = |(at, (disks, zone, tagged, trouble)): (usize, (Vec<_>, u8, bool, u8))| {
            let disks = disks.into_iter().enumerate().map(|(at, (total, scheduled, free, tagged))| {
                let tags = if tagged { labels(["ssd"]).unwrap() } else { Labels::new() };
                let available_bytes = u64::min(total, free) * GIB;
                DiskCandidate { tags, available_bytes, ..disk(&format!("/{at}"), total, scheduled) }
            });
            let node = node(&format!("n{at}"), disks.collect());
            NodeCandidate {
                tags: if tagged { labels(["fast"]).unwrap() } else { Labels::new() },
                zone: (zone > 0).then(|| format!("z{zone}").parse().unwrap()),
                cordoned: trouble == 0,
                not_ready: (trouble == 1).then(|| "it is away".to_owned()),
                ..node
            }
        };
        nodes.into_iter().enumerate().map(one).collect()
    })
}

fn some_request() -> impl Strategy<Value = PlacementRequest> {
    let soft = (any::<bool>(), any::<bool>(), any::<bool>());
    let selectors = (any::<bool>(), any::<bool>(), prop::option::of(0u8..8));
    (1u64..50, soft, selectors, (50u32..300, 0u32..50)).prop_map(|(size, soft, selectors, limits)| {
        PlacementRequest {
            size_bytes: size * GIB,
            used_bytes: size * GIB / 2,
            soft_anti_affinity: soft.0,
            zone_soft_anti_affinity: soft.1,
            disk_soft_anti_affinity: soft.2,
            node_selector: if selectors.0 { labels(["fast"]).unwrap() } else { Labels::new() },
            disk_selector: if selectors.1 { labels(["ssd"]).unwrap() } else { Labels::new() },
            local: selectors.2.map(|at| NodeName::new(&format!("n{at}")).unwrap()),
            limits: SchedulingLimits {
                storage_over_provisioning_percentage: limits.0,
                storage_minimal_available_percentage: limits.1,
                ..SchedulingLimits::default()
            },
        }
    })
}

/// Checks a placement by the rules, written without the filters.
fn check_placed(request: &PlacementRequest, nodes: &[NodeCandidate]) -> Result<(), TestCaseError> {
    let mut by_zone = std::collections::BTreeMap::new();
    for node in nodes {
        let here = node.same_volume();
        *by_zone.entry(&node.zone).or_insert(0) += here;
        prop_assert!(request.soft_anti_affinity || here <= 1, "two replicas on {}", node.name);
        prop_assert!(here == 0 || !node.cordoned && node.not_ready.is_none());
        prop_assert!(here == 0 || request.node_selector.iter().all(|tag| node.tags.contains(tag)));
        for disk in node.disks.iter().filter(|disk| disk.same_volume > 0) {
            prop_assert!(request.disk_soft_anti_affinity || disk.same_volume == 1);
            prop_assert!(request.disk_selector.iter().all(|tag| disk.tags.contains(tag)));
            let usable = u128::from(disk.total_bytes - disk.reserved_bytes);
            let limit = usable * u128::from(request.limits.storage_over_provisioning_percentage) / 100;
            prop_assert!(u128::from(disk.scheduled_bytes) <= limit, "{disk:?}");
            let minimum = u128::from(request.limits.storage_minimal_available_percentage);
            prop_assert!(u128::from(disk.available_bytes) >= u128::from(disk.total_bytes) * minimum / 100);
        }
    }
    let most_in_a_zone = by_zone.into_values().max().unwrap_or(0);
    prop_assert!(request.zone_soft_anti_affinity || most_in_a_zone <= 1);
    Ok(())
}

proptest! {
    #[test]
    fn never_breaks_its_rules(mut nodes in some_nodes(), request in some_request(), wanted in 1u32..9) {
        let before = nodes.clone();
        let placed = match schedule(&request, &mut nodes, 0, wanted) {
            Ok(placements) => {
                prop_assert_eq!(placements.len(), wanted as usize);
                prop_assert_eq!(nodes.iter().map(NodeCandidate::same_volume).sum::<u32>(), wanted);
                wanted
            }
            Err(refusal) => {
                prop_assert_eq!(refusal.by_node.len(), nodes.len());
                prop_assert!(refusal.by_node.values().all(|removal| !removal.reason.is_empty()));
                refusal.placed
            }
        };
        check_placed(&request, &nodes)?;
        // A refused placement is impossible: with the same choices, one more breaks a rule everywhere.
        if placed < wanted {
            for at in 0..nodes.len() {
                for disk_at in 0..nodes[at].disks.len() {
                    let mut more = nodes.clone();
                    let disk = &mut more[at].disks[disk_at];
                    let fits = disk.available_bytes >= request.used_bytes && disk.refusal.is_none();
                    disk.same_volume += 1;
                    disk.scheduled_bytes += request.size_bytes;
                    disk.available_bytes = disk.available_bytes.saturating_sub(request.used_bytes);
                    prop_assert!(!fits || check_placed(&request, &more).is_err(), "{before:?}");
                }
            }
        }
    }

    #[test]
    fn several_at_once_get_the_places_that_one_after_the_other_gets(
        nodes in some_nodes(), request in some_request(), wanted in 1u32..9
    ) {
        let (mut at_once, mut one_by_one) = (nodes.clone(), nodes);
        let placed = schedule(&request, &mut at_once, 0, wanted);
        let one_by_one: Result<Vec<Placement>, PlacementRefusal> =
            (0..wanted).map(|present| place_one(&request, &mut one_by_one, present)).collect();
        prop_assert_eq!(placed.as_ref().ok(), one_by_one.as_ref().ok());
        let refused = |result: &Result<Vec<Placement>, PlacementRefusal>| {
            result.as_ref().err().map(|refusal| (refusal.placed, refusal.by_node.clone()))
        };
        prop_assert_eq!(refused(&placed), refused(&one_by_one));
    }

    #[test]
    fn the_largest_volume_has_a_place_and_no_larger_one_has(
        nodes in some_nodes(), request in some_request(), wanted in 1u32..5, more in 1u64..1 << 20,
    ) {
        // Replicas of this volume leave no trace, because it does not exist yet.
        let mut nodes = nodes;
        for disk in nodes.iter_mut().flat_map(|node| &mut node.disks) {
            (disk.same_volume, disk.excused) = (0, 0);
        }
        let FreeCapacity { available_bytes, largest_bytes } = free_capacity(&request, &nodes, wanted);
        prop_assert!(available_bytes >= largest_bytes);
        let fits = |size_bytes: u64| {
            let request = PlacementRequest { size_bytes, ..request.clone() };
            schedule(&request, &mut nodes.clone(), 0, wanted).is_ok()
        };
        prop_assert!(largest_bytes == 0 || fits(largest_bytes));
        prop_assert!(!fits(largest_bytes + more * 4096), "{} and more", largest_bytes);
    }

    #[test]
    fn equal_nodes_differ_by_one_replica_at_most(
        count in 3usize..20,
        volumes in 1usize..40,
        replicas in 1u32..4,
    ) {
        let mut nodes: Vec<NodeCandidate> =
            (0..count).map(|at| node(&format!("n{at}"), vec![disk("/1", 1000, 0)])).collect();
        for _ in 0..volumes {
            nodes.iter_mut().for_each(|node| node.disks[0].same_volume = 0);
            schedule(&request(1), &mut nodes, 0, replicas).unwrap();
            let on: Vec<u64> = nodes.iter().map(|node| node.disks[0].scheduled_bytes / GIB).collect();
            prop_assert!(on.iter().max().unwrap() - on.iter().min().unwrap() <= 1, "{on:?}");
        }
    }

    #[test]
    fn equal_zones_are_one_replica_off_even_at_most(
        zones in 3usize..8,
        in_each in 1usize..6,
        volumes in 1usize..40,
        replicas in 1u32..4,
    ) {
        let of_zone = |at: usize| in_zone(
            &format!("z{}", at % zones), node(&format!("n{at}"), vec![disk("/1", 1000, 0)])
        );
        let mut nodes: Vec<NodeCandidate> = (0..zones * in_each).map(of_zone).collect();
        for volume in 1..=volumes {
            nodes.iter_mut().for_each(|node| node.disks[0].same_volume = 0);
            schedule(&request(1), &mut nodes, 0, replicas).unwrap();
            let all = volume * replicas as usize;
            for node in &nodes {
                let here = usize::try_from(node.disks[0].scheduled_bytes / GIB).unwrap();
                let (low, high) = (all / nodes.len(), all.div_ceil(nodes.len()));
                prop_assert!(here + 1 >= low && here <= high + 1, "{here} of {all} on {} nodes", nodes.len());
            }
            let of_this: Vec<_> = nodes.iter()
                .filter(|node| node.same_volume() > 0).map(|node| &node.zone).collect();
            prop_assert_eq!(of_this.iter().collect::<std::collections::BTreeSet<_>>().len(), replicas as usize);
        }
    }
}
