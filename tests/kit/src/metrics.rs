//! A client of `/metrics`, `/healthz` and `/readyz`, as plain as curl.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Far more than an answer takes.
const LIMIT: Duration = Duration::from_secs(60);
/// All addresses of 127.0.0.0/8 are this host's.
const PORT: u16 = 9510;

/// Returns an address of the loopback device that no other test has.
#[must_use]
pub fn own_address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let turn = 64 + NEXT.fetch_add(1, Ordering::Relaxed) % 128;
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, turn, high, low.max(1))), PORT)
}

/// Returns the status and the body of the answer.
///
/// # Errors
/// No server listens there, or it sends no answer.
pub fn get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, answer.clone());
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(wrong)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
    Ok((status, body.to_owned()))
}

/// Returns the series of an OpenMetrics text, each with its labels as they are written, and their values.
///
/// # Panics
/// The text is invalid, or a name is not valid for Prometheus.
#[must_use]
pub fn samples(text: &str) -> Vec<(String, f64)> {
    let Some(body) = text.strip_suffix("# EOF\n") else { panic!("the end is not marked: {text}") };
    let (mut family, mut kind) = ("", "");
    let mut samples = Vec::new();
    for line in body.lines() {
        match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
            ["#", "HELP", name, help] => assert!(!name.is_empty() && help.ends_with('.'), "{line}"),
            ["#", "TYPE", name, of] => {
                let prefix = name.starts_with("shorthorn_") || name.starts_with("process_");
                assert!(prefix && !name.ends_with("_total"), "{line}");
                (family, kind) = (name, of);
            }
            _ => {
                let Some((series, value)) = line.rsplit_once(' ') else { panic!("{line}") };
                let name = series.split('{').next().unwrap_or_default();
                let suffixes: &[&str] = match kind {
                    "gauge" => &[""],
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    other => panic!("{other}: {line}"),
                };
                assert!(
                    suffixes.iter().any(|suffix| name == format!("{family}{suffix}")),
                    "{line} in {family}"
                );
                let Ok(value) = value.parse() else { panic!("{line}") };
                // No labels may be written as none between braces.
                samples.push((series.trim_end_matches("{}").to_owned(), value));
            }
        }
    }
    samples
}

/// Returns the value of a series, written with its labels.
#[must_use]
pub fn value(samples: &[(String, f64)], series: &str) -> Option<f64> {
    samples.iter().find(|(name, _)| name == series).map(|(_, value)| *value)
}
