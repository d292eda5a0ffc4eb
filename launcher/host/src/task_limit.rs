//! Finds the limit that makes the system refuse to start a thread or a process.
//!
//! The kernel answers `EAGAIN` for several limits, and the C library also answers it for a thread whose stack does not
//! fit into the address space. So each limit is compared with its usage, and the one that is reached is named. The
//! usage is read after the refusal, when some of the threads may already have ended.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit, getuid};
use xlaunch_spec::quantities::bytes_text;

use crate::cgroups;

/// A limit on tasks with at most this many left counts as reached.
const FEW_TASKS: u64 = 16;
/// A limit on address space with less than this left counts as reached. The stack of a thread takes 2 MiB.
const LITTLE_ADDRESS_SPACE: u64 = 16 << 20;
/// Capabilities with which `RLIMIT_NPROC` does not apply: `CAP_SYS_ADMIN` and `CAP_SYS_RESOURCE`.
const EXEMPTING_CAPABILITIES: u64 = 1 << 21 | 1 << 24;

/// A limit and its use. Tasks are processes and threads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    kind: Kind,
    limit: u64,
    used: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// `RLIMIT_AS`, in bytes.
    AddressSpace,
    /// `RLIMIT_NPROC`, in tasks.
    User,
    /// The `pids.max` of this cgroup, in tasks.
    Cgroup(PathBuf),
    /// The kernel's setting of this name, in tasks.
    Kernel(&'static str),
}

impl Limit {
    fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    fn is_reached(&self) -> bool {
        match self.kind {
            Kind::AddressSpace => self.left() < LITTLE_ADDRESS_SPACE,
            Kind::User | Kind::Cgroup(_) | Kind::Kernel(_) => self.left() <= FEW_TASKS,
        }
    }

    fn describe(&self) -> Reached {
        let Self { kind, limit, used } = self;
        let (whose, name, help) = match kind {
            Kind::AddressSpace => {
                let (limit, used) = (bytes_text(*limit), bytes_text(*used));
                let what =
                    format!("the limit on address space is reached (RLIMIT_AS is {limit}, {used} in use)");
                return Reached { what, help: "raise it: ulimit -v, or LimitAS of the unit".into() };
            }
            Kind::User => (
                "the user's",
                "RLIMIT_NPROC".to_owned(),
                "raise it: ulimit -u, or LimitNPROC of the unit".to_owned(),
            ),
            Kind::Cgroup(path) => (
                "the cgroup's",
                format!("pids.max in {}", path.display()),
                "raise it: --pids-limit of the container, or TasksMax of the unit".to_owned(),
            ),
            Kind::Kernel(name) => ("this host's", (*name).to_owned(), format!("raise it: sysctl {name}")),
        };
        let what =
            format!("{whose} limit on processes and threads is reached ({name} is {limit}, {used} in use)");
        Reached { what, help }
    }
}

/// A limit that is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The limit, with its value and its use.
    pub what: String,
    /// Advice.
    pub help: String,
}

/// Returns the limit that keeps this process from starting threads or processes; `None` if all known limits leave room.
pub fn reached() -> Option<Reached> {
    // The address space is checked first, because the other checks need memory.
    let address_space = address_space().filter(Limit::is_reached);
    address_space.or_else(|| closest(tasks())).map(|limit| limit.describe())
}

fn closest(limits: Vec<Limit>) -> Option<Limit> {
    limits.into_iter().min_by_key(Limit::left).filter(Limit::is_reached)
}

fn tasks() -> Vec<Limit> {
    let root = Path::new("/");
    user().into_iter().chain(cgroups(root)).chain(kernel(root)).collect()
}

fn address_space() -> Option<Limit> {
    let limit = getrlimit(Resource::As).current?;
    let pages = fs_err::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').next()?.parse().ok()?;
    let used = pages.saturating_mul(rustix::param::page_size() as u64);
    Some(Limit { kind: Kind::AddressSpace, limit, used })
}

/// Returns `RLIMIT_NPROC`, unless this process is exempt.
fn user() -> Option<Limit> {
    let limit = getrlimit(Resource::Nproc).current?;
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let capabilities = u64::from_str_radix(field(&status, "CapEff:")?, 16).unwrap_or(0);
    if getuid().is_root() || capabilities & EXEMPTING_CAPABILITIES != 0 {
        return None;
    }
    let entries = fs_err::read_dir("/proc").ok()?.flatten();
    let processes = entries.filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit());
    let threads = processes.filter_map(|entry| {
        let status = fs_err::read_to_string(entry.path().join("status")).ok()?;
        let is_own = field(&status, "Uid:")? == getuid().as_raw().to_string();
        is_own.then(|| field(&status, "Threads:")?.parse::<u64>().ok()).flatten()
    });
    Some(Limit { kind: Kind::User, limit, used: threads.sum() })
}

/// Returns the first word after `name` in `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next())
}

/// Returns the limits of this process's cgroups and their parents.
fn cgroups(root: &Path) -> Vec<Limit> {
    let dirs = cgroups::own(root, "pids").into_iter().flat_map(|(_, dirs)| dirs);
    let limit = |dir: PathBuf| {
        // `max` means no limit.
        let limit = number(&dir.join("pids.max"))?;
        Some(Limit { limit, used: number(&dir.join("pids.current"))?, kind: Kind::Cgroup(dir) })
    };
    dirs.filter_map(limit).collect()
}

fn kernel(root: &Path) -> Vec<Limit> {
    let load = fs_err::read_to_string(root.join("proc/loadavg")).unwrap_or_default();
    // The fourth word is `RUNNABLE/ALL`.
    let used = load.split(' ').nth(3).and_then(|tasks| tasks.split_once('/')?.1.parse().ok());
    let Some(used) = used else { return Vec::new() };
    let settings = [("kernel.threads-max", "threads-max"), ("kernel.pid_max", "pid_max")];
    let limit = |(name, file)| {
        let limit = number(&root.join("proc/sys/kernel").join(file))?;
        Some(Limit { kind: Kind::Kernel(name), limit, used })
    };
    settings.into_iter().filter_map(limit).collect()
}

fn number(file: &Path) -> Option<u64> {
    fs_err::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::TempDir::new().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn limits_of_all_cgroups_above_and_of_the_host_are_found() {
        let root = root(&[
            ("proc/self/cgroup", "8:pids:/job\n0::/a/b\n"),
            ("proc/loadavg", "0.1 0.2 0.3 2/345 678\n"),
            ("proc/sys/kernel/threads-max", "1000\n"),
            ("sys/fs/cgroup/a/b/pids.max", "max\n"),
            ("sys/fs/cgroup/a/b/pids.current", "4\n"),
            ("sys/fs/cgroup/a/pids.max", "50\n"),
            ("sys/fs/cgroup/a/pids.current", "40\n"),
            ("sys/fs/cgroup/pids/job/pids.max", "20\n"),
            ("sys/fs/cgroup/pids/job/pids.current", "19\n"),
        ]);
        let limits = [cgroups(root.path()), kernel(root.path())].concat();
        let found: Vec<_> = limits.iter().map(|limit| (limit.limit, limit.used)).collect();
        assert_eq!(found, [(20, 19), (50, 40), (1000, 345)]);
        let Reached { what, help } = closest(limits).unwrap().describe();
        assert!(
            what.ends_with("pids/job is 20, 19 in use)") && help.contains("--pids-limit"),
            "{what}; {help}"
        );
    }

    #[test]
    fn limits_with_room_are_not_blamed() {
        let limit = |kind, limit, used| Limit { kind, limit, used };
        assert!(!limit(Kind::User, 1000, 900).is_reached() && limit(Kind::User, 3, 5).is_reached());
        assert!(!limit(Kind::AddressSpace, 1 << 30, 1 << 29).is_reached());
        let address_space = limit(Kind::AddressSpace, 300 << 20, 299 << 20);
        assert!(address_space.is_reached() && address_space.describe().help.contains("ulimit -v"));
        assert_eq!(closest(vec![limit(Kind::User, 1000, 900)]), None);
    }

    #[test]
    fn use_of_this_process_is_measured() {
        if let Some(limit) = user() {
            assert!(limit.used > 0, "{limit:?}");
        }
        assert!(kernel(Path::new("/")).iter().all(|limit| limit.used > 0 && limit.limit > 0));
    }
}
