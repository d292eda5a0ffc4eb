//! What a submission means on this node: what it runs, on how many workers and GPUs. Pure.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::spec::{Device, JobSpec};

use super::files::{Description, PROTOCOL};
use super::orders::Refused;
use super::state::Submitted;
use xlaunch_agent::command::CommandSpec;
use xlaunch_agent::names::file_name;
use xlaunch_agent::status::board;

/// Parses a command line in this environment, with this number of GPUs.
pub type CommandParser =
    fn(&[OsString], &dyn Fn(&str) -> Option<OsString>, u32) -> Result<CommandSpec, String>;

/// Bytes of a name.
const NAME: usize = 64;

/// The job for the journal, and for its directory; ids and times are filled in later. `gpus` is how many the node has.
pub fn understand(
    submission: Submit,
    uid: u32,
    gpus: u32,
    parser: CommandParser,
) -> Result<(Submitted, Description), Refused> {
    let Submit { request_id, work_dir, environment, work, name, priority, gpus: wanted, .. } = submission;
    let on_gpus = |workers: u32| wanted.unwrap_or(if gpus > 0 { workers } else { 0 });
    let (work, size) = match work {
        Work::Trainer(spec) => {
            let size = of_trainer(&spec, wanted, gpus > 0)?;
            (Work::Trainer(spec), size)
        }
        Work::Command(arguments) => {
            let command = parse(&arguments, &environment, wanted.unwrap_or(gpus.min(1)), parser)?;
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
fn parse(
    arguments: &[Vec<u8>],
    environment: &[Vec<u8>],
    gpus: u32,
    parser: CommandParser,
) -> Result<CommandSpec, Refused> {
    let arguments: Vec<_> = arguments.iter().map(|argument| OsString::from_vec(argument.clone())).collect();
    let variable = |name: &str| {
        let found = environment.iter().find_map(|it| it.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        match (found, name) {
            // Where Python is, its agent finds out: paths of users are not for the daemon to look at.
            (_, "PATH") => None,
            (None, "PYTHON_EXEC") => Some("python3".into()),
            (found, _) => found.map(|value| OsString::from_vec(value.to_vec())),
        }
    };
    parser(&arguments, &variable, gpus).map_err(Refused::Invalid)
}
