//! Asks agents for the block devices of their nodes.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_controller_core::NodeName;
use tokio::task::JoinSet;

use super::{AgentCallError, Fleet, limited};

/// An agent gives up after half of that: a device that hangs must not hold up the others.
const DISCOVER_LIMIT: Duration = Duration::from_secs(60);
/// The agents that are asked at the same time for something that takes long.
pub(crate) const ASKED_MAX: usize = 32;

impl Fleet {
    /// Returns the block devices of each of these nodes, or the reason why they are not known.
    pub async fn discover_devices(
        &self,
        nodes: Vec<NodeName>,
    ) -> Vec<(NodeName, Result<Vec<v1::DiscoveredDevice>, AgentCallError>)> {
        let ask = |node: NodeName| {
            let client = self.client(&node);
            async move {
                let found = match client {
                    Ok(mut client) => {
                        let request = limited(v1::DiscoverDevicesRequest {}, DISCOVER_LIMIT);
                        client.discover_devices(request).await.map_err(AgentCallError::from)
                    }
                    Err(error) => Err(error),
                };
                (node, found.map(|answer| answer.into_inner().devices))
            }
        };
        let mut found = at_most(ASKED_MAX, nodes.into_iter().map(ask)).await;
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        let blamed = |(node, found): (NodeName, Result<_, AgentCallError>)| {
            let found = found.map_err(|error| self.blamed(&node, "examine its devices", error));
            (node, found)
        };
        found.into_iter().map(blamed).collect()
    }
}

/// Returns the answers to all questions, of which at most `max` are under way at the same time.
pub(super) async fn at_most<T: Send + 'static>(
    max: usize,
    questions: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let (mut asking, mut answers) = (JoinSet::new(), Vec::new());
    for question in questions {
        if asking.len() >= max {
            match asking.join_next().await {
                Some(Ok(answer)) => answers.push(answer),
                // As join_all does: no answer may be missing in silence.
                Some(Err(lost)) => std::panic::resume_unwind(lost.into_panic()),
                None => {}
            }
        }
        asking.spawn(question);
    }
    answers.extend(asking.join_all().await);
    answers
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn few_agents_are_asked_at_the_same_time() {
        let (under_way, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let question = |number: u32| {
            let (under_way, most) = (Arc::clone(&under_way), Arc::clone(&most));
            async move {
                most.fetch_max(under_way.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                under_way.fetch_sub(1, Ordering::SeqCst);
                number
            }
        };
        let mut answers = at_most(3, (0..20).map(question)).await;
        answers.sort_unstable();
        assert_eq!(answers, (0..20).collect::<Vec<u32>>());
        assert_eq!(most.load(Ordering::SeqCst), 3);
    }
}
