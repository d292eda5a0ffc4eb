//! The daemon from start to end: what it needs is opened in the order in which it can be refused, then the manager runs until
//! a signal ends it. Jobs go on without it.
//!
//! Under systemd it says when it is ready, how it is, and, as long as the manager gets on, that it is alive.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::NodeStatus;

use super::agents::Starter;
use super::config::{self, Agents, DaemonConfig};
use super::files::JobDirs;
use super::gpus::Look;
use super::journal::{Journal, Replay};
use super::manager::{self, Setup};
use super::orders::Node;
use super::service::access::Access;
use super::state::Jobs;
use super::view::NodeView;
use super::{service, web};
use xlaunch_agent::Refusal;
use xlaunch_agent::clock;
use xlaunch_agent::devices;
use xlaunch_agent::spawn::sys;

/// Orders that may wait for the manager.
const QUEUE: usize = 256;
/// Time for answers that are under way, when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// For the socket of an earlier daemon to be free, and between looks.
const LINGER: Duration = Duration::from_secs(2);
const BREATH: Duration = Duration::from_millis(50);

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration; the default file where there is none.
    pub config: Option<PathBuf>,
    /// Not a service: agents are processes of this session's user, nobody is notified.
    pub foreground: bool,
    /// In place of `daemon.state_dir`.
    pub state_dir: Option<PathBuf>,
    /// In place of `daemon.socket`.
    pub socket: Option<PathBuf>,
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Where it cannot start. The texts are for the operator.
pub async fn run(options: &Options) -> Result<(), Refusal> {
    open_many_files();
    let config = load(options)?;
    let root = rustix::process::geteuid().is_root();
    let variable = |name: &str| std::env::var_os(name);
    let place = config.daemon.state_dir(root, variable)?;
    make_state_dir(&place, root).map_err(|error| unusable(&place, &error))?;
    let (journal, Replay { records, notes }) =
        Journal::open(&place).map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()))?;
    notes.iter().for_each(|note| warn!("{note}"));
    let mut jobs = Jobs::default();
    records.into_iter().for_each(|record| jobs.apply(record));
    let dirs = JobDirs::open(&place).map_err(|error| unusable(&place, &error))?;
    let starter = starter(&config, options.foreground, root).await?;
    let (listener, socket) = listen(&config, options.foreground, root).await?;
    let (look, gpus) = Look::start().map_err(|error| internal(&error))?;
    let (reload, jobs_config) = watch::channel(config.jobs.clone());
    let (orders, taken) = mpsc::channel(QUEUE);
    let view = watch::Sender::new(Arc::new(NodeView::default()));
    let node = Node::new(orders, view.subscribe());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let setup = Setup {
        journal,
        jobs,
        dirs,
        starter,
        look,
        gpus,
        config: jobs_config,
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        node: NodeStatus {
            host: devices::host_name(),
            version: xlaunch_proto::VERSION.into(),
            daemon_pid: std::process::id(),
            started_unix_seconds: clock::unix().as_secs(),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            ..NodeStatus::default()
        },
    };
    let notified = !options.foreground;
    let manager = tokio::spawn(manager::run(setup, taken, view, move |node| {
        if notified {
            tell(&[NotifyState::Watchdog, NotifyState::Status(&summary(node))]);
        }
    }));
    let first = node.watch().wait_for(|view| view.node.daemon_pid != 0).await.is_ok();
    if !first {
        return Err(Refusal::new(ExitCode::Internal, "the manager has not begun"));
    }
    let (end, ended) = watch::channel(false);
    let access = Access::new(config.daemon.admin_group.clone());
    let mut serving =
        vec![tokio::spawn(service::serve(listener, node.clone(), access, until(ended.clone())))];
    if let Some(listen) = &config.web.listen {
        let listen = web::Listen::parse(listen).map_err(|error| Refusal::new(ExitCode::Usage, error))?;
        let logs = service::log_tail(node.clone());
        serving.push(tokio::spawn(web::serve(listen, node.clone(), logs, until(ended.clone()))));
    }
    drop(node);
    info!("listening on {socket}");
    if notified {
        tell(&[NotifyState::Ready]);
    }
    let result = attend(options, &reload, &mut serving).await;
    if notified {
        tell(&[NotifyState::Stopping]);
    }
    info!("ending; jobs go on");
    end.send_replace(true);
    for task in serving {
        // Whatever is left of a conversation ends with the process.
        let _ = tokio::time::timeout(FAREWELL, task).await;
    }
    // With the last of those who give orders, the manager ends, whatever it was writing.
    let _ = tokio::time::timeout(FAREWELL, manager).await;
    result
}

/// Callers and agents hold descriptors: as many as this process may have.
fn open_many_files() {
    let limit = getrlimit(Resource::Nofile);
    // What was enough before is enough then.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Until a signal ends the daemon; SIGHUP reloads it.
async fn attend(
    options: &Options,
    reload: &watch::Sender<config::JobsSection>,
    serving: &mut [tokio::task::JoinHandle<io::Result<()>>],
) -> Result<(), Refusal> {
    let listen = |kind| signal(kind).map_err(|error| internal(&error));
    let (mut term, mut int, mut hup) =
        (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?, listen(SignalKind::hangup())?);
    loop {
        let any = std::future::poll_fn(|context| {
            let ended = serving.iter_mut().find_map(|task| match Pin::new(task).poll(context) {
                Poll::Ready(ended) => Some(ended),
                Poll::Pending => None,
            });
            ended.map_or(Poll::Pending, Poll::Ready)
        });
        tokio::select! {
            _ = term.recv() => return Ok(()),
            _ = int.recv() => return Ok(()),
            _ = hup.recv() => reload_now(options, reload),
            ended = any => {
                let why = match ended {
                    Ok(Ok(())) => "it ended".into(),
                    Ok(Err(error)) => error.to_string(),
                    Err(error) => error.to_string(),
                };
                return Err(Refusal::new(ExitCode::Internal, format!("failed to serve: {why}")));
            }
        }
    }
}

fn reload_now(options: &Options, reload: &watch::Sender<config::JobsSection>) {
    match load(options) {
        Ok(config) => {
            reload.send_replace(config.jobs);
            info!("the configuration is reloaded; [daemon] and [web] wait for the next start");
        }
        Err(refusal) => error!("the configuration stays as it was: {}", refusal.message),
    }
}

fn load(options: &Options) -> Result<DaemonConfig, Refusal> {
    let mut config = config::load(options.config.as_deref())?;
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    if let Some(path) = &options.state_dir {
        config.daemon.state_dir = Some(absolute(path));
    }
    if let Some(path) = &options.socket {
        config.daemon.socket = Some(absolute(path));
    }
    Ok(config)
}

/// Users pass through the state directory of root to the directories of their jobs.
fn make_state_dir(place: &Path, root: bool) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs_err::create_dir_all(place)?;
    if root {
        let mode = fs_err::metadata(place)?.permissions().mode();
        fs_err::set_permissions(place, std::fs::Permissions::from_mode(mode & 0o755 | 0o011))?;
    }
    Ok(())
}

async fn starter(config: &DaemonConfig, foreground: bool, root: bool) -> Result<Starter, Refusal> {
    let booted = sd_notify::booted().unwrap_or(false);
    let by_systemd = match config.daemon.agents {
        Agents::Auto => root && booted && !foreground,
        Agents::Systemd => true,
        Agents::Detached => false,
    };
    if !by_systemd {
        return Ok(Starter::Detached);
    }
    let bus = zbus::Connection::system().await;
    bus.map(Starter::Systemd).map_err(|error| {
        let message = format!(
            "agents are started by systemd, and D-Bus does not answer: {error}; daemon.agents says how"
        );
        Refusal::new(ExitCode::Usage, message)
    })
}

/// The socket that systemd hands over, or one of our own; and its name.
async fn listen(
    config: &DaemonConfig,
    foreground: bool,
    root: bool,
) -> Result<(UnixListener, String), Refusal> {
    if !foreground
        && let Some((fd, _)) = sd_notify::listen_fds_with_names().ok().and_then(|mut fds| fds.next())
    {
        let listener = sys::inherited_listener(fd)
            .ok_or_else(|| Refusal::new(ExitCode::Usage, "what systemd hands over is no unix socket"))?;
        let name = listener.local_addr().ok().and_then(|it| Some(it.as_pathname()?.display().to_string()));
        listener.set_nonblocking(true).map_err(|error| internal(&error))?;
        let listener = UnixListener::from_std(listener).map_err(|error| internal(&error))?;
        return Ok((listener, name.unwrap_or_else(|| "systemd's socket".into())));
    }
    let socket = config.daemon.socket(root, |name| std::env::var_os(name))?;
    let refuse = |error: &io::Error| {
        let message = format!("failed to listen on {}: {error}; daemon.socket says where", socket.display());
        Refusal::new(ExitCode::Usage, message)
    };
    if let Some(dir) = socket.parent() {
        fs_err::create_dir_all(dir).map_err(|error| refuse(&error))?;
    }
    let listener = bind(&socket, &config.daemon.socket_group).await.map_err(|error| refuse(&error))?;
    Ok((listener, socket.display().to_string()))
}

/// What a killed daemon was just starting has its socket for another moment, as it has the journal's lock.
async fn bind(socket: &Path, group: &str) -> io::Result<UnixListener> {
    let deadline = Instant::now() + LINGER;
    loop {
        match service::listener::bind(socket, Some(group)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                tokio::time::sleep(BREATH).await;
            }
            bound => return bound,
        }
    }
}

async fn until(mut ended: watch::Receiver<bool>) {
    // The daemon that is gone has ended.
    let _ = ended.wait_for(|ended| *ended).await;
}

fn summary(node: &NodeStatus) -> String {
    let drained = if node.drained.is_empty() { "" } else { "; drained" };
    format!("{} jobs run, {} wait{drained}", node.jobs_running, node.jobs_queued)
}

fn tell(states: &[NotifyState<'_>]) {
    // Without systemd there is nobody to tell.
    let _ = sd_notify::notify(states);
}

fn unusable(place: &Path, error: &io::Error) -> Refusal {
    let message =
        format!("{} cannot hold the daemon's state: {error}; daemon.state_dir says where", place.display());
    Refusal::new(ExitCode::Usage, message)
}

fn internal(error: &io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_may_open_as_many_files_as_the_operator_lets_it() {
        open_many_files();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
