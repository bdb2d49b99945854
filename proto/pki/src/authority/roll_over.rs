//! Replacing the CA in phases, so that each certificate in use is trusted by everybody at each moment.

use std::collections::BTreeMap;

use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use shorthorn_types::status::RollOverPhase;

use super::{Authority, AuthorityError, Issued, Signer};
use crate::role::Role;
use crate::trust::Pin;

/// The CAs of a cluster: one, or two during a roll-over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RollOver {
    /// The CA that signs.
    pub(crate) current: Signer,
    /// Trusted, but does not sign yet.
    next: Option<Signer>,
    /// Trusted, but does not sign any more.
    previous: Option<Signer>,
}

impl RollOver {
    pub(crate) fn new(current: Signer) -> RollOver {
        RollOver { current, next: None, previous: None }
    }

    pub(crate) fn trusted(&self) -> impl Iterator<Item = &Signer> {
        std::iter::once(&self.current).chain(&self.next).chain(&self.previous)
    }
}

impl Authority {
    /// The step that the roll-over is in.
    #[must_use]
    pub fn phase(&self) -> RollOverPhase {
        match (&self.signers.next, &self.signers.previous) {
            (Some(_), _) => RollOverPhase::Distributing,
            (None, Some(_)) => RollOverPhase::Reissuing,
            (None, None) => RollOverPhase::Idle,
        }
    }

    /// Adds a new CA to the trust list.
    ///
    /// # Errors
    /// [`AuthorityError::RollOver`] while another roll-over is under way.
    pub fn begin_roll_over(&mut self, now: UnixTime) -> Result<(), AuthorityError> {
        if self.phase() != RollOverPhase::Idle {
            return Err(AuthorityError::RollOver(self.phase()));
        }
        self.signers.next = Some(Signer::create(self.cluster(), now)?);
        self.raise_version();
        Ok(())
    }

    /// Lets the new CA sign. The caller has seen that everybody has the trust list with it.
    ///
    /// # Errors
    /// [`AuthorityError::NotReady`] in another phase.
    pub fn switch_signer(&mut self) -> Result<(), AuthorityError> {
        let Some(next) = self.signers.next.take() else {
            return Err(AuthorityError::NotReady(format!("the phase is {}", self.phase())));
        };
        self.signers.previous = Some(std::mem::replace(&mut self.signers.current, next));
        self.raise_version();
        Ok(())
    }

    /// Roles whose newest certificate is of the old CA, with that certificate.
    #[must_use]
    pub fn left_of_old(&self, now: UnixTime) -> Vec<Issued> {
        let Some(previous) = &self.signers.previous else { return Vec::new() };
        let Ok(old) = previous.der().map(|der| Pin::of(&der)) else { return Vec::new() };
        let valid = |issued: &&Issued| issued.not_after >= now.as_secs() && !self.is_revoked(&issued.serial);
        // Later ones replace earlier ones.
        let newest: BTreeMap<String, &Issued> =
            self.issued().iter().filter(valid).map(|issued| (issued.role.to_string(), issued)).collect();
        newest.into_values().filter(|issued| issued.signer == old).cloned().collect()
    }

    /// Trusts the old CA no more. With `force` also if certificates of it are in use; their holders enrol
    /// again.
    ///
    /// # Errors
    /// [`AuthorityError::NotReady`] names the certificates that are left.
    pub fn finish_roll_over(&mut self, force: bool, now: UnixTime) -> Result<(), AuthorityError> {
        if self.phase() != RollOverPhase::Reissuing {
            return Err(AuthorityError::NotReady(format!("the phase is {}", self.phase())));
        }
        let left: Vec<Role> = self.left_of_old(now).into_iter().map(|issued| issued.role).collect();
        if !left.is_empty() && !force {
            let names: Vec<String> = left.iter().take(10).map(Role::to_string).collect();
            let names = names.join(", ");
            return Err(AuthorityError::NotReady(format!(
                "{} have certificates of the old CA: {names}; wait for nodes, issue administrators new \
                 ones, or revoke them",
                left.len()
            )));
        }
        self.signers.previous = None;
        self.raise_version();
        Ok(())
    }
}
