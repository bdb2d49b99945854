//! Tests every port on which the real processes of hosts listen: a stranger gets nothing from it, and a
//! flood of strangers costs no member. Each host is a network namespace of this machine.

mod flood;
mod hosts;
mod scan;

use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_control::{ReplicaPhase, ReplicaSpec, SUM_BYTES_PER_S, Secret, Unknown, store_spec};
use shorthorn_tests::apiserver::ApiServer;
use shorthorn_tests::network::{Network, address};
use shorthorn_tests::{
    Guest, GuestOptions, NbdClient, binary, install, replica_status, under_load, until, until_whole,
};
use shorthorn_types::{Members, ReplicaId};

use hosts::Hosts;
use scan::{check_controller, check_data, check_metrics, check_no_certificate, check_tls, inside, listening};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "orders";
const AGENT: u16 = 9501;
const CONTROLLER: u16 = 9521;
/// The ports of the controller in a pod: metrics, and the API for a port-forward.
const METRICS: u16 = 9510;
const FORWARD: u16 = 9520;

#[test]
fn no_port_answers_a_stranger() -> Result<()> {
    let hosts = Hosts::start()?;
    hosts.serve_volume()?;
    let (dir, token) = (hosts.dir.path().to_owned(), hosts.token.clone());
    let secrets = [token.clone(), hosts.volume_secret()?];
    for (host, tls_ports) in [(0, vec![AGENT, CONTROLLER]), (1, vec![AGENT])] {
        let listening = hosts.listening(host)?;
        let ip = address(host);
        let (loopback, reachable): (Vec<_>, Vec<_>) =
            listening.iter().partition(|socket| socket.address.ip().is_loopback());
        ensure!(listening.iter().all(|socket| socket.process.contains("shorthorn")), "{listening:?}");
        ensure!(reachable.iter().all(|socket| socket.address.ip().to_string() == ip), "{reachable:?}");
        ensure!(loopback.len() == tls_ports.len(), "metrics of each daemon alone: {loopback:?}");
        let (tls, data): (Vec<_>, Vec<_>) =
            reachable.into_iter().partition(|socket| tls_ports.contains(&socket.address.port()));
        ensure!(tls.len() == tls_ports.len() && data.len() == 1, "{tls:?} and {data:?}");
        hosts.inside(host, || {
            loopback.iter().try_for_each(|socket| check_metrics(socket.address, &secrets))?;
            for socket in &tls {
                check_tls(socket.address, &dir)?;
                match socket.address.port() {
                    CONTROLLER => check_controller(socket.address, &token)?,
                    _ => check_no_certificate(socket.address)?,
                }
            }
            check_data(data[0].address, &dir)
        })?;
    }
    Ok(())
}

/// A process; killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The controller has the flags of packaging/deploy, and the address for tokens in addition. API server and
/// etcd are on the loopback interface of the same host.
#[test]
fn no_port_of_a_controller_in_kubernetes_answers_a_stranger() -> Result<()> {
    let network = Network::create(2)?;
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let (dir, ip) = (folder.path(), address(0));
    let (_running, secrets) = inside(&network, 0, || {
        let api = ApiServer::start(&dir.join("api"))?;
        install(&api)?;
        let mut command = Command::new(binary("shorthorn-controller")?);
        command.args(["serve", "--kubernetes", "--kubeconfig"]).arg(api.kubeconfig()?);
        for (flag, socket) in [("--listen", "ctl"), ("--csi-listen", "csi")] {
            command.args([flag, &format!("unix://{}", dir.join(socket).display())]);
        }
        command.args(["--forward-listen", &format!("127.0.0.1:{FORWARD}")]);
        command.args(["--metrics-listen", &format!("0.0.0.0:{METRICS}")]);
        command.args(["--tls-listen", &format!("{ip}:{CONTROLLER}")]);
        let controller = Process(command.stdin(Stdio::null()).spawn()?);
        let wanted: Vec<SocketAddr> =
            [("0.0.0.0", METRICS), ("127.0.0.1", FORWARD), (ip.as_str(), CONTROLLER)]
                .map(|(ip, port)| Ok(SocketAddr::new(ip.parse::<IpAddr>()?, port)))
                .into_iter()
                .collect::<Result<_>>()?;
        until("ports of the controller, and no others", LIMIT, || {
            let sockets = listening()?.into_iter();
            let own = sockets.filter(|socket| socket.process.contains("shorthorn"));
            let mut own: Vec<SocketAddr> = own.map(|socket| socket.address).collect();
            own.sort_by_key(SocketAddr::port);
            ensure!(own == wanted, "{own:?}, not {wanted:?}");
            Ok(Some(()))
        })?;
        let secret = |name: &str, field: &str| -> Result<String> {
            let secrets = "/api/v1/namespaces/shorthorn-system/secrets";
            let found = until("Secret", LIMIT, || api.find(&format!("{secrets}/{name}")))?;
            Ok(found["data"][field].as_str().context("a Secret without its field")?.to_owned())
        };
        let secrets = [secret("shorthorn-ca", "ca.json")?, secret("shorthorn-volume-key", "key")?];
        Ok(((controller, api), secrets))
    })?;
    // From another pod.
    inside(&network, 1, || {
        let at = |port: u16| Ok::<_, anyhow::Error>(SocketAddr::new(ip.parse()?, port));
        check_metrics(at(METRICS)?, &secrets)?;
        check_tls(at(CONTROLLER)?, dir)?;
        let forward = std::net::TcpStream::connect_timeout(&at(FORWARD)?, LIMIT);
        let refused = forward.err().map(|error| error.kind());
        ensure!(refused == Some(std::io::ErrorKind::ConnectionRefused), "port {FORWARD}: {refused:?}");
        Ok(())
    })
}

/// The kernel may lack TLS: then the replica refuses engines too. tests/tests/vm_encryption.rs has the rest.
#[test]
fn the_port_of_a_volume_that_encrypts_answers_no_stranger() -> Result<()> {
    let network = Network::create(2)?;
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let dir = folder.path();
    let replica = ReplicaId::from_random(7);
    let spec = ReplicaSpec {
        volume: VOLUME.parse()?,
        replica,
        directory: dir.join("replica"),
        size_bytes: 64 << 20,
        create: true,
        create_once: false,
        first_members: Members::new([replica])?,
        secret: Secret::new([0x5a; 32]),
        data_socket: dir.join("data"),
        data_address: Some(SocketAddr::new(address(0).parse()?, 0)),
        control_socket: dir.join("control"),
        sum_bytes_per_s: Some(SUM_BYTES_PER_S),
        encrypt_in_transit: true,
        unknown: Unknown::default(),
    };
    let file = dir.join("spec.json");
    store_spec(&file, &spec)?;
    let (_process, listening) = inside(&network, 0, || {
        let mut command = Command::new(binary("shorthorn-agent")?);
        command.args(["replica", "serve", "--spec"]).arg(&file).stdin(Stdio::null());
        let process = Process(command.spawn()?);
        until("replica that serves", LIMIT, || {
            Ok((replica_status(&spec.control_socket)?.phase == ReplicaPhase::Serving).then_some(()))
        })?;
        Ok((process, listening()?))
    })?;
    let [socket] = &listening[..] else { anyhow::bail!("{listening:?}") };
    ensure!(socket.address.ip().to_string() == address(0), "{socket:?}");
    inside(&network, 1, || check_data(socket.address, dir))
}

/// The strays come from the address of the controller and of the engine, and from others. They hold their
/// connections until the next wave.
#[test]
fn ten_thousand_strangers_cost_no_member() -> Result<()> {
    let hosts = Hosts::start()?;
    hosts.serve_volume()?;
    flood::add_sources(&hosts)?;
    let ports = hosts.reachable(1)?;
    ensure!(ports.len() == 2, "the node API and the replica: {ports:?}");
    let client = NbdClient::connect(&hosts.path("n0/r/engine").join(format!("{VOLUME}.nbd")), VOLUME, LIMIT)?;
    let guest = Guest::new(client, GuestOptions { sectors: 8192, ..GuestOptions::new(fastrand::u64(..)) });
    let ((), guest) = under_load(guest, |load| {
        load.wait_for_answers(100, LIMIT)?;
        let before = until_whole(&hosts.engine(), LIMIT)?;
        let begin = Instant::now();
        let strays = flood::all(&hosts, &ports, || load.wait_for_answers(50, LIMIT).map(drop))?;
        println!("{} connections within {:?}", flood::STRAYS, begin.elapsed());
        load.wait_for_answers(100, LIMIT)?;
        let status = until_whole(&hosts.engine(), LIMIT)?;
        ensure!(status.view == before.view, "a member has left: {:?}, then {:?}", before.view, status.view);
        ensure!(status.members.iter().all(|member| member.times_awaited == 0), "{status:#?}");
        // A new engine connects, and so does a new controller.
        hosts.ctl(&["volume", "upgrade-engine", VOLUME])?;
        until_whole(&hosts.engine(), LIMIT)?;
        drop(strays);
        Ok(())
    })?;
    println!("{:?}", guest.counts());
    Ok(())
}
