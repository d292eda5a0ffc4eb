//! The command line: a subcommand, or a launch by torchrun's flags.

mod agent;
mod bench;
mod daemon;
mod launch;
mod query;
pub(crate) mod torchrun;

use std::ffi::OsString;
use std::io::Write;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use xlaunch_proto::exit::ExitCode;

use crate::devices::Node;
use crate::{Refusal, Trainer};
pub(crate) use launch::draw;
use torchrun::{Name, Request};

/// Starts worker processes and looks after them.
#[derive(Debug, Parser)]
#[command(name = "xlaunch", version)]
struct Cli {
    #[command(subcommand)]
    command: Query,
}

#[derive(Debug, Subcommand)]
enum Query {
    /// Show the state of running launches.
    Status(query::Status),
    /// Print what a rank of a running launch has written.
    Logs(query::Logs),
    /// Run one job of a node's daemon.
    #[command(hide = true)]
    Agent(agent::Agent),
    /// Look after this node's queue of jobs.
    Daemon(daemon::Daemon),
    /// Measure what parts of xlaunch cost on this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Stop a running launch; training stops at its next step, with a checkpoint.
    Stop(query::Stop),
}

/// Runs the command line of this process.
#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
pub fn main(trainer: Trainer) -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = Name::of(&arguments.next().unwrap_or_default());
    let arguments: Vec<OsString> = arguments.collect();
    if name == Name::Xlaunch && arguments.first().is_some_and(is_subcommand) {
        return match Cli::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
            Ok(cli) => run(query(cli.command, trainer)),
            Err(error) => {
                // A closed stdout or stderr leaves only the exit code to tell.
                let _ = error.print();
                if error.use_stderr() { ExitCode::Usage } else { ExitCode::Done }
            }
        };
    }
    match torchrun::parse(name, &arguments, &|variable| std::env::var_os(variable), &Node::inspect) {
        Ok(Request::Text(text)) => {
            // A reader that has seen enough may have closed stdout.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::Done
        }
        Ok(Request::Trainer(launch)) => run(launch::run(&launch, trainer)),
        Ok(Request::Command(spec)) => run(launch::run_command(&spec)),
        Err(Refusal { exit, message }) => {
            eprintln!("error: {message}");
            exit
        }
    }
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
        Query::Bench(bench) => bench::run(bench, trainer).await,
        Query::Stop(options) => query::stop(options).await,
    }
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
        assert!(["status", "stop", "bench", "help"].iter().all(|name| is_subcommand(&name.into())));
        assert!(!["train.py", "train.toml", "--help", "--"].iter().any(|name| is_subcommand(&name.into())));
    }
}
