//! Tests a replica process that becomes a copy of another one. The test plays the rebuild task.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::*;
use shorthorn_control::ReplicaSpec;
use shorthorn_store::{ExportTarget, OpenOptions, Store, export};
use shorthorn_types::{Members, RegionsOf, ReplicaId, View, ViewId};
use shorthorn_wire::{
    CONTROL_QUEUE, CopyEnd, CopyState, ExtentsPage, ExtentsQuery, Flags, Header, LayerList, Opcode,
    RegionsPage, RegionsQuery, ViewMessage, WireLayer,
};

const SIZE: u64 = 8 * MIB;
const NOW: &str = "2026-11-22T10:00:00Z";

/// Makes a volume with snapshots whose layers overlap, in the directory of `spec`.
fn fill(spec: &ReplicaSpec, snapshots: u64) {
    assert!(Replica::start(spec).terminate().success());
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    for n in 0..snapshots {
        store.write_at(&pattern(n, 128 << 10), n % 61 * (96 << 10), false).unwrap();
        store.write_at(&pattern(n + 1000, 512), SIZE - (n % 500 + 1) * 8192, false).unwrap();
        let labels = BTreeMap::from([("n".to_owned(), "x".repeat(200))]);
        store.snapshot(&format!("snapshot-number-{n}"), true, labels, NOW).unwrap();
    }
    store.write_at(&pattern(5000, 65536), MIB, false).unwrap();
    store.close().unwrap();
}

fn spec_of(base: &Path, name: &str, number: u64) -> ReplicaSpec {
    let base = base.join(name);
    std::fs::create_dir_all(&base).unwrap();
    let replica = ReplicaId::from_random(number);
    let first_members = Members::new([ReplicaId::from_random(1)]).unwrap();
    ReplicaSpec { replica, first_members, ..spec(&base, SIZE) }
}

/// Requests for one layer, whose number is in the status field.
fn on_layer(
    client: &mut Client,
    opcode: Opcode,
    layer: u32,
    offset: u64,
    length: u32,
    data: &[u8],
) -> Result<Vec<u8>, i32> {
    let mut header = Header::request(opcode, 1 << 40 | u64::from(layer), offset, length);
    header.status = i32::try_from(layer).unwrap();
    if !data.is_empty() {
        header.data_check = crc32c(data);
    }
    client.raw(&[&client.encode(&header)[..], data].concat());
    let (response, data) = client.receive().unwrap();
    assert_eq!((response.id, response.opcode), (header.id, opcode));
    if response.status == 0 { Ok(data) } else { Err(response.status) }
}

fn extents(client: &mut Client, layer: u32) -> Vec<(u64, u64)> {
    let (mut from_bytes, mut found) = (0, Vec::new());
    loop {
        let page: ExtentsPage = client.ask(Opcode::Extents, &ExtentsQuery { layer, from_bytes }).unwrap();
        found.extend(page.extents.iter().map(|extent| (extent.offset_bytes, extent.length_bytes)));
        let Some(next) = page.next_bytes else { return found };
        from_bytes = next;
    }
}

fn layers(source: &mut Client) -> LayerList {
    source.ask(Opcode::Layers, &()).unwrap()
}

/// Copies one layer as the rebuild task does.
fn copy_layer(source: &mut Client, target: &mut Client, layer: u32) {
    for (offset, length) in extents(source, layer) {
        for at in (offset..offset + length).step_by(1 << 20) {
            let count = u32::try_from((offset + length - at).min(1 << 20)).unwrap();
            let data = on_layer(source, Opcode::ReadLayer, layer, at, count, &[]).unwrap();
            on_layer(target, Opcode::WriteLayer, layer, at, count, &data).unwrap();
        }
    }
    target.send_text(Opcode::CopyEnd, &CopyEnd { layer: Some(layer) }).unwrap();
}

/// Copies the missing snapshots, and then the volume region by region.
fn copy(source: &mut Client, target: &mut Client) {
    let list = layers(source);
    let CopyState { done } = target.ask(Opcode::CopyBegin, &list).unwrap();
    assert_eq!((done.len(), done.last()), (list.layers.len(), Some(&false)));
    for (layer, _) in (0u32..).zip(&done[..done.len() - 1]).filter(|(_, done)| !**done) {
        copy_layer(source, target, layer);
    }
    let query = RegionsQuery { of: RegionsOf::Allocated, from: 0, size_bytes: None };
    let allocated: RegionsPage = source.ask(Opcode::Regions, &query).unwrap();
    for region in allocated.runs.iter().flat_map(|(first, count)| *first..first + count) {
        let offset = u64::from(region) << 16;
        let data = source.read(offset, 65536).unwrap();
        if target.read(offset, 65536).unwrap() != data {
            target.write(offset, &data).unwrap();
        }
    }
    target.send_text(Opcode::CopyEnd, &CopyEnd { layer: None }).unwrap();
}

fn snapshot_files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let names =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = names.filter(|name| name.starts_with("volume-snap"));
    names.map(|name| (name.clone(), std::fs::read(directory.join(&name)).unwrap())).collect()
}

fn exported(spec: &ReplicaSpec, snapshot: &str, to: &Path) -> Vec<u8> {
    export(&spec.directory, Some(snapshot), ExportTarget::File(to.to_owned()), |_, _| {}).unwrap();
    std::fs::read(to).unwrap()
}

#[test]
fn a_copy_has_the_same_layers_and_reads_the_same() {
    let base = base();
    let (from, to) = (spec_of(base.path(), "from", 1), spec_of(base.path(), "to", 2));
    fill(&from, 6);
    let (source, target) = (Replica::start(&from), Replica::start(&to));
    let mut ours = source.try_open(generation(1), CONTROL_QUEUE).unwrap().0;
    let mut theirs = target.try_open(generation(1), CONTROL_QUEUE).unwrap().0;
    copy(&mut ours, &mut theirs);
    for at in (0..SIZE).step_by(1 << 20) {
        assert!(ours.read(at, 1 << 20).unwrap() == theirs.read(at, 1 << 20).unwrap());
    }
    assert!(!target.try_open(generation(1), 0).unwrap().1.rebuilding);
    // Writes do not change the snapshots.
    assert_eq!(on_layer(&mut theirs, Opcode::WriteLayer, 0, 0, 4096, &[1; 4096]), Err(libc::EINVAL));
    theirs.write(0, &[7; 1 << 20]).unwrap();
    assert!(source.terminate().success() && target.terminate().success());
    assert!(snapshot_files(&from.directory) == snapshot_files(&to.directory));
    for n in 0..6 {
        let snapshot = format!("snapshot-number-{n}");
        let image = base.path().join("image");
        assert!(exported(&from, &snapshot, &image) == exported(&to, &snapshot, &image), "{snapshot}");
    }
}

#[test]
fn an_interrupted_copy_continues_after_its_whole_layers() {
    let base = base();
    let (from, to) = (spec_of(base.path(), "from", 1), spec_of(base.path(), "to", 2));
    fill(&from, 4);
    let source = Replica::start(&from);
    let mut ours = source.open(generation(1));
    let list = layers(&mut ours);
    for whole in 0..4u32 {
        let mut target = Replica::start(&to);
        let (mut theirs, welcome) = target.try_open(generation(1), CONTROL_QUEUE).unwrap();
        assert_eq!(welcome.rebuilding, whole > 0);
        let CopyState { done } = theirs.ask(Opcode::CopyBegin, &list).unwrap();
        assert_eq!(done, (0..5).map(|layer| layer < whole).collect::<Vec<_>>());
        let (errno, _) = theirs.send_text(Opcode::CopyEnd, &CopyEnd { layer: None }).unwrap_err();
        assert_eq!(errno, libc::EINVAL);
        copy_layer(&mut ours, &mut theirs, whole);
        // A part of the next one, and it dies.
        if whole < 3 {
            on_layer(&mut theirs, Opcode::WriteLayer, whole + 1, 0, 4096, &[9; 4096]).unwrap();
        }
        target.kill();
    }
    let target = Replica::start(&to);
    copy(&mut ours, &mut target.open(generation(1)));
    assert!(target.terminate().success() && source.terminate().success());
    assert!(snapshot_files(&from.directory) == snapshot_files(&to.directory));
}

#[test]
fn a_long_chain_fits_its_messages() {
    let base = base_in_memory();
    let (from, to) = (spec_of(base.path(), "from", 1), spec_of(base.path(), "to", 2));
    fill(&from, 249);
    let (source, target) = (Replica::start(&from), Replica::start(&to));
    let mut ours = source.open(generation(1));
    let list = layers(&mut ours);
    assert_eq!(list.layers.len(), 250);
    assert!(serde_json::to_vec(&list).unwrap().len() > 100 << 10);
    copy(&mut ours, &mut target.open(generation(1)));
    assert!(target.terminate().success());
    assert!(snapshot_files(&from.directory) == snapshot_files(&to.directory));
}

#[test]
fn a_member_is_not_thrown_away() {
    let base = base();
    let (from, to) = (spec_of(base.path(), "from", 1), spec_of(base.path(), "to", 2));
    fill(&from, 1);
    let source = Replica::start(&from);
    let list = layers(&mut source.open(generation(1)));
    let mut member = to.clone();
    member.first_members = Members::new([member.replica, from.replica]).unwrap();
    let replica = Replica::start(&member);
    let (mut client, welcome) = replica.try_open(generation(1), CONTROL_QUEUE).unwrap();
    client.write(0, &[5; 4096]).unwrap();
    let (errno, refusal) = client.ask::<_, CopyState>(Opcode::CopyBegin, &list).unwrap_err();
    assert!(errno == libc::EBUSY && refusal.message.contains("is a member"), "{refusal:?}");
    assert!(client.read(0, 4096).unwrap() == [5; 4096]);
    assert_eq!(on_layer(&mut client, Opcode::WriteLayer, 0, 0, 4096, &[1; 4096]), Err(libc::EINVAL));
    // Once the replica knows that it has left the view, its data may be discarded.
    let members = Members::new([from.replica]).unwrap();
    let view = View { id: ViewId { generation: generation(1), number: 1 }, members };
    client.send_text(Opcode::Commit, &ViewMessage { view, basis: welcome.report }).unwrap();
    let mut broken = list.clone();
    broken.layers.swap(0, 1);
    let (errno, _) = client.ask::<_, CopyState>(Opcode::CopyBegin, &broken).unwrap_err();
    assert_eq!(errno, libc::EINVAL);
    assert!(client.read(0, 4096).unwrap() == [5; 4096], "the refused request changed nothing");
    let CopyState { done } = client.ask(Opcode::CopyBegin, &list).unwrap();
    assert_eq!(done, [false, false]);
    assert!(client.read(0, 4096).unwrap() == [0; 4096]);
    assert!(replica.try_open(generation(1), 0).unwrap().1.rebuilding);
    for (offset, length) in [(512, 512), (SIZE - 4096, 8192)] {
        let data = vec![1; length as usize];
        assert_eq!(on_layer(&mut client, Opcode::WriteLayer, 0, offset, length, &data), Err(libc::EINVAL));
    }
    client.call(Opcode::Flush, Flags::NONE, 0, 0, &[]).unwrap();
}

/// A source that lies must not break the replica that is made its copy.
#[test]
fn layers_that_no_replica_can_have_change_nothing() {
    let base = base();
    let (from, to) = (spec_of(base.path(), "from", 1), spec_of(base.path(), "to", 2));
    fill(&from, 2);
    let source = Replica::start(&from);
    let list = layers(&mut source.open(generation(1)));
    let spoiled = |spoil: &dyn Fn(&mut WireLayer)| {
        let mut list = list.clone();
        spoil(&mut list.layers[0]);
        list
    };
    let long_name = format!("volume-snap-{}.img", "x".repeat(231));
    let lies = [
        spoiled(&|layer| layer.size_bytes = 1 << 62),
        spoiled(&|layer| layer.size_bytes = SIZE + 4096),
        spoiled(&|layer| layer.size_bytes = 0),
        spoiled(&|layer| layer.size_bytes = 4097),
        spoiled(&|layer| layer.meta = "{".to_owned()),
        spoiled(&|layer| layer.image = "volume-snap-/../../escaped.img".to_owned()),
        spoiled(&|layer| layer.image = "../volume-snap-a.img".to_owned()),
        spoiled(&|layer| layer.image.clone_from(&long_name)),
    ];
    let mut target = Replica::start(&to);
    for lie in lies {
        let mut client = target.open(generation(1));
        let (errno, refusal) = client.ask::<_, CopyState>(Opcode::CopyBegin, &lie).unwrap_err();
        assert_eq!(errno, libc::EINVAL, "{refusal:?}");
        client.write(0, &[5; 4096]).unwrap();
        assert!(!to.directory.join("shorthorn.copy").exists(), "{refusal:?}");
    }
    assert!(target.terminate().success());
    target = Replica::start(&to);
    copy(&mut source.open(generation(2)), &mut target.open(generation(2)));
    assert!(target.terminate().success());
    assert!(snapshot_files(&from.directory) == snapshot_files(&to.directory));
}

/// Else the copy would count as ended in memory and not on the disk: a member that may be emptied after a
/// restart.
#[test]
fn an_end_of_a_copy_that_could_not_be_stored_has_not_ended_it() {
    let base = base();
    let (source_spec, target_spec) = (spec_of(base.path(), "a", 1), spec_of(base.path(), "b", 2));
    fill(&source_spec, 0);
    let (source, mut target) = (Replica::start(&source_spec), Replica::start(&target_spec));
    let list = layers(&mut source.open(generation(1)));
    let mut client = target.open(generation(1));
    let _: CopyState = client.ask(Opcode::CopyBegin, &list).unwrap();
    let in_the_way = target_spec.directory.join("volume.meta.tmp");
    std::fs::create_dir(&in_the_way).unwrap();
    let end = CopyEnd { layer: None };
    client.send_text(Opcode::CopyEnd, &end).unwrap_err();
    std::fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(client.ping(), Err(libc::EIO), "nothing is served any more");
    target.kill();
    let target = Replica::start(&target_spec);
    let (mut client, welcome) = target.try_open(generation(1), 0).unwrap();
    assert!(welcome.rebuilding);
    client.send_text(Opcode::CopyEnd, &end).unwrap();
}
