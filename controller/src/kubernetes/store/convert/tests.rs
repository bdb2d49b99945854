use shorthorn_controller_core::objects::{
    ConditionType, Conditions, CurrentState, DataState, DesireState, Discovered, DiskSpec, DiskStatus,
    Display, EnginePhase, EngineSpec, Finding, Frontend, FrontendStatus, MemberMode, MemberRecord, NodeSpec,
    NodeStatus, RebuildLimits, ReplicaSpec, Salvage, StoredEngineStatus, StoredExpansionStatus,
    StoredReplicaStatus, VolumeSpec, VolumeStatus,
};
use shorthorn_controller_core::schema::pruned;
use shorthorn_controller_core::{Labels, NodeName, ReplicaTarget, Timestamp, labels, salvage};
use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use shorthorn_kube::crds::{self, Rules};

const UID: &str = "0c3b1f9e-7c53-4a5e-9e0f-0b1b8f0e6d55";

fn keys() -> VolumeKeys {
    VolumeKeys::new(&[1; 32])
}

fn meta(name: &str) -> Metadata {
    Metadata {
        uid: Some(UID.to_owned()),
        resource_version: ResourceVersion::new(7),
        deletion_timestamp: Some("2026-02-03T04:05:06Z".parse().unwrap()),
        ..Metadata::new(name, "2026-01-02T03:04:05Z".parse().unwrap())
    }
}

fn conditions(now: Timestamp) -> Conditions {
    let mut conditions = Conditions::default();
    conditions.set(ConditionType::Scheduled, Finding::Well, now);
    conditions.set(ConditionType::Healthy, Finding::wrong("ReplicaFailed", "one is away"), now);
    conditions
}

const REBUILD: RebuildLimits = RebuildLimits { bytes_per_s: Some(1 << 60), share_percent: 40 };

fn now() -> Timestamp {
    "2026-01-02T03:04:05.678Z".parse().unwrap()
}

fn volume_name() -> VolumeName {
    VolumeName::new("v").unwrap()
}

fn id() -> ReplicaId {
    ReplicaId::from_random(3)
}

fn node_name() -> NodeName {
    NodeName::new("n1.example").unwrap()
}

fn tags() -> Labels {
    labels(["ssd", "fast"]).unwrap()
}

fn full_volume() -> Volume {
    Volume {
        metadata: meta("v"),
        spec: VolumeSpec {
            volume_name: volume_name(),
            size: 1 << 40,
            number_of_replicas: 2,
            frontend: "nbd".parse().unwrap(),
            node_id: Some(node_name()),
            forced_detach: Some(2),
            replica_soft_anti_affinity: true,
            replica_zone_soft_anti_affinity: false,
            replica_disk_soft_anti_affinity: false,
            node_selector: tags(),
            disk_selector: tags(),
            data_locality: "best-effort".parse().unwrap(),
            verify_reads: true,
            encrypt_in_transit: true,
            rebuild: REBUILD,
            csi_name: Some("a name".to_owned()),
            preferred_node_id: Some(node_name()),
            secret: keys().secret_of(UID),
        },
        status: VolumeStatus {
            current_node_id: Some(node_name()),
            attach: Some(u64::from(u32::MAX) + 1),
            attach_started_at: Some(now()),
            attached_since: Some(3),
            fenced_attach: Some(2),
            current_size: Some(1 << 39),
            arbiter: salvage::arbiter(7, id()),
            salvage: Some(Salvage {
                replica_id: id(),
                attach: 7,
                decided_at: now(),
                by: "me".to_owned(),
                reason: "because".to_owned(),
                losses: "none".to_owned(),
                done: true,
            }),
            first_members: vec![id()],
            claim: Some("shop/orders".to_owned()),
            actual_size: Some(1 << 30),
            display: Display { replicas: "1/2".to_owned(), ..Display::default() },
            conditions: conditions(now()),
            ..VolumeStatus::default()
        },
    }
}

fn full_engine() -> Engine {
    let member = MemberRecord {
        mode: MemberMode::Failed,
        message: "gone".to_owned(),
        awaited: false,
        away_since_ms: Some(5),
        rebuild_failed: true,
    };
    let target = ReplicaTarget { addresses: vec!["tcp:10.0.0.1:9".to_owned()], local: true };
    Engine {
        metadata: meta("v"),
        spec: EngineSpec {
            volume_name: volume_name(),
            volume_size: 1 << 40,
            node_id: Some(node_name()),
            desire_state: DesireState::Running,
            attach: Some(4),
            frontend: "ublk".parse().unwrap(),
            replica_address_map: [(id(), target)].into(),
            map_revision: 6,
        },
        status: StoredEngineStatus {
            current_state: CurrentState::Running,
            seen_attach: Some(4),
            lost_attach: Some(3),
            served_attach: Some(4),
            phase: Some(EnginePhase::Serving),
            generation: "4.1".parse().ok(),
            view: "4.1/1 of {00000001, 00000002}".parse().ok(),
            frontend: Some(Frontend::Ublk),
            endpoint: Some("/dev/x".to_owned()),
            replica_mode_map: [(id(), member)].into(),
            message: Some("m".to_owned()),
            stop_refused: Some("r".to_owned()),
            map_revision: 6,
            volume_size: Some(1 << 40),
            current_size: Some(1 << 39),
            lost_writes: true,
            damaged_ranges: 2,
            expansion: Some(StoredExpansionStatus { message: Some("m".to_owned()), next_attach: true }),
            rebuild: Some(REBUILD),
            needs_upgrade: Some(true),
        },
    }
}

fn full_replica() -> Replica {
    Replica {
        metadata: meta(&format!("v-{}", id())),
        spec: ReplicaSpec {
            volume_name: volume_name(),
            volume_size: 1 << 40,
            replica_id: id(),
            node_id: node_name(),
            disk_path: "/d".to_owned(),
            disk_id: "u".to_owned(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            current_state: CurrentState::Running,
            data: DataState::Present,
            addresses: vec!["unix:/x".to_owned()],
            message: "m".to_owned(),
            healthy_at: Some(now()),
            failed_at: Some(now()),
            deletion_record: Some("{}".to_owned()),
            undeletion_record: Some("{}".to_owned()),
            stop_first: true,
            rebind: true,
            lost_since: Some(now()),
        },
    }
}

fn full_node() -> Node {
    let disk = DiskStatus {
        disk_uuid: "u".to_owned(),
        filesystem_type: "ext4".to_owned(),
        storage_maximum: 1 << 41,
        storage_available: 1 << 40,
        problem: Some("p".to_owned()),
    };
    Node {
        metadata: meta("n1"),
        spec: NodeSpec {
            address: "http://10.0.0.1:9501".to_owned(),
            allow_scheduling: false,
            eviction_requested: true,
            tags: tags(),
            zone: Some("z".parse().unwrap()),
            disks: [("/d".to_owned(), DiskSpec { tags: tags(), ..DiskSpec::of_new(1 << 40) })].into(),
            discovered: Some(Discovered {
                address: "http://10.0.0.2:9501".to_owned(),
                zone: Some("x".parse().unwrap()),
                cordoned_since: Some(now()),
            }),
        },
        status: NodeStatus {
            max_volumes: Some(9),
            conditions: conditions(now()),
            version: "1".to_owned(),
            data_address: Some("10.0.0.1".to_owned()),
            zone: Some("y".parse().unwrap()),
            frontends: vec![FrontendStatus { name: Frontend::Ublk, usable: true, reason: "r".to_owned() }],
            free_space: "f".to_owned(),
            disk_status: [("/d".to_owned(), disk)].into(),
        },
    }
}

/// Returns objects of all kinds in which every field is set.
fn full() -> Vec<Object> {
    vec![full_volume().into(), full_engine().into(), full_replica().into(), full_node().into()]
}

/// Returns the object as the API server has it.
fn stored(object: &Object) -> DynamicObject {
    let Parts { spec, status } = parts(object).unwrap();
    let mut stored = new(object, spec, "ns");
    stored.data["status"] = status;
    let metadata = object.metadata();
    stored.metadata.uid = Some(UID.to_owned());
    stored.metadata.resource_version = metadata.resource_version.map(|version| version.to_string());
    stored.metadata.creation_timestamp = Some(Time(metadata.creation_timestamp));
    stored.metadata.deletion_timestamp = metadata.deletion_timestamp.map(Time);
    stored
}

#[test]
fn objects_read_back_unchanged() {
    for whole in full() {
        assert_eq!(object(whole.kind(), &stored(&whole), &keys()).unwrap(), whole);
    }
}

#[test]
fn no_field_is_dropped_by_an_api_server() {
    for whole in full() {
        let definition = crds::definition(whole.kind(), Rules::Included);
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        let Parts { spec, status } = parts(&whole).unwrap();
        assert_eq!(pruned(&schema["spec"], &spec), spec, "{}", whole.key());
        assert_eq!(pruned(&schema["status"], &status), status, "{}", whole.key());
    }
}

#[test]
fn a_volume_of_kubectl_needs_a_size_only() {
    let written: DynamicObject = serde_json::from_value(json!({
        "metadata": {
            "name": "v", "uid": UID, "resourceVersion": "3", "creationTimestamp": "2026-01-02T03:04:05Z"
        },
        "spec": { "size": "8192" },
    }))
    .unwrap();
    let Object::Volume(volume) = object(Kind::Volume, &written, &keys()).unwrap() else { unreachable!() };
    assert_eq!(volume.spec.volume_name.as_str(), "v");
    assert_eq!(volume.spec.number_of_replicas, requests::DEFAULT_REPLICAS);
    assert_eq!(volume.spec.rebuild, RebuildLimits::default());
    assert!(volume.spec.replica_zone_soft_anti_affinity && volume.spec.replica_disk_soft_anti_affinity);
    assert_eq!(volume.spec.secret, keys().secret_of(UID));
    assert_eq!(volume.status, VolumeStatus::default());
    for (what, spec) in [
        ("size", json!({ "size": "8193" })),
        ("size", json!({})),
        ("replicas", json!({ "size": "8192", "numberOfReplicas": 9 })),
        ("volumeName", json!({ "size": "8192", "volumeName": "w" })),
        ("share", json!({ "size": "8192", "rebuild": { "sharePercent": 0 } })),
    ] {
        let mut written = written.clone();
        written.data["spec"] = spec;
        let error = object(Kind::Volume, &written, &keys()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn the_refusal_of_a_volume_is_recorded_once() {
    let (now, later) = (Timestamp::UNIX_EPOCH, "2026-01-02T03:04:05Z".parse().unwrap());
    let of = |status: Value| DynamicObject {
        types: None,
        metadata: ObjectMeta { generation: Some(3), ..ObjectMeta::default() },
        data: json!({ "status": status }),
    };
    // A status that was never written, as an API server takes it.
    let mut status = json!({});
    apply(&mut status, &refused_status(&of(Value::Null), "the size", now).unwrap());
    let read: VolumeStatus = serde_json::from_value(status.clone()).unwrap();
    let recorded = read.conditions.get(ConditionType::Accepted).unwrap();
    assert!(
        !recorded.status && recorded.reason == INVALID_SPEC && recorded.message.contains("the size"),
        "{recorded:?}"
    );
    assert_eq!(recorded.observed_generation, Some(3));
    assert_eq!(refused_status(&of(status), "the size", later), None);
    // Everything else stays.
    let whole = full().remove(0);
    let before = parts(&whole).unwrap().status;
    let mut after = before.clone();
    apply(&mut after, &refused_status(&of(before), "the share", now).unwrap());
    let mut read: VolumeStatus = serde_json::from_value(after).unwrap();
    assert!(!read.conditions.is_true(ConditionType::Accepted));
    assert!(read.conditions.get(ConditionType::Healthy).is_some());
    let Object::Volume(volume) = whole else { unreachable!() };
    read.conditions = volume.status.conditions.clone();
    assert_eq!(read, volume.status);
}

#[test]
fn the_secret_never_leaves() {
    let whole = full().remove(0);
    let secret = String::from(keys().secret_of(UID));
    let text = serde_json::to_string(&stored(&whole)).unwrap();
    assert!(!text.contains(&secret) && !text.contains("secret"), "{text}");
}

#[test]
fn versions_are_numbers_or_refused() {
    assert_eq!(version(Some("12")).unwrap(), 12);
    for bad in ["", "0", "a12", "-1", "12.3", "99999999999999999999"] {
        let error = version(Some(bad)).unwrap_err().to_string();
        assert!(error.contains("not a number"), "{error}");
    }
    assert!(matches!(version(None), Err(ConvertError::Lacks(_))));
}

fn apply(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, change) in fields {
        if change.is_null() {
            target.as_object_mut().map(|target| target.remove(name));
        } else {
            apply(&mut target[name.as_str()], change);
        }
    }
}

mod patches {
    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![any::<bool>().prop_map(Value::from), any::<u8>().prop_map(Value::from)];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[a-c]", inner, 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_patch_makes_the_new_from_the_old(
            old in prop::collection::btree_map("[a-c]", value(), 0..4),
            new in prop::collection::btree_map("[a-c]", value(), 0..4),
        ) {
            let object = |fields: std::collections::BTreeMap<String, Value>| {
                Value::Object(fields.into_iter().collect())
            };
            let (old, new) = (object(old), object(new));
            let mut patched = old.clone();
            if let Some(patch) = merge_patch(&old, &new) {
                apply(&mut patched, &patch);
            } else {
                prop_assert_eq!(&old, &new);
            }
            prop_assert_eq!(&patched, &new);
            // The same from any part of the old that was stored.
            let mut patched = old.clone();
            if let Some(patch) = whole_patch(&old, &new) {
                apply(&mut patched, &patch);
                let mut from_nothing = json!({});
                apply(&mut from_nothing, &patch);
                prop_assert_eq!(&from_nothing, &new);
            }
            prop_assert_eq!(&patched, &new);
        }
    }
}
