//! The cgroups of this process, and their removal.

use std::path::{Path, PathBuf};

/// Version of the kernel's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    One,
    Two,
}

/// Returns the cgroups of this process that may limit or count what `controller` does, below `root`: for each version,
/// its own cgroup and the parents up to the mount point, which is always the last one. A container may see its cgroup
/// as the root while `/proc` shows the path on the host.
pub(crate) fn own(root: &Path, controller: &str) -> Vec<(Version, Vec<PathBuf>)> {
    let text = fs_err::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mount = root.join("sys/fs/cgroup");
    let hierarchy = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (version, mount) = match controllers {
            "" => (Version::Two, mount.clone()),
            name if name == controller => (Version::One, mount.join(name)),
            _ => return None,
        };
        let ancestors = Path::new(path.trim_start_matches('/')).ancestors();
        Some((version, ancestors.map(|part| mount.join(part)).collect()))
    };
    text.lines().filter_map(hierarchy).collect()
}

/// Removes a cgroup and its descendants. Fails while one of them contains processes.
pub fn remove(cgroup: &Path) -> std::io::Result<()> {
    children(cgroup).iter().try_for_each(|child| remove(child))?;
    match fs_err::remove_dir(cgroup) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Returns the cgroups directly below this one.
pub fn children(cgroup: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs_err::read_dir(cgroup) else { return Vec::new() };
    let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.map(|entry| entry.path()).collect()
}
