//! Moving replicas on request.

use shorthorn_api::v1;
use shorthorn_api::v1::rebalance_request::Mode;
use shorthorn_controller_core::rebalance::{self, Move, RebalanceInput, RebalancePlan};
use tonic::{Response, Status};

use super::server::{Api, RpcResult, drain_left};
use super::status;

/// The default number of simultaneous moves: each copies a whole replica.
const DEFAULT_MAX_MOVES: u32 = 4;

impl Api {
    pub(super) async fn move_replicas(
        &self,
        request: v1::RebalanceRequest,
    ) -> RpcResult<v1::RebalanceResponse> {
        let mode = request.mode();
        let max_moves = match request.max_moves {
            0 => DEFAULT_MAX_MOVES,
            max_moves => max_moves,
        };
        let RebalancePlan { moves, under_way, left_out } = self.plan(&request.volumes).await?;
        if mode == Mode::Cancel {
            let is_meant = |volume: &String| request.volumes.is_empty() || request.volumes.contains(volume);
            let replicas = under_way.iter().filter(|left| is_meant(&left.volume));
            for replica in replicas.filter_map(|left| left.replica.as_deref()) {
                self.change(|cluster| rebalance::ask(cluster, replica, false)).await?;
            }
        }
        let free = match mode {
            Mode::Begin => (max_moves as usize).saturating_sub(under_way.len()),
            Mode::DryRun | Mode::Cancel => 0,
        };
        for found in moves.iter().take(free) {
            self.change(|cluster| rebalance::ask(cluster, &found.replica, true)).await?;
        }
        let shown = |(at, found): (usize, Move)| shown(found, at < free);
        Ok(Response::new(v1::RebalanceResponse {
            moves: moves.into_iter().enumerate().map(shown).collect(),
            under_way: under_way.into_iter().map(drain_left).collect(),
            left_out: left_out
                .into_iter()
                .map(|(reason, volumes)| v1::LeftOut { volumes, reason: reason.to_owned() })
                .collect(),
        }))
    }

    /// Plans on a thread of its own: over all volumes and nodes that takes too long for a thread that serves
    /// others.
    async fn plan(&self, only: &[String]) -> Result<RebalancePlan, Status> {
        let limits = self.settings.scheduling;
        let input = RebalanceInput::of(&self.store.state(), &self.fleet.agents(), limits, only)
            .map_err(|error| status::of_request(&error))?;
        let plan = tokio::task::spawn_blocking(|| input.plan()).await;
        plan.map_err(|error| Status::internal(format!("planning ended early: {error}")))
    }
}

fn shown(found: Move, begun: bool) -> v1::ReplicaMove {
    v1::ReplicaMove {
        volume: found.volume,
        replica: found.replica,
        from_node: found.from_node.to_string(),
        from_disk: found.from_disk,
        to_node: found.to.node.to_string(),
        to_disk: found.to.disk_path,
        gain: found.gain.as_str().to_owned(),
        begun,
    }
}
