//! Lists, a page at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use shorthorn_api::v1;
use shorthorn_controller_core::{NodeName, requests};
use tonic::{Response, Status};

use super::server::{Api, RpcResult};
use super::{messages, status};
use crate::agents::ASKED_MAX;
use crate::kubernetes::workloads::Workload;

/// The maximum number of objects in one answer, far below the limit of gRPC.
pub(super) const PAGE_MAX: usize = 1000;
/// The prefix of a token, before the name of the last object of the page before.
const TOKEN: &str = "after:";

/// A page of objects of a kind, in the order of their names.
pub(super) struct ListPage<'a, T> {
    pub objects: Vec<&'a T>,
    pub next_token: String,
}

/// Returns the token of the page after the object of that name.
pub(super) fn token_after(name: &str) -> String {
    format!("{TOKEN}{name}")
}

/// Returns the page of the `wanted` objects after the one that `token` names.
pub(super) fn page<'a, T>(
    all: &'a BTreeMap<String, T>,
    size: u32,
    token: &str,
    wanted: impl Fn(&T) -> bool,
) -> Result<ListPage<'a, T>, Status> {
    let after = token.strip_prefix(TOKEN);
    if after.is_none() && !token.is_empty() {
        return Err(foreign(token));
    }
    let start = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut rest = all.range::<str, _>((start, Bound::Unbounded)).filter(|(_, object)| wanted(object));
    let most = if size == 0 { PAGE_MAX } else { PAGE_MAX.min(size as usize) };
    let found: Vec<_> = rest.by_ref().take(most).collect();
    let is_more = rest.next().is_some();
    if is_more && size == 0 {
        // A caller without a page size gets everything.
        let message = format!(
            "the list has more than {PAGE_MAX} objects: ask with page_size, as a newer shorthornctl does"
        );
        return Err(Status::resource_exhausted(message));
    }
    let last = found.last().filter(|_| is_more).map(|(name, _)| token_after(name));
    let objects = found.into_iter().map(|(_, object)| object).collect();
    Ok(ListPage { objects, next_token: last.unwrap_or_default() })
}

/// The size of an answer of agents, without the bytes of the encoding. gRPC accepts 4 MiB.
pub(super) const ANSWER_MAX_BYTES: usize = 2 << 20;

/// A page of nodes whose agents are asked at the same time.
pub(super) struct NodesPage {
    pub nodes: Vec<NodeName>,
    pub next_token: String,
}

/// Returns the page of these nodes after the one that `token` names. A caller without a page size gets all.
pub(super) fn nodes_page(known: Vec<NodeName>, size: u32, token: &str) -> Result<NodesPage, Status> {
    let after = token.strip_prefix(TOKEN);
    if after.is_none() && !token.is_empty() {
        return Err(foreign(token));
    }
    let mut nodes: Vec<NodeName> =
        known.into_iter().filter(|node| after.is_none_or(|after| node.as_str() > after)).collect();
    nodes.sort_unstable();
    // A page is asked at once: a larger one would take longer.
    let most = if size == 0 { usize::MAX } else { ASKED_MAX.min(size as usize) };
    let is_more = nodes.len() > most;
    nodes.truncate(most);
    let last = nodes.last().filter(|_| is_more).map(|node| token_after(node.as_str()));
    Ok(NodesPage { nodes, next_token: last.unwrap_or_default() })
}

/// Returns the number of the first nodes whose parts of an answer fit. It is at least one, so that the pages
/// come to an end.
pub(super) fn fitting(parts_bytes: impl Iterator<Item = usize>, max_bytes: usize) -> usize {
    let mut bytes = 0;
    let fits = |part_bytes: &usize| {
        bytes += part_bytes;
        bytes <= max_bytes
    };
    parts_bytes.take_while(fits).count().max(1)
}

/// Shortens a page to the nodes whose findings fit into an answer.
///
/// # Errors
/// The caller wants everything, and not everything fits.
pub(super) fn shortened<T>(
    page: NodesPage,
    size: u32,
    found: &mut Vec<T>,
    node_of: impl Fn(&T) -> &str,
    bytes_of: impl Fn(&T) -> usize,
) -> Result<NodesPage, Status> {
    let mut bytes: BTreeMap<&str, usize> = page.nodes.iter().map(|node| (node.as_str(), 0)).collect();
    for part in found.iter() {
        *bytes.entry(node_of(part)).or_default() += bytes_of(part);
    }
    let count = fitting(bytes.into_values(), ANSWER_MAX_BYTES);
    if count >= page.nodes.len() {
        return Ok(page);
    }
    if size == 0 {
        let message = "this is more than one answer holds: ask with page_size, as a newer shorthornctl does";
        return Err(Status::resource_exhausted(message));
    }
    let NodesPage { mut nodes, .. } = page;
    nodes.truncate(count);
    let next_token = nodes.last().map(|node| token_after(node.as_str())).unwrap_or_default();
    found.retain(|part| nodes.iter().any(|node| node.as_str() == node_of(part)));
    Ok(NodesPage { nodes, next_token })
}

fn foreign(token: &str) -> Status {
    let message = format!("page_token {token:?} is not of this controller: begin again without it");
    Status::invalid_argument(message)
}

impl Api {
    pub(super) async fn volumes(
        &self,
        request: v1::ListVolumesRequest,
    ) -> RpcResult<v1::ListVolumesResponse> {
        let mut answer = {
            let cluster = self.store.state();
            let agents = self.fleet.agents();
            let namespace = |claim: &String| claim.split('/').next() == Some(request.namespace.as_str());
            let found = page(&cluster.volumes, request.page_size, &request.page_token, |volume| {
                (request.namespace.is_empty() || volume.status.claim.as_ref().is_some_and(namespace))
                    && (request.name.is_empty() || volume.metadata.name == request.name)
            })?;
            let volumes = found.objects.into_iter().map(|volume| messages::volume(&cluster, &agents, volume));
            let (volumes, next_page_token) = (volumes.collect(), found.next_token);
            v1::ListVolumesResponse { volumes, next_page_token, workloads_problem: String::new() }
        };
        if request.workloads {
            answer.workloads_problem = self.add_workloads(&mut answer.volumes).await;
        }
        Ok(Response::new(answer))
    }

    /// Adds the users of the volumes' claims; returns the reason if they are unknown.
    async fn add_workloads(&self, volumes: &mut [v1::Volume]) -> String {
        let Some(workloads) = &self.workloads else { return String::new() };
        let claims = volumes.iter().map(|volume| volume.claim.clone()).filter(|claim| !claim.is_empty());
        let claims: BTreeSet<String> = claims.collect();
        if claims.is_empty() {
            return String::new();
        }
        match workloads.of(&claims).await {
            Ok(mut found) => {
                for volume in volumes {
                    let used_by = found.remove(&volume.claim).unwrap_or_default();
                    volume.workloads = used_by.into_iter().map(shown).collect();
                }
                String::new()
            }
            Err(problem) => problem,
        }
    }

    pub(super) fn replicas(&self, request: &v1::ListReplicasRequest) -> RpcResult<v1::ListReplicasResponse> {
        let (volume, node) = (&request.volume, &request.node);
        let cluster = self.store.state();
        if !volume.is_empty() {
            requests::find(&cluster, volume).map_err(|error| status::of_request(&error))?;
        }
        if !node.is_empty() {
            requests::find_node(&cluster, node).map_err(|error| status::of_request(&error))?;
        }
        let found = page(&cluster.replicas, request.page_size, &request.page_token, |replica| {
            (volume.is_empty() || replica.spec.volume_name.as_str() == volume)
                && (node.is_empty() || replica.spec.node_id.as_str() == node)
        })?;
        let agents = self.fleet.agents();
        let replicas = found.objects.into_iter().map(|replica| messages::replica(&cluster, &agents, replica));
        let replicas = replicas.collect();
        Ok(Response::new(v1::ListReplicasResponse { replicas, next_page_token: found.next_token }))
    }

    pub(super) fn nodes(&self, request: &v1::ListNodesRequest) -> RpcResult<v1::ListNodesResponse> {
        let cluster = self.store.state();
        let agents = self.fleet.agents();
        let found = page(&cluster.nodes, request.page_size, &request.page_token, |_| true)?;
        let nodes = found.objects.into_iter().map(|node| messages::node(&cluster, &agents, node)).collect();
        Ok(Response::new(v1::ListNodesResponse { nodes, next_page_token: found.next_token }))
    }
}

fn shown(workload: Workload) -> v1::Workload {
    let Workload { kind, name, pod, phase } = workload;
    v1::Workload { kind, name, pod, phase }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_while_objects_come_and_go() {
        let mut all: BTreeMap<String, u32> = (0..7).map(|number| (format!("v{number}"), number)).collect();
        let first = page(&all, 3, "", |_| true).unwrap();
        assert_eq!((first.objects, first.next_token.as_str()), (vec![&0, &1, &2], "after:v2"));
        // The object in the token may be gone by then.
        all.remove("v2");
        let second = page(&all, 3, "after:v2", |_| true).unwrap();
        assert_eq!((second.objects, second.next_token.as_str()), (vec![&3, &4, &5], "after:v5"));
        let last = page(&all, 3, "after:v5", |_| true).unwrap();
        assert_eq!((last.objects, last.next_token.as_str()), (vec![&6], ""));
        let even = page(&all, 2, "", |number| number % 2 == 0).unwrap();
        assert_eq!((even.objects, even.next_token.as_str()), (vec![&0, &4], "after:v4"));
        assert!(page(&all, 3, "v5", |_| true).is_err(), "no token");
    }

    #[test]
    fn an_answer_is_bounded_and_never_shortened_in_silence() {
        let all: BTreeMap<String, usize> =
            (0..=PAGE_MAX).map(|number| (format!("v{number:05}"), number)).collect();
        let refused = page(&all, 0, "", |_| true).map(|page| page.objects.len()).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        let asked = page(&all, u32::MAX, "", |_| true).unwrap();
        assert!(asked.objects.len() == PAGE_MAX && !asked.next_token.is_empty());
        assert_eq!(page(&all, 0, "", |number| *number > 0).unwrap().objects.len(), PAGE_MAX);
    }

    fn nodes(names: &str) -> Vec<NodeName> {
        names.chars().map(|name| NodeName::new(&name.to_string()).unwrap()).collect()
    }

    #[test]
    fn pages_of_nodes_follow_each_other_while_nodes_come_and_go() {
        let first = nodes_page(nodes("dabc"), 2, "").unwrap();
        assert_eq!((first.nodes, first.next_token.as_str()), (nodes("ab"), "after:b"));
        let second = nodes_page(nodes("acd"), 2, "after:b").unwrap();
        assert_eq!((second.nodes, second.next_token.as_str()), (nodes("cd"), ""));
        assert!(nodes_page(nodes("a"), 2, "b").is_err(), "no token");
        let many: Vec<NodeName> =
            (0..100).map(|number| NodeName::new(&format!("n{number:03}")).unwrap()).collect();
        assert_eq!(nodes_page(many.clone(), u32::MAX, "").unwrap().nodes.len(), ASKED_MAX);
        let all = nodes_page(many, 0, "").unwrap();
        assert_eq!((all.nodes.len(), all.next_token.as_str()), (100, ""), "as an older client asks");
    }

    #[test]
    fn findings_that_do_not_fit_are_on_the_next_page() {
        let page = || nodes_page(nodes("abc"), 3, "").unwrap();
        let found = || vec![("a", ANSWER_MAX_BYTES - 1), ("b", 1), ("c", 1), ("a", 0)];
        let shorten = |size, found: &mut Vec<(&'static str, usize)>| {
            shortened(page(), size, found, |(node, _)| node, |(_, bytes)| *bytes)
        };
        let mut parts = found();
        let short = shorten(3, &mut parts).unwrap();
        assert_eq!((short.nodes, short.next_token.as_str()), (nodes("ab"), "after:b"));
        assert_eq!(parts.iter().map(|(node, _)| *node).collect::<Vec<_>>(), ["a", "b", "a"]);
        let refused = shorten(0, &mut found()).map(|page| page.nodes.len()).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "an older client wants everything");
        let mut large = vec![("a", ANSWER_MAX_BYTES + 1), ("b", 1)];
        assert_eq!(shorten(3, &mut large).unwrap().nodes, nodes("a"), "so that the pages come to an end");
    }
}
