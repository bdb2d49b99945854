use shorthorn_types::Members;

/// The share of a view that some replicas are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quorum {
    /// Less than half of its members: never enough.
    Less,
    /// Exactly half: enough with the arbiter's grant.
    Half,
    /// The replicas are more than half: enough.
    More,
}

/// Returns the share of `view` that the replicas in `have` are. Replicas outside the view do not count.
#[must_use]
pub fn quorum(view: &Members, have: &Members) -> Quorum {
    let twice = 2 * view.intersection(have).len();
    if twice > view.len() {
        Quorum::More
    } else if twice == view.len() && twice > 0 {
        Quorum::Half
    } else {
        Quorum::Less
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::ReplicaId;

    use super::*;

    fn members(ids: &[u64]) -> Members {
        Members::new(ids.iter().copied().map(ReplicaId::from_random)).unwrap()
    }

    #[test]
    fn counts_members_only() {
        let view = members(&[1, 2, 3]);
        assert_eq!(quorum(&view, &members(&[1, 2])), Quorum::More);
        assert_eq!(quorum(&view, &members(&[1, 4, 5, 6])), Quorum::Less);
        assert_eq!(quorum(&members(&[1, 2]), &members(&[2])), Quorum::Half);
        assert_eq!(quorum(&members(&[1]), &members(&[1])), Quorum::More);
        assert_eq!(quorum(&Members::NONE, &members(&[1])), Quorum::Less);
    }
}
