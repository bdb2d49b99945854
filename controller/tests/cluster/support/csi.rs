//! A caller of CSI, as the sidecars are.

use std::path::Path;
use std::time::Duration;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::controller_client::ControllerClient;
use shorthorn_api::csi::v1::identity_client::IdentityClient;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::cluster::LIMIT;

/// A connection that is made when it is used, and again after it broke; clones share it.
#[derive(Clone)]
pub struct Caller {
    pub controller: ControllerClient<Channel>,
    pub identity: IdentityClient<Channel>,
    /// The time limit of every call.
    pub timeout: Duration,
}

/// The result of a call, or its code and message.
pub type Outcome<T> = Result<T, (Code, String)>;

fn outcome<T>(answer: Result<tonic::Response<T>, Status>) -> Outcome<T> {
    answer.map(tonic::Response::into_inner).map_err(|status| (status.code(), status.message().to_owned()))
}

/// Returns the gRPC status code; OK for an answer.
pub fn code<T>(outcome: &Outcome<T>) -> Code {
    outcome.as_ref().err().map_or(Code::Ok, |(code, _)| *code)
}

impl Caller {
    pub fn new(socket: &Path) -> Caller {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        let channel = endpoint.connect_lazy();
        let (controller, identity) = (ControllerClient::new(channel.clone()), IdentityClient::new(channel));
        Caller { controller, identity, timeout: LIMIT }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    pub async fn create(&mut self, message: v1::CreateVolumeRequest) -> Outcome<v1::Volume> {
        let request = self.request(message);
        outcome(self.controller.create_volume(request).await).map(|answer| answer.volume.unwrap())
    }

    pub async fn delete(&mut self, id: &str) -> Outcome<()> {
        let request = self.request(v1::DeleteVolumeRequest { volume_id: id.into(), ..Default::default() });
        outcome(self.controller.delete_volume(request).await).map(drop)
    }

    pub async fn publish(&mut self, message: v1::ControllerPublishVolumeRequest) -> Outcome<()> {
        let request = self.request(message);
        outcome(self.controller.controller_publish_volume(request).await).map(drop)
    }

    pub async fn unpublish(&mut self, id: &str, node: &str) -> Outcome<()> {
        let request = self.request(v1::ControllerUnpublishVolumeRequest {
            volume_id: id.into(),
            node_id: node.into(),
            ..Default::default()
        });
        outcome(self.controller.controller_unpublish_volume(request).await).map(drop)
    }

    pub async fn expand(
        &mut self,
        message: v1::ControllerExpandVolumeRequest,
    ) -> Outcome<v1::ControllerExpandVolumeResponse> {
        let request = self.request(message);
        outcome(self.controller.controller_expand_volume(request).await)
    }

    pub async fn validate(
        &mut self,
        message: v1::ValidateVolumeCapabilitiesRequest,
    ) -> Outcome<v1::ValidateVolumeCapabilitiesResponse> {
        let request = self.request(message);
        outcome(self.controller.validate_volume_capabilities(request).await)
    }

    pub async fn list(&mut self, max_entries: i32, token: &str) -> Outcome<v1::ListVolumesResponse> {
        let message = v1::ListVolumesRequest { max_entries, starting_token: token.into() };
        let request = self.request(message);
        outcome(self.controller.list_volumes(request).await)
    }

    pub async fn get(&mut self, id: &str) -> Outcome<v1::ControllerGetVolumeResponse> {
        let request = self.request(v1::ControllerGetVolumeRequest { volume_id: id.into() });
        outcome(self.controller.controller_get_volume(request).await)
    }

    pub async fn capacity(&mut self, message: v1::GetCapacityRequest) -> Outcome<v1::GetCapacityResponse> {
        let request = self.request(message);
        outcome(self.controller.get_capacity(request).await)
    }

    /// Returns the nodes on which the volume is published.
    pub async fn published(&mut self, id: &str) -> Vec<String> {
        self.get(id).await.unwrap().status.unwrap().published_node_ids
    }

    /// Returns the ids of all volumes.
    pub async fn ids(&mut self) -> Vec<String> {
        let entries = self.list(0, "").await.unwrap().entries;
        entries.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect()
    }
}

pub fn capability(access: AccessType, mode: Mode) -> v1::VolumeCapability {
    let access_mode = Some(AccessMode { mode: mode.into() });
    v1::VolumeCapability { access_type: Some(access), access_mode }
}

pub fn file_system(fs_type: &str) -> v1::VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.into(), ..MountVolume::default() };
    capability(AccessType::Mount(mount), Mode::SingleNodeWriter)
}

pub fn block() -> v1::VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), Mode::SingleNodeWriter)
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> Option<v1::CapacityRange> {
    Some(v1::CapacityRange { required_bytes, limit_bytes })
}

/// Returns a volume of a GiB.
pub fn create(name: &str) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest {
        name: name.into(),
        capacity_range: range(1 << 30, 0),
        volume_capabilities: vec![file_system("ext4")],
        ..Default::default()
    }
}

pub fn publish(id: &str, node: &str) -> v1::ControllerPublishVolumeRequest {
    v1::ControllerPublishVolumeRequest {
        volume_id: id.into(),
        node_id: node.into(),
        volume_capability: Some(file_system("ext4")),
        ..Default::default()
    }
}

pub fn expand(id: &str, required_bytes: i64) -> v1::ControllerExpandVolumeRequest {
    v1::ControllerExpandVolumeRequest {
        volume_id: id.into(),
        capacity_range: range(required_bytes, 0),
        volume_capability: Some(file_system("ext4")),
        ..Default::default()
    }
}

pub fn topology(segments: &[(&str, &str)]) -> v1::Topology {
    let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    v1::Topology { segments: segments.iter().map(pair).collect() }
}
