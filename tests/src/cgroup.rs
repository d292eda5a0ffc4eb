//! A cgroup whose processes share a memory limit.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

use crate::wait_for;

/// A cgroup with a memory limit, removed when dropped.
#[derive(Debug)]
pub struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// Creates the cgroup; the name is made unique by this process's id.
    ///
    /// # Errors
    /// If the memory controller is not available or may not be used.
    pub fn new(name: &str, limit_bytes: u64) -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let (parent, limit_file) = version1(&own)
            .or_else(|| version2(&own))
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, "no memory controller to delegate"))?;
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        let cgroup = Self(path);
        std::fs::write(cgroup.0.join(limit_file), limit_bytes.to_string())?;
        // The file is missing if the system has no swap.
        let _ = std::fs::write(cgroup.0.join("memory.swap.max"), "0");
        Ok(cgroup)
    }

    /// Returns the file to which a process writes its id to enter the cgroup.
    pub fn procs_file(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        wait_for("the cgroup to be empty", || {
            (!self.0.exists() || std::fs::remove_dir(&self.0).is_ok()).then_some(())
        });
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
fn version1(own: &str) -> Option<(PathBuf, &'static str)> {
    let path = path_of(own, "memory")?;
    Some((Path::new("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"))
}

/// cgroup v2: a sibling, if the parent has enabled the controller for its children.
fn version2(own: &str) -> Option<(PathBuf, &'static str)> {
    let parent = Path::new("/sys/fs/cgroup").join(path_of(own, "")?).parent()?.to_path_buf();
    let enabled = std::fs::read_to_string(parent.join("cgroup.subtree_control")).ok()?;
    enabled.contains("memory").then_some((parent, "memory.max"))
}
