//! Commands about the whole cluster.

use shorthorn_api::v1;

use super::ControllerSession;
use crate::args::RebalanceArgs;
use crate::calls::limited;
use crate::doctor::CheckOutput;
use crate::error::CtlError;
use crate::reach::ClusterAccess;
use crate::rebalance::{describe, rebalance};
use crate::{cluster_checks, doctor, output, status};

impl ControllerSession {
    pub(super) async fn status(&mut self) -> Result<(), CtlError> {
        let request = limited(v1::GetOverviewRequest {});
        let overview = self.client.get_overview(request).await.map_err(self.error())?.into_inner();
        let is_well = status::is_well(&overview);
        output::print(&status::text(self.format, overview)?)?;
        if is_well { Ok(()) } else { Err(CtlError::Unwell("something is wrong".to_owned())) }
    }

    pub(super) async fn doctor(&mut self) -> Result<(), CtlError> {
        let mut checks = match &self.cluster {
            Some(cluster) => cluster_checks::examine(cluster).await,
            None => Vec::new(),
        };
        match self.ask_doctor().await {
            Ok(found) => checks.extend(found),
            // Messages of Kubernetes may have the reason.
            Err(error) if !checks.is_empty() => {
                let reason = self.cluster.as_ref().and_then(ClusterAccess::problem);
                checks.push(doctor::unreachable(reason.unwrap_or_else(|| error.to_string())));
            }
            Err(error) => return Err(error),
        }
        output::print(&doctor::text(self.format, &checks)?)?;
        match doctor::failures(&checks) {
            0 => Ok(()),
            failures => Err(CtlError::Unwell(format!("checks that have failed: {failures}"))),
        }
    }

    async fn ask_doctor(&mut self) -> Result<Vec<CheckOutput>, CtlError> {
        let overview = self.client.get_overview(limited(v1::GetOverviewRequest {})).await;
        let overview = overview.map_err(self.error())?.into_inner();
        let found = self.client.examine(limited(v1::ExamineRequest {})).await.map_err(self.error())?;
        let found = found.into_inner().checks.into_iter().map(CheckOutput::from);
        Ok(std::iter::once(doctor::version_check(&overview.version)).chain(found).collect())
    }

    pub(super) async fn rebalance(&mut self, args: RebalanceArgs) -> Result<String, CtlError> {
        let is_shown = args.dry_run || args.no_wait || args.cancel;
        let (answer, begun) = rebalance(&mut self.client, &self.server, args).await?;
        if !self.format.is_for_people() {
            return output::rebalance(self.format, answer, begun);
        }
        Ok(match (is_shown, begun) {
            (true, _) => describe(&answer),
            (false, 0) => "every replica has the best placement".to_owned(),
            (false, 1) => "moved 1 replica; every replica has the best placement".to_owned(),
            (false, begun) => format!("moved {begun} replicas; every replica has the best placement"),
        })
    }
}
