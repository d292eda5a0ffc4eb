//! The launching process: connects to all hosts, starts the job on all of them at once, passes signals on, and ends
//! with the job's exit code.
//!
//! ```text
//! connect: at most MAX_CONNECTING clients at a time --all ready--> GO --> supervise: until all clients have exited
//!             `--a host fails--> every host that fails is named, none starts
//! ```
//! A host whose sshd is not up yet is retried until the join timeout.
//!
//! Signals act on every host as they would on an `xlaunch` there. After a second SIGINT the hosts get
//! [`KILL_DRAIN_TIMEOUT`]; then their clients are killed, which also ends the job on the hosts.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{IsTerminal, Read};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::process::ChildStdin;
use tokio::sync::Semaphore;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval_at, sleep, sleep_until};
use xlaunch_agent::logs::console::Console;
use xlaunch_host::signals::{SignalRequest, Signals, suspend_this_process};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::connection::{self, Ready};
use super::outcome::{self, Context, Failure, Outcomes};
use super::output::{HostStream, Pump};
use super::plan::{Origin, SshLaunch, remote_command};
use super::wire::{self, GO};
use crate::error_file;
use xlaunch_agent::stderr::print_line;

/// Maximum number of clients that connect at the same time. sshd randomly refuses connections if more than 10 are not
/// yet authenticated. These clients connect to different hosts, so this matters only for a bastion host in between.
const MAX_CONNECTING: usize = 64;
/// Time after the first failure of a host in which other hosts may fail, so that all are named.
const MORE_FAILURES_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before the first line that names the hosts still waited for.
const FIRST_WAITING_NOTE_AFTER: Duration = Duration::from_secs(4);
const WAITING_NOTE_INTERVAL: Duration = Duration::from_secs(10);
/// Initial delay before a host that is not up yet is retried. It doubles up to [`MAX_RETRY_DELAY`].
const RETRY_DELAY: Duration = Duration::from_millis(500);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(4);
/// Maximum number of hosts named in such a line.
const HOSTS_SHOWN: usize = 8;
/// Time for the agents to kill their workers after a second SIGINT.
const KILL_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of open files per client: three pipes and a pidfd.
const FILES_PER_HOST: u64 = 4;
/// Number of other open files.
const OTHER_FILES: u64 = 64;
/// Signals that are passed on to the agents. The agents know which of them stop the job.
const PASSED_ON: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Runs the launch to its end.
pub(crate) async fn run(launch: SshLaunch) -> ExitCode {
    let failure = match connect_and_supervise(&launch).await {
        Ok(None) => return ExitCode::Done,
        // Hosts have reported it.
        Ok(Some(failure)) => failure,
        Err(refusal) => {
            print_line(format_args!("error: {}", refusal.message));
            refusal
        }
    };
    error_file::record_refusal(&failure);
    failure.exit
}

/// Returns how a job that was started has failed.
async fn connect_and_supervise(launch: &SshLaunch) -> Result<Option<Refusal>, Refusal> {
    let failed = |error: std::io::Error| {
        Refusal::new(ExitCode::Internal, format!("failed to start the hosts: {error}"))
    };
    let mut signals = Signals::listen(&PASSED_ON)?;
    let program = std::env::current_exe().map_err(failed)?;
    let descriptions = launch
        .descriptions(&origin().map_err(failed)?)
        .map_err(|message| Refusal::new(ExitCode::Usage, message))?;
    allow_open_files(launch.hosts.len())?;
    let mut encoded = Vec::new();
    for description in &descriptions {
        encoded.push(description.encode().map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()))?);
    }
    let hosts = connect(launch, program.as_os_str(), encoded, &mut signals).await?;
    supervise(launch, hosts, &mut signals).await.map_err(failed)
}

fn origin() -> std::io::Result<Origin> {
    let mut random = [0; 32];
    fs_err::File::open("/dev/urandom")?.read_exact(&mut random)?;
    let directory = std::env::current_dir()?.into_os_string();
    let terminal = std::io::stdout().is_terminal();
    Ok(Origin { directory, environment: std::env::vars_os().collect(), random, terminal })
}

/// Raises the limit of open files, up to what the system allows this user.
fn allow_open_files(hosts: usize) -> Result<(), Refusal> {
    let needed = (hosts as u64).saturating_mul(FILES_PER_HOST).saturating_add(OTHER_FILES);
    let refused = |reason: String| {
        let message = format!("{hosts} hosts need {needed} open files: {reason}\nhelp: raise `ulimit -n`");
        Refusal::new(ExitCode::Usage, message)
    };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| refused(error.to_string()))?;
    if soft >= needed {
        return Ok(());
    }
    if hard < needed {
        return Err(refused(format!("the limit is {hard}")));
    }
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard).map_err(|error| refused(error.to_string()))
}

/// Waits until every host is ready.
async fn connect(
    launch: &SshLaunch,
    program: &OsStr,
    descriptions: Vec<Vec<u8>>,
    signals: &mut Signals,
) -> Result<Vec<Ready>, Refusal> {
    let (remote, build) = (remote_command(program), wire::build());
    let permits = Arc::new(Semaphore::new(MAX_CONNECTING));
    let deadline = Instant::now() + launch.join_timeout;
    let (not_up, mut not_up_yet) = mpsc::unbounded_channel();
    let mut connecting = JoinSet::new();
    for ((node, host), description) in launch.hosts.iter().enumerate().zip(descriptions) {
        let (permits, build, not_up) = (permits.clone(), build.clone(), not_up.clone());
        let (ssh, name, remote) = (launch.ssh.clone(), host.name.clone(), remote.clone());
        let open = async move || {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            connection::open(connection::command(&ssh, &name, &remote), &description, &build).await
        };
        connecting.spawn(async move {
            (node, until_up(open, deadline, |failure| _ = not_up.send((node, failure))).await)
        });
    }
    let mut ready = BTreeMap::new();
    let mut failures: BTreeMap<usize, Failure> = BTreeMap::new();
    // The last failure of each host that is being retried.
    let mut retried: BTreeMap<usize, Failure> = BTreeMap::new();
    let mut give_up: Option<Instant> = None;
    let mut note = interval_at(Instant::now() + FIRST_WAITING_NOTE_AFTER, WAITING_NOTE_INTERVAL);
    loop {
        tokio::select! {
            joined = connecting.join_next() => match joined {
                None => break,
                Some(Ok((node, Ok(host)))) => drop(ready.insert(node, host)),
                Some(Ok((node, Err(failure)))) => {
                    give_up = give_up.or(Some(Instant::now() + MORE_FAILURES_TIMEOUT));
                    // Without a client, all hosts would fail in the same way.
                    let is_final = matches!(failure, Failure::NoClient(_));
                    failures.insert(node, failure);
                    if is_final {
                        break;
                    }
                }
                Some(Err(error)) => return Err(Refusal::new(ExitCode::Internal, error.to_string())),
            },
            request = signals.next() => match request {
                SignalRequest::Stop(signal) => return Err(interrupted(signal)),
                SignalRequest::Suspend => suspend_this_process(),
                SignalRequest::Forward(_) | SignalRequest::Resume | SignalRequest::Resize => {}
            },
            Some((node, failure)) = not_up_yet.recv() => drop(retried.insert(node, failure)),
            _ = note.tick() => {
                let done = |node: &usize| ready.contains_key(node) || failures.contains_key(node);
                let missing = launch.hosts.iter().enumerate().filter(|(node, _)| !done(node));
                let missing = missing.map(|(node, host)| match retried.get(&node) {
                    Some(failure) => format!("`{}` ({})", host.name, failure.reason()),
                    None => format!("`{}`", host.name),
                });
                let names: Vec<String> = missing.collect();
                print_line(format_args!("xlaunch: waiting for {}", shorten(&names)));
            }
            () = sleep_until(give_up.unwrap_or_else(Instant::now)), if give_up.is_some() => break,
        }
    }
    // If other hosts have failed, those that are still being retried count as failed, too.
    let unfinished = retried.into_iter().filter(|(node, _)| !ready.contains_key(node));
    if !failures.is_empty() {
        failures = unfinished.chain(failures).collect();
    }
    if failures.is_empty() {
        return Ok(ready.into_values().collect());
    }
    let program = program.to_string_lossy();
    let context = Context { ssh: &launch.ssh, program: &program, build: &build };
    let name = |node: usize| launch.hosts.get(node).map_or("", |host| host.name.as_str());
    let failures: Vec<(&str, Failure)> =
        failures.into_iter().map(|(node, failure)| (name(node), failure)).collect();
    Err(outcome::refusal(&failures, context))
}

/// Opens a connection. While the host is not up yet, retries until the deadline, and sends each failure to `report`.
async fn until_up(
    open: impl AsyncFn() -> Result<Ready, Failure>,
    deadline: Instant,
    report: impl Fn(Failure),
) -> Result<Ready, Failure> {
    let mut delay = RETRY_DELAY;
    loop {
        match open().await {
            Err(failure) if failure.is_transient() && Instant::now() + delay < deadline => report(failure),
            opened => return opened,
        }
        sleep(delay).await;
        delay = (2 * delay).min(MAX_RETRY_DELAY);
    }
}

fn interrupted(signal: Signal) -> Refusal {
    let number = u8::try_from(signal.as_raw()).unwrap_or_default();
    Refusal::new(ExitCode::Signal(number), "interrupted before all hosts were ready")
}

/// Returns the names as `a, b and 7 more`.
fn shorten(names: &[String]) -> String {
    let shown = names.iter().take(HOSTS_SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(HOSTS_SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

/// Starts the job and follows it to its end.
async fn supervise(
    launch: &SshLaunch,
    hosts: Vec<Ready>,
    signals: &mut Signals,
) -> std::io::Result<Option<Refusal>> {
    let consoles = Console::own()?;
    let mut outcomes = Outcomes::new(hosts.len());
    let mut inputs = Vec::new();
    let mut running = JoinSet::new();
    for ((node, ready), host) in hosts.into_iter().enumerate().zip(&launch.hosts) {
        let Ready { child, mut input, stdout, stderr, early_stderr } = ready;
        // If a client has ended meanwhile, its exit code says so.
        let _ = input.write_all(&[GO]).await;
        inputs.push(Some(input));
        let [out, err] = &consoles;
        let mark = (node > 0).then_some(host.name.as_str());
        let pumps = [
            Pump::start(Vec::new(), stdout, HostStream::new(out, None)),
            Pump::start(early_stderr, stderr, HostStream::new(err, mark)),
        ];
        running.spawn(async move { (node, ended(child, pumps).await) });
    }
    let mut interrupts = 0;
    let mut kill_at: Option<Instant> = None;
    loop {
        tokio::select! {
            joined = running.join_next() => {
                let Some(joined) = joined else {
                    let name = |node: usize| launch.hosts.get(node).map(|host| host.name.as_str());
                    return Ok(outcomes.failure(name));
                };
                let Ok((node, status)) = joined else { continue };
                inputs.get_mut(node).map(Option::take);
                if outcomes.ended(node, status) {
                    let host = launch.hosts.get(node).map_or("", |host| host.name.as_str());
                    print_line(format_args!("error: {}", outcome::lost(host, status)));
                    send(&mut inputs, Signal::TERM).await;
                }
            }
            request = signals.next() => match request {
                SignalRequest::Stop(signal) => {
                    send(&mut inputs, signal).await;
                    interrupts += u32::from(signal == Signal::INT);
                    if interrupts > 1 {
                        kill_at = kill_at.or(Some(Instant::now() + KILL_DRAIN_TIMEOUT));
                    }
                }
                SignalRequest::Forward(signal) => send(&mut inputs, signal).await,
                // An agent that is suspended could not be continued through its input.
                SignalRequest::Suspend => suspend_this_process(),
                SignalRequest::Resume | SignalRequest::Resize => {}
            },
            () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                running.abort_all();
                let exit = ExitCode::Interrupted;
                return Ok(Some(Refusal::new(exit, exit.meaning())));
            }
        }
    }
}

/// Waits for a client and its output.
async fn ended(mut child: tokio::process::Child, pumps: [Pump; 2]) -> Option<ExitStatus> {
    let status = child.wait().await.ok();
    for pump in pumps {
        pump.finish().await;
    }
    status
}

/// Passes a signal on to the hosts that are still running.
async fn send(inputs: &mut [Option<ChildStdin>], signal: Signal) {
    let Some(byte) = wire::signal_byte(signal) else { return };
    for input in inputs.iter_mut().flatten() {
        // If a client has ended, that is about to be reported.
        let _ = input.write_all(&[byte]).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_hosts_are_shortened() {
        let names: Vec<String> = (0..20).map(|n| format!("`n{n}`")).collect();
        assert_eq!(shorten(&names[..2]), "`n0`, `n1`");
        assert!(shorten(&names).ends_with("`n7` and 12 more"));
        assert!(shorten(&names[..8]).ends_with("`n7`"));
    }
}
