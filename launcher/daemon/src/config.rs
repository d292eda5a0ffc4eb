//! `daemon.toml`: what the operator of a node decides.
//!
//! The file alone counts, but for where things are: the daemon of a user who is not root keeps them where the environment
//! says. `deploy/daemon.toml` shows every key.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xlaunch_proto::spec::Invalid;

use xlaunch_agent::config::{ConfigError, keys};

/// The file of root's daemon.
const SYSTEM_FILE: &str = "/etc/xlaunch/daemon.toml";
/// Most ended jobs that can be remembered: the journal is read at every start.
const MAX_KEPT: usize = 100_000;

/// The whole file; an empty one works.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(missing_docs, reason = "each section has its own documentation")]
pub struct DaemonConfig {
    pub daemon: DaemonSection,
    pub jobs: JobsSection,
    pub web: WebSection,
}

/// `[daemon]`: where it keeps and finds things. A change takes effect at the next start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WebSection {
    /// A loopback address with a port, such as `127.0.0.1:9470`, or `unix:/PATH`; nothing is served where it is absent.
    /// Whoever reaches it sees all jobs.
    pub listen: Option<String>,
}

/// Reads and checks the configuration: the file at `path`, or else the default one, which may be missing.
/// That is `/etc/xlaunch/daemon.toml` for root, for others `$XDG_CONFIG_HOME/xlaunch/daemon.toml` or
/// `~/.config/xlaunch/daemon.toml`.
///
/// # Errors
/// With the place in the file, what was expected, and the nearest key.
pub fn load(path: Option<&Path>) -> Result<DaemonConfig, ConfigError> {
    let root = rustix::process::geteuid().is_root();
    match path.map(PathBuf::from).or_else(|| default_file(root, |name| std::env::var_os(name))) {
        Some(file) => read(&file, path.is_some()),
        None => Ok(DaemonConfig::default()),
    }
}

fn read(file: &Path, must_exist: bool) -> Result<DaemonConfig, ConfigError> {
    match fs_err::read_to_string(file) {
        Ok(text) => parse(file, &text),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => Ok(DaemonConfig::default()),
        Err(error) => Err(ConfigError::unreadable(file, &error)),
    }
}

/// [`read`] without the file system.
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
    /// All rules that need nothing but the values. The first broken one is returned.
    fn check(&self) -> Result<(), Invalid> {
        absolute("daemon.state_dir", self.daemon.state_dir.as_deref())?;
        absolute("daemon.socket", self.daemon.socket.as_deref())?;
        if self.jobs.cpu_workers == Some(0) {
            let expected = "at least 1, or no such key: then it is one per core";
            return Err(Invalid::new("jobs.cpu_workers", "0 runs no CPU job".into(), expected.into()));
        }
        if self.jobs.keep > MAX_KEPT {
            let problem = format!("{} jobs are too many", self.jobs.keep);
            return Err(Invalid::new("jobs.keep", problem, format!("at most {MAX_KEPT}")));
        }
        if self.jobs.leave_gpus.iter().any(|gpu| gpu.trim().is_empty()) {
            let expected = "a UUID or an index, such as \"0\", each";
            return Err(Invalid::new("jobs.leave_gpus", "one names no GPU".into(), expected.into()));
        }
        self.web.listen.as_deref().map_or(Ok(()), check_listen)
    }
}

impl DaemonSection {
    /// The journal's directory, the default filled in.
    ///
    /// # Errors
    /// Where the environment of a user who is not root does not say.
    pub fn state_dir(
        &self,
        root: bool,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<PathBuf, ConfigError> {
        let default = || match root {
            true => Some("/var/lib/xlaunch".into()),
            false => Some(base(environment, "XDG_STATE_HOME", ".local/state")?.join("xlaunch")),
        };
        self.state_dir.clone().or_else(default).ok_or_else(|| {
            let problem = "neither XDG_STATE_HOME nor HOME is an absolute path";
            ConfigError::value("environment", problem, "one of them, or daemon.state_dir in daemon.toml")
        })
    }

    /// Where the daemon listens, the default filled in.
    ///
    /// # Errors
    /// As [`state_dir`](Self::state_dir).
    pub fn socket(
        &self,
        root: bool,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<PathBuf, ConfigError> {
        let default = || match root {
            true => Some("/run/xlaunch/xlaunch.sock".into()),
            false => Some(directory(environment("XDG_RUNTIME_DIR"))?.join("xlaunch.sock")),
        };
        self.socket.clone().or_else(default).ok_or_else(|| {
            let problem = "XDG_RUNTIME_DIR is not an absolute path";
            ConfigError::value("environment", problem, "one, or daemon.socket in daemon.toml")
        })
    }
}

impl JobsSection {
    /// Whether any command is taken, the default filled in.
    pub fn allow_commands(&self, root: bool) -> bool {
        self.allow_commands.unwrap_or(!root)
    }
}

/// The user's directory that this variable names, or else the one in their home.
fn base(environment: impl Fn(&str) -> Option<OsString>, variable: &str, in_home: &str) -> Option<PathBuf> {
    directory(environment(variable)).or_else(|| Some(directory(environment("HOME"))?.join(in_home)))
}

/// A directory from the environment. A relative one does not count, as the XDG specification has it.
fn directory(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|path| path.is_absolute())
}

fn absolute(key: &'static str, path: Option<&Path>) -> Result<(), Invalid> {
    match path {
        Some(path) if !path.is_absolute() => {
            let problem = format!("\"{}\" is relative, to nothing in particular", path.display());
            Err(Invalid::new(key, problem, "an absolute path".into()))
        }
        _ => Ok(()),
    }
}

/// Whoever reaches the page sees all jobs: other hosts are not to.
fn check_listen(listen: &str) -> Result<(), Invalid> {
    let problem = match (listen.strip_prefix("unix:"), listen.parse::<SocketAddr>()) {
        (Some(path), _) if Path::new(path).is_absolute() => return Ok(()),
        (Some(path), _) => format!("\"{path}\" is a relative path"),
        (None, Ok(address)) if address.ip().is_loopback() => return Ok(()),
        (None, Ok(address)) => format!("other hosts can reach {address}"),
        (None, Err(_)) => format!("\"{listen}\" is no address"),
    };
    let expected = "a loopback address with a port, such as \"127.0.0.1:9470\", or \"unix:/PATH\"";
    Err(Invalid::new("web.listen", problem, expected.into()))
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

    #[test]
    fn what_cannot_be_used_is_shown_in_place_with_what_was_expected() {
        for (text, place, expected) in [
            ("[jobs]\nkeep = 1\nalow_root = true\n", "daemon.toml:3:1", "did you mean `jobs.allow_root`?"),
            ("[wep]\n", "daemon.toml:1:", "did you mean `[web]`?"),
            ("[daemon]\nagents = \"docker\"\n", "daemon.toml:2:10", "`detached`"),
            ("[jobs]\nkeep = \"all\"\n", "daemon.toml:2:8", "usize"),
            ("[jobs]\nkeep = 100001\n", "daemon.toml:2:8", "at most 100000"),
            ("[jobs]\n\ncpu_workers = 0\n", "daemon.toml:3:15", "at least 1"),
            ("[jobs]\nleave_gpus = [\"0\", \" \"]\n", "daemon.toml:2:14", "a UUID or an index"),
            ("[daemon]\nstate_dir = \"state\"\n", "daemon.toml:2:13", "an absolute path"),
            ("[daemon]\nsocket = \"\"\n", "daemon.toml:2:10", "an absolute path"),
        ] {
            let error = error(text);
            assert!(error.starts_with(place) && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_page_is_for_this_host_alone() {
        for good in ["127.0.0.1:9470", "127.1.2.3:80", "[::1]:9470", "unix:/run/xlaunch/web.sock"] {
            config(&format!("[web]\nlisten = \"{good}\"\n"));
        }
        for bad in
            ["0.0.0.0:9470", "[::]:9470", "10.0.0.1:9470", "localhost:9470", "127.0.0.1", "unix:web", ""]
        {
            let error = error(&format!("[web]\nlisten = \"{bad}\"\n"));
            assert!(error.starts_with("daemon.toml:2:10") && error.contains("127.0.0.1:9470"), "{error}");
        }
    }

    #[test]
    fn a_file_that_was_named_must_be_there() {
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
    fn defaults_depend_on_who_runs_the_daemon() {
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
        assert!(daemon.socket(false, home).unwrap_err().to_string().contains("daemon.socket"));
        assert_eq!([true, false].map(|root| JobsSection::default().allow_commands(root)), [false, true]);

        let text = "[daemon]\nstate_dir = \"/a\"\nsocket = \"/b\"\n[jobs]\nallow_commands = true\n";
        let set = config(text);
        assert_eq!(set.daemon.state_dir(true, xdg).ok(), path("/a"));
        assert_eq!(set.daemon.socket(false, none).ok(), path("/b"));
        assert!(set.jobs.allow_commands(true));
    }

    #[test]
    fn the_file_that_a_package_installs_shows_every_key_with_its_default() {
        assert_eq!(config(DEPLOYED), DaemonConfig::default(), "everything is commented out");
        // `#key = value` is a key, `# text` is text.
        let is_key = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase());
        let lines = DEPLOYED.lines().map(|line| line.strip_prefix('#').filter(is_key).unwrap_or(line));
        let shown = config(&lines.collect::<Vec<_>>().join("\n"));

        let table: toml::Table = toml::from_str(&toml::to_string(&shown).unwrap()).unwrap();
        let mut known = keys::of(&DaemonConfig::default());
        known.retain(|key| {
            let (section, key) = key.split_once('.').unwrap();
            table.get(section).and_then(|section| section.get(key)).is_none()
        });
        assert_eq!(known, [""; 0], "not shown");

        // Optional keys show what they are for root, or, where that is no value, an example.
        let mut filled = DaemonConfig::default();
        let nothing = |_: &str| None;
        filled.daemon.state_dir = filled.daemon.state_dir(true, nothing).ok();
        filled.daemon.socket = filled.daemon.socket(true, nothing).ok();
        filled.jobs.allow_commands = Some(filled.jobs.allow_commands(true));
        (filled.jobs.cpu_workers, filled.web.listen) = (shown.jobs.cpu_workers, shown.web.listen.clone());
        assert_eq!(shown, filled);
    }
}
