//! Resolves a submission on this node: what it runs, on how many workers and GPUs. Pure.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::spec::{Device, JobSpec};

use super::commands::CommandError;
use super::files::{Description, PROTOCOL};
use super::state::Submitted;
use xlaunch_agent::command::CommandSpec;
use xlaunch_agent::names::file_name;
use xlaunch_agent::status::board;

/// Parses a command line, given the lookup of environment variables and the number of GPUs.
pub type CommandParser =
    fn(&[OsString], &dyn Fn(&str) -> Option<OsString>, u32) -> Result<CommandSpec, String>;

/// Maximum length of a job's name in bytes. Names are ASCII.
const MAX_NAME_BYTES: usize = 64;

/// The job for the journal and for its directory, without id and time. `gpus` is the number of GPUs of the node.
///
/// # Errors
/// [`CommandError::Invalid`] if it asks for something that contradicts itself or that the daemon decides.
pub fn resolve(
    submission: Submit,
    uid: u32,
    gpus: u32,
    parser: CommandParser,
) -> Result<(Submitted, Description), CommandError> {
    let Submit { request_id, work_dir, environment, work, name, priority, gpus: wanted, .. } = submission;
    let on_gpus = |workers: u32| wanted.unwrap_or(if gpus > 0 { workers } else { 0 });
    let (work, size) = match work {
        Work::Trainer(spec) => {
            let size = trainer_size(&spec, wanted, gpus > 0)?;
            (Work::Trainer(spec), size)
        }
        Work::Command(arguments) => {
            let command = parse(&arguments, &environment, wanted.unwrap_or(gpus.min(1)), parser)?;
            if command.logs.dir.is_some() {
                return Err(invalid(
                    "--log-dir: not available under the daemon, which keeps the logs; `xlaunch logs` shows them",
                ));
            }
            let size = Size {
                workers: command.nproc,
                gpus: on_gpus(command.nproc),
                shutdown_timeout: command.shutdown_timeout.as_secs_f64(),
                command_line: board::command_line(command.argv.iter().map(AsRef::<OsStr>::as_ref)),
                name: command.name,
            };
            (Work::Command(arguments), size)
        }
    };
    let mut name = file_name(if name.is_empty() { &size.name } else { &name });
    name.truncate(MAX_NAME_BYTES);
    let submitted = Submitted {
        job: 0,
        request_id,
        uid,
        name: name.clone(),
        trainer: matches!(work, Work::Trainer(_)),
        priority,
        gpus: size.gpus,
        workers: size.workers,
        shutdown_timeout: size.shutdown_timeout,
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

/// Parses the command as its agent will, in the job's environment and with this number of GPUs.
fn parse(
    arguments: &[Vec<u8>],
    environment: &[Vec<u8>],
    gpus: u32,
    parser: CommandParser,
) -> Result<CommandSpec, CommandError> {
    let arguments: Vec<_> = arguments.iter().map(|argument| OsString::from_vec(argument.clone())).collect();
    let variable = |name: &str| {
        let found = environment.iter().find_map(|it| it.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        match (found, name) {
            // The agent, which has the user's rights, searches for Python: the daemon opens no paths of users.
            (_, "PATH") => None,
            (None, "PYTHON_EXEC") => Some("python3".into()),
            (found, _) => found.map(|value| OsString::from_vec(value.to_vec())),
        }
    };
    parser(&arguments, &variable, gpus).map_err(CommandError::Invalid)
}
