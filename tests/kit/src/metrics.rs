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

/// Returns the families of an OpenMetrics text as a table for the documentation. The help of a family is its
/// meaning; its samples have the labels.
///
/// # Panics
/// A family has no sample, so that its labels are unknown.
#[must_use]
pub fn documented(text: &str) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut family = String::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            name.clone_into(&mut family);
            rows.push(vec![
                String::new(),
                String::new(),
                "?".to_owned(),
                help.trim_end_matches('.').to_owned(),
            ]);
        }
        let Some(row) = rows.last_mut() else { continue };
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            row[0] = format!("`{name}{suffix}`");
            kind.clone_into(&mut row[1]);
        } else if !line.starts_with('#') && row[2] == "?" {
            row[2] = labels(line);
        }
    }
    let bare: Vec<&str> = rows.iter().filter(|row| row[2] == "?").map(|row| row[0].as_str()).collect();
    assert!(bare.is_empty(), "the test gives no sample of {bare:?}");
    super::docs::table(&["Metric", "Type", "Labels", "Meaning"], &rows)
}

/// Returns the names of the labels of a sample. `le` belongs to every histogram.
fn labels(sample: &str) -> String {
    let inner =
        sample.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(inner, _)| inner);
    let names =
        inner.split(',').filter_map(|pair| Some(pair.split_once('=')?.0)).filter(|name| *name != "le");
    names.collect::<Vec<_>>().join(", ")
}
