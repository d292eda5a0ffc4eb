//! `xlaunch status`: once, or repeatedly with `--watch`.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use xlaunch_proto::json;
use xlaunch_proto::v1::{JobState, StatusReply};
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print, redraw, terminal_width, unix_seconds};
use super::target::{Launches, Server, Target};
use crate::client::daemon::DaemonClient;
use crate::client::launches;
use crate::render::{job, launch, text};
use xlaunch_agent::stderr::print_line;
use xlaunch_daemon::view::has_ended;
use xlaunch_host::clock::unix_ms;
use xlaunch_spec::quantities::parse_seconds;

/// Options of `xlaunch status`.
#[derive(Debug, Args)]
pub(super) struct Status {
    #[command(flatten)]
    target: Target,
    /// Repeat every SECONDS until the launch or job ends
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = interval)]
    watch: Option<Duration>,
    /// Print JSON; with --watch, one line per update
    #[arg(long)]
    json: bool,
    /// Print nothing, and exit with 0 only if workers run here or this node is a spare
    ///
    /// For readiness probes. The exit code is 0 if the workers of a launch on this host are running and, for a training
    /// job, all ranks of all nodes have joined. It is also 0 if the launch is a spare of a job on several nodes and is
    /// connected to the coordinator. Otherwise it is 1, and one line on stderr gives the reason: there is no launch, or
    /// the launch is starting, waiting for other nodes, between two attempts, stopping, or has ended.
    #[arg(long, conflicts_with_all = ["watch", "json"])]
    ready: bool,
}

pub(super) async fn run(options: Status) -> Result<ExitCode, QueryError> {
    if options.ready {
        return ready(options.target).await;
    }
    let mut output = Output { watch: options.watch, json: options.json, first: true };
    match options.target.server("status").await? {
        Server::Daemon(daemon, id) => show_job(daemon, id, &mut output).await?,
        Server::Agents(launches) => show_launches(&launches, &mut output).await?,
    }
    Ok(ExitCode::Done)
}

/// Checks whether workers run here, and returns the exit code.
async fn ready(target: Target) -> Result<ExitCode, QueryError> {
    let (mut ready, mut why) = (false, Vec::new());
    match target.server("status").await? {
        Server::Daemon(mut daemon, id) => {
            let job = daemon.get(id).await?;
            let state = job.status.as_ref().filter(|_| !has_ended(job.state())).map(StatusReply::state);
            ready = state == Some(JobState::Running);
            why.push(format!(
                "job {id} is in state `{}`",
                state.map_or(job.state().label(), JobState::label)
            ));
        }
        Server::Agents(launches) => {
            for (name, reply) in launches::local_status(&launches.all().await?).await {
                let (state, spare) =
                    (reply.as_ref().map(StatusReply::state), reply.as_ref().is_ok_and(|it| it.spare));
                ready |= spare || state == Ok(JobState::Running);
                why.push(match state {
                    Ok(state) => format!("{name} is in state `{}`", state.label()),
                    Err(problem) => problem.clone(),
                });
            }
        }
    }
    if ready { Ok(ExitCode::Done) } else { Err(format!("not ready: {}", why.join("; ")).into()) }
}

/// Prints updates in the requested form.
struct Output {
    watch: Option<Duration>,
    json: bool,
    first: bool,
}

impl Output {
    fn update(&mut self, value: impl Fn() -> serde_json::Value, text: String) -> Result<(), QueryError> {
        let first = std::mem::replace(&mut self.first, false);
        let update = match (self.json, self.watch) {
            (true, None) => text::json(&value()),
            (true, Some(_)) => text::json_line(&value()),
            (false, None) => text,
            (false, Some(_)) if std::io::stdout().is_terminal() => redraw(&text, first),
            (false, Some(_)) if first => text,
            (false, Some(_)) => format!("\n{text}"),
        };
        print(update.as_bytes())
    }
}

async fn show_job(mut daemon: DaemonClient, id: u64, output: &mut Output) -> Result<(), QueryError> {
    let mut job = daemon.get(id).await?;
    loop {
        output.update(|| json::job(&job), job::text(&job, unix_ms(), terminal_width()))?;
        let Some(interval) = output.watch.filter(|_| !has_ended(job.state())) else { return Ok(()) };
        tokio::time::sleep(interval).await;
        job = daemon.get_again(id).await?;
    }
}

async fn show_launches(target: &Launches, output: &mut Output) -> Result<(), QueryError> {
    let mut running = target.all().await.map_err(|mut error| {
        if let (Some(_), None, QueryError::Refused(refusal)) = (output.watch, &target.run, &mut error) {
            // In `status --watch 7`, 7 is the interval.
            refusal.message += "; JOB goes before --watch";
        }
        error
    })?;
    loop {
        match &running[..] {
            [one] => match launches::status(one).await {
                Ok(reply) => {
                    let text = launch::table(&reply, unix_seconds(), terminal_width());
                    output.update(|| json!(reply), text)?;
                }
                Err(error) if output.first => return Err(error.into()),
                // A launch that ends stops answering a moment before it is gone.
                Err(error) if launches::is_running(one) => print_line(format_args!("{error}")),
                Err(_) if output.json => return Ok(()),
                Err(_) => return print(format!("{} has ended\n", one.name).as_bytes()),
            },
            several => {
                let replies = launches::status_of_all(several).await;
                let text = launch::list(&replies, unix_seconds(), terminal_width());
                output.update(|| list_as_json(&replies), text)?;
            }
        }
        let Some(interval) = output.watch else { return Ok(()) };
        tokio::time::sleep(interval).await;
        if running.len() > 1 {
            match target.all().await {
                Ok(found) => running = found,
                Err(_) => return Ok(()),
            }
        }
    }
}

/// Returns the launches that answered, as JSON.
fn list_as_json(replies: &[(String, Result<StatusReply, String>)]) -> serde_json::Value {
    json!(replies.iter().filter_map(|(_, reply)| reply.as_ref().ok()).collect::<Vec<_>>())
}

fn interval(text: &str) -> Result<Duration, String> {
    let limits = Duration::from_millis(100)..=Duration::from_secs(86_400);
    let interval = parse_seconds(text).filter(|interval| limits.contains(interval));
    interval.ok_or_else(|| "expected seconds from 0.1 to 86400; JOB goes before --watch".into())
}
