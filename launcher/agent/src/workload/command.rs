//! What is particular to a job of any command: torchrun's environment, its port, its cores, its output.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::watch;
use tonic::Status;
use xlaunch_proto::v1::JobKind;

use crate::command::{LogOptions, ResolvedCommand, quote_line};
use crate::logs::Output;
use crate::rendezvous::service::Message;
use crate::run_dir::RunDir;
use crate::spawn::affinity::Affinity;
use crate::spawn::environment::{self, CommandGroup};
use crate::spawn::port::MasterPort;
use crate::spawn::{Options, inherits_stdin};
use crate::state::{Kind, Rules};
use crate::status::board::{self, Board};

/// Size at which a log file that is not kept makes room.
const LOG_BYTES: u64 = 8 << 20;
/// Time for the console to take our last lines.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A job of any command.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct CommandPlan<'a> {
    pub spec: &'a ResolvedCommand,
    /// By local rank.
    pub affinities: Vec<Affinity>,
}

/// The side of a running job of any command.
pub(crate) struct Commands<'a> {
    spec: &'a ResolvedCommand,
    affinities: Vec<Affinity>,
    run: &'a RunDir,
    output: Output,
    /// Reserved for as long as the attempt runs; `None` where the user chose one.
    port: Option<MasterPort>,
    /// Ranks whose silence was pointed out.
    silent: BTreeSet<u32>,
}

/// The argument with `${local_rank}` filled in, as torchrun does.
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

/// Logs that go with the run are there for a look at it, and do not fill the memory that temporary directories often are.
fn bounded(options: &LogOptions) -> LogOptions {
    let limit = options.dir.is_none().then_some(LOG_BYTES);
    LogOptions { rotate_bytes: options.rotate_bytes.or(limit), ..options.clone() }
}

impl<'a> Commands<'a> {
    pub(crate) fn new(plan: CommandPlan<'a>, run: &'a RunDir) -> std::io::Result<Self> {
        let CommandPlan { spec, affinities } = plan;
        let output = Output::new(&bounded(&spec.logs), &spec.role, spec.nproc)?;
        Ok(Self { spec, affinities, run, output, port: None, silent: BTreeSet::new() })
    }

    pub(crate) fn rules(&self) -> Rules {
        Rules {
            world: self.spec.nproc,
            kind: Kind::Command,
            restarts: self.spec.restarts.clone(),
            shutdown_timeout: self.spec.shutdown_timeout,
            propagate_exit_code: self.spec.propagate_exit_code,
            seed: RandomState::new().hash_one(&self.run.id),
        }
    }

    pub(crate) fn launch(&self) -> board::Launch {
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

    pub(crate) fn ending_signals(&self) -> Vec<Signal> {
        self.spec.signals.iter().map(|signal| Signal::from(*signal)).collect()
    }

    /// Another attempt has another port: what is left of the last one may still hold its own.
    pub(crate) fn begin(&mut self) -> std::io::Result<()> {
        self.silent.clear();
        if self.spec.master_port.is_none() {
            let port = MasterPort::reserve()?;
            self.port = Some(port);
        }
        Ok(())
    }

    pub(crate) fn command(&self, attempt: u32, rank: u32, dir: &Path) -> (Command, Options) {
        let spec = self.spec;
        let group = CommandGroup {
            spec,
            run_id: &self.run.id,
            socket: &self.run.socket,
            attempt,
            master_port: spec.master_port.or(self.port.as_ref().map(MasterPort::number)).unwrap_or(0),
        };
        let affinity = self.affinities.get(rank as usize);
        // The plan knows cores; what a container may use of them is another matter.
        let fair = std::thread::available_parallelism().map_or(1, usize::from) / spec.nproc.max(1) as usize;
        let threads = affinity.map_or(1, Affinity::cores).min(fair.max(1));
        let (program, arguments) = spec.argv.split_first().map_or((OsStr::new(""), &[][..]), |(p, a)| (p, a));
        let mut command = Command::new(program);
        command.args(arguments.iter().map(|argument| for_rank(argument, rank)));
        command
            .envs(environment::command_variables(&group, rank, dir, threads, &|name| std::env::var_os(name)));
        let cpus = affinity.and_then(Affinity::cpus).copied();
        (command, Options { inherit_stdin: inherits_stdin(spec.nproc), cpus })
    }

    pub(crate) fn program(&self) -> Option<&OsStr> {
        self.spec.argv.first().map(AsRef::as_ref)
    }

    pub(crate) fn output(&self) -> &Output {
        &self.output
    }

    /// Workers of a command do not talk to the agent; one that does is told so.
    pub(crate) fn refuse(&self, message: Message) {
        let refusal = || Status::failed_precondition("this launch is not one of the built-in trainer");
        match message {
            // A caller that is gone needs no answer.
            Message::GetJob(_, reply) => drop(reply.send(Err(refusal()))),
            Message::Join(_, reply) => drop(reply.send(Err(refusal()))),
            Message::SessionOpened { commands, .. } => drop(commands.try_send(Err(refusal()))),
            Message::SessionClosed { .. } | Message::Report { .. } | Message::Stop => {}
        }
    }

    /// A rank that neither prints nor computes perhaps hangs: once for each such time.
    pub(crate) fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) {
        for rank in 0..self.spec.nproc {
            match board.borrow().hint(rank, now) {
                Some(hint) if self.silent.insert(rank) => {
                    self.output.say(&format!("xlaunch: rank {rank} {hint}: it may hang"));
                }
                Some(_) => {}
                None => drop(self.silent.remove(&rank)),
            }
        }
    }

    pub(crate) async fn finish(&self) {
        self.output.flush(LAST_WORDS).await;
    }
}
