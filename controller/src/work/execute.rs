use shorthorn_controller_core::objects::Key;
use shorthorn_controller_core::{Action, AgentCall, Decision, Event};

use super::{Outcome, Worker};
use crate::store::StoreError;

impl Worker {
    /// Carries the actions out in order, up to the first that fails. `version`: that of the object when it
    /// was decided.
    pub(super) async fn carry_out(&self, key: &Key, version: u64, decision: Decision) -> Outcome {
        for action in decision.actions {
            // Calls before it may have taken long: an undeletion may want the data again.
            let deletes = matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
            if deletes && self.store.state().version(key) != version {
                tracing::info!(object = %key, "changed since its deletion was decided: looking again");
                return Outcome::Failed;
            }
            if !self.act(key, action).await {
                return Outcome::Failed;
            }
        }
        Outcome::Done(decision.look_again)
    }

    async fn act(&self, key: &Key, action: Action) -> bool {
        match action {
            Action::Write(object) => {
                tracing::debug!(object = %object.key(), "write");
                let result = self.store.put(*object).await.map(drop);
                self.stored(result)
            }
            Action::Remove(object, version) => {
                tracing::info!(%object, "remove");
                let result = self.store.remove(&object, version).await;
                self.stored(result)
            }
            Action::Call(node, call) => {
                tracing::info!(%node, instance = %call.instance(), "{}", call.verb());
                match self.fleet.call(&node, &call).await {
                    Ok(()) => true,
                    Err(error) => {
                        tracing::warn!(for_object = %key, %node, %error, "{} failed", call.verb());
                        false
                    }
                }
            }
            Action::Emit(event) => {
                self.record(&event);
                true
            }
        }
    }

    fn record(&self, event: &Event) {
        let Event { about, warning, reason, message } = event;
        if *warning {
            tracing::warn!(%about, reason, "{message}");
        } else {
            tracing::info!(%about, reason, "{message}");
        }
        if let Some(events) = &self.events {
            events.record(event, &self.store.state().uid(about));
        }
    }

    fn stored(&self, result: Result<(), StoreError>) -> bool {
        match result {
            Ok(()) => true,
            Err(error @ StoreError::Conflict { .. }) => {
                tracing::debug!(%error, "looking again");
                false
            }
            Err(error @ StoreError::Unavailable { .. }) => {
                tracing::warn!(%error, "trying again");
                false
            }
            Err(error @ StoreError::Refused { .. }) => {
                tracing::error!(%error, "trying again later");
                false
            }
            Err(error) => {
                tracing::error!(%error, "the store fails");
                // The channel is full: the error was sent already.
                let _ = self.broken.try_send(error);
                false
            }
        }
    }
}
