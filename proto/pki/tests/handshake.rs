//! Real handshakes between this crate's servers and clients: each certificate that must not work does not.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use shorthorn_pki::{
    Authority, Bundle, ClientAuth, ClientConnection, ClusterId, Connector, Credentials, Identity,
    LEAF_SECONDS, Limits, Pin, Role, UnixTime, incoming,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::codegen::http::Uri;

const LIMIT: Duration = Duration::from_secs(30);

fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

fn at(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(seconds))
}

fn authority() -> Authority {
    // Older than a certificate, so that an expired one can be made.
    Authority::create(ClusterId::new("c0ffee").unwrap(), at(now_s() - 2 * LEAF_SECONDS)).unwrap()
}

fn node(name: &str) -> Role {
    Role::node(name).unwrap()
}

fn issue(authority: &mut Authority, role: &Role, when: u64) -> Identity {
    authority.issue(role, at(when)).unwrap()
}

fn credentials(authority: &Authority, identity: Option<Identity>) -> Credentials {
    Credentials::new(Bundle { identity, trust: authority.trust().unwrap() }).unwrap()
}

/// Credentials with a new certificate.
fn issued(authority: &mut Authority, role: &Role) -> Credentials {
    let identity = issue(authority, role, now_s());
    credentials(authority, Some(identity))
}

/// Answers each connection with its peer's role, or "stranger", and then echoes.
async fn serve(credentials: &Credentials, auth: ClientAuth, limits: Limits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut connections = incoming(listener, credentials, auth, limits).unwrap();
    tokio::spawn(async move {
        while let Some(Ok(mut connection)) = connections.next().await {
            tokio::spawn(async move {
                let role = connection.peer().role().map_or_else(|| "stranger".to_owned(), Role::to_string);
                connection.write_all(format!("{role}\n").as_bytes()).await?;
                let mut byte = [0];
                while connection.read_exact(&mut byte).await.is_ok() {
                    connection.write_all(&byte).await?;
                }
                std::io::Result::Ok(())
            });
        }
    });
    address
}

async fn line(connection: &mut ClientConnection) -> Result<String, String> {
    let mut text = String::new();
    loop {
        let byte = timeout(LIMIT, connection.read_u8()).await.unwrap().map_err(|error| error.to_string())?;
        if byte == b'\n' {
            return Ok(text);
        }
        text.push(char::from(byte));
    }
}

/// The first line of the server, or the error of either side.
async fn connect(address: SocketAddr, connector: &Connector) -> Result<(ClientConnection, String), String> {
    let uri: Uri = format!("http://{address}").parse().unwrap();
    let mut connection = connector.connect(&uri).await.map_err(|error| error.to_string())?;
    let text = line(&mut connection).await?;
    Ok((connection, text))
}

fn connector(credentials: &Credentials, expected: &Role) -> Connector {
    Connector::new(credentials, expected.clone()).unwrap().always_tls()
}

#[tokio::test]
async fn clients_without_a_good_certificate_are_refused() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &node("a"), now_s())));
    let controller = issue(&mut ca, &Role::Controller, now_s());
    let good = credentials(&ca, Some(controller));
    let address = serve(&server, ClientAuth::Required, Limits::default()).await;
    let (_, role) = connect(address, &connector(&good, &node("a"))).await.unwrap();
    assert_eq!(role, "controller");

    let mut foreign = authority();
    let foreign = issue(&mut foreign, &Role::Controller, now_s());
    let expired = issue(&mut ca, &Role::Controller, now_s() - LEAF_SECONDS - 1);
    let early = issue(&mut ca, &Role::Controller, now_s() + 3600);
    let for_servers = issue(&mut ca, &node("a"), now_s());
    for (identity, expected) in [
        (Some(foreign), "UnknownCA"),
        (Some(expired), "CertificateExpired"),
        (Some(early), "CertificateExpired"),
        (Some(for_servers), "alert"),
    ] {
        let client = credentials(&ca, identity);
        let error = connect(address, &connector(&client, &node("a"))).await.unwrap_err();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
    // Without a certificate the client does not even try; one that does is refused by the server.
    let nothing = connect(address, &connector(&credentials(&ca, None), &node("a"))).await.unwrap_err();
    assert!(nothing.contains("no certificate"), "{nothing}");
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(LIMIT, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.windows(10).any(|part| part == b"controller"));
}

#[tokio::test]
async fn servers_of_another_name_ca_or_time_are_refused() {
    let mut ca = authority();
    let client = credentials(&ca, Some(issue(&mut ca.clone(), &Role::Controller, now_s())));
    let mut foreign = authority();
    let expired = issue(&mut ca, &node("a"), now_s() - LEAF_SECONDS - 1);
    let cases = [
        (issue(&mut ca, &node("b"), now_s()), "expected node/a"),
        (issue(&mut ca, &Role::Controller, now_s()), "expected node/a"),
        (issue(&mut ca, &Role::admin("ann").unwrap(), now_s()), "certificate"),
        (issue(&mut foreign, &node("a"), now_s()), "UnknownIssuer"),
        (expired, "xpired"),
    ];
    for (identity, expected) in cases {
        let server = credentials(&ca, Some(identity));
        let address = serve(&server, ClientAuth::Optional, Limits::default()).await;
        let error = connect(address, &connector(&client, &node("a"))).await.unwrap_err();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
}

#[tokio::test]
async fn a_revocation_ends_open_connections_and_a_renewal_does_not() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &node("a"), now_s())));
    let ann = issue(&mut ca, &Role::admin("ann").unwrap(), now_s());
    let client = credentials(&ca, Some(ann));
    let address = serve(&server, ClientAuth::Required, Limits::default()).await;
    let (mut open, role) = connect(address, &connector(&client, &node("a"))).await.unwrap();
    assert_eq!(role, "admin/ann");
    let renewed = issue(&mut ca, &node("a"), now_s());
    server.replace(Bundle { identity: Some(renewed), trust: ca.trust().unwrap() }).unwrap();
    open.write_all(b"x\n").await.unwrap();
    assert_eq!(line(&mut open).await.unwrap(), "x");
    ca.revoke(|issued| issued.role == Role::admin("ann").unwrap(), at(now_s())).unwrap();
    let identity = server.current().identity.clone();
    server.replace(Bundle { identity, trust: ca.trust().unwrap() }).unwrap();
    open.write_all(b"x\n").await.unwrap();
    line(&mut open).await.unwrap_err();
    let error = connect(address, &connector(&client, &node("a"))).await.unwrap_err();
    assert!(error.contains("CertificateRevoked"), "{error}");
}

#[tokio::test]
async fn a_pin_names_the_controller_of_the_first_contact() {
    let mut ca = authority();
    let controller = credentials(&ca, Some(issue(&mut ca.clone(), &Role::Controller, now_s())));
    let address = serve(&controller, ClientAuth::Optional, Limits::default()).await;
    let pin = ca.pin().unwrap();
    let (_, role) = connect(address, &Connector::pinned(pin).unwrap()).await.unwrap();
    assert_eq!(role, "stranger");
    let other = connect(address, &Connector::pinned(Pin::of(b"other")).unwrap()).await.unwrap_err();
    assert!(other.contains("pin"), "{other}");
    // A node of the cluster must not play the controller.
    let node = issued(&mut ca, &node("a"));
    let address = serve(&node, ClientAuth::Optional, Limits::default()).await;
    let played = connect(address, &Connector::pinned(pin).unwrap()).await.unwrap_err();
    assert!(played.contains("expected controller"), "{played}");
}

#[tokio::test]
async fn connections_that_do_not_shake_hands_do_not_hold_up_others() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &node("a"), now_s())));
    let client = issued(&mut ca, &Role::Controller);
    let limits = Limits {
        handshakes_per_source_max: 3,
        handshake_timeout: Duration::from_millis(500),
        ..Limits::default()
    };
    let address = serve(&server, ClientAuth::Required, limits).await;
    let mut silent = Vec::new();
    for _ in 0..6 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // Three are closed at once, because newer ones take their places, and three for their time.
    for mut silent in silent {
        let mut byte = [0];
        let ended = timeout(LIMIT, silent.read(&mut byte)).await.unwrap();
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }
    connect(address, &connector(&client, &node("a"))).await.unwrap();
}

/// Opens connections that send `bytes` each, and nothing else.
async fn flood(address: SocketAddr, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let mut held = Vec::new();
    for _ in 0..count {
        let mut stray = TcpStream::connect(address).await.unwrap();
        // One whose place was taken at once is closed already.
        let _ = stray.write_all(bytes).await;
        held.push(stray);
    }
    held
}

#[tokio::test]
async fn a_pod_behind_the_address_of_the_controller_cannot_hold_its_handshakes() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &node("a"), now_s())));
    let client = issued(&mut ca, &Role::Controller);
    // No stray ends by itself in this test.
    let limits = Limits { handshake_timeout: 10 * LIMIT, ..Limits::default() };
    let address = serve(&server, ClientAuth::Required, limits).await;
    let silent = flood(address, 400, b"").await;
    timeout(LIMIT, connect(address, &connector(&client, &node("a")))).await.unwrap().unwrap();
    drop(silent);

    // The same for strays that have begun a handshake, on a server that has not met the controller yet.
    let address = serve(&server, ClientAuth::Required, limits).await;
    let talking = flood(address, 400, &[22, 3, 1]).await;
    let connected = async {
        let connector = connector(&client, &node("a"));
        while connect(address, &connector).await.is_err() {}
    };
    timeout(LIMIT, connected).await.unwrap();
    drop(talking);
}

#[tokio::test]
async fn connections_without_a_certificate_are_few() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &Role::Controller, now_s())));
    let admin = issued(&mut ca, &Role::admin("ann").unwrap());
    let limits = Limits { strangers_max: 1, ..Limits::default() };
    let address = serve(&server, ClientAuth::Optional, limits).await;
    let stranger = Connector::pinned(ca.pin().unwrap()).unwrap();
    let (_first, _) = connect(address, &stranger).await.unwrap();
    connect(address, &stranger).await.unwrap_err();
    connect(address, &connector(&admin, &Role::Controller)).await.unwrap();
}

#[tokio::test]
async fn only_addresses_of_this_host_are_plain() {
    let mut ca = authority();
    let server = credentials(&ca, Some(issue(&mut ca.clone(), &node("a"), now_s())));
    let client = issued(&mut ca, &Role::Controller);
    let address = serve(&server, ClientAuth::Required, Limits::default()).await;
    let uri: Uri = format!("http://localhost:{}", address.port()).parse().unwrap();
    let by_default = Connector::new(&client, node("a")).unwrap();
    assert!(matches!(by_default.connect(&uri).await.unwrap(), ClientConnection::Plain(_)));
    assert!(matches!(by_default.always_tls().connect(&uri).await.unwrap(), ClientConnection::Tls(_)));
    // TEST-NET-1 is refused before a connection is tried.
    let other: Uri = "http://192.0.2.1:9501".parse().unwrap();
    let refused = Connector::loopback_only("use --tls-identity").connect(&other).await.unwrap_err();
    assert!(refused.to_string().contains("use --tls-identity"), "{refused}");
    let refused = connector(&credentials(&ca, None), &node("a")).connect(&other).await.unwrap_err();
    assert!(refused.to_string().contains("no certificate"), "{refused}");
}
