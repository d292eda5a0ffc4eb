//! The reaper: a process that outlives xlaunch by moments. If xlaunch is killed, even by SIGKILL, the reaper kills
//! everything that the launch started and removes its private directories.
//!
//! It is this program under another name, in a session of its own, so that neither the terminal nor `pkill xlaunch`
//! reaches it. Its only connection to xlaunch is a pipe, which carries the cleanup plan as records; the end of the pipe
//! means that xlaunch is gone. A reaper that is no longer needed is killed.
//!
//! A record is a letter, a value and a zero byte:
//!
//! ```text
//! m MARK    value of XLAUNCH_SCOPE              d PATH        private directory
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
use super::process_tree::{ProcessTree, session};
use super::{cgroup, children, sys};
use crate::system_errors;

/// `argv[0]` of the reaper, by which `main` knows to run [`main`]. Not `xlaunch...`, which `pkill xlaunch` would match.
pub const NAME: &str = "launch-reaper";
/// For killed processes to disappear; then the reaper gives up.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(60);
/// Upper bound of the poll interval meanwhile; it starts at 1 ms and doubles.
const MAX_CLEANUP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A running reaper. Dropping it ends it without any cleanup: xlaunch has done that.
#[derive(Debug)]
pub(crate) struct Reaper {
    child: Child,
    pipe: ChildStdin,
}

impl Reaper {
    /// Starts the reaper of a launch with these private directories. Start it before any process, and drop it when all
    /// processes and directories are gone.
    pub(crate) fn start(run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME);
        Self::start_as(command, run_id, private).map_err(|error| {
            // The program's path is not in the error of a failed exec.
            let hint =
                if Path::new("/proc/self").exists() { "" } else { "; mount /proc, which xlaunch needs" };
            let failed = system_errors::context("failed to start the reaper, /proc/self/exe", &error);
            std::io::Error::new(error.kind(), format!("{failed}{hint}"))
        })
    }

    pub(super) fn start_as(mut command: Command, run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        // Keep no working directory busy, no output pipe open, and no mark of an outer launch.
        command.env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        sys::detach(&mut command);
        let mut child = children::spawn(&mut command)?;
        let pipe = child.stdin.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
        let mut records = Vec::new();
        record(&mut records, b'm', membership::mark(run_id).as_bytes());
        record(&mut records, b's', session().to_string().as_bytes());
        record(&mut records, b't', membership::clock_ticks().to_string().as_bytes());
        if let Some(path) = cgroup::path_prefix(run_id) {
            record(&mut records, b'c', path.as_os_str().as_bytes());
        }
        for path in private {
            record(&mut records, b'd', std::path::absolute(path)?.as_os_str().as_bytes());
        }
        let reaper = Self { child, pipe };
        (&reaper.pipe).write_all(&records)?;
        Ok(reaper)
    }

    /// Replaces the workers in the cleanup plan by those of these trees. Call it after each start.
    pub(crate) fn watch<'a>(&self, trees: impl Iterator<Item = &'a ProcessTree>) {
        let mut records = Vec::new();
        record(&mut records, b'a', b"");
        for (pid, started) in trees.flat_map(ProcessTree::leaders) {
            record(&mut records, b'w', format!("{pid}:{started}").as_bytes());
        }
        // If the reaper was killed, the launch continues without one.
        let _ = (&self.pipe).write_all(&records);
    }

    #[cfg(test)]
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        children::forget(self.child.id());
    }
}

fn record(records: &mut Vec<u8>, kind: u8, value: &[u8]) {
    records.push(kind);
    records.extend_from_slice(value);
    records.push(0);
}

/// The reaper process: reads records until standard input ends, then cleans up.
pub fn main() -> ExitCode {
    // For `ps`; the reaper works under its program's name, too.
    let _ = rustix::thread::set_name(c"launch-reaper");
    let mut plan = CleanupPlan::new();
    let mut records = Vec::new();
    match std::io::stdin().lock().read_to_end(&mut records) {
        Ok(_) => {
            // A record without its zero byte may be half a path.
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
        let deadline = Instant::now() + CLEANUP_TIMEOUT;
        let mut pause = Duration::from_millis(1);
        while !self.kill() && Instant::now() < deadline {
            std::thread::sleep(pause);
            pause = MAX_CLEANUP_POLL_INTERVAL.min(pause * 2);
        }
        for directory in &self.directories {
            // xlaunch may have removed it already, and there is no one to report an error to.
            let _ = fs_err::remove_dir_all(directory);
        }
    }

    /// Returns whether neither a process nor a cgroup remains.
    fn kill(&self) -> bool {
        let cgroups = self.cgroups.as_deref().map(cgroup::with_prefix).unwrap_or_default();
        for path in &cgroups {
            // Fails before Linux 5.14; then its processes are killed one by one below.
            let _ = cgroup::kill(path);
        }
        let found = membership::kill(|| {
            let mut found = self.processes.list();
            found.extend(cgroups.iter().flat_map(|path| cgroup::processes(path)));
            found
        });
        let removed = cgroups.iter().filter(|path| cgroup::remove(path).is_ok()).count();
        found.is_empty() && removed == cgroups.len()
    }
}
