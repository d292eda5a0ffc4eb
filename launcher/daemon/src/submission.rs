//! Resolves a submission on this node: what it runs, on how many workers and GPUs. Pure.

use std::time::Duration;

use xlaunch_proto::command::CommandSpec;
use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::spec::{Device, JobSpec};

use super::commands::CommandError;
use super::files::{Description, PROTOCOL};
use super::state::{Submitted, bounded};
use xlaunch_agent::names::file_name;

/// Maximum length of a job's name in bytes. Names are ASCII.
const MAX_NAME_BYTES: usize = 64;

/// Variables by which a training job would run code of its user in the agent, the trainer or a library.
/// `*` stands for any text.
const CODE_VARIABLES: [&str; 10] = [
    "LD_*",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "PYTHON_EXEC",
    "XLAUNCH_WORKER_PROGRAM",
    "XLAUNCH_NCCL",
    "XLAUNCH_CUDNN",
    "CUDA_INJECTION*",
    "NVTX_INJECTION*",
    "NCCL_*PLUGIN",
];

/// Removes the variables that run code, for a node that accepts only training jobs.
pub(crate) fn drop_code_variables(environment: &mut Vec<Vec<u8>>) {
    environment.retain(|variable| {
        let name = variable.split(|byte| *byte == b'=').next().unwrap_or_default();
        !CODE_VARIABLES.iter().any(|pattern| match pattern.split_once('*') {
            Some((start, end)) => {
                name.len() >= start.len() + end.len()
                    && name.starts_with(start.as_bytes())
                    && name.ends_with(end.as_bytes())
            }
            None => name == pattern.as_bytes(),
        })
    });
}

/// The job for the journal and for its directory, without id and time. `gpus` is the number of GPUs of the node. A
/// shutdown timeout above `max_grace` is shortened to that.
///
/// # Errors
/// [`CommandError::Invalid`] if it asks for something that contradicts itself or that the daemon decides.
pub(crate) fn resolve(
    submission: Submit,
    uid: u32,
    gpus: u32,
    max_grace: Duration,
) -> Result<(Submitted, Description), CommandError> {
    let Submit { request_id, work_dir, environment, mut work, name, priority, gpus: wanted, .. } = submission;
    match &mut work {
        Work::Trainer(spec) => {
            spec.launch.shutdown_timeout = spec.launch.shutdown_timeout.min(max_grace.as_secs_f64());
        }
        Work::Command(spec) => spec.shutdown_timeout = spec.shutdown_timeout.min(max_grace),
    }
    let size = match &work {
        Work::Trainer(spec) => trainer_size(spec, wanted, gpus > 0)?,
        Work::Command(spec) => command_size(spec, wanted, gpus)?,
    };
    let mut name = file_name(if name.is_empty() { &size.name } else { &name });
    name.truncate(MAX_NAME_BYTES);
    let submitted = Submitted {
        job: 0,
        request_id,
        uid,
        user: String::new(),
        name: name.clone(),
        trainer: matches!(work, Work::Trainer(_)),
        priority,
        gpus: size.gpus,
        workers: size.workers,
        shutdown_timeout: size.shutdown_timeout,
        command_line: bounded(size.command_line),
        work_dir: work_dir.to_string_lossy().into_owned(),
        at: 0,
    };
    let (workers, start, gpus) = (size.workers, 0, Vec::new());
    let description =
        Description { protocol: PROTOCOL, job: 0, name, work_dir, environment, work, workers, start, gpus };
    Ok((submitted, description))
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
        return Err(invalid("engine.device is \"cuda\", but the job asks for no GPU (--gpus)"));
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
        shutdown_timeout: spec.launch.shutdown_timeout,
        command_line: String::new(),
        name: spec.job.name.clone(),
    })
}

/// A command without a number of GPUs gets one per worker on a node that has any; `--nproc-per-node gpu` then means
/// one.
fn command_size(spec: &CommandSpec, wanted: Option<u32>, present: u32) -> Result<Size, CommandError> {
    if spec.logs.dir.is_some() {
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
    use xlaunch_proto::command::{Nproc, Program};

    use super::*;

    fn submission(work: Work, gpus: Option<u32>) -> Submit {
        Submit {
            request_id: "r".into(),
            version: String::new(),
            work_dir: "/w".into(),
            environment: Vec::new(),
            work,
            name: String::new(),
            priority: 0,
            gpus,
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

    const MAX_GRACE: Duration = Duration::from_secs(60);

    /// Workers and GPUs.
    fn size(work: Work, wanted: Option<u32>, node: u32) -> (u32, u32) {
        let (submitted, description) = resolve(submission(work, wanted), 1, node, MAX_GRACE).unwrap();
        assert_eq!(submitted.workers, description.workers);
        (submitted.workers, submitted.gpus)
    }

    fn refusal(work: Work, wanted: Option<u32>, node: u32) -> String {
        resolve(submission(work, wanted), 1, node, MAX_GRACE).unwrap_err().to_string()
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

    #[test]
    fn variables_that_run_code_are_dropped() {
        let kept = ["PATH=/bin", "LDFLAGS=x", "NCCL_DEBUG=INFO", "XLAUNCH_CACHE=/c", "HOME"];
        let dropped = [
            "LD_PRELOAD=/x.so",
            "LD_LIBRARY_PATH=/x",
            "XLAUNCH_WORKER_PROGRAM=/bin/sh",
            "CUDA_INJECTION64_PATH=/x.so",
            "NCCL_NET_PLUGIN=x",
            "XLAUNCH_NCCL=/x.so",
        ];
        let bytes = |name: &&str| name.as_bytes().to_vec();
        let mut environment: Vec<Vec<u8>> = kept.iter().chain(&dropped).map(bytes).collect();
        drop_code_variables(&mut environment);
        assert_eq!(environment, kept.iter().map(bytes).collect::<Vec<_>>());
    }

    #[test]
    fn grace_period_is_at_most_the_operators() {
        let shutdown_timeout = |seconds: u64| {
            let timeout = Duration::from_secs(seconds);
            let spec = CommandSpec { shutdown_timeout: timeout, ..command(Nproc::Count(1)) };
            let (submitted, description) = resolve(submission(work(spec), None), 1, 0, MAX_GRACE).unwrap();
            let Work::Command(spec) = description.work else { panic!() };
            (submitted.shutdown_timeout, spec.shutdown_timeout.as_secs_f64())
        };
        assert_eq!([5, 1_000_000].map(shutdown_timeout), [(5.0, 5.0), (60.0, 60.0)]);
        let mut spec = JobSpec::default();
        spec.launch.shutdown_timeout = 1e9;
        let (submitted, _) =
            resolve(submission(Work::Trainer(Box::new(spec)), None), 1, 0, MAX_GRACE).unwrap();
        assert_eq!(submitted.shutdown_timeout, 60.0);
    }

    #[test]
    fn jobs_are_named_by_the_user_or_after_the_program() {
        let named = |name: &str| {
            let spec = CommandSpec::new(Program::Binary("/bin/true".into()), vec!["a".into()]);
            let submission = Submit { name: name.into(), ..submission(work(spec), None) };
            resolve(submission, 1, 0, MAX_GRACE).unwrap().0
        };
        assert_eq!((named("").name.as_str(), named("../x\ny").name.as_str()), ("true", "_._x_y"));
        assert_eq!(named("").command_line, "/bin/true a");
    }
}
