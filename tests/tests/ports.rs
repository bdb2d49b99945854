//! Tests every port on which the real processes of two hosts listen: a stranger gets nothing from it, and a
//! flood of strangers costs no member. Each host is a network namespace of this machine.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, setns};
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_api::v1::{self, EnrollRequest, controller_tls_client::ControllerTlsClient};
use shorthorn_pki::{Connector, JoinToken};
use shorthorn_tests::network::{Network, address};
use shorthorn_tests::{Guest, GuestOptions, NbdClient, binary, under_load, until, until_whole};
use tonic::transport::Endpoint;

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
/// The longest answer of a port to a stranger: a handshake of TLS lasts 10 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const VOLUME: &str = "orders";
const AGENT: u16 = 9501;
const CONTROLLER: u16 = 9521;
/// The connections of a flood to each port.
const STRAYS: usize = 300;
/// Record types of TLS (RFC 8446, 5.1).
const TLS_ALERT: u8 = 21;
/// The longest challenge of a replica: a frame with one nonce.
const CHALLENGE_BYTES_MAX: usize = 512;

/// Two hosts with TLS: a controller on the first, an agent on each.
struct Hosts {
    children: Vec<Child>,
    token: String,
    dir: tempfile::TempDir,
    // Last: with it go all processes on the hosts.
    network: Network,
}

impl Hosts {
    fn start() -> Result<Hosts> {
        let dir = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let mut hosts =
            Hosts { children: Vec::new(), token: String::new(), dir, network: Network::create(2)? };
        let (store, socket) = (hosts.path("store.redb"), format!("unix://{}", hosts.path("ctl").display()));
        let mut controller = hosts.on(0, "shorthorn-controller")?;
        controller.arg("serve").arg("--store").arg(store).args(["--listen", &socket]);
        controller.args(["--tls-listen", &format!("{}:{CONTROLLER}", address(0))]);
        controller.args(["--storage-minimal-available-percentage", "0"]);
        hosts.children.push(controller.spawn()?);
        for host in 0..2 {
            hosts.start_agent(host)?;
        }
        hosts.token = hosts.ctl(&["node", "token", "spare"])?.trim().to_owned();
        for place in ["n0", "n1"] {
            let disk = hosts.path(place).join("disk");
            hosts.ctl(&["disk", "add", place, disk.to_str().context("a path that is no UTF-8")?])?;
        }
        Ok(hosts)
    }

    /// Starts the agent of a host, which joins by a token.
    fn start_agent(&mut self, host: usize) -> Result<()> {
        let (name, ip) = (format!("n{host}"), address(host));
        let dir = self.path(&name);
        fs::create_dir_all(dir.join("disk"))?;
        let path = |name: &str| dir.join(name).display().to_string();
        let config = format!(
            "node_name = \"{name}\"\nlisten = [\"unix:{}\", \"tcp:{ip}:{AGENT}\"]\ndata_address = \"{ip}\"\n\
             state_dir = \"{}\"\nruntime_dir = \"{}\"\ndevice_dir = \"{}\"\ntls_dir = \"{}\"\n\
             instances = \"children\"\ncsi = \"off\"\n",
            path("sock"),
            path("s"),
            path("r"),
            path("dev"),
            path("tls"),
        );
        let file = dir.join("agent.toml");
        fs::write(&file, config)?;
        let token = self.ctl(&["node", "token", &name])?;
        let controller = format!("{}:{CONTROLLER}", address(0));
        let mut join = self.on(host, "shorthorn-agent")?;
        join.args(["join", "--token", token.trim(), "--controller", &controller, "--config"]).arg(&file);
        ensure!(join.status()?.success(), "node {name} does not join");
        let agent = self.on(host, "shorthorn-agent")?.args(["serve", "--config"]).arg(&file).spawn()?;
        self.children.push(agent);
        self.ctl(&["node", "add", &name, "--address", &format!("{ip}:{AGENT}")]).map(drop)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn on(&self, host: usize, program: &str) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network.file(host).display())).arg(binary(program)?);
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Runs shorthornctl until it works.
    fn ctl(&self, arguments: &[&str]) -> Result<String> {
        until(&format!("answer to shorthornctl {}", arguments.join(" ")), LIMIT, || {
            let mut command = Command::new(binary("shorthornctl")?);
            command.arg("--server").arg(format!("unix://{}", self.path("ctl").display())).args(arguments);
            let output = command.stdin(Stdio::null()).output()?;
            let told = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{}", told.trim());
            Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
        })
    }

    fn engine(&self) -> PathBuf {
        self.path("n0/r/engine").join(format!("{VOLUME}.control"))
    }

    /// Creates a volume with a replica on each host, and attaches it to the first.
    fn serve_volume(&self) -> Result<()> {
        self.ctl(&[
            "volume",
            "create",
            VOLUME,
            "--size",
            "64MiB",
            "--frontend",
            "socket",
            "--replicas",
            "2",
        ])?;
        self.ctl(&["volume", "attach", VOLUME, "--node", "n0"])?;
        until_whole(&self.engine(), LIMIT).map(drop)
    }

    /// Returns the secret of the volume, as the engine's spec file has it.
    fn volume_secret(&self) -> Result<String> {
        let file = self.path("n0/s/instances/engine").join(format!("{VOLUME}.json"));
        let spec: serde_json::Value = serde_json::from_slice(&fs::read(&file)?)?;
        let secret = spec["secret"].as_str().filter(|secret| secret.len() >= 32);
        secret.map(str::to_owned).with_context(|| format!("{} has no secret as a text", file.display()))
    }

    /// Does `work` in the network of a host.
    fn inside<T: Send>(&self, host: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let file = fs::File::open(self.network.file(host))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                setns(file, CloneFlags::CLONE_NEWNET)?;
                work()
            });
            thread.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))?
        })
    }

    /// Returns the listening sockets of a host.
    fn listening(&self, host: usize) -> Result<Vec<Listening>> {
        let shown = self.inside(host, || {
            let output = Command::new("ss").args(["-H", "-l", "-n", "-t", "-u", "-p"]).output()?;
            ensure!(output.status.success(), "ss: {}", String::from_utf8_lossy(&output.stderr));
            Ok(String::from_utf8(output.stdout)?)
        })?;
        println!("{shown}");
        shown.lines().map(Listening::parse).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A listening socket.
#[derive(Debug)]
struct Listening {
    address: SocketAddr,
    process: String,
}

impl Listening {
    /// Parses a line of `ss -Hlntup`: protocol, state, two queues, both addresses, and processes.
    fn parse(line: &str) -> Result<Listening> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [protocol, _, _, _, local, ..] = fields[..] else { bail!("{line:?} is no socket") };
        ensure!(protocol == "tcp", "a socket that is not TCP: {line}");
        let process = fields.get(6).copied().unwrap_or_default().to_owned();
        let address = local.parse().with_context(|| format!("{local} is on no single address"))?;
        Ok(Listening { address, process })
    }
}

/// Returns all that a port answers to these bytes.
fn answer(address: SocketAddr, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    // The other side may have closed it already.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(length) => answer.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(answer),
            Err(error) => return Err(error).with_context(|| format!("{address} holds a stranger")),
        }
    }
}

fn http(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
}

/// The beginnings of protocols that a stranger may speak.
fn probes() -> Vec<Vec<u8>> {
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let random = (0..256).map(|_| fastrand::u8(..)).collect();
    vec![http("/metrics").into_bytes(), http2, random, vec![0; 4096], b"\x16\x03\x01".to_vec()]
}

/// True if text in the bytes says anything about the cluster.
fn tells(bytes: &[u8], dir: &Path) -> bool {
    let text = String::from_utf8_lossy(bytes);
    [VOLUME, "n0", "n1", "shorthorn", &dir.display().to_string()].iter().any(|word| text.contains(word))
}

/// Checks that metrics and health are all that a port of metrics has, and that they have no secret.
fn check_metrics(address: SocketAddr, secrets: &[String]) -> Result<()> {
    for path in ["/metrics", "/healthz", "/readyz"] {
        let told = String::from_utf8_lossy(&answer(address, http(path).as_bytes())?).into_owned();
        ensure!(told.starts_with("HTTP/1.1 200") || path == "/readyz", "{address}{path}: {told}");
        let is_secret = |word: &String| told.contains(word.as_str());
        ensure!(!secrets.iter().any(is_secret) && !told.contains("-----BEGIN"), "{address}{path}: {told}");
    }
    for path in ["/", "/debug", "/shorthorn.v1.Node/GetNode", "/metrics/../etc/passwd"] {
        let told = String::from_utf8_lossy(&answer(address, http(path).as_bytes())?).into_owned();
        ensure!(told.starts_with("HTTP/1.1 404"), "{address}{path}: {told}");
    }
    Ok(())
}

/// Checks that a port of TLS answers a stranger with alerts at most.
fn check_tls(address: SocketAddr, dir: &Path) -> Result<()> {
    for probe in probes() {
        let told = answer(address, &probe)?;
        let is_alert = told.first() == Some(&TLS_ALERT) && told.len() <= 16;
        ensure!(told.is_empty() || is_alert, "{address} answers {told:?}");
        ensure!(!tells(&told, dir), "{address} answers {told:?}");
    }
    Ok(())
}

/// Checks that a handshake without a certificate ends with an alert, and that no data follows.
fn check_no_certificate(address: SocketAddr) -> Result<()> {
    let mut client = Command::new("openssl");
    client.args(["s_client", "-quiet", "-alpn", "h2", "-connect", &address.to_string()]);
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().context("starting openssl")?;
    let mut stdin = client.stdin.take().context("openssl has no standard input")?;
    let _ = stdin.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    // The end of the input would end it: it waits for the server.
    let output = std::thread::scope(|scope| {
        let waiting = scope.spawn(move || client.wait_with_output());
        let output = waiting.join().map_err(|_| anyhow::anyhow!("the thread has panicked"));
        drop(stdin);
        output
    })??;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(told.contains("certificate required"), "{address}: {told}");
    ensure!(output.stdout.is_empty(), "{address} sends {:?}", output.stdout);
    Ok(())
}

/// Checks that the controller takes nothing but an enrolment from a client without a certificate, and that
/// an enrolment needs a token of the node.
fn check_controller(address: SocketAddr, token: &str) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let pin = token.parse::<JoinToken>().context("the token")?.pin();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(LIMIT);
        let channel = endpoint.connect_with_connector_lazy(Connector::pinned(pin)?);
        let mut client = ControllerClient::new(channel.clone());
        let listed = client.list_volumes(v1::ListVolumesRequest::default());
        let refused = listed.await.err().context("volumes are listed for a stranger")?;
        ensure!(refused.code() == tonic::Code::Unauthenticated, "{refused}");
        let request = EnrollRequest { token: token.to_owned(), node_name: "n0".to_owned(), csr: Vec::new() };
        let enrolled = ControllerTlsClient::new(channel).enroll(request).await;
        ensure!(enrolled.is_err(), "the token of another node is taken");
        Ok(())
    })
}

/// Checks that a replica sends a challenge, and nothing else to those that do not know the volume's secret.
fn check_data(address: SocketAddr, dir: &Path) -> Result<()> {
    let mut challenges = Vec::new();
    for probe in probes() {
        let told = answer(address, &probe)?;
        ensure!(told.len() <= CHALLENGE_BYTES_MAX && !tells(&told, dir), "{address} answers {told:?}");
        challenges.push(told);
    }
    challenges.sort();
    let all = challenges.len();
    challenges.dedup();
    ensure!(challenges.len() == all, "{address} sends a challenge twice");
    Ok(())
}

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

/// The strays come from the address of the controller and of the engine, and stay open.
#[test]
fn a_flood_of_strangers_costs_no_member() -> Result<()> {
    let hosts = Hosts::start()?;
    hosts.serve_volume()?;
    let ports: Vec<SocketAddr> = hosts
        .listening(1)?
        .into_iter()
        .map(|socket| socket.address)
        .filter(|address| !address.ip().is_loopback())
        .collect();
    ensure!(ports.len() == 2, "the node API and the replica: {ports:?}");
    let client = NbdClient::connect(&hosts.path("n0/r/engine").join(format!("{VOLUME}.nbd")), VOLUME, LIMIT)?;
    let guest = Guest::new(client, GuestOptions { sectors: 8192, ..GuestOptions::new(fastrand::u64(..)) });
    let ((), guest) = under_load(guest, |load| {
        load.wait_for_answers(100, LIMIT)?;
        let strays = hosts.inside(0, || {
            let all = ports.iter().flat_map(|port| std::iter::repeat_n(*port, STRAYS));
            all.map(|port| Ok(TcpStream::connect_timeout(&port, LIMIT)?)).collect::<Result<Vec<_>>>()
        })?;
        load.wait_for_answers(100, LIMIT)?;
        let status = until_whole(&hosts.engine(), LIMIT)?;
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
