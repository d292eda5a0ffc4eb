//! The preloading process of a command: imports Python modules once, then forks the workers of all attempts.
//!
//! ```text
//! agent --spawn--> preloading process: imports --Imported--> agent
//! agent --request, pipes--> preloading process --fork--> middle --fork--> worker: the agent's child when middle exits
//! agent <--process id------ preloading process
//! agent: registers the child, opens its pidfd, moves it to its cgroup --"adopted"--> worker runs the script
//! ```
//! `program.py` runs in the preloading process. A forked worker is supervised like any other: it leads a process group,
//! is reaped by the agent alone, and dies with the agent. The kernel ties its parent-death signal to the agent's main
//! thread, which inherits orphans; that thread lives as long as the process.
//!
//! Invariants:
//! - a worker does not run user code before it can be watched and killed;
//! - after an error the preloading process is not used again, and its half-started worker exits because the pipe on
//!   which it waits is closed.

mod channel;
mod imports;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::base_environment::BaseEnvironment;
pub(crate) use imports::Imported;
use xlaunch_host::process::Process;
use xlaunch_host::spawn::process_tree::ProcessTree;
use xlaunch_host::spawn::{Options, Spawned, Spawner, Worker, children, sys};

/// The program of the preloading process, for Python 3.8 or newer.
const PROGRAM: &str = include_str!("program.py");
/// Timeout of a fork in the preloading process. A fork takes milliseconds, so a timeout means that the process hangs.
const FORK_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for the preloading process and its descendants to disappear at the end of the job.
const PRELOADER_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Describes how to start a preloading process.
#[derive(Debug)]
pub(crate) struct PreloadPlan {
    /// The interpreter, with the environment that all workers share.
    pub(crate) interpreter: Command,
    /// Modules to import.
    pub(crate) modules: Vec<String>,
    /// Program and arguments of a worker, with the interpreter and `-u` in front.
    pub(crate) argv: Vec<OsString>,
}

/// A preloading process. Dropping this kills it and its descendants.
#[derive(Debug)]
pub(crate) struct Preloader {
    /// Declared, and so dropped, before `process`, whose id must not be reused before the tree is killed.
    processes: ProcessTree,
    process: Worker,
    /// The environment that the process was started with. Workers are sent only the differences, so they keep changes
    /// made by a wrapper of the interpreter or by an import.
    environment: BTreeMap<OsString, OsString>,
    /// `None` once the process must not be used any more.
    channel: Option<UnixStream>,
}

impl Preloader {
    /// Starts the process. The result of its imports is sent to `imported`, once.
    pub(crate) async fn start(
        plan: PreloadPlan,
        base: &BaseEnvironment,
        run_id: &str,
        spawner: &Spawner,
        imported: mpsc::UnboundedSender<Imported>,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs);
        let mut command = plan.interpreter;
        command.args(["-u", "-c", PROGRAM]).arg(sys::number(&theirs).to_string());
        command.arg(std::process::id().to_string()).arg(plan.modules.join(",")).arg("--").args(&plan.argv);
        sys::inherit(&mut command, Arc::new(theirs));
        // Not in a cgroup of the attempt, because the process outlives it.
        let mut processes = ProcessTree::without_cgroup(run_id);
        processes.prepare(0, &mut command);
        let environment = environment_of(&command, base);
        let Spawned { worker: process, stderr, .. } = spawner.spawn(command, Options::default()).await?;
        processes.add(process.pid);
        imports::watch(ours.try_clone()?, stderr, process.watch(), imported)?;
        Ok(Self { processes, process, environment, channel: Some(ours) })
    }

    /// Returns whether the process can fork workers.
    pub(crate) fn is_usable(&self) -> bool {
        self.channel.is_some()
    }

    /// Forks the worker that `command` would start, and moves it to the cgroup of this `cgroup.procs`. After an error
    /// the process is killed.
    pub(crate) async fn fork(
        &mut self,
        command: &Command,
        base: &BaseEnvironment,
        options: &Options,
        cgroup: Option<Arc<OwnedFd>>,
    ) -> io::Result<Spawned> {
        let Some(channel) = self.channel.take() else {
            return Err(io::Error::other("the preloading process is gone"));
        };
        let environment = environment_of(command, base);
        let message = Message::new(command, &self.environment, &environment, options);
        let options = options.clone();
        let forked = tokio::task::spawn_blocking(move || {
            let spawned = fork(&channel, &message, &options, cgroup.as_deref());
            (channel, spawned)
        });
        match forked.await {
            Ok((channel, Ok(spawned))) => {
                self.channel = Some(channel);
                Ok(spawned)
            }
            Ok((_, Err(error))) => {
                self.give_up();
                Err(error)
            }
            Err(panicked) => Err(io::Error::other(panicked)),
        }
    }

    /// Kills the process. Workers are started without it from now on.
    pub(crate) fn give_up(&mut self) {
        self.channel = None;
        self.process.signal(Signal::KILL);
    }

    /// Handles SIGTSTP during the imports: stops the preloading process, then this process.
    pub(crate) fn suspend(&self) {
        self.processes.suspend(Signal::STOP);
    }

    /// Handles SIGCONT: continues the preloading process.
    pub(crate) fn resume(&self) {
        self.processes.resume();
    }

    /// Kills the process and its descendants, and waits for them.
    pub(crate) async fn end(self) {
        // Dropping the tree kills what remains.
        self.processes.kill_and_wait(PRELOADER_DRAIN_TIMEOUT).await;
    }
}

/// Returns the environment that a command starts with.
fn environment_of(command: &Command, base: &BaseEnvironment) -> BTreeMap<OsString, OsString> {
    let mut environment = base.variables();
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => drop(environment.insert(name.to_owned(), value.to_owned())),
            None => drop(environment.remove(name)),
        }
    }
    environment
}

/// The message to a forked worker. Strings contain one character per byte.
#[derive(Debug, PartialEq, Serialize)]
struct Message {
    argv: Vec<String>,
    /// Variables that the preloading process does not have, or has with another value.
    set: Vec<(String, String)>,
    /// Variables of the preloading process that the worker must not have.
    unset: Vec<String>,
    cpus: Option<Vec<usize>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Pid(u32),
    Error(String),
}

impl Message {
    fn new(
        command: &Command,
        preloader: &BTreeMap<OsString, OsString>,
        worker: &BTreeMap<OsString, OsString>,
        options: &Options,
    ) -> Self {
        let text = |text: &OsStr| text.as_bytes().iter().copied().map(char::from).collect::<String>();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let changed = worker.iter().filter(|(name, value)| preloader.get(*name) != Some(value));
        Self {
            argv: words.map(text).collect(),
            set: changed.map(|(name, value)| (text(name), text(value))).collect(),
            unset: preloader
                .keys()
                .filter(|name| !worker.contains_key(*name))
                .map(|name| text(name))
                .collect(),
            cpus: options.cpus.map(|set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()),
        }
    }
}

/// Forks a worker. Blocks until it runs.
fn fork(
    channel: &UnixStream,
    message: &Message,
    options: &Options,
    cgroup: Option<&OwnedFd>,
) -> io::Result<Spawned> {
    channel.set_read_timeout(Some(FORK_TIMEOUT))?;
    channel.set_write_timeout(Some(FORK_TIMEOUT))?;
    let [stdout, stderr] = options.open_output()?;
    let (wait_end, adopted) = io::pipe()?;
    let (own_stdin, nothing) = (io::stdin(), fs_err::File::open("/dev/null")?);
    let stdin = if options.inherit_stdin { own_stdin.as_fd() } else { nothing.file().as_fd() };
    let descriptors = [stdin, stdout.writer.as_fd(), stderr.writer.as_fd(), wait_end.as_fd()];
    let pid = children::adopt(|| {
        channel::send(channel, message, &descriptors)?;
        match channel::receive(channel)? {
            Reply::Pid(pid) if Process::read(pid).is_some_and(|it| it.parent == std::process::id()) => {
                Ok(pid)
            }
            // The interpreter may run in another PID namespace.
            Reply::Pid(pid) => Err(io::Error::other(format!("process {pid} is not a child of xlaunch"))),
            Reply::Error(error) => Err(io::Error::other(error)),
        }
    })?;
    match release(pid, cgroup, adopted) {
        Ok(worker) => Ok(Spawned { worker, stdout: stdout.reader, stderr: stderr.reader }),
        Err(error) => {
            // The worker exits, and is reaped like any other orphan.
            children::forget(pid);
            Err(error)
        }
    }
}

/// Opens the pidfd of an adopted worker, moves it to its cgroup, and lets it run.
fn release(pid: u32, cgroup: Option<&OwnedFd>, mut adopted: PipeWriter) -> io::Result<Worker> {
    let worker = Worker::adopted(pid)?;
    if let Some(procs) = cgroup {
        // Errors are ignored: `ProcessTree::add` checks whether the process is in its cgroup.
        let _ = rustix::io::write(procs, pid.to_string().as_bytes());
    }
    adopted.write_all(b"\n")?;
    Ok(worker)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn worker_is_told_the_changes_of_its_environment() {
        let base = BaseEnvironment::Submitted(
            [("KEPT", "1"), ("CHANGED", "2"), ("REMOVED", "3")]
                .map(|(name, value)| (name.into(), value.into()))
                .into(),
        );
        let preloader = environment_of(&Command::new("python"), &base);
        let mut command = Command::new("python");
        command.arg(OsString::from_vec(vec![0xff])).env("CHANGED", "é").env("NEW", "").env_remove("REMOVED");
        let worker = environment_of(&command, &base);
        let message = Message::new(&command, &preloader, &worker, &Options::default());
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(message.set, [pair("CHANGED", "\u{c3}\u{a9}"), pair("NEW", "")]);
        assert_eq!((message.unset, message.cpus), (vec!["REMOVED".to_owned()], None));
        assert_eq!(message.argv, ["python", "\u{ff}"]);
    }
}
