//! The VolumeAttachments of Kubernetes: the volumes that it considers attached, independently of this
//! controller.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use shorthorn_controller_core::csi::attachment_name;
use shorthorn_csi::DRIVER_NAME;

/// The maximum number of objects in one request.
const PAGE: u32 = 500;
/// The longest that all of them may take. An API server under load may answer after seconds, and the caller
/// tries again.
const LIMIT: Duration = Duration::from_secs(30);

/// An attachment of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Name of the VolumeAttachment object.
    pub name: String,
    /// The node, as Kubernetes calls it.
    pub node: String,
}

/// A source of the volumes that Kubernetes has attached.
#[async_trait]
pub trait Attachments: Send + Sync {
    /// Returns the attachment that names the volume, unless Kubernetes is about to detach it.
    ///
    /// # Errors
    /// The reason why that is unknown, for people.
    async fn of(&self, volume: &str) -> Result<Option<Attachment>, String>;
}

/// The attachments of a cluster, queried each time, because a manual detach is rare.
#[derive(Clone)]
pub struct ClusterAttachments(Client);

impl std::fmt::Debug for ClusterAttachments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterAttachments").finish_non_exhaustive()
    }
}

impl ClusterAttachments {
    /// Returns the attachments of the cluster behind `client`.
    #[must_use]
    pub fn new(client: Client) -> ClusterAttachments {
        ClusterAttachments(client)
    }

    async fn find(&self, volume: &str) -> Result<Option<Attachment>, kube::Error> {
        let api: Api<VolumeAttachment> = Api::all(self.0.clone());
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let list = api.list(&page).await?;
            if let Some(found) = list.items.iter().find_map(|one| names(one, volume)) {
                return Ok(Some(found));
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
                None => return Ok(None),
            }
        }
    }
}

#[async_trait]
impl Attachments for ClusterAttachments {
    async fn of(&self, volume: &str) -> Result<Option<Attachment>, String> {
        match tokio::time::timeout(LIMIT, self.find(volume)).await {
            Ok(found) => found.map_err(|error| error.to_string()),
            Err(_) => Err(format!("the API server has not answered within {} s", LIMIT.as_secs())),
        }
    }
}

/// Returns the attachment if Kubernetes has made the object for that volume. The name shows that without the
/// PersistentVolume.
fn names(object: &VolumeAttachment, volume: &str) -> Option<Attachment> {
    let spec = &object.spec;
    let name = object.name_any();
    let is_meant = spec.attacher == DRIVER_NAME
        && object.metadata.deletion_timestamp.is_none()
        && name == attachment_name(volume, DRIVER_NAME, &spec.node_name);
    is_meant.then(|| Attachment { name, node: spec.node_name.clone() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(name: &str, attacher: &str, metadata: Value) -> VolumeAttachment {
        let mut object = json!({
            "metadata": { "name": name },
            "spec": { "attacher": attacher, "nodeName": "n1", "source": { "persistentVolumeName": "p" } },
        });
        if let (Some(all), Value::Object(more)) = (object["metadata"].as_object_mut(), metadata) {
            all.extend(more);
        }
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_attachment_names_one_volume_of_ours_until_it_is_deleted() {
        let name = attachment_name("v", DRIVER_NAME, "n1");
        let found = names(&object(&name, DRIVER_NAME, json!({})), "v");
        assert_eq!(found, Some(Attachment { name: name.clone(), node: "n1".to_owned() }));
        assert_eq!(names(&object(&name, DRIVER_NAME, json!({})), "w"), None);
        assert_eq!(names(&object(&name, "other.driver", json!({})), "v"), None);
        let deleting = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        assert_eq!(names(&object(&name, DRIVER_NAME, deleting), "v"), None);
    }
}
