//! Moves the replicas of this node to a changed data address.
//!
//! A change needs no detach. The replicas of this node listen on the new address and report it, the
//! controller sends it to the engines, and they reconnect. Engines of this node whose connections came from
//! the former address are handed over to new processes, because their connections are dead.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::serve::instance::Hub;
use crate::serve::network::DataNetwork;

/// Changes that come in a row are one: a DHCP client removes an address and adds the next one.
const DEBOUNCE: Duration = Duration::from_millis(300);
/// Time between two readings without a change, and after one that has failed. The kernel reports changes;
/// this is for a lost report.
const READ_EVERY: Duration = Duration::from_secs(30);
/// The same while replicas have not moved yet. The old address may be removed soon.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// The rounds after the start of the agent in which processes of an earlier agent are found again.
const EARLY_ROUNDS: u32 = 5;
/// The number of rounds after which a replica that has not moved is started again.
const ROUNDS_BEFORE_RESTART: u32 = 4;

/// Follows the data address with the replicas and engines of this node.
pub struct AddressFollower {
    network: DataNetwork,
    hub: Arc<Hub>,
    /// The address from which the connections of engines most likely come.
    former: Option<IpAddr>,
}

impl AddressFollower {
    /// Creates it. `last` is the address of an earlier agent, whose engines may run.
    pub fn new(network: DataNetwork, hub: Arc<Hub>, last: Option<IpAddr>) -> AddressFollower {
        AddressFollower { network, hub, former: last }
    }

    /// Follows the address, and moves the replicas, until the agent stops.
    pub async fn follow(mut self, mut stopping: watch::Receiver<bool>) {
        tokio::select! {
            () = self.follow_for_ever() => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
    }

    async fn follow_for_ever(&mut self) {
        let (network, hub) = (&mut self.network, &self.hub);
        let mut early_rounds = EARLY_ROUNDS;
        // The engines that were not found running when their address was gone.
        let mut late_engines = Vec::new();
        // The rounds in which a replica has not moved.
        let mut rounds = BTreeMap::new();
        loop {
            let address = network.current();
            let left = hub.move_replicas(address).await;
            let former = std::mem::replace(&mut self.former, address);
            if former.is_some() && former != address && !network.has(former) {
                late_engines = hub.engines_of_remote_replicas();
            }
            late_engines = hub.renew_connections(late_engines).await;
            early_rounds = early_rounds.saturating_sub(1);
            if early_rounds == 0 {
                late_engines.clear(); // those that start now connect from the new address
            }
            let is_quiet = left.is_empty() && early_rounds == 0 && network.is_settled();
            let pause = if is_quiet { READ_EVERY } else { RETRY_EVERY };
            rounds.retain(|id, _| left.contains(id));
            for id in left {
                let round = rounds.entry(id.clone()).or_insert(0_u32);
                *round += 1;
                if *round == ROUNDS_BEFORE_RESTART {
                    hub.restart_replica(id).await;
                }
            }
            // Without interfaces to follow only replicas that have not moved are left to do.
            if timeout(pause, network.changed()).await.is_ok() {
                sleep(DEBOUNCE).await;
            }
            network.update().await;
        }
    }
}
