//! Foreground launches of the built-in trainer or any command: from the parsed command line to the exit code.

mod command;
mod load;

use std::path::{Path, PathBuf};
use std::time::Instant;

use xlaunch_proto::v1::{Greeting, Prepare};
use xlaunch_spec::command::GroupSpec;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::lineage::DirectoryLock;

pub(super) use command::{run_command, run_workers};
pub(crate) use load::Launch;
pub(super) use load::{load, prepare};

use super::output::print_end;
use super::resume;
use crate::error_file;
use xlaunch_agent::base_environment::BaseEnvironment;
use xlaunch_agent::driver;
use xlaunch_agent::ending::Ending;
use xlaunch_agent::environment_file::{self, Facts, Parent};
use xlaunch_agent::registry::Entry;
use xlaunch_agent::run_dir::RunDir;
use xlaunch_agent::status::board;
use xlaunch_agent::stderr::print_line;
use xlaunch_agent::waiting::{self, Group};
use xlaunch_agent::work;
use xlaunch_agent::workload::host_memory::{self, HostNeeds, MemoryPlan, SaveBuffers};
use xlaunch_agent::workload::trainer::{CheckpointFiles, TrainerPlan};
use xlaunch_agent::{report, run_summary, workload};
use xlaunch_cluster::nodes::Nodes;
use xlaunch_cluster::shared::{self, Mark};
use xlaunch_host::devices::Placement;
use xlaunch_host::libraries::Libraries;
use xlaunch_host::signals::Signals;
use xlaunch_host::{clock, memory, system_errors};
use xlaunch_spec::refusal::Refusal;
use xlaunch_worker::{Preflight, dry_run};

/// Phases of a launch without workers to stop, for messages about a signal.
const AT_START: &str = "before the workers had started";
const WAITING: &str = "while waiting for other nodes";

/// Trains in the foreground, as one of the nodes of `group` if there is one.
pub(crate) async fn run(launch: &Launch, group: Option<&Nodes>) -> ExitCode {
    let mut signals = match Signals::listen(&workload::trainer::STOP_SIGNALS) {
        Ok(signals) => signals,
        Err(refusal) => return refuse(&refusal),
    };
    let launch = launch.clone();
    let preparing = off_this_thread(move || {
        let mut declared = None;
        let fill_in = |spec: &mut JobSpec| {
            declared = spec.checkpoint.init.is_some().then(|| spec.clone());
            xlaunch_worker::fill_in(spec)
        };
        let (spec, placement) = prepare(&launch, fill_in)?;
        resume::check(&launch.config, &spec)?;
        Ok((spec, placement, declared))
    });
    let (mut spec, placement, declared) = match signals.unless_stopped(AT_START, notify, preparing).await {
        Ok(prepared) => prepared,
        Err(refusal) => return refuse(&refusal),
    };
    if group.is_some() {
        // `job.json` is shared by all nodes, which may have different numbers of workers.
        spec.launch.nproc = None;
    }
    let place = Place { base: &BaseEnvironment::Own, group, declared: declared.as_ref() };
    match train(&spec, &placement, place, signals, RunDir::create).await {
        Ok(ending) => report_and_exit(&ending),
        Err(refusal) => refuse_and_record(&refusal),
    }
}

fn report_and_exit(ending: &Ending) -> ExitCode {
    let now = clock::unix().as_secs();
    error_file::record(report::error_file::of_ending(ending, std::process::id(), now).as_deref());
    print_end(&ending.summary, &report::at_end(ending));
    ending.exit
}

/// The environment and the nodes of a job.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    /// Environment that the workers inherit.
    pub(super) base: &'a BaseEnvironment,
    /// The nodes, if there are several.
    pub(super) group: Option<&'a Nodes>,
    /// The configuration as the user wrote it, if initial weights complete it.
    pub(super) declared: Option<&'a JobSpec>,
}

impl Place<'_> {
    fn spec(&self) -> Option<&GroupSpec> {
        self.group.map(|nodes| &nodes.spec)
    }

    /// Waits for the first attempt of which this node is a member, unless a signal comes before.
    async fn first_attempt(
        &self,
        greeting: Greeting,
        launch: board::Launch,
        signals: &mut Signals,
    ) -> Result<Group, Refusal> {
        let when = if self.group.is_some() { WAITING } else { AT_START };
        let joined = waiting::first_attempt(self.group, greeting, launch, notify);
        signals.unless_stopped(when, notify, joined).await
    }
}

/// Runs what may take long on another thread, so that this one can answer signals meanwhile.
async fn off_this_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // It panicked, which was reported.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Trains. The run directory is created only after data and checkpoint have been validated. For a job with one node,
/// `create` makes it, given the id of the run.
pub(super) async fn train(
    spec: &JobSpec,
    placement: &Placement,
    place: Place<'_>,
    mut signals: Signals,
    create: impl FnOnce(&JobSpec, &str, Option<Entry>) -> Result<RunDir, Refusal>,
) -> Result<Ending, Refusal> {
    let greeting = work::of_trainer(spec, place.declared, placement.workers, place.spec());
    let mark = place.group.map(|_| Mark::leave(&shared::directory(spec), &greeting.instance));
    let mark = mark.transpose().map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()))?;
    let mut group = place.first_attempt(greeting, workload::trainer::launch(spec), &mut signals).await?;
    let spec = &as_completed(spec, &group.first);
    let checks = signals.unless_stopped(AT_START, notify, preflight(spec, &group)).await;
    let ready = checks.and_then(|checks| ready(spec, placement, &mut group, checks, create));
    let ready = match ready {
        Ok(ready) => ready,
        Err(refusal) => {
            group.refuse(&refusal).await;
            return if refusal.exit == ExitCode::Done {
                Ok(Ending::new(ExitCode::Done))
            } else {
                Err(refusal)
            };
        }
    };
    let ending = run_trainer(placement, group, signals, place.base, ready).await?;
    if ending.leads && ending.left {
        // The job continues from the checkpoints that this node has.
        mark.into_iter().for_each(Mark::keep);
    }
    Ok(ending)
}

/// Takes the model and the path of initial weights from node rank 0: only that node needs to have the weights.
fn as_completed(spec: &JobSpec, first: &Prepare) -> JobSpec {
    let mut spec = spec.clone();
    // Empty if the configuration is complete without files.
    if let Ok(JobSpec { model, checkpoint, .. }) = JobSpec::from_json(&first.master_completed) {
        (spec.model, spec.checkpoint.init) = (model, checkpoint.init);
    }
    spec
}

/// The worker crate's access to checkpoints, for the agent, which does not depend on that crate.
const CHECKPOINT_FILES: CheckpointFiles = CheckpointFiles {
    recover: |dir, run, source, snapshot| {
        xlaunch_worker::recover(dir, run, source, snapshot).map_err(|error| error.to_string())
    },
    verify: |checkpoint| xlaunch_worker::verify_checkpoint(checkpoint).map_err(|error| error.to_string()),
    lock: |dir, job| match xlaunch_worker::lock_checkpoints(dir, job) {
        Ok(lock) => Ok(Box::new(lock)),
        Err(error) => Err(error.to_string()),
    },
};

/// Everything that a training job needs before its workers start.
struct Ready {
    spec: JobSpec,
    checks: Preflight,
    run: RunDir,
    buffers: SaveBuffers,
    parent: Option<Parent>,
    parent_dir: Option<PathBuf>,
}

/// Checks data and checkpoint.
async fn preflight(spec: &JobSpec, group: &Group) -> Result<Preflight, Refusal> {
    let (spec, world, leads) = (spec.clone(), group.first.world_size, group.first.node_rank == 0);
    let check = move || {
        if leads {
            xlaunch_worker::preflight(&spec, &spec.runs_dir(), world)
        } else {
            xlaunch_worker::preflight_data(&spec, world)
        }
    };
    off_this_thread(check).await
}

/// Creates the directory of the run. Refuses with [`ExitCode::Done`] if nothing is left to train.
fn ready(
    spec: &JobSpec,
    placement: &Placement,
    group: &mut Group,
    checks: Preflight,
    create: impl FnOnce(&JobSpec, &str, Option<Entry>) -> Result<RunDir, Refusal>,
) -> Result<Ready, Refusal> {
    let job_dir = spec.runs_dir();
    checks.warnings.iter().for_each(|warning| print_line(format_args!("warning: {warning}")));
    checks.notes.iter().for_each(|note| notify(note));
    if let (Some(checkpoint), Some(reason)) = (&checks.resume_from, &checks.complete) {
        // No run is created, so the job's newest run remains the one that trained.
        let checkpoint = checkpoint.display();
        let message = format!("nothing is left to train: checkpoint {checkpoint} {reason}");
        notify(&message);
        return Err(Refusal::new(ExitCode::Done, message));
    }
    let spec = spec.clone();
    let MemoryPlan { buffers, note } = plan_memory(&spec, placement, group, checks.state_bytes)?;
    let parent = parent(&checks);
    let parent_dir = parent.as_ref().filter(|parent| !parent.run.is_empty());
    let parent_dir =
        parent_dir.and_then(|Parent { run, checkpoint, .. }| find_run(checkpoint, run, &job_dir));
    let run = if group.may_have_peers() {
        RunDir::for_node(&spec, &group.run_id, group.place(), group.entry.take())?
    } else {
        create(&spec, &group.run_id, group.entry.take())?
    };
    if group.first.node_rank == 0 {
        run.without_link().iter().for_each(|warning| print_line(format_args!("warning: {warning}")));
    }
    note.iter().for_each(|note| notify(note));
    Ok(Ready { spec, checks, run, buffers, parent, parent_dir })
}

/// Plans the memory of this node in advance, so that a shortage does not show only at the first checkpoint.
fn plan_memory(
    spec: &JobSpec,
    placement: &Placement,
    group: &Group,
    state_bytes: u64,
) -> Result<MemoryPlan, Refusal> {
    let (ranks, world, cuda) = (placement.workers, group.first.world_size, placement.cuda);
    let needed = (!cuda).then(|| dry_run::memory(spec, false, world as usize)).transpose()?;
    let buffers = needed.map(|needed| needed.total());
    let copy = host_memory::saved_here(spec, state_bytes, ranks, world, cuda, group.first.node_rank == 0);
    let needs = HostNeeds::new(ranks, buffers, copy);
    host_memory::plan(spec, needs, group.has_peers(), memory::available())
        .map_err(|reason| Refusal::new(ExitCode::Usage, reason))
}

async fn run_trainer(
    placement: &Placement,
    group: Group,
    signals: Signals,
    base: &BaseEnvironment,
    ready: Ready,
) -> Result<Ending, Refusal> {
    let Ready { spec, checks, run, buffers, parent, parent_dir } = ready;
    let device = if placement.cuda { "GPU" } else { "CPU" };
    let (first, path) = (&group.first, run.path.display());
    let node = if group.has_peers() {
        format!("node {} of {}, ", first.node_rank, first.nodes)
    } else {
        String::new()
    };
    notify(&format!("{node}{} x {device}, run {path}", placement.workers));
    let (start, leads) = (Instant::now(), first.node_rank == 0);
    let libraries = placement.cuda.then(|| Libraries::find(&|name| base.get(name)));
    let facts = Facts {
        run: run.id.clone(),
        commit: option_env!("XLAUNCH_COMMIT"),
        placement: placement.clone(),
        world: first.world_size,
        libraries: libraries.clone(),
        data: checks.data,
        parent,
    };
    let environment = leads.then(|| environment_file::write(&run.path, facts)).transpose();
    let environment = environment.map_err(|error| failed(&error))?;
    let plan = TrainerPlan {
        spec: &spec,
        placement,
        resume_from: checks.resume_from,
        parent: parent_dir,
        files: CHECKPOINT_FILES,
        lock: checks.lock.map(|lock| Box::new(lock) as Box<dyn DirectoryLock>),
        buffers,
        libraries: libraries.as_ref(),
        bench: None,
        rank_threads: false,
        base,
    };
    let (dir, logs) = (run.path.clone(), run.logs.clone());
    let ended = driver::run_trainer(plan, run, group, signals).await;
    let (mut ending, results) = ended.map_err(|error| failed(&error))?;
    ending.logs = Some(logs);
    let described = environment.map(|environment| environment.finish());
    // Written by the node that has rank 0 at the end. At the start that may have been another node.
    let summed_up = (ending.leads && !ending.left)
        .then(|| run_summary::write(&dir, &ending, start.elapsed().as_secs_f64(), &results.summary));
    for problem in [described, summed_up].into_iter().flatten().filter_map(Result::err) {
        print_line(format_args!("warning: failed to describe the run in {}: {problem}", dir.display()));
    }
    // A node that had rank 0 in an earlier attempt knows of that attempt only.
    if ending.leads && results.summary.steps() > 0 {
        let (world, accounting) = (ending.status.world_size, ending.status.accounting.as_ref());
        ending.summary = results.summary.text(world, start.elapsed(), results.metrics, accounting);
    }
    Ok(ending)
}

fn notify(text: &str) {
    print_line(format_args!("xlaunch: {text}"));
}

/// The run that wrote the checkpoint to resume from.
fn parent(checks: &Preflight) -> Option<Parent> {
    let (parent, path) = checks.parent.as_ref().zip(checks.resume_from.as_ref())?;
    let checkpoint = std::path::absolute(path).unwrap_or_else(|_| path.clone());
    Some(Parent { run: parent.run.clone(), step: parent.step, checkpoint })
}

/// Returns the directory of the run that wrote a checkpoint: the one that contains the checkpoint or, with
/// `checkpoint.dir`, a run of this job.
fn find_run(checkpoint: &Path, run: &str, job_dir: &Path) -> Option<PathBuf> {
    let around = checkpoint.parent().and_then(Path::parent).map(Path::to_path_buf);
    // The name comes from a file, so it must not point outside the job's directory.
    let of_job = Path::new(run).file_name().map(|run| job_dir.join(run));
    [around, of_job].into_iter().flatten().find(|dir| dir.join("job.json").is_file())
}

fn refuse_and_record(refusal: &Refusal) -> ExitCode {
    error_file::record_refusal(refusal);
    refuse(refusal)
}

fn failed(error: &std::io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("failed to run the job: {}", system_errors::describe(error)))
}

/// Prints why nothing was started. A stop and a job that is already done are not errors.
pub(super) fn refuse(refusal: &Refusal) -> ExitCode {
    let is_error = !matches!(refusal.exit, ExitCode::Done | ExitCode::Stopped | ExitCode::Signal(_));
    let prefix = if is_error { "error" } else { "xlaunch" };
    print_line(format_args!("{prefix}: {}", refusal.message.trim()));
    refusal.exit
}
