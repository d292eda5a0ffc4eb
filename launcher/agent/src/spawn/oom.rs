//! Processes that the kernel has killed for lack of memory, by counters that anybody may read.
//!
//! A rank's own cgroup counts only where somebody has turned the memory controller on for it. The cgroup that xlaunch was
//! started in nearly always does: a container's, a unit's or a session's; the system does since Linux 4.13. All of them
//! count a kill before the process that dies is seen to end.

use std::path::{Path, PathBuf};

/// Processes killed for lack of memory since an attempt began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    /// Of one rank.
    pub rank: u64,
    /// In xlaunch's own cgroup: of all ranks, and of whatever else runs there.
    pub launch: u64,
    /// On the host, where that can be known.
    pub host: Option<u64>,
}

/// What was counted before an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    launch: u64,
    host: Option<u64>,
}

impl Before {
    pub(super) fn now() -> Self {
        Self::below(Path::new("/"))
    }

    /// With the kernel's file systems below `root`.
    fn below(root: &Path) -> Self {
        let launch = own(root).iter().find_map(|file| count(file)).unwrap_or(0);
        Self { launch, host: count(&root.join("proc/vmstat")) }
    }

    /// What was added since. `rank` is what the rank's own cgroup has counted.
    pub(super) fn since(self, rank: u64) -> OomKills {
        self.until(Self::now(), rank)
    }

    fn until(self, now: Self, rank: u64) -> OomKills {
        let launch = now.launch.saturating_sub(self.launch);
        let host = now.host.zip(self.host).map(|(now, before)| now.saturating_sub(before));
        OomKills { rank, launch, host }
    }
}

/// Where the kernel may count for this process's cgroup, the likeliest first: in version 2 or 1, and in a container that
/// sees its own cgroup as the root, though `/proc` names it from outside.
fn own(root: &Path) -> Vec<PathBuf> {
    let text = fs_err::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut files = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.events"),
            "memory" => ("sys/fs/cgroup/memory", "memory.oom_control"),
            _ => continue,
        };
        let mount = root.join(mount);
        files.push(mount.join(path.trim_start_matches('/')).join(file));
        files.push(mount.join(file));
    }
    files
}

/// The number behind `oom_kill` in a file of names and numbers.
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
        let before = Before::below(root(files).path());
        (before.launch, before.host)
    }

    #[test]
    fn the_own_cgroup_counts_in_both_versions_and_in_containers() {
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
    fn only_what_was_added_counts() {
        let before = Before { launch: 3, host: Some(7) };
        let now = Before { launch: 4, host: Some(9) };
        assert_eq!(before.until(now, 0), OomKills { rank: 0, launch: 1, host: Some(2) });
        // In another cgroup than before.
        assert_eq!(now.until(before, 5), OomKills { rank: 5, launch: 0, host: Some(0) });
        let unknown = Before { launch: 3, host: None };
        assert_eq!(unknown.until(now, 0), OomKills { rank: 0, launch: 1, host: None });
    }
}
