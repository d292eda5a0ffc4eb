//! Load generator for the daemon, which is measured from outside. `daemon_load --help` lists the measurements; each one
//! except `clients` starts a daemon of its own. Results are in `tests/peers/results/daemon-cpu.txt`.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::unwrap_used,
    reason = "a measurement prints, and may panic"
)]

mod clients;
mod compare;
mod usage;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use tokio::time::sleep;
use tonic::transport::Channel;
use xlaunch_proto::connect;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::submit_request::Work;
use xlaunch_proto::v1::{GetRequest, ListRequest, NodeJobState, SubmitRequest};
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_tests::{NOBODY, Node, Process, wait_for};

use crate::clients::{Clients, hold_hostile_connections};
use crate::usage::{Usage, cgroups, files_below};

/// Maximum number of unfinished jobs.
const MAX_UNFINISHED: usize = 16;
/// Number of GPUs, and of jobs, of the node whose status is queried. One job runs per GPU; the others wait.
const STATUS_GPUS: usize = 8;
const STATUS_JOBS: u64 = 100;

/// Measures the daemon from outside while it is loaded.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Debug, Subcommand)]
enum Measurement {
    /// Memory, descriptors, files and CPU time of the daemon while it runs many short jobs.
    Jobs { count: usize },
    /// Step time of a training job while its logs are followed and the daemon is queried.
    Queries {
        /// Queries per second.
        rate: usize,
    },
    /// Queries per second and latency, as fast as the daemon replies: `Status` and `Get` in turn.
    Status {
        /// Call `List` instead. At most 16 queries at a time are accepted.
        #[arg(long)]
        list: bool,
        #[arg(long, default_value_t = 8)]
        connections: usize,
        /// Concurrent queries per connection.
        #[arg(long, default_value_t = 4)]
        pipelined: usize,
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
        #[arg(long)]
        json: bool,
    },
    /// Queries a running daemon at a fixed rate and follows the logs of one of its jobs.
    Clients { socket: PathBuf, job: u64, rate: usize, followers: usize, seconds: u64 },
    /// Latency of `Get` during 1,000 hostile connections of another user. Needs root.
    // Called `slow` in recorded results.
    #[command(alias = "slow")]
    Hostile,
    /// Holds hostile connections until it is killed.
    HostileClients {
        socket: PathBuf,
        count: usize,
        /// Replace the oldest connection every millisecond.
        #[arg(long)]
        churn: bool,
    },
    /// Memory and CPU time of a daemon without jobs.
    Idle {
        #[arg(long, default_value_t = 20.0)]
        seconds: f64,
        #[arg(long)]
        json: bool,
    },
    /// Runs `status`, `status --list` and `idle` with several `xlaunch` binaries in turn.
    Compare {
        #[arg(required = true)]
        binaries: Vec<PathBuf>,
        #[arg(long, default_value_t = 10)]
        rounds: usize,
        /// Duration of each load.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Time from SIGKILL of the daemon until the next one shows the status of an adopted job.
    Recovery,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    match Arguments::parse().measurement {
        Measurement::Jobs { count } => jobs(count).await,
        Measurement::Queries { rate } => queries(rate).await,
        Measurement::Status { list, connections, pipelined, seconds, json } => {
            status(list, connections, pipelined, Duration::from_secs_f64(seconds), json).await;
        }
        Measurement::Clients { socket, job, rate, followers, seconds } => {
            let clients = Clients::start(&socket, job, rate, followers).await;
            sleep(Duration::from_secs(seconds)).await;
            println!("{:.0} replies/s", clients.replies_per_second());
        }
        Measurement::Hostile => hostile().await,
        Measurement::HostileClients { socket, count, churn } => {
            hold_hostile_connections(&socket, count, churn)
        }
        Measurement::Idle { seconds, json } => idle(seconds, json).await,
        Measurement::Compare { binaries, rounds, seconds } => compare::compare(&binaries, rounds, seconds),
        Measurement::Recovery => recovery().await,
    }
}

async fn connect(socket: &Path) -> NodeClient<Channel> {
    let channel = connect::connect(socket, connect::endpoint()).await.unwrap();
    NodeClient::new(channel).max_decoding_message_size(1 << 20)
}

fn submit_request(node: &Node, id: usize, program: &[&str]) -> SubmitRequest {
    let arguments = program[1..].iter().map(Into::into).collect();
    let spec = CommandSpec::new(Program::Binary(program[0].into()), arguments);
    SubmitRequest {
        request_id: id.to_string(),
        version: xlaunch_proto::VERSION.into(),
        work_dir: node.path().display().to_string(),
        environment: vec![b"PATH=/usr/local/bin:/usr/bin:/bin".to_vec()],
        work: Some(Work::CommandSpecJson(spec.to_json())),
        ..Default::default()
    }
}

async fn unfinished(client: &mut NodeClient<Channel>) -> usize {
    client.list(ListRequest::default()).await.unwrap().into_inner().jobs.len()
}

async fn jobs(count: usize) {
    let node = Node::new("keep = 100\nmax_per_user = 0\ncpu_workers = 4");
    let mut client = connect(&node.socket()).await;
    let start = Instant::now();
    println!("jobs    RSS KiB  descriptors  threads  files  journal  cgroups  jobs/s  daemon CPU ms/job");
    for done in 0..=count {
        if done % (count / 10).max(1) == 0 {
            while unfinished(&mut client).await > 0 {
                sleep(Duration::from_millis(5)).await;
            }
            let usage = Usage::of(node.daemon().pid());
            let journal = std::fs::metadata(node.state_dir().join("journal")).unwrap().len();
            println!(
                "{done:<6}  {:>7}  {:>11}  {:>7}  {:>5}  {journal:>7}  {:>7}  {:>6.1}  {:.1}",
                usage.resident_kib,
                usage.descriptors,
                usage.threads,
                files_below(&node.state_dir()),
                cgroups(),
                done as f64 / start.elapsed().as_secs_f64(),
                usage.cpu_seconds * 1e3 / done.max(1) as f64
            );
        }
        if done % MAX_UNFINISHED == 0 {
            while unfinished(&mut client).await >= MAX_UNFINISHED {
                sleep(Duration::from_millis(2)).await;
            }
        }
        if done < count {
            client.submit(submit_request(&node, done, &["true"])).await.unwrap();
        }
    }
    let kept =
        client.list(ListRequest { ended: true, ..ListRequest::default() }).await.unwrap().into_inner().jobs;
    let done = kept.iter().filter(|job| job.state() == NodeJobState::Done).count();
    let newest = kept.first().map_or(0, |job| job.id);
    println!("{} jobs kept, {done} of them done; the newest is {newest}", kept.len());
}

async fn queries(rate: usize) {
    let node = Node::new("");
    let job = node.submit(&[&node.write_tiny_job(1_000_000)]);
    let metrics = "runs/tiny/latest/metrics.jsonl";
    wait_for("20 steps", || (node.lines(metrics).len() > 20).then_some(()));
    let (daemon, own) = (node.daemon().pid(), std::process::id());
    println!("                               step ms  daemon CPU %  clients' CPU %  replies/s");
    for (what, rate, followers) in [
        ("training alone", 0, 0),
        ("100 followers", 0, 100),
        ("100 followers, 1/10 of queries", rate / 10, 100),
        ("100 followers, all queries", rate, 100),
        ("training alone again", 0, 0),
    ] {
        let clients = Clients::start(&node.socket(), job, rate, followers).await;
        let (steps, start) = (node.lines(metrics).len(), Instant::now());
        let before = [daemon, own].map(|pid| Usage::of(pid).cpu_seconds);
        sleep(Duration::from_secs(10)).await;
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{what:<30} {:>7.2}  {:>12.1}  {:>14.1}  {:>9.0}",
            seconds * 1e3 / (node.lines(metrics).len() - steps) as f64,
            (Usage::of(daemon).cpu_seconds - before[0]) / seconds * 100.0,
            (Usage::of(own).cpu_seconds - before[1]) / seconds * 100.0,
            clients.replies_per_second(),
        );
        drop(clients);
        sleep(Duration::from_millis(500)).await;
    }
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}

async fn status(list: bool, connections: usize, pipelined: usize, time: Duration, json: bool) {
    let gpus: Vec<String> = (0..STATUS_GPUS).map(|gpu| format!("GPU-{gpu:032} 0")).collect();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let node = Node::with_gpus(&gpus, "max_per_user = 0");
    for _ in 0..STATUS_JOBS {
        node.submit(&["--gpus", "1", "--", "sleep", "100000"]);
    }
    for job in 1..=STATUS_GPUS as u64 {
        node.wait(job, "running");
    }
    let daemon = node.daemon().pid();
    let (start, before) = (Instant::now(), Usage::of(daemon).cpu_seconds);
    let jobs = (!list).then_some(STATUS_JOBS);
    let latencies = clients::query(&node.socket(), connections, pipelined, time, jobs).await;
    let seconds = start.elapsed().as_secs_f64();
    let rate = latencies.len() as f64 / seconds;
    let cpu = (Usage::of(daemon).cpu_seconds - before) / seconds * 100.0;
    let (median, p99) = (latencies[latencies.len() / 2], latencies[latencies.len() * 99 / 100]);
    if json {
        let result = serde_json::json!({
            "queries": latencies.len(),
            "queries_per_second": rate,
            "median_ms": median,
            "p99_ms": p99,
            "daemon_cpu_percent": cpu,
        });
        println!("{result:#}");
    } else {
        println!("queries per second  {rate:.0}");
        println!("latency             median {median:.2} ms, 99th percentile {p99:.2} ms");
        println!("CPU of the daemon   {cpu:.0} % of a core");
    }
}

async fn hostile() {
    let node = Node::new("");
    node.admit_nobody();
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let mut client = connect(&node.socket()).await;
    println!("                           Get, ms: median  99th  longest  daemon RSS KiB  descriptors");
    for (what, count) in [("no other clients", 0), ("1,000 hostile connections", 1000)] {
        let hostile = (count > 0).then(|| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.arg("hostile-clients").arg("--churn").arg(node.socket()).arg(count.to_string());
            Process::spawn(command.uid(NOBODY).gid(NOBODY).current_dir("/"))
        });
        let mut latencies = Vec::new();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            let sent = Instant::now();
            client.get(GetRequest { job }).await.unwrap();
            latencies.push(sent.elapsed().as_secs_f64() * 1e3);
            sleep(Duration::from_millis(2)).await;
        }
        latencies.sort_by(f64::total_cmp);
        let usage = Usage::of(node.daemon().pid());
        println!(
            "{what:<26} {:>15.2} {:>5.2}  {:>7.2}  {:>14}  {:>11}",
            latencies[latencies.len() / 2],
            latencies[latencies.len() * 99 / 100],
            latencies[latencies.len() - 1],
            usage.resident_kib,
            usage.descriptors
        );
        drop(hostile);
    }
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}

async fn idle(seconds: f64, json: bool) {
    let node = Node::new("");
    sleep(Duration::from_secs(2)).await;
    let before = Usage::of(node.daemon().pid());
    sleep(Duration::from_secs_f64(seconds)).await;
    let after = Usage::of(node.daemon().pid());
    let cpu_seconds = after.cpu_seconds - before.cpu_seconds;
    let Usage { resident_kib, descriptors, threads, .. } = after;
    if json {
        println!("{:#}", serde_json::json!({ "resident_kib": resident_kib, "cpu_seconds": cpu_seconds }));
    } else {
        println!(
            "idle: RSS {resident_kib} KiB, {descriptors} descriptors, {threads} threads, {cpu_seconds:.2} s of CPU in \
             {seconds} s"
        );
    }
}

async fn recovery() {
    let mut node = Node::new("");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let mut times = Vec::new();
    for _ in 0..20 {
        let killed = Instant::now();
        node.kill_and_restart_daemon();
        let mut client = connect(&node.socket()).await;
        loop {
            let job = client.get(GetRequest { job }).await.unwrap().into_inner();
            if job.state() == NodeJobState::Running && job.status.is_some() {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
        times.push(killed.elapsed().as_secs_f64() * 1e3);
        // This is not a multiple of the agent's poll interval, so that each kill occurs in a different phase of it.
        sleep(Duration::from_millis(137)).await;
    }
    times.sort_by(f64::total_cmp);
    println!("SIGKILL to the adopted job's status: median {:.0} ms, longest {:.0} ms", times[10], times[19]);
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}
