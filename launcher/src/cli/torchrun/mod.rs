//! torchrun's command line and xlaunch's additions to it.
//!
//! ```text
//! arguments --line--> flags and target --reader (+ PET_* variables), values--> spec --> CommandSpec
//!             ^ flags: the table                                            |-> trainer --> Launch
//!                                               the engine's allocation ----|-> group --> GroupSpec, if several nodes
//!                                                                           `-> hosts --> SshLaunch
//! ```
//! The parser is our own, over one table of flags, because clap cannot express some of torchrun's rules: a prefix that
//! is unambiguous among torchrun's flags must remain so in spite of xlaunch's flags; `--` before the target changes its
//! meaning, but clap drops it; a target that ends in `.toml` is followed by more flags, any other by its own arguments;
//! empty variables count as unset, and errors name the variable that a value came from.
//!
//! Parsing does not look at the node: the interpreter and the number of workers are resolved by the agent that runs the
//! command (`xlaunch_agent::resolved_command::resolve`).

mod flags;
mod group;
mod help;
mod hosts;
mod line;
mod reader;
mod script;
mod spec;
mod trainer;
mod values;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use xlaunch_spec::exit::ExitCode;

use super::engine::Sourced;
use super::launch::Launch;
use super::output::print_note;
use super::piped_script;
use crate::ssh::plan::SshLaunch;
pub(super) use group::{DYNAMIC_PORT, Group, Scope, Settings};
pub(super) use help::arguments;
pub(super) use help::{ABOUT, usage};
use hosts::Hosts;
use line::{Line, Target};
use reader::{Environment, Reader};
pub(super) use values::group_endpoint;
use xlaunch_host::naming::nearest;
use xlaunch_spec::command::CommandSpec;
use xlaunch_spec::refusal::Refusal;

/// Similarity above which a flag or subcommand is suggested for an unknown word.
const MIN_SIMILARITY: f64 = 0.8;

/// The name by which the program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Xlaunch,
    /// torchrun's meaning of every target: no subcommands, no training configurations.
    Torchrun,
}

impl Name {
    /// Returns the name for `argv[0]`.
    pub(super) fn of(program: &OsStr) -> Self {
        let is_torchrun = Path::new(program).file_name().is_some_and(|name| name == "torchrun");
        if is_torchrun { Self::Torchrun } else { Self::Xlaunch }
    }
}

impl Name {
    /// Returns the name as text.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Xlaunch => "xlaunch",
            Self::Torchrun => "torchrun",
        }
    }
}

/// The meaning of a command line.
#[derive(Debug)]
pub(crate) enum Request {
    /// The built-in trainer, on one node or several.
    Trainer(Launch, Option<Box<Group>>),
    /// Any other command.
    Command(Box<CommandSpec>, Option<Box<Group>>),
    /// A trainer or command on other hosts.
    Ssh(Box<SshLaunch>),
    /// Text for stdout.
    Text(String),
}

/// Parses the arguments after the program's name.
///
/// # Errors
/// A usage error that says what was expected.
pub(crate) fn parse(
    name: Name,
    arguments: &[OsString],
    environment: Environment<'_>,
    scope: Scope<'_>,
) -> Result<Request, Refusal> {
    request(name, arguments, environment, scope).map_err(|message| Refusal::new(ExitCode::Usage, message))
}

fn request(
    name: Name,
    arguments: &[OsString],
    environment: Environment<'_>,
    scope: Scope<'_>,
) -> Result<Request, String> {
    let line = Line::read(name, arguments)?;
    if line.last("help").is_some() {
        return Ok(Request::Text(help::text(name, &super::subcommands(), &super::exit_codes())));
    }
    if line.last("version").is_some() {
        return Ok(Request::Text(format!("xlaunch {}\n", env!("CARGO_PKG_VERSION"))));
    }
    if hosts::are_given(&line) {
        return match hosts::launch(name, &line)? {
            Hosts::Others(launch) => {
                // Parse the rest here as well, so that a mistake is reported once instead of by every host.
                let here = Scope::Nodes(&|| Ok(None));
                match request(name, &launch.arguments, &|_| None, here)? {
                    Request::Command(spec, _) if piped_script::is_used_by(&spec.program) => {
                        Err(format!("{}: {PIPE_OF_THIS_HOST}", spec.program.target().display()))
                    }
                    _ => Ok(Request::Ssh(Box::new(launch))),
                }
            }
            Hosts::This(arguments) => request(name, &arguments, environment, scope),
        };
    }
    let reader = Reader { line: &line, environment };
    let group = || Ok::<_, String>(group::resolve(&reader, name, scope, &mut Settings::new())?.map(Box::new));
    let command = |argv: &[OsString], is_program| {
        let group = group()?;
        let spec = spec::command(&reader, argv, is_program, group.is_some())?;
        Ok(Request::Command(Box::new(spec), group))
    };
    match &line.target {
        None => Err(nothing_to_launch(name)),
        // As from a variable that is not set.
        Some(Target::Script(argv) | Target::Program(argv))
            if argv.first().is_some_and(|first| first.is_empty()) =>
        {
            Err("nothing to launch: the name of the script, module or program is empty".into())
        }
        Some(Target::Trainer(config)) => {
            let launch = trainer::launch(&reader, config)?;
            Ok(Request::Trainer(launch, group()?))
        }
        Some(Target::Script(argv)) if name == Name::Xlaunch && !is_for_python(&reader, argv)? => {
            Err(reader.line.with_resume_hint(not_a_script(argv), argv))
        }
        Some(Target::Script(argv)) => command(argv, false),
        Some(Target::Program(argv)) => {
            match argv.first().and_then(|program| script::launching_line(Path::new(program))) {
                Some(line) => Err(launches_itself(&argv[0], &line)),
                None => command(argv, true),
            }
        }
    }
}

fn launches_itself(program: &OsStr, line: &str) -> String {
    format!(
        "{} would start itself again and again: its first line is `{line}`; `-- bash` at the end of that line runs it \
         with bash, and without `--` Python runs it",
        program.display()
    )
}

/// Determines where a launch without flags would run, for `xlaunch env`. `settings` gets all values that are found,
/// even if an error follows.
pub(super) fn placement(
    environment: Environment<'_>,
    scope: Scope<'_>,
    settings: &mut Settings,
) -> Result<Option<Group>, String> {
    let line = Line::default();
    let reader = Reader { line: &line, environment };
    let workers = reader.sourced("nproc-per-node", |text| Ok(text.to_owned()))?;
    settings.push(("workers per node", workers.unwrap_or_else(default_workers)));
    group::resolve(&reader, Name::Xlaunch, scope, settings)
}

fn default_workers() -> Sourced<String> {
    Sourced { value: "1; training: one per GPU".into(), source: "default".into() }
}

/// Warns on stderr about flags given by a former name.
pub(super) fn print_deprecated_flags(name: Name, arguments: &[OsString]) {
    // Errors are reported by `parse`.
    for (old, new) in Line::read(name, arguments).unwrap_or_default().renamed {
        print_note(&format!("warning: --{old} is deprecated and will be removed; use --{new}"));
    }
}

/// Flags that only connections between nodes use.
const OF_SEVERAL_NODES: [&str; 3] = ["token-file", "interface", "node-rank"];

/// Warns on stderr about flags, and variables in their place, that a launch on one node does not use.
pub(super) fn print_unused_flags(name: Name, arguments: &[OsString], environment: Environment<'_>) {
    let line = Line::read(name, arguments).unwrap_or_default();
    let reader = Reader { line: &line, environment };
    for flag in OF_SEVERAL_NODES {
        // `parse` has reported errors.
        let Ok(Some(given)) = reader.sourced(flag, |text| Ok(text.to_owned())) else { continue };
        // The only node has rank 0.
        if flag != "node-rank" || given.value != "0" {
            let given = given.source;
            print_note(&format!(
                "warning: {given} has no effect: the job has one node; --nnodes sets the number"
            ));
        }
    }
}

/// Variables of torchrun that xlaunch does not support, and what to use instead.
const UNSUPPORTED_VARIABLES: [(&str, &str); 3] = [
    (
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        "there is no FileTimerServer; heartbeats and --hang-timeout end hung ranks",
    ),
    ("TORCHELASTIC_HEALTH_CHECK_PORT", "`xlaunch status --ready` tells whether workers are running"),
    ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "heartbeats and --hang-timeout end hung ranks"),
];

/// Warns on stderr about variables that turn on a function of torchrun which xlaunch does not have.
pub(super) fn print_unsupported_variables(environment: Environment<'_>) {
    for (name, instead) in UNSUPPORTED_VARIABLES {
        // 0 and the empty value turn these functions off.
        if environment(name).is_some_and(|value| !value.is_empty() && value != "0") {
            print_note(&format!("warning: {name} has no effect: {instead}"));
        }
    }
}

/// Returns whether a target without `--` is something that Python runs, or a flag says what it is.
fn is_for_python(reader: &Reader<'_>, argv: &[OsString]) -> Result<bool, String> {
    let is_script = argv.first().map(Path::new).is_some_and(|script| {
        // What comes through a pipe cannot be inspected.
        piped_script::is_piped(script) || script::is_python(script)
    });
    Ok(is_script || reader.is_set("module")? || reader.is_set("no-python")? || reader.is_set("run-path")?)
}

/// Returns the error for a target without `--` that is neither a script nor a configuration, such as a mistyped
/// subcommand.
fn not_a_script(argv: &[OsString]) -> String {
    let script = argv.first().map(|script| script.display().to_string()).unwrap_or_default();
    if Path::new(&script).is_dir() {
        return format!("{script} is a directory without __main__.py, which Python cannot run");
    }
    if script.ends_with(".ipynb") {
        return format!(
            "{script} is a notebook: make it a script with `jupyter nbconvert --to script {script}`, and launch that"
        );
    }
    if [".yaml", ".yml", ".json"].iter().any(|end| script.ends_with(end)) {
        return format!(
            "{script}: configurations of training jobs are TOML files; `xlaunch [OPTIONS] SCRIPT.py` launches a script"
        );
    }
    let others = if Path::new(&script).is_file() {
        // Programs without a slash are looked up in PATH.
        let program = if script.contains('/') { script.clone() } else { format!("./{script}") };
        format!("`xlaunch -- python3 {script}` runs it as one, `xlaunch -- {program}` as a program")
    } else {
        format!("`xlaunch -- {script}` runs a program, `xlaunch -m {script}` a Python module")
    };
    if script == "train" {
        let config = argv.iter().find(|argument| argument.as_bytes().ends_with(b".toml"));
        let config = config.map_or("CONFIG.toml".into(), |config| config.to_string_lossy());
        return format!("training needs no subcommand: `xlaunch {config}`; {others}");
    }
    let known = super::subcommands();
    let nearest = nearest(&script, known.iter().map(|(name, _)| name.as_str()));
    match nearest.filter(|(_, similarity)| *similarity > MIN_SIMILARITY && !script.contains(['.', '/'])) {
        Some((name, _)) => format!("unknown subcommand `{script}`; did you mean `xlaunch {name}`? {others}"),
        None => format!("{script} is neither a Python script nor a .toml file: {others}"),
    }
}

/// The reason why a script that comes through a pipe cannot be launched on other hosts.
const PIPE_OF_THIS_HOST: &str =
    "other hosts cannot read a script from standard input or a pipe: save it to a file that all hosts have";

fn nothing_to_launch(name: Name) -> String {
    match name {
        Name::Xlaunch => {
            "nothing to launch: expected SCRIPT.py, -m MODULE, -- PROGRAM or CONFIG.toml; see --help".into()
        }
        Name::Torchrun => "nothing to launch: expected SCRIPT or -m MODULE; see --help".into(),
    }
}

#[cfg(test)]
mod tests;
