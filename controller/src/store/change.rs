use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::Object;
use shorthorn_controller_core::requests::Change;

use super::{ObjectStore, ObjectStoreError};

/// The maximum number of retries of a change after conflicts.
const CONFLICTS_MAX: u32 = 10;

/// The reason why a change was not made.
#[derive(Debug)]
pub enum ChangeError<E> {
    /// The change is not allowed.
    Refused(E),
    /// The store did not take it; [`ObjectStoreError::Conflict`]: others came first again and again.
    Store(ObjectStoreError),
}

/// Makes the change that `decide` wants of the stored objects; decides again if another change came in
/// between.
///
/// # Errors
/// [`ChangeError`].
pub async fn change<T: Into<Object>, E>(
    store: &dyn ObjectStore,
    decide: impl Fn(&ClusterState) -> Result<Change<T>, E>,
) -> Result<(), ChangeError<E>> {
    let mut conflicts = 0;
    loop {
        let change = decide(&store.state()).map_err(ChangeError::Refused)?;
        let object = match change {
            Change::AlreadySo(_) => return Ok(()),
            Change::Store(object) => object,
        };
        match store.put(object.into()).await {
            Ok(_) => return Ok(()),
            Err(ObjectStoreError::Conflict { .. }) if conflicts < CONFLICTS_MAX => conflicts += 1,
            Err(error) => return Err(ChangeError::Store(error)),
        }
    }
}
