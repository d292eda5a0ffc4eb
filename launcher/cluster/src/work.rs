//! The work that the agents of one job must agree on, and the rules that the coordinator applies to it.

use xlaunch_host::devices;
use xlaunch_proto::v1::{Greeting, GroupRules, Setting};

/// The work that an agent is about to run.
#[derive(Clone, Debug)]
pub struct Work {
    /// Random id of the agent's process.
    pub instance: Vec<u8>,
    /// Digest of the settings that all nodes must have in common.
    pub digest: Vec<u8>,
    /// The settings behind [`digest`](Self::digest), one by one, to name those that differ. Without secrets, as other
    /// nodes show them.
    pub settings: Vec<Setting>,
    /// The configuration as completed by files of this node; empty if there was nothing to complete.
    pub completed: Vec<u8>,
    /// Short description for messages, without secrets.
    pub text: String,
    /// Number of workers on this node.
    pub workers: u32,
    /// Rules for restarts and membership.
    pub rules: GroupRules,
    /// Run id, if the user chose one. Otherwise the coordinator chooses it.
    pub run_id: Option<String>,
    /// The number of the first run with that id that has no directory on this node.
    pub free_run: u32,
}

impl Work {
    /// Introduces the agent to the coordinator, without its place among the nodes.
    pub(super) fn greeting(&self) -> Greeting {
        Greeting {
            instance: self.instance.clone(),
            version: xlaunch_proto::VERSION.into(),
            run_id: self.run_id.clone().unwrap_or_default(),
            work: self.digest.clone(),
            work_text: self.text.clone(),
            settings: self.settings.clone(),
            host: devices::host_name(),
            workers: self.workers,
            new: true,
            rules: Some(self.rules.clone()),
            completed: self.completed.clone(),
            free_run: self.free_run,
            ..Greeting::default()
        }
    }
}
