//! What a submission means on this node: what it runs, on how many workers and GPUs. Pure.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::spec::{Device, JobSpec};

use super::files::{Description, PROTOCOL};
use super::orders::Refused;
use super::state::Submitted;
use crate::cli::torchrun::{self, Name, Request};
use crate::command::CommandSpec;
use crate::devices::Node;
use crate::run_dir::file_name;
use crate::status::board;

/// Bytes of a name.
const NAME: usize = 64;

/// The job for the journal, and for its directory; ids and times are filled in later. `gpus` is how many the node has.
pub(super) fn understand(
    submission: Submit,
    uid: u32,
    gpus: u32,
) -> Result<(Submitted, Description), Refused> {
    let Submit { request_id, work_dir, environment, work, name, priority, gpus: wanted, .. } = submission;
    let on_gpus = |workers: u32| wanted.unwrap_or(if gpus > 0 { workers } else { 0 });
    let (work, size) = match work {
        Work::Trainer(spec) => {
            let size = of_trainer(&spec, wanted, gpus > 0)?;
            (Work::Trainer(spec), size)
        }
        Work::Command(arguments) => {
            let command = parse(&arguments, &environment, wanted.unwrap_or(gpus.min(1)))?;
            if command.logs.dir.is_some() {
                return Err(invalid(
                    "--log-dir: the daemon keeps the logs of its jobs; `xlaunch logs` shows them",
                ));
            }
            let size = Size {
                workers: command.nproc,
                gpus: on_gpus(command.nproc),
                patience: command.shutdown_timeout.as_secs_f64(),
                command_line: board::command_line(command.argv.iter().map(AsRef::<OsStr>::as_ref)),
                name: command.name,
            };
            (Work::Command(arguments), size)
        }
    };
    let mut name = file_name(if name.is_empty() { &size.name } else { &name });
    name.truncate(NAME);
    let submitted = Submitted {
        job: 0,
        request_id,
        uid,
        name: name.clone(),
        trainer: matches!(work, Work::Trainer(_)),
        priority,
        gpus: size.gpus,
        workers: size.workers,
        patience: size.patience,
        command_line: size.command_line,
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
    patience: f64,
    command_line: String,
    name: String,
}

fn invalid(text: &str) -> Refused {
    Refused::Invalid(text.into())
}

fn of_trainer(spec: &JobSpec, wanted: Option<u32>, has_gpus: bool) -> Result<Size, Refused> {
    if !spec.launch.devices.is_empty() {
        return Err(invalid("launch.devices: the daemon chooses the GPUs of its jobs; --gpus says how many"));
    }
    let on_cpu = spec.engine.device == Device::Cpu || wanted == Some(0);
    if on_cpu && spec.engine.device == Device::Cuda {
        return Err(invalid("engine.device is \"cuda\", and no GPU is asked for"));
    }
    let workers = spec.launch.nproc.unwrap_or(wanted.filter(|gpus| *gpus > 0).unwrap_or(1));
    let gpus = match wanted {
        _ if on_cpu => 0,
        Some(gpus) if gpus < workers => {
            return Err(invalid(&format!("{workers} workers need a GPU each, and {gpus} are asked for")));
        }
        Some(gpus) => gpus,
        None if has_gpus => workers,
        None if spec.engine.device == Device::Cuda => {
            return Err(invalid("engine.device is \"cuda\", and this node has no GPU"));
        }
        None => 0,
    };
    Ok(Size {
        workers,
        gpus,
        patience: spec.launch.shutdown_timeout,
        command_line: String::new(),
        name: spec.job.name.clone(),
    })
}

/// The command as its agent will understand it in this environment with so many GPUs.
fn parse(arguments: &[Vec<u8>], environment: &[Vec<u8>], gpus: u32) -> Result<CommandSpec, Refused> {
    let arguments: Vec<_> = arguments.iter().map(|argument| OsString::from_vec(argument.clone())).collect();
    let node = || Node { gpus: Ok(gpus), cores: 1 };
    let variable = |name: &str| {
        let found = environment.iter().find_map(|it| it.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        match (found, name) {
            // Where Python is, its agent finds out: paths of users are not for the daemon to look at.
            (_, "PATH") => None,
            (None, "PYTHON_EXEC") => Some("python3".into()),
            (found, _) => found.map(|value| OsString::from_vec(value.to_vec())),
        }
    };
    match torchrun::parse(Name::Xlaunch, &arguments, &variable, &node) {
        Ok(Request::Command(command)) => Ok(*command),
        Ok(Request::Trainer(_)) => Err(invalid("a training configuration is submitted as its description")),
        Ok(Request::Text(_)) => Err(invalid("this command line starts nothing")),
        Err(refusal) => Err(Refused::Invalid(refusal.message)),
    }
}

#[cfg(test)]
mod tests {
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

    fn command(line: &str) -> Work {
        Work::Command(line.split(' ').map(|word| word.as_bytes().to_vec()).collect())
    }

    fn trainer(device: Device, nproc: Option<u32>) -> Work {
        let mut spec = JobSpec::default();
        spec.job.name = "gpt".into();
        (spec.engine.device, spec.launch.nproc) = (device, nproc);
        Work::Trainer(Box::new(spec))
    }

    /// Workers and GPUs.
    fn size(work: Work, wanted: Option<u32>, node: u32) -> (u32, u32) {
        let (submitted, description) = understand(submission(work, wanted), 1, node).unwrap();
        assert_eq!(submitted.workers, description.workers);
        (submitted.workers, submitted.gpus)
    }

    fn refusal(work: Work, wanted: Option<u32>, node: u32) -> String {
        understand(submission(work, wanted), 1, node).unwrap_err().to_string()
    }

    #[test]
    fn a_worker_has_a_gpu_where_there_are_any() {
        assert_eq!(size(command("--nproc-per-node 2 train.py"), None, 8), (2, 2));
        assert_eq!(size(command("--nproc-per-node 2 train.py"), None, 0), (2, 0));
        assert_eq!(size(command("--nproc-per-node gpu train.py"), Some(4), 8), (4, 4));
        assert_eq!(size(command("train.py"), Some(0), 8), (1, 0));
        assert_eq!(size(trainer(Device::Auto, Some(3)), None, 8), (3, 3));
        assert_eq!(size(trainer(Device::Auto, None), Some(4), 8), (4, 4));
        assert_eq!(size(trainer(Device::Auto, None), None, 0), (1, 0));
        assert_eq!(size(trainer(Device::Cpu, Some(2)), None, 8), (2, 0));
    }

    #[test]
    fn variables_of_the_job_count_as_they_will_for_its_agent() {
        let environment = vec![b"PET_NPROC_PER_NODE=3".to_vec()];
        let submission = Submit { environment, ..submission(command("train.py"), None) };
        assert_eq!(understand(submission, 1, 8).unwrap().0.workers, 3);
    }

    #[test]
    fn what_cannot_work_is_refused_in_words() {
        assert!(refusal(trainer(Device::Auto, Some(4)), Some(2), 8).contains("4 workers need a GPU each"));
        assert!(refusal(trainer(Device::Cuda, None), None, 0).contains("no GPU"));
        assert!(refusal(command("--nnproc 2 train.py"), None, 0).contains("--nnproc"));
        assert!(refusal(command("--log-dir /x train.py"), None, 0).contains("xlaunch logs"));
        assert!(refusal(command("train.toml"), None, 0).contains("description"));
        assert!(refusal(command("--help"), None, 0).contains("starts nothing"));
    }

    #[test]
    fn a_job_is_called_what_its_user_says_or_after_what_it_runs() {
        let named = |name: &str| {
            let submission = Submit { name: name.into(), ..submission(command("-- /bin/true a"), None) };
            understand(submission, 1, 0).unwrap().0
        };
        assert_eq!((named("").name.as_str(), named("../x\ny").name.as_str()), ("true", "_._x_y"));
        assert_eq!(named("").command_line, "/bin/true a");
    }
}
