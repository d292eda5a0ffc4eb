//! The command line: subcommands, each in its own file, and launches with torchrun's flags ([`torchrun`],
//! [`mod@launch`]).
//!
//! - `status`, `logs`, `stacks`, `stop`, `checkpoint`: call the agent of a launch or the daemon, see [`target`];
//! - `submit`, `jobs`, `history`, `cancel`, `hold`, `release`, `reprioritise`, `node`, `top`, `drain`,
//!   `doctor --daemon` ([`examine`]): call the daemon;
//! - `data`: prepares text for training, [`mod@data`]; `export`: writes checkpoints as models; `generate`, `eval`,
//!   `serve`: use a trained model; `report`: writes a page about training runs;
//! - `env`: shows what a launch on several nodes takes from its [`engine`];
//! - `daemon`, `agent`, `rendezvous`: services; `bench`, `doctor`: measurements and checks; `gen`: generates files for
//!   packages.
//!
//! Results go to stdout, everything else to stderr ([`output`]). An error is a message for the user and an exit code.

mod agent;
mod bench;
mod cancel;
mod checkpoint;
mod choice;
mod daemon;
#[cfg(test)]
mod daemon_tests;
mod data;
#[cfg(test)]
mod deploy_tests;
mod doctor;
mod drain;
mod dry_run;
mod engine;
mod env;
mod eval;
mod examine;
mod export;
mod r#gen;
mod generate;
#[cfg(test)]
mod help_tests;
mod history;
mod job_list;
mod jobs;
mod launch;
mod libraries;
mod logs;
mod node;
mod output;
mod piped_script;
mod remote;
mod rendezvous;
mod report;
mod resume;
mod scheduling;
mod serve;
mod stacks;
mod status;
mod stop;
mod submit;
mod target;
mod top;
mod torchrun;
mod update;

use std::ffi::OsString;
use std::io::Write;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use xlaunch_spec::exit::ExitCode;

use crate::runtime::{self, Threads};
use crate::ssh;
use torchrun::{Group, Name, Request, Scope};
use xlaunch_agent::stderr::print_line;
use xlaunch_cluster::nodes::Nodes;
use xlaunch_spec::refusal::Refusal;

/// Launches and supervises one worker process per GPU
#[derive(Debug, Parser)]
// The last of several values counts, as for the flags of a launch, so that a flag can follow an alias that has it.
#[command(name = "xlaunch", version, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    /// Show running launches, or one launch or job
    Status(status::Status),
    /// Print the output of a rank
    Logs(logs::Logs),
    /// Show what the processes of a launch or job are doing
    Stacks(stacks::Stacks),
    /// Stop a launch or job; training saves a checkpoint first
    Stop(stop::Stop),
    /// Save a checkpoint of a training job now, and print its path
    Checkpoint(checkpoint::Checkpoint),
    /// Queue a job with the node's daemon
    Submit(submit::Submit),
    /// List the daemon's jobs, the newest last
    Jobs(jobs::Jobs),
    /// List jobs that have ended, with their resource usage
    History(history::History),
    /// Remove jobs from the queue, or stop running ones
    Cancel(cancel::Cancel),
    /// Keep queued jobs from starting
    Hold(update::Update),
    /// Let held jobs start
    Release(update::Update),
    /// Change the priority of queued jobs
    Reprioritise(update::Reprioritise),
    /// Show the node and its GPUs
    Node(node::Node),
    /// Show the node, its GPUs and its jobs full screen
    Top(top::Top),
    /// Stop starting jobs on the node or on some of its GPUs
    Drain(drain::Drain),
    /// Write curves and settings of training runs to an HTML file
    Report(report::Report),
    /// Run one job of a node's daemon
    #[command(hide = true)]
    Agent(agent::Agent),
    /// Run this host's share of an ssh launch
    #[command(hide = true)]
    Remote(remote::Remote),
    /// Run the node's daemon
    Daemon(daemon::Daemon),
    /// Run the coordinator of one job outside its nodes
    Rendezvous(rendezvous::Rendezvous),
    /// Prepare text for training, and show prepared data
    #[command(subcommand)]
    Data(data::Data),
    /// Measure training, communication, launching and the device
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Write a checkpoint as a model that other programs can load
    Export(export::Export),
    /// Check the node's GPUs: errors, clocks, links, results, rates
    Doctor(doctor::Doctor),
    /// Show the cluster environment (Slurm, ...) and its nodes
    Env(env::Env),
    /// Continue text with a trained model
    Generate(generate::Generate),
    /// Measure a trained model: loss, perplexity, HellaSwag
    Eval(eval::Eval),
    /// Serve a trained model to clients of OpenAI's API
    ///
    /// Answers requests of evaluation harnesses and other clients: /v1/completions, /v1/chat/completions, /v1/models
    /// and /health. The URL is printed once the model is loaded.
    ///
    /// This is for evaluating a model during training or after it: one device, up to 32 texts at a time. To serve
    /// users, export the model and load it with a serving engine such as vLLM.
    Serve(serve::Serve),
    /// Generate man pages, completions, JSON schema, config docs
    #[command(subcommand)]
    Gen(r#gen::Gen),
}

/// Runs the command line of this process.
pub(crate) fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = Name::of(&arguments.next().unwrap_or_default());
    let arguments: Vec<OsString> = arguments.collect();
    match arguments.split_first() {
        Some((first, rest)) if name == Name::Xlaunch && first == "remote" => remote::run(rest, launch),
        // clap's own text is about subcommands only.
        Some((first, [])) if name == Name::Xlaunch && first == "help" => launch(name, &["--help".into()]),
        Some((first, _)) if name == Name::Xlaunch && is_subcommand(first) => {
            match parse_subcommand(&arguments) {
                Ok(cli) => {
                    if matches!(
                        cli.command,
                        Subcommands::Generate(_) | Subcommands::Eval(_) | Subcommands::Serve(_)
                    ) {
                        libraries::use_selected();
                    }
                    runtime::run(threads(&cli.command), dispatch(cli.command))
                }
                Err(error) if error.use_stderr() => {
                    // If the stream is closed, the exit code still reports the result.
                    let _ = error.print();
                    ExitCode::Usage
                }
                Err(help) => {
                    let written = help.print().and_then(|()| std::io::stdout().flush());
                    output::answered(written, ExitCode::Done)
                }
            }
        }
        _ => launch(name, &arguments),
    }
}

/// Runs a command line without a subcommand: a launch, or `--help` and the like.
fn launch(name: Name, arguments: &[OsString]) -> ExitCode {
    torchrun::print_deprecated_flags(name, arguments);
    let scope = Scope::Nodes(&engine::of_this_process);
    let environment = |variable: &str| std::env::var_os(variable);
    let request = torchrun::parse(name, arguments, &environment, scope);
    if let Ok(Request::Trainer(_, None) | Request::Command(_, None)) = &request {
        torchrun::print_unused_flags(name, arguments, &environment);
    }
    if let Ok(Request::Command(..)) = &request {
        torchrun::print_unsupported_variables(&environment);
    }
    match request {
        Ok(Request::Text(text)) => output::answer(&text, ExitCode::Done),
        Ok(Request::Trainer(launch, group)) => {
            if launch.dry_run {
                return dry_run::run(&launch, nodes(group).as_ref());
            }
            warn(group.as_deref());
            run(launch::run(&launch, nodes(group).as_ref()))
        }
        Ok(Request::Command(spec, group)) => {
            warn(group.as_deref());
            run(launch::run_command(*spec, nodes(group).as_ref()))
        }
        Ok(Request::Ssh(launch)) => run(ssh::run(*launch)),
        Err(Refusal { exit, message }) => {
            print_line(format_args!("error: {message}"));
            exit
        }
    }
}

fn nodes(group: Option<Box<Group>>) -> Option<Nodes> {
    group.map(|group| Nodes { spec: group.spec, token_file: group.token_file })
}

fn warn(group: Option<&Group>) {
    let warnings = group.into_iter().flat_map(|group| &group.warnings);
    warnings.for_each(|warning| output::print_note(&format!("warning: {warning}")));
}

fn parse_subcommand(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let arguments = match arguments {
        [first, rest @ ..] if first == "submit" => {
            [std::slice::from_ref(first), &submit::split(rest, submit_option)].concat()
        }
        arguments => arguments.to_vec(),
    };
    let line = std::iter::once(OsString::from("xlaunch")).chain(arguments);
    Cli::command().try_get_matches_from(line).and_then(|matches| Cli::from_arg_matches(&matches))
}

/// Returns whether this option of `submit` takes a value; `None` if `submit` has no such option.
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

/// Runs a launch to its end.
fn run(work: impl Future<Output = ExitCode>) -> ExitCode {
    runtime::run(Threads::Several, work)
}

/// The threads that a subcommand needs.
fn threads(command: &Subcommands) -> Threads {
    use Subcommands as Run;
    match command {
        Run::Agent(_)
        | Run::Daemon(_)
        | Run::Bench(_)
        | Run::Doctor(_)
        | Run::Rendezvous(_)
        | Run::Generate(_)
        | Run::Eval(_)
        | Run::Serve(_)
        | Run::Top(_) => Threads::Several,
        _ => Threads::One,
    }
}

async fn dispatch(command: Subcommands) -> ExitCode {
    use Subcommands as Run;
    output::finish(match command {
        Run::Agent(options) => return agent::run(&options).await,
        Run::Daemon(options) => return daemon::run(options).await,
        Run::Bench(bench) => return bench::run(bench).await,
        Run::Data(what) => data::run(what),
        Run::Doctor(options) => doctor::run(options).await,
        Run::Env(options) => env::run(&options),
        Run::Rendezvous(options) => rendezvous::run(options).await,
        Run::Generate(options) => generate::run(options).await,
        Run::Eval(options) => eval::run(options).await,
        Run::Serve(options) => serve::run(options).await,
        Run::Status(options) => status::run(options).await,
        Run::Logs(options) => logs::run(options).await,
        Run::Stacks(options) => stacks::run(options).await,
        Run::Stop(options) => stop::run(options).await,
        Run::Export(options) => export::run(options),
        Run::Checkpoint(options) => checkpoint::run(options).await,
        Run::Submit(options) => submit::run(options).await,
        Run::Jobs(options) => jobs::run(options).await,
        Run::History(options) => history::run(options).await,
        Run::Cancel(options) => cancel::run(options).await,
        Run::Hold(options) => update::hold(options).await,
        Run::Release(options) => update::release(options).await,
        Run::Reprioritise(options) => update::reprioritise(options).await,
        Run::Node(options) => node::run(options).await,
        Run::Top(options) => top::run(options).await,
        Run::Drain(options) => drain::run(options).await,
        Run::Report(options) => report::run(&options),
        // Handled in `main`, because its arguments are a command line of their own.
        Run::Remote(_) => return ExitCode::Internal,
        Run::Gen(what) => r#gen::run(&what, &command_definition()),
    })
}

/// The subcommands as clap knows them.
fn command_definition() -> clap::Command {
    Cli::command().about(torchrun::ABOUT)
}

/// Returns whether the first argument is a subcommand rather than something to launch. A program of the same name can
/// be launched after `--`.
fn is_subcommand(argument: &OsString) -> bool {
    argument == "help" || Cli::command().get_subcommands().any(|command| argument == command.get_name())
}

/// Names and descriptions of the subcommands that `--help` lists.
fn subcommands() -> Vec<(String, String)> {
    let about = |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let command = Cli::command();
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.map(|command| (command.get_name().to_owned(), about(command))).collect()
}

/// The table of exit codes for `--help`.
fn exit_codes() -> String {
    let lines = ExitCode::TABLE.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}\n", exit.code()));
    format!("Exit codes:\n{}  128+n  terminated by signal n\n", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_value_of_an_option_counts() {
        let line = ["logs", "--rank", "1", "-f", "job", "--rank=2", "-f"].map(OsString::from);
        let Ok(Cli { command: Subcommands::Logs(logs) }) = parse_subcommand(&line) else {
            panic!("{line:?}")
        };
        assert!(format!("{logs:?}").contains("rank: 2"), "{logs:?}");
    }

    #[test]
    fn wrong_options_are_refused_with_what_is_expected() {
        for (line, expected) in [
            ("submit --cpus 1.5 a.py", "expected a whole number from 1 to 4294967295"),
            ("jobs --limit 0", "expected a whole number from 1 to 4294967295"),
            ("drain --undo --reason fan", "'--undo' cannot be used with '--reason <TEXT>'"),
        ] {
            let line: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let error = parse_subcommand(&line).unwrap_err().to_string();
            assert!(error.contains(expected), "{line:?}: {error}");
        }
        let undo = ["drain", "--undo"].map(OsString::from);
        parse_subcommand(&undo).unwrap();
    }

    #[test]
    fn first_argument_distinguishes_subcommands_from_launches() {
        Cli::command().debug_assert();
        let fits = |about: &str| about.chars().count() <= 62;
        assert!(
            subcommands().iter().all(|(_, about)| fits(about)),
            "lines of --help have at most 100 columns"
        );
        assert!(["status", "stop", "submit", "bench", "help"].iter().all(|name| is_subcommand(&name.into())));
        assert!(!["train.py", "train.toml", "--help", "--"].iter().any(|name| is_subcommand(&name.into())));
    }
}
