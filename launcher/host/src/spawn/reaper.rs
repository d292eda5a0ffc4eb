//! The reaper: a process that briefly outlives xlaunch. If xlaunch is killed, even by SIGKILL, the reaper kills all
//! processes of the launch and removes its private directories.
//!
//! The reaper is the same program under another name, in a session of its own, so that neither the terminal nor `pkill
//! xlaunch` reaches it. Its only connection to xlaunch is a pipe, which carries the cleanup plan as records; end of
//! file means that xlaunch is gone. A reaper that is no longer needed is killed; one that dies earlier, for example
//! because of the OOM killer, is replaced by another with the same plan.
//!
//! A record is a letter, a value and a zero byte:
//!
//! ```text
//! m MARK    the run's mark in XLAUNCH_SCOPE     d PATH        private directory
//! s ID      xlaunch's session                   c PATH        prefix of the paths of its cgroups
//! t TICKS   all workers started after this      w PID:TICKS   worker and its start time
//! a         a new attempt: forget all workers
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::membership::{self, RunProcesses};
use super::process_tree::{CLEANING_TIMEOUT, ProcessTree, session};
use super::{cgroup, children, sys};
use crate::cgroups;
use crate::process::Process;
use crate::system_errors;

/// `argv[0]` of the reaper, which tells the program's `main` to run [`main`]. It must not start with `xlaunch`, because
/// `pkill xlaunch` would match that.
pub const NAME: &str = "launch-reaper";
/// Time for killed processes to disappear, after which the reaper gives up.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(60);
/// Upper bound of the interval between cleanup polls; it starts at 1 ms and doubles.
const MAX_CLEANUP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Minimum time between starts of reapers, in case each dies at once.
const MIN_START_INTERVAL: Duration = Duration::from_millis(100);

/// A running reaper. Dropping this kills it without any cleanup, which xlaunch has done by then.
#[derive(Debug)]
pub struct Reaper {
    command: Command,
    /// Records about the launch, and those about its workers from the last [`Self::watch`].
    launch: Vec<u8>,
    workers: Vec<u8>,
    /// The process and its input; `None` if it has died and was not replaced yet.
    running: Option<(Child, ChildStdin)>,
    started: Instant,
}

impl Reaper {
    /// Starts the reaper of a launch with these private directories. It must be started before any other process, and
    /// dropped after all processes and directories are gone.
    pub fn start(run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME);
        Self::start_as(command, run_id, private).map_err(|error| {
            // The error does not tell which path is missing.
            let advice = [("/proc/self", "mount /proc"), ("/dev/null", "create /dev/null")];
            let missing = advice.iter().find(|(path, _)| !Path::new(path).exists());
            let hint = missing.map_or(String::new(), |(_, what)| format!("; {what}, which xlaunch needs"));
            let failed = system_errors::context("failed to start the reaper, /proc/self/exe", &error);
            std::io::Error::new(error.kind(), format!("{failed}{hint}"))
        })
    }

    pub(super) fn start_as(mut command: Command, run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        // The reaper must not keep a working directory busy or an output pipe open, nor carry the mark of an outer
        // launch.
        command.env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        sys::detach(&mut command);
        let mut launch = Vec::new();
        record(&mut launch, b'm', membership::mark(run_id).as_bytes());
        record(&mut launch, b's', session().to_string().as_bytes());
        record(&mut launch, b't', membership::clock_ticks().to_string().as_bytes());
        if let Some(path) = cgroup::path_prefix(run_id) {
            record(&mut launch, b'c', path.as_os_str().as_bytes());
        }
        for path in private {
            record(&mut launch, b'd', std::path::absolute(path)?.as_os_str().as_bytes());
        }
        let (workers, started) = (Vec::new(), Instant::now());
        let mut reaper = Self { command, launch, workers, running: None, started };
        reaper.run()?;
        Ok(reaper)
    }

    fn run(&mut self) -> std::io::Result<()> {
        self.started = Instant::now();
        let mut child = children::spawn(&mut self.command)?;
        let pipe = child.stdin.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
        let (_, pipe) = self.running.insert((child, pipe));
        pipe.write_all(&self.launch)?;
        pipe.write_all(&self.workers)
    }

    /// Starts another reaper if this one has died. Call it at SIGCHLD and every second, which repeats a failed start.
    ///
    /// # Errors
    /// Fails if no reaper can be started.
    pub fn restore(&mut self) -> std::io::Result<()> {
        if let Some((child, _)) = &mut self.running {
            if child.try_wait()?.is_none() {
                return Ok(());
            }
            children::forget(child.id());
            self.running = None;
        }
        if self.started.elapsed() < MIN_START_INTERVAL { Ok(()) } else { self.run() }
    }

    /// Replaces the workers in the cleanup plan with those of these trees. Must be called after each start.
    pub fn watch<'a>(&mut self, trees: impl Iterator<Item = &'a ProcessTree>) {
        self.workers.clear();
        record(&mut self.workers, b'a', b"");
        for (pid, started) in trees.flat_map(ProcessTree::leaders) {
            record(&mut self.workers, b'w', format!("{pid}:{started}").as_bytes());
        }
        if let Some((_, pipe)) = &mut self.running {
            // Fails if the reaper has died. The next one gets the records, too.
            let _ = pipe.write_all(&self.workers);
        }
    }

    #[cfg(test)]
    pub(super) fn pid(&self) -> u32 {
        self.running.as_ref().unwrap().0.id()
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.running {
            // It may have been killed already.
            let _ = child.kill();
            let _ = child.wait();
            children::forget(child.id());
        }
    }
}

fn record(records: &mut Vec<u8>, kind: u8, value: &[u8]) {
    records.push(kind);
    records.extend_from_slice(value);
    records.push(0);
}

/// The reaper process: reads records until standard input ends, then cleans up.
pub fn main() -> ExitCode {
    // The name is for `ps` only, so a failure does not matter.
    let _ = rustix::thread::set_name(c"launch-reaper");
    let mut plan = CleanupPlan::new();
    let mut records = Vec::new();
    match std::io::stdin().lock().read_to_end(&mut records) {
        Ok(_) => {
            // A record without its zero byte may be a truncated path.
            let whole = records.split_inclusive(|byte| *byte == 0).filter_map(|it| it.strip_suffix(&[0]));
            whole.for_each(|record| plan.add(record));
            plan.clean_up();
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

struct CleanupPlan {
    processes: RunProcesses,
    cgroups: Option<PathBuf>,
    directories: Vec<PathBuf>,
}

impl CleanupPlan {
    fn new() -> Self {
        let processes = RunProcesses {
            mark: String::new(),
            session: 0,
            leaders: BTreeMap::new(),
            since: u64::MAX,
            adopts: false,
            spared: BTreeMap::new(),
        };
        Self { processes, cgroups: None, directories: Vec::new() }
    }

    fn add(&mut self, record: &[u8]) {
        let Some((kind, value)) = record.split_first() else { return };
        let (path, text) = (Path::new(OsStr::from_bytes(value)), String::from_utf8_lossy(value));
        match kind {
            b'm' => self.processes.mark = text.into_owned(),
            b's' => self.processes.session = text.parse().unwrap_or(0),
            b't' => self.processes.since = text.parse().unwrap_or(u64::MAX),
            b'd' => self.directories.push(path.to_path_buf()),
            b'a' => self.processes.leaders.clear(),
            b'c' => self.cgroups = Some(path.to_path_buf()),
            b'w' => {
                let (pid, started) = text.split_once(':').unwrap_or_default();
                if let (Ok(pid), Ok(started)) = (pid.parse(), started.parse()) {
                    self.processes.leaders.insert(pid, started);
                }
            }
            _ => {}
        }
    }

    fn clean_up(&self) {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        while !self.kill(start.elapsed() < CLEANING_TIMEOUT) && start.elapsed() < CLEANUP_TIMEOUT {
            std::thread::sleep(pause);
            pause = MAX_CLEANUP_POLL_INTERVAL.min(pause * 2);
        }
        for directory in &self.directories {
            // xlaunch may have removed the directory already, and an error cannot be reported to anyone.
            let _ = fs_err::remove_dir_all(directory);
        }
    }

    /// Kills all processes, except for [cleaners](Process::is_cleaner) if they are `spared`, and removes the cgroups.
    /// Returns whether none of them remains.
    fn kill(&self, spared: bool) -> bool {
        let cgroups = self.cgroups.as_deref().map(cgroup::with_prefix).unwrap_or_default();
        let is_spared = |process: &Process| spared && process.is_cleaner();
        for path in &cgroups {
            if !cgroup::processes(path).iter().any(is_spared) {
                // Fails before Linux 5.14. The processes are then killed one by one below.
                let _ = cgroup::kill(path);
            }
        }
        let members = || {
            let mut found = self.processes.list();
            found.extend(cgroups.iter().flat_map(|path| cgroup::processes(path)));
            found
        };
        let (found, has_spared) = membership::kill(members, is_spared);
        let removed = cgroups.iter().filter(|path| cgroups::remove(path).is_ok()).count();
        found.is_empty() && !has_spared && removed == cgroups.len()
    }
}
