//! A cgroup whose processes share a limit.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

use crate::wait_for;

/// A cgroup with a limit, removed when dropped.
#[derive(Debug)]
pub struct LimitedCgroup(PathBuf);

/// A controller, and its files with a limit in version 1 and 2.
struct Controller {
    name: &'static str,
    version1: &'static str,
    version2: &'static str,
}

impl LimitedCgroup {
    /// Creates a cgroup with a memory limit; the name is made unique by this process's id.
    ///
    /// # Errors
    /// Here and below: if the controller is not available or may not be used.
    pub fn with_memory(name: &str, limit_bytes: u64) -> Result<Self> {
        let memory = Controller { name: "memory", version1: "memory.limit_in_bytes", version2: "memory.max" };
        let cgroup = Self::new(name, &memory, limit_bytes)?;
        // The file is missing if the system has no swap.
        let _ = std::fs::write(cgroup.0.join("memory.swap.max"), "0");
        Ok(cgroup)
    }

    /// Creates a cgroup with a limit on processes and threads.
    ///
    /// # Errors
    /// The same.
    pub fn with_tasks(name: &str, limit: u64) -> Result<Self> {
        let pids = Controller { name: "pids", version1: "pids.max", version2: "pids.max" };
        Self::new(name, &pids, limit)
    }

    fn new(name: &str, controller: &Controller, limit: u64) -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let (parent, limit_file) =
            version1(&own, controller).or_else(|| version2(&own, controller)).ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, format!("no {} controller to delegate", controller.name))
            })?;
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        let cgroup = Self(path);
        std::fs::write(cgroup.0.join(limit_file), limit.to_string())?;
        Ok(cgroup)
    }

    /// Returns the file to which a process writes its id to enter the cgroup.
    pub fn procs_file(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for LimitedCgroup {
    fn drop(&mut self) {
        wait_for("the cgroup to be empty", || {
            remove_children(&self.0);
            (!self.0.exists() || std::fs::remove_dir(&self.0).is_ok()).then_some(())
        });
    }
}

/// Removes the cgroups that the processes have created, as far as they are empty.
fn remove_children(cgroup: &Path) {
    for child in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if child.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_children(&child.path());
            let _ = std::fs::remove_dir(child.path());
        }
    }
}

/// Returns the path of this process's cgroup in the hierarchy of these controllers, from `/proc/self/cgroup`.
fn path_of(own: &str, controllers: &str) -> Option<String> {
    let mut fields = own.lines().map(|line| line.splitn(3, ':').skip(1));
    fields.find_map(|mut fields| {
        (fields.next()? == controllers)
            .then(|| fields.next())?
            .map(|path| path.trim_start_matches('/').to_owned())
    })
}

/// cgroup v1: any cgroup may have children with limits.
fn version1(own: &str, controller: &Controller) -> Option<(PathBuf, &'static str)> {
    let path = path_of(own, controller.name)?;
    Some((Path::new("/sys/fs/cgroup").join(controller.name).join(path), controller.version1))
}

/// cgroup v2: a sibling, if the parent has enabled the controller for its children.
fn version2(own: &str, controller: &Controller) -> Option<(PathBuf, &'static str)> {
    let parent = Path::new("/sys/fs/cgroup").join(path_of(own, "")?).parent()?.to_path_buf();
    let enabled = std::fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
    enabled.split_whitespace().any(|name| name == controller.name).then_some((parent, controller.version2))
}
