//! Slurm: the place of this task in its step, from the step's variables alone. `scontrol` does not exist in containers.
//!
//! A batch script has `SLURM_NNODES=N` and `SLURM_NODEID=0`, although it runs on one node only, so only `SLURM_STEP_*`
//! are used. `SLURM_LAUNCH_NODE_IPADDR` is the host of `srun`, not that of node rank 0.

use std::ops::Range;

use xlaunch_host::process::Process;

use super::{Allocation, Host, Sourced, check_place, hostlist, ports};

/// Name of the engine.
pub(in crate::cli) const SLURM: &str = "Slurm";
/// First of the step ids that `srun` does not use: the batch script, the shell of `salloc`, external processes.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;
const VARIABLES: [&str; 9] = [
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
];

pub(super) fn detect(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let Some(job) = host.number::<u32>("SLURM_JOB_ID")? else { return Ok(None) };
    // The components of a heterogeneous job have consecutive ids, of which tasks get the first. A job that was
    // submitted in such a job inherits its variables.
    let first = host.number::<u32>("SLURM_JOB_ID_HET_GROUP_0")?.map_or(job.value, |first| first.value);
    let components = host.number::<u32>("SLURM_HET_SIZE")?.filter(|_| first == job.value);
    let jobs = job.value..job.value.saturating_add(components.as_ref().map_or(1, |size| size.value));
    let step = host.number::<u32>("SLURM_STEP_ID")?.filter(|step| {
        // `sbatch` and `salloc` pass on the variables of a step in which they run, such as `srun --pty bash`.
        let is_inherited = |real: &str| !is_same_step(real, &jobs, step.value);
        step.value < FIRST_SPECIAL_STEP && !host.slurm_step.is_some_and(is_inherited)
    });
    let Some(step) = step else { return outside_of_steps(host, components).map(|()| None) };
    let nodes = host.required::<u32>("SLURM_STEP_NUM_NODES", SLURM)?;
    one_task_per_node(host, &nodes)?;
    let node_rank = host.required("SLURM_NODEID", SLURM)?;
    check_place(&nodes, &node_rank)?;
    let list = host.required::<String>("SLURM_STEP_NODELIST", SLURM)?;
    let hosts = hostlist::expand(&list.value).map_err(|problem| format!("SLURM_STEP_NODELIST: {problem}"))?;
    let first = hosts
        .first()
        .filter(|_| hosts.len() == nodes.value as usize)
        .ok_or_else(|| format!("SLURM_STEP_NODELIST has {} hosts, but {}", hosts.len(), nodes.source))?;
    let restarts = host.number::<u32>("SLURM_RESTART_COUNT")?.map_or(0, |restarts| restarts.value);
    let id = format!("{}.{}", job.value, step.value);
    let run_id = match restarts {
        0 => format!("slurm-{id}"),
        _ => format!("slurm-{id}-r{restarts}"),
    };
    let of_step = "SLURM_JOB_ID, SLURM_STEP_ID";
    Ok(Some(Allocation {
        engine: SLURM,
        variables: host.variables(&VARIABLES),
        endpoint: Some(Sourced {
            value: (first.clone(), ports(&id)),
            source: format!("SLURM_STEP_NODELIST, {of_step}"),
        }),
        run_id: Some(Sourced { value: run_id, source: format!("{of_step}, SLURM_RESTART_COUNT") }),
        nodes: Some(nodes),
        node_rank: Some(node_rank),
        munge: host.munge,
    }))
}

/// Returns the step that has started this process, such as `22.0` or `22.batch`, as the title of its `slurmstepd` names
/// it; `None` if there is none, or in a container, which does not show it.
pub(super) fn step_of_this_process() -> Option<String> {
    // Ids may be reused during the search, so parent links can form a cycle.
    let mut ancestors = std::iter::successors(Process::own(), |child| Process::read(child.parent)).take(1000);
    let daemon = ancestors.find(|ancestor| ancestor.name == "slurmstepd")?;
    let title = fs_err::read_to_string(format!("/proc/{}/cmdline", daemon.pid)).ok()?;
    let (_, step) = title.split_once('[')?;
    Some(step.split_once(']')?.0.to_owned())
}

/// Returns whether `real` can be this step of one of these jobs. Heterogeneous jobs have further parts in both ids.
fn is_same_step(real: &str, jobs: &Range<u32>, step: u32) -> bool {
    let Some((real_job, real_step)) = real.split_once('.') else { return true };
    let is_task = real_step.starts_with(|first: char| first.is_ascii_digit());
    let may_be_in = |real: &str, ids: &Range<u32>| real.parse().map_or(true, |real: u32| ids.contains(&real));
    is_task && may_be_in(real_job, jobs) && may_be_in(real_step, &(step..step.saturating_add(1)))
}

/// Refuses a launch outside of steps if the job has several nodes or components: a batch script or the shell of
/// `salloc` runs on the first node only.
fn outside_of_steps(host: &Host<'_>, components: Option<Sourced<u32>>) -> Result<(), String> {
    let refusal = |several: &str, source: &str, srun: &str| {
        Err(format!(
            "this process is not a task of a Slurm step, but the job has several {several} ({source}): start one \
             launch on each node with `{srun} xlaunch ...`, or use this node alone with --standalone"
        ))
    };
    if let Some(components) = components.filter(|components| components.value > 1) {
        let srun = format!("srun --het-group=0-{} --ntasks-per-node=1", components.value - 1);
        return refusal("components", &components.source, &srun);
    }
    let nodes = match host.number::<u32>("SLURM_JOB_NUM_NODES")? {
        None => host.number("SLURM_NNODES")?,
        given => given,
    };
    match nodes {
        Some(nodes) if nodes.value > 1 => refusal("nodes", &nodes.source, &one_task_on_each(nodes.value)),
        _ => Ok(()),
    }
}

/// Returns the command that starts one task per node. Slurm ignores `--ntasks-per-node=1` in a job with more tasks.
fn one_task_on_each(nodes: u32) -> String {
    format!("srun -N {nodes} -n {nodes}")
}

fn one_task_per_node(host: &Host<'_>, nodes: &Sourced<u32>) -> Result<(), String> {
    match host.number::<u32>("SLURM_STEP_NUM_TASKS")? {
        Some(tasks) if tasks.value > nodes.value => Err(format!(
            "the Slurm step has several tasks per node ({}, {}), but one launch starts all workers of a node: use \
             `{} xlaunch ...` and --nproc-per-node",
            tasks.source,
            nodes.source,
            one_task_on_each(nodes.value)
        )),
        _ => Ok(()),
    }
}
