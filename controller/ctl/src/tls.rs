//! Certificates: `tls` and `node token`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_tls_client::ControllerTlsClient;
use shorthorn_api::v1::revoke_certificate_request::Which;
use shorthorn_pki::{Bundle, CertificateDer, ClusterId, Identity, PrivateKey, Role, Serial, Trust};
use shorthorn_types::status::RollOverPhase;
use tonic::transport::Channel;

use super::calls::limited;
use super::error::CtlError;
use super::format::{Format, seconds};
use super::output::{facts, for_programs};

/// Digits of a pin in a table; enough to tell two CAs apart.
const PIN_DIGITS: usize = 16;
/// Digits of a serial number that this CA draws.
const SERIAL_DIGITS: usize = 32;

/// Commands for certificates.
#[derive(Debug, Subcommand)]
pub enum TlsCommand {
    /// Creates a key and a certificate for an administrator, and writes both to a file for --tls-identity
    Issue {
        /// Name of the administrator: letters, digits, '-', '.', '_' and '@'
        name: String,
        /// The file to write, which only its owner can read; the default is NAME.pem in this directory
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Shows the CAs, the valid certificates, and nodes that do not have the newest trust list
    Show,
    /// Revokes a certificate, or all of a node or an administrator. Nodes and the controller refuse them from
    /// then on
    Revoke {
        /// Serial number from tls show, name of a node, or admin/NAME
        #[arg(value_name = "SERIAL|NODE|admin/NAME")]
        which: String,
    },
    /// Performs the next step of replacing the CA. Run the command three times: add the new CA to all trust
    /// lists, sign with it, and drop the old one. Reports the nodes and administrators that a step waits for
    RollOver {
        /// Performs the step even if some nodes or administrators are not ready; they have to enrol again
        #[arg(long)]
        force: bool,
    },
}

/// Arguments of node token.
#[derive(Debug, Args)]
pub struct TokenArgs {
    /// Name of the only node that can use the token; any node if it is left out
    pub name: Option<String>,
    /// Seconds until the token expires
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
    pub ttl: Duration,
}

/// A connection for these commands.
pub(super) struct Certificates {
    client: ControllerTlsClient<Channel>,
    server: String,
    format: Format,
}

#[derive(Serialize)]
struct StateOutput {
    cluster: String,
    phase: String,
    trust_version: u64,
    trusted_pins: Vec<String>,
    certificates: Vec<CertificateOutput>,
    nodes_behind: Vec<String>,
}

#[derive(Serialize)]
struct CertificateOutput {
    serial: String,
    role: String,
    not_after: String,
    revoked: bool,
    signer_pin: String,
}

impl Certificates {
    pub(super) fn new(channel: Channel, server: String, format: Format) -> Certificates {
        Certificates { client: ControllerTlsClient::new(channel), server, format }
    }

    fn error(&self) -> impl Fn(tonic::Status) -> CtlError + use<> {
        let server = self.server.clone();
        move |status| match status.code() {
            tonic::Code::Unimplemented => {
                CtlError::Refused("the controller is too old for certificates: upgrade it".to_owned())
            }
            _ => CtlError::of(&status, &server),
        }
    }

    pub(super) async fn run(&mut self, command: TlsCommand) -> Result<String, CtlError> {
        match command {
            TlsCommand::Issue { name, file } => self.issue(name, file).await,
            TlsCommand::Show => {
                let state = self.client.get_tls(limited(v1::GetTlsRequest {})).await.map_err(self.error())?;
                show(self.format, state.into_inner())
            }
            TlsCommand::Revoke { which } => self.revoke(&which).await,
            TlsCommand::RollOver { force } => {
                let request = limited(v1::RollOverRequest { force });
                let state = self.client.roll_over(request).await.map_err(self.error())?.into_inner();
                if !self.format.is_for_people() {
                    return show(self.format, state);
                }
                Ok(next_step(&state))
            }
        }
    }

    async fn issue(&mut self, name: String, file: Option<PathBuf>) -> Result<String, CtlError> {
        let refused = |error: &dyn std::fmt::Display| CtlError::Refused(error.to_string());
        Role::admin(&name).map_err(|error| refused(&error))?;
        let path = file.unwrap_or_else(|| PathBuf::from(format!("{name}.pem")));
        if path.exists() {
            return Err(CtlError::Refused(format!("{} exists: choose another --file", path.display())));
        }
        // The key never leaves this process but for the file.
        let key = PrivateKey::generate().map_err(|error| refused(&error))?;
        let csr = key.request(&name).map_err(|error| refused(&error))?;
        let request = limited(v1::IssueAdminCertificateRequest { name, csr });
        let issued = self.client.issue_admin_certificate(request).await.map_err(self.error())?;
        let bundle = bundle(&key, issued.into_inner()).map_err(CtlError::Refused)?;
        store(&path, &bundle)
    }

    async fn revoke(&mut self, which: &str) -> Result<String, CtlError> {
        let which = meant(which).map_err(CtlError::Refused)?;
        let request = limited(v1::RevokeCertificateRequest { which: Some(which) });
        let revoked = self.client.revoke_certificate(request).await.map_err(self.error())?.into_inner();
        let behind = match revoked.nodes_behind.as_slice() {
            [] => String::new(),
            nodes => format!("; these nodes do not know it yet: {}", nodes.join(", ")),
        };
        Ok(format!("revoked certificates: {}{behind}\n", revoked.count))
    }

    pub(super) async fn token(&mut self, args: TokenArgs) -> Result<String, CtlError> {
        let request = v1::CreateJoinTokenRequest {
            node_name: args.name.unwrap_or_default(),
            ttl_s: args.ttl.as_secs().max(1),
        };
        let made = self.client.create_join_token(limited(request)).await.map_err(self.error())?;
        Ok(format!("{}\n", made.into_inner().token))
    }
}

fn store(path: &Path, bundle: &Bundle) -> Result<String, CtlError> {
    shorthorn_pki::store(path, bundle).map_err(|error| CtlError::Output(error.to_string()))?;
    let until = bundle.identity.as_ref().map_or(0, |identity| identity.certificate().not_after);
    Ok(format!("{} is valid until {}; keep it secret\n", path.display(), date(until)))
}

fn bundle(key: &PrivateKey, issued: v1::Certificates) -> Result<Bundle, String> {
    let chain = issued.chain.into_iter().map(CertificateDer::from).collect();
    let identity = Identity::new(key, chain).map_err(|error| error.to_string())?;
    let list = issued.trust.unwrap_or_default();
    let cluster = ClusterId::new(&list.cluster).map_err(|error| error.to_string())?;
    let revoked = list.revoked.iter().map(|text| text.parse()).collect::<Result<Vec<Serial>, _>>()?;
    let trust = Trust::new(cluster, list.version, list.authorities, revoked);
    Ok(Bundle { identity: Some(identity), trust: trust.map_err(|error| error.to_string())? })
}

/// The certificates that a text names.
fn meant(text: &str) -> Result<Which, String> {
    let digits = text.replace(':', "");
    if digits.len() == SERIAL_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(Which::Serial(digits.to_ascii_lowercase()));
    }
    let role = if text.contains('/') { text.parse() } else { Role::node(text) };
    role.map(|role| Which::Role(role.to_string())).map_err(|error| error.to_string())
}

fn next_step(state: &v1::TlsState) -> String {
    let pins: Vec<String> = state.trusted_pins.iter().map(|pin| short(pin)).collect();
    let next = match state.known_phase() {
        Some(RollOverPhase::Distributing) => {
            "The new CA is in the trust list. Run this again once tls show has no nodes behind"
        }
        Some(RollOverPhase::Reissuing) => {
            "The new CA signs. Issue administrators new certificates, then run this again to drop the old CA"
        }
        Some(RollOverPhase::Idle) | None => "The old CA is dropped. Back the new one up",
    };
    format!("{next}. Phase: {}. Trusted CAs: {}\n", state.shown_phase(), pins.join(", "))
}

fn short(pin: &str) -> String {
    pin.chars().take(PIN_DIGITS).collect()
}

fn date(seconds: u64) -> String {
    let date = i64::try_from(seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    date.map_or_else(|| "never".to_owned(), |date| date.to_string())
}

fn show(format: Format, state: v1::TlsState) -> Result<String, CtlError> {
    let phase = state.shown_phase().to_owned();
    let certificates = state.issued.into_iter().map(|issued| CertificateOutput {
        serial: issued.serial,
        role: issued.role,
        not_after: date(issued.not_after_s),
        revoked: issued.revoked,
        signer_pin: issued.signer_pin,
    });
    let output = StateOutput {
        cluster: state.cluster,
        phase,
        trust_version: state.trust_version,
        trusted_pins: state.trusted_pins,
        certificates: certificates.collect(),
        nodes_behind: state.nodes_behind,
    };
    if !format.is_for_people() {
        return for_programs(format, &output);
    }
    let behind =
        if output.nodes_behind.is_empty() { "none".to_owned() } else { output.nodes_behind.join(", ") };
    let mut text = facts(&[
        ("Cluster", output.cluster.clone()),
        ("Roll-over", output.phase.clone()),
        ("Trusted CAs", output.trusted_pins.iter().map(|pin| short(pin)).collect::<Vec<_>>().join(", ")),
        ("Trust list", output.trust_version.to_string()),
        ("Nodes behind", behind),
    ]);
    for certificate in &output.certificates {
        let revoked = if certificate.revoked { "  revoked" } else { "" };
        text.push_str(&format!(
            "{}  {}  until {}  CA {}{revoked}\n",
            certificate.serial,
            certificate.role,
            certificate.not_after,
            short(&certificate.signer_pin),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_named_by_serial_node_or_role() {
        let serial = "4f".repeat(16);
        assert_eq!(meant(&serial).unwrap(), Which::Serial(serial.clone()));
        let colons = vec!["4F"; 16].join(":");
        assert_eq!(meant(&colons).unwrap(), Which::Serial(serial));
        assert_eq!(meant("node-a").unwrap(), Which::Role("node/node-a".to_owned()));
        assert_eq!(meant("admin/ann").unwrap(), Which::Role("admin/ann".to_owned()));
        assert_eq!(meant("beef").unwrap(), Which::Role("node/beef".to_owned()), "too short for a serial");
        for bad in ["", "Node", "group/x", "admin/"] {
            assert!(meant(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_state_is_shown_to_people_and_programs() {
        let state = v1::TlsState {
            cluster: "c0ffee".to_owned(),
            trusted_pins: vec!["ab".repeat(32)],
            issued: vec![v1::IssuedCertificate {
                serial: "4f01".to_owned(),
                role: "node/a".to_owned(),
                not_after_s: 1_800_000_000,
                revoked: true,
                signer_pin: "ab".repeat(32),
            }],
            ..v1::TlsState::default()
        }
        .with_phase(RollOverPhase::Idle);
        let text = show(Format::Table, state.clone()).unwrap();
        assert!(
            text.contains("4f01  node/a  until 2027-01-15T08:00:00Z  CA abababababababab  revoked"),
            "{text}"
        );
        let json: serde_json::Value = serde_json::from_str(&show(Format::Json, state).unwrap()).unwrap();
        assert_eq!(json["certificates"][0]["revoked"], true);
        assert_eq!(json["phase"], "idle");
    }

    #[test]
    fn a_roll_over_names_its_next_step() {
        let step = |phase| next_step(&v1::TlsState::default().with_phase(phase));
        let distributing = step(RollOverPhase::Distributing);
        assert!(distributing.contains("tls show has no nodes behind"), "{distributing}");
        assert!(distributing.contains("Phase: distributing."), "{distributing}");
        assert!(step(RollOverPhase::Reissuing).contains("to drop the old CA"));
        assert!(step(RollOverPhase::Idle).contains("The old CA is dropped"));
        let of_word = v1::TlsState { phase_word: "reissuing".to_owned(), ..v1::TlsState::default() };
        assert!(next_step(&of_word).contains("to drop the old CA"), "an earlier controller sends the word");
    }
}
