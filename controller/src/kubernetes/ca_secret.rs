//! The CA in the Secret `shorthorn-ca`.
//!
//! With another CA, no enrolled node is reached. So the Secret has a finalizer, and the Secret with the
//! volume key has the pin of the CA as an annotation. If the pin exists and the CA does not, the CA is lost:
//! the controller does not create another one.

use async_trait::async_trait;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;
use shorthorn_kube::{bounded, is_code};
use tokio::sync::Mutex;

use super::store::KEY_NAME;
use crate::ca_storage::{CaStorage, CaStorageError};

/// The Secret that has the CA.
pub const CA_NAME: &str = "shorthorn-ca";
/// The annotation of the volume key's Secret.
const PIN_ANNOTATION: &str = "shorthorn.io/ca-pin";
const FINALIZER: &str = "shorthorn.io/ca";
/// The field of the Secret.
const FIELD: &str = "ca.json";
/// A Secret has room for 1 MiB.
const STATE_MAX_BYTES: usize = 1_000_000;

/// Keeps the CA in a Secret.
pub struct CaSecret {
    secrets: Api<Secret>,
    /// The version of the Secret that was read or written last. With another one, nothing is written: it is
    /// read again first.
    version: Mutex<Option<String>>,
}

impl std::fmt::Debug for CaSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CaSecret")
    }
}

impl CaSecret {
    /// Keeps the CA in this namespace.
    #[must_use]
    pub fn new(client: kube::Client, namespace: &str) -> CaSecret {
        CaSecret { secrets: Api::namespaced(client, namespace), version: Mutex::default() }
    }

    async fn annotated_pin(&self) -> Result<Option<String>, CaStorageError> {
        let key =
            bounded(self.secrets.get(KEY_NAME)).await.map_err(|error| failed("get", KEY_NAME, &error))?;
        Ok(key.metadata.annotations.and_then(|all| all.get(PIN_ANNOTATION).cloned()))
    }

    /// Records the pin of the CA at the Secret with the volume key.
    async fn annotate(&self, pin: &str) -> Result<(), CaStorageError> {
        let change = json!({ "metadata": { "annotations": { PIN_ANNOTATION: pin } } });
        let (parameters, change) = (PatchParams::default(), Patch::Merge(change));
        let patched = bounded(self.secrets.patch(KEY_NAME, &parameters, &change)).await;
        patched.map(drop).map_err(|error| failed("annotate", KEY_NAME, &error))
    }
}

fn failed(verb: &str, name: &str, error: &dyn std::fmt::Display) -> CaStorageError {
    CaStorageError(format!("cannot {verb} Secret {name}: {error}; is packaging/deploy/rbac.yaml applied?"))
}

fn state_of(secret: &Secret) -> Result<Vec<u8>, CaStorageError> {
    let field = secret.data.as_ref().and_then(|data| data.get(FIELD));
    field.map(|bytes| bytes.0.clone()).ok_or_else(|| {
        CaStorageError(format!(
            "Secret {CA_NAME} has no field {FIELD}: restore it from a backup (docs/security.md)"
        ))
    })
}

fn secret(state: Vec<u8>) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(CA_NAME.to_owned()),
            finalizers: Some(vec![FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        },
        data: Some([(FIELD.to_owned(), ByteString(state))].into()),
        ..Secret::default()
    }
}

/// The pin of the CA in a state.
fn pin_of(state: &[u8]) -> Result<String, CaStorageError> {
    let authority = crate::tls::read(state.to_vec()).map_err(|error| CaStorageError(error.to_string()))?;
    authority.pin().map(|pin| pin.to_string()).map_err(|error| CaStorageError(error.to_string()))
}

#[async_trait]
impl CaStorage for CaSecret {
    async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError> {
        let found = bounded(self.secrets.get_opt(CA_NAME)).await;
        let found = found.map_err(|error| failed("get", CA_NAME, &error))?;
        let annotated = self.annotated_pin().await?;
        let Some(secret) = found else {
            return match annotated {
                None => Ok(None),
                Some(pin) => Err(CaStorageError(format!(
                    "Secret {CA_NAME} is lost (pin {pin}): restore it from a backup. Without one, remove the \
                     annotation {PIN_ANNOTATION} of Secret {KEY_NAME}, and enrol every node again \
                     (docs/security.md)"
                ))),
            };
        };
        if secret.metadata.deletion_timestamp.is_some() {
            tracing::error!(
                "Secret {CA_NAME} is being deleted, and a finalizer keeps it: every node needs it. Save it \
                 now (docs/security.md), and create it again once it is gone"
            );
        }
        let state = state_of(&secret)?;
        let pin = pin_of(&state)?;
        if annotated.as_ref() != Some(&pin) {
            // Made just now, rolled over, or restored.
            self.annotate(&pin).await?;
        }
        *self.version.lock().await = secret.metadata.resource_version;
        Ok(Some(state))
    }

    async fn save(&self, state: Vec<u8>) -> Result<(), CaStorageError> {
        if state.len() > STATE_MAX_BYTES {
            return Err(CaStorageError(format!(
                "{} bytes do not fit into Secret {CA_NAME}: wait until some certificates expire",
                state.len()
            )));
        }
        let mut version = self.version.lock().await;
        let pin = pin_of(&state)?;
        let Some(known) = version.as_ref() else {
            // Fails if another controller was first.
            let made = bounded(self.secrets.create(&PostParams::default(), &secret(state))).await;
            let made = made.map_err(|error| failed("create", CA_NAME, &error))?;
            *version = made.metadata.resource_version;
            return self.annotate(&pin).await;
        };
        let data = json!({ FIELD: ByteString(state) });
        let change = json!({ "metadata": { "resourceVersion": known }, "data": data });
        let saved =
            bounded(self.secrets.patch(CA_NAME, &PatchParams::default(), &Patch::Merge(change))).await;
        match saved {
            Ok(saved) => {
                *version = saved.metadata.resource_version;
                Ok(())
            }
            Err(error) if is_code(&error, 409) => Err(CaStorageError(format!(
                "Secret {CA_NAME} was changed by another controller or by hand: try again"
            ))),
            Err(error) => Err(failed("write", CA_NAME, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_without_the_ca_is_not_taken_for_a_new_cluster() {
        assert!(state_of(&Secret::default()).unwrap_err().0.contains("restore"));
        assert_eq!(state_of(&secret(b"x".to_vec())).unwrap(), b"x");
        assert!(pin_of(b"{}").is_err());
    }
}
