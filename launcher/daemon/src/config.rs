//! `daemon.toml`: the operator's configuration. `deploy/daemon.toml` shows every key.
//!
//! The environment determines only the default directories of a daemon that does not run as root.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use xlaunch_spec::job::Invalid;

use super::trusted_path;
use super::web::Listen;
use xlaunch_agent::config::{self, ConfigError, keys};

pub(crate) mod check;
mod values;

pub(crate) use values::{MemoryLimit, Size, Span};

/// The default file of a daemon that runs as root.
const SYSTEM_FILE: &str = "/etc/xlaunch/daemon.toml";
/// Maximum of `jobs.keep`. The journal is read at every start, so it must not grow too large.
const MAX_KEPT: usize = 100_000;
/// Minimum of `jobs.max_tasks`: a job has an agent and a reaper in addition to its workers.
const MIN_TASKS: u64 = 64;
/// Minimum of `jobs.max_output`.
const MIN_OUTPUT_BYTES: u64 = 64 << 10;

/// The whole file. An empty file is valid.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DaemonConfig {
    pub(crate) daemon: DaemonSection,
    pub(crate) jobs: JobsSection,
    pub(crate) web: WebSection,
    pub(crate) hooks: HooksSection,
}

/// `[daemon]`: paths, groups and how agents are started. A change takes effect at the next start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DaemonSection {
    /// The directory of the journal and the job directories. Default: `/var/lib/xlaunch` for root, for others
    /// `$XDG_STATE_HOME/xlaunch` or `~/.local/state/xlaunch`.
    pub(crate) state_dir: Option<PathBuf>,
    /// The gRPC socket, unless systemd passes one. Default: `/run/xlaunch/xlaunch.sock` for root, for others
    /// `$XDG_RUNTIME_DIR/xlaunch.sock`.
    pub(crate) socket: Option<PathBuf>,
    /// Group whose members may connect to the daemon if it runs as root.
    pub(crate) socket_group: String,
    /// Group whose members have the same rights as root in the daemon: they can see and cancel all jobs, and drain.
    pub(crate) admin_group: String,
    pub(crate) agents: Agents,
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

/// The way in which agents are started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Agents {
    /// `Systemd` if the daemon runs as root on a systemd system, otherwise `Detached`.
    #[default]
    Auto,
    /// Each agent is a transient unit, `xlaunch-job-ID.service`.
    Systemd,
    /// Each agent is a process in its own session.
    Detached,
}

/// `[jobs]`: which jobs are accepted, and limits. A change takes effect at `systemctl reload` or SIGHUP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct JobsSection {
    /// Accept commands in addition to training jobs. Default: true unless the daemon runs as root.
    pub(crate) allow_commands: Option<bool>,
    /// Accept jobs of root.
    pub(crate) allow_root: bool,
    /// Maximum number of queued and running jobs of a user; 0 for no limit.
    pub(crate) max_per_user: u32,
    /// Maximum number of GPUs that a user's jobs hold at a time; 0 for no limit.
    pub(crate) max_gpus_per_user: u32,
    /// Maximum memory that the jobs of a user may reserve at a time, in addition to the shares of their GPUs. Default:
    /// a quarter of the node's memory if the daemon runs as root, otherwise no limit.
    pub(crate) max_memory_per_user: Option<MemoryLimit>,
    /// Maximum number of workers of CPU jobs that run at a time. Default: the number of cores.
    pub(crate) cpu_workers: Option<u32>,
    /// Maximum number of processes and threads of a job, under systemd. Default: a quarter of the node's maximum.
    pub(crate) max_tasks: Option<u64>,
    /// Maximum output kept of each stream of each worker of a command.
    pub(crate) max_output: Size,
    /// Number of ended jobs per user that are kept, with their logs.
    pub(crate) keep: usize,
    /// Maximum time that a job's workers get to stop before they are killed, whatever the job requests.
    pub(crate) max_grace: Span,
    /// GPUs, by UUID or index, that jobs must not use.
    pub(crate) leave_gpus: Vec<String>,
    /// Time limit of jobs that do not set one. Default: `max_time`.
    pub(crate) default_time: Option<Span>,
    /// Maximum time limit of a job. Default: none.
    pub(crate) max_time: Option<Span>,
    /// Half-life of a user's past usage in the order of the queue.
    pub(crate) fair_share_half_life: Span,
}

impl Default for JobsSection {
    fn default() -> Self {
        Self {
            allow_commands: None,
            allow_root: false,
            max_per_user: 100,
            max_gpus_per_user: 0,
            max_memory_per_user: None,
            cpu_workers: None,
            max_tasks: None,
            max_output: Size(16 << 20),
            keep: 1000,
            max_grace: Span(Duration::from_secs(120)),
            leave_gpus: Vec::new(),
            default_time: None,
            max_time: None,
            fair_share_half_life: Span(Duration::from_secs(7 * 86_400)),
        }
    }
}

/// `[web]`: the page and `/metrics`. A change takes effect at the next start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct WebSection {
    /// A loopback address with a port, such as `127.0.0.1:9470`, or `unix:/PATH`. By default, nothing is served. Every
    /// user who can connect sees all jobs.
    pub(crate) listen: Option<String>,
    /// Show the logs of all jobs to every user who can connect.
    pub(crate) show_logs: bool,
}

/// The user that a hook runs as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunAs {
    /// The daemon's user.
    #[default]
    Root,
    /// The job's user.
    User,
}

/// `[hooks]`: programs of the operator around each job. A change takes effect at `systemctl reload` or SIGHUP: the next
/// hook to run is the new one, also for jobs that have started before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HooksSection {
    /// Runs before a job starts. If it fails, the job does not start.
    pub(crate) prolog: Option<PathBuf>,
    pub(crate) prolog_as: RunAs,
    /// Runs after the processes of a job are gone, before its GPUs are freed.
    pub(crate) epilog: Option<PathBuf>,
    pub(crate) epilog_as: RunAs,
    /// Runs after the end of a job is recorded.
    pub(crate) on_end: Option<PathBuf>,
    pub(crate) on_end_as: RunAs,
    /// Time limit of each hook.
    pub(crate) timeout: Span,
}

impl Default for HooksSection {
    fn default() -> Self {
        Self {
            prolog: None,
            prolog_as: RunAs::Root,
            epilog: None,
            epilog_as: RunAs::Root,
            on_end: None,
            on_end_as: RunAs::User,
            timeout: Span(Duration::from_secs(60)),
        }
    }
}

/// Reads and validates the file at `path`, or the default file, which may be missing. The default is
/// `/etc/xlaunch/daemon.toml` for root, and `$XDG_CONFIG_HOME/xlaunch/daemon.toml` or `~/.config/xlaunch/daemon.toml`
/// for other users.
pub(crate) fn load(path: Option<&Path>) -> Result<DaemonConfig, ConfigError> {
    match file(path) {
        Some(file) => read(&file, path.is_some()),
        None => Ok(DaemonConfig::default()),
    }
}

/// Returns the file that [`load`] reads; `None` if the environment does not determine a default file.
pub(crate) fn file(path: Option<&Path>) -> Option<PathBuf> {
    let root = rustix::process::geteuid().is_root();
    path.map(PathBuf::from).or_else(|| default_file(root, |name| std::env::var_os(name)))
}

fn read(file: &Path, must_exist: bool) -> Result<DaemonConfig, ConfigError> {
    // The file names programs that the daemon runs, and grants permissions, so only trusted users may write it.
    if let Err(error) = trusted_path::check(file) {
        return Err(ConfigError::unreadable(file, &error));
    }
    match config::read(file) {
        Ok(bytes) => parse(file, &config::decode(file, bytes)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => Ok(DaemonConfig::default()),
        Err(error) => Err(ConfigError::unreadable(file, &error)),
    }
}

/// [`read`] without file system access.
fn parse(path: &Path, text: &str) -> Result<DaemonConfig, ConfigError> {
    let known = || keys::of(&DaemonConfig::default());
    let config: DaemonConfig =
        toml::from_str(text).map_err(|error| ConfigError::in_file(path, text, &known(), &error))?;
    config.check().map_err(|invalid| ConfigError::invalid(path, text, &invalid))?;
    Ok(config)
}

fn default_file(root: bool, environment: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if root {
        return Some(SYSTEM_FILE.into());
    }
    Some(base(environment, "XDG_CONFIG_HOME", ".config")?.join("xlaunch/daemon.toml"))
}

impl DaemonConfig {
    /// Validates the values. Returns the first invalid one.
    fn check(&self) -> Result<(), Invalid> {
        absolute("daemon.state_dir", self.daemon.state_dir.as_deref())?;
        absolute("daemon.socket", self.daemon.socket.as_deref())?;
        absolute("hooks.prolog", self.hooks.prolog.as_deref())?;
        absolute("hooks.epilog", self.hooks.epilog.as_deref())?;
        absolute("hooks.on_end", self.hooks.on_end.as_deref())?;
        if self.jobs.cpu_workers == Some(0) {
            let expected = "at least 1; leave the key out for one per core";
            return Err(Invalid::new(
                "jobs.cpu_workers",
                "0 CPU workers cannot run a job".into(),
                expected.into(),
            ));
        }
        if self.jobs.keep > MAX_KEPT {
            let problem = format!("{} jobs are too many", self.jobs.keep);
            return Err(Invalid::new("jobs.keep", problem, format!("at most {MAX_KEPT}")));
        }
        if let Some(tasks) = self.jobs.max_tasks.filter(|tasks| *tasks < MIN_TASKS) {
            let problem = format!("{tasks} processes and threads are too few for a job");
            return Err(Invalid::new("jobs.max_tasks", problem, format!("at least {MIN_TASKS}")));
        }
        if self.jobs.max_output.0 < MIN_OUTPUT_BYTES {
            let problem = "less would not hold the end of a log".into();
            return Err(Invalid::new("jobs.max_output", problem, "at least \"64K\"".into()));
        }
        let positive = [
            ("jobs.max_grace", Some(self.jobs.max_grace)),
            ("hooks.timeout", Some(self.hooks.timeout)),
            ("jobs.default_time", self.jobs.default_time),
            ("jobs.max_time", self.jobs.max_time),
            ("jobs.fair_share_half_life", Some(self.jobs.fair_share_half_life)),
        ];
        if let Some((key, _)) = positive.into_iter().find(|(_, span)| *span == Some(Span(Duration::ZERO))) {
            return Err(Invalid::new(key, "0 is not a time".into(), "at least \"1s\"".into()));
        }
        if let Some(gpu) = self.jobs.leave_gpus.iter().find(|gpu| !is_gpu_name(gpu)) {
            let expected = "a list in which each item is a UUID or an index, such as \"0\"";
            let problem = format!("`{gpu}` is neither");
            return Err(Invalid::new("jobs.leave_gpus", problem, expected.into()));
        }
        let listen = self.web.listen.as_deref().map(Listen::parse).transpose();
        listen.map(drop).map_err(|problem| Invalid::new("web.listen", problem, Listen::EXPECTED.into()))
    }
}

/// Returns whether this can be the name of a GPU: an index, or a UUID such as `GPU-5c0a1f3e-...`.
fn is_gpu_name(name: &str) -> bool {
    name.parse::<u32>().is_ok()
        || ["GPU-", "MIG-"].iter().any(|kind| name.strip_prefix(kind).is_some_and(|id| !id.trim().is_empty()))
}

/// The sections in effect that a reload replaces.
#[derive(Clone, Debug, Default)]
pub(crate) struct LiveConfig {
    pub(crate) jobs: JobsSection,
    pub(crate) hooks: HooksSection,
    /// The reason why the last reload failed, in which case the previous configuration is still in effect.
    pub(crate) reload_problem: Option<String>,
}

impl DaemonSection {
    /// Returns the state directory or its default.
    ///
    /// # Errors
    /// The default is needed, and the environment of a user other than root does not determine it.
    pub(crate) fn state_dir(
        &self,
        root: bool,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<PathBuf, ConfigError> {
        let default = || {
            if root {
                Some("/var/lib/xlaunch".into())
            } else {
                Some(base(environment, "XDG_STATE_HOME", ".local/state")?.join("xlaunch"))
            }
        };
        self.state_dir.clone().or_else(default).ok_or_else(|| {
            let problem = "neither XDG_STATE_HOME nor HOME is an absolute path";
            ConfigError::value("environment", problem, "one of them, or daemon.state_dir in daemon.toml")
        })
    }

    /// Returns the path of the socket or its default.
    ///
    /// # Errors
    /// Same as for [`state_dir`](Self::state_dir).
    pub(crate) fn socket(
        &self,
        root: bool,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<PathBuf, ConfigError> {
        match (&self.socket, environment("XDG_RUNTIME_DIR").filter(|value| !value.is_empty())) {
            (Some(socket), _) => Ok(socket.clone()),
            (None, _) if root => Ok("/run/xlaunch/xlaunch.sock".into()),
            (None, Some(directory)) if Path::new(&directory).is_absolute() => {
                Ok(PathBuf::from(directory).join("xlaunch.sock"))
            }
            (None, other) => {
                let problem = match other {
                    Some(_) => "XDG_RUNTIME_DIR is not an absolute path",
                    None => "XDG_RUNTIME_DIR is not set, as in a session of `su` or in a container",
                };
                let expected = "`--socket PATH`, here and for clients, or daemon.socket in daemon.toml";
                Err(ConfigError::value("environment", problem, expected))
            }
        }
    }
}

impl JobsSection {
    /// Returns whether commands are accepted: the value of the key or its default.
    pub(crate) fn allow_commands(&self, root: bool) -> bool {
        self.allow_commands.unwrap_or(!root)
    }
}

/// Returns the directory in this XDG variable, or its default below the home directory.
fn base(environment: impl Fn(&str) -> Option<OsString>, variable: &str, in_home: &str) -> Option<PathBuf> {
    directory(environment(variable)).or_else(|| Some(directory(environment("HOME"))?.join(in_home)))
}

/// Parses a directory from the environment. Relative paths are ignored, as the XDG specification requires.
fn directory(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

fn absolute(key: &'static str, path: Option<&Path>) -> Result<(), Invalid> {
    match path {
        Some(path) if !path.is_absolute() => {
            let problem = format!("\"{}\" is a relative path", path.display());
            Err(Invalid::new(key, problem, "an absolute path".into()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPLOYED: &str = include_str!("../../../deploy/daemon.toml");

    fn config(text: &str) -> DaemonConfig {
        parse(Path::new("daemon.toml"), text).unwrap()
    }

    fn error(text: &str) -> String {
        parse(Path::new("daemon.toml"), text).unwrap_err().to_string()
    }

    /// Returns each file, followed by the message that the user gets.
    fn errors<'a>(files: impl IntoIterator<Item = &'a str>) -> String {
        files.into_iter().map(|text| format!("{text}=>\n{}\n\n", error(text))).collect()
    }

    #[test]
    fn invalid_value_is_reported_with_position_and_expectation() {
        let files = [
            "[jobs]\nkeep = 1\nalow_root = true\n",
            "[wep]\n",
            "[daemon]\nagents = \"docker\"\n",
            "[jobs]\nkeep = \"all\"\n",
            "[jobs]\nkeep = 100001\n",
            "[jobs]\n\ncpu_workers = 0\n",
            "[jobs]\nmax_time = \"0h\"\n",
            "[jobs]\nmax_grace = \"0s\"\n",
            "[hooks]\ntimeout = \"0s\"\n",
            "[jobs]\nleave_gpus = [\"GPU 0\"]\n",
            "[jobs]\nleave_gpus = [\"GPU-\"]\n",
            "[jobs]\nmax_tasks = 0\n",
            "[jobs]\nmax_output = \"1K\"\n",
            "[jobs]\nmax_memory_per_user = \"0%\"\n",
            "[jobs]\nmax_memory_per_user = \"lots\"\n",
            "[jobs]\nleave_gpus = [\"0\", \" \"]\n",
            "[daemon]\nstate_dir = \"state\"\n",
            "[daemon]\nsocket = \"\"\n",
            "[hooks]\nepilog = \"bin/x\"\n",
            "[hooks]\nprolog_as = \"me\"\n",
        ];
        insta::assert_snapshot!("errors", errors(files));
    }

    #[test]
    fn page_listens_on_loopback_or_a_unix_socket_only() {
        for good in ["127.0.0.1:9470", "127.1.2.3:80", "[::1]:9470", "unix:/run/xlaunch/web.sock"] {
            config(&format!("[web]\nlisten = \"{good}\"\n"));
        }
        let bad = [
            "0.0.0.0:9470",
            "[::]:9470",
            "10.0.0.1:9470",
            "127.0.0.1:0",
            "localhost:9470",
            "127.0.0.1",
            "unix:web",
            "",
        ];
        let files = bad.map(|listen| format!("[web]\nlisten = \"{listen}\"\n"));
        insta::assert_snapshot!("listen", errors(files.iter().map(String::as_str)));
    }

    #[test]
    fn only_the_default_file_may_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.toml");
        let error = load(Some(&file)).unwrap_err().to_string();
        assert!(error.contains("daemon.toml") && error.contains("is the path right?"), "{error}");
        assert_eq!(read(&file, false).unwrap(), DaemonConfig::default(), "the default file may be missing");
        assert!(read(dir.path(), false).is_err(), "but not be a directory");
        fs_err::write(&file, "[jobs]\nkeep = 5\n").unwrap();
        assert_eq!(load(Some(&file)).unwrap().jobs.keep, 5);
    }

    #[test]
    fn defaults_depend_on_the_user_of_the_daemon() {
        let xdg = |name: &str| Some(OsString::from(format!("/xdg/{name}")));
        let home = |name: &str| (name == "HOME").then(|| OsString::from("/home/me"));
        let relative = |name: &str| Some(OsString::from(if name == "HOME" { "/home/me" } else { "x" }));
        let none = |_: &str| None;
        let path = |path: &str| Some(PathBuf::from(path));

        assert_eq!(default_file(true, xdg), path("/etc/xlaunch/daemon.toml"));
        assert_eq!(default_file(false, xdg), path("/xdg/XDG_CONFIG_HOME/xlaunch/daemon.toml"));
        assert_eq!(default_file(false, relative), path("/home/me/.config/xlaunch/daemon.toml"));
        assert_eq!(default_file(false, none), None);

        let daemon = DaemonSection::default();
        assert_eq!(daemon.state_dir(true, none).ok(), path("/var/lib/xlaunch"));
        assert_eq!(daemon.state_dir(false, xdg).ok(), path("/xdg/XDG_STATE_HOME/xlaunch"));
        assert_eq!(daemon.state_dir(false, home).ok(), path("/home/me/.local/state/xlaunch"));
        assert!(daemon.state_dir(false, none).unwrap_err().to_string().contains("daemon.state_dir"));
        assert_eq!(daemon.socket(true, none).ok(), path("/run/xlaunch/xlaunch.sock"));
        assert_eq!(daemon.socket(false, xdg).ok(), path("/xdg/XDG_RUNTIME_DIR/xlaunch.sock"));
        let unset = daemon.socket(false, home).unwrap_err().to_string();
        assert!(unset.contains("is not set") && unset.contains("--socket PATH"), "{unset}");
        let relative = daemon.socket(false, relative).unwrap_err().to_string();
        assert!(relative.contains("not an absolute path"), "{relative}");
        assert_eq!([true, false].map(|root| JobsSection::default().allow_commands(root)), [false, true]);

        let text = "[daemon]\nstate_dir = \"/a\"\nsocket = \"/b\"\n[jobs]\nallow_commands = true\n";
        let set = config(text);
        assert_eq!(set.daemon.state_dir(true, xdg).ok(), path("/a"));
        assert_eq!(set.daemon.socket(false, none).ok(), path("/b"));
        assert!(set.jobs.allow_commands(true));
    }

    #[test]
    fn packaged_file_shows_every_key_with_its_default() {
        assert_eq!(config(DEPLOYED), DaemonConfig::default(), "everything is commented out");
        // `#key = value` is a commented-out key, `# text` a comment.
        let is_key = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase());
        let lines = DEPLOYED.lines().map(|line| line.strip_prefix('#').filter(is_key).unwrap_or(line));
        let shown = config(&lines.collect::<Vec<_>>().join("\n"));

        let table: toml::Table = toml::from_str(&toml::to_string(&shown).unwrap()).unwrap();
        let mut known = keys::of(&DaemonConfig::default());
        known.retain(|key| {
            let (section, key) = key.split_once('.').unwrap();
            table.get(section).and_then(|section| section.get(key)).is_none()
        });
        assert_eq!(known, [""; 0], "missing from deploy/daemon.toml");

        // Optional keys show their default for root or, if there is none, an example.
        let mut filled = DaemonConfig::default();
        let nothing = |_: &str| None;
        filled.daemon.state_dir = filled.daemon.state_dir(true, nothing).ok();
        filled.daemon.socket = filled.daemon.socket(true, nothing).ok();
        filled.jobs.allow_commands = Some(filled.jobs.allow_commands(true));
        (filled.jobs.cpu_workers, filled.web.listen) = (shown.jobs.cpu_workers, shown.web.listen.clone());
        (filled.jobs.max_tasks, filled.jobs.max_memory_per_user) =
            (shown.jobs.max_tasks, shown.jobs.max_memory_per_user);
        (filled.jobs.default_time, filled.jobs.max_time) = (shown.jobs.default_time, shown.jobs.max_time);
        let hooks = shown.hooks.clone();
        (filled.hooks.prolog, filled.hooks.epilog, filled.hooks.on_end) =
            (hooks.prolog, hooks.epilog, hooks.on_end);
        assert_eq!(shown, filled);
    }
}
