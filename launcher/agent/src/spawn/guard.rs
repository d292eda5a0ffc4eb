//! A process that outlives xlaunch by moments: if xlaunch is killed, SIGKILL included, it kills what a launch started and
//! removes its private directories.
//!
//! It is this program again, under another name, in a session of its own so that terminals and `pkill xlaunch` miss it,
//! with a pipe as its only tie to xlaunch. The pipe brings what there is to clean up, as records; its end means that xlaunch
//! is gone. A guard that is not needed any more is killed.
//!
//! A record is a letter, its value, and a zero byte:
//!
//! ```text
//! m MARK    value of XLAUNCH_SCOPE            d PATH        private directory
//! s ID      xlaunch's session                 c PATH        what paths of its cgroups begin with
//! t TICKS   workers have started after this   w PID:TICKS   worker and its start time
//! a         a new attempt: forget workers
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::scope::{Scope, session};
use super::tree::{self, Family};
use super::{cgroup, children, sys};

/// The guard's name: what `argv[0]` is for [`main`].
pub const NAME: &str = "launch-guard";
/// Longest time that it waits for processes that do not end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest pause between looks at them.
const PAUSE: Duration = Duration::from_millis(50);

/// A running guard. Dropped, it ends and cleans nothing up: xlaunch has.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts the guard of a launch with these private directories. Start it before scopes and directories are created, and
    /// drop it when they are gone.
    pub fn start(run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME);
        Self::start_as(command, run_id, private)
    }

    pub(super) fn start_as(mut command: Command, run_id: &str, private: &[PathBuf]) -> std::io::Result<Self> {
        // Neither a working directory nor output that somebody waits for is kept, and no mark of an outer launch.
        command.env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        sys::detach(&mut command);
        let mut child = children::start(&mut command)?;
        let pipe = child.stdin.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
        let mut records = Vec::new();
        record(&mut records, b'm', tree::mark(run_id).as_bytes());
        record(&mut records, b's', session().to_string().as_bytes());
        record(&mut records, b't', tree::now().to_string().as_bytes());
        if let Some(path) = cgroup::path_prefix(run_id) {
            record(&mut records, b'c', path.as_os_str().as_bytes());
        }
        for path in private {
            record(&mut records, b'd', std::path::absolute(path)?.as_os_str().as_bytes());
        }
        let guard = Self { child, pipe };
        (&guard.pipe).write_all(&records)?;
        Ok(guard)
    }

    /// Tells it of a scope's workers, in place of those of an earlier one. Call it when they have started.
    pub fn watch(&self, scope: &Scope) {
        let mut records = Vec::new();
        record(&mut records, b'a', b"");
        for (pid, started) in scope.leaders() {
            record(&mut records, b'w', format!("{pid}:{started}").as_bytes());
        }
        // A guard that somebody killed guards nothing; the launch goes on without.
        let _ = (&self.pipe).write_all(&records);
    }

    /// Its process id.
    #[cfg(test)]
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // It may have been killed before.
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

/// The guard: reads records to the end of standard input, then cleans up.
pub fn main() -> ExitCode {
    // For `ps`; a guard under its program's name guards as well.
    let _ = rustix::thread::set_name(c"launch-guard");
    let mut charge = Charge::new();
    let mut records = Vec::new();
    match std::io::stdin().lock().read_to_end(&mut records) {
        Ok(_) => {
            // A record without its end may be half a path.
            let whole = records.split_inclusive(|byte| *byte == 0).filter_map(|it| it.strip_suffix(&[0]));
            whole.for_each(|record| charge.take(record));
            charge.clean_up();
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// What a guard is to clean up.
struct Charge {
    family: Family,
    cgroups: Option<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Charge {
    fn new() -> Self {
        let family = Family {
            mark: String::new(),
            session: 0,
            leaders: BTreeMap::new(),
            since: u64::MAX,
            adopts: false,
        };
        Self { family, cgroups: None, directories: Vec::new() }
    }

    fn take(&mut self, record: &[u8]) {
        let Some((kind, value)) = record.split_first() else { return };
        let (path, text) = (Path::new(OsStr::from_bytes(value)), String::from_utf8_lossy(value));
        match kind {
            b'm' => self.family.mark = text.into_owned(),
            b's' => self.family.session = text.parse().unwrap_or(0),
            b't' => self.family.since = text.parse().unwrap_or(u64::MAX),
            b'd' => self.directories.push(path.to_path_buf()),
            b'a' => self.family.leaders.clear(),
            b'c' => self.cgroups = Some(path.to_path_buf()),
            b'w' => {
                let (pid, started) = text.split_once(':').unwrap_or_default();
                if let (Ok(pid), Ok(started)) = (pid.parse(), started.parse()) {
                    self.family.leaders.insert(pid, started);
                }
            }
            _ => {}
        }
    }

    fn clean_up(&self) {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = Duration::from_millis(1);
        while !self.kill() && Instant::now() < deadline {
            std::thread::sleep(pause);
            pause = PAUSE.min(pause * 2);
        }
        for directory in &self.directories {
            // xlaunch may have removed it, and there is nobody to tell of one that stays.
            let _ = fs_err::remove_dir_all(directory);
        }
    }

    /// Whether nothing is left to kill, nor a cgroup to remove.
    fn kill(&self) -> bool {
        let cgroups = self.cgroups.as_deref().map(cgroup::with_prefix).unwrap_or_default();
        for path in &cgroups {
            // Where the kernel is too old, its processes are found below.
            let _ = cgroup::kill(path);
        }
        let found = tree::kill(|| {
            let mut members = self.family.members();
            members.extend(cgroups.iter().flat_map(|path| cgroup::members(path)));
            members
        });
        let removed = cgroups.iter().filter(|path| cgroup::remove(path).is_ok()).count();
        found.is_empty() && removed == cgroups.len()
    }
}
