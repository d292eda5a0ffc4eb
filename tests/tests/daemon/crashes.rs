//! The daemon is killed before each system call that changes its disk. Nothing that it has acknowledged may be lost,
//! and nothing may be done twice.
//!
//! `strace` reports each such call before it happens, and delays it long enough to kill the daemon.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Status};
use xlaunch_proto::connect::{connect, endpoint};
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::submit_request::Work;
use xlaunch_proto::v1::{
    CancelRequest, DrainRequest, GetRequest, Job, ListRequest, NodeJobState, SubmitReply, SubmitRequest,
};
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_tests::{HANG_TIMEOUT, Node, Process, is_alive, requirements, send_signal, wait_for};

xlaunch_harness::tests! {
    acknowledged_job_is_found_at_once,
    repeated_request_id_adds_no_second_job;
    needs requirements::strace:
    daemon_killed_at_any_disk_write_loses_nothing_and_repeats_nothing;
}

/// System calls that make a change durable or visible, in the syntax of `strace`.
const DISK_CALLS: &str = "fsync,fdatasync,/^rename,/^unlink,ftruncate";
/// Number of scenarios that run concurrently. Each one sleeps most of the time.
const CONCURRENCY: usize = 4;

/// A node and a client of its daemon, which reconnects when the daemon has been replaced.
struct Case {
    node: Node,
    runtime: Runtime,
    client: Option<NodeClient<Channel>>,
    /// The first daemon, which will be killed.
    traced: Option<TracedDaemon>,
}

struct TracedDaemon {
    daemon: Process,
    strace_log: PathBuf,
    /// Number of the call, from 1, before which the daemon is killed.
    kill_at: usize,
}

impl Case {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { node: Node::new(""), runtime, client: None, traced: None }
    }

    /// Starts a daemon without state, which is killed before this call.
    fn killed_at(kill_at: usize) -> Self {
        let mut case = Self::new();
        case.node.stop_daemon(Signal::TERM);
        std::fs::remove_dir_all(case.node.state_dir()).unwrap();
        let strace_log = case.node.path().join("calls");
        let daemon = case.node.daemon_command();
        let mut strace = Command::new("strace");
        // -D makes the daemon, not strace, our child. -f also follows agents; `calls_of` tells them apart.
        strace.args(["-D", "-f", "-qq", "-e", "signal=none", "-e"]).arg(format!("trace={DISK_CALLS}"));
        strace.arg("-e").arg(format!("inject={DISK_CALLS}:delay_enter=8000")).arg("-o").arg(&strace_log);
        strace.arg("--").arg(daemon.get_program()).args(daemon.get_args()).current_dir("/");
        case.traced = Some(TracedDaemon { daemon: Process::spawn(&mut strace), strace_log, kill_at });
        case
    }

    /// Repeats a call until there is a reply, from the next daemon if this one was killed.
    fn call<T>(&mut self, call: impl AsyncFn(&mut NodeClient<Channel>) -> Result<T, Status>) -> T {
        wait_for("a reply", || {
            if let Some(traced) = &mut self.traced
                && !traced.is_running()
            {
                (self.traced, self.client) = (None, None);
                self.node.start_daemon();
            }
            if self.client.is_none() {
                let channel = self.runtime.block_on(connect(&self.node.socket(), endpoint()));
                self.client = channel.ok().map(NodeClient::new);
            }
            let client = self.client.as_mut()?;
            let reply = self.runtime.block_on(async {
                tokio::select! {
                    reply = call(client) => Some(reply),
                    () = killed(self.traced.as_mut()) => None,
                }
            })?;
            match reply {
                Ok(reply) => Some(reply),
                Err(status) if is_connection_error(status.code()) => {
                    self.client = None;
                    None
                }
                Err(status) => panic!("{status}"),
            }
        })
    }

    fn submit(&mut self, id: &str, script: &str) -> SubmitReply {
        let spec = CommandSpec::new(Program::Binary("sh".into()), vec!["-c".into(), script.into()]);
        let request = SubmitRequest {
            request_id: id.into(),
            version: xlaunch_proto::VERSION.into(),
            work_dir: self.node.path().display().to_string(),
            environment: vec![b"PATH=/usr/local/bin:/usr/bin:/bin".to_vec()],
            work: Some(Work::CommandSpecJson(spec.to_json())),
            ..Default::default()
        };
        self.call(async |client| Ok(client.submit(request.clone()).await?.into_inner()))
    }

    fn drain(&mut self, undo: bool) {
        let request = DrainRequest { undo, reason: "new fans".into(), ..Default::default() };
        let drained = self.call(async |client| Ok(client.drain(request.clone()).await?.into_inner().drained));
        assert_eq!(drained.is_empty(), undo, "{drained}");
    }

    fn get(&mut self, job: u64) -> Job {
        self.call(async |client| Ok(client.get(GetRequest { job }).await?.into_inner()))
    }

    fn wait(&mut self, job: u64, state: NodeJobState) {
        let since = Instant::now();
        loop {
            let job = self.get(job);
            if job.state() == state {
                return;
            }
            assert!(!is_finished(&job) && since.elapsed() < HANG_TIMEOUT, "{job:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns numbers and states of all jobs, newest first.
    fn jobs(&mut self) -> Vec<(u64, NodeJobState)> {
        let request = ListRequest { ended: true, ..ListRequest::default() };
        let list = self.call(async |client| Ok(client.list(request).await?.into_inner()));
        list.jobs.iter().map(|job| (job.id, job.state())).collect()
    }
}

fn is_connection_error(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
}

fn is_finished(job: &Job) -> bool {
    use NodeJobState::{Cancelled, Done, Failed, Lost};
    matches!(job.state(), Cancelled | Done | Failed | Lost)
}

impl TracedDaemon {
    /// Kills the daemon if it has reached the call. Returns whether it is still running.
    fn is_running(&mut self) -> bool {
        let pid = self.daemon.pid();
        let log = std::fs::read_to_string(&self.strace_log).unwrap_or_default();
        if self.daemon.is_running() && calls_of(pid, &log) >= self.kill_at {
            send_signal(pid, Signal::KILL);
            wait_for("the daemon to be killed", || (!is_alive(pid)).then_some(()));
        }
        self.daemon.is_running()
    }
}

/// Counts the calls that threads of this process have begun. Lines of the log are `TID call(...`; `TID <... call
/// resumed>` ends an earlier one.
fn calls_of(pid: u32, log: &str) -> usize {
    let is_thread = |line: &&str| {
        let tid = line.split_whitespace().next().unwrap_or_default();
        tid.parse() == Ok(pid) || PathBuf::from(format!("/proc/{pid}/task/{tid}")).exists()
    };
    let begun = log.lines().filter(|line| !line.contains("<... ") && line.contains('('));
    begun.filter(is_thread).count()
}

/// Completes when the daemon has been killed.
async fn killed(traced: Option<&mut TracedDaemon>) {
    let Some(traced) = traced else { return std::future::pending().await };
    while traced.is_running() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs the scenario with a daemon that is killed before this call. Returns `false` if it makes fewer calls.
fn survives_kill_at(kill_at: usize) -> bool {
    use NodeJobState::{Cancelled, Done};
    let mut case = Case::killed_at(kill_at);
    let mut ids = Vec::new();
    let mut submit = |case: &mut Case, id: &str| {
        let reply = case.submit(id, &format!("echo {id} >> ran"));
        ids.push((id.to_owned(), reply.job.unwrap().id));
    };
    submit(&mut case, "first");
    case.drain(false);
    submit(&mut case, "second");
    submit(&mut case, "third");
    let cancelled = case
        .call(async |client| Ok(client.cancel(CancelRequest { job: 3, force: false }).await?.into_inner()));
    assert_eq!(cancelled.state(), Cancelled, "{cancelled:?}");
    case.drain(true);
    for (id, job) in &ids[..2] {
        case.wait(*job, Done);
        assert_eq!(case.node.lines("ran").iter().filter(|line| *line == id).count(), 1);
    }
    let was_killed = match case.traced.take() {
        None => {
            case.node.stop_daemon(Signal::KILL);
            true
        }
        Some(TracedDaemon { daemon, .. }) => {
            daemon.signal(Signal::KILL);
            daemon.wait();
            false
        }
    };
    case.client = None;
    case.node.start_daemon();
    for (id, job) in &ids {
        let reply = case.submit(id, "echo again >> ran");
        assert_eq!((reply.job.unwrap().id, reply.repeated), (*job, true));
    }
    assert_eq!(case.jobs(), [(3, Cancelled), (2, Done), (1, Done)]);
    let mut ran = case.node.lines("ran");
    ran.sort();
    assert_eq!(ran, ["first", "second"]);
    was_killed
}

fn daemon_killed_at_any_disk_write_loses_nothing_and_repeats_nothing() {
    let (next, last) = (AtomicUsize::new(1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENCY {
            scope.spawn(|| {
                while !last.load(Ordering::Relaxed) {
                    let kill_at = next.fetch_add(1, Ordering::Relaxed);
                    let was_killed = std::panic::catch_unwind(|| survives_kill_at(kill_at));
                    match was_killed {
                        Ok(was_killed) => drop(last.fetch_or(!was_killed, Ordering::Relaxed)),
                        Err(_) => panic!("killed at call {kill_at}"),
                    }
                }
            });
        }
    });
    let calls = next.load(Ordering::Relaxed) - CONCURRENCY;
    // Three submissions, a cancellation, two drains, two starts and two ends: each one is in the journal.
    assert!(calls > 30, "{calls}");
}

fn acknowledged_job_is_found_at_once() {
    let mut case = Case::new();
    for number in 0..50 {
        let job = case.submit(&number.to_string(), "true").job.unwrap().id;
        assert_eq!(case.get(job).id, job);
    }
}

fn repeated_request_id_adds_no_second_job() {
    let mut case = Case::new();
    let mut replies = ["a", "b", "a"].map(|id| case.submit(id, "true"));
    assert_eq!(replies.each_ref().map(|reply| reply.repeated), [false, false, true]);
    assert_eq!(replies.each_mut().map(|reply| reply.job.take().unwrap().id), [1, 2, 1]);
    case.node.kill_and_restart_daemon();
    case.client = None;
    assert_eq!(case.submit("b", "true").job.unwrap().id, 2);
    assert_eq!(case.jobs().len(), 2);
}
