//! `--dry-run`: checks a training job and prints the memory that each rank needs and has. If the job does not fit, it
//! also prints configuration changes that make it fit. Starts nothing and writes nothing.

use std::fmt::Write as _;

use xlaunch_agent::workload::host_memory::{self, HostNeeds, MemoryPlan, SaveBuffers};
use xlaunch_cluster::nodes::Nodes;
use xlaunch_host::devices::{self, Node};
use xlaunch_host::memory;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{Device, JobSpec};
use xlaunch_spec::refusal::Refusal;

use super::launch::{self, Launch};
use super::output::answer;
use xlaunch_agent::stderr::print_line;
use xlaunch_spec::quantities::{bytes_text, count_text};
use xlaunch_worker::Preflight;
use xlaunch_worker::dry_run::{self, Memory, Saving};
use xlaunch_worker::error::WorkerError;

/// The devices that a job would run on.
#[derive(Clone, Copy, Debug)]
struct Target {
    cuda: bool,
    ranks_per_node: u32,
    nodes: u32,
    /// Bytes available to each rank; `None` if not known on this machine.
    limit: Option<u64>,
}

impl Target {
    fn of(spec: &JobSpec, group: Option<&Nodes>) -> Self {
        let node = Node::inspect();
        let gpus = node.gpus.unwrap_or(0);
        // A GPU job can be planned on a machine without one.
        let cuda = match spec.engine.device {
            Device::Cuda => true,
            Device::Auto => gpus > 0,
            Device::Cpu => false,
        };
        let chosen = u32::try_from(spec.launch.devices.len()).unwrap_or(u32::MAX);
        let present = if chosen == 0 { gpus } else { chosen };
        let ranks_per_node = spec.launch.nproc.unwrap_or(if cuda { present.max(1) } else { 1 });
        let configured = spec.engine.memory_limit_mb.map(|mib| mib.saturating_mul(1 << 20));
        let present = if cuda {
            devices::gpu_memory()
        } else {
            memory::available().map(|available| host_memory::buffers_of_rank(available, ranks_per_node))
        };
        let limit = [configured, present].into_iter().flatten().min();
        Self { cuda, ranks_per_node, nodes: group.map_or(1, |group| group.spec.nodes.max), limit }
    }

    fn ranks(self) -> u32 {
        self.ranks_per_node.saturating_mul(self.nodes)
    }
}

/// Prints the report. Fails with exit code 2 if the job does not fit.
pub(super) fn run(launch: &Launch, group: Option<&Nodes>) -> ExitCode {
    match report(launch, group) {
        Ok((text, exit)) => answer(&text, exit),
        Err(refusal) => launch::refuse(&refusal),
    }
}

fn report(launch: &Launch, group: Option<&Nodes>) -> Result<(String, ExitCode), Refusal> {
    let mut spec = launch::load(launch, xlaunch_worker::fill_in)?;
    let target = Target::of(&spec, group);
    spec.launch.nproc = Some(target.ranks_per_node);
    spec.check().map_err(|invalid| Refusal::new(ExitCode::Usage, invalid.to_string()))?;
    devices::check_device(&spec, target.cuda)?;
    let checks = xlaunch_worker::preflight_dry_run(&spec, target.ranks())?;
    checks.warnings.iter().for_each(|warning| print_line(format_args!("warning: {warning}")));
    checks.notes.iter().for_each(|note| print_line(format_args!("{note}")));
    let (needed, savings) = needs(&spec, target).map_err(Refusal::from)?;
    spec.train.steps = checks.steps;
    let host = plan_host(&spec, target, &needed, checks.state_bytes);
    let text = text(&spec, target, &checks, &needed, &savings, &host);
    let fits = target.limit.is_none_or(|limit| needed.total() <= limit) && host.is_ok();
    Ok((text, if fits { ExitCode::Done } else { ExitCode::Usage }))
}

/// The memory of each rank and, if it is more than there is, changes that reduce it.
fn needs(spec: &JobSpec, target: Target) -> Result<(Memory, Vec<Saving>), WorkerError> {
    let ranks = target.ranks() as usize;
    let needed = dry_run::memory(spec, target.cuda, ranks)?;
    let savings = target.limit.map(|limit| dry_run::savings(spec, needed, target.cuda, ranks, limit));
    Ok((needed, savings.transpose()?.unwrap_or_default()))
}

/// Plans the memory of this host as a launch would, unless the job cannot run on this host.
fn plan_host(
    spec: &JobSpec,
    target: Target,
    needed: &Memory,
    state: u64,
) -> Result<Option<MemoryPlan>, String> {
    if target.cuda && target.limit.is_none() {
        return Ok(None);
    }
    let Target { cuda, ranks_per_node: ranks, .. } = target;
    let copy = host_memory::saved_here(spec, state, ranks, target.ranks(), cuda, true);
    let needs = HostNeeds::new(ranks, (!cuda).then_some(needed.total()), copy);
    host_memory::plan(spec, needs, target.nodes > 1, memory::available()).map(Some)
}

#[expect(clippy::cast_precision_loss, reason = "for display only")]
fn text(
    spec: &JobSpec,
    target: Target,
    checks: &Preflight,
    needed: &Memory,
    savings: &[Saving],
    host: &Result<Option<MemoryPlan>, String>,
) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<14}{value}");
    };
    let device = if target.cuda { "GPU" } else { "CPU" };
    let nodes = if target.nodes > 1 { format!(" on {} nodes", target.nodes) } else { String::new() };
    line("ranks", format!("{} x {device}{nodes}", target.ranks()));
    let active = match needed.active {
        active if active < needed.parameters => format!(", {} for each token", count_text(active as f64)),
        _ => String::new(),
    };
    line("model", format!("{} parameters{active}", count_text(needed.parameters as f64)));
    if spec.lora.is_on() {
        let share = 100.0 * needed.trained as f64 / (needed.parameters as f64).max(1.0);
        line(
            "trained",
            format!("{} parameters of adapters, {share:.2} %", count_text(needed.trained as f64)),
        );
    }
    let per_step = needed.tokens as f64 * f64::from(target.ranks());
    let (all, epoch) = (checks.tokens as f64, checks.epoch_tokens as f64);
    let epochs = all / epoch.max(1.0);
    line("steps", checks.steps.to_string());
    line(
        "tokens",
        format!(
            "{} a step, {} in all, {epochs:.2} epochs of {}",
            count_text(per_step),
            count_text(all),
            count_text(epoch)
        ),
    );
    let rows = [
        ("weights", needed.weights),
        ("gradients", needed.gradients),
        ("optimizer", needed.optimizer),
        ("activations", needed.activations),
        ("libraries", needed.libraries),
        ("each rank", needed.total()),
    ];
    for (name, bytes) in rows.into_iter().filter(|(_, bytes)| *bytes > 0) {
        line(name, bytes_text(bytes));
    }
    match host {
        Ok(Some(MemoryPlan { buffers: SaveBuffers::Pieces, note })) => {
            line("checkpoints", note.clone().unwrap_or_default());
        }
        Err(reason) if target.cuda => line("host", reason.clone()),
        _ => {}
    }
    let Some(limit) = target.limit else {
        line("fits", format!("the memory of a {device} is not known here"));
        return out;
    };
    let limit_text = bytes_text(limit);
    if needed.total() <= limit {
        line("fits", format!("yes, into {limit_text}"));
        return out;
    }
    line("fits", format!("no, there is {limit_text}"));
    for saving in savings {
        let fits = if saving.memory.total() <= limit { ", which fits" } else { "" };
        line("", format!("{}: {}{fits}", saving.change, bytes_text(saving.memory.total())));
    }
    if savings.last().is_none_or(|last| last.memory.total() > limit) {
        line("", "no other configuration change makes it fit".into());
    }
    out
}
