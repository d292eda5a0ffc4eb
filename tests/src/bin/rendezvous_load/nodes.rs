//! The coordinator of a job with many nodes.
//!
//! ```text
//! this process: listener, service and coordinator of a job <--N connections, TCP or TLS-- child process: N agents
//!                                                           --one line per milestone-->   (stdout)
//! ```
//! The agents use the same links as real ones: they are admitted, prepare, join the rendezvous of the trainer, and send
//! heartbeats and reports; in the end one of them fails. They have no workers: the ranks of a node join at their own
//! agent, which [`ranks`](crate::ranks) measures. CPU time and memory are those of this process.
//!
//! Times are measured in the child process, starting with its first connection. The loss of a node that has not failed
//! is an error of the measurement.

use std::fmt::Write;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use xlaunch_cluster::coordinator::Handle;
use xlaunch_cluster::hosting::{new_coordinator, random_run_id, serve};
use xlaunch_cluster::net::{Listener, Security, Token};

use crate::raise_file_limit;

/// Maximum time for the child process to reach the next milestone, in addition to the time for which nodes are held.
const MILESTONE_TIMEOUT: Duration = Duration::from_secs(120);

/// Parameters of the measurement.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Setting {
    nodes: u32,
    ranks: u32,
    /// Encrypt and authenticate the connections.
    #[arg(long)]
    tls: bool,
    /// Seconds for which all nodes must remain members.
    #[arg(long, default_value_t = 3)]
    hold: u64,
}

/// The agents that the child process simulates. Sent as one line on its stdin, as it contains a secret.
#[derive(Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) nodes: u32,
    pub(super) ranks: u32,
    pub(super) hold: Duration,
    pub(super) port: u16,
    /// The token in base64; `None` without TLS.
    pub(super) token: Option<String>,
}

/// Milestones that the child process reports, one line each, in this order.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Milestone {
    /// Seconds from the first connection until the last node received the reply to the join of its ranks.
    Joined(f64),
    /// All nodes were members for the requested time.
    Held,
    /// Seconds from the failure of one node until the last of the others was told.
    Failed(f64),
}

/// The result of a rendezvous of many nodes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Measured {
    nodes: u32,
    ranks: u32,
    tls: bool,
    join_seconds: f64,
    join_cpu_seconds: f64,
    held_seconds: f64,
    /// CPU use while nodes were held; 100 is one CPU.
    held_cpu_percent: f64,
    failure_seconds: f64,
    peak_memory_bytes: u64,
}

/// Measures one rendezvous.
///
/// # Errors
/// There are fewer ranks than nodes, the limit of open files is too low, or a node was lost.
pub(super) async fn run(setting: Setting) -> io::Result<Measured> {
    let Setting { nodes, ranks, tls, hold } = setting;
    if ranks < nodes {
        return Err(io::Error::other(format!("{ranks} ranks are fewer than {nodes} nodes")));
    }
    measure(nodes, ranks, tls, Duration::from_secs(hold)).await
}

pub(super) fn table(measured: &[Measured]) -> String {
    let mut out = format!(
        "{:>6} {:>7} {:>4}  {:>8}  {:>10}  {:>11}  {:>9}  {:>14}\n",
        "nodes", "ranks", "tls", "joined s", "join CPU s", "held s, CPU", "failure s", "peak memory"
    );
    for it in measured {
        let tls = if it.tls { "yes" } else { "no" };
        let held = format!("{:.0}, {:.0}%", it.held_seconds, it.held_cpu_percent);
        let memory = format!("{} MB", it.peak_memory_bytes / 1_000_000);
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:>6} {:>7} {tls:>4}  {:>8.3}  {:>10.3}  {held:>11}  {:>9.3}  {memory:>14}",
            it.nodes, it.ranks, it.join_seconds, it.join_cpu_seconds, it.failure_seconds
        );
    }
    out
}

/// Runs the coordinator, and the agents in a child process.
async fn measure(nodes: u32, ranks: u32, tls: bool, hold: Duration) -> io::Result<Measured> {
    raise_file_limit(nodes, "nodes")?;
    let token = tls.then(Token::generate).transpose().map_err(io::Error::other)?;
    let security = token.as_ref().map_or(Ok(Security::Insecure), Security::from_token);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener =
        Listener::bind(&[address], security.map_err(io::Error::other)?).map_err(io::Error::other)?;
    let port = listener.addresses().first().map_or(0, SocketAddr::port);
    let coordinator =
        Handle::start(new_coordinator(random_run_id()), false, tokio::sync::mpsc::unbounded_channel().0);
    let server = serve(listener, &coordinator);
    let token = token.map(|token| BASE64_STANDARD.encode(token.expose()));
    reset_peak_memory();
    let start = cpu_seconds();
    let mut child = Agents::start(&Plan { nodes, ranks, hold, port, token }).await?;
    let mut milestones = Vec::new();
    let mut cpu = vec![start];
    for _ in 0..3 {
        milestones.push(child.next(hold).await?);
        cpu.push(cpu_seconds());
    }
    coordinator.finish().await;
    server.abort();
    let (&[Milestone::Joined(joined), Milestone::Held, Milestone::Failed(failure)], &[start, join, held, _]) =
        (&milestones[..], &cpu[..])
    else {
        return Err(io::Error::other(format!("the agents reported {milestones:?}")));
    };
    Ok(Measured {
        nodes,
        ranks,
        tls,
        join_seconds: joined,
        join_cpu_seconds: join - start,
        held_seconds: hold.as_secs_f64(),
        held_cpu_percent: 100.0 * (held - join) / hold.as_secs_f64().max(0.001),
        failure_seconds: failure,
        peak_memory_bytes: peak_memory()?,
    })
}

/// The child process with the agents. It is killed when this is dropped.
struct Agents {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Agents {
    async fn start(plan: &Plan) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?);
        child.arg("simulate-agents");
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        stdin.write_all(serde_json::json!(plan).to_string().as_bytes()).await?;
        stdin.shutdown().await?;
        Ok(Self { _child: child, lines: BufReader::new(stdout).lines() })
    }

    async fn next(&mut self, hold: Duration) -> io::Result<Milestone> {
        let line = tokio::time::timeout(hold + MILESTONE_TIMEOUT, self.lines.next_line()).await;
        // The child inherits stderr, where it has printed why it failed.
        let line = line??.ok_or_else(|| io::Error::other("the process with the agents has failed"))?;
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}

/// Returns user plus system time of this process, in seconds.
fn cpu_seconds() -> f64 {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return 0.0 };
    let time = |time: TimeVal| {
        Duration::from_secs(time.tv_sec().unsigned_abs())
            + Duration::from_micros(time.tv_usec().unsigned_abs())
    };
    (time(usage.user_time()) + time(usage.system_time())).as_secs_f64()
}

/// Returns the peak memory of this process since [`reset_peak_memory`], in bytes.
fn peak_memory() -> io::Result<u64> {
    let status = fs_err::read_to_string("/proc/self/status")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
    let kib: Option<u64> = kib.and_then(|kib| kib.trim().parse().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("the kernel does not report peak memory"))
}

fn reset_peak_memory() {
    // If this fails, the peak includes earlier measurements.
    let _ = fs_err::write("/proc/self/clear_refs", "5");
}
