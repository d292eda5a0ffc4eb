//! Free memory of the host, within the limits of the cgroups that this process is in.

use std::path::{Path, PathBuf};

use crate::cgroups::{self, Version};

/// Memory still available to processes started from here, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    /// Memory available without swapping.
    pub memory: u64,
    /// Swap space available in addition.
    pub swap: u64,
}

impl Available {
    /// Returns the memory and the swap space together.
    pub fn with_swap(self) -> u64 {
        self.memory.saturating_add(self.swap)
    }
}

/// Total memory of the host, in bytes; `None` if the host does not report it.
pub fn total() -> Option<u64> {
    total_of(&fs_err::read_to_string("/proc/meminfo").ok()?)
}

fn total_of(meminfo: &str) -> Option<u64> {
    value(meminfo, "MemTotal:")?.checked_mul(1024)
}

/// Returns the memory still available to processes started from here; `None` if the host does not report it.
pub fn available() -> Option<Available> {
    available_below(Path::new("/"))
}

/// [`available`] with `/proc` and `/sys` below `root`.
fn available_below(root: &Path) -> Option<Available> {
    let meminfo = fs_err::read_to_string(root.join("proc/meminfo")).ok()?;
    let bytes = |name| Some(value(&meminfo, name)?.saturating_mul(1024));
    let host = Available { memory: bytes("MemAvailable:")?, swap: bytes("SwapFree:").unwrap_or(0) };
    let limited = cgroups(root).into_iter().filter_map(|cgroup| cgroup.available());
    Some(limited.fold(host, |least, cgroup| Available {
        memory: least.memory.min(cgroup.memory),
        swap: least.swap.min(cgroup.swap),
    }))
}

/// A cgroup with a memory controller, and the names of its files.
struct Cgroup {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Key in `memory.stat` of page cache that the kernel frees when memory is needed.
    cache: &'static str,
}

impl Cgroup {
    /// Returns the memory left below the cgroup's limit; `None` if it has no limit.
    fn available(&self) -> Option<Available> {
        let read = |name: &str| fs_err::read_to_string(self.dir.join(name)).ok();
        // No limit is `max` in version 2, and a number beyond any memory size in version 1.
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let usage: u64 = read(self.usage)?.trim().parse().ok()?;
        let cache = read("memory.stat").and_then(|text| value(&text, self.cache)).unwrap_or(0);
        let memory = limit.saturating_sub(usage.saturating_sub(cache));
        // Version 1 limits memory and swap space together, so the share of swap is unknown.
        let swap = match read("memory.swap.max").as_deref().map(str::trim) {
            Some("max") => u64::MAX,
            Some(limit) => {
                let used = read("memory.swap.current").and_then(|text| text.trim().parse().ok());
                limit.parse::<u64>().unwrap_or(0).saturating_sub(used.unwrap_or(0))
            }
            None => 0,
        };
        Some(Available { memory, swap })
    }
}

/// Returns the cgroups of this process and their parents.
fn cgroups(root: &Path) -> Vec<Cgroup> {
    let own = cgroups::own(root, "memory").into_iter();
    own.flat_map(|(version, dirs)| {
        let (limit, usage, cache) = match version {
            Version::Two => ("memory.max", "memory.current", "inactive_file"),
            Version::One => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        };
        dirs.into_iter().map(move |dir| Cgroup { dir, limit, usage, cache })
    })
    .collect()
}

/// Finds the number after `name` in lines of names and numbers.
fn value(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok()).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:  1000 kB\n");

    fn available(files: &[(&str, &str)]) -> Option<u64> {
        Some(available_of(files)?.memory)
    }

    fn available_of(files: &[(&str, &str)]) -> Option<Available> {
        let root = tempfile::TempDir::new().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        available_below(root.path())
    }

    #[test]
    fn total_memory_is_read_from_meminfo() {
        let text = "MemFree:     1 kB\nMemTotal:       65536000 kB\n";
        assert_eq!(total_of(text), Some(65_536_000 << 10));
        assert_eq!(total_of(""), None);
        assert!((1 << 20..1 << 50).contains(&total().unwrap()));
    }

    #[test]
    fn memory_without_cgroup_limits_is_the_kernels_mem_available() {
        assert_eq!(available(&[MEMINFO]), Some(1_024_000));
        let unlimited =
            [("proc/self/cgroup", "0::/a/b\n"), ("sys/fs/cgroup/a/b/memory.max", "max\n"), MEMINFO];
        assert_eq!(available(&unlimited), Some(1_024_000));
        assert_eq!(available(&[]), None);
    }

    #[test]
    fn lowest_limit_of_all_parents_counts_and_page_cache_is_free() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "900000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "100000\n"),
            ("sys/fs/cgroup/a/memory.max", "500000\n"),
            ("sys/fs/cgroup/a/memory.current", "400000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 50000\n"),
        ];
        assert_eq!(available(&files), Some(150_000));
    }

    #[test]
    fn container_with_cgroup_version_1_has_its_limit_at_the_mount_point() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "9:memory:/docker/ab\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 150000\n"),
        ];
        assert_eq!(available(&files), Some(50_000));
    }

    #[test]
    fn swap_space_counts_as_far_as_the_cgroup_may_use_it() {
        const MEMORY: &str = "MemAvailable:  1000 kB\nSwapFree:  500 kB\n";
        let swap = |swap_max: &str| {
            let files = [
                ("proc/meminfo", MEMORY),
                ("proc/self/cgroup", "0::/a\n"),
                ("sys/fs/cgroup/a/memory.max", "900000\n"),
                ("sys/fs/cgroup/a/memory.current", "0\n"),
                ("sys/fs/cgroup/a/memory.swap.current", "1000\n"),
                ("sys/fs/cgroup/a/memory.swap.max", swap_max),
            ];
            available_of(&files).unwrap().swap
        };
        assert_eq!(available_of(&[("proc/meminfo", MEMORY)]).unwrap().swap, 512_000);
        assert_eq!((swap("max\n"), swap("0\n"), swap("5000\n")), (512_000, 0, 4000));
    }
}
