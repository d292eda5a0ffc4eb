//! The command line: a subcommand, or a launch by torchrun's flags.

mod agent;
mod bench;
mod console;
mod daemon;
mod generate;
mod launch;
mod node;
mod query;
pub(crate) mod torchrun;

use std::ffi::OsString;
use std::io::Write;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use xlaunch_proto::exit::ExitCode;

use crate::trainer::Trainer;
use torchrun::{Name, Request};
use xlaunch_agent::Refusal;

/// Starts worker processes and looks after them.
#[derive(Debug, Parser)]
#[command(name = "xlaunch", version)]
struct Cli {
    #[command(subcommand)]
    command: Query,
}

#[derive(Debug, Subcommand)]
enum Query {
    /// Show the state of running launches, or of a job.
    Status(query::Status),
    /// Print what a rank of a running launch or of a job writes.
    Logs(query::Logs),
    /// Stop a running launch or a job, training with a checkpoint.
    Stop(query::Stop),
    /// Have the node's daemon launch something when its turn comes.
    Submit(node::Submit),
    /// List the daemon's jobs.
    Jobs(node::Jobs),
    /// Take jobs out of the queue, or stop them.
    Cancel(node::Cancel),
    /// Show the node and its GPUs as the daemon sees them.
    Node(node::Node),
    /// Show the node, its GPUs and its jobs on the whole terminal.
    Top(node::Top),
    /// Start no more jobs on the node or some of its GPUs.
    Drain(node::Drain),
    /// Run one job of a node's daemon.
    #[command(hide = true)]
    Agent(agent::Agent),
    /// Look after this node's queue of jobs.
    Daemon(daemon::Daemon),
    /// Measure what parts of xlaunch cost on this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Write man pages, completions, the schema of configurations.
    #[command(subcommand)]
    Gen(generate::Gen),
}

/// Runs the command line of this process.
#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
pub(crate) fn main(trainer: Trainer) -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = Name::of(&arguments.next().unwrap_or_default());
    let arguments: Vec<OsString> = arguments.collect();
    if name == Name::Xlaunch && arguments.first().is_some_and(is_subcommand) {
        return match understand(&arguments) {
            Ok(cli) => run(query(cli.command, trainer)),
            Err(error) => {
                // A closed stdout or stderr leaves only the exit code to tell.
                let _ = error.print();
                if error.use_stderr() { ExitCode::Usage } else { ExitCode::Done }
            }
        };
    }
    match torchrun::parse(name, &arguments, &|variable| std::env::var_os(variable)) {
        Ok(Request::Text(text)) => {
            // A reader that has seen enough may have closed stdout.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::Done
        }
        Ok(Request::Trainer(launch)) => run(launch::run(&launch, trainer)),
        Ok(Request::Command(spec)) => run(launch::run_command(*spec)),
        Err(Refusal { exit, message }) => {
            eprintln!("error: {message}");
            exit
        }
    }
}

fn understand(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let arguments = match arguments {
        [first, rest @ ..] if first == "submit" => {
            [std::slice::from_ref(first), &node::split(rest, submit_option)].concat()
        }
        arguments => arguments.to_vec(),
    };
    let line = std::iter::once(OsString::from("xlaunch")).chain(arguments);
    Cli::command().try_get_matches_from(line).and_then(|matches| Cli::from_arg_matches(&matches))
}

/// Whether this option of `submit`, if it is one, is followed by a value.
fn submit_option(name: &str) -> Option<bool> {
    let mut command = Cli::command();
    command.build();
    let is_named = |option: &&clap::Arg| {
        let short = option.get_short().map(|letter| format!("-{letter}"));
        let long = option.get_long().map(|long| format!("--{long}"));
        [short, long].iter().flatten().any(|known| known == name)
    };
    let option = command.find_subcommand("submit")?.get_arguments().find(is_named)?;
    Some(option.get_action().takes_values())
}

/// Does the work of a command line that was understood.
#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
fn run(work: impl Future<Output = ExitCode>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: failed to start: {error}");
            return ExitCode::Internal;
        }
    };
    let exit = runtime.block_on(work);
    // Log threads may still wait on output that an orphan holds open; they end with the process.
    runtime.shutdown_background();
    exit
}

async fn query(command: Query, trainer: Trainer) -> ExitCode {
    match command {
        Query::Status(options) => query::status(options).await,
        Query::Logs(options) => query::logs(options).await,
        Query::Agent(options) => agent::run(&options, trainer).await,
        Query::Daemon(options) => daemon::run(options).await,
        Query::Stop(options) => query::stop(options).await,
        Query::Submit(options) => node::submit(options).await,
        Query::Jobs(options) => node::jobs(options).await,
        Query::Cancel(options) => node::cancel(options).await,
        Query::Node(options) => node::node(options).await,
        Query::Top(options) => node::top(options).await,
        Query::Drain(options) => node::drain(options).await,
        Query::Gen(what) => console::finish(generate::run(&what, self::command()).map(|()| ExitCode::Done)),
        Query::Bench(bench) => bench::run(bench, trainer).await,
    }
}

/// The subcommands as clap knows them.
fn command() -> clap::Command {
    Cli::command().about(torchrun::ABOUT)
}

/// Whether this first argument is no launch. A program of the same name can be launched behind `--`.
fn is_subcommand(argument: &OsString) -> bool {
    argument == "help" || Cli::command().get_subcommands().any(|command| argument == command.get_name())
}

/// Every subcommand with what it does.
fn subcommands() -> Vec<(String, String)> {
    let about = |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let command = Cli::command();
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.map(|command| (command.get_name().to_owned(), about(command))).collect()
}

/// The table for `--help`.
fn exit_codes() -> String {
    let lines = ExitCode::TABLE.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}\n", exit.code()));
    format!("Exit codes:\n{}  128+n  a command's launch was ended by signal n\n", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subcommands_are_consistent_and_told_from_launches() {
        Cli::command().debug_assert();
        let row = |about: &str| about.chars().count() <= 62;
        assert!(
            subcommands().iter().all(|(_, about)| row(about)),
            "lines of --help have at most 100 columns"
        );
        assert!(["status", "stop", "submit", "bench", "help"].iter().all(|name| is_subcommand(&name.into())));
        assert!(!["train.py", "train.toml", "--help", "--"].iter().any(|name| is_subcommand(&name.into())));
    }
}
