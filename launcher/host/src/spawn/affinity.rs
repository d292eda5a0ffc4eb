//! CPU affinity of workers: implements torchrun's `--numa-binding` from sysfs, without numactl.
//!
//! A worker belongs to the NUMA node of its GPU. If that is unknown, or this process may not use any CPU of that node,
//! ranks are distributed over the nodes in order. A plan depends only on the files below one directory and on the CPUs
//! that this process may use; it never contains other CPUs. Plans are applied between fork and exec.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rustix::thread::CpuSet;
use xlaunch_spec::quantities::parse_range;

use xlaunch_spec::command::Binding;

/// Logical CPU numbers.
type Cpus = BTreeSet<usize>;

/// The CPU affinity of one worker.
#[derive(Clone, Debug)]
pub struct Affinity {
    cpus: Option<CpuSet>,
    cores: usize,
}

impl Affinity {
    /// The CPUs to bind the worker to; `None` leaves it unbound.
    pub fn cpus(&self) -> Option<&CpuSet> {
        self.cpus.as_ref()
    }

    /// Number of physical cores for this worker, at least 1. Workers with the same CPUs share their cores.
    pub fn cores(&self) -> usize {
        self.cores
    }
}

/// Plans the CPUs of `nproc` workers. `gpus_pci` holds the PCI addresses of their GPUs in the order of local ranks, as
/// NVML or sysfs writes them; `sys` is `/sys`; `allowed` must not be empty.
///
/// # Errors
/// There are too few cores for exclusive binding.
pub fn plan(
    binding: Option<Binding>,
    nproc: u32,
    gpus_pci: &[String],
    sys: &Path,
    allowed: &CpuSet,
) -> Result<Vec<Affinity>, String> {
    let machine = Machine::read(sys, allowed);
    let nproc = nproc as usize;
    let worker_nodes: Vec<usize> = (0..nproc)
        .map(|rank| {
            machine.node_of_gpu(sys, gpus_pci.get(rank)).unwrap_or_else(|| machine.spread_node(rank, nproc))
        })
        .collect();
    let sets = (0..nproc).map(|rank| {
        let node = worker_nodes[rank];
        let before = worker_nodes[..rank].iter().filter(|other| **other == node).count();
        let workers = worker_nodes.iter().filter(|other| **other == node).count();
        match binding {
            None => Ok(machine.cpus.keys().copied().collect()),
            Some(Binding::Node) => Ok(machine.nodes[&node].clone()),
            Some(Binding::Socket) => Ok(machine.socket(node)),
            Some(Binding::Exclusive) => machine.exclusive(node, before, workers),
            Some(Binding::CoreComplex) => Ok(machine.complex(node, before)),
        }
    });
    let sets: Vec<Cpus> = sets.collect::<Result<_, _>>()?;
    let affinity = |set: &Cpus| {
        let sharing = sets.iter().filter(|other| *other == set).count().max(1);
        let cores = machine.cores(set).len() / sharing;
        Affinity { cpus: binding.map(|_| cpu_set(set)), cores: cores.max(1) }
    };
    Ok(sets.iter().map(affinity).collect())
}

/// The topology of the CPUs that this process may use.
#[derive(Debug)]
struct Machine {
    cpus: BTreeMap<usize, Cpu>,
    /// CPUs of each NUMA node; no set is empty.
    nodes: BTreeMap<usize, Cpus>,
}

/// The place of a logical CPU in the topology.
#[derive(Debug)]
struct Cpu {
    socket: usize,
    /// Physical core, identified by its first CPU.
    core: usize,
    /// Core complex: the CPUs that share its last-level cache, identified by the first one.
    complex: usize,
}

impl Machine {
    fn read(sys: &Path, allowed: &CpuSet) -> Self {
        let system = sys.join("devices/system");
        let allowed: Cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let mut nodes = BTreeMap::new();
        for (node, dir) in numbered(&system.join("node"), "node") {
            let cpus: Cpus = list(&dir.join("cpulist")).intersection(&allowed).copied().collect();
            if !cpus.is_empty() {
                nodes.insert(node, cpus);
            }
        }
        if nodes.is_empty() {
            nodes.insert(0, allowed.clone());
        }
        let cpus = allowed.iter().map(|cpu| (*cpu, Cpu::read(&system.join(format!("cpu/cpu{cpu}")), *cpu)));
        Self { cpus: cpus.collect(), nodes }
    }

    fn node_of_gpu(&self, sys: &Path, pci: Option<&String>) -> Option<usize> {
        let dir = sys.join("bus/pci/devices").join(sysfs_address(pci?)?);
        // -1, which does not parse, means that the firmware does not report the node.
        let node = number(&dir.join("numa_node"))?;
        self.nodes.contains_key(&node).then_some(node)
    }

    /// The node of a rank if ranks are distributed evenly, with neighbouring ranks on the same node.
    fn spread_node(&self, rank: usize, nproc: usize) -> usize {
        self.nodes.keys().nth(rank * self.nodes.len() / nproc.max(1)).copied().unwrap_or(0)
    }

    fn socket(&self, node: usize) -> Cpus {
        let socket = self.nodes[&node].first().map(|cpu| self.cpus[cpu].socket);
        self.cpus.iter().filter(|(_, cpu)| Some(cpu.socket) == socket).map(|(number, _)| *number).collect()
    }

    /// One worker's share of a node, in whole physical cores. If these do not divide evenly, the first workers get one
    /// more.
    fn exclusive(&self, node: usize, worker: usize, workers: usize) -> Result<Cpus, String> {
        let cores: Vec<Cpus> = self.cores(&self.nodes[&node]).into_values().collect();
        let (each, remainder) = (cores.len() / workers, cores.len() % workers);
        if each == 0 {
            return Err(format!(
                "--numa-binding exclusive: NUMA node {node} has {} cores for {workers} workers",
                cores.len()
            ));
        }
        let start = worker * each + worker.min(remainder);
        Ok(cores[start..start + each + usize::from(worker < remainder)].iter().flatten().copied().collect())
    }

    /// The core complex of a worker on a node. Workers are assigned to the complexes in turn, largest first.
    fn complex(&self, node: usize, worker: usize) -> Cpus {
        let mut groups: Vec<Cpus> =
            self.grouped(&self.nodes[&node], |cpu| cpu.complex).into_values().collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
        groups.swap_remove(worker % groups.len())
    }

    fn cores(&self, of: &Cpus) -> BTreeMap<usize, Cpus> {
        self.grouped(of, |cpu| cpu.core)
    }

    fn grouped(&self, cpus: &Cpus, key: impl Fn(&Cpu) -> usize) -> BTreeMap<usize, Cpus> {
        let mut groups: BTreeMap<usize, Cpus> = BTreeMap::new();
        for cpu in cpus {
            groups.entry(key(&self.cpus[cpu])).or_default().insert(*cpu);
        }
        groups
    }
}

impl Cpu {
    /// Reads the topology of a CPU. Without information in sysfs, there is one socket and one complex, and every CPU is
    /// a core.
    fn read(dir: &Path, cpu: usize) -> Self {
        let caches = numbered(&dir.join("cache"), "index");
        let data = caches.into_values().filter(|cache| {
            fs_err::read_to_string(cache.join("type")).is_ok_and(|kind| kind.trim() != "Instruction")
        });
        let largest = data.max_by_key(|cache| number(&cache.join("level")));
        Self {
            socket: number(&dir.join("topology/physical_package_id")).unwrap_or(0),
            core: list(&dir.join("topology/thread_siblings_list")).first().copied().unwrap_or(cpu),
            complex: largest
                .and_then(|cache| list(&cache.join("shared_cpu_list")).first().copied())
                .unwrap_or(0),
        }
    }
}

/// Returns directory entries such as `node0`, by number.
fn numbered(dir: &Path, prefix: &str) -> BTreeMap<usize, std::path::PathBuf> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    });
    numbered.collect()
}

fn number(file: &Path) -> Option<usize> {
    fs_err::read_to_string(file).ok()?.trim().parse().ok()
}

/// Parses a CPU list file such as `0-3,8-11`. A missing file is an empty list.
fn list(file: &Path) -> Cpus {
    let text = fs_err::read_to_string(file).unwrap_or_default();
    text.split(',').filter_map(|part| parse_range::<usize>(part.trim())).flatten().collect()
}

/// Converts NVML's `00000000:3B:00.0` to sysfs's `0000:3b:00.0`.
fn sysfs_address(pci: &str) -> Option<String> {
    let (domain, rest) = pci.split_once(':')?;
    Some(format!("{:04x}:{}", u32::from_str_radix(domain, 16).ok()?, rest.to_lowercase()))
}

fn cpu_set(cpus: &Cpus) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    set
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// Two sockets with two NUMA nodes each, four cores per node, two CPUs per core (n and n + 16); pairs of cores
    /// share a cache.
    fn machine() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let file = dir.path().join(path);
            fs_err::create_dir_all(file.parent().unwrap()).unwrap();
            fs_err::write(file, text + "\n").unwrap();
        };
        for node in 0..4 {
            let (first, last) = (4 * node, 4 * node + 3);
            let cpus = format!("{first}-{last},{}-{}", first + 16, last + 16);
            write(format!("devices/system/node/node{node}/cpulist"), cpus);
        }
        for cpu in 0..32 {
            let (dir, core) = (format!("devices/system/cpu/cpu{cpu}"), cpu % 16);
            let pair = core / 2 * 2;
            write(format!("{dir}/topology/physical_package_id"), (core / 8).to_string());
            write(format!("{dir}/topology/thread_siblings_list"), format!("{core},{}", core + 16));
            for (index, kind, level, shared) in [
                (0, "Data", 1, format!("{core},{}", core + 16)),
                (1, "Instruction", 4, "0-31".into()),
                (2, "Unified", 3, format!("{pair}-{},{}-{}", pair + 1, pair + 16, pair + 17)),
            ] {
                write(format!("{dir}/cache/index{index}/type"), kind.into());
                write(format!("{dir}/cache/index{index}/level"), level.to_string());
                write(format!("{dir}/cache/index{index}/shared_cpu_list"), shared);
            }
        }
        for (bus, node) in [("0a", "3"), ("0b", "3"), ("0c", "0"), ("0d", "-1")] {
            write(format!("bus/pci/devices/0000:{bus}:00.0/numa_node"), node.into());
        }
        dir
    }

    /// The CPUs and cores of each worker.
    fn planned(
        binding: Option<Binding>,
        nproc: u32,
        buses: &[&str],
        allowed: &[Range<usize>],
    ) -> Result<Vec<(Vec<usize>, usize)>, String> {
        let dir = machine();
        let gpus: Vec<String> = buses.iter().map(|bus| format!("00000000:{bus}:00.0")).collect();
        let allowed = cpu_set(&allowed.iter().cloned().flatten().collect());
        let plan = plan(binding, nproc, &gpus, dir.path(), &allowed)?;
        let cpus = |affinity: &Affinity| {
            let set = affinity.cpus().copied().unwrap_or_default();
            ((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect(), affinity.cores())
        };
        Ok(plan.iter().map(cpus).collect())
    }

    fn cpus(ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().cloned().flatten().collect()
    }

    const ALL: &[Range<usize>] = &[0..16, 16..32];

    #[test]
    fn workers_run_on_the_numa_node_of_their_gpu() {
        let (node0, node3) = (cpus(&[0..4, 16..20]), cpus(&[12..16, 28..32]));
        let plan = planned(Some(Binding::Node), 3, &["0A", "0B", "0C"], ALL).unwrap();
        assert_eq!(plan, [(node3.clone(), 2), (node3, 2), (node0, 4)]);
        let plan = planned(Some(Binding::Socket), 2, &["0A", "0C"], ALL).unwrap();
        assert_eq!(plan, [(cpus(&[8..16, 24..32]), 8), (cpus(&[0..8, 16..24]), 8)]);
    }

    #[test]
    fn exclusive_binding_shares_no_core() {
        let plan = planned(Some(Binding::Exclusive), 3, &["0A", "0B", "0C"], ALL).unwrap();
        assert_eq!(plan, [(vec![12, 13, 28, 29], 2), (vec![14, 15, 30, 31], 2), (cpus(&[0..4, 16..20]), 4)]);
        // Without GPUs: six workers on four nodes, the first of which has cores 0 to 3.
        let plan = planned(Some(Binding::Exclusive), 6, &[], ALL).unwrap();
        assert_eq!((&plan[0].0, &plan[1].0), (&vec![0, 1, 16, 17], &vec![2, 3, 18, 19]));
        assert_eq!(plan[2], (cpus(&[4..8, 20..24]), 4));
        let uneven = planned(Some(Binding::Exclusive), 3, &[], &[0..4, 16..20]).unwrap();
        assert_eq!(uneven, [(vec![0, 1, 16, 17], 2), (vec![2, 18], 1), (vec![3, 19], 1)]);
        let refusal = planned(Some(Binding::Exclusive), 3, &[], &[0..2, 16..18]).unwrap_err();
        assert_eq!(refusal, "--numa-binding exclusive: NUMA node 0 has 2 cores for 3 workers");
    }

    #[test]
    fn core_complex_shares_the_last_level_cache() {
        let plan = planned(Some(Binding::CoreComplex), 3, &["0A", "0B", "0C"], ALL).unwrap();
        assert_eq!(plan, [(vec![12, 13, 28, 29], 2), (vec![14, 15, 30, 31], 2), (vec![0, 1, 16, 17], 2)]);
        // Only one CPU of the first complex is allowed, so the other is larger.
        let plan = planned(Some(Binding::CoreComplex), 3, &[], &[1..2, 2..4]).unwrap();
        assert_eq!(plan, [(vec![2, 3], 1), (vec![1], 1), (vec![2, 3], 1)]);
    }

    #[test]
    fn disallowed_cpus_are_in_no_plan() {
        let plan = planned(Some(Binding::Node), 2, &["0A", "0C"], &[0..2, 12..13]).unwrap();
        assert_eq!(plan, [(vec![12], 1), (vec![0, 1], 2)]);
        // The node of the GPUs is not allowed, so the ranks are distributed over the other nodes.
        let plan = planned(Some(Binding::Node), 2, &["0A", "0B"], &[0..2, 4..6]).unwrap();
        assert_eq!(plan, [(vec![0, 1], 2), (vec![4, 5], 2)]);
    }

    #[test]
    fn nodes_are_distributed_if_gpu_locality_is_unknown() {
        for buses in [&[] as &[&str], &["0D", "0D"], &["FF", "invalid"]] {
            let plan = planned(Some(Binding::Node), 2, buses, ALL).unwrap();
            assert_eq!(plan, [(cpus(&[0..4, 16..20]), 4), (cpus(&[8..12, 24..28]), 4)], "{buses:?}");
        }
        // Without sysfs: one node, and one CPU per core.
        let allowed = cpu_set(&(0..8).collect());
        for binding in [Binding::Node, Binding::Socket, Binding::CoreComplex] {
            let plan = plan(Some(binding), 2, &[], Path::new("/nowhere"), &allowed).unwrap();
            assert!(plan.iter().all(|affinity| affinity.cpus() == Some(&allowed) && affinity.cores() == 4));
        }
    }

    #[test]
    fn without_binding_only_the_core_share_is_planned() {
        let plan = planned(None, 3, &["0A", "0B", "0C"], ALL).unwrap();
        assert_eq!(plan, vec![(vec![], 5); 3]);
        assert_eq!(planned(None, 40, &[], ALL).unwrap()[0].1, 1);
    }

    #[test]
    fn applied_plan_binds_the_thread() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let plan = plan(Some(Binding::Exclusive), 1, &[], Path::new("/sys"), &allowed).unwrap();
        std::thread::spawn(move || {
            rustix::thread::sched_setaffinity(None, plan[0].cpus().unwrap()).unwrap();
            assert_eq!(&rustix::thread::sched_getaffinity(None).unwrap(), plan[0].cpus().unwrap());
        })
        .join()
        .unwrap();
    }
}
