//! Resource usage of a rank's process tree, from `/proc` and NVML.
//!
//! A tree is a process and its descendants by parent links. Its CPU time includes that of children that have exited and
//! been reaped, so that short-lived processes count too. A process that was reparented is not in the tree.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::gpu::Gpus;
use xlaunch_host::process::Process;

/// Resource usage of a process tree.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// CPU use since the last sample, or since the start of the process in the first one. 100 is one full core.
    pub cpu_percent: f64,
    /// True if a process of the tree was running or ready to run: it may get little CPU time on an overloaded host.
    pub runnable: bool,
    /// Resident memory; shared pages count once per process.
    pub memory_bytes: u64,
    /// GPU utilization; 100 is one full GPU. `None` if NVML knows no process of the tree.
    pub gpu_percent: Option<f64>,
    /// Device memory of all CUDA contexts; `None` as above.
    pub gpu_memory_bytes: Option<u64>,
}

/// Takes samples, and keeps the last one to compute differences.
#[derive(Debug, Default)]
pub struct Sampler {
    gpus: Gpus,
    last: HashMap<Root, (Instant, u64)>,
}

/// Process ids are reused, so the start time is part of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Root {
    pid: u32,
    started: u64,
}

impl Sampler {
    /// Creates a sampler without an earlier sample.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the usage of the process trees of `pids`, in that order; zero for a process that is gone.
    pub fn sample(&mut self, pids: &[u32], now: Instant) -> Vec<Usage> {
        let all = Process::all().into_iter().map(|process| (process.pid, process));
        let processes: HashMap<u32, Process> = all.collect();
        let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
        for (pid, process) in &processes {
            children.entry(process.parent).or_default().push(*pid);
        }
        let gpus = self.gpus.by_process();
        let last = std::mem::take(&mut self.last);
        let mut sample_one = |pid: u32| {
            let Some(root) = processes.get(&pid) else { return Usage::default() };
            let mut usage = Usage::default();
            let (mut ticks, mut pages) = (0, 0);
            let mut queue = vec![pid];
            while let Some(pid) = queue.pop() {
                if let Some(process) = processes.get(&pid) {
                    ticks += process.ticks;
                    pages += process.pages;
                    usage.runnable |= process.state == 'R';
                }
                if let Some(gpu) = gpus.get(&pid) {
                    *usage.gpu_memory_bytes.get_or_insert(0) += gpu.memory_bytes;
                    if let Some(percent) = gpu.percent {
                        *usage.gpu_percent.get_or_insert(0.0) += percent;
                    }
                }
                queue.extend(children.get(&pid).into_iter().flatten());
            }
            let key = Root { pid, started: root.started };
            self.last.insert(key, (now, ticks));
            let (elapsed, spent) = match last.get(&key) {
                Some((then, before)) => (now.saturating_duration_since(*then), ticks.saturating_sub(*before)),
                None => (age(root.started), ticks),
            };
            usage.cpu_percent = percent(spent, elapsed);
            usage.memory_bytes = pages * rustix::param::page_size() as u64;
            usage
        };
        pids.iter().map(|pid| sample_one(*pid)).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn percent(ticks: u64, elapsed: Duration) -> f64 {
    let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    // CPU time has a resolution of a hundredth of a second, so shorter intervals are meaningless.
    100.0 * seconds / elapsed.as_secs_f64().max(0.01)
}

/// Returns the age of a process that started this many clock ticks after boot.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn age(started: u64) -> Duration {
    let uptime = fs_err::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime = uptime.split(' ').next().and_then(|seconds| seconds.parse::<f64>().ok()).unwrap_or(0.0);
    let age = uptime - started as f64 / rustix::param::clock_ticks_per_second() as f64;
    Duration::from_secs_f64(age.max(0.0))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A shell and its children, killed with the test.
    struct Tree(Child);

    impl Tree {
        fn start(script: &str) -> Self {
            use std::os::unix::process::CommandExt;
            Self(Command::new("sh").args(["-c", script]).process_group(0).spawn().unwrap())
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let group = rustix::process::Pid::from_child(&self.0);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.0.wait();
        }
    }

    /// Samples until `enough` holds.
    fn watch(tree: &Tree, enough: impl Fn(&Usage) -> bool) -> Usage {
        let (mut sampler, start) = (Sampler::new(), Instant::now());
        sampler.sample(&[tree.0.id()], Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let usage = sampler.sample(&[tree.0.id()], Instant::now())[0];
            if enough(&usage) {
                return usage;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{usage:?}");
        }
    }

    #[test]
    fn busy_descendant_counts_for_the_root() {
        let tree = Tree::start("(while :; do :; done) & wait");
        let usage = watch(&tree, |usage| usage.cpu_percent > 1.0);
        assert!(usage.cpu_percent < 150.0 && usage.memory_bytes > 100_000, "{usage:?}");
    }

    #[test]
    fn short_lived_children_count_after_they_have_exited() {
        let tree = Tree::start("while :; do sh -c 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done'; done");
        watch(&tree, |usage| usage.cpu_percent > 1.0);
    }

    #[test]
    fn sleeping_tree_uses_no_cpu_and_a_missing_one_nothing() {
        let tree = Tree::start("sleep 1000 & wait");
        let usage = watch(&tree, |usage| usage.cpu_percent == 0.0);
        assert!(usage.memory_bytes > 100_000 && usage.gpu_percent.is_none(), "{usage:?}");
        let pid = tree.0.id();
        drop(tree);
        assert_eq!(Sampler::new().sample(&[pid], Instant::now()), [Usage::default()]);
    }
}
