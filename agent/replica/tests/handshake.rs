//! Tests the admission of engines.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::*;
use shorthorn_control::{ProcessCommand, ProcessStatus, ReplicaPhase, ReplicaStatus};
use shorthorn_tls::connection_secret;
use shorthorn_types::{Generation, ReplicaId};
use shorthorn_wire::{EngineClaim, Flags, Opcode};

#[test]
fn an_engine_gets_size_and_views() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), 16 * MIB));
    let (mut client, welcome) = replica.try_open(generation(3), 0).unwrap();
    assert_eq!(welcome.size_bytes, 16 * MIB);
    assert_eq!(welcome.report.committed.members, replica.spec.first_members);
    assert!(welcome.report.proposed.is_empty());
    client.ping().unwrap();
    let status = replica.status();
    assert_eq!((status.phase, status.generation), (ReplicaPhase::Serving, Some(generation(3))));
    assert_eq!(status.addresses, [format!("unix:{}", replica.spec.data_socket.display())]);
    let mode = std::fs::metadata(&replica.spec.data_socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn strangers_are_refused_with_a_reason() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let claim = || replica.claim(generation(1), 0);
    let cases: [(EngineClaim, [u8; 32], &str); 4] = [
        (EngineClaim { volume: "v2".parse().unwrap(), ..claim() }, SECRET, "volume v1, not"),
        (EngineClaim { replica: ReplicaId::from_random(9), ..claim() }, SECRET, "replica 00000007"),
        (claim(), [0; 32], "the proof is wrong"),
        (EngineClaim { queue: 99, ..claim() }, SECRET, "queue 99"),
    ];
    for (claim, secret, words) in cases {
        let Ok(Err((status, refusal))) = Client::open(replica.connect(), &claim, secret) else {
            panic!("{words}")
        };
        assert!(status != 0 && refusal.message.contains(words), "{status} {refusal:?}");
        assert!(refusal.holder.is_none());
    }
    assert_eq!(replica.status().generation, None, "none of them has fenced another");
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut client = replica.open(generation(1));
    for nonsense in [&b"GET / HTTP/1.1\r\n\r\n and so on and so on and so on"[..], &[0; 4096], &[0xff; 40]] {
        let mut socket = replica.connect();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        read_frame(&mut socket).unwrap();
        socket.write_all(nonsense).unwrap();
        let mut rest = Vec::new();
        // An end or a reset, but no answer.
        let _ = socket.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{rest:?}");
    }
    client.ping().unwrap();
}

#[test]
fn a_lower_generation_is_refused_with_the_holder_of_the_replica() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut client = replica.open(generation(5));
    let (status, refusal) = replica.try_open(generation(4), 0).err().unwrap();
    assert_eq!((status, refusal.holder.unwrap().generation), (libc::EPERM, generation(5)));
    client.ping().unwrap();
}

#[test]
fn a_higher_generation_closes_the_older_connections() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let old = replica.open(generation(5));
    let (old_too, _) = replica.try_open(generation(5), 1).unwrap();
    let mut new = replica.open(generation(6));
    assert!(old.closed() && old_too.closed());
    new.ping().unwrap();
    assert!(replica.try_open(generation(5), 0).is_err());
    assert_eq!(replica.status().generation, Some(generation(6)));
}

#[test]
fn a_fence_ends_older_engines_with_no_newer_one_there() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let old = replica.open(generation(5));
    let control = shorthorn_control::ControlClient::connect(&replica.spec.control_socket).unwrap();
    let mut statuses =
        shorthorn_control::ControlClient::connect(&replica.spec.control_socket).unwrap().watch().unwrap();
    control.request(&ProcessCommand::Fence { generation: generation(6) }).unwrap();
    let fenced = statuses.find_map(|status| match status.unwrap() {
        ProcessStatus::Replica(status) => (status.generation == Some(generation(6))).then_some(status),
        ProcessStatus::Engine(_) => None,
    });
    let views = fenced.unwrap().views.unwrap();
    assert_eq!(views.committed.members, replica.spec.first_members);
    assert!(old.closed());
    let (_, refusal) = replica.try_open(generation(5), 0).err().unwrap();
    assert_eq!(refusal.holder.unwrap().generation, generation(6));
    // A late one of a lower number changes nothing, and the next engine comes in; also after a restart.
    control.request(&ProcessCommand::Fence { generation: generation(4) }).unwrap();
    let spec = replica.spec.clone();
    assert!(replica.terminate().success());
    let replica = Replica::start(&spec);
    assert_eq!(replica.status().generation, Some(generation(6)));
    assert!(replica.try_open(generation(5), 0).is_err());
    replica.open(generation(7)).ping().unwrap();
}

/// Checks that the requests of an older engine change nothing any more once a newer engine is welcome.
#[test]
fn writes_of_an_older_engine_have_ended_when_the_newer_is_welcome() {
    const LENGTH: u32 = 1 << 20;
    const PLACES: u64 = 4;
    let base = base();
    let replica = Replica::start(&spec(base.path(), 32 * MIB));
    let begun = std::time::Instant::now();
    for attach in 1..30 {
        let mut old = replica.open(generation(attach));
        let (sender, started) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            let data = pattern(attach, LENGTH as usize);
            for n in 0.. {
                if n == 20 {
                    sender.send(()).unwrap();
                }
                let offset = n % PLACES * u64::from(LENGTH);
                if old.try_send(Opcode::Write, Flags::NONE, offset, LENGTH, &data).is_err() {
                    return;
                }
            }
        });
        started.recv().unwrap();
        // Small and quick, while large writes of the older engine may be in flight.
        let mut new = replica.open(Generation::new(attach, 1));
        let data = pattern(attach << 32, 4096);
        for n in 0..PLACES {
            new.write(n * u64::from(LENGTH) + (512 << 10), &data).unwrap();
        }
        writer.join().unwrap();
        new.flush().unwrap();
        for n in 0..PLACES {
            assert!(new.read(n * u64::from(LENGTH) + (512 << 10), 4096).unwrap() == data);
        }
    }
    assert!(begun.elapsed() < TIMEOUT, "a newer engine waits for requests in flight and nothing else");
}

#[test]
fn a_generation_outlives_a_kill() {
    let base = base();
    let mut replica = Replica::start(&spec(base.path(), MIB));
    replica.open(generation(5));
    replica.kill();
    let replica = Replica::start(&replica.spec);
    assert_eq!(replica.status().generation, Some(generation(5)));
    let (_, refusal) = replica.try_open(generation(4), 0).err().unwrap();
    assert_eq!(refusal.holder.unwrap().generation, generation(5));
    replica.open(generation(5));
}

#[test]
fn queues_have_a_connection_each_and_the_newer_one_counts() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let mut clients: Vec<Client> =
        (0..8).map(|queue| replica.try_open(generation(1), queue).unwrap().0).collect();
    clients.iter_mut().for_each(|client| client.ping().unwrap());
    let (mut again, _) = replica.try_open(generation(1), 3).unwrap();
    assert!(clients.remove(3).closed());
    again.ping().unwrap();
    clients.iter_mut().for_each(|client| client.ping().unwrap());
}

#[test]
fn engines_on_other_hosts_connect_by_tcp() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    spec.data_address = Some("127.0.0.1:0".parse().unwrap());
    let replica = Replica::start(&spec);
    let socket = connect_by_tcp(&replica);
    let (mut client, _) = Client::open(socket, &replica.claim(generation(1), 0), SECRET).unwrap().unwrap();
    client.write(4096, &pattern(1, 8192)).unwrap();
    assert_eq!(client.read(4096, 8192).unwrap(), pattern(1, 8192));
}

#[test]
fn a_volume_that_encrypts_in_transit_takes_no_plain_engine_of_another_host() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    spec.data_address = Some("127.0.0.1:0".parse().unwrap());
    spec.encrypt_in_transit = true;
    let replica = Replica::start(&spec);
    let claim = replica.claim(generation(1), 0);
    let Ok(Err((status, refusal))) = Client::open(connect_by_tcp(&replica), &claim, SECRET) else {
        panic!("it takes a plain engine")
    };
    assert!(status != 0 && refusal.message.contains("encrypts in transit"), "{refusal:?}");
    assert_eq!(replica.status().generation, None, "it has fenced no engine");
    // The Unix socket does not leave the host. But an engine that does not know of encryption is refused
    // there too: it could copy the data to another host in clear.
    let Err((status, _)) = replica.try_open(generation(1), 0) else { panic!("it takes an older engine") };
    assert!(status != 0);
    let secret = *connection_secret(&spec.secret, true).bytes();
    let (mut engine, _) = Client::open(replica.connect(), &claim, secret).unwrap().unwrap();
    engine.write(0, &pattern(1, 4096)).unwrap();
    assert!(replica.terminate().success());

    // An earlier release does not know the field, and must not serve the data in clear.
    spec.encrypt_in_transit = false;
    let refused = Replica::try_start(&spec).err().unwrap();
    assert!(refused.contains("belongs to a volume with another secret"), "{refused}");
}

fn tcp_address(replica: &Replica) -> SocketAddr {
    replica.status().addresses[1].strip_prefix("tcp:").unwrap().parse().unwrap()
}

fn connect_by_tcp(replica: &Replica) -> UnixStream {
    // The calls are the same for every kind of stream socket.
    UnixStream::from(OwnedFd::from(TcpStream::connect(tcp_address(replica)).unwrap()))
}

/// Sends the replica to another address, and waits until its status has an address there.
fn move_to(replica: &Replica, address: SocketAddr) {
    let client = shorthorn_control::ControlClient::connect(&replica.spec.control_socket).unwrap();
    client.request(&ProcessCommand::Listen { address }).unwrap();
    let ip = |status: &ReplicaStatus| {
        let address = status.addresses[1].strip_prefix("tcp:").unwrap();
        address.parse::<SocketAddr>().unwrap().ip()
    };
    let changes =
        shorthorn_control::ControlClient::connect(&replica.spec.control_socket).unwrap().watch().unwrap();
    for status in changes {
        let ProcessStatus::Replica(status) = status.unwrap() else { panic!("no replica") };
        if ip(&status) == address.ip() {
            return;
        }
    }
    panic!("the replica has ended");
}

#[test]
fn a_replica_moves_to_another_address_and_keeps_its_connections() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    spec.data_address = Some("127.0.0.1:0".parse().unwrap());
    let replica = Replica::start(&spec);
    let former = tcp_address(&replica);
    let (mut old, _) =
        Client::open(connect_by_tcp(&replica), &replica.claim(generation(1), 0), SECRET).unwrap().unwrap();
    move_to(&replica, "127.0.0.2:0".parse().unwrap());
    assert!(TcpStream::connect(former).is_err(), "the former address is closed");
    old.ping().unwrap();
    let (mut new, _) =
        Client::open(connect_by_tcp(&replica), &replica.claim(generation(1), 1), SECRET).unwrap().unwrap();
    new.ping().unwrap();
}

#[test]
fn a_replica_starts_while_its_host_does_not_have_the_address() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    // An address of documentation (RFC 5737).
    spec.data_address = Some("192.0.2.77:0".parse().unwrap());
    let replica = Replica::start(&spec);
    replica.open(generation(1));
    move_to(&replica, "127.0.0.1:0".parse().unwrap());
    let (mut remote, _) =
        Client::open(connect_by_tcp(&replica), &replica.claim(generation(1), 1), SECRET).unwrap().unwrap();
    remote.ping().unwrap();
}

#[test]
fn silent_connections_keep_no_engine_out() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    spec.data_address = Some("127.0.0.1:0".parse().unwrap());
    let replica = Replica::start(&spec);
    let begin = Instant::now();
    let silent: Vec<UnixStream> = (0..200).map(|_| connect_by_tcp(&replica)).collect();
    let socket = connect_by_tcp(&replica);
    let (mut remote, _) = Client::open(socket, &replica.claim(generation(1), 0), SECRET).unwrap().unwrap();
    let (mut local, _) = replica.try_open(generation(1), 1).unwrap();
    remote.ping().unwrap();
    local.ping().unwrap();
    // One after the other they would have taken 5 s for every eight of the silent ones: over two minutes.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    drop(silent);
}
