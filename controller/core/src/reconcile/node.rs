use super::{Context, Sight, sight};
use crate::objects::{ConditionType, DiskSpec, DiskStatus, Finding, Node};
use crate::observed::AgentView;
use crate::{Decision, Label, NodeName};

pub(super) fn reconcile(context: &Context<'_>, name: &str) -> Decision {
    let mut decision = Decision::nothing();
    let Ok(node_name) = NodeName::new(name) else { return decision };
    let view = context.agents.get(&node_name);
    let stored = context.world.nodes.get(name);
    let mut node = match (stored, view) {
        (Some(node), _) => node.clone(),
        (None, Some(_)) => Node::new(name, context.now),
        (None, None) => return decision,
    };
    if let Some(view) = view.filter(|view| !view.from_object) {
        node.spec.address.clone_from(&view.address);
    }
    let ready = match sight(context, &node_name) {
        Sight::Clear(view) => {
            take_over(&mut node, view);
            Some(Finding::Well)
        }
        Sight::Gone(reason) => Some(Finding::wrong("AgentUnreachable", reason)),
        Sight::Blurred(wait) => {
            decision.again_after(wait);
            None
        }
    };
    if let Some(finding) = ready {
        node.status.conditions.set(ConditionType::Ready, finding, context.now);
    }
    if stored != Some(&node) {
        decision.write(node);
    }
    decision
}

/// What the agent says, and the disks that its administrator gave it.
fn take_over(node: &mut Node, view: &AgentView) {
    if let Some(info) = &view.info {
        node.status.version.clone_from(&info.version);
        node.status.data_address.clone_from(&info.data_address);
        node.status.zone = Label::new(&info.zone).ok();
        node.status.frontends.clone_from(&info.frontends);
    }
    for (path, disk) in &view.disks {
        node.spec.disks.entry(path.clone()).or_insert_with(|| DiskSpec::of_new(disk.total_bytes));
    }
    let known = |path: &String| match view.disks.get(path) {
        Some(disk) => DiskStatus::of(disk),
        None => DiskStatus {
            problem: format!(
                "the agent does not know this disk: run shorthornctl disk add {} {path}",
                node.metadata.name
            ),
            ..DiskStatus::default()
        },
    };
    node.status.disk_status = node.spec.disks.keys().map(|path| (path.clone(), known(path))).collect();
}
