//! Gives terminal input to workers, which are in background process groups of xlaunch's session.
//!
//! The kernel stops a background group that reads its controlling terminal (SIGTTIN) or changes its modes (SIGTTOU).
//! xlaunch notices the stop and decides as the kernel would for a process of xlaunch's own group: if xlaunch is in the
//! foreground, the worker gets its input; if it is in the background, the whole job is suspended until the shell's
//! `fg`.
//!
//! ```text
//! worker reads --SIGTTIN--> stopped --grant--> foreground group, SIGCONT --> reads
//!                                                                             '--revoke: xlaunch is in the foreground
//! ```
//! A grant lasts for milliseconds; workers that ask meanwhile wait for their turn. The kernel checks the process group
//! when a read begins, not while it waits, so the worker keeps waiting for its line after xlaunch has become the
//! foreground group again. Thus Ctrl-C and Ctrl-Z reach xlaunch, which passes them on to every rank once, and a killed
//! launcher leaves the terminal to the shell that started it. A grant that ends before the read begins is repeated with
//! a longer duration.
//!
//! A shell with job control ignores the signals that would stop it, and gives the terminal to its own jobs. Its grant
//! lasts until it exits, and Ctrl-C reaches only its jobs, as without a launcher.
//!
//! Ctrl-C during another grant reaches only the worker's group. A relay, which is a process in that group with no other
//! purpose, reports it to xlaunch, which then signals the other ranks.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetsid, tcsetattr};
use tokio::sync::mpsc;

use super::{children, sys};
use crate::process::{Process, ignores};

/// `argv[0]` of a relay, which tells the program's `main` to run [`relay_main`].
pub const RELAY_NAME: &str = "launch-relay";
/// Duration of the first grant. It doubles each time the worker soon needs another grant.
const MIN_GRANT: Duration = Duration::from_millis(5);
const MAX_GRANT: Duration = Duration::from_millis(200);
/// A request within this multiple of the last grant's duration shows that the grant was too short.
const SOON_FACTOR: u32 = 4;

/// The reaction to a worker that was stopped because it used the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// xlaunch is in the foreground: grant the terminal to the worker.
    Grant,
    /// xlaunch is in the background of a shell that can bring it to the foreground: suspend the job.
    Suspend,
    /// No shell remains that could bring xlaunch to the foreground: act as if the terminal was closed.
    HangUp,
}

/// Grants the controlling terminal to workers. Dropping this takes the terminal back, with the modes it had.
#[derive(Debug)]
pub struct Terminal {
    relays: BTreeMap<u32, Relay>,
    relayed: mpsc::UnboundedSender<Relayed>,
    grant: Option<Grant>,
    /// Workers that have asked for the terminal during the grant.
    waiting: VecDeque<u32>,
    /// The terminal's modes before the first grant.
    modes: Option<Termios>,
    duration: Duration,
    /// End of the last grant.
    ended: Option<Instant>,
}

#[derive(Debug)]
struct Grant {
    tty: OwnedFd,
    own: Pid,
    worker: Pid,
    until: Instant,
    /// True if the worker gives the terminal to process groups of its own.
    has_job_control: bool,
}

/// A signal from the terminal that has reached only a worker's process group.
#[derive(Clone, Copy, Debug)]
pub struct Relayed {
    pub worker: u32,
    pub signal: Signal,
}

impl Terminal {
    /// Creates the handle. Signals that reach only a worker during a grant are sent to `relayed`.
    pub fn new(relayed: mpsc::UnboundedSender<Relayed>) -> Self {
        let (relays, grant, waiting, modes, ended) = Default::default();
        Self { relays, relayed, grant, waiting, modes, duration: MIN_GRANT, ended }
    }

    /// Returns the reaction to a stopped worker, which leads the process group `worker`; `None` without a controlling
    /// terminal.
    pub fn answer(&self, worker: u32) -> Option<Answer> {
        let own = Process::own().filter(|own| own.group != 0)?;
        let foreground = tcgetpgrp(controlling_terminal().ok()?).ok()?;
        let has = |grant: &Grant| grant.has_job_control || grant.worker == foreground;
        let is_granted = self.grant.as_ref().is_some_and(has);
        let is_ours = [own.group, worker].into_iter().filter_map(to_pid).any(|group| group == foreground);
        Some(answer(is_ours || is_granted, || is_orphaned(&Process::all(), &own)))
    }

    /// Lets a worker's process group use the terminal briefly, once no other one does.
    pub fn grant(&mut self, worker: u32) -> io::Result<()> {
        let is_other = |grant: &Grant| to_pid(worker) != Some(grant.worker);
        if self.grant.as_ref().is_some_and(is_other) {
            if !self.waiting.contains(&worker) {
                self.waiting.push_back(worker);
            }
            return Ok(());
        }
        self.end_grant();
        let own = Process::own().map_or(0, |own| own.group);
        let (Some(own), Some(group)) = (to_pid(own), to_pid(worker)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if !self.relays.get_mut(&worker).is_some_and(Relay::is_running) {
            self.relays.insert(worker, Relay::start(worker, self.relayed.clone())?);
        }
        let now = Instant::now();
        let is_soon = |ended: Instant| now.duration_since(ended) < SOON_FACTOR * self.duration;
        let was_short = self.ended.is_some_and(is_soon);
        self.duration = if was_short { MAX_GRANT.min(2 * self.duration) } else { MIN_GRANT };
        let tty = controlling_terminal()?;
        self.modes = self.modes.take().or_else(|| tcgetattr(&tty).ok());
        sys::set_foreground(&tty, group)?;
        let until = now + self.duration;
        self.grant = Some(Grant { tty, own, worker: group, until, has_job_control: false });
        Ok(kill_process_group(group, Signal::CONT)?)
    }

    /// The time at which to call [`grant_next`](Self::grant_next).
    pub fn deadline(&self) -> Option<Instant> {
        self.grant.as_ref().map(|grant| grant.until)
    }

    /// Ends the grant, unless it is that of a shell, and lets the next worker that waits use the terminal.
    pub fn grant_next(&mut self) -> io::Result<()> {
        if let Some(grant) = &mut self.grant {
            let worker = grant.worker.as_raw_pid().cast_unsigned();
            // It would not be stopped when it reads without the terminal, and so never ask again.
            if ignores(worker, Signal::TTOU) {
                (grant.has_job_control, grant.until) = (true, Instant::now() + MAX_GRANT);
                self.relays.remove(&worker);
                return Ok(());
            }
        }
        self.end_grant();
        self.waiting.pop_front().map_or(Ok(()), |worker| self.grant(worker))
    }

    /// Takes the terminal back, except from a shell. Workers that wait for it are continued, and ask again.
    pub fn revoke(&mut self) {
        if self.grant.as_ref().is_some_and(|grant| grant.has_job_control) {
            return;
        }
        self.end_grant();
        self.continue_waiting();
    }

    /// Gives the terminal to the shell that had it, after this process was suspended and continued.
    pub fn resume(&mut self) {
        let Some(Grant { tty, own, worker, has_job_control: true, .. }) = &self.grant else { return };
        if tcgetpgrp(tty) == Ok(*own) {
            // Fails only if the terminal was hung up.
            let _ = sys::set_foreground(tty, *worker);
        }
    }

    fn continue_waiting(&mut self) {
        for group in self.waiting.drain(..).filter_map(to_pid) {
            // The worker may have ended.
            let _ = kill_process_group(group, Signal::CONT);
        }
    }

    fn end_grant(&mut self) {
        let Some(Grant { tty, own, worker, .. }) = self.grant.take() else { return };
        self.ended = Some(Instant::now());
        // A shell may have given the terminal to another job.
        if tcgetpgrp(&tty) == Ok(worker) {
            // Fails only if the terminal was hung up.
            let _ = sys::set_foreground(&tty, own);
        }
    }

    /// Takes the terminal back and stops the relays, because the workers are about to be killed.
    pub fn end_attempt(&mut self) {
        self.end_grant();
        self.continue_waiting();
        self.restore_modes();
        self.relays.clear();
    }

    /// Sets the modes that the terminal had at first: a worker that is killed at a prompt leaves it without echo.
    fn restore_modes(&self) {
        let (Some(modes), Ok(tty)) = (&self.modes, controlling_terminal()) else { return };
        // A background process would be stopped, and the terminal may be another job's.
        if tcgetpgrp(&tty).ok() == Process::own().and_then(|own| to_pid(own.group)) {
            // Fails only if the terminal was hung up.
            let _ = tcsetattr(&tty, OptionalActions::Now, modes);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.end_attempt();
    }
}

/// A relay process in a worker's process group. Dropping this kills it.
#[derive(Debug)]
struct Relay(Child);

impl Relay {
    /// Starts a relay. No signal is missed after this returns.
    fn start(worker: u32, relayed: mpsc::UnboundedSender<Relayed>) -> io::Result<Self> {
        let group = i32::try_from(worker).map_err(io::Error::other)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0(RELAY_NAME).env_clear().current_dir("/").process_group(group);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        sys::block_signals(&mut command);
        let mut child = children::spawn(&mut command)?;
        let stdout = child.stdout.take();
        let relay = Self(child);
        std::thread::Builder::new().name("relay".into()).spawn(move || {
            let numbers = stdout.into_iter().flat_map(Read::bytes).map_while(Result::ok);
            let mut signals = numbers.filter_map(|number| Signal::from_named_raw(number.into()));
            // The driver is gone when the job is over.
            while signals.next().is_some_and(|signal| relayed.send(Relayed { worker, signal }).is_ok()) {}
        })?;
        Ok(relay)
    }

    fn is_running(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The relay may have been killed with its group.
        let _ = self.0.kill();
        let _ = self.0.wait();
        children::forget(self.0.id());
    }
}

/// Main function of the relay process: writes the numbers of signals to stdout.
pub fn relay_main() -> ExitCode {
    // The name is for `ps` only.
    let _ = rustix::thread::set_name(c"launch-relay");
    let mut stdout = io::stdout();
    sys::terminal_signals(|signal| {
        let number = u8::try_from(signal).unwrap_or(0);
        stdout.write_all(&[number]).and_then(|()| stdout.flush()).is_ok()
    });
    ExitCode::SUCCESS
}

/// Returns whether a worker can read xlaunch's standard input. It can unless the input is xlaunch's controlling
/// terminal and xlaunch either can never come to the foreground or has a process group without an id in this PID
/// namespace.
pub fn offers_stdin() -> bool {
    let stdin = io::stdin();
    let Some(own) = Process::own() else { return false };
    if !stdin.is_terminal() {
        return true;
    }
    if own.session == 0 {
        return false;
    }
    if tcgetsid(&stdin).ok() != to_pid(own.session) {
        // There is no job control on a terminal of another session.
        return true;
    }
    let in_foreground = || tcgetpgrp(&stdin).ok() == to_pid(own.group);
    own.group != 0 && (in_foreground() || !is_orphaned(&Process::all(), &own))
}

fn answer(in_foreground: bool, is_orphaned: impl FnOnce() -> bool) -> Answer {
    if in_foreground {
        Answer::Grant
    } else if is_orphaned() {
        Answer::HangUp
    } else {
        Answer::Suspend
    }
}

/// Returns whether xlaunch is in the foreground of its controlling terminal.
pub fn is_in_foreground() -> bool {
    let foreground = controlling_terminal().and_then(|tty| Ok(tcgetpgrp(tty)?)).ok();
    foreground.is_some() && foreground == Process::own().and_then(|own| to_pid(own.group))
}

/// Returns whether a shell could continue xlaunch if it was suspended. There is none in `docker run -it IMAGE xlaunch`
/// or `tmux new xlaunch`, for example.
pub fn has_shell() -> bool {
    let own = Process::own().filter(|own| own.group != 0);
    own.is_none_or(|own| !is_orphaned(&Process::all(), &own))
}

/// Returns whether the process group of `own` is orphaned: none of its members has a parent in another group of the
/// session.
fn is_orphaned(all: &[Process], own: &Process) -> bool {
    let parent = |process: &Process| all.iter().find(|parent| parent.pid == process.parent);
    let controls = |parent: &Process| parent.session == own.session && parent.group != own.group;
    let mut members = all.iter().filter(|it| it.group == own.group && !it.ended());
    !members.any(|member| parent(member).is_some_and(controls))
}

fn controlling_terminal() -> io::Result<OwnedFd> {
    let mut options = std::fs::OpenOptions::new();
    let flags = rustix::fs::OFlags::NOCTTY.bits().cast_signed();
    Ok(options.read(true).write(true).custom_flags(flags).open("/dev/tty")?.into())
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, group: u32) -> Process {
        let (session, name) = (10, "x".into());
        Process { pid, parent, group, session, state: 'S', threads: 1, ticks: 0, started: 0, pages: 0, name }
    }

    #[test]
    fn worker_that_uses_the_terminal_is_answered_as_job_control_would() {
        assert_eq!(answer(true, || unreachable!()), Answer::Grant);
        assert_eq!(answer(false, || false), Answer::Suspend);
        assert_eq!(answer(false, || true), Answer::HangUp);
    }

    #[test]
    fn group_is_orphaned_once_no_member_has_a_parent_in_another_group_of_the_session() {
        let (shell, own) = (process(10, 1, 10), process(20, 10, 20));
        let (wrapper, inner) = (process(30, 10, 30), process(31, 30, 30));
        let init = Process { session: 1, ..process(1, 0, 1) };
        assert!(!is_orphaned(&[init.clone(), shell.clone(), own.clone()], &own));
        assert!(is_orphaned(&[init.clone(), Process { parent: 1, ..own.clone() }], &own));
        assert!(!is_orphaned(&[init.clone(), shell, wrapper, inner.clone()], &inner));
        assert!(is_orphaned(&[init, process(30, 1, 30), inner.clone()], &inner));
    }
}
