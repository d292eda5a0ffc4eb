//! A daemon under load, measured from outside: `daemon_load jobs N | queries RATE | slow | idle | recovery |
//! callers SOCKET JOB RATE FOLLOWERS SECONDS`.
//!
//! Each but the last starts a node of its own; all print what they find. `tests/peers/results/daemon-cpu.txt` has results.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement of our own")]

use std::io::Write;
use std::os::unix::net::UnixStream as Socket;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint, Uri};
use xlaunch_proto::command::{CommandSpec, Program};
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::submit_request::Work;
use xlaunch_proto::v1::{
    GetRequest, JobLogsRequest, ListRequest, LogsRequest, NodeJobState, NodeStatusRequest,
    SubmitRequest,
};
use xlaunch_tests::{Node, Running, wait_for};

/// Jobs that are submitted and have not ended, at most.
const AHEAD: usize = 16;
/// Who connects and does nothing.
const NOBODY: u32 = 65_534;

fn main() {
    // The harness looks after signals once, which it cannot do in a runtime.
    Running::start(&mut Command::new("true")).finish();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(measure());
}

async fn measure() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["jobs", count] => jobs(count.parse().unwrap()).await,
        ["queries", rate] => queries(rate.parse().unwrap()).await,
        ["callers", socket, job, rate, followers, seconds] => {
            let number = |word: &str| word.parse::<usize>().unwrap();
            let job = job.parse().unwrap();
            callers(Path::new(socket), job, number(rate), number(followers), number(seconds) as u64).await;
        }
        ["slow"] => slow().await,
        ["bad-callers", socket, count] => bad_callers(Path::new(socket), count.parse().unwrap()),
        ["idle"] => idle().await,
        ["recovery"] => recovery().await,
        _ => panic!("usage: daemon_load jobs N | queries RATE | slow | idle | recovery"),
    }
}

async fn connect(socket: &Path) -> NodeClient<Channel> {
    let socket = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://daemon").connect_with_connector(connector).await.unwrap();
    NodeClient::new(channel).max_decoding_message_size(1 << 20)
}

fn command(node: &Node, id: usize, program: &[&str]) -> SubmitRequest {
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

/// What a process holds.
struct Held {
    resident_kib: u64,
    descriptors: usize,
    threads: u64,
    /// Of all threads so far.
    cpu_seconds: f64,
}

fn held(pid: u32) -> Held {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    Held {
        resident_kib: field("VmRSS:"),
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
        threads: field("Threads:"),
        cpu_seconds: ticks / rustix::param::clock_ticks_per_second() as f64,
    }
}

fn files_below(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { 1 + files_below(&entry.path()) } else { 1 }).sum()
}

/// Directories below the cgroup of this process.
fn cgroups() -> usize {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).map(str::to_owned);
    fn below(dir: &Path) -> usize {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter(|entry| entry.path().is_dir()).map(|entry| 1 + below(&entry.path())).sum()
    }
    own.map_or(0, |own| below(&PathBuf::from("/sys/fs/cgroup").join(own)))
}

async fn jobs(count: usize) {
    let node = Node::new("keep = 100\nmax_per_user = 0\ncpu_workers = 4");
    let mut client = connect(&node.socket()).await;
    let begun = Instant::now();
    println!("jobs    RSS KiB  descriptors  threads  files  journal  cgroups  jobs/s  daemon CPU ms/job");
    for done in 0..=count {
        if done % (count / 10).max(1) == 0 {
            while !client.list(ListRequest::default()).await.unwrap().into_inner().jobs.is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
            let held = held(node.daemon().pid());
            let journal = std::fs::metadata(node.state().join("journal")).unwrap().len();
            println!(
                "{done:<6}  {:>7}  {:>11}  {:>7}  {:>5}  {journal:>7}  {:>7}  {:>6.1}  {:.1}",
                held.resident_kib,
                held.descriptors,
                held.threads,
                files_below(&node.state()),
                cgroups(),
                done as f64 / begun.elapsed().as_secs_f64(),
                held.cpu_seconds * 1e3 / done.max(1) as f64
            );
        }
        if done % AHEAD == 0 {
            let waits = async |client: &mut NodeClient<Channel>| {
                client.list(ListRequest::default()).await.unwrap().into_inner().jobs.len()
            };
            while waits(&mut client).await >= AHEAD {
                sleep(Duration::from_millis(2)).await;
            }
        }
        if done < count {
            client.submit(command(&node, done, &["true"])).await.unwrap();
        }
    }
    let list = ListRequest { ended: true, limit: 0 };
    let kept = client.list(list).await.unwrap().into_inner().jobs;
    let good = kept.iter().filter(|job| job.state() == NodeJobState::Done).count();
    let newest = kept.first().map_or(0, |job| job.id);
    println!("{} jobs are kept, {good} of them done; the newest is {newest}", kept.len());
}

async fn queries(rate: usize) {
    let node = Node::new("");
    node.write("text.txt", &"It was a dark and stormy night. ".repeat(2000));
    let text = "[model]\npreset = \"byte-tiny\"\n[data]\ntrain = [\"text.txt\"]\n[train]\nsteps = 1000000\n\
        batch = 1\nwarmup = 2\neval_every = 0\nsample = 0\n[checkpoint]\nevery = 0\n";
    let job = node.submit(&[&node.write("tiny.toml", text).display().to_string()]);
    let metrics = "runs/tiny/latest/metrics.jsonl";
    wait_for("steps", || (node.lines(metrics).len() > 20).then_some(()));
    let daemon = node.daemon().pid();
    let own = std::process::id();
    println!("                               step ms  daemon CPU %  callers' CPU %  answers/s");
    for (what, rate, followers) in [
        ("training alone", 0, 0),
        ("100 followers", 0, 100),
        ("100 followers, 1,000 queries/s", rate / 10, 100),
        ("100 followers, all queries", rate, 100),
        ("training alone again", 0, 0),
    ] {
        let callers = Callers::start(&node.socket(), job, rate, followers).await;
        let (steps, begun) = (node.lines(metrics).len(), Instant::now());
        let (daemon_before, own_before) = (held(daemon).cpu_seconds, held(own).cpu_seconds);
        sleep(Duration::from_secs(10)).await;
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "{what:<30} {:>7.2}  {:>12.1}  {:>14.1}  {:>9.0}",
            seconds * 1e3 / (node.lines(metrics).len() - steps) as f64,
            (held(daemon).cpu_seconds - daemon_before) / seconds * 100.0,
            (held(own).cpu_seconds - own_before) / seconds * 100.0,
            callers.answered() as f64 / seconds,
        );
        drop(callers);
        sleep(Duration::from_millis(500)).await;
    }
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}

/// Calls a daemon that runs, for so many seconds: tests/gpu/daemon.py looks at its job meanwhile.
async fn callers(socket: &Path, job: u64, rate: usize, followers: usize, seconds: u64) {
    let callers = Callers::start(socket, job, rate, followers).await;
    sleep(Duration::from_secs(seconds)).await;
    println!("{:.0} answers/s", callers.answered() as f64 / callers.begun.elapsed().as_secs_f64());
}

/// Who ask about the node at this rate, and who follow the logs of a job, until this is dropped.
struct Callers {
    _tasks: JoinSet<()>,
    answers: Arc<AtomicUsize>,
    begun: Instant,
}

impl Callers {
    async fn start(socket: &Path, job: u64, rate: usize, followers: usize) -> Self {
        let mut tasks = JoinSet::new();
        let mut shared = None;
        for number in 0..followers {
            // 25 share a connection.
            if number % 25 == 0 {
                shared = Some(connect(socket).await);
            }
            let mut client = shared.clone().unwrap();
            let logs = LogsRequest { stream: 2, follow: true, ..Default::default() };
            tasks.spawn(async move {
                let request = JobLogsRequest { job, logs: Some(logs) };
                let mut pieces = client.logs(request).await.unwrap().into_inner();
                while let Ok(Some(_)) = pieces.message().await {}
            });
        }
        let (answers, begun) = (Arc::new(AtomicUsize::new(0)), Instant::now());
        for _ in 0..if rate > 0 { 16 } else { 0 } {
            let (mut client, answers) = (connect(socket).await, answers.clone());
            tasks.spawn(async move {
                loop {
                    let due = (begun.elapsed().as_secs_f64() * rate as f64) as usize;
                    if answers.load(Ordering::Relaxed) >= due {
                        sleep(Duration::from_millis(1)).await;
                        continue;
                    }
                    client.status(NodeStatusRequest {}).await.unwrap();
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { _tasks: tasks, answers, begun }
    }

    /// Questions answered so far.
    fn answered(&self) -> usize {
        self.answers.load(Ordering::Relaxed)
    }
}

async fn slow() {
    let node = Node::new("");
    std::os::unix::fs::chown(node.socket(), Some(NOBODY), None).unwrap();
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let mut client = connect(&node.socket()).await;
    println!("                     Get, ms: median  99th  longest  daemon RSS KiB  descriptors");
    for (what, callers) in [("nobody else", 0), ("1,000 bad callers", 1000)] {
        let bad = (callers > 0).then(|| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.arg("bad-callers").arg(node.socket()).arg(callers.to_string());
            Running::start(command.uid(NOBODY).gid(NOBODY).current_dir("/"))
        });
        let mut times = Vec::new();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(10) {
            let asked = Instant::now();
            client.get(GetRequest { job }).await.unwrap();
            times.push(asked.elapsed().as_secs_f64() * 1e3);
            sleep(Duration::from_millis(2)).await;
        }
        times.sort_by(f64::total_cmp);
        let held = held(node.daemon().pid());
        println!(
            "{what:<20} {:>15.2} {:>5.2}  {:>7.2}  {:>14}  {:>11}",
            times[times.len() / 2],
            times[times.len() * 99 / 100],
            times[times.len() - 1],
            held.resident_kib,
            held.descriptors
        );
        drop(bad);
    }
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}

/// Keeps so many connections: silent, of nonsense, or with a call that never comes to its end; those that are closed are made
/// again.
fn bad_callers(socket: &Path, count: usize) {
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut open = std::collections::VecDeque::new();
    for number in 0.. {
        if open.len() == count {
            open.pop_front();
            std::thread::sleep(Duration::from_millis(1));
        }
        let Ok(mut stream) = Socket::connect(socket) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        // It may be closed already.
        let _ = match number % 4 {
            0 => Ok(()),
            1 => stream.write_all(&[0xa5; 300]),
            2 => stream.write_all(&preface[..16]),
            _ => stream.write_all(preface),
        };
        open.push_back(stream);
    }
}

async fn idle() {
    let node = Node::new("");
    sleep(Duration::from_secs(2)).await;
    let before = held(node.daemon().pid());
    sleep(Duration::from_secs(20)).await;
    let after = held(node.daemon().pid());
    println!(
        "idle: RSS {} KiB, {} descriptors, {} threads, {:.2} s of CPU in 20 s",
        after.resident_kib,
        after.descriptors,
        after.threads,
        after.cpu_seconds - before.cpu_seconds
    );
}

async fn recovery() {
    let mut node = Node::new("");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let mut times = Vec::new();
    for _ in 0..20 {
        let killed = Instant::now();
        node.kill_and_start();
        let mut client = connect(&node.socket()).await;
        loop {
            let job = client.get(GetRequest { job }).await.unwrap().into_inner();
            if job.state() == NodeJobState::Running && job.status.is_some() {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
        times.push(killed.elapsed().as_secs_f64() * 1e3);
        // Between two questions to the agent, at another moment each time.
        sleep(Duration::from_millis(137)).await;
    }
    times.sort_by(f64::total_cmp);
    println!("SIGKILL to the adopted job's status: median {:.0} ms, longest {:.0} ms", times[10], times[19]);
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
}
