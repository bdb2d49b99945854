//! The TCP ports of replicas. A replica keeps its port for as long as it is known here. So the engines of
//! other nodes find it again after a restart.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use shorthorn_control::ReplicaSpec;
use shorthorn_replica::bind_tcp;

use crate::serve::error::NodeError;
use crate::serve::instance::Spec;

pub fn of(spec: &Spec) -> Option<u16> {
    match spec {
        Spec::Replica(replica) => replica.data_address.map(|address| address.port()),
        Spec::Engine(_) => None,
    }
}

/// Takes the port over from the spec that was here before.
pub fn keep(spec: &mut Spec, known: &Spec) {
    if let (Spec::Replica(spec), Spec::Replica(known)) = (spec, known) {
        spec.data_address = known.data_address;
    }
}

/// Gives `replica` a port of `ip`, the data address of the node, if it has one. That is the port that the
/// replica has, else the first that is free.
///
/// # Errors
/// [`NodeError::Exhausted`] if none is free.
pub fn choose(
    replica: &mut ReplicaSpec,
    ip: Option<IpAddr>,
    ports: &RangeInclusive<u16>,
    taken: &[u16],
) -> Result<(), NodeError> {
    let Some(ip) = ip else {
        replica.data_address = None;
        return Ok(());
    };
    let had = replica.data_address.map(|address| address.port());
    if let Some(port) = had.filter(|port| ports.contains(port) && !taken.contains(port)) {
        replica.data_address = Some(SocketAddr::new(ip, port));
        return Ok(());
    }
    // Another program may use one of these ports too; only a bind shows that.
    let free = |port: &u16| !taken.contains(port) && bind_tcp(SocketAddr::new(ip, *port)).is_ok();
    let port = ports.clone().find(free).ok_or_else(|| {
        let (first, last) = (ports.start(), ports.end());
        NodeError::Exhausted(format!("no port of {ip} from {first} to {last} is free: widen data_ports"))
    })?;
    replica.data_address = Some(SocketAddr::new(ip, port));
    Ok(())
}
