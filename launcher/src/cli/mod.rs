//! The command line.

mod bench;
mod launch;
mod query;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use xlaunch_proto::exit::ExitCode;

use crate::Trainer;

/// Start one worker process per GPU (or per share of the CPU) and train a GPT on them.
#[derive(Debug, Parser)]
#[command(name = "xlaunch", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Query>,

    #[command(flatten)]
    launch: launch::Launch,
}

#[derive(Debug, Subcommand)]
enum Query {
    /// Show the state of running launches.
    Status(query::Status),
    /// Print what a rank of a running launch has written.
    Logs(query::Logs),
    /// Measure what parts of xlaunch cost on this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Stop a running launch; training stops at its next step, with a checkpoint.
    Stop(query::Stop),
}

/// Runs the command line of this process.
#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
pub fn main(trainer: Trainer) -> ExitCode {
    let command = Cli::command().after_help(exit_codes());
    let cli = match command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed stdout or stderr leaves only the exit code to tell.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::Usage } else { ExitCode::Done };
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: failed to start: {error}");
            return ExitCode::Internal;
        }
    };
    let exit = match cli.command {
        Some(Query::Status(options)) => runtime.block_on(query::status(options)),
        Some(Query::Logs(options)) => runtime.block_on(query::logs(options)),
        Some(Query::Bench(bench)) => runtime.block_on(bench::run(bench, trainer)),
        Some(Query::Stop(options)) => runtime.block_on(query::stop(options)),
        None => runtime.block_on(launch::run(&cli.launch, trainer)),
    };
    // Log threads may still wait on output that an orphan holds open; they end with the process.
    runtime.shutdown_background();
    exit
}

/// The table for `--help`.
fn exit_codes() -> String {
    let lines = ExitCode::TABLE.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}\n", exit.code()));
    format!("Exit codes:\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_help_lists_the_exit_codes() {
        Cli::command().debug_assert();
        let help = Cli::command().after_help(exit_codes()).render_long_help().to_string();
        for (exit, meaning) in ExitCode::TABLE {
            assert!(help.contains(&exit.code().to_string()) && help.contains(meaning), "{help}");
        }
    }
}
