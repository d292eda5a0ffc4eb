//! `daemon.toml`: what the operator of a node decides.

use std::path::PathBuf;

use serde::Deserialize;

/// The whole file; an empty one works.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(missing_docs, reason = "each section has its own documentation")]
pub struct DaemonConfig {
    pub daemon: DaemonSection,
    pub jobs: JobsSection,
    pub web: WebSection,
}

/// `[daemon]`: where it keeps and finds things. A change takes effect at the next start.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DaemonSection {
    /// The journal and the jobs' directories. Default: `/var/lib/xlaunch` for root, for others
    /// `$XDG_STATE_HOME/xlaunch` or `~/.local/state/xlaunch`.
    pub state_dir: Option<PathBuf>,
    /// Where it listens, unless systemd hands a socket over. Default: `/run/xlaunch/xlaunch.sock` for root, for others
    /// `$XDG_RUNTIME_DIR/xlaunch.sock`.
    pub socket: Option<PathBuf>,
    /// Members may talk to the daemon, where it runs as root.
    pub socket_group: String,
    /// Members may do what root may, and see all jobs.
    pub admin_group: String,
    /// How the agents of jobs are started.
    pub agents: Agents,
}

impl Default for DaemonSection {
    fn default() -> Self {
        Self {
            state_dir: None,
            socket: None,
            socket_group: "xlaunch".into(),
            admin_group: "xlaunch-admin".into(),
            agents: Agents::Auto,
        }
    }
}

/// How the agents of jobs are started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Agents {
    /// By systemd where the daemon is root and systemd runs the system, as processes of their own elsewhere.
    #[default]
    Auto,
    /// Each as a transient unit, `xlaunch-job-ID.service`.
    Systemd,
    /// Each as a process in a session of its own.
    Detached,
}

/// `[jobs]`: who may run what. A change takes effect at `systemctl reload`, or SIGHUP.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobsSection {
    /// Take any command, not training jobs alone. Default: only where the daemon is not root, and so runs nothing as
    /// anybody else.
    pub allow_commands: Option<bool>,
    /// Run jobs of root.
    pub allow_root: bool,
    /// Jobs that a user may have in the queue, running ones included; 0 for any number.
    pub max_per_user: u32,
    /// GPUs that jobs of one user may hold at a time; 0 for all there are.
    pub max_gpus_per_user: u32,
    /// Workers of CPU jobs at a time. Default: one per core.
    pub cpu_workers: Option<u32>,
    /// Ended jobs that are remembered, with their logs.
    pub keep: usize,
    /// GPUs, by UUID or index, that are left to others.
    pub leave_gpus: Vec<String>,
}

impl Default for JobsSection {
    fn default() -> Self {
        Self {
            allow_commands: None,
            allow_root: false,
            max_per_user: 100,
            max_gpus_per_user: 0,
            cpu_workers: None,
            keep: 1000,
            leave_gpus: Vec::new(),
        }
    }
}

/// `[web]`: the page and `/metrics`. A change takes effect at the next start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebSection {
    /// A loopback address with a port, such as `127.0.0.1:9470`, or `unix:/PATH`; nothing is served where it is absent.
    /// Whoever reaches it sees all jobs.
    pub listen: Option<String>,
}
