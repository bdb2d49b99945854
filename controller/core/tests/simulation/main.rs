//! The reconcilers in a simulated cluster. It has random events, a crash between any two actions, and
//! decisions from an outdated state. Calls fail, are not answered or come late, and events are lost or
//! repeated. The rules must hold after every step, and once the faults stop, every volume must reach its
//! wanted state. `PROPTEST_CASES` sets the number of clusters.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

mod agent;
mod controller;
mod progress;
mod sim;

use proptest::prelude::*;

use sim::{Op, Sim};

fn op() -> impl Strategy<Value = Op> {
    let which = 0..1000usize;
    let node = 0..sim::NODES;
    prop_oneof![
        3 => Just(Op::Create),
        10 => (which.clone(), node.clone()).prop_map(|(volume, node)| Op::Attach(volume, node)),
        8 => which.clone().prop_map(Op::Detach),
        1 => which.clone().prop_map(Op::Delete),
        4 => (which.clone(), 0..3u8).prop_map(|(volume, gib)| Op::Expand(volume, gib)),
        60 => which.clone().prop_map(Op::Decide),
        60 => which.clone().prop_map(Op::Act),
        6 => which.clone().prop_map(Op::CallFails),
        6 => which.clone().prop_map(Op::CallUnanswered),
        10 => which.clone().prop_map(Op::CallLate),
        3 => which.clone().prop_map(Op::LateCallArrives),
        40 => node.clone().prop_map(Op::Event),
        2 => node.clone().prop_map(Op::EventRepeated),
        2 => node.clone().prop_map(Op::EventLost),
        2 => node.clone().prop_map(Op::StreamBreaks),
        8 => node.clone().prop_map(Op::StreamOpens),
        20 => node.clone().prop_map(Op::Progress),
        2 => (node.clone(), which.clone()).prop_map(|(node, which)| Op::ProcessDies(node, which)),
        1 => node.clone().prop_map(Op::NodeRestarts),
        1 => node.clone().prop_map(Op::NodeLost),
        2 => any::<bool>().prop_map(Op::GiveUp),
        4 => (node.clone(), which.clone()).prop_map(|(node, which)| Op::MemberFails(node, which)),
        1 => (which.clone(), which.clone()).prop_map(|(volume, replica)| Op::Salvage(volume, replica)),
        1 => (node.clone(), which.clone()).prop_map(|(node, which)| Op::DirectoryLost(node, which)),
        1 => (node.clone(), any::<bool>()).prop_map(|(node, used)| Op::DeviceUsed(node, used)),
        1 => node.clone().prop_map(Op::Cordon),
        2 => node.clone().prop_map(Op::Drain),
        4 => (which.clone(), prop::bool::weighted(0.8))
            .prop_map(|(replica, wanted)| Op::Move(replica, wanted)),
        2 => which.clone().prop_map(Op::DeleteReplica),
        2 => node.clone().prop_map(Op::Uncordon),
        3 => (1..30u8).prop_map(Op::TimePasses),
        2 => which.clone().prop_map(Op::LeaveOut),
        3 => which.clone().prop_map(Op::TakeIn),
        2 => Just(Op::Crash),
        1 => Just(Op::TakeOver),
        6 => which.clone().prop_map(Op::OldLeaderActs),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn rules_hold_and_volumes_converge(
        ops in prop::collection::vec(op(), 1..600),
        quiet in any::<bool>(),
        used in any::<bool>(),
    ) {
        let mut sim = Sim::new();
        if quiet {
            // A start that works, so that the interesting part begins with volumes that are attached.
            for node in 0..2 {
                sim.step(&Op::Create);
                sim.step(&Op::Attach(node, node));
            }
            sim.converge();
            sim.check_converged();
        }
        for op in &ops {
            sim.step(op);
        }
        sim.stop_faults();
        sim.open_nodes();
        if used {
            sim.use_devices(true);
            sim.converge();
            sim.check_used();
            sim.want_back();
            sim.converge();
            sim.check_back();
            sim.use_devices(false);
        }
        sim.converge();
        // The cost does not matter: waits for a lost node can end.
        sim.step(&Op::GiveUp(true));
        sim.converge();
        sim.check_converged();
    }
}

#[test]
fn an_old_leader_stops_no_engine_of_the_new_one() {
    Sim::new().old_leader_stops_an_engine();
}
