//! The cgroups (version 2) of an attempt: `xlaunch-<run>.<pid>.<namespace>-<attempt>/<local rank>` below xlaunch's own
//! cgroup.
//!
//! A process cannot leave its cgroup by forking or by starting a session. xlaunch enables no controllers, because a
//! cgroup with enabled controllers must not contain processes, and xlaunch's own does. OOM kills are therefore counted
//! only if the administrator has enabled the memory controller.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::oom;
use crate::cgroups::{children, remove};
use crate::process::Process;

/// Mount points of version 2, alone or together with version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// `CGROUP2_SUPER_MAGIC`.
const CGROUP2_MAGIC: rustix::fs::FsWord = 0x6367_7270;

/// The cgroups of an attempt's ranks. They must be removed with [`remove`](crate::cgroups::remove).
#[derive(Debug)]
pub(super) struct RankCgroups {
    /// The parent of all ranks' cgroups.
    pub(super) path: PathBuf,
}

impl RankCgroups {
    /// Creates a cgroup for each of `world` local ranks; `None` if that is impossible.
    pub(super) fn create(run_id: &str, attempt: u32, world: u32) -> Option<Self> {
        let path = own_cgroup()?.join(format!("{}{attempt}", prefix(run_id)));
        let cgroups = Self { path };
        // An existing cgroup belongs to another program, and must not be removed.
        fs_err::create_dir(&cgroups.path).ok()?;
        match cgroups.fill(world) {
            Ok(()) => Some(cgroups),
            Err(_) => {
                // Remove the cgroups that were created before the error.
                let _ = remove(&cgroups.path);
                None
            }
        }
    }

    fn fill(&self, world: u32) -> std::io::Result<()> {
        for rank in 0..world {
            fs_err::create_dir(self.rank_dir(rank))?;
            self.open_procs(rank)?;
        }
        Ok(())
    }

    fn open_procs(&self, local_rank: u32) -> std::io::Result<fs_err::File> {
        fs_err::OpenOptions::new().write(true).open(self.rank_dir(local_rank).join("cgroup.procs"))
    }

    fn rank_dir(&self, local_rank: u32) -> PathBuf {
        self.path.join(local_rank.to_string())
    }

    /// Opens `cgroup.procs` of a rank. A process enters the cgroup by writing "0".
    pub(super) fn procs_file(&self, local_rank: u32) -> Option<Arc<OwnedFd>> {
        // Opened for each start and not kept open, as there may be hundreds of ranks.
        self.open_procs(local_rank).ok().map(|procs| Arc::new(procs.into_parts().0.into()))
    }

    /// Returns whether a process, running or zombie, is in one of these cgroups.
    pub(super) fn contains(&self, pid: u32) -> bool {
        let Some(name) = self.path.file_name() else { return false };
        let text = fs_err::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        path.is_some_and(|path| Path::new(path).iter().any(|part| part == name))
    }

    /// Number of OOM kills among the processes of this rank; `None` if the kernel does not count them.
    pub(super) fn oom_kills(&self, local_rank: u32) -> Option<u64> {
        oom::count(&self.rank_dir(local_rank).join("memory.events"))
    }
}

/// Name prefix of this launch's cgroups. The pid distinguishes launches with the same id; nodes of a job in containers
/// may have the same pid too, and share the hierarchy.
fn prefix(run_id: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    let run: String = run_id.chars().take(100).map(plain).collect();
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    format!("xlaunch-{run}.{}.{namespace}-", std::process::id())
}

/// Path prefix of this launch's cgroups, whether or not any exist.
pub(super) fn path_prefix(run_id: &str) -> Option<PathBuf> {
    Some(own_cgroup()?.join(prefix(run_id)))
}

/// Returns the existing cgroups with this path prefix.
pub(super) fn with_prefix(prefix: &Path) -> Vec<PathBuf> {
    let (Some(parent), Some(name)) = (prefix.parent(), prefix.file_name()) else { return Vec::new() };
    let name = name.as_encoded_bytes();
    let mut all = children(parent);
    all.retain(|path| path.file_name().is_some_and(|it| it.as_encoded_bytes().starts_with(name)));
    all
}

/// Returns the path of this process's cgroup.
fn own_cgroup() -> Option<PathBuf> {
    let version_2 =
        |path: &&&str| rustix::fs::statfs(**path).is_ok_and(|found| found.f_type == CGROUP2_MAGIC);
    let mount = MOUNTS.iter().find(version_2)?;
    let text = fs_err::read_to_string("/proc/self/cgroup").ok()?;
    let path = Path::new(text.lines().find_map(|line| line.strip_prefix("0::/"))?);
    // In some containers the cgroup is outside the part of the hierarchy that is mounted.
    let outside = path.components().any(|part| part == Component::ParentDir);
    (!outside).then(|| Path::new(mount).join(path))
}

/// Kills all processes in a cgroup and its descendants. Fails before Linux 5.14.
pub(super) fn kill(cgroup: &Path) -> std::io::Result<()> {
    fs_err::write(cgroup.join("cgroup.kill"), "1")
}

/// Returns the living processes in a cgroup and its descendants.
pub(super) fn processes(cgroup: &Path) -> Vec<Process> {
    let text = fs_err::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.parse().ok());
    let mut processes: Vec<Process> = pids.filter_map(Process::read).filter(|it| !it.ended()).collect();
    processes.extend(children(cgroup).iter().flat_map(|child| self::processes(child)));
    processes
}
