//! Resources used by a process, a directory and a cgroup.

use std::path::{Path, PathBuf};

/// Resources of a process.
pub(crate) struct Usage {
    pub(crate) resident_kib: u64,
    pub(crate) descriptors: usize,
    pub(crate) threads: u64,
    /// User and system time of all threads, including finished ones.
    pub(crate) cpu_seconds: f64,
}

impl Usage {
    pub(crate) fn of(pid: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // utime and stime are counted from the state, which follows the name in parentheses.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        Self {
            resident_kib: field("VmRSS:"),
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
            threads: field("Threads:"),
            cpu_seconds: ticks / rustix::param::clock_ticks_per_second() as f64,
        }
    }
}

pub(crate) fn files_below(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { 1 + files_below(&entry.path()) } else { 1 }).sum()
}

/// Returns the number of cgroups below that of this process.
pub(crate) fn cgroups() -> usize {
    fn below(dir: &Path) -> usize {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter(|entry| entry.path().is_dir()).map(|entry| 1 + below(&entry.path())).sum()
    }
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    own.map_or(0, |own| below(&PathBuf::from("/sys/fs/cgroup").join(own)))
}
