//! A simulated agent: instances that take time, directories, and a fence.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::objects::{MemberMode, MemberStatus};
use shorthorn_controller_core::observed::{
    Detail, EngineView, Instance, InstanceKey, InstanceKind, InstanceState, ReplicaView,
};
use shorthorn_controller_core::{AgentCall, NodeName};

/// What an agent's stream says of one instance.
#[derive(Clone, Debug)]
pub enum Event {
    Set(InstanceKey, Instance),
    Gone(InstanceKey),
}

#[derive(Clone, Debug)]
pub struct SimAgent {
    pub name: NodeName,
    pub instances: BTreeMap<InstanceKey, Instance>,
    /// Names of the replica directories.
    pub directories: BTreeSet<String>,
    pub device_used: bool,
    /// Instances that a call made which its caller had given up.
    pub strays: BTreeSet<InstanceKey>,
}

impl SimAgent {
    pub fn new(name: NodeName) -> SimAgent {
        SimAgent {
            name,
            instances: BTreeMap::new(),
            directories: BTreeSet::new(),
            device_used: false,
            strays: BTreeSet::new(),
        }
    }

    /// Does what the call asks for. The events go to whoever listens.
    pub fn call(&mut self, call: &AgentCall, late: bool, events: &mut Vec<Event>) -> Result<(), String> {
        let key = call.instance();
        match call {
            AgentCall::StartReplica { create, .. } => {
                if !self.directories.contains(&key.name) {
                    if !create {
                        return Err("the directory is missing".to_owned());
                    }
                    self.directories.insert(key.name.clone());
                }
                let detail = Detail::Replica(ReplicaView::default());
                self.start(key, detail, late, events);
                Ok(())
            }
            AgentCall::StartEngine { attach, replicas, .. } => {
                if let Some(Detail::Engine(there)) = self.instances.get(&key).map(|i| &i.detail)
                    && there.attach != *attach
                {
                    return Err("another engine is there".to_owned());
                }
                let members = replicas
                    .keys()
                    .map(|id| (*id, MemberStatus { mode: MemberMode::Member, message: String::new() }));
                let view = EngineView {
                    attach: *attach,
                    phase: "starting".to_owned(),
                    members: members.collect(),
                    ..EngineView::default()
                };
                self.start(key, Detail::Engine(view), late, events);
                Ok(())
            }
            AgentCall::StopInstance { attach, .. } => self.stop(&key, *attach, events),
            AgentCall::DeleteReplica { .. } => {
                if self.instances.contains_key(&key) {
                    return Err("the replica runs".to_owned());
                }
                self.directories.remove(&key.name);
                Ok(())
            }
        }
    }

    fn start(&mut self, key: InstanceKey, detail: Detail, late: bool, events: &mut Vec<Event>) {
        if self.instances.contains_key(&key) {
            return;
        }
        if late {
            self.strays.insert(key.clone());
        }
        let instance = Instance { state: InstanceState::Starting, message: String::new(), detail };
        self.set(key, instance, events);
    }

    fn stop(&mut self, key: &InstanceKey, attach: u64, events: &mut Vec<Event>) -> Result<(), String> {
        let Some(instance) = self.instances.get(key) else { return Ok(()) };
        if let Detail::Engine(view) = &instance.detail {
            if attach != 0 && view.attach > attach {
                return Ok(());
            }
            if self.device_used && view.phase != "stopped" {
                return Err("the device is in use".to_owned());
            }
        }
        self.gone(key, events);
        Ok(())
    }

    fn set(&mut self, key: InstanceKey, instance: Instance, events: &mut Vec<Event>) {
        self.instances.insert(key.clone(), instance.clone());
        events.push(Event::Set(key, instance));
    }

    pub fn gone(&mut self, key: &InstanceKey, events: &mut Vec<Event>) {
        self.instances.remove(key);
        self.strays.remove(key);
        events.push(Event::Gone(key.clone()));
    }

    /// Everything that starts comes to serve.
    pub fn progress(&mut self, events: &mut Vec<Event>) {
        let starting: Vec<_> =
            self.instances.iter().filter(|(_, i)| i.state == InstanceState::Starting).collect();
        let running: Vec<_> =
            starting.into_iter().map(|(key, instance)| (key.clone(), instance.clone())).collect();
        for (key, mut instance) in running {
            instance.state = InstanceState::Running;
            match &mut instance.detail {
                Detail::Engine(view) => {
                    view.phase = "serving".to_owned();
                    view.endpoint = format!("/dev/longhorn/{}", key.name);
                }
                Detail::Replica(view) => view.addresses = vec![format!("tcp:{}:{}", self.name, key.name)],
            }
            self.set(key, instance, events);
        }
    }

    /// The replicas have seen a newer engine than `attach - 1`: an older one stops for good.
    pub fn fence(&mut self, volume: &str, newest: u64, events: &mut Vec<Event>) {
        let key = InstanceKey { kind: InstanceKind::Engine, name: volume.to_owned() };
        let Some(instance) = self.instances.get(&key) else { return };
        let Detail::Engine(view) = &instance.detail else { return };
        if view.attach < newest && view.phase != "stopped" {
            let view = EngineView { phase: "stopped".to_owned(), ..view.clone() };
            let message = "fenced by a newer engine".to_owned();
            let fenced = Instance { state: InstanceState::Error, message, detail: Detail::Engine(view) };
            self.set(key, fenced, events);
        }
    }

    /// One member leaves the view of an engine here.
    pub fn fail_member(&mut self, which: usize, events: &mut Vec<Event>) {
        let engines = self.instances.iter().filter(|(key, _)| key.kind == InstanceKind::Engine);
        let engines: Vec<_> = engines.map(|(key, instance)| (key.clone(), instance.clone())).collect();
        let Some((key, mut instance)) = engines.get(which % engines.len().max(1)).cloned() else { return };
        if let Detail::Engine(view) = &mut instance.detail
            && view.phase == "serving"
            && view.members.values().filter(|member| member.mode == MemberMode::Member).count() > 1
            && let Some(member) = view.members.values_mut().nth(which % 3)
        {
            member.mode = MemberMode::Failed;
            self.set(key, instance, events);
        }
    }
}
