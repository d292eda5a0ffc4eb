//! Processes as `/proc` shows them at the time of a look, for whoever ends them, watches them or counts what is left.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process at the time of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    /// As in `ps`.
    pub state: char,
    pub threads: u32,
    /// Clock ticks of CPU time: its own, and of children that were collected.
    pub ticks: u64,
    /// Ticks from the start of the system to its own.
    pub started: u64,
    /// Pages in memory.
    pub pages: u64,
    pub name: String,
}

impl Process {
    /// The process with this number now.
    pub fn read(pid: u32) -> Option<Self> {
        Self::parse(&fs_err::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// This process. Its group and its session are 0 where they began outside of its container: system calls that ask for
    /// them have no number to answer with either.
    pub fn own() -> Option<Self> {
        Self::read(std::process::id())
    }

    /// `/proc/PID/stat`; fields as numbered in proc(5), where the third follows the name in parentheses.
    fn parse(stat: &[u8]) -> Option<Self> {
        // The name can be any bytes, parentheses too.
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
            // Times of collected children are signed, and were wrong in old kernels.
            ticks: (14..=17).map(|field| number(field).unwrap_or(0)).sum(),
            started: number(22)?,
            pages: number(24)?,
            name: name.to_string(),
        })
    }

    /// All processes that can be seen.
    pub fn all() -> Vec<Self> {
        let Ok(entries) = fs_err::read_dir("/proc") else { return Vec::new() };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // One that ends meanwhile is left out.
        pids.filter_map(Self::read).collect()
    }

    /// Nothing of it runs, and it only waits to be collected. A first thread that has ended before others does not.
    pub fn ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }

    /// Signals it, unless its number is another process's by now.
    pub fn signal(&self, signal: Signal) {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // The number may have passed on before the descriptor was opened, but no longer after.
        if Self::read(self.pid).is_some_and(|now| now.started == self.started) {
            // It may have ended, or be another user's: whoever asks what is left sees it.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }

    /// Whether its environment, as it was started with, has this variable: `NAME=value`.
    pub fn carries(&self, variable: &[u8]) -> bool {
        fs_err::read(format!("/proc/{}/environ", self.pid))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|one| one == variable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_and_spaces_are_read() {
        let stat = b"42 (a) R (b) S 1 42 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 3 0 1234 5 6";
        let read = Process::parse(stat).unwrap();
        assert_eq!((read.pid, read.name.as_str(), read.state, read.parent), (42, "a) R (b", 'S', 1));
        assert_eq!((read.group, read.session, read.threads, read.started), (42, 7, 3, 1234));
        assert_eq!(Process::read(std::process::id()).unwrap().pid, std::process::id());
    }

    #[test]
    fn names_of_processes_may_hold_anything() {
        let stat = b"42 (a) b (\xff 1) S 7 42 42 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 900 8192 55 0";
        let read = Process::parse(stat).unwrap();
        assert_eq!((read.parent, read.ticks, read.started, read.pages), (7, 100, 900, 55));
        assert_eq!(Process::parse(b"garbage"), None);
    }
}
