//! Launches of commands.

use std::path::Path;

use rustix::thread::CpuSet;
use xlaunch_agent::base_environment::BaseEnvironment;
use xlaunch_agent::driver;
use xlaunch_agent::ending::Ending;
use xlaunch_agent::registry::Entry;
use xlaunch_agent::resolved_command::{self, CommandSpec, ResolvedCommand};
use xlaunch_agent::run_dir::{NodePlace, RunDir};
use xlaunch_agent::work;
use xlaunch_agent::workload::command::{self, CommandPlan};
use xlaunch_cluster::nodes::Nodes;
use xlaunch_host::devices::{self, Node};
use xlaunch_host::network::Interface;
use xlaunch_host::signals::Signals;
use xlaunch_host::spawn::affinity::{self, Affinity};
use xlaunch_spec::command::{LogOptions, PerRank};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::{AT_START, Place, failed, notify, off_this_thread, refuse, refuse_and_record, report_and_exit};
use crate::cli::piped_script;

/// Runs a command in the foreground, on one of the nodes of `group` if there is one.
pub(in crate::cli) async fn run_command(spec: CommandSpec, group: Option<&Nodes>) -> ExitCode {
    let mut signals = match Signals::listen(&command::stop_signals(&spec.signals)) {
        Ok(signals) => signals,
        Err(refusal) => return refuse(&refusal),
    };
    let resolving = off_this_thread(move || {
        let mut spec = spec;
        let script = piped_script::read(&mut spec)?;
        let command = resolved_command::resolve(spec, &|name| std::env::var_os(name), &Node::inspect)?;
        let name = script.as_ref().map_or(command.name.clone(), |script| script.name.to_owned());
        Ok((ResolvedCommand { name, ..command }, script))
    });
    // The workers read the script for as long as it is in scope.
    let (mut command, _script) = match signals.unless_stopped(AT_START, notify, resolving).await {
        Ok(command) => command,
        Err(refusal) => return refuse(&refusal),
    };
    if command.spec.flight_recorder && command.spec.logs.kept_in().is_none() {
        let message = "--flight-recorder needs --log-dir: without it, the dumps are removed with the logs";
        return refuse(&Refusal::new(ExitCode::Usage, message));
    }
    if let Err(refusal) = keep_redirected(&mut command.spec.logs) {
        return refuse(&refusal);
    }
    let place = Place { base: &BaseEnvironment::Own, group, declared: None };
    match run_workers(&command, place, signals, RunDir::for_command).await {
        Ok(ending) => report_and_exit(&ending),
        Err(refusal) => refuse_and_record(&refusal),
    }
}

/// Unless the user has chosen one, chooses a directory for streams that are shown nowhere else, as torchrun does.
fn keep_redirected(logs: &mut LogOptions) -> Result<(), Refusal> {
    if logs.dir.is_some() || logs.redirects == PerRank::default() {
        return Ok(());
    }
    let made = tempfile::Builder::new().prefix("xlaunch-logs-").tempdir();
    let dir = made.map_err(|error| {
        let message =
            format!("failed to create a directory for the logs: {error}; choose one with --log-dir");
        Refusal::new(ExitCode::Usage, message)
    })?;
    notify(&format!("logs in {}", dir.path().display()));
    logs.dir = Some(dir.keep());
    Ok(())
}

/// Runs the workers of a command. `create` makes the directory of the run, given its id and, if the job may have
/// several nodes, the place of this node.
pub(in crate::cli) async fn run_workers(
    command: &ResolvedCommand,
    place: Place<'_>,
    mut signals: Signals,
    create: impl FnOnce(&ResolvedCommand, &str, Option<NodePlace>, Option<Entry>) -> Result<RunDir, Refusal>,
) -> Result<Ending, Refusal> {
    let planned = command.clone();
    let planning =
        off_this_thread(move || affinities(&planned).map_err(|reason| Refusal::new(ExitCode::Usage, reason)));
    let affinities = signals.unless_stopped(AT_START, notify, planning).await?;
    let greeting = work::of_command(command, place.spec());
    let mut group = place.first_attempt(greeting, command::launch(command), &mut signals).await?;
    // All nodes use the same run id, whenever they join.
    let mut command = command.clone();
    command.spec.run_id = Some(group.run_id.clone());
    let place_in_group = group.may_have_peers().then_some(group.place());
    let run = match create(&command, &group.run_id, place_in_group, group.entry.take()) {
        Ok(run) => run,
        Err(refusal) => {
            group.refuse(&refusal).await;
            return Err(refusal);
        }
    };
    let logs = (command.spec.logs.kept_in().is_some() || run.private().is_none()).then(|| run.logs.clone());
    let interface = place.spec().and_then(|spec| Interface::of_node(spec, &group.address));
    let plan = CommandPlan { command: &command, affinities, base: place.base, interface };
    let ending = driver::run_command(plan, run, group, signals).await.map_err(|error| failed(&error))?;
    Ok(Ending { logs, ..ending })
}

fn affinities(command: &ResolvedCommand) -> Result<Vec<Affinity>, String> {
    let allowed = allowed_cpus(rustix::thread::sched_getaffinity(None), command.spec.binding.is_some())?;
    // Loading NVML is slow, and only a binding needs the GPUs.
    let gpus = if command.spec.binding.is_some() { devices::gpu_addresses() } else { Vec::new() };
    affinity::plan(command.spec.binding, command.nproc, &gpus, Path::new("/sys"), &allowed)
}

/// Returns the CPUs that this process may use. If a sandbox refuses the question, all count, unless workers are to be
/// bound to them.
fn allowed_cpus(answer: rustix::io::Result<CpuSet>, are_bound: bool) -> Result<CpuSet, String> {
    match answer {
        Ok(allowed) => Ok(allowed),
        Err(error) if are_bound => Err(format!("failed to read the CPU affinity: {error}")),
        Err(_) => {
            let mut all = CpuSet::new();
            let count = std::thread::available_parallelism().map_or(1, usize::from).min(CpuSet::MAX_CPU);
            (0..count).for_each(|cpu| all.set(cpu));
            Ok(all)
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn refused_affinity_matters_only_to_bound_workers() {
        let all = allowed_cpus(Err(Errno::PERM), false).unwrap();
        assert_eq!(all.count() as usize, std::thread::available_parallelism().unwrap().get());
        assert!(
            allowed_cpus(Err(Errno::PERM), true)
                .unwrap_err()
                .contains("CPU affinity: Operation not permitted")
        );
        assert_eq!(allowed_cpus(Ok(all), false), Ok(all));
    }
}
