//! Resolves a submission on this node: determines the description of the job and its numbers of workers and GPUs. Pure.

use std::time::Duration;

use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::v1::{Scheduling, SubmitRequest};
use xlaunch_spec::command::CommandSpec;
use xlaunch_spec::job::{Device, JobSpec};
use xlaunch_spec::quantities::time_text;

use super::commands::CommandError;
use super::files::{Description, PROTOCOL};
use super::state::{Submitted, bounded};
use xlaunch_host::naming::file_name;

/// Maximum length of a job's name in bytes. Names are ASCII.
pub(crate) const MAX_NAME_BYTES: usize = 64;

/// Resources of the node, and the operator's limits on jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLimits {
    /// Number of GPUs of the node.
    pub(crate) gpus: u32,
    pub(crate) cores: u32,
    /// Memory of the node in bytes.
    pub(crate) memory: u64,
    /// Memory that a job gets for each of its GPUs, in bytes.
    pub(crate) memory_per_gpu: u64,
    pub(crate) max_grace: Duration,
    pub(crate) default_time: Option<Duration>,
    pub(crate) max_time: Option<Duration>,
}

/// Resolves a submission. Returns the job for the journal and for its directory, without id, time and dependencies.
/// Shutdown timeouts above `max_grace` are reduced to it.
///
/// # Errors
/// [`CommandError::Invalid`] if the submission contradicts itself, or sets something that the daemon decides.
pub(crate) fn resolve(
    submission: Submit,
    uid: u32,
    node: &NodeLimits,
) -> Result<(Submitted, Description), CommandError> {
    let Submit { request, mut work } = submission;
    let SubmitRequest { request_id, work_dir, environment, umask, name, priority, gpus: wanted, .. } =
        request;
    let mut scheduling = request.scheduling.unwrap_or_default();
    match &mut work {
        Work::Trainer(spec) => {
            let (launch, most) = (&mut spec.launch, node.max_grace.as_secs_f64());
            launch.shutdown_timeout = launch.shutdown_timeout.min(most);
            launch.shutdown_timeout_max = launch.shutdown_timeout_max.min(most);
        }
        Work::Command(spec) => spec.shutdown_timeout = spec.shutdown_timeout.min(node.max_grace),
    }
    let size = match &work {
        Work::Trainer(spec) => trainer_size(spec, wanted, node.gpus > 0)?,
        Work::Command(spec) => command_size(spec, wanted, node.gpus)?,
    };
    let mut name = file_name(if name.is_empty() { &size.name } else { &name });
    name.truncate(MAX_NAME_BYTES);
    let trainer = matches!(work, Work::Trainer(_));
    set_time_limit(&mut scheduling, node)?;
    check_warning(&scheduling, trainer)?;
    set_reserved(&mut scheduling, size.gpus, node);
    let submitted = Submitted {
        request_id,
        uid,
        name: name.clone(),
        trainer,
        priority,
        gpus: size.gpus,
        workers: size.workers,
        shutdown_timeout: size.shutdown_timeout,
        command_line: bounded(size.command_line),
        work_dir: work_dir.clone(),
        rate: rate(size.gpus, scheduling.cpus.unwrap_or(size.workers), scheduling.memory_bytes, node),
        scheduling,
        ..Submitted::default()
    };
    let (workers, start, gpus) = (size.workers, 0, Vec::new());
    let description = Description {
        protocol: PROTOCOL,
        job: 0,
        name,
        work_dir: work_dir.into(),
        umask,
        environment,
        work,
        workers,
        start,
        gpus,
        requeued: false,
        max_output: None,
    };
    Ok((submitted, description))
}

/// Sets the time limit if the job has none, or checks that it can have this one.
fn set_time_limit(scheduling: &mut Scheduling, node: &NodeLimits) -> Result<(), CommandError> {
    let most = node.max_time;
    let Some(wanted) = scheduling.time_limit_seconds else {
        let default = node.default_time.or(most).map(|default| default.min(most.unwrap_or(default)));
        scheduling.time_limit_seconds = default.map(|limit| limit.as_secs());
        return Ok(());
    };
    if let Some(most) = most.filter(|most| wanted > most.as_secs()) {
        let wanted = time_text(Duration::from_secs(wanted));
        return Err(CommandError::Invalid(format!(
            "the job requests to run for {wanted}, but a job can run for at most {} on this node (jobs.max_time)",
            time_text(most)
        )));
    }
    Ok(())
}

fn check_warning(scheduling: &Scheduling, trainer: bool) -> Result<(), CommandError> {
    if scheduling.warning.is_none() {
        return Ok(());
    }
    if trainer {
        return Err(invalid(
            "--signal: not available for a training job, which saves a checkpoint at its time limit without it",
        ));
    }
    match scheduling.time_limit_seconds {
        None => Err(invalid(
            "--signal: the job has no time limit before which a signal could be sent; add --time",
        )),
        Some(_) => Ok(()),
    }
}

/// Sets the cores and the memory that a GPU job holds to its share of the node unless they are set. The share may be no
/// cores if the node has more GPUs than cores.
fn set_reserved(scheduling: &mut Scheduling, gpus: u32, node: &NodeLimits) {
    if gpus > 0 && node.gpus > 0 {
        let cores = u64::from(node.cores) * u64::from(gpus) / u64::from(node.gpus);
        let cores = u32::try_from(cores).unwrap_or(u32::MAX);
        scheduling.cpus = scheduling.cpus.or(Some(cores).filter(|cores| *cores > 0));
        // A request for more GPUs than the node has is refused later.
        let memory = node.memory_per_gpu.saturating_mul(gpus.into());
        scheduling.memory_bytes = scheduling.memory_bytes.or(Some(memory));
    }
}

/// Returns the usage rate: GPUs + max(cores / all cores, memory / all memory), in thousandths.
fn rate(gpus: u32, cores: u32, memory: Option<u64>, node: &NodeLimits) -> u32 {
    let cores = u64::from(cores) * 1000 / u64::from(node.cores.max(1));
    let memory = u128::from(memory.unwrap_or(0)) * 1000 / u128::from(node.memory.max(1));
    let part = cores.max(u64::try_from(memory).unwrap_or(u64::MAX));
    u32::try_from((u64::from(gpus) * 1000).saturating_add(part)).unwrap_or(u32::MAX)
}

struct Size {
    workers: u32,
    gpus: u32,
    shutdown_timeout: f64,
    command_line: String,
    name: String,
}

fn invalid(text: &str) -> CommandError {
    CommandError::Invalid(text.into())
}

fn trainer_size(spec: &JobSpec, wanted: Option<u32>, has_gpus: bool) -> Result<Size, CommandError> {
    if !spec.launch.devices.is_empty() {
        return Err(invalid(
            "launch.devices: not available under the daemon, which chooses the GPUs; --gpus sets their number",
        ));
    }
    let on_cpu = spec.engine.device == Device::Cpu || wanted == Some(0);
    if on_cpu && spec.engine.device == Device::Cuda {
        return Err(invalid("engine.device is \"cuda\", but the job requests no GPU (--gpus)"));
    }
    let workers = spec.launch.nproc.unwrap_or(wanted.filter(|gpus| *gpus > 0).unwrap_or(1));
    let gpus = match wanted {
        _ if on_cpu => 0,
        Some(gpus) if gpus < workers => {
            return Err(invalid(&format!("{workers} workers need one GPU each, but --gpus is {gpus}")));
        }
        Some(gpus) => gpus,
        None if has_gpus => workers,
        None if spec.engine.device == Device::Cuda => {
            return Err(invalid("engine.device is \"cuda\", but this node has no GPU"));
        }
        None => 0,
    };
    Ok(Size {
        workers,
        gpus,
        // A job whose checkpoint makes progress gets up to this much time.
        shutdown_timeout: spec.launch.shutdown_timeout.max(spec.launch.shutdown_timeout_max),
        command_line: String::new(),
        name: spec.job.name.clone(),
    })
}

/// Determines the size of a command. Without a number of GPUs, it gets one per worker on a node that has any, in which
/// case `--nproc-per-node gpu` means one worker.
fn command_size(spec: &CommandSpec, wanted: Option<u32>, present: u32) -> Result<Size, CommandError> {
    if spec.logs.kept_in().is_some() {
        return Err(invalid(
            "--log-dir: not available under the daemon, which keeps the logs; `xlaunch logs` shows them",
        ));
    }
    let counted = Ok(wanted.unwrap_or(present.min(1)));
    let workers = spec.nproc.resolve(&counted, 1).map_err(CommandError::Invalid)?;
    let gpus = wanted.unwrap_or(if present > 0 { workers } else { 0 });
    if spec.virtual_local_rank && gpus < workers {
        return Err(invalid(&format!(
            "--virtual-local-rank: {workers} workers need one GPU each, but --gpus is {gpus}"
        )));
    }
    Ok(Size {
        workers,
        gpus,
        shutdown_timeout: spec.shutdown_timeout.as_secs_f64(),
        command_line: spec.to_string(),
        name: spec.name(),
    })
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::WarningSignal;
    use xlaunch_spec::command::{Nproc, Program};

    use super::*;

    fn submission(work: Work, gpus: Option<u32>) -> Submit {
        Submit {
            request: SubmitRequest {
                request_id: "r".into(),
                work_dir: "/w".into(),
                gpus,
                ..SubmitRequest::default()
            },
            work,
        }
    }

    fn command(nproc: Nproc) -> CommandSpec {
        CommandSpec { nproc, ..CommandSpec::new(Program::Script("train.py".into()), Vec::new()) }
    }

    fn work(spec: CommandSpec) -> Work {
        Work::Command(Box::new(spec))
    }

    fn trainer(device: Device, nproc: Option<u32>) -> Work {
        let mut spec = JobSpec::default();
        spec.job.name = "gpt".into();
        (spec.engine.device, spec.launch.nproc) = (device, nproc);
        Work::Trainer(Box::new(spec))
    }

    /// A node with this number of GPUs.
    fn node(gpus: u32) -> NodeLimits {
        NodeLimits {
            gpus,
            cores: 64,
            memory: 512 << 30,
            memory_per_gpu: (512 << 30) / u64::from(gpus.max(1)),
            max_grace: Duration::from_secs(60),
            ..NodeLimits::default()
        }
    }

    /// Number of workers and GPUs of a resolved job.
    fn size(work: Work, wanted: Option<u32>, gpus: u32) -> (u32, u32) {
        let (submitted, description) = resolve(submission(work, wanted), 1, &node(gpus)).unwrap();
        assert_eq!(submitted.workers, description.workers);
        (submitted.workers, submitted.gpus)
    }

    fn refusal(work: Work, wanted: Option<u32>, gpus: u32) -> String {
        resolve(submission(work, wanted), 1, &node(gpus)).unwrap_err().to_string()
    }

    #[test]
    fn each_worker_gets_a_gpu_on_a_node_with_gpus() {
        assert_eq!(size(work(command(Nproc::Count(2))), None, 8), (2, 2));
        assert_eq!(size(work(command(Nproc::Count(2))), None, 0), (2, 0));
        assert_eq!(size(work(command(Nproc::Count(1))), Some(0), 8), (1, 0));
        assert_eq!(size(trainer(Device::Auto, Some(3)), None, 8), (3, 3));
        assert_eq!(size(trainer(Device::Auto, None), Some(4), 8), (4, 4));
        assert_eq!(size(trainer(Device::Auto, None), None, 0), (1, 0));
        assert_eq!(size(trainer(Device::Cpu, Some(2)), None, 8), (2, 0));
    }

    #[test]
    fn workers_per_gpu_are_counted_by_the_gpus_of_the_job() {
        assert_eq!(size(work(command(Nproc::Gpu)), Some(4), 8), (4, 4));
        assert_eq!(size(work(command(Nproc::Gpu)), None, 8), (1, 1));
        assert_eq!(size(work(command(Nproc::Auto)), Some(2), 8), (2, 2));
        assert_eq!(size(work(command(Nproc::Auto)), None, 0), (1, 0));
        assert_eq!(size(work(command(Nproc::Cpu)), Some(2), 8), (1, 2));
        let refused = refusal(work(command(Nproc::Gpu)), None, 0);
        assert_eq!(refused, "--nproc-per-node gpu: no GPU is visible");
    }

    #[test]
    fn impossible_submissions_are_refused_with_the_reason() {
        assert!(refusal(trainer(Device::Auto, Some(4)), Some(2), 8).contains("4 workers need one GPU each"));
        assert!(refusal(trainer(Device::Cuda, None), None, 0).contains("no GPU"));
        let mut logged = command(Nproc::Count(1));
        logged.logs.dir = Some("/x".into());
        assert!(refusal(work(logged), None, 0).contains("xlaunch logs"));
        let virtual_ranks = || CommandSpec { virtual_local_rank: true, ..command(Nproc::Count(3)) };
        assert!(refusal(work(virtual_ranks()), Some(2), 8).contains("3 workers need one GPU each"));
        assert_eq!(size(work(virtual_ranks()), None, 8), (3, 3));
    }

    /// Resolves a command with these options, on a node with 8 GPUs, 64 cores and 512 GiB.
    fn scheduled(gpus: u32, scheduling: Scheduling, node: &NodeLimits) -> Result<Submitted, CommandError> {
        let work = work(command(Nproc::Count(gpus.max(2))));
        let mut submission = submission(work, Some(gpus));
        submission.request.scheduling = Some(scheduling);
        resolve(submission, 1, node).map(|(submitted, _)| submitted)
    }

    #[test]
    fn gpu_job_reserves_its_share_and_cpu_job_what_it_asks_for() {
        let reserved = |gpus, cpus, memory_bytes| {
            let scheduling = Scheduling { cpus, memory_bytes, ..Scheduling::default() };
            let job = scheduled(gpus, scheduling, &node(8)).unwrap();
            (job.scheduling.cpus, job.scheduling.memory_bytes, job.rate)
        };
        assert_eq!(reserved(2, None, None), (Some(16), Some(128 << 30), 2250));
        assert_eq!(reserved(2, Some(4), Some(1 << 30)), (Some(4), Some(1 << 30), 2062));
        assert_eq!(reserved(0, None, None), (None, None, 31), "two workers");
        assert_eq!(reserved(0, Some(8), Some(7)), (Some(8), Some(7), 125));
        assert_eq!(reserved(0, Some(1), Some(256 << 30)).2, 500, "half of the memory");
        assert_eq!(reserved(u32::MAX, None, None).1, Some(u64::MAX), "refused at admission");
        let few_cores = NodeLimits { cores: 4, ..node(8) };
        assert_eq!(scheduled(1, Scheduling::default(), &few_cores).unwrap().scheduling.cpus, None);
    }

    #[test]
    fn time_limit_is_the_jobs_own_or_the_nodes_and_at_most_the_maximum() {
        let seconds = Duration::from_secs;
        let limit = |wanted, default_time: Option<u64>, max_time: Option<u64>| {
            let scheduling = Scheduling { time_limit_seconds: wanted, ..Scheduling::default() };
            let (default_time, max_time) = (default_time.map(seconds), max_time.map(seconds));
            scheduled(1, scheduling, &NodeLimits { default_time, max_time, ..node(8) })
        };
        let resolved =
            |wanted, default, most| limit(wanted, default, most).unwrap().scheduling.time_limit_seconds;
        assert_eq!(resolved(None, None, None), None);
        assert_eq!(resolved(None, Some(60), None), Some(60));
        assert_eq!(resolved(None, None, Some(3600)), Some(3600));
        assert_eq!(resolved(None, Some(7200), Some(3600)), Some(3600));
        assert_eq!(resolved(Some(30), Some(60), Some(3600)), Some(30));
        assert_eq!(resolved(Some(3600), Some(60), Some(3600)), Some(3600));
        let refused = limit(Some(7200), None, Some(3600)).unwrap_err().to_string();
        assert!(
            refused.contains("for 2h") && refused.contains("1h on this node (jobs.max_time)"),
            "{refused}"
        );
    }

    #[test]
    fn warning_needs_a_time_limit_and_a_command() {
        let warning = Some(WarningSignal { signal: 10, seconds_before: 60 });
        let limited =
            |time_limit_seconds| Scheduling { warning, time_limit_seconds, ..Scheduling::default() };
        assert!(scheduled(0, limited(Some(90)), &node(8)).is_ok());
        let refused = scheduled(0, limited(None), &node(8)).unwrap_err().to_string();
        assert!(refused.contains("add --time"), "{refused}");
        let mut trainer = submission(trainer(Device::Cpu, None), None);
        trainer.request.scheduling = Some(limited(Some(90)));
        let refused = resolve(trainer, 1, &node(8)).unwrap_err().to_string();
        assert!(refused.contains("not available for a training job"), "{refused}");
    }

    #[test]
    fn grace_period_is_at_most_the_operators() {
        let shutdown_timeout = |seconds: u64| {
            let timeout = Duration::from_secs(seconds);
            let spec = CommandSpec { shutdown_timeout: timeout, ..command(Nproc::Count(1)) };
            let (submitted, description) = resolve(submission(work(spec), None), 1, &node(0)).unwrap();
            let Work::Command(spec) = description.work else { panic!() };
            (submitted.shutdown_timeout, spec.shutdown_timeout.as_secs_f64())
        };
        assert_eq!([5, 1_000_000].map(shutdown_timeout), [(5.0, 5.0), (60.0, 60.0)]);
        let mut spec = JobSpec::default();
        spec.launch.shutdown_timeout = 1e9;
        let trainer = |spec: JobSpec| {
            let work = Work::Trainer(Box::new(spec));
            let (submitted, description) = resolve(submission(work, None), 1, &node(0)).unwrap();
            let Work::Trainer(spec) = description.work else { panic!() };
            let launch = spec.launch;
            (submitted.shutdown_timeout, launch.shutdown_timeout, launch.shutdown_timeout_max)
        };
        assert_eq!(trainer(spec.clone()), (60.0, 60.0, 60.0));
        (spec.launch.shutdown_timeout, spec.launch.shutdown_timeout_max) = (5.0, 40.0);
        assert_eq!(trainer(spec), (40.0, 5.0, 40.0), "the daemon waits for the longest stop");
    }

    #[test]
    fn jobs_are_named_by_the_user_or_after_the_program() {
        let named = |name: &str| {
            let spec = CommandSpec::new(Program::Binary("/bin/true".into()), vec!["a".into()]);
            let mut submission = submission(work(spec), None);
            submission.request.name = name.into();
            resolve(submission, 1, &node(0)).unwrap().0
        };
        assert_eq!((named("").name.as_str(), named("../x\ny").name.as_str()), ("true", "_._x_y"));
        assert_eq!(named("").command_line, "/bin/true a");
    }
}
