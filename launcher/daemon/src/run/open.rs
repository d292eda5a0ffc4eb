//! Acquires the resources of the daemon. Each function fails with a message for the operator.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::net::UnixListener;
use tracing::warn;
use xlaunch_spec::exit::ExitCode;

use super::internal;
use crate::accounting::Accounting;
use crate::agents::AgentStarter;
use crate::agents::task_cgroup::TaskCgroups;
use crate::agents::unit;
use crate::config::{Agents, DaemonConfig, HooksSection};
use crate::files::JobDirs;
use crate::ids::Ids;
use crate::journal::{Integrity, Journal, JournalError, Replay};
use crate::service;
use crate::state::{Jobs, Record};
use crate::trusted_path;
use xlaunch_host::spawn::sys;
use xlaunch_spec::refusal::Refusal;

/// Time to wait for an address in use. The sockets of a killed daemon stay open until a child that it has just forked
/// calls exec.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);
const BIND_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Contents of the state directory.
pub(super) struct State {
    pub(super) journal: Journal<Record>,
    pub(super) jobs: Jobs,
    pub(super) integrity: Integrity,
    pub(super) ids: Ids,
    pub(super) dirs: JobDirs,
}

/// Opens the state directory and replays the journal.
pub(super) fn state(dir: &Path, accounting: &Accounting, root: bool) -> Result<State, Refusal> {
    let unusable = |error: io::Error| unusable(dir, &error, sd_notify::booted().unwrap_or(false));
    let (journal, Replay { records, notes, integrity }) =
        Journal::open(dir).map_err(|error| match error {
            JournalError::Io(error) => unusable(error),
            error => Refusal::new(ExitCode::Usage, error.to_string()),
        })?;
    if root {
        make_traversable(dir).map_err(unusable)?;
    }
    notes.iter().for_each(|note| warn!("{note}"));
    let mut jobs = Jobs::default();
    records.into_iter().for_each(|record| jobs.apply(record));
    let dirs = JobDirs::open(dir).map_err(unusable)?;
    let ids = Ids::open(dir).map_err(unusable)?;
    let integrity = match integrity {
        Integrity::New if ids.reserved() == 0 && dirs.all().is_empty() && !accounting.exists() => {
            Integrity::Intact
        }
        Integrity::New => {
            warn!("{}: there are files of jobs, but no journal", dir.display());
            Integrity::Damaged
        }
        Integrity::Intact | Integrity::Torn if ids.are_beyond(jobs.submitted) => {
            warn!("{}: the journal is older than the last jobs", dir.display());
            Integrity::Damaged
        }
        integrity => integrity,
    };
    Ok(State { journal, jobs, integrity, ids, dirs })
}

/// Describes why the state directory cannot be used. `systemd`: the system was booted with systemd.
fn unusable(dir: &Path, error: &io::Error, systemd: bool) -> Refusal {
    // systemd requires that paths in ReadWritePaths= exist.
    let create = if dir.exists() { "" } else { "create it and " };
    let dir = dir.display();
    let help = if systemd && error.kind() == io::ErrorKind::ReadOnlyFilesystem {
        // `xlaunch.service` has ProtectSystem=strict.
        format!(
            "{create}let the service write there (`systemctl edit xlaunch`, then [Service] and ReadWritePaths={dir}), \
             or set daemon.state_dir to another directory"
        )
    } else {
        "set daemon.state_dir to another directory".to_owned()
    };
    let message = format!("failed to use {dir} as the state directory: {error}; {help}");
    Refusal::new(ExitCode::Usage, message)
}

/// Makes the state directory of a root daemon traversable, so that users can reach their job directories.
fn make_traversable(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs_err::metadata(dir)?.permissions().mode();
    fs_err::set_permissions(dir, std::fs::Permissions::from_mode(mode & 0o7777 | 0o011))
}

/// Checks that only root and the daemon's user can change the configured hooks.
pub(super) fn check_hooks(hooks: &HooksSection) -> Result<(), Refusal> {
    let hooks = [("prolog", &hooks.prolog), ("epilog", &hooks.epilog), ("on_end", &hooks.on_end)];
    for (key, program) in hooks {
        if let Some(Err(error)) = program.as_deref().map(trusted_path::check) {
            return Err(Refusal::new(ExitCode::Usage, format!("failed to use hooks.{key}: {error}")));
        }
    }
    Ok(())
}

/// Decides how agents are started.
pub(super) async fn agent_starter(
    config: &DaemonConfig,
    foreground: bool,
    root: bool,
) -> Result<AgentStarter, Refusal> {
    let booted = sd_notify::booted().unwrap_or(false);
    let use_systemd = match config.daemon.agents {
        Agents::Auto => root && booted && !foreground,
        Agents::Systemd => true,
        Agents::Detached => false,
    };
    if !use_systemd {
        // In the background, because D-Bus may not answer.
        tokio::spawn(warn_of_kill_mode());
        let cgroups = if booted {
            Err("systemd manages the cgroups of this host, but daemon.agents is not \"systemd\"".into())
        } else {
            TaskCgroups::open()
        };
        if let Err(reason) = &cgroups {
            warn!("jobs have no limit on processes and threads (jobs.max_tasks): {reason}");
        }
        return Ok(AgentStarter::Detached(cgroups.ok()));
    }
    let bus = zbus::Connection::system().await;
    bus.map(AgentStarter::Systemd).map_err(|error| {
        let message = format!(
            "failed to connect to D-Bus, through which systemd starts agents: {error}; start D-Bus, or set \
             daemon.agents to \"detached\""
        );
        Refusal::new(ExitCode::Usage, message)
    })
}

/// Warns if systemd ends detached agents together with the daemon, because they are in the cgroup of its service.
async fn warn_of_kill_mode() {
    let cgroups = fs_err::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some((service, is_user)) = own_service(&cgroups) else { return };
    let kill_mode = async {
        let bus =
            if is_user { zbus::Connection::session().await? } else { zbus::Connection::system().await? };
        unit::kill_mode(bus, service).await
    };
    if !matches!(kill_mode.await.as_deref(), Ok("process" | "none")) {
        let user = if is_user { " --user" } else { "" };
        warn!(
            "a restart of {service} ends all jobs unless it has KillMode=process: check with `systemctl{user} show -p \
             KillMode {service}`"
        );
    }
}

/// Returns the service whose cgroup these lines of `/proc/PID/cgroup` name, and whether it is one of a user's systemd.
fn own_service(cgroups: &str) -> Option<(&str, bool)> {
    // Version 2 of cgroups, and systemd's hierarchy of version 1.
    let mut paths = cgroups
        .lines()
        .filter_map(|line| Some(line.split_once("::").or_else(|| line.split_once(":name=systemd:"))?.1));
    let service = paths.find(|path| path.ends_with(".service"))?;
    Some((service.rsplit('/').next()?, service.contains("/user@")))
}

/// Listening sockets that systemd has passed, each at most once.
#[derive(Debug, Default)]
pub(super) struct PassedSockets {
    grpc: Option<i32>,
    web: Option<i32>,
}

impl PassedSockets {
    /// Takes the passed sockets. `xlaunch-web.socket` names its socket `web`.
    pub(super) fn take() -> Self {
        let mut passed = Self::default();
        for (fd, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
            let place = if name == "web" { &mut passed.web } else { &mut passed.grpc };
            place.get_or_insert(fd);
        }
        passed
    }

    /// Returns the listener for the page, if one was passed.
    pub(super) fn web(&mut self) -> Result<Option<std::net::TcpListener>, Refusal> {
        let Some(fd) = self.web.take() else { return Ok(None) };
        let listener = sys::inherited_tcp_listener(fd).ok_or_else(|| {
            Refusal::new(
                ExitCode::Usage,
                "the socket `web` that systemd passes is not a listening TCP socket",
            )
        })?;
        listener.set_nonblocking(true).map_err(|error| internal(&error))?;
        Ok(Some(listener))
    }
}

/// Returns the socket that systemd has passed, or binds one, with its name for the log.
pub(super) async fn socket(
    config: &DaemonConfig,
    passed: &mut PassedSockets,
    root: bool,
) -> Result<(UnixListener, String), Refusal> {
    if let Some(fd) = passed.grpc.take() {
        let listener = sys::inherited_listener(fd).ok_or_else(|| {
            Refusal::new(ExitCode::Usage, "the socket that systemd passes is not a listening unix socket")
        })?;
        let name = listener.local_addr().ok().and_then(|it| Some(it.as_pathname()?.display().to_string()));
        listener.set_nonblocking(true).map_err(|error| internal(&error))?;
        let listener = UnixListener::from_std(listener).map_err(|error| internal(&error))?;
        return Ok((listener, name.unwrap_or_else(|| "systemd's socket".into())));
    }
    let socket = config.daemon.socket(root, |name| std::env::var_os(name))?;
    let failed = |error: io::Error| {
        let message =
            format!("failed to listen on {}: {error}; set daemon.socket to another path", socket.display());
        Refusal::new(ExitCode::Usage, message)
    };
    if let Some(dir) = socket.parent() {
        trusted_path::check_parent(&socket).map_err(failed)?;
        fs_err::create_dir_all(dir).map_err(failed)?;
        trusted_path::check_parent(&socket).map_err(failed)?;
    }
    let group = config.daemon.socket_group.as_str();
    let bind = async || service::listener::bind(&socket, Some(group));
    let listener = retry_while_in_use(bind).await.map_err(failed)?;
    Ok((listener, socket.display().to_string()))
}

/// Calls `bind` until it succeeds, for up to [`BIND_TIMEOUT`] while the address is in use.
pub(super) async fn retry_while_in_use<T>(bind: impl AsyncFn() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        match bind().await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                tokio::time::sleep(BIND_RETRY_DELAY).await;
            }
            bound => return bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_only_state_directory_under_systemd_is_explained_with_the_setting_of_the_unit() {
        let text = |dir: &str, systemd| {
            unusable(Path::new(dir), &io::ErrorKind::ReadOnlyFilesystem.into(), systemd).message
        };
        assert!(text("/", true).contains("; let the service write there (`systemctl edit xlaunch`"));
        let missing = "/nonexistent/xlaunch";
        assert!(text(missing, true).contains("; create it and let the service write there"));
        assert!(text(missing, true).contains("ReadWritePaths=/nonexistent/xlaunch)"));
        assert!(text(missing, false).ends_with("; set daemon.state_dir to another directory"));
    }

    #[test]
    fn service_that_the_daemon_runs_in_is_found_by_its_cgroup() {
        assert_eq!(own_service("0::/system.slice/lab.service\n"), Some(("lab.service", false)));
        let user = "/user.slice/user-1000.slice/user@1000.service";
        assert_eq!(own_service(&format!("0::{user}/app.slice/lab.service\n")), Some(("lab.service", true)));
        let first = format!("8:pids:{user}\n1:name=systemd:/system.slice/lab.service\n0::/\n");
        assert_eq!(own_service(&first), Some(("lab.service", false)));
        let session = format!("8:pids:{user}\n0::/user.slice/user-1000.slice/session-3.scope\n");
        assert_eq!(own_service(&session), None);
    }
}
