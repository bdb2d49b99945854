//! Requests allocate nothing once the core is warm: under memory pressure the kernel writes back through the
//! process that runs it.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use shorthorn_core::{
    CopyLimits, CoreConfig, EngineCore, Event, FlightLimits, Operation, Output, PeerConfig, Request, SlotId,
};
use shorthorn_testkit::CountingAllocator;
use shorthorn_types::{ByteRange, Generation, Members, RegionSet, Regions, ReplicaId, View, ViewId};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const SIZE_BYTES: u64 = 64 << 30;
const DEPTH: u16 = 64;

/// Returns two members, and one absent replica.
fn core() -> EngineCore {
    let regions = Regions::of(SIZE_BYTES).count();
    let id = ViewId { generation: Generation::new(1, 0), number: 1 };
    EngineCore::new(&CoreConfig {
        queues: 1,
        depth: DEPTH,
        peers: (0..3).map(|n| PeerConfig { replica: ReplicaId::from_random(n), local: n == 0 }).collect(),
        view: View { id, members: Members::new((0..2).map(ReplicaId::from_random)).unwrap() },
        replica_timeout_ms: 5000,
        late_limit_ms: u64::MAX,
        flight_limits: FlightLimits { bytes: 4 << 20, requests: 200 },
        size_bytes: SIZE_BYTES,
        dirty: RegionSet::empty(regions),
        resync_sources: Vec::new(),
        out_of_sync: vec![RegionSet::empty(regions); 3],
        stamp: 0,
        out_of_sync_stamps: Vec::new(),
        copy_slots: 4,
        copy_limits: CopyLimits { bytes_per_s: None, share_percent: 50 },
        intent_interval_ms: Some(60_000),
        intent_keep_bytes: 0,
        verify_reads: false,
        refuses_requests: false,
    })
}

/// Fills every slot and answers everything.
fn round(core: &mut EngineCore, out: &mut Vec<Output>, number: u64) {
    for slot in 0..DEPTH {
        let operation = match slot % 4 {
            0 => Operation::Read,
            _ => Operation::Write { fua: false },
        };
        // Every fourth waits for the one before.
        let block = (number * 7919 + u64::from(slot - slot / 4)) % (SIZE_BYTES / 4096 - 64);
        let range = ByteRange::new(block * 4096, 4096).unwrap();
        core.apply(Event::Submit { queue: 0, request: Request { slot, operation, range } }, out);
    }
    while let Some(output) = out.pop() {
        if let Output::Send { peer, slot, .. } = output {
            core.apply(Event::Reply { peer, slot, outcome: Ok(()) }, out);
        }
    }
    core.apply(Event::Tick { now_ms: number }, out);
    out.retain(|output| !matches!(output, Output::Ping { .. }));
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let mut core = core();
    let mut out = Vec::with_capacity(1 << 10);
    round(&mut core, &mut out, 0);
    let before = ALLOCATOR.allocations();
    for number in 1..900 {
        round(&mut core, &mut out, number);
    }
    assert_eq!(ALLOCATOR.allocations() - before, 0);
    assert_eq!(core.unfinished(), 0);
    let slot = SlotId { queue: 0, slot: 0 };
    core.apply(Event::Lost { peer: 1, reason: format!("{slot:?}") }, &mut out);
    assert!(ALLOCATOR.allocations() > before, "allocations are counted");
}
