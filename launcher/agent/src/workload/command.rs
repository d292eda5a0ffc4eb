//! A job of any command, under torchrun's contract: environment, master port, CPU affinity, output and heartbeats of
//! its workers.
//!
//! Ranks whose heartbeats stop are ended, unless a debugger is attached to one of their processes: then they are only
//! reported. With `--flight-recorder` all ranks dump it first.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::watch;
use tonic::Status;
use xlaunch_proto::env;
use xlaunch_proto::v1::JobKind;

use crate::command::{LogOptions, ResolvedCommand, quote_line};
use crate::logs::Output;
use crate::process::Process;
use crate::rendezvous::service::Message;
use crate::run_dir::RunDir;
use crate::spawn::affinity::Affinity;
use crate::spawn::environment::{self, BaseEnvironment, CommandGroup};
use crate::spawn::port::MasterPort;
use crate::spawn::{Options, flight_recorder, inherits_stdin};
use crate::state::{Event, Job, Kind, Rules};
use crate::status::board::{self, Board};
use crate::workload::Workload;
use crate::workload::hang::ranks_text;
use crate::workload::heartbeat::files::{self, Change, HeartbeatFiles};
use crate::workload::heartbeat::{Hang, HeartbeatMonitor};

/// Size at which a log file rotates that is removed with the run. Temporary directories are often memory.
const TEMPORARY_LOG_BYTES: u64 = 8 << 20;
/// Why a request for a checkpoint is refused.
const NO_CHECKPOINT: &str = "xlaunch saves checkpoints of its own trainer only; this launch runs a command";
/// For the console to take xlaunch's last lines.
const CONSOLE_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// A job of any command, ready to run.
#[derive(Debug)]
pub struct CommandPlan<'a> {
    /// What to run.
    pub spec: &'a ResolvedCommand,
    /// By local rank.
    pub affinities: Vec<Affinity>,
    /// What the workers inherit.
    pub base: &'a BaseEnvironment,
}

pub(crate) struct CommandWorkload<'a> {
    spec: &'a ResolvedCommand,
    affinities: Vec<Affinity>,
    base: &'a BaseEnvironment,
    run: &'a RunDir,
    output: Output,
    /// Reserved while the attempt runs; `None` if the user chose a port.
    port: Option<MasterPort>,
    /// Ranks that were reported as stalled.
    stalled: BTreeSet<u32>,
    /// Of this attempt.
    exited: BTreeSet<u32>,
    /// `None` before the first attempt.
    heartbeat_files: Option<HeartbeatFiles>,
    heartbeats: HeartbeatMonitor,
    /// Ranks that were reported to hang.
    hung: BTreeSet<u32>,
    /// When the dumps of the flight recorder are complete, once the ranks were told to write them.
    dumped: Option<Instant>,
}

impl<'a> CommandWorkload<'a> {
    pub(crate) fn new(plan: CommandPlan<'a>, run: &'a RunDir) -> std::io::Result<Self> {
        let CommandPlan { spec, affinities, base } = plan;
        let output = Output::new(&bounded(&spec.logs), &spec.role, spec.nproc)?;
        Ok(Self {
            spec,
            affinities,
            base,
            run,
            output,
            port: None,
            stalled: BTreeSet::new(),
            exited: BTreeSet::new(),
            heartbeat_files: None,
            heartbeats: HeartbeatMonitor::new(spec.hang_timeout, Instant::now()),
            hung: BTreeSet::new(),
            dumped: None,
        })
    }

    /// Gives the console time for the last lines. Call it when the job is over.
    pub(crate) async fn finish(self) {
        self.output.flush(CONSOLE_FLUSH_TIMEOUT).await;
    }

    /// Beside the socket, in a private and local directory: logs may be on a network file system.
    fn heartbeat_dir(&self) -> PathBuf {
        self.run.socket.with_file_name("heartbeats")
    }

    /// Reports ranks that neither print nor compute.
    fn report_idle_ranks(&mut self, board: &watch::Sender<Board>, now: Instant) {
        for rank in (0..self.spec.nproc).filter(|rank| !self.hung.contains(rank)) {
            match board.borrow().hint(rank, now) {
                Some(hint) if self.stalled.insert(rank) => {
                    self.output.print(&format!("xlaunch: rank {rank}: {hint}; it may hang"));
                }
                Some(_) => {}
                None => drop(self.stalled.remove(&rank)),
            }
        }
    }

    fn read_heartbeats(&mut self, board: &watch::Sender<Board>, now: Instant) {
        let changes = self.heartbeat_files.as_mut().map(HeartbeatFiles::poll).unwrap_or_default();
        for (rank, change) in changes {
            match change {
                // Written before its exit, and seen after it.
                _ if self.exited.contains(&rank) => {}
                Change::Heartbeat { step, age } => {
                    self.heartbeats.record(rank, step, age, now);
                    board.send_modify(|board| board.heartbeat(rank, step, now));
                }
                Change::Removed => self.heartbeats.remove(rank),
            }
        }
    }

    /// Reports ranks that hang, once; returns the event that ends them.
    fn check_heartbeats(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Event> {
        let mut found = None;
        if self.heartbeats.poll(now) {
            let running = board.borrow().running();
            let all = Process::all();
            let any = |rank: u32, is_meant: fn(&Process) -> bool| {
                let pid = running.iter().find(|(running, _)| *running == rank).map(|(_, pid)| *pid);
                pid.is_some_and(|pid| Process::tree(&all, pid).into_iter().any(is_meant))
            };
            let stopped =
                running.iter().map(|(rank, _)| *rank).filter(|rank| any(*rank, Process::is_stopped));
            let hang = self.heartbeats.hang(&stopped.collect(), now);
            found = hang.map(|hang| (hang.ranks.iter().any(|rank| any(*rank, Process::is_traced)), hang));
        }
        let Some((traced, hang)) = found else {
            self.hang_is_over(board);
            return None;
        };
        self.report_hang(&hang, traced, board);
        let is_ready = !traced && self.flight_recorder_is_dumped(board, now);
        is_ready.then_some(Event::Hung { ranks: hang.ranks, message: hang.message })
    }

    fn report_hang(&mut self, hang: &Hang, traced: bool, board: &watch::Sender<Board>) {
        let ranks: BTreeSet<u32> = hang.ranks.iter().copied().collect();
        if self.hung == ranks {
            return;
        }
        let not_ended = if traced { "; not ended, because a debugger is attached" } else { "" };
        self.output.print(&format!("xlaunch: {} {}{not_ended}", ranks_text(&hang.ranks), hang.message));
        board.send_modify(|board| board.set_hints(hang.hints.clone()));
        self.hung = ranks;
    }

    fn hang_is_over(&mut self, board: &watch::Sender<Board>) {
        self.dumped = None;
        if !std::mem::take(&mut self.hung).is_empty() {
            self.output.print("xlaunch: heartbeats continue");
            board.send_modify(|board| board.set_hints(BTreeMap::new()));
        }
    }

    /// Makes all ranks dump their flight recorders, if that was asked for. Whether they have.
    fn flight_recorder_is_dumped(&mut self, board: &watch::Sender<Board>, now: Instant) -> bool {
        let dumped = *self.dumped.get_or_insert_with(|| {
            let ranks = board.borrow().running().into_iter().map(|(rank, _)| rank);
            let pipe = || self.base.get(flight_recorder::PIPE_VARIABLE);
            let told = ranks.filter(|rank| flight_recorder::trigger(pipe(), &self.run.socket, *rank));
            match if self.spec.flight_recorder { told.count() } else { 0 } {
                0 => now,
                count => {
                    self.output.print(&format!("xlaunch: told {count} ranks to dump their flight recorders"));
                    now + flight_recorder::DUMP_TIME
                }
            }
        });
        now >= dumped
    }
}

impl Workload for CommandWorkload<'_> {
    fn rules(&self) -> Rules {
        Rules {
            world: self.spec.nproc,
            kind: Kind::Command,
            restarts: self.spec.restarts.clone(),
            requeue_codes: self.spec.requeue_codes.clone(),
            shutdown_timeout: self.spec.shutdown_timeout,
            shutdown_timeout_max: self.spec.shutdown_timeout,
            propagate_exit_code: self.spec.propagate_exit_code,
            seed: RandomState::new().hash_one(&self.run.id),
        }
    }

    fn launch(&self) -> board::Launch {
        board::Launch {
            kind: JobKind::Command,
            id: self.run.id.clone(),
            name: self.spec.name.clone(),
            command_line: quote_line(self.spec.argv.iter().map(AsRef::<OsStr>::as_ref)),
            max_restarts: self.spec.restarts.most,
            log_dir: self.run.logs.clone(),
            stall_timeout: self.spec.stall_timeout,
        }
    }

    fn stop_signals(&self) -> Vec<Signal> {
        self.spec.signals.iter().map(|signal| Signal::from(*signal)).collect()
    }

    /// Every attempt has another port: survivors of the last one may still hold theirs.
    fn begin_attempt(&mut self, _attempt: u32) -> std::io::Result<()> {
        self.stalled.clear();
        self.exited.clear();
        self.hung.clear();
        self.dumped = None;
        self.heartbeats.begin_attempt(Instant::now());
        // In this order: dropping the files of the last attempt removes the directory.
        self.heartbeat_files = None;
        self.heartbeat_files = Some(HeartbeatFiles::create(self.heartbeat_dir(), self.spec.nproc)?);
        if self.spec.master_port.is_none() {
            self.port = Some(MasterPort::reserve()?);
        }
        Ok(())
    }

    fn command(&self, attempt: u32, rank: u32, dir: &Path) -> std::io::Result<(Command, Options)> {
        let spec = self.spec;
        let group = CommandGroup {
            base: self.base,
            spec,
            run_id: &self.run.id,
            socket: &self.run.socket,
            attempt,
            master_port: spec.master_port.or(self.port.as_ref().map(MasterPort::number)).unwrap_or(0),
        };
        let affinity = self.affinities.get(rank as usize);
        // The plan counts cores; a container's CPU quota may allow less.
        let fair_share =
            std::thread::available_parallelism().map_or(1, usize::from) / spec.nproc.max(1) as usize;
        let threads = affinity.map_or(1, Affinity::cores).min(fair_share.max(1));
        let (program, arguments) = spec.argv.split_first().map_or((OsStr::new(""), &[][..]), |(p, a)| (p, a));
        let mut command = Command::new(program);
        command.args(arguments.iter().map(|argument| for_rank(argument, rank)));
        self.base.apply(&mut command);
        command.envs(environment::command_variables(&group, rank, dir, threads));
        command.env(env::HEARTBEAT, files::path(&self.heartbeat_dir(), rank));
        let cpus = affinity.and_then(Affinity::cpus).copied();
        let inherit_stdin = inherits_stdin(spec.nproc);
        Ok((command, Options { inherit_stdin, cpus, leave_signals_to_agent: false }))
    }

    fn program(&self) -> Option<&OsStr> {
        self.spec.argv.first().map(AsRef::as_ref)
    }

    fn base_environment(&self) -> &BaseEnvironment {
        self.base
    }

    fn output(&self) -> &Output {
        &self.output
    }

    /// Refuses all calls: workers of a command do not use the agent's service.
    fn message(&mut self, message: Message, _job: &Job, _board: &watch::Sender<Board>) -> Option<Event> {
        let refusal = || Status::failed_precondition("this launch does not run the built-in trainer");
        match message {
            // The caller may be gone.
            Message::GetJob(_, reply) => drop(reply.send(Err(refusal()))),
            Message::Join(_, reply) => drop(reply.send(Err(refusal()))),
            Message::Checkpoint(reply) => drop(reply.send(Err(Status::failed_precondition(NO_CHECKPOINT)))),
            Message::SessionOpened { commands, .. } => drop(commands.try_send(Err(refusal()))),
            Message::SessionClosed { .. } | Message::Report { .. } => {}
            Message::Stop | Message::Signal(_) => {}
        }
        None
    }

    fn worker_exited(&mut self, rank: u32) {
        self.exited.insert(rank);
        self.heartbeats.remove(rank);
    }

    fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Event> {
        self.report_idle_ranks(board, now);
        self.read_heartbeats(board, now);
        self.check_heartbeats(board, now)
    }
}

/// Logs that are removed with the run are bounded in size.
fn bounded(options: &LogOptions) -> LogOptions {
    let limit = options.dir.is_none().then_some(TEMPORARY_LOG_BYTES);
    LogOptions { rotate_bytes: options.rotate_bytes.or(limit), ..options.clone() }
}

/// The argument with `${local_rank}` replaced, as torchrun does.
fn for_rank(argument: &OsStr, rank: u32) -> OsString {
    const MACRO: &[u8] = b"${local_rank}";
    let mut rest = argument.as_bytes();
    let mut filled = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(MACRO.len()).position(|window| window == MACRO) {
        filled.extend_from_slice(&rest[..at]);
        filled.extend_from_slice(rank.to_string().as_bytes());
        rest = &rest[at + MACRO.len()..];
    }
    filled.extend_from_slice(rest);
    OsString::from_vec(filled)
}
