//! Limits the processes and threads of jobs whose agents are detached processes, as `TasksMax` limits those in units:
//! each agent starts in a cgroup of its own with a `pids.max`.
//!
//! ```text
//! version 1: <own cgroup>/xlaunch-job-<job>.<daemon>
//! version 2: <own cgroup>/xlaunch-job-<job>.<daemon>, and the daemon itself in <own cgroup>/xlaunch-daemon
//! ```
//! In version 2, only a cgroup without processes can limit its children, except the one at the root. So the daemon
//! moves into a child if it is the only process of its cgroup; otherwise there are no limits. The cgroups belong to the
//! daemon's user, so that jobs of other users cannot change them.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;
use xlaunch_host::cgroups::{children, remove};
use xlaunch_host::process::Process;

/// The mount points of version 2, alone or together with version 1, and of version 1.
const VERSION_2: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
const VERSION_1: &str = "sys/fs/cgroup/pids";
/// The daemon's own cgroup, in version 2.
const DAEMON: &str = "xlaunch-daemon";
const JOB_PREFIX: &str = "xlaunch-job-";

/// The cgroup that contains those of jobs.
#[derive(Clone, Debug)]
pub(crate) struct TaskCgroups {
    parent: PathBuf,
}

impl TaskCgroups {
    /// Prepares the cgroups of jobs.
    ///
    /// # Errors
    /// Jobs cannot be limited. The text is the reason.
    pub(crate) fn open() -> Result<Self, String> {
        let own = fs_err::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let cgroups = Self { parent: prepare(Path::new("/"), &own)? };
        cgroups.check().map_err(|error| error.to_string())?;
        cgroups.remove_empty();
        Ok(cgroups)
    }

    /// Checks that a cgroup with a limit can be created.
    fn check(&self) -> io::Result<()> {
        let cgroup = JobCgroup::create(self.parent.join(format!("{JOB_PREFIX}0.{}", std::process::id())), 1)?;
        cgroup.procs()?;
        cgroup.remove();
        Ok(())
    }

    /// Removes the cgroups of jobs that ended after the end of their daemon. Those of a daemon that runs may be about
    /// to get a process.
    fn remove_empty(&self) {
        let daemon = |path: &Path| -> Option<u32> {
            let name = path.file_name()?.to_str()?.strip_prefix(JOB_PREFIX)?;
            name.split_once('.')?.1.parse().ok()
        };
        let is_over = |path: &PathBuf| daemon(path).is_some_and(|daemon| Process::read(daemon).is_none());
        for path in children(&self.parent).into_iter().filter(is_over) {
            // An error means that it contains processes.
            let _ = remove(&path);
        }
    }

    /// Returns the cgroup that an earlier daemon created for the agent with this process id.
    pub(super) fn of(&self, pid: u32) -> Option<JobCgroup> {
        let text = fs_err::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let mut names = text.lines().flat_map(|line| line.split('/'));
        let name = names.find(|name| name.starts_with(JOB_PREFIX))?;
        Some(JobCgroup { path: self.parent.join(name) }).filter(|cgroup| cgroup.path.exists())
    }

    /// Creates the cgroup of a job; `None`, with a warning in the log, if that fails.
    pub(super) fn create(&self, job: u64, max_tasks: u64) -> Option<JobCgroup> {
        // Unique, because a job that starts again may have left processes.
        let path = self.parent.join(format!("{JOB_PREFIX}{job}.{}", std::process::id()));
        let created = JobCgroup::create(path, max_tasks);
        created.inspect_err(|error| warn!(job, "job {job} starts without a limit on processes: {error}")).ok()
    }
}

/// The cgroup of a job's agent and workers.
#[derive(Debug)]
pub(crate) struct JobCgroup {
    path: PathBuf,
}

impl JobCgroup {
    fn create(path: PathBuf, max_tasks: u64) -> io::Result<Self> {
        // A cgroup of an earlier start of the job is used again.
        match fs_err::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let cgroup = Self { path };
        let limit = if max_tasks == u64::MAX { "max".to_owned() } else { max_tasks.to_string() };
        if let Err(error) = fs_err::write(cgroup.path.join("pids.max"), limit) {
            cgroup.remove();
            return Err(error);
        }
        Ok(cgroup)
    }

    /// Opens the file through which a process enters the cgroup.
    pub(super) fn procs(&self) -> io::Result<Arc<OwnedFd>> {
        let procs = fs_err::OpenOptions::new().write(true).open(self.path.join("cgroup.procs"))?;
        Ok(Arc::new(procs.into_parts().0.into()))
    }

    /// Returns whether a process is in this cgroup.
    pub(super) fn contains(&self, pid: u32) -> bool {
        let text = fs_err::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let name = self.path.file_name().unwrap_or_default();
        text.lines().any(|line| Path::new(line).iter().any(|part| part == name))
    }

    /// Removes the cgroup, unless processes of the job are left. Returns whether it is gone.
    pub(super) fn remove(&self) -> bool {
        remove(&self.path).is_ok()
    }
}

/// Returns the cgroup below which jobs can be limited, given `/proc/self/cgroup`. Enables the controller in version 2.
fn prepare(root: &Path, own: &str) -> Result<PathBuf, String> {
    let path = |controllers: &str| {
        let mut lines = own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let (_, path) = lines.find(|(names, _)| *names == controllers)?;
        Some(path.trim_start_matches('/').to_owned())
    };
    if let Some(path) = path("pids") {
        return Ok(root.join(VERSION_1).join(path));
    }
    let path = path("").ok_or("cgroups are not mounted")?;
    let mounted = VERSION_2.iter().map(|mount| root.join(mount).join(&path));
    let own = mounted.into_iter().find(|path| path.join("cgroup.controllers").exists());
    let own = own.ok_or("cgroups are not mounted")?;
    // A daemon that replaces an earlier one may have been started in that one's cgroup.
    let own = if own.ends_with(DAEMON) { own.parent().unwrap_or(&own).to_path_buf() } else { own };
    enable(&own)?;
    Ok(own)
}

/// Lets a cgroup of version 2 limit the processes in its children.
fn enable(own: &Path) -> Result<(), String> {
    let read = |name: &str| {
        fs_err::read_to_string(own.join(name))
            .map(|text| text.trim_end().to_owned())
            .map_err(|error| error.to_string())
    };
    let lists_pids = |text: String| text.split(' ').any(|name| name == "pids");
    if !lists_pids(read("cgroup.controllers")?) {
        return Err(format!("the pids controller is not enabled for {}", own.display()));
    }
    if lists_pids(read("cgroup.subtree_control")?) {
        return Ok(());
    }
    let control = |text: &str| {
        fs_err::write(own.join("cgroup.subtree_control"), text).map_err(|error| error.to_string())
    };
    // Only the cgroup at the root has no type.
    if !own.join("cgroup.type").exists() {
        return control("+pids");
    }
    let pid = std::process::id().to_string();
    let members = read("cgroup.procs")?;
    if !members.is_empty() && members != pid {
        return Err(format!("the daemon's cgroup {} contains other processes", own.display()));
    }
    let daemon = own.join(DAEMON);
    let enter = |cgroup: &Path| fs_err::write(cgroup.join("cgroup.procs"), &pid);
    let moved = fs_err::create_dir_all(&daemon).and_then(|()| enter(&daemon));
    let enabled = moved.map_err(|error| error.to_string()).and_then(|()| control("+pids"));
    if enabled.is_err() {
        // Best effort: the daemon also works in the child.
        let _ = enter(own).and_then(|()| remove(&daemon));
    }
    enabled
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the files of a mounted hierarchy, with this process alone in `daemon`.
    fn hierarchy(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("sys/fs/cgroup").join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn only_cgroups_of_ended_daemons_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let running = format!("xlaunch-job-7.{}", std::process::id());
        for name in [&running, "xlaunch-job-8.4194305", "other"] {
            fs_err::create_dir(dir.path().join(name)).unwrap();
        }
        TaskCgroups { parent: dir.path().into() }.remove_empty();
        let left = ["xlaunch-job-8.4194305", "other", &running].map(|name| dir.path().join(name).exists());
        assert_eq!(left, [false, true, true]);
    }

    #[test]
    fn version_1_needs_no_preparation() {
        let root = hierarchy(&[]);
        let found = prepare(root.path(), "9:memory:/m\n8:pids:/system/a\n0::/b\n").unwrap();
        assert_eq!(found, root.path().join("sys/fs/cgroup/pids/system/a"));
    }

    #[test]
    fn daemon_moves_into_a_child_if_its_cgroup_has_no_other_processes() {
        let pid = format!("{}\n", std::process::id());
        let files = |procs| {
            [
                ("d/cgroup.controllers", "cpu pids\n"),
                ("d/cgroup.subtree_control", "\n"),
                ("d/cgroup.type", "domain\n"),
                ("d/cgroup.procs", procs),
            ]
        };
        let alone = hierarchy(&files(&pid));
        let own = alone.path().join("sys/fs/cgroup/d");
        assert_eq!(prepare(alone.path(), "0::/d\n"), Ok(own.clone()));
        assert_eq!(fs_err::read_to_string(own.join("cgroup.subtree_control")).unwrap(), "+pids");
        let moved = fs_err::read_to_string(own.join("xlaunch-daemon/cgroup.procs")).unwrap();
        assert_eq!(moved, pid.trim_end());
        let shared = hierarchy(&files("1\n2\n"));
        let refused = prepare(shared.path(), "0::/d\n").unwrap_err();
        assert!(refused.ends_with("/d contains other processes"), "{refused}");
        assert!(!shared.path().join("sys/fs/cgroup/d/xlaunch-daemon").exists());
    }

    #[test]
    fn cgroup_at_the_root_and_enabled_controllers_need_no_move() {
        let of_root = [("cgroup.controllers", "pids\n"), ("cgroup.subtree_control", "cpu\n")];
        let root = hierarchy(&of_root);
        assert!(prepare(root.path(), "0::/\n").is_ok());
        let control = root.path().join("sys/fs/cgroup/cgroup.subtree_control");
        assert_eq!(fs_err::read_to_string(control).unwrap(), "+pids");
        let enabled = hierarchy(&[
            ("d/cgroup.controllers", "pids\n"),
            ("d/cgroup.subtree_control", "cpu pids\n"),
            ("d/xlaunch-daemon/cgroup.controllers", "pids\n"),
        ]);
        let own = enabled.path().join("sys/fs/cgroup/d");
        assert_eq!(prepare(enabled.path(), "0::/d/xlaunch-daemon\n"), Ok(own));
        let without = hierarchy(&[("cgroup.controllers", "cpu\n"), ("cgroup.subtree_control", "\n")]);
        assert!(prepare(without.path(), "0::/\n").unwrap_err().contains("pids controller is not enabled"));
        assert!(prepare(without.path(), "").is_err());
    }
}
