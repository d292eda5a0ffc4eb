//! Maximum number of processes and threads of the node, and the default maximum of a job.

/// Files with the limits of the kernel and, in a container, of its cgroup.
const TASK_LIMIT_FILES: [&str; 3] =
    ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max"];
/// A job gets one part in this many of the node's limit. So it takes four jobs that fork without end to exhaust it, and
/// `xlaunch.slice` keeps even those from the last part.
const JOBS_TO_EXHAUST_NODE: u64 = 4;

/// Returns the default of `jobs.max_tasks`; no limit if the node's limit is unknown.
pub(crate) fn default_limit() -> u64 {
    limit(TASK_LIMIT_FILES.iter().filter_map(|path| fs_err::read_to_string(path).ok()))
}

fn limit(texts: impl Iterator<Item = String>) -> u64 {
    // `max` in a cgroup means no limit.
    let node = texts.filter_map(|text| text.trim().parse::<u64>().ok()).min();
    node.map_or(u64::MAX, |node| node / JOBS_TO_EXHAUST_NODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_gets_a_part_of_the_smallest_limit() {
        let limit = |texts: &[&str]| limit(texts.iter().map(|text| (*text).to_owned()));
        assert_eq!(limit(&["32768\n", "188000\n", "max\n"]), 8192);
        assert_eq!(limit(&["4194304", "188000", "2000"]), 500);
        assert_eq!(limit(&["max"]), u64::MAX);
        assert!(default_limit() < u64::MAX);
    }
}
