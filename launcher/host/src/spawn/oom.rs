//! Detects OOM kills from kernel counters that any user may read.
//!
//! The cgroup of a rank has a counter only if the administrator has enabled the memory controller for it. The cgroup
//! that xlaunch was started in (of a container, a systemd unit or a login session) nearly always has one, and the host
//! has one since Linux 4.13. The kernel increments all counters before the exit of the killed process becomes visible.

use std::path::{Path, PathBuf};

use crate::cgroups::{self, Version};

/// OOM kills since an attempt began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    /// OOM kills in the cgroup of one rank.
    pub rank: u64,
    /// OOM kills in xlaunch's own cgroup, which contains all ranks and possibly other processes.
    pub launch: u64,
    /// OOM kills on the host; `None` if unknown.
    pub host: Option<u64>,
}

/// The counters at one point in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct OomCounters {
    launch: u64,
    host: Option<u64>,
}

impl OomCounters {
    pub(super) fn read() -> Self {
        Self::read_from(Path::new("/"))
    }

    /// [`read`](Self::read) with `/proc` and `/sys` below `root`.
    fn read_from(root: &Path) -> Self {
        let launch = own_counters(root).iter().find_map(|file| count(file)).unwrap_or(0);
        Self { launch, host: count(&root.join("proc/vmstat")) }
    }

    /// Returns the kills since these counters were read. `rank` is the counter of the rank's own cgroup, which was
    /// created with the attempt and so started at 0.
    pub(super) fn kills_since(self, rank: u64) -> OomKills {
        self.difference(Self::read(), rank)
    }

    fn difference(self, now: Self, rank: u64) -> OomKills {
        let launch = now.launch.saturating_sub(self.launch);
        let host = now.host.zip(self.host).map(|(now, before)| now.saturating_sub(before));
        OomKills { rank, launch, host }
    }
}

/// Returns the files that may contain the counter of this process's cgroup (version 2 or 1), most likely first.
fn own_counters(root: &Path) -> Vec<PathBuf> {
    let own = cgroups::own(root, "memory").into_iter();
    own.flat_map(|(version, dirs)| {
        let file = match version {
            Version::Two => "memory.events",
            Version::One => "memory.oom_control",
        };
        let ends = [dirs.first(), dirs.last()].into_iter().flatten();
        ends.map(|dir| dir.join(file)).collect::<Vec<_>>()
    })
    .collect()
}

/// Reads the value of `oom_kill` in a file of names and values.
pub(super) fn count(file: &Path) -> Option<u64> {
    let text = fs_err::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root directory with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::TempDir::new().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn counted(files: &[(&str, &str)]) -> (u64, Option<u64>) {
        let before = OomCounters::read_from(root(files).path());
        (before.launch, before.host)
    }

    #[test]
    fn own_counter_is_found_in_both_cgroup_versions_and_in_containers() {
        let (events, control) =
            ("low 0\noom 4\noom_kill 3\noom_group_kill 1\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
        let two = ("proc/self/cgroup", "0::/user.slice/session-2.scope\n");
        let one = ("proc/self/cgroup", "9:memory:/docker/ab\n4:cpu:/\n0::/\n");
        let vmstat = ("proc/vmstat", "nr_free_pages 9\noom_kill 7\n");
        let session = "sys/fs/cgroup/user.slice/session-2.scope/memory.events";
        assert_eq!(
            counted(&[two, vmstat, (session, events), ("sys/fs/cgroup/memory.events", control)]),
            (3, Some(7))
        );
        assert_eq!(counted(&[two, ("sys/fs/cgroup/memory.events", events)]), (3, None));
        assert_eq!(
            counted(&[one, vmstat, ("sys/fs/cgroup/memory/docker/ab/memory.oom_control", control)]),
            (2, Some(7))
        );
        assert_eq!(counted(&[one, ("sys/fs/cgroup/memory/memory.oom_control", control)]), (2, None));
        assert_eq!(counted(&[two]), (0, None));
        assert_eq!(counted(&[]), (0, None));
    }

    #[test]
    fn only_kills_since_the_first_reading_count() {
        let before = OomCounters { launch: 3, host: Some(7) };
        let now = OomCounters { launch: 4, host: Some(9) };
        assert_eq!(before.difference(now, 0), OomKills { rank: 0, launch: 1, host: Some(2) });
        // The process was moved to another cgroup, so the counter went down.
        assert_eq!(now.difference(before, 5), OomKills { rank: 5, launch: 0, host: Some(0) });
        let unknown = OomCounters { launch: 3, host: None };
        assert_eq!(unknown.difference(now, 0), OomKills { rank: 0, launch: 1, host: None });
    }
}
