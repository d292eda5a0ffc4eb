//! The life cycle of the daemon: configuration -> [`App`] -> serve -> drain.
//!
//! [`App::open`] acquires everything that can fail, in the order in which an error helps the operator most: state
//! directory and journal, agents, sockets, GPUs. [`App::serve`] then starts the manager and the services. On SIGTERM or
//! SIGINT the services drain, and jobs keep running. SIGHUP reloads `[jobs]` and `[hooks]`.
//!
//! Under systemd, the daemon notifies readiness and status, and feeds the watchdog for as long as the manager makes
//! progress.

mod open;
mod page;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tracing::{error, info};
use xlaunch_proto::v1::NodeStatus;
use xlaunch_spec::exit::ExitCode;

use self::open::PassedSockets;
use self::page::Page;
use super::accounting::Accounting;
use super::commands::NodeHandle;
use super::config::{self, DaemonConfig, LiveConfig, check};
use super::gpus::GpuMonitor;
use super::manager::{self, Setup};
use super::service;
use super::service::access::Access;
use super::state::Jobs;
use super::view::NodeView;
use xlaunch_host::clock;
use xlaunch_host::devices;
use xlaunch_host::memory;
use xlaunch_host::net;
use xlaunch_host::signals::survive_file_size_limit;
use xlaunch_host::spawn::{raise_open_file_limit, sys};
use xlaunch_spec::refusal::Refusal;

/// Capacity of the channel of commands to the manager.
const COMMAND_CAPACITY: usize = 256;
/// Time at shutdown for calls in progress to finish, and then again for the manager.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Command line options.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the configuration file; `None` for the default one.
    pub config: Option<PathBuf>,
    /// Run without systemd: start detached agents, ignore passed sockets, send no notifications.
    pub foreground: bool,
    /// Overrides `daemon.state_dir`.
    pub state_dir: Option<PathBuf>,
    /// Overrides `daemon.socket`.
    pub socket: Option<PathBuf>,
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// The daemon cannot start, or a service fails. The texts are for the operator.
pub async fn run(options: &Options) -> Result<(), Refusal> {
    raise_open_file_limit();
    sys::close_inherited_on_exec(&[]);
    survive_file_size_limit().map_err(|error| internal(&error))?;
    let config = load(options)?;
    let running = App::open(options, config).await?.serve().await?;
    running.until_shutdown(options).await
}

/// Checks the configuration file at this path, or the default file, on this node. Returns errors and warnings.
pub fn check_config(path: Option<&Path>) -> (Vec<String>, Vec<String>) {
    let check::Findings { errors, warnings } = check::check(path);
    (errors, warnings)
}

/// Returns the configuration file that is read if no option names one, if it can be determined.
pub fn default_config_file() -> Option<PathBuf> {
    config::file(None)
}

/// Reads the configuration, applies the options to it, and checks paths and hooks.
fn load(options: &Options) -> Result<DaemonConfig, Refusal> {
    let mut config = config::load(options.config.as_deref())?;
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    if let Some(path) = &options.state_dir {
        config.daemon.state_dir = Some(absolute(path));
    }
    if let Some(path) = &options.socket {
        config.daemon.socket = Some(absolute(path));
    }
    // Jobs with longer numbers are checked when they are submitted: a node that works must start.
    if let Some(error) = check::path_errors(options.config.as_deref(), &config, 1).into_iter().next() {
        return Err(error.into());
    }
    open::check_hooks(&config.hooks)?;
    Ok(config)
}

/// Tells where `[jobs]` is set and how a change is applied, as the end of a sentence.
fn how_to_configure(options: &Options) -> String {
    let Some(file) = config::file(options.config.as_deref()) else {
        return "in a file, and start the daemon with `--config FILE`".into();
    };
    let file = std::path::absolute(&file).unwrap_or(file);
    let file = file.display();
    if options.foreground {
        format!("in {file}, then run `kill -HUP {}`", std::process::id())
    } else {
        format!("in {file}, then run `systemctl reload xlaunch`")
    }
}

/// The daemon before it runs: all resources are acquired, and nothing is running.
struct App {
    setup: Setup,
    jobs: Jobs,
    listener: UnixListener,
    /// Path or name of `listener` for the log.
    socket: String,
    socket_group: String,
    access: Access,
    page: Option<Page>,
    reload: watch::Sender<LiveConfig>,
    shutdown: watch::Sender<bool>,
    notifier: Notifier,
}

impl App {
    async fn open(options: &Options, config: DaemonConfig) -> Result<Self, Refusal> {
        let root = rustix::process::geteuid().is_root();
        let state_dir = config.daemon.state_dir(root, |name| std::env::var_os(name))?;
        let accounting = Accounting::new(&state_dir);
        let open::State { journal, jobs, integrity, ids, dirs } = open::state(&state_dir, &accounting, root)?;
        let starter = open::agent_starter(&config, options.foreground, root).await?;
        let units = starter.running_units(&dirs).await.map_err(|error| internal(&error))?;
        let mut passed = if options.foreground { PassedSockets::default() } else { PassedSockets::take() };
        let (listener, socket) = open::socket(&config, &mut passed, root).await?;
        let page = Page::open(&config.web, passed.web()?).await?;
        let (gpu_monitor, gpus) = GpuMonitor::start().map_err(|error| internal(&error))?;
        let live = LiveConfig { jobs: config.jobs, hooks: config.hooks, reload_problem: None };
        let (reload, live_config) = watch::channel(live);
        let shutdown = watch::Sender::new(false);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = u32::try_from(cores).unwrap_or(u32::MAX);
        let setup = Setup {
            journal,
            integrity,
            ids,
            units,
            dirs,
            accounting,
            starter: Arc::new(starter),
            doctor_dir: state_dir.join("doctor"),
            gpu_monitor,
            gpus,
            config: live_config,
            how_to_configure: how_to_configure(options),
            page_problem: page.as_ref().map(Page::problem),
            node: NodeStatus {
                host: devices::host_name(),
                version: xlaunch_proto::VERSION.into(),
                daemon_pid: std::process::id(),
                started_unix_seconds: clock::unix().as_secs(),
                cores,
                memory_bytes: memory::total().unwrap_or(u64::MAX),
                ..NodeStatus::default()
            },
            shutdown: shutdown.subscribe(),
        };
        let socket_group = config.daemon.socket_group;
        let access = Access::new(config.daemon.admin_group);
        let notifier = Notifier { enabled: !options.foreground };
        Ok(Self { setup, jobs, listener, socket, socket_group, access, page, reload, shutdown, notifier })
    }

    /// Starts the manager and, once it has published a view, the services.
    async fn serve(self) -> Result<Running, Refusal> {
        let Self { setup, jobs, listener, socket, socket_group, access, page, reload, shutdown, notifier } =
            self;
        let accounting = setup.accounting.clone();
        // Opened before readiness is notified, so that from then on no signal has its default action.
        let signals = Signals::open().map_err(|error| internal(&error))?;
        let (commands, receiver) = mpsc::channel(COMMAND_CAPACITY);
        let view = watch::Sender::new(Arc::new(NodeView::default()));
        let node = NodeHandle::new(commands, view.subscribe());
        let manager = tokio::spawn(manager::run(setup, jobs, receiver, view, move |node| {
            notifier.notify(&[NotifyState::Watchdog, NotifyState::Status(&summary(node))]);
        }));
        if node.watch().wait_for(|view| view.node.daemon_pid != 0).await.is_err() {
            return Err(Refusal::new(ExitCode::Internal, "the daemon's manager failed to start"));
        }
        let mut services = JoinSet::new();
        services.spawn(service::serve(
            listener,
            Some(socket_group),
            node.clone(),
            access,
            accounting,
            net::peer_credentials,
            requested(shutdown.subscribe()),
        ));
        let page = page.map(|page| tokio::spawn(page.serve(node, shutdown.subscribe())));
        info!("listening on {socket}");
        notifier.notify(&[NotifyState::Ready]);
        Ok(Running { manager, services, page, signals, shutdown, reload, notifier })
    }
}

/// The running daemon.
struct Running {
    manager: JoinHandle<()>,
    services: JoinSet<io::Result<()>>,
    page: Option<JoinHandle<()>>,
    signals: Signals,
    shutdown: watch::Sender<bool>,
    reload: watch::Sender<LiveConfig>,
    notifier: Notifier,
}

impl Running {
    /// Handles signals until one of them or a failed service ends the daemon. Then drains.
    async fn until_shutdown(mut self, options: &Options) -> Result<(), Refusal> {
        let result = self.handle_signals(options).await;
        self.notifier.notify(&[NotifyState::Stopping]);
        info!("shutting down; jobs keep running");
        self.drain().await;
        result
    }

    async fn handle_signals(&mut self, options: &Options) -> Result<(), Refusal> {
        loop {
            tokio::select! {
                _ = self.signals.term.recv() => return Ok(()),
                _ = self.signals.int.recv() => return Ok(()),
                _ = self.signals.hup.recv() => self.reload(options),
                Some(ended) = self.services.join_next() => {
                    let why = match ended {
                        Ok(Ok(())) => "a service ended".into(),
                        Ok(Err(error)) => error.to_string(),
                        Err(error) => error.to_string(),
                    };
                    return Err(Refusal::new(ExitCode::Internal, format!("failed to serve: {why}")));
                }
            }
        }
    }

    fn reload(&self, options: &Options) {
        match load(options) {
            Ok(config) => {
                let live = LiveConfig { jobs: config.jobs, hooks: config.hooks, reload_problem: None };
                self.reload.send_replace(live);
                info!("configuration reloaded; changes of [daemon] and [web] take effect at the next start");
            }
            Err(refusal) => {
                self.reload.send_modify(|live| live.reload_problem = Some(refusal.message.clone()));
                error!("failed to reload the configuration, keeping the old one: {}", refusal.message);
            }
        }
    }

    async fn drain(mut self) {
        self.shutdown.send_replace(true);
        // Services that have not finished in time end with the process.
        let mut page = self.page.take();
        let drained = async {
            while self.services.join_next().await.is_some() {}
            if let Some(page) = &mut page {
                // It reports its own failures.
                let _ = page.await;
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, drained).await;
        self.services.abort_all();
        page.inspect(JoinHandle::abort);
        // The manager ends after the services have dropped their handles and the current record is written.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.manager).await;
    }
}

struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn open() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }
}

/// Sends notifications to systemd.
#[derive(Clone, Copy)]
struct Notifier {
    enabled: bool,
}

impl Notifier {
    fn notify(self, states: &[NotifyState<'_>]) {
        if self.enabled {
            // Fails if the daemon does not run under systemd.
            let _ = sd_notify::notify(states);
        }
    }
}

fn summary(node: &NodeStatus) -> String {
    let drained = if node.drained.is_empty() { "" } else { "; drained" };
    let problem =
        if node.config_problems.is_empty() { "" } else { "; daemon.toml has problems: `xlaunch node`" };
    format!("{} running, {} queued{drained}{problem}", node.jobs_running, node.jobs_queued)
}

/// Waits until the daemon shuts down.
async fn requested(mut shutdown: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is a shutdown too.
    let _ = shutdown.wait_for(|shutdown| *shutdown).await;
}

fn internal(error: &io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_advice_names_the_file_and_the_reload_of_this_daemon() {
        let options = |foreground| Options {
            config: Some("/a/daemon.toml".into()),
            foreground,
            state_dir: None,
            socket: None,
        };
        let kill = format!("in /a/daemon.toml, then run `kill -HUP {}`", std::process::id());
        assert_eq!(how_to_configure(&options(true)), kill);
        assert_eq!(
            how_to_configure(&options(false)),
            "in /a/daemon.toml, then run `systemctl reload xlaunch`"
        );
        assert!(how_to_configure(&Options { config: None, ..options(false) }).contains("daemon.toml"));
    }
}
