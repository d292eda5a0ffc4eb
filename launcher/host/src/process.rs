//! Snapshots of processes, read from `/proc`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Flag in `/proc/PID/stat` of a process that is exiting.
const PF_EXITING: i64 = 4;
/// Python's module that a resource tracker runs, in its command line.
const RESOURCE_TRACKER: &[u8] = b"multiprocessing.resource_tracker";

/// State of a process at the time of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    /// The state letter that `ps` shows.
    pub state: char,
    pub threads: u32,
    /// CPU time of the process and of the children that it has waited for, in clock ticks.
    pub ticks: u64,
    /// Start time in clock ticks since boot. Ids are reused, so only id and start time together identify a process.
    pub started: u64,
    /// Number of resident pages.
    pub pages: u64,
    pub name: String,
}

impl Process {
    /// Reads the process that has this id now.
    pub fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs_err::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Reads this process. Group and session are 0 if their leaders are outside this PID namespace; `getpgid` and
    /// `getsid` also return 0 then.
    pub fn own() -> Option<Self> {
        Self::read(std::process::id())
    }

    /// Parses `/proc/PID/stat`. Fields are numbered as in proc(5); field 3 follows the name in parentheses.
    fn parse(stat: &[u8]) -> Option<Self> {
        // The name may contain any bytes, including parentheses.
        let stat = String::from_utf8_lossy(stat);
        let (head, tail) = stat.rsplit_once(") ")?;
        let (pid, name) = head.split_once(" (")?;
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let small = |field: usize| u32::try_from(number(field)?).ok();
        Some(Self {
            pid: pid.parse().ok()?,
            parent: small(4)?,
            group: small(5)?,
            session: small(6)?,
            state: fields.first()?.chars().next()?,
            threads: small(20)?,
            // The times of children are signed, and negative in some old kernels.
            ticks: (14..=17).map(|field| number(field).unwrap_or(0)).sum(),
            started: number(22)?,
            pages: number(24)?,
            name: name.to_string(),
        })
    }

    /// Reads all processes of this PID namespace.
    pub fn all() -> Vec<Self> {
        let Ok(entries) = fs_err::read_dir("/proc") else { return Vec::new() };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // A process that exits during the scan is left out.
        pids.filter_map(Self::read).collect()
    }

    /// Returns `root` and its descendants among `all`, following parent links, parents first.
    pub fn tree(all: &[Self], root: u32) -> Vec<&Self> {
        let mut found: Vec<&Self> = all.iter().filter(|process| process.pid == root).collect();
        let mut next = 0;
        while let Some(parent) = found.get(next).map(|process| process.pid) {
            // Ids may be reused during a scan, so parent links can form a cycle.
            let is_new =
                |child: &&Self| child.parent == parent && !found.iter().any(|known| known.pid == child.pid);
            let children: Vec<&Self> = all.iter().filter(is_new).collect();
            found.extend(children);
            next += 1;
        }
        found
    }

    /// Returns whether the process is stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        self.state == 'T'
    }

    /// Returns whether the process removes the shared memory of processes that have died, and exits after the last of
    /// them: the resource tracker of Python's `multiprocessing`, or PyTorch's manager of shared memory.
    pub fn is_cleaner(&self) -> bool {
        let is_tracker = || {
            let command = fs_err::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
            command.windows(RESOURCE_TRACKER.len()).any(|part| part == RESOURCE_TRACKER)
        };
        // The kernel cuts names after 15 bytes.
        self.name == "torch_shm_manag" || is_tracker()
    }

    /// Returns whether the process has exited and only waits to be reaped. A main thread that exits before the other
    /// threads also shows as a zombie, hence the check of the thread count.
    pub fn ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }

    /// Returns the signal that has killed a process, if it is exiting. The kernel shows this to the same user only.
    pub fn killed_by(pid: u32) -> Option<i32> {
        let stat = fs_err::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse_killed_by(&String::from_utf8_lossy(&stat))
    }

    fn parse_killed_by(stat: &str) -> Option<i32> {
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<i64>().ok();
        // Field 52, the last one, is the wait status.
        let (flags, status) = (number(9)?, number(52)?);
        let signal = i32::try_from(status & 0x7f).ok()?;
        (flags & PF_EXITING != 0 && signal != 0).then_some(signal)
    }

    /// Sends a signal to the process, unless its id has been reused.
    pub fn signal(&self, signal: Signal) {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // The id may have been reused before the pidfd was opened, but not afterwards.
        if Self::read(self.pid).is_some_and(|now| now.started == self.started) {
            // The process may have exited or belong to another user; the caller checks which processes remain.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }

    /// Returns whether the process has a handler for this signal.
    pub fn handles(&self, signal: Signal) -> bool {
        // A process that is gone has none.
        has_signal(&status(self.pid), "SigCgt:", signal)
    }

    /// Returns the value of a variable in the environment that the process was started with. The kernel shows this to
    /// the same user only.
    pub fn variable(&self, name: &str) -> Option<OsString> {
        let environment = self.environment()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let value = variables.find_map(|one| one.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        Some(OsString::from_vec(value.to_vec()))
    }

    /// Returns the environment that the process was started with: `NAME=value` entries, each ended by a zero byte.
    fn environment(&self) -> Option<Vec<u8>> {
        fs_err::read(format!("/proc/{}/environ", self.pid)).ok()
    }
}

/// Returns whether a process ignores this signal; false if it has ended.
pub(crate) fn ignores(pid: u32, signal: Signal) -> bool {
    has_signal(&status(pid), "SigIgn:", signal)
}

/// Returns `/proc/PID/status`; empty if the process is gone.
fn status(pid: u32) -> String {
    fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()
}

/// Returns whether a signal is in this mask of a `/proc/PID/status`. Bit 0 of a mask is signal 1.
pub(crate) fn has_signal(status: &str, mask: &str, signal: Signal) -> bool {
    let bits = status.lines().find_map(|line| line.strip_prefix(mask));
    let bits = bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    bits >> (signal.as_raw() - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_read_from_the_kernels_masks() {
        let status =
            "Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        let ignored = |signal| has_signal(status, "SigIgn:", signal);
        assert!(ignored(Signal::HUP) && ignored(Signal::PIPE) && !ignored(Signal::INT));
        assert!(
            has_signal(status, "SigCgt:", Signal::INT) && !has_signal("Name:\tx\n", "SigIgn:", Signal::HUP)
        );
    }

    #[test]
    fn stat_with_parentheses_and_spaces_in_the_name_is_parsed() {
        let stat = b"42 (a) R (b) S 1 42 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 3 0 1234 5 6";
        let read = Process::parse(stat).unwrap();
        assert_eq!((read.pid, read.name.as_str(), read.state, read.parent), (42, "a) R (b", 'S', 1));
        assert_eq!((read.group, read.session, read.threads, read.started), (42, 7, 3, 1234));
        assert_eq!(Process::read(std::process::id()).unwrap().pid, std::process::id());
    }

    #[test]
    fn signal_of_a_process_that_is_being_torn_down_is_known() {
        let stat = |flags: u32, status: u32| {
            let unused = "0 ".repeat(42);
            format!("42 (a) R (b) R 1 42 7 0 -1 {flags} {unused}{status}")
        };
        assert_eq!(Process::parse_killed_by(&stat(0x40_0104, 9)), Some(9));
        assert_eq!(Process::parse_killed_by(&stat(0x40_0104, 0x100)), None, "exit code 1");
        assert_eq!(Process::parse_killed_by(&stat(0x40_0100, 9)), None, "not exiting");
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert_eq!(Process::killed_by(child.id()), None);
        child.kill().unwrap();
        while Process::read(child.id()).unwrap().state != 'Z' {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(Process::killed_by(child.id()), Some(9));
        child.wait().unwrap();
    }

    #[test]
    fn tree_has_all_descendants_and_nothing_else() {
        let process = |pid, parent| {
            let stat = format!("{pid} (x) S {parent} 1 1 0 -1 0 1 0 0 0 0 0 0 0 20 0 1 0 1 5 6");
            Process::parse(stat.as_bytes()).unwrap()
        };
        let all = [process(5, 3), process(2, 1), process(3, 2), process(4, 1), process(6, 3), process(1, 0)];
        let pids = |root| Process::tree(&all, root).iter().map(|process| process.pid).collect::<Vec<_>>();
        assert_eq!((pids(2), pids(4), pids(9)), (vec![2, 3, 5, 6], vec![4], vec![]));
    }

    #[test]
    fn stat_with_any_bytes_in_the_name_is_parsed() {
        let stat = b"42 (a) b (\xff 1) S 7 42 42 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 900 8192 55 0";
        let read = Process::parse(stat).unwrap();
        assert_eq!((read.parent, read.ticks, read.started, read.pages), (7, 100, 900, 55));
        assert_eq!(Process::parse(b"garbage"), None);
    }
}
