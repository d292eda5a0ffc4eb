//! `xlaunch submit`: queues a launch with the node's daemon.
//!
//! ```text
//! arguments --split--> options of submit, command line of the launch --work--> SubmitRequest --> daemon
//! ```
//! The launch's command line is parsed here, in the user's environment, so that mistakes are reported at once. The
//! daemon decides everything that depends on GPUs.

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::IsTerminal;
use std::os::unix::ffi::OsStringExt;

use clap::{Args, ValueHint};
use xlaunch_proto::env;
use xlaunch_proto::json;
use xlaunch_proto::v1::submit_request::Work;
use xlaunch_proto::v1::{Job, NodeJobState, SubmitRequest};
use xlaunch_spec::exit::ExitCode;

use super::choice::whole;
use super::launch;
use super::output::{QueryError, print, print_note};
use super::piped_script;
use super::scheduling::Scheduling;
use super::torchrun::{self, Name, Request, Scope};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::{job, text};
use xlaunch_agent::resolved_command::{self, Program};
use xlaunch_host::signals;
use xlaunch_host::spawn::sys;
use xlaunch_spec::refusal::Refusal;

/// Maximum size of the environment: the daemon refuses larger ones.
const MAX_ENVIRONMENT_BYTES: usize = 256 << 10;
/// Variables that a launch sets for its workers. A job submitted by a worker must not inherit them.
const WORKER_VARIABLES: [&str; 24] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    env::AGENT_SOCKET,
    env::ARRAY_INDEX,
    env::ARRAY_JOB,
    env::ATTEMPT,
    env::DEVICE,
    env::HEARTBEAT,
    env::JOB_ID,
];

/// Options of `xlaunch submit`.
#[derive(Debug, Args)]
#[command(
    override_usage = "xlaunch submit [OPTIONS] [FLAGS] SCRIPT.py [ARGUMENTS]\n       \
    xlaunch submit [OPTIONS] [FLAGS] -m MODULE [ARGUMENTS]\n       \
    xlaunch submit [OPTIONS] [FLAGS] -- PROGRAM [ARGUMENTS]\n       \
    xlaunch submit [OPTIONS] CONFIG.toml [FLAGS]",
    after_help = "FLAGS are those of a launch in the foreground: see `xlaunch --help`."
)]
pub(super) struct Submit {
    /// Name of the job [default: name of the training configuration or command]
    #[arg(long)]
    name: Option<String>,
    /// Jobs with a higher priority start first; only administrators may set more than 0
    #[arg(long, value_name = "P", default_value_t = 0, allow_negative_numbers = true)]
    priority: i32,
    /// GPUs to allocate, 0 for a CPU job [default: one per worker if the node has GPUs]
    #[arg(long, value_name = "N", value_parser = whole(0..=u32::MAX))]
    gpus: Option<u32>,
    #[command(flatten)]
    scheduling: Scheduling,
    /// Print the job as JSON; with --wait, after it has ended
    #[arg(long)]
    json: bool,
    /// Wait until the job has ended, and exit with its exit code. Ctrl-C ends the waiting, not the job
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
    /// Command line of the launch; starts at the first word that is not one of these options
    #[arg(value_name = "TARGET", required = true, num_args = 1.., allow_hyphen_values = true,
        value_hint = ValueHint::FilePath)]
    target: Vec<OsString>,
}

/// Inserts `--` before the launch's command line, so that clap does not interpret its flags. `takes_value` says whether
/// an option of `submit` takes a value, and is `None` for anything else.
pub(super) fn split(arguments: &[OsString], takes_value: impl Fn(&str) -> Option<bool>) -> Vec<OsString> {
    let mut own = 0;
    while let Some(argument) = arguments.get(own).and_then(|argument| argument.to_str()) {
        let name = argument.split_once('=').map_or(argument, |(name, _)| name);
        match takes_value(name) {
            None => break,
            Some(true) if name == argument => own += 2,
            Some(_) => own += 1,
        }
    }
    let (own, target) = arguments.split_at(own.min(arguments.len()));
    let separator: &[OsString] = if target.is_empty() { &[] } else { &["--".into()] };
    [own, separator, target].concat()
}

pub(super) async fn run(options: Submit) -> Result<ExitCode, QueryError> {
    torchrun::print_deprecated_flags(Name::Xlaunch, &options.target);
    let work = match work(&options.target, &|name| std::env::var_os(name))? {
        Parsed::Work(work) => work,
        Parsed::Text(text) => return print(text.as_bytes()).map(|()| ExitCode::Done),
    };
    let request = request(&options, work)?;
    let mut daemon = DaemonClient::connect(&options.daemon).await?;
    let reply = daemon.submit(request).await?;
    for warning in &reply.warnings {
        print_note(&format!("warning: {warning}"));
    }
    let Some(job) = reply.job else {
        return Err(Refusal::new(ExitCode::Internal, "the daemon's reply contains no job").into());
    };
    let id = job.id;
    let added = match (reply.array.first(), reply.array.last()) {
        (Some(first), Some(last)) => format!("jobs {}-{}", first.id, last.id),
        _ => format!("job {id}"),
    };
    let answer = match (options.json, options.wait) {
        (false, _) => format!("{added}\n"),
        (true, _) if !reply.array.is_empty() => {
            text::json(&reply.array.iter().map(json::job).collect::<Vec<_>>())
        }
        (true, false) => text::json(&json::job(&job)),
        (true, true) => String::new(),
    };
    // Otherwise a script might submit it again.
    print(answer.as_bytes()).inspect_err(|_| print_note(&format!("added to the queue: {added}")))?;
    if !reply.array.is_empty() {
        return Ok(ExitCode::Done);
    }
    if std::io::stderr().is_terminal() {
        print_note(&hint(&job, options.wait));
    }
    if !options.wait {
        return Ok(ExitCode::Done);
    }
    let ended = tokio::select! {
        biased;
        Ok(signal) = signals::interrupted() => {
            print_note(&format!("job {id} goes on; `xlaunch cancel {id}` ends it"));
            sys::die_of(signal)
        }
        ended = wait(&mut daemon, id, options.json) => ended?,
    };
    if options.json {
        print(text::json(&json::job(&ended)).as_bytes())?;
    }
    Ok(exit_code(&ended))
}

/// The meaning of the launch's command line.
#[derive(Debug)]
enum Parsed {
    Work(Work),
    /// Text to print, such as `--help`.
    Text(String),
}

fn work(target: &[OsString], environment: &dyn Fn(&str) -> Option<OsString>) -> Result<Parsed, Refusal> {
    refuse_own_options(target)?;
    Ok(match torchrun::parse(Name::Xlaunch, target, environment, Scope::OneNode)? {
        Request::Text(text) => Parsed::Text(text),
        Request::Trainer(launch, _) => {
            Parsed::Work(Work::TrainerSpecJson(launch::load(&launch, xlaunch_worker::fill_in)?.to_json()))
        }
        Request::Command(spec, _) if piped_script::is_used_by(&spec.program) => {
            let script = spec.program.target().display();
            let message = format!(
                "{script}: a job cannot read its script from standard input or a pipe: save it to a file"
            );
            return Err(Refusal::new(ExitCode::Usage, message));
        }
        Request::Command(mut spec, _) => {
            resolved_command::check_script(&spec.program, environment)?;
            if !matches!(spec.program, Program::Binary(_)) {
                // The daemon may run from another directory. If nothing is found here, its agent looks, and reports it.
                spec.interpreter = resolved_command::find_interpreter(environment).ok().map(Into::into);
            }
            Parsed::Work(Work::CommandSpecJson(spec.to_json()))
        }
        Request::Ssh(_) => {
            let message =
                "the daemon runs jobs on its own node: `xlaunch --hosts` starts one on several hosts";
            return Err(Refusal::new(ExitCode::Usage, message));
        }
    })
}

/// Refuses an option of `submit` among the flags of the launch, where it is unknown or, like `--signal`, abbreviates
/// another flag.
fn refuse_own_options(target: &[OsString]) -> Result<(), Refusal> {
    let options = Submit::augment_args(clap::Command::new("submit"));
    for (at, word) in target.iter().enumerate() {
        let name = word.to_str().and_then(|word| word.strip_prefix("--")?.split('=').next());
        let own = |option: &clap::Arg| option.get_long().is_some_and(|long| Some(long) == name);
        // A word is a flag of the launch, not a value or an argument of its program, if `--help` would be one there.
        let line = || target.iter().take(at).cloned().chain(["--help".into()]).collect::<Vec<_>>();
        let parse = |line: &[OsString]| torchrun::parse(Name::Xlaunch, line, &|_| None, Scope::OneNode);
        if options.get_opts().any(own) && matches!(parse(&line()), Ok(Request::Text(_))) {
            let message = format!(
                "--{} is an option of `submit` itself: put it before the flags of the launch",
                name.unwrap_or_default()
            );
            return Err(Refusal::new(ExitCode::Usage, message));
        }
    }
    Ok(())
}

fn request(options: &Submit, work: Work) -> Result<SubmitRequest, Refusal> {
    let refuse = |message: String| Refusal::new(ExitCode::Usage, message);
    let here = std::env::current_dir()
        .map_err(|error| refuse(format!("failed to get the working directory: {error}")))?;
    let work_dir = here.into_os_string().into_string();
    let work_dir =
        work_dir.map_err(|path| refuse(format!("the working directory {} is not UTF-8", path.display())))?;
    Ok(SubmitRequest {
        request_id: request_id(),
        version: xlaunch_proto::VERSION.into(),
        work_dir,
        environment: environment(std::env::vars_os()).map_err(refuse)?,
        umask: umask(),
        name: options.name.clone().unwrap_or_default(),
        priority: options.priority,
        gpus: options.gpus,
        work: Some(work),
        ..options.scheduling.request()
    })
}

/// Returns the mask of this process. The system call that reads it would also set it.
fn umask() -> Option<u32> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(mask.trim(), 8).ok()
}

/// Returns a random id, from the random keys of `RandomState`.
fn request_id() -> String {
    let word = || RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()));
    format!("{:016x}{:016x}", word(), word())
}

/// Returns the job's environment, each variable as `NAME=VALUE`.
fn environment(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Vec<Vec<u8>>, String> {
    let is_left_out =
        |name: &OsString| [env::SCOPE, env::TOKEN].iter().chain(&WORKER_VARIABLES).any(|known| name == known);
    let kept = variables.filter(|(name, _)| !name.is_empty() && !is_left_out(name));
    let pairs: Vec<_> = kept.map(|(name, value)| [name.into_vec(), value.into_vec()].join(&b'=')).collect();
    let bytes: usize = pairs.iter().map(Vec::len).sum();
    if bytes > MAX_ENVIRONMENT_BYTES {
        let name = |pair: &Vec<u8>| String::from_utf8_lossy(pair).split('=').next().map(str::to_owned);
        let longest = pairs.iter().max_by_key(|pair| pair.len()).and_then(name).unwrap_or_default();
        return Err(format!(
            "the environment is too large: {bytes} bytes of at most {MAX_ENVIRONMENT_BYTES}; unset variables that the \
             job does not need (the longest is {longest})"
        ));
    }
    Ok(pairs)
}

fn hint(job: &Job, waits: bool) -> String {
    let id = job.id;
    if waits {
        return format!(
            "waiting; interrupting this command leaves the job running, `xlaunch cancel {id}` ends it"
        );
    }
    format!("see also: `xlaunch status {id}`, `xlaunch logs {id} -f`, `xlaunch cancel {id}`")
}

/// Follows the job until it has ended. Changes of state and the failure report go to stderr, unless `quiet`.
async fn wait(daemon: &mut DaemonClient, id: u64, quiet: bool) -> Result<Job, QueryError> {
    let mut last = None;
    let ended = daemon.follow(id, |job| {
        let state = job.state().label();
        if !quiet && last.replace(state) != Some(state) {
            print_note(&format!("job {id} {}", job::state_and_reason(job)));
        }
    });
    let ended = ended.await?;
    if !quiet && !ended.report.is_empty() {
        print_note(ended.report.trim_end());
    }
    Ok(ended)
}

/// Returns the job's own exit code, or one for its state if it never ran.
fn exit_code(job: &Job) -> ExitCode {
    // A job at its time limit has failed, even if its workers exited with 0.
    if let Some(code) = job.exit_code.filter(|code| *code != 0 || job.state() == NodeJobState::Done) {
        let known = i32::try_from(code).ok().and_then(ExitCode::from_code);
        return known.unwrap_or_else(|| u8::try_from(code).map_or(ExitCode::Internal, ExitCode::Worker));
    }
    match job.state() {
        NodeJobState::Done => ExitCode::Done,
        NodeJobState::Cancelled => ExitCode::Stopped,
        NodeJobState::Lost => ExitCode::Retryable,
        _ => ExitCode::WorkerFailed,
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::command::{CommandSpec, Nproc};

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn launch_starts_at_the_first_word_that_is_not_an_option_of_submit() {
        for (line, expected) in [
            ("train.toml --set train.steps=10", "-- train.toml --set train.steps=10"),
            ("--gpus 2 train.py --lr 3e-4 --gpus 3", "--gpus 2 -- train.py --lr 3e-4 --gpus 3"),
            ("--gpus=2 --wait --json -m pkg --wait", "--gpus=2 --wait --json -- -m pkg --wait"),
            ("--nproc-per-node 2 --wait train.py", "-- --nproc-per-node 2 --wait train.py"),
            ("-- sleep 10", "-- -- sleep 10"),
            ("--name a -- sleep", "--name a -- -- sleep"),
            ("--priority -5 --socket /s x.toml", "--priority -5 --socket /s -- x.toml"),
            // A prefix of an option of `submit` can be a flag of the launch.
            ("--n 2 x.py", "-- --n 2 x.py"),
            ("--help", "--help"),
            ("--name", "--name"),
            ("", ""),
        ] {
            assert_eq!(split(&words(line), crate::cli::submit_option), words(expected), "{line}");
        }
    }

    fn spec(line: &str, environment: &dyn Fn(&str) -> Option<OsString>) -> CommandSpec {
        match work(&words(line), environment) {
            Ok(Parsed::Work(Work::CommandSpecJson(json))) => CommandSpec::from_json(&json).unwrap(),
            other => panic!("{line}: {}", other.is_ok()),
        }
    }

    #[test]
    fn environment_variables_replace_missing_flags() {
        let variable = |name: &str| (name == "PET_NPROC_PER_NODE").then(|| "3".into());
        assert_eq!(spec("-m train", &variable).nproc, Nproc::Count(3));
        assert_eq!(spec("--nproc gpu -m train", &variable).nproc, Nproc::Gpu);
        assert_eq!(spec("--preload torch -m train", &variable).preload, ["torch"]);
        let python = |name: &str| (name == "PYTHON_EXEC").then(|| "/venv/python".into());
        assert_eq!(spec("-m train", &python).interpreter, Some("/venv/python".into()));
        assert_eq!(spec("-- train", &python).interpreter, None);
    }

    #[test]
    fn flags_of_the_launch_are_validated_without_counting_local_gpus() {
        let one_gpu = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "0".into());
        for line in [
            "--nproc 64 --virtual-local-rank -- a",
            "--nproc gpu --no-python ./a --b",
            "-- a --signal 9 --requeue",
            "--no-python a --wait",
        ] {
            assert_eq!(spec(line, &one_gpu).name(), "a", "{line}");
        }
        for (line, problem) in [
            ("--nprok 2 -- a", "unknown flag --nprok"),
            ("--nnodes 2 -- a", "--nnodes 2: the daemon runs jobs on one node; use Slurm or Kubernetes"),
            ("--nnodes 1:4 x.toml", "--nnodes 1:4: the daemon runs jobs on one node"),
            ("--nproc 2 nosuch.py --lr 3", "nosuch.py: no such file"),
            ("a", "-- a"),
            ("--nproc 2 - --lr 3", "-: a job cannot read its script from standard input or a pipe"),
            ("--nproc 2 --name x -- a", "--name is an option of `submit` itself"),
            // Without `submit`, these abbreviate flags of the launch.
            ("--nproc 2 --signal SIGUSR1 x.py", "--signal is an option of `submit` itself"),
            ("x.toml --signal=SIGUSR1", "--signal is an option of `submit` itself"),
            ("--standalone --requeue -- true", "--requeue is an option of `submit` itself"),
            ("--standalone --requeue x.py", "--requeue is an option of `submit` itself"),
            ("x.toml --requeue", "--requeue is an option of `submit` itself"),
        ] {
            let refusal = work(&words(line), &|_| None).unwrap_err();
            assert!(
                refusal.message.contains(problem) && refusal.exit == ExitCode::Usage,
                "{}",
                refusal.message
            );
        }
        let version = work(&words("--version"), &|_| None);
        assert!(matches!(version, Ok(Parsed::Text(text)) if text.starts_with("xlaunch ")));
    }

    #[test]
    fn training_job_is_submitted_as_a_validated_description() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("a.toml");
        fs_err::write(&config, "[data]\ntrain = [\"*.txt\"]\n").unwrap();
        let line = [config.clone().into(), "--set".into(), "train.steps=7".into()];
        let Ok(Parsed::Work(Work::TrainerSpecJson(json))) = work(&line, &|_| None) else { panic!() };
        let spec = xlaunch_spec::job::JobSpec::from_json(&json).unwrap();
        assert_eq!((spec.train.steps, spec.job.name.as_str(), spec.launch.nproc), (7, "a", None));
        assert_eq!(spec.data.train, [dir.path().join("*.txt").to_str().unwrap().into()]);
        assert!(spec.job.output.starts_with('/'));
        fs_err::write(&config, "[train]\nstepz = 1\n").unwrap();
        assert!(work(&line, &|_| None).unwrap_err().message.contains("train.steps"));
    }

    #[test]
    fn environment_excludes_variables_of_the_submitting_launch() {
        let variables = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| (name.into(), value.into())).collect::<Vec<_>>().into_iter()
        };
        let kept = environment(variables(&[
            ("PATH", "/bin=x"),
            ("RANK", "3"),
            ("MASTER_PORT", "1"),
            ("XLAUNCH_SCOPE", "1"),
            ("XLAUNCH_JOB_ID", "1"),
            ("XLAUNCH_TOKEN", "a secret of a job"),
            ("XLAUNCH_POOL_DEBUG", "0xff"),
            ("NCCL_DEBUG", "INFO"),
        ]));
        let expected = ["PATH=/bin=x", "XLAUNCH_POOL_DEBUG=0xff", "NCCL_DEBUG=INFO"];
        assert_eq!(kept.unwrap(), expected.map(|pair| pair.as_bytes().to_vec()));
        let long = "x".repeat(MAX_ENVIRONMENT_BYTES);
        let error = environment(variables(&[("A", "b"), ("LONG", &long)])).unwrap_err();
        assert!(error.contains("262144") && error.contains("LONG"), "{error}");
    }

    #[test]
    fn exit_code_is_that_of_the_job() {
        let job =
            |state: NodeJobState, exit_code| Job { state: state.into(), exit_code, ..Default::default() };
        for (state, code, expected) in [
            (NodeJobState::Done, Some(0), 0),
            (NodeJobState::Failed, Some(1), 1),
            (NodeJobState::Failed, Some(42), 42),
            (NodeJobState::Cancelled, Some(143), 143),
            (NodeJobState::Cancelled, None, 143),
            (NodeJobState::Lost, None, 75),
            (NodeJobState::Failed, None, 1),
            (NodeJobState::Failed, Some(0), 1),
        ] {
            assert_eq!(exit_code(&job(state, code)).code(), expected, "{state:?} {code:?}");
        }
    }

    #[test]
    fn requests_have_different_ids() {
        assert_ne!(request_id(), request_id());
        assert_eq!(request_id().len(), 32);
    }
}
