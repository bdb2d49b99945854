//! Views and progress as the messages of node.proto.

use shorthorn_api::v1;
use shorthorn_control::{CopyStatus, ExpansionStatus, GrantWanted, ScrubStatus};
use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};

use crate::serve::error::NodeError;

/// Converts a view from outside.
///
/// # Errors
/// [`NodeError::Invalid`].
pub fn view(view: v1::View) -> Result<View, NodeError> {
    let members: Vec<ReplicaId> = view.members.iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
    let generation = Generation::new(view.attach, view.restart).of_nonce(view.nonce);
    let id = ViewId { generation, number: view.number };
    Ok(View { id, members: Members::new(members)? })
}

/// Converts a view to its message.
pub fn of_view(view: &View) -> v1::View {
    v1::View {
        attach: view.id.generation.attach,
        restart: view.id.generation.restart,
        nonce: view.id.generation.nonce,
        number: view.id.number,
        members: view.members.iter().map(|id| id.to_string()).collect(),
    }
}

/// Converts a view that waits for the arbiter.
pub fn of_grant_wanted(wanted: &GrantWanted) -> v1::GrantWanted {
    v1::GrantWanted {
        view: Some(of_view(&wanted.view)),
        committed: Some(of_view(&wanted.honoured.committed)),
        proposed: wanted.honoured.proposed.iter().map(of_view).collect(),
        stored: wanted.stored.iter().map(|id| id.to_string()).collect(),
    }
}

/// Converts the progress of a copy.
pub fn of_copy(copy: &CopyStatus) -> v1::CopyStatus {
    v1::CopyStatus {
        total_bytes: copy.total_bytes,
        left_bytes: copy.left_bytes,
        bytes_per_s: copy.bytes_per_s,
    }
}

/// Converts the pending part of an expansion.
pub fn of_expansion(expansion: &ExpansionStatus) -> v1::Expansion {
    v1::Expansion {
        size_bytes: expansion.size_bytes,
        message: expansion.message.clone(),
        next_attach: expansion.next_attach,
    }
}

/// Converts the findings of a scrub.
pub fn of_scrub(scrub: &ScrubStatus) -> v1::ScrubStatus {
    v1::ScrubStatus {
        running: scrub.running,
        at_bytes: scrub.at_bytes,
        found: scrub.found,
        repaired: scrub.repaired,
        last: scrub.last.clone(),
        snapshot: scrub.snapshot.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_and_back() {
        let members = Members::new([1, 2].map(ReplicaId::from_random)).unwrap();
        let id = ViewId { generation: Generation::new(3, 4).of_nonce(6), number: 5 };
        let there = View { id, members };
        assert_eq!(view(of_view(&there)).unwrap(), there);
        let bad = v1::View { members: vec!["x".into()], ..v1::View::default() };
        assert!(matches!(view(bad), Err(NodeError::Invalid(_))));
    }
}
