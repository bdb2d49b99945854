//! Has lists made by the controller, page by page.

use clap::Args;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_api::{nonempty, v1};
use tonic::Status;
use tonic::transport::Channel;

use super::{List, nodes, replicas, sort, trash, volumes};
use crate::calls::limited;
use crate::error::CtlError;

/// The number of objects in a request.
const PAGE: u32 = 500;

/// The order of a list, and whether it is watched.
#[derive(Clone, Debug, Default, Args)]
pub struct Order {
    /// Sorts by this field of -o json, like size or engine.phase
    #[arg(long, value_name = "FIELD")]
    pub sort_by: Option<String>,
    /// Shows changes until you interrupt the command
    #[arg(long, short)]
    pub watch: bool,
}

/// The choice, order and number of the objects that a command prints.
#[derive(Clone, Debug, Default, Args)]
pub struct ListOptions {
    #[command(flatten)]
    pub order: Order,
    /// Maximum number of objects; prints the command for the next ones to standard error
    #[arg(
        long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with = "watch"
    )]
    pub limit: Option<u32>,
    /// Continues after a list with --limit
    #[arg(long = "continue", value_name = "TOKEN", default_value = "", hide_default_value = true)]
    pub page_token: String,
}

impl From<Order> for ListOptions {
    fn from(order: Order) -> ListOptions {
        ListOptions { order, ..ListOptions::default() }
    }
}

/// The kind of the listed objects.
#[derive(Clone, Debug)]
pub(crate) enum ListKind {
    Volumes {
        /// Only those whose claim is in this namespace; empty: all.
        namespace: String,
        /// True if the workloads are looked up too.
        workloads: bool,
    },
    Replicas {
        /// The volume whose objects are listed; empty for all.
        volume: String,
        /// Only those on this node; empty: on all.
        node: String,
    },
    Nodes,
    Disks,
    /// Deleted replicas in the trash of all nodes.
    Trash {
        /// The volume whose trash is listed; empty for all.
        volume: String,
    },
    Orphans,
}

/// A maker of lists.
#[derive(Debug)]
pub(crate) struct Lister {
    pub(crate) client: ControllerClient<Channel>,
    pub(crate) what: ListKind,
    pub(crate) options: ListOptions,
}

/// A page of objects, or all pages together.
struct FetchedPage<T> {
    all: Vec<T>,
    /// The token of the next page; empty for the last one.
    next_token: String,
    /// The reasons why something may be missing.
    problems: Vec<String>,
}

impl Lister {
    /// Returns the whole list, or the wanted part of it.
    pub(crate) async fn list(&self) -> Result<Result<List, Status>, CtlError> {
        Ok(match self.fetch().await {
            Ok(mut list) => {
                if let Some(by) = &self.options.order.sort_by {
                    sort::sort(&mut list.entries, by)?;
                }
                Ok(list)
            }
            Err(status) => Err(status),
        })
    }

    async fn fetch(&self) -> Result<List, Status> {
        let (mut list, next_token) = match self.what.clone() {
            ListKind::Volumes { namespace, workloads } => self.volumes(namespace, workloads).await?,
            ListKind::Replicas { volume, node } => self.replicas(volume, node).await?,
            ListKind::Nodes => self.nodes(nodes::list).await?,
            ListKind::Disks => self.nodes(nodes::disks).await?,
            ListKind::Trash { volume } => self.trash(volume).await?,
            ListKind::Orphans => self.orphans().await?,
        };
        if !next_token.is_empty() {
            list.warnings.push(format!("more results: continue with --continue {next_token}"));
        }
        Ok(list)
    }

    async fn volumes(&self, namespace: String, workloads: bool) -> Result<(List, String), Status> {
        let found = self.pages(async |mut client, page_size, page_token| {
            let (namespace, name) = (namespace.clone(), String::new());
            let request = v1::ListVolumesRequest { page_size, page_token, workloads, namespace, name };
            let page = client.list_volumes(limited(request)).await?.into_inner();
            let problem = nonempty(page.workloads_problem);
            let problems = problem.map(|problem| format!("the workloads are not known: {problem}"));
            let problems = problems.into_iter().collect();
            Ok(FetchedPage { all: page.volumes, next_token: page.next_page_token, problems })
        });
        let found = found.await?;
        let mut list = volumes::list(found.all);
        list.warnings = found.problems;
        Ok((list, found.next_token))
    }

    async fn replicas(&self, volume: String, node: String) -> Result<(List, String), Status> {
        let found = self.pages(async |mut client, page_size, page_token| {
            let (volume, node) = (volume.clone(), node.clone());
            let request = v1::ListReplicasRequest { volume, page_size, page_token, node };
            let page = client.list_replicas(limited(request)).await?.into_inner();
            Ok(FetchedPage { all: page.replicas, next_token: page.next_page_token, problems: Vec::new() })
        });
        let found = found.await?;
        Ok((replicas::list(found.all), found.next_token))
    }

    async fn nodes(&self, list: fn(Vec<v1::NodeObject>) -> List) -> Result<(List, String), Status> {
        let found = self.pages(async |mut client, page_size, page_token| {
            let request = v1::ListNodesRequest { page_size, page_token };
            let page = client.list_nodes(limited(request)).await?.into_inner();
            Ok(FetchedPage { all: page.nodes, next_token: page.next_page_token, problems: Vec::new() })
        });
        let found = found.await?;
        Ok((list(found.all), found.next_token))
    }

    async fn trash(&self, volume: String) -> Result<(List, String), Status> {
        let found = self.pages(async |mut client, page_size, page_token| {
            let request = v1::ListVolumeTrashRequest { name: volume.clone(), page_size, page_token };
            let page = client.list_trash(limited(request)).await?.into_inner();
            let problems = trash::unknown(&page.silent_nodes, page.problems);
            Ok(FetchedPage { all: page.replicas, next_token: page.next_page_token, problems })
        });
        let found = found.await?;
        Ok((List { warnings: found.problems, ..trash::list(found.all) }, found.next_token))
    }

    async fn orphans(&self) -> Result<(List, String), Status> {
        let found = self.pages(async |mut client, page_size, page_token| {
            let request = v1::ListOrphansRequest { page_size, page_token };
            let page = client.list_orphans(limited(request)).await?.into_inner();
            let problems = trash::unknown(&page.silent_nodes, page.problems);
            Ok(FetchedPage { all: page.orphans, next_token: page.next_page_token, problems })
        });
        let found = found.await?;
        Ok((List { warnings: found.problems, ..trash::orphans(found.all) }, found.next_token))
    }

    /// Asks for page after page, as far as is wanted.
    async fn pages<T>(
        &self,
        ask: impl AsyncFn(ControllerClient<Channel>, u32, String) -> Result<FetchedPage<T>, Status>,
    ) -> Result<FetchedPage<T>, Status> {
        let next_token = self.options.page_token.clone();
        let mut found = FetchedPage { all: Vec::new(), next_token, problems: Vec::new() };
        while let Some(size) = self.page_after(found.all.len()) {
            let page = ask(self.client.clone(), size, found.next_token).await?;
            found.all.extend(page.all);
            found.next_token = page.next_token;
            for problem in page.problems {
                if !found.problems.contains(&problem) {
                    found.problems.push(problem);
                }
            }
            if found.next_token.is_empty() {
                break;
            }
        }
        Ok(found)
    }

    /// Returns the number of objects to request after `had`; none at the end.
    fn page_after(&self, had: usize) -> Option<u32> {
        let Some(limit) = self.options.limit else { return Some(PAGE) };
        let left = limit.saturating_sub(u32::try_from(had).unwrap_or(u32::MAX));
        Some(left.min(PAGE)).filter(|left| *left > 0)
    }
}
