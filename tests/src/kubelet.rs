//! A small stand-in for kubelet. It makes kubelet's calls in kubelet's order and with kubelet's arguments on
//! the sockets of an agent. It makes and removes the same directories, and writes the same to the API server.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_api::pluginregistration::registration_client::RegistrationClient;
use shorthorn_api::pluginregistration::{InfoRequest, RegistrationStatus};
use shorthorn_csi::DRIVER_NAME;

use crate::apiserver::ApiServer;
use crate::claims::{Persistent, attachment_of, bytes, claim_path, csi_node_path, strings, text};
use crate::cluster_node::ClusterNode;
use crate::until;

/// The time limit of kubelet for a call.
const CALL_LIMIT: Duration = Duration::from_secs(120);
const LIMIT: Duration = Duration::from_secs(180);
const ROOT: &str = "/var/lib/kubelet";

/// The kubelet of a node.
#[derive(Debug)]
pub struct Kubelet<'a> {
    api: &'a ApiServer,
    node: &'a ClusterNode,
}

/// A volume of a pod on a node.
#[derive(Debug)]
pub struct Mounted {
    volume: Persistent,
    pod_dir: String,
    staging_dir: String,
}

impl Mounted {
    /// Returns the path in the pod's directory.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}/mount", self.pod_dir)
    }

    fn staging(&self) -> String {
        format!("{}/globalmount", self.staging_dir)
    }
}

impl<'a> Kubelet<'a> {
    /// Makes the stand-in for the kubelet of `node`.
    #[must_use]
    pub fn of(api: &'a ApiServer, node: &'a ClusterNode) -> Kubelet<'a> {
        Kubelet { api, node }
    }

    fn node_path(&self) -> String {
        format!("/api/v1/nodes/{}", self.node.name())
    }

    /// Makes itself known to the API server, and then the driver whose socket is in the directory of plugins.
    ///
    /// # Errors
    /// No driver exists, or it does not suit kubelet.
    pub fn join(&self) -> Result<()> {
        let annotations = json!({ "volumes.kubernetes.io/controller-managed-attach-detach": "true" });
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": self.node.name(), "annotations": annotations },
        });
        if self.api.find(&self.node_path())?.is_none() {
            self.api.ok("POST", "/api/v1/nodes", Some(&node))?;
        }
        let found = until("socket of a driver", LIMIT, || {
            self.node.host.vm.sh(&format!("cd {ROOT}/plugins_registry; test -S *; ls")).map(Some)
        })?;
        ensure!(found == format!("shorthorn@{DRIVER_NAME}-reg.sock"), "{found}");
        let info = self.node.registration.call(InfoRequest {}, CALL_LIMIT, async |channel, request| {
            RegistrationClient::new(channel).get_info(request).await
        })?;
        ensure!(info.r#type == "CSIPlugin" && info.name == DRIVER_NAME, "{info:?}");
        ensure!(info.supported_versions == ["1.0.0"], "{info:?}");
        ensure!(info.endpoint == format!("{ROOT}/plugins/{DRIVER_NAME}/csi.sock"), "{info:?}");
        let node = self.node.csi.call(v1::NodeGetInfoRequest {}, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_get_info(request).await
        })?;
        self.write_down(&node)?;
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        self.node.registration.call(status, CALL_LIMIT, async |channel, request| {
            RegistrationClient::new(channel).notify_registration_status(request).await
        })?;
        Ok(())
    }

    fn write_down(&self, info: &v1::NodeGetInfoResponse) -> Result<()> {
        ensure!(info.node_id == self.node.name(), "{info:?}");
        let topology = info.accessible_topology.clone().unwrap_or_default().segments;
        let topology: BTreeMap<String, String> = topology.into_iter().collect();
        let labels = json!({ "metadata": { "labels": topology } });
        self.api.ok("PATCH", &self.node_path(), Some(&labels))?;
        let keys: Vec<&String> = topology.keys().collect();
        let csi_node = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSINode",
            "metadata": { "name": self.node.name() },
            "spec": { "drivers": [{ "name": DRIVER_NAME, "nodeID": info.node_id, "topologyKeys": keys }] },
        });
        match self.api.find(&csi_node_path(self.node.name()))? {
            Some(found) => ensure!(found["spec"] == csi_node["spec"], "{found:#}"),
            None => drop(self.api.ok("POST", "/apis/storage.k8s.io/v1/csinodes", Some(&csi_node))?),
        }
        Ok(())
    }

    /// Says which volumes the node uses: the attach-detach controller takes none of them away.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn say_in_use(&self, volumes: &[String]) -> Result<()> {
        let status = json!({ "status": { "volumesInUse": volumes } });
        self.api.ok("PATCH", &format!("{}/status", self.node_path()), Some(&status)).map(drop)
    }

    /// Returns the mount of a volume in a pod.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn mounted(&self, pod: &Value, volume: &str) -> Result<Mounted> {
        let volume = Persistent::read(self.api, volume)?;
        let pod = text(&pod["metadata"]["uid"])?;
        let sum = self.node.host.sh(&format!("printf %s {} | sha256sum | cut -d' ' -f1", volume.handle))?;
        Ok(Mounted {
            pod_dir: format!("{ROOT}/pods/{pod}/volumes/kubernetes.io~csi/{}", volume.name),
            staging_dir: format!("{ROOT}/plugins/kubernetes.io/csi/{DRIVER_NAME}/{sum}"),
            volume,
        })
    }

    /// Records that a pod needs a volume here, before it is attached.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn expect(&self, volume: &str) -> Result<()> {
        self.say_in_use(&[Persistent::read(self.api, volume)?.unique_name()])
    }

    /// Has a pod find its volume, once that is attached.
    ///
    /// # Errors
    /// It does not come about.
    pub fn mount(&self, pod: &Value, volume: &str) -> Result<Mounted> {
        let attachment = until("attached volume", LIMIT, || {
            let attachment = attachment_of(self.api, volume, self.node.name())?.context("no attachment")?;
            ensure!(attachment["status"]["attached"] == true, "{attachment:#}");
            Ok(Some(attachment))
        })?;
        let publish_context = strings(&attachment["status"]["attachmentMetadata"]);
        let place = self.mounted(pod, volume)?;
        self.ensure_announced()?;
        self.make(&place.staging_dir, "globalmount")?;
        let stage = v1::NodeStageVolumeRequest {
            volume_id: place.volume.handle.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: place.staging(),
            volume_capability: Some(place.volume.capability()),
            volume_context: place.volume.context(),
            ..v1::NodeStageVolumeRequest::default()
        };
        until("staged volume", LIMIT, || {
            let staged = self.node.csi.call(stage.clone(), CALL_LIMIT, async |channel, request| {
                NodeClient::new(channel).node_stage_volume(request).await
            });
            staged.map(Some)
        })?;
        // The directory of the pod; the one in it, which is mounted on, is the driver's to make.
        self.make(&place.pod_dir, "")?;
        let publish = v1::NodePublishVolumeRequest {
            volume_id: place.volume.handle.clone(),
            publish_context,
            staging_target_path: place.staging(),
            target_path: place.path(),
            volume_capability: Some(place.volume.capability()),
            volume_context: place.volume.context(),
            ..v1::NodePublishVolumeRequest::default()
        };
        self.node.csi.call(publish, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_publish_volume(request).await
        })?;
        Ok(place)
    }

    /// Checks that the driver is announced, as kubelet does before it stages anything.
    fn ensure_announced(&self) -> Result<()> {
        use v1::node_service_capability::{Type, rpc};
        let request = v1::NodeGetCapabilitiesRequest {};
        let answer = self.node.csi.call(request, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_get_capabilities(request).await
        })?;
        let kinds: Vec<i32> = answer
            .capabilities
            .iter()
            .filter_map(|capability| capability.r#type)
            .map(|Type::Rpc(rpc)| rpc.r#type)
            .collect();
        for wanted in [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::SingleNodeMultiWriter,
        ] {
            ensure!(kinds.contains(&wanted.into()), "{wanted:?} is not announced: {kinds:?}");
        }
        Ok(())
    }

    fn make(&self, dir: &str, inner: &str) -> Result<()> {
        self.node
            .host
            .sh(&format!("mkdir -p -m 0750 {dir} {dir}/{inner}; echo '{{}}' > {dir}/vol_data.json"))
            .map(drop)
    }

    /// Returns the total and the used bytes of a pod's volume.
    ///
    /// # Errors
    /// The driver says nothing, or that something is wrong.
    pub fn stats(&self, mounted: &Mounted) -> Result<(i64, i64)> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: mounted.volume.handle.clone(),
            volume_path: mounted.path(),
            ..v1::NodeGetVolumeStatsRequest::default()
        };
        let answer = self.node.csi.call(request, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_get_volume_stats(request).await
        })?;
        let condition = answer.volume_condition.clone().context("no condition")?;
        ensure!(!condition.abnormal, "{condition:?}");
        let in_bytes = answer.usage.iter().find(|usage| usage.unit() == v1::volume_usage::Unit::Bytes);
        let usage = in_bytes.with_context(|| format!("{answer:?}"))?;
        Ok((usage.total, usage.used))
    }

    /// Grows the file system of a pod's volume after the driver has grown the volume, and says so at the
    /// claim.
    ///
    /// # Errors
    /// It does not grow.
    pub fn expand(&self, mounted: &Mounted, claim: &str) -> Result<()> {
        let volume = Persistent::read(self.api, &mounted.volume.name)?;
        let path = claim_path(claim);
        let has_bytes = bytes(&self.api.ok("GET", &path, None)?["status"]["capacity"]["storage"])?;
        ensure!(volume.size_bytes > has_bytes, "the claim has {has_bytes} bytes and {volume:?}");
        let request = v1::NodeExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            volume_path: mounted.path(),
            capacity_range: Some(v1::CapacityRange { required_bytes: volume.size_bytes, limit_bytes: 0 }),
            staging_target_path: mounted.staging(),
            volume_capability: Some(volume.capability()),
            ..v1::NodeExpandVolumeRequest::default()
        };
        self.node.csi.call(request, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_expand_volume(request).await
        })?;
        let size = json!({ "storage": volume.size_bytes.to_string() });
        let status = json!({ "status": { "capacity": size, "conditions": [] } });
        self.api.ok("PATCH", &format!("{path}/status"), Some(&status)).map(drop)
    }

    /// Takes the volume from a pod and from the node, and says that it is not in use any more.
    ///
    /// # Errors
    /// It stays.
    pub fn unmount(&self, mounted: &Mounted) -> Result<()> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: mounted.volume.handle.clone(),
            target_path: mounted.path(),
        };
        self.node.csi.call(request, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_unpublish_volume(request).await
        })?;
        self.remove(&mounted.pod_dir, "mount")?;
        let request = v1::NodeUnstageVolumeRequest {
            volume_id: mounted.volume.handle.clone(),
            staging_target_path: mounted.staging(),
        };
        self.node.csi.call(request, CALL_LIMIT, async |channel, request| {
            NodeClient::new(channel).node_unstage_volume(request).await
        })?;
        self.remove(&mounted.staging_dir, "globalmount")?;
        self.say_in_use(&[])
    }

    /// Removes a directory by rmdir, like kubelet, so that no content can be lost.
    fn remove(&self, dir: &str, inner: &str) -> Result<()> {
        let script = format!(
            "if test -e {dir}/{inner}; then rmdir {dir}/{inner}; fi; rm -f {dir}/vol_data.json; \
             if test -e {dir}; then rmdir {dir}; fi"
        );
        self.node.host.sh(&script).map(drop)
    }
}
