//! The secrets of volumes. None of them is stored: each is derived from one key and the identity of its
//! volume. So a volume made by kubectl has one too, and the right to read volumes gives no access to their
//! data.
//!
//! With another key no engine reaches a replica that was made with the old one. Each volume therefore has the
//! fingerprint of its key, and the Secret with the key has a finalizer. A key is made only if no volume can
//! need another one.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret as KubernetesSecret;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use ring::hmac;
use serde_json::json;
use shorthorn_controller_core::objects::{Kind, SECRET_BYTES, Secret};
use shorthorn_types::hex;

use super::finalizer::is_held;
use super::{StoreOpenError, bounded, is_code};
use crate::random::random_bytes;

/// The Secret that has the key.
pub const KEY_NAME: &str = "shorthorn-volume-key";
/// The annotation of a volume with the fingerprint of the key from which its secret is derived.
pub const FINGERPRINT_ANNOTATION: &str = "shorthorn.io/key-fingerprint";
/// The finalizer that keeps the Secret when a client deletes it while volumes exist.
const KEY_FINALIZER: &str = "shorthorn.io/volume-key";
/// The field of the Secret.
const FIELD: &str = "key";
/// The text whose tag is the fingerprint. A volume's uid never has a space.
const FINGERPRINT_TEXT: &[u8] = b"fingerprint of the key";
/// The text whose tag is the name of the cluster.
const CLUSTER_TEXT: &[u8] = b"name of the cluster";
/// The bytes of that tag in the name.
const CLUSTER_BYTES: usize = 16;
/// The bytes of the fingerprint's tag that are shown: enough to tell keys apart, and of no use for finding
/// one.
const FINGERPRINT_BYTES: usize = 8;

/// The key that the secrets of all volumes are derived from.
pub struct VolumeKeys(hmac::Key);

impl std::fmt::Debug for VolumeKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VolumeKeys(hidden)")
    }
}

impl VolumeKeys {
    /// Creates the keys of these random bytes.
    pub fn new(key: &[u8; SECRET_BYTES]) -> VolumeKeys {
        VolumeKeys(hmac::Key::new(hmac::HMAC_SHA256, key))
    }

    /// Returns the secret of the volume with that uid. A re-created volume of the same name has another uid.
    pub fn secret_of(&self, uid: &str) -> Secret {
        let tag = hmac::sign(&self.0, uid.as_bytes());
        let mut bytes = [0; SECRET_BYTES];
        bytes.copy_from_slice(tag.as_ref());
        Secret::new(bytes)
    }

    /// Returns the fingerprint of the key, for people and for the volumes that need it.
    pub fn fingerprint(&self) -> String {
        self.text(FINGERPRINT_TEXT, FINGERPRINT_BYTES)
    }

    /// Returns the name of the cluster whose volumes have this key: it comes back with the key after a
    /// disaster.
    pub fn cluster(&self) -> String {
        self.text(CLUSTER_TEXT, CLUSTER_BYTES)
    }

    fn text(&self, of: &[u8], bytes: usize) -> String {
        let tag = hmac::sign(&self.0, of);
        hex(&tag.as_ref()[..bytes])
    }

    /// Reads the key, or makes it unless a volume needs a lost one.
    pub async fn open(
        secrets: &Api<KubernetesSecret>,
        volumes: &[KeyOfVolume],
    ) -> Result<VolumeKeys, StoreOpenError> {
        let mut found = bounded(secrets.get_opt(KEY_NAME)).await?;
        if let Some(secret) = found.as_ref().filter(|secret| is_deleting(secret)) {
            if volumes.iter().any(|volume| volume.is_needed) {
                tracing::error!(
                    "Secret {KEY_NAME} is being deleted, and a finalizer keeps it: every volume needs it. \
                     Save it now (docs/backup.md), and create it again once it is gone"
                );
            } else {
                set_finalizers(secrets, secret, Vec::new()).await?;
                found = bounded(secrets.get_opt(KEY_NAME)).await?;
            }
        }
        let Some(secret) = found else {
            check_none_needed(volumes)?;
            return VolumeKeys::make(secrets).await;
        };
        let keys = VolumeKeys::read(&secret)?;
        keys.check(volumes)?;
        keep(secrets, &secret).await;
        Ok(keys)
    }

    /// Returns an error unless these volumes were made with this key. A volume without a fingerprint is of an
    /// earlier release.
    fn check(&self, volumes: &[KeyOfVolume]) -> Result<(), StoreOpenError> {
        let present = self.fingerprint();
        let is_other = |volume: &&KeyOfVolume| {
            volume.is_needed && volume.fingerprint.as_ref().is_some_and(|needed| *needed != present)
        };
        let mut others = volumes.iter().filter(is_other);
        let Some(first) = others.next() else { return Ok(()) };
        Err(StoreOpenError::OtherKey {
            count: 1 + others.count(),
            volume: first.volume.clone(),
            needed: first.fingerprint.clone().unwrap_or_default(),
            present,
        })
    }

    async fn make(secrets: &Api<KubernetesSecret>) -> Result<VolumeKeys, StoreOpenError> {
        let key: [u8; SECRET_BYTES] = random_bytes().map_err(StoreOpenError::Random)?;
        let secret = KubernetesSecret {
            metadata: ObjectMeta {
                name: Some(KEY_NAME.to_owned()),
                finalizers: Some(vec![KEY_FINALIZER.to_owned()]),
                ..ObjectMeta::default()
            },
            // Another key would lock every engine out of its replicas.
            immutable: Some(true),
            data: Some([(FIELD.to_owned(), ByteString(key.to_vec()))].into()),
            ..KubernetesSecret::default()
        };
        match bounded(secrets.create(&PostParams::default(), &secret)).await {
            Ok(made) => {
                let keys = VolumeKeys::read(&made)?;
                let fingerprint = keys.fingerprint();
                tracing::warn!(
                    fingerprint,
                    "Secret {KEY_NAME} was created: back it up, no volume can be used without it"
                );
                Ok(keys)
            }
            // Another controller was first.
            Err(error) if is_code(&error, 409) => VolumeKeys::read(&bounded(secrets.get(KEY_NAME)).await?),
            Err(error) => Err(error.into()),
        }
    }

    fn read(secret: &KubernetesSecret) -> Result<VolumeKeys, StoreOpenError> {
        let bytes = secret.data.as_ref().and_then(|data| data.get(FIELD)).map(|bytes| bytes.0.as_slice());
        let key: Option<&[u8; SECRET_BYTES]> = bytes.and_then(|bytes| bytes.try_into().ok());
        key.map(VolumeKeys::new).ok_or(StoreOpenError::Key)
    }
}

/// The key that a volume of the API server needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOfVolume {
    volume: String,
    /// The fingerprint; none if an earlier release made the volume, or it was not reconciled yet.
    fingerprint: Option<String>,
    /// True if it can have data.
    is_needed: bool,
}

impl KeyOfVolume {
    /// Returns the record in the metadata of a volume.
    pub fn of(volume: &ObjectMeta) -> KeyOfVolume {
        let annotations = volume.annotations.as_ref();
        KeyOfVolume {
            volume: volume.name.clone().unwrap_or_default(),
            fingerprint: annotations.and_then(|all| all.get(FINGERPRINT_ANNOTATION)).cloned(),
            // Nothing is made for a volume before it has the finalizer.
            is_needed: is_held(Kind::Volume, volume),
        }
    }
}

fn check_none_needed(volumes: &[KeyOfVolume]) -> Result<(), StoreOpenError> {
    let mut needing = volumes.iter().filter(|volume| volume.is_needed);
    let Some(first) = needing.next() else { return Ok(()) };
    let fingerprint =
        volumes.iter().filter(|volume| volume.is_needed).find_map(|one| one.fingerprint.clone());
    Err(StoreOpenError::KeyLost {
        count: 1 + needing.count(),
        volume: first.volume.clone(),
        fingerprint: fingerprint.unwrap_or_else(|| "not known, as an earlier release made them".to_owned()),
    })
}

fn is_deleting(secret: &KubernetesSecret) -> bool {
    secret.metadata.deletion_timestamp.is_some()
}

/// Adds the finalizer to a Secret of an earlier release, or to one that was restored without it.
async fn keep(secrets: &Api<KubernetesSecret>, secret: &KubernetesSecret) {
    let mut finalizers = secret.metadata.finalizers.clone().unwrap_or_default();
    if is_deleting(secret) || finalizers.iter().any(|one| one == KEY_FINALIZER) {
        return;
    }
    finalizers.push(KEY_FINALIZER.to_owned());
    if let Err(error) = set_finalizers(secrets, secret, finalizers).await {
        // The role of an earlier release does not allow it. The key is as good without.
        tracing::warn!(%error, "Secret {KEY_NAME} has no finalizer: apply packaging/deploy/rbac.yaml again");
    }
}

async fn set_finalizers(
    secrets: &Api<KubernetesSecret>,
    secret: &KubernetesSecret,
    finalizers: Vec<String>,
) -> Result<(), super::CallError> {
    let version = &secret.metadata.resource_version;
    let change = json!({ "metadata": { "finalizers": finalizers, "resourceVersion": version } });
    bounded(secrets.patch(KEY_NAME, &PatchParams::default(), &Patch::Merge(change))).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::Method;
    use http::request::Parts;
    use serde_json::Value;

    use super::*;
    use crate::kubernetes::fake_api::{FakeApi, fake_client};

    /// An API server with the Secret. A Secret that is being deleted is gone with its last finalizer.
    #[derive(Default)]
    struct OneSecret(Mutex<Option<Value>>);

    impl OneSecret {
        fn secrets(this: &Arc<OneSecret>) -> Api<KubernetesSecret> {
            Api::namespaced(fake_client(this), "n")
        }

        fn finalizers(&self) -> Value {
            self.0.lock().unwrap().as_ref().unwrap()["metadata"]["finalizers"].clone()
        }

        fn set(&self, field: &str, value: Value) {
            self.0.lock().unwrap().as_mut().unwrap()["metadata"][field] = value;
        }
    }

    impl FakeApi for OneSecret {
        async fn answer(&self, head: &Parts, body: &[u8]) -> (u16, Value) {
            let mut secret = self.0.lock().unwrap();
            if head.method == Method::POST {
                *secret = Some(serde_json::from_slice(body).unwrap());
            }
            let Some(found) = secret.as_mut() else {
                let reason = "NotFound";
                return (
                    404,
                    json!({ "kind": "Status", "status": "Failure", "reason": reason, "code": 404 }),
                );
            };
            if head.method == Method::PATCH {
                let change: Value = serde_json::from_slice(body).unwrap();
                found["metadata"]["finalizers"] = change["metadata"]["finalizers"].clone();
            }
            let answer = found.clone();
            let is_gone = !found["metadata"]["deletionTimestamp"].is_null()
                && found["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
            if is_gone {
                *secret = None;
            }
            (200, answer)
        }
    }

    #[tokio::test]
    async fn a_secret_that_is_deleted_stays_while_a_volume_needs_its_key() {
        let api = Arc::<OneSecret>::default();
        let secrets = OneSecret::secrets(&api);
        let first = VolumeKeys::open(&secrets, &[]).await.unwrap().fingerprint();
        assert_eq!(api.finalizers(), json!([KEY_FINALIZER]));
        let needing = [volume("v", Some(&first), true)];
        // Restored without it, or of an earlier release.
        api.set("finalizers", Value::Null);
        VolumeKeys::open(&secrets, &needing).await.unwrap();
        assert_eq!(api.finalizers(), json!([KEY_FINALIZER]));
        api.set("deletionTimestamp", json!("2026-01-01T00:00:00Z"));
        assert_eq!(VolumeKeys::open(&secrets, &needing).await.unwrap().fingerprint(), first);
        assert_eq!(api.finalizers(), json!([KEY_FINALIZER]));
        // Without volumes the key may be deleted, and the next cluster gets another one.
        let next = VolumeKeys::open(&secrets, &[volume("new", None, false)]).await.unwrap().fingerprint();
        assert_ne!(next, first);
        let lost = VolumeKeys::open(&secrets, &needing).await.unwrap_err();
        assert!(matches!(lost, StoreOpenError::OtherKey { .. }), "{lost}");
        *api.0.lock().unwrap() = None;
        let lost = VolumeKeys::open(&secrets, &needing).await.unwrap_err();
        assert!(lost.to_string().contains(&first), "{lost}");
        assert!(api.0.lock().unwrap().is_none(), "no other key is made");
    }

    #[test]
    fn each_volume_has_a_secret_of_its_own() {
        // RFC 4231, test case 2 has a short key, so a value of ours: openssl dgst -sha256 -hmac.
        let keys = VolumeKeys::new(&[7; SECRET_BYTES]);
        let one = keys.secret_of("5f0c2a9e-1");
        assert_eq!(one, keys.secret_of("5f0c2a9e-1"));
        assert_ne!(one, keys.secret_of("5f0c2a9e-2"));
        assert_ne!(one, VolumeKeys::new(&[8; SECRET_BYTES]).secret_of("5f0c2a9e-1"));
        assert!(format!("{keys:?}").contains("hidden"));
    }

    fn volume(name: &str, fingerprint: Option<&str>, is_needed: bool) -> KeyOfVolume {
        KeyOfVolume { volume: name.into(), fingerprint: fingerprint.map(str::to_owned), is_needed }
    }

    #[test]
    fn a_key_is_made_only_while_no_volume_can_need_another() {
        assert!(check_none_needed(&[]).is_ok());
        // Made by kubectl a moment ago: nothing has been done for it.
        assert!(check_none_needed(&[volume("new", None, false)]).is_ok());
        let volumes =
            [volume("new", None, false), volume("old", None, true), volume("b", Some("f00d"), true)];
        let error = check_none_needed(&volumes).unwrap_err();
        let StoreOpenError::KeyLost { count, volume, fingerprint } = &error else { panic!("{error}") };
        assert_eq!((*count, volume.as_str(), fingerprint.as_str()), (2, "old", "f00d"));
        assert!(check_none_needed(&volumes[..2]).unwrap_err().to_string().contains("not known"));
    }

    #[test]
    fn a_key_that_is_not_that_of_a_volume_is_refused() {
        let keys = VolumeKeys::new(&[7; SECRET_BYTES]);
        let mine = keys.fingerprint();
        assert_eq!(mine.len(), 2 * FINGERPRINT_BYTES);
        assert_ne!(mine, VolumeKeys::new(&[8; SECRET_BYTES]).fingerprint());
        assert_ne!(keys.cluster(), VolumeKeys::new(&[8; SECRET_BYTES]).cluster());
        keys.check(&[volume("a", Some(&mine), true), volume("earlier", None, true)]).unwrap();
        // Any text in the place of a missing one.
        keys.check(&[volume("new", Some("f00d"), false)]).unwrap();
        let error =
            keys.check(&[volume("a", Some(&mine), true), volume("b", Some("f00d"), true)]).unwrap_err();
        let StoreOpenError::OtherKey { count: 1, volume, needed, present } = &error else {
            panic!("{error}")
        };
        assert_eq!((volume.as_str(), needed.as_str(), present), ("b", "f00d", &mine));
    }

    #[test]
    fn a_volume_needs_its_key_from_its_finalizer_on() {
        let annotations = Some([(FINGERPRINT_ANNOTATION.to_owned(), "f00d".to_owned())].into());
        let mut metadata = ObjectMeta { name: Some("v".to_owned()), annotations, ..ObjectMeta::default() };
        assert_eq!(KeyOfVolume::of(&metadata), volume("v", Some("f00d"), false));
        metadata.finalizers = Some(vec!["shorthorn.io/data".into()]);
        metadata.annotations = None;
        assert_eq!(KeyOfVolume::of(&metadata), volume("v", None, true));
    }

    #[test]
    fn a_key_of_another_length_is_refused() {
        let with = |bytes: &[u8]| KubernetesSecret {
            data: Some([(FIELD.to_owned(), ByteString(bytes.to_vec()))].into()),
            ..KubernetesSecret::default()
        };
        assert!(VolumeKeys::read(&with(&[0; SECRET_BYTES])).is_ok());
        assert!(matches!(VolumeKeys::read(&with(&[0; 31])), Err(StoreOpenError::Key)));
        assert!(matches!(VolumeKeys::read(&KubernetesSecret::default()), Err(StoreOpenError::Key)));
    }
}
