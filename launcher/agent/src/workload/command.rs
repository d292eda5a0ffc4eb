//! Jobs that run an arbitrary command under torchrun's contract: environment, master port, CPU affinity, output and
//! heartbeats of the workers.
//!
//! Heartbeats show how far the job is; a rank whose heartbeats stop is considered hung (see `hangs`). The driver
//! terminates hung ranks after the evidence is collected, which with `--flight-recorder` includes the recorders' dumps.

mod hangs;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::env;
use xlaunch_proto::v1::JobKind;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;

use crate::base_environment::BaseEnvironment;
use crate::ending::Ending;
use crate::interpreter;
use crate::logs::Output;
use crate::python::flight_recorder::FlightRecorders;
use crate::python::preload::PreloadPlan;
use crate::rendezvous::message::Message;
use crate::report;
use crate::resolved_command::{LogOptions, ResolvedCommand, quote_line};
use crate::run_dir::RunDir;
use crate::state::{Event, Job, Kind, Rules};
use crate::status::board::{self, Board};
use crate::template::fill;
use crate::waiting::Group;
use crate::worker_environment::{self, CommandGroup, Shared};
use crate::workload::heartbeat::HeartbeatMonitor;
use crate::workload::heartbeat::files::{self, HeartbeatFiles};
use crate::workload::{Hang, Workload};
use hangs::{NodeStates, Unsent};
use xlaunch_cluster::Assignment;
use xlaunch_host::devices;
use xlaunch_host::network::Interface;
use xlaunch_host::spawn::affinity::Affinity;
use xlaunch_host::spawn::port::MasterPort;
use xlaunch_host::spawn::{Options, terminal};

/// Rotation size of log files that are removed with the run. They are in a temporary directory, which is often a tmpfs.
const TEMPORARY_LOG_BYTES: u64 = 8 << 20;
/// The reply to a request for a checkpoint.
const NO_CHECKPOINT: &str = "xlaunch saves checkpoints of its own trainer only; this launch runs a command";
/// Longest wait at the end of a job for the console to take xlaunch's last lines.
const CONSOLE_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// A job that runs a command, ready to start.
#[derive(Debug)]
pub struct CommandPlan<'a> {
    pub command: &'a ResolvedCommand,
    /// CPU affinity of each worker, indexed by local rank.
    pub affinities: Vec<Affinity>,
    /// The environment that the workers inherit.
    pub base: &'a BaseEnvironment,
    /// The network interface of this node's address, if the job may have several nodes.
    pub interface: Option<Interface>,
}

pub(crate) struct CommandWorkload<'a> {
    command: &'a ResolvedCommand,
    affinities: Vec<Affinity>,
    base: &'a BaseEnvironment,
    run: &'a RunDir,
    output: Output,
    interface: Option<Interface>,
    may_have_peers: bool,
    /// Reserved while the attempt runs; `None` if the user chose a port.
    port: Option<MasterPort>,
    attempt: Attempt,
    /// Heartbeats of all ranks on the node of rank 0; of the node's own ranks on the others.
    heartbeats: HeartbeatMonitor,
    /// Messages to the coordinator.
    messages: mpsc::UnboundedSender<FromAgent>,
}

/// The state of one attempt.
#[derive(Default)]
struct Attempt {
    /// Counted from 0.
    number: u32,
    /// Place of this node.
    assignment: Assignment,
    /// Ranks that were reported as stalled.
    stalled: BTreeSet<u32>,
    /// Ranks whose processes have exited.
    exited: BTreeSet<u32>,
    /// `None` before the first attempt.
    heartbeat_files: Option<HeartbeatFiles>,
    unsent: Unsent,
    nodes: NodeStates,
}

impl<'a> CommandWorkload<'a> {
    pub(crate) fn new(plan: CommandPlan<'a>, run: &'a RunDir, group: &Group) -> std::io::Result<Self> {
        let CommandPlan { command, affinities, base, interface } = plan;
        let spec = &command.spec;
        let output = Output::new(&bounded(&spec.logs), &spec.role, command.nproc)?;
        Ok(Self {
            command,
            affinities,
            base,
            run,
            output,
            interface,
            may_have_peers: group.may_have_peers(),
            port: None,
            attempt: Attempt::default(),
            heartbeats: HeartbeatMonitor::new(spec.hang_timeout, Instant::now()),
            messages: group.link.sender(),
        })
    }

    /// Waits briefly for the console to print the last lines, and adds the output that was lost to `ending`. If the
    /// user gets a report, it begins on a new line. Call it when the job is over.
    pub(crate) async fn finish(self, ending: &mut Ending) {
        self.output.flush(CONSOLE_FLUSH_TIMEOUT).await;
        ending.losses = self.output.losses();
        if !report::at_end(ending).is_empty() {
            self.output.end_line(CONSOLE_FLUSH_TIMEOUT).await;
        }
    }

    /// The directory of heartbeat files. It is next to the socket, in a private local directory, because logs may be on
    /// a network file system.
    fn heartbeat_dir(&self) -> PathBuf {
        self.run.socket.with_file_name("heartbeats")
    }

    /// Reports local ranks that have been idle and without output for too long.
    fn report_idle_ranks(&mut self, board: &watch::Sender<Board>, now: Instant) {
        let first = self.attempt.assignment.first_rank;
        for rank in
            (0..self.command.nproc).filter(|rank| !self.heartbeats.reported().contains(&(first + rank)))
        {
            match board.borrow().hint(rank, now) {
                Some(hint) if self.attempt.stalled.insert(rank) => {
                    self.output.print(&format!("xlaunch: rank {}: {hint}; it may hang", first + rank));
                }
                Some(_) => {}
                None => drop(self.attempt.stalled.remove(&rank)),
            }
        }
    }
}

impl CommandWorkload<'_> {
    fn group(&self, attempt: u32) -> CommandGroup<'_> {
        let ResolvedCommand { spec, nproc, .. } = self.command;
        let assignment = &self.attempt.assignment;
        let shared = Shared {
            base: self.base,
            run_id: spec.run_id.as_deref().unwrap_or(&self.run.id),
            socket: &self.run.socket,
            attempt,
            max_restarts: spec.max_restarts,
            workers: *nproc,
            role: &spec.role,
            // Jobs that may have several nodes get the address of node rank 0 from the coordinator.
            master_address: if self.may_have_peers { &assignment.master_address } else { &spec.master_addr },
            assignment,
        };
        CommandGroup { shared, spec, interface: self.interface.as_ref() }
    }

    /// The local rank that gets xlaunch's standard input. Only one does, as several readers would steal each other's
    /// lines.
    fn input_rank(&self) -> Option<u32> {
        let only = self.command.spec.logs.shown.as_ref().filter(|shown| shown.len() == 1);
        let only = only.and_then(|shown| shown.first()).copied();
        (self.attempt.assignment.node_rank == 0).then(|| only.unwrap_or(0))
    }

    /// `OMP_NUM_THREADS` of a rank. The affinity plan counts cores; a container's CPU quota may allow fewer.
    fn threads(&self, rank: u32) -> usize {
        let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
        let fair_share = (parallelism / self.command.nproc.max(1) as usize).max(1);
        self.affinities.get(rank as usize).map_or(1, Affinity::cores).min(fair_share)
    }
}

/// The signals that stop the job when xlaunch receives them.
pub fn stop_signals(signals: &[xlaunch_spec::command::Signal]) -> Vec<Signal> {
    signals.iter().map(|signal| Signal::from(*signal)).collect()
}

/// Describes a launch that has no run yet.
pub fn launch(command: &ResolvedCommand) -> board::Launch {
    board::Launch {
        kind: JobKind::Command,
        id: String::new(),
        name: command.name.clone(),
        command_line: quote_line(command.argv.iter().map(AsRef::<OsStr>::as_ref)),
        max_restarts: command.spec.max_restarts,
        total_steps: 0,
        log_dir: PathBuf::new(),
        stall_timeout: command.spec.stall_timeout,
    }
}

impl Workload for CommandWorkload<'_> {
    fn rules(&self) -> Rules {
        let spec = &self.command.spec;
        Rules {
            workers: self.command.nproc,
            kind: Kind::Command,
            has_restarts: spec.max_restarts > 0,
            requeue_codes: spec.requeue_codes.clone(),
            shutdown_timeout: spec.shutdown_timeout,
            shutdown_timeout_max: spec.shutdown_timeout,
            propagate_exit_code: spec.propagate_exit_code,
        }
    }

    fn launch(&self) -> board::Launch {
        let (id, log_dir) = (self.run.id.clone(), self.run.logs.clone());
        board::Launch { id, log_dir, ..launch(self.command) }
    }

    fn begin_attempt(&mut self, attempt: u32, assignment: &Assignment) -> std::io::Result<()> {
        // The order matters: dropping the last attempt removes the directory of its heartbeat files.
        self.attempt = Attempt { number: attempt, assignment: assignment.clone(), ..Attempt::default() };
        if assignment.has_peers() {
            self.attempt.nodes.add(0, 0, devices::host_name());
        }
        self.output.begin_attempt(assignment.first_rank);
        self.heartbeats.begin_attempt(Instant::now());
        let files = HeartbeatFiles::create(self.heartbeat_dir(), self.command.nproc)?;
        self.attempt.heartbeat_files = Some(files);
        Ok(())
    }

    /// Reserves a new port for every attempt, as surviving processes of the last one may still hold its port.
    fn reserve_port(&mut self) -> std::io::Result<u16> {
        if let Some(chosen) = self.command.spec.master_port {
            return Ok(chosen);
        }
        // Reserved before the old port is released, so that the new one differs.
        let port = MasterPort::reserve()?;
        Ok(self.port.insert(port).number())
    }

    fn command(&self, attempt: u32, rank: u32, dir: &Path) -> std::io::Result<(Command, Options)> {
        let argv = &self.command.argv;
        let (program, arguments) = argv.split_first().map_or((OsStr::new(""), &[][..]), |(p, a)| (p, a));
        let mut command = Command::new(program);
        command.args(arguments.iter().map(|argument| for_rank(argument, rank, self.command.is_python())));
        self.base.apply(&mut command);
        command.envs(worker_environment::command_variables(
            &self.group(attempt),
            rank,
            dir,
            self.threads(rank),
        ));
        command.env(env::HEARTBEAT, files::path(&self.heartbeat_dir(), rank));
        let cpus = self.affinities.get(rank as usize).and_then(Affinity::cpus).copied();
        let inherit_stdin = self.input_rank() == Some(rank) && terminal::offers_stdin();
        let stdout_is_terminal = self.output.shows_stdout_on_terminal(rank);
        Ok((command, Options { inherit_stdin, stdout_is_terminal, cpus, ..Options::default() }))
    }

    fn preload(&self) -> Option<PreloadPlan> {
        let (modules, argv) = (self.command.spec.preload.clone(), self.command.argv.clone());
        if modules.is_empty() {
            return None;
        }
        if !interpreter::is_preloadable(&argv) {
            self.notify(
                "xlaunch: --preload applies to Python sources and modules only; starting workers without it",
            );
            return None;
        }
        let mut interpreter = Command::new(argv.first()?);
        self.base.apply(&mut interpreter);
        interpreter.envs(worker_environment::common_variables(&self.group(0), self.threads(0)));
        Some(PreloadPlan { interpreter, modules, argv })
    }

    fn program(&self) -> Option<&OsStr> {
        self.command.argv.first().map(AsRef::as_ref)
    }

    fn base_environment(&self) -> &BaseEnvironment {
        self.base
    }

    fn output(&self) -> &Output {
        &self.output
    }

    /// Refuses all calls. Workers of a command do not use the agent's service.
    fn message(&mut self, message: Message, _job: &Job, _board: &watch::Sender<Board>) -> Option<Event> {
        let refusal = || Status::failed_precondition("this launch does not run the built-in trainer");
        match message {
            // The caller may be gone.
            Message::GetJob(_, reply) => drop(reply.send(Err(refusal()))),
            Message::Join(_, reply) => drop(reply.send(Err(refusal()))),
            Message::Checkpoint(reply) => drop(reply.send(Err(Status::failed_precondition(NO_CHECKPOINT)))),
            Message::SessionOpened { commands, .. } => drop(commands.try_send(Err(refusal()))),
            Message::SessionClosed { .. } | Message::Report { .. } => {}
            Message::Stop(_) | Message::Signal(_) => {}
        }
        None
    }

    fn worker_exited(&mut self, rank: u32) {
        self.attempt.exited.insert(rank);
        self.send_exit(rank);
    }

    fn group_message(
        &mut self,
        message: ToAgent,
        _job: &Job,
        _board: &watch::Sender<Board>,
    ) -> Option<Event> {
        if let ToAgent::Heartbeats(heartbeats) = message {
            self.heard(heartbeats, Instant::now());
        }
        None
    }

    fn flight_recorders(&self) -> Option<FlightRecorders> {
        self.command
            .spec
            .flight_recorder
            .then(|| FlightRecorders::new(|name| self.base.get(name), &self.run.socket))
    }

    fn read_heartbeats(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Event> {
        self.poll_heartbeats(board, now)
    }

    fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Hang> {
        self.report_idle_ranks(board, now);
        self.find_hang(board, now)
    }

    fn hang_lasts(&self, hang: &Hang) -> bool {
        self.lasts(hang, Instant::now())
    }
}

/// Limits the size of logs that are removed with the run.
fn bounded(options: &LogOptions) -> LogOptions {
    let limit = options.dir.is_none().then_some(TEMPORARY_LOG_BYTES);
    LogOptions { rotate_bytes: options.rotate_bytes.or(limit), ..options.clone() }
}

/// Returns an argument for a rank: `$local_rank` and `${local_rank}` are its local rank, as in torchrun. So is `$$` a
/// `$`, except for programs: in the command of a shell, it is the id of the process.
fn for_rank(argument: &OsStr, rank: u32, is_python: bool) -> OsString {
    let rank = rank.to_string();
    let value = |name: &[u8]| match name {
        b"local_rank" => Some(rank.as_bytes()),
        b"$" if is_python => Some(&b"$"[..]),
        _ => None,
    };
    OsString::from_vec(fill(argument.as_bytes(), value))
}
