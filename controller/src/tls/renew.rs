//! Keeps the certificates and trust lists of agents current, over the controller's own connections to them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::node_tls_client::NodeTlsClient;
use shorthorn_controller_core::NodeName;
use shorthorn_pki::{Authority, CertificateRequest, Issued, LEAF_SECONDS, Role, Trust};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use super::{NodeSeen, Tls, now, pin_texts, trust_message};
use crate::agents::{AgentChannel, CALL_LIMIT, Fleet, limited};

/// The interval of checking all agents.
const EVERY: Duration = Duration::from_secs(60);
/// Agents that failed are asked again after twice this, then after twice as long each time.
const SOON: Duration = Duration::from_secs(1);
/// Certificates that are signed for one node within a day. A node that cannot store them tries for seven
/// days, half of the life of its own. The CA keeps a record of 256 per node.
const SIGNED_PER_DAY_MAX: usize = 8;
const DAY_S: u64 = 24 * 3600;
/// The time before the end of the CA from which the controller warns, as the alert of the chart does.
const END_WARNING_S: u64 = 180 * DAY_S;
/// Agents that are asked at a time.
const AT_ONCE_MAX: usize = 16;

impl Tls {
    /// Renews certificates that are due, until it is dropped.
    pub async fn run(self: Arc<Tls>, fleet: Arc<Fleet>) {
        let (mut failures, mut warned_s) = (0_u32, None);
        loop {
            self.warn_of_end(&mut warned_s);
            if let Err(error) = self.renew_own().await {
                tracing::error!(%error, "the certificate of this controller cannot be renewed");
            }
            let known: BTreeSet<NodeName> = fleet.connected().into_iter().collect();
            failures = if self.renew_nodes(&fleet).await { failures.saturating_add(1) } else { 0 };
            let pause = if failures == 0 { EVERY } else { EVERY.min(SOON * (1 << failures.min(8))) };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = another_connects(&fleet, &known) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// Logs once a day that the CA expires soon.
    fn warn_of_end(&self, warned_s: &mut Option<u64>) {
        let (end_s, now_s) = (self.expiry_s().0, now().as_secs());
        let is_new = warned_s.is_none_or(|warned| warned.abs_diff(now_s) >= DAY_S);
        if expires_soon(end_s, now_s) && is_new {
            *warned_s = Some(now_s);
            let days = end_s.saturating_sub(now_s) / DAY_S;
            tracing::warn!(
                days,
                "the CA expires: run shorthornctl tls roll-over three times (docs/security.md)"
            );
        }
    }

    /// Renews the certificates of the agents in reach that are due. Returns true if one of them failed.
    async fn renew_nodes(self: &Arc<Tls>, fleet: &Fleet) -> bool {
        let mut waiting = fleet.connected().into_iter();
        let (mut asking, mut is_behind) = (JoinSet::new(), false);
        loop {
            while asking.len() < AT_ONCE_MAX {
                let Some(node) = waiting.next() else { break };
                let Some(channel) = fleet.channel(&node) else { continue };
                let tls = Arc::clone(self);
                asking.spawn(async move {
                    let kept = tls.keep(&node, channel).await;
                    kept.inspect_err(|error| {
                        let reason = error.message();
                        tracing::warn!(%node, reason, "the certificate of the node is not renewed");
                    })
                    .is_err()
                });
            }
            match asking.join_next().await {
                Some(failed) => is_behind |= failed.unwrap_or(true),
                None => return is_behind,
            }
        }
    }

    /// Brings the agent of `node` up to date.
    async fn keep(&self, node: &NodeName, channel: AgentChannel) -> Result<(), Status> {
        let mut client = NodeTlsClient::new(channel);
        let state = match client.get_node_tls(limited(v1::GetNodeTlsRequest {}, CALL_LIMIT)).await {
            Ok(state) => state.into_inner(),
            // An agent of an earlier release, or one behind a socket.
            Err(error) if error.code() == Code::Unimplemented => return Ok(()),
            Err(error) => return Err(error),
        };
        if state.serial.is_empty() {
            return Ok(());
        }
        let trust = self.credentials.current().trust.clone();
        let state = set_trust(&mut client, state, &trust).await?;
        let state = self.set_certificate(node, &mut client, state, &trust).await?;
        // After the restore of an older CA, a node may have another list of the same version. 0 is none.
        let newest = self.credentials.current();
        let has_list = state.trusted_pins == pin_texts(&newest.trust);
        let trust_version = if has_list { state.trust_version } else { 0 };
        let known = state.trust_version;
        self.seen().insert(node.clone(), NodeSeen { trust_version, signer_pin: state.signer_pin });
        let version = newest.trust.version();
        if known > version || (known == version && !has_list) {
            self.outdate(node, known).await?;
        }
        Ok(())
    }

    /// Makes the trust list newer than the one of `node`: it has one of a CA before a restore, and keeps it.
    async fn outdate(&self, node: &NodeName, known: u64) -> Result<(), Status> {
        if self.newer().contains(node) {
            return Ok(());
        }
        tracing::warn!(
            %node,
            known,
            "the trust list of the node is newer than that of the CA, whose version is raised now"
        );
        let changed = self.change(|authority| {
            authority.outdate(known);
            Ok(())
        });
        changed.await.map_err(|error| Status::failed_precondition(error.to_string()))?;
        self.newer().insert(node.clone());
        Ok(())
    }

    async fn set_certificate(
        &self,
        node: &NodeName,
        client: &mut NodeTlsClient<AgentChannel>,
        state: v1::NodeTlsState,
        trust: &Trust,
    ) -> Result<v1::NodeTlsState, Status> {
        // The first CA of a trust list signs.
        let signer = pin_texts(trust).into_iter().next().unwrap_or_default();
        if !is_due(&state, now().as_secs()) && state.signer_pin == signer {
            return Ok(state);
        }
        let lately =
            self.read_authority(|authority| signed_lately(authority, node.as_str(), now().as_secs())).await;
        if lately >= SIGNED_PER_DAY_MAX {
            return Err(Status::resource_exhausted(format!(
                "{lately} certificates were signed for it within a day, and it does not use them: look at \
                 the log of its agent"
            )));
        }
        let request = v1::CreateCertificateRequestRequest {};
        let request = client.create_certificate_request(limited(request, CALL_LIMIT)).await?.into_inner();
        let refused = |error: &dyn std::fmt::Display| Status::failed_precondition(error.to_string());
        let request = CertificateRequest::from_der(&request.csr).map_err(|error| refused(&error))?;
        request.check_names(node.as_str()).map_err(|error| refused(&error))?;
        let role = Role::Node(node.clone());
        let signed = self.change(|authority| authority.sign(&request, &role, now())).await;
        let chain = signed.map_err(|error| refused(&error))?;
        let chain = chain.iter().map(|der| der.to_vec()).collect();
        let request = v1::SetCertificateRequest { chain };
        let state = client.set_certificate(limited(request, CALL_LIMIT)).await?.into_inner();
        tracing::info!(%node, serial = state.serial, "the certificate of its agent is renewed");
        Ok(state)
    }
}

async fn set_trust(
    client: &mut NodeTlsClient<AgentChannel>,
    state: v1::NodeTlsState,
    trust: &Trust,
) -> Result<v1::NodeTlsState, Status> {
    if state.trust_version == trust.version() && state.trusted_pins == pin_texts(trust) {
        return Ok(state);
    }
    let list = trust_message(trust);
    Ok(client.set_trust(limited(list, CALL_LIMIT)).await?.into_inner())
}

/// The certificates of the node that were signed within the last day and are not revoked.
fn signed_lately(authority: &Authority, node: &str, now_s: u64) -> usize {
    let is_late = |issued: &&Issued| {
        let is_of_node = matches!(&issued.role, Role::Node(name) if name.as_str() == node);
        // One of a longer life, or of a clock that was ahead, seems to be signed later than now.
        let signed_s = issued.not_after.saturating_sub(LEAF_SECONDS);
        is_of_node && signed_s <= now_s && signed_s.saturating_add(DAY_S) > now_s
    };
    let lately = authority.issued().iter().filter(is_late);
    lately.filter(|issued| !authority.is_revoked(&issued.serial)).count()
}

/// Waits until the agent of a node other than these is connected: a node that was away may lack a trust list.
async fn another_connects(fleet: &Fleet, known: &BTreeSet<NodeName>) {
    loop {
        tokio::time::sleep(SOON).await;
        if fleet.connected().iter().any(|node| !known.contains(node)) {
            return;
        }
    }
}

/// Returns true if the CA has less than [`END_WARNING_S`] left.
const fn expires_soon(end_s: u64, now_s: u64) -> bool {
    end_s.saturating_sub(now_s) < END_WARNING_S
}

/// Returns true if half of the certificate's life is over.
fn is_due(state: &v1::NodeTlsState, now_s: u64) -> bool {
    let life = state.not_after_s.saturating_sub(state.not_before_s);
    now_s >= state.not_before_s.saturating_add(life / 2)
}

#[cfg(test)]
mod tests {
    use shorthorn_pki::{ClusterId, UnixTime};

    use super::*;

    #[test]
    fn certificates_of_a_node_within_a_day_are_counted() {
        let at = |seconds: u64| UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000 + seconds));
        let mut authority = Authority::create(ClusterId::new("c").unwrap(), at(0)).unwrap();
        for (node, seconds) in [("a", 0), ("a", DAY_S), ("b", DAY_S)] {
            authority.issue(&Role::node(node).unwrap(), at(seconds)).unwrap();
        }
        let count =
            |authority: &Authority, seconds: u64| signed_lately(authority, "a", at(seconds).as_secs());
        // The second one seems to be signed later than now.
        assert_eq!(count(&authority, DAY_S - 1), 1);
        assert_eq!([DAY_S, 2 * DAY_S].map(|seconds| count(&authority, seconds)), [1, 0]);
        authority.revoke(|issued| issued.role == Role::node("a").unwrap(), at(DAY_S)).unwrap();
        assert_eq!(count(&authority, DAY_S), 0);
    }

    #[test]
    fn the_end_of_the_ca_is_near_half_a_year_before() {
        assert!(!expires_soon(181 * DAY_S, 0) && expires_soon(179 * DAY_S, 0));
        assert!(expires_soon(5, 7), "it has expired");
    }

    #[test]
    fn a_certificate_is_due_after_half_of_its_life() {
        let state = v1::NodeTlsState { not_before_s: 100, not_after_s: 300, ..v1::NodeTlsState::default() };
        assert!(!is_due(&state, 199));
        assert!(is_due(&state, 200));
        assert!(is_due(&v1::NodeTlsState::default(), 0), "no dates");
    }
}
