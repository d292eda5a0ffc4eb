//! torchrun's command line and xlaunch's additions to it.
//!
//! ```text
//! arguments --line--> flags and target --reader (+ PET_* variables), values--> spec --> CommandSpec
//!             ^ flags: the table                                            `-> trainer --> Launch
//! ```
//! The parser is our own, over one table of flags. clap cannot express what makes a command line torchrun's: a prefix
//! that is unambiguous among torchrun's flags must stay so beside xlaunch's; `--` before the target changes its
//! meaning, and clap drops it; a target that ends in `.toml` is followed by more flags, any other by its own arguments;
//! empty variables count as unset, and errors name the variable that a value came from.
//!
//! Parsing does not look at the node: the interpreter and the number of workers are resolved by the agent that runs the
//! command (`xlaunch_agent::command::resolve`).

mod arguments;
mod flags;
mod help;
mod line;
mod reader;
mod spec;
mod trainer;
mod values;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use xlaunch_proto::exit::ExitCode;

use super::launch::Launch;
use super::output::print_note;
pub(super) use arguments::arguments;
pub(super) use help::{ABOUT, usage};
use line::{Line, Target};
use reader::{Environment, Reader};
use xlaunch_agent::Refusal;
use xlaunch_agent::names::nearest;
use xlaunch_proto::command::CommandSpec;

/// A flag or subcommand is suggested for a word that is more similar to it than this.
const MIN_SIMILARITY: f64 = 0.8;

/// The name by which the program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Xlaunch,
    /// No subcommands and no training configurations: every target means what it means to torchrun.
    Torchrun,
}

impl Name {
    /// From `argv[0]`.
    pub(super) fn of(program: &OsStr) -> Self {
        let is_torchrun = Path::new(program).file_name().is_some_and(|name| name == "torchrun");
        if is_torchrun { Self::Torchrun } else { Self::Xlaunch }
    }
}

/// The meaning of a command line.
#[derive(Debug)]
pub(crate) enum Request {
    /// The built-in trainer.
    Trainer(Launch),
    /// Any other command.
    Command(Box<CommandSpec>),
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
) -> Result<Request, Refusal> {
    request(name, arguments, environment).map_err(|message| Refusal::new(ExitCode::Usage, message))
}

fn request(name: Name, arguments: &[OsString], environment: Environment<'_>) -> Result<Request, String> {
    let line = Line::read(name, arguments)?;
    if line.last("help").is_some() {
        return Ok(Request::Text(help::text(name, &super::subcommands(), &super::exit_codes())));
    }
    if line.last("version").is_some() {
        return Ok(Request::Text(format!("xlaunch {}\n", env!("CARGO_PKG_VERSION"))));
    }
    let reader = Reader { line: &line, environment };
    let command = |argv: &[OsString], is_program| {
        let spec = spec::command(&reader, argv, is_program)?;
        Ok(Request::Command(Box::new(spec)))
    };
    match &line.target {
        None => Err(nothing_to_launch(name)),
        Some(Target::Trainer(config)) => trainer::launch(&reader, config).map(Request::Trainer),
        Some(Target::Script(argv)) if name == Name::Xlaunch && !is_for_python(&reader, argv)? => {
            Err(not_a_script(argv))
        }
        Some(Target::Script(argv)) => command(argv, false),
        Some(Target::Program(argv)) => command(argv, true),
    }
}

/// Warns on stderr about flags given by a former name.
pub(super) fn print_deprecated_flags(name: Name, arguments: &[OsString]) {
    // Errors are reported by `parse`.
    for (old, new) in Line::read(name, arguments).unwrap_or_default().renamed {
        print_note(&format!("warning: --{old} is deprecated and will be removed; use --{new}"));
    }
}

/// Whether a target without `--` is a Python script, or a flag says what it is.
fn is_for_python(reader: &Reader<'_>, argv: &[OsString]) -> Result<bool, String> {
    let is_script = argv.first().is_some_and(|script| script.as_bytes().ends_with(b".py"));
    Ok(is_script || reader.is_set("module")? || reader.is_set("no-python")? || reader.is_set("run-path")?)
}

/// The error for a target without `--` that is neither a script nor a configuration: perhaps a mistyped subcommand.
fn not_a_script(argv: &[OsString]) -> String {
    let script = argv.first().map(|script| script.display().to_string()).unwrap_or_default();
    let others = format!("`xlaunch -- {script}` runs a program, `xlaunch -m {script}` a Python module");
    if script == "train" {
        let config = argv.iter().find(|argument| argument.as_bytes().ends_with(b".toml"));
        let config = config.map_or("CONFIG.toml".into(), |config| config.to_string_lossy());
        return format!("training needs no subcommand: `xlaunch {config}`; {others}");
    }
    let known = super::subcommands();
    let nearest = nearest(&script, known.iter().map(|(name, _)| name.as_str()));
    match nearest.filter(|(_, similarity)| *similarity > MIN_SIMILARITY && !script.contains(['.', '/'])) {
        Some((name, _)) => format!("unknown subcommand `{script}`; did you mean `xlaunch {name}`? {others}"),
        None => format!("{script} does not end in .py or .toml: {others}"),
    }
}

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
