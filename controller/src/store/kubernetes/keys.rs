//! The secrets of volumes. None of them is stored: each is derived from one key and the identity of its volume, so that
//! a volume made by kubectl has one too, and reading volumes gives nobody access to their data.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret as KubernetesSecret;
use kube::api::{Api, ObjectMeta, PostParams};
use ring::hmac;
use shorthorn_controller_core::objects::{SECRET_BYTES, Secret};

use super::OpenError;
use super::calls::{bounded, is_code};

/// The Secret that has the key.
pub const KEY_NAME: &str = "shorthorn-volume-key";
/// The field of the Secret.
const FIELD: &str = "key";

/// The key that the secrets of all volumes are derived from.
pub struct VolumeKeys(hmac::Key);

impl std::fmt::Debug for VolumeKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VolumeKeys(hidden)")
    }
}

impl VolumeKeys {
    /// The keys of these random bytes.
    pub fn new(key: &[u8; SECRET_BYTES]) -> VolumeKeys {
        VolumeKeys(hmac::Key::new(hmac::HMAC_SHA256, key))
    }

    /// The secret of the volume with that uid. One that comes again under the name has another uid.
    pub fn secret_of(&self, uid: &str) -> Secret {
        let tag = hmac::sign(&self.0, uid.as_bytes());
        let mut bytes = [0; SECRET_BYTES];
        bytes.copy_from_slice(tag.as_ref());
        Secret::new(bytes)
    }

    /// Reads the key, and makes it where there is none.
    pub async fn open(secrets: &Api<KubernetesSecret>) -> Result<VolumeKeys, OpenError> {
        if let Some(found) = bounded(secrets.get_opt(KEY_NAME)).await? {
            return VolumeKeys::read(&found);
        }
        let mut key = [0; SECRET_BYTES];
        getrandom::fill(&mut key).map_err(OpenError::Random)?;
        let secret = KubernetesSecret {
            metadata: ObjectMeta { name: Some(KEY_NAME.to_owned()), ..ObjectMeta::default() },
            // Another key would lock every engine out of its replicas.
            immutable: Some(true),
            data: Some([(FIELD.to_owned(), ByteString(key.to_vec()))].into()),
            ..KubernetesSecret::default()
        };
        match bounded(secrets.create(&PostParams::default(), &secret)).await {
            Ok(made) => VolumeKeys::read(&made),
            // Somebody else was first.
            Err(error) if is_code(&error, 409) => VolumeKeys::read(&bounded(secrets.get(KEY_NAME)).await?),
            Err(error) => Err(error.into()),
        }
    }

    fn read(secret: &KubernetesSecret) -> Result<VolumeKeys, OpenError> {
        let bytes = secret.data.as_ref().and_then(|data| data.get(FIELD)).map(|bytes| bytes.0.as_slice());
        let key: Option<&[u8; SECRET_BYTES]> = bytes.and_then(|bytes| bytes.try_into().ok());
        key.map(VolumeKeys::new).ok_or(OpenError::Key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_key_of_another_length_is_refused() {
        let with = |bytes: &[u8]| KubernetesSecret {
            data: Some([(FIELD.to_owned(), ByteString(bytes.to_vec()))].into()),
            ..KubernetesSecret::default()
        };
        assert!(VolumeKeys::read(&with(&[0; SECRET_BYTES])).is_ok());
        assert!(matches!(VolumeKeys::read(&with(&[0; 31])), Err(OpenError::Key)));
        assert!(matches!(VolumeKeys::read(&KubernetesSecret::default()), Err(OpenError::Key)));
    }
}
