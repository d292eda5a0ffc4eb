//! Cgroups of one attempt: `xlaunch-<run>.<pid>-<attempt>/<local rank>` below xlaunch's own cgroup, version 2.
//!
//! A process cannot leave its cgroup by forking, in whatever session it hides. No controller is turned on, so that
//! xlaunch's own cgroup may keep its processes; kills for lack of memory are read where somebody else has.

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::oom;
use crate::process::Process;

/// Where version 2 is mounted: alone, or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// What `statfs` says of version 2.
const MAGIC: rustix::fs::FsWord = 0x6367_7270;

/// The cgroups of an attempt. They are removed by [`remove`].
#[derive(Debug)]
pub(super) struct Leaves {
    /// The one that holds those of all ranks.
    pub(super) path: PathBuf,
    procs: Vec<Arc<OwnedFd>>,
}

impl Leaves {
    /// Creates one for each of `world` local ranks; `None` where that is not possible.
    pub(super) fn create(run_id: &str, attempt: u32, world: u32) -> Option<Self> {
        let path = own()?.join(format!("{}{attempt}", prefix(run_id)));
        let mut leaves = Self { path, procs: Vec::new() };
        // One that exists is not ours, and not ours to remove.
        fs_err::create_dir(&leaves.path).ok()?;
        match leaves.fill(world) {
            Ok(()) => Some(leaves),
            Err(_) => {
                // Of what could not be created, nothing may be left.
                let _ = remove(&leaves.path);
                None
            }
        }
    }

    fn fill(&mut self, world: u32) -> std::io::Result<()> {
        for rank in 0..world {
            let leaf = self.leaf(rank);
            fs_err::create_dir(&leaf)?;
            let procs = fs_err::OpenOptions::new().write(true).open(leaf.join("cgroup.procs"))?;
            self.procs.push(Arc::new(procs.into_parts().0.into()));
        }
        Ok(())
    }

    fn leaf(&self, local_rank: u32) -> PathBuf {
        self.path.join(local_rank.to_string())
    }

    /// Where a process of this rank writes "0" to enter.
    pub(super) fn entrance(&self, local_rank: u32) -> Option<Arc<OwnedFd>> {
        self.procs.get(local_rank as usize).cloned()
    }

    /// Whether a process, running or not yet collected, is in one of them.
    pub(super) fn hold(&self, pid: u32) -> bool {
        let Some(name) = self.path.file_name() else { return false };
        let text = fs_err::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        path.is_some_and(|path| Path::new(path).iter().any(|part| part == name))
    }

    /// Processes of this rank that the kernel has killed for lack of memory, where it counts.
    pub(super) fn oom_kills(&self, local_rank: u32) -> Option<u64> {
        oom::count(&self.leaf(local_rank).join("memory.events"))
    }
}

/// What the names of this launch's cgroups begin with. Other launches on this host may have the same id.
fn prefix(run_id: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
    let run: String = run_id.chars().take(100).map(plain).collect();
    format!("xlaunch-{run}.{}-", std::process::id())
}

/// What the paths of this launch's cgroups begin with, whether or not there are any.
pub(super) fn path_prefix(run_id: &str) -> Option<PathBuf> {
    Some(own()?.join(prefix(run_id)))
}

/// The cgroups whose paths begin with this.
pub(super) fn with_prefix(prefix: &Path) -> Vec<PathBuf> {
    let (Some(parent), Some(name)) = (prefix.parent(), prefix.file_name()) else { return Vec::new() };
    let name = name.as_encoded_bytes();
    let mut all = below(parent);
    all.retain(|path| path.file_name().is_some_and(|it| it.as_encoded_bytes().starts_with(name)));
    all
}

/// This process's own cgroup.
fn own() -> Option<PathBuf> {
    let version_2 = |path: &&&str| rustix::fs::statfs(**path).is_ok_and(|found| found.f_type == MAGIC);
    let mount = MOUNTS.iter().find(version_2)?;
    let text = fs_err::read_to_string("/proc/self/cgroup").ok()?;
    let path = Path::new(text.lines().find_map(|line| line.strip_prefix("0::/"))?);
    // It lies outside of what is mounted here.
    let outside = path.components().any(|part| part == Component::ParentDir);
    (!outside).then(|| Path::new(mount).join(path))
}

/// Kills all processes in a cgroup and below. An error where the kernel cannot, before 5.14.
pub(super) fn kill(cgroup: &Path) -> std::io::Result<()> {
    fs_err::write(cgroup.join("cgroup.kill"), "1")
}

/// Living processes in a cgroup and below.
pub(super) fn members(cgroup: &Path) -> Vec<Process> {
    let text = fs_err::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.parse().ok());
    let mut members: Vec<Process> = pids.filter_map(Process::read).filter(|it| !it.ended()).collect();
    members.extend(below(cgroup).iter().flat_map(|child| self::members(child)));
    members
}

/// Removes a cgroup and those below; an error while one holds processes.
pub(super) fn remove(cgroup: &Path) -> std::io::Result<()> {
    below(cgroup).iter().try_for_each(|child| remove(child))?;
    match fs_err::remove_dir(cgroup) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn below(cgroup: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs_err::read_dir(cgroup) else { return Vec::new() };
    let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.map(|entry| entry.path()).collect()
}
