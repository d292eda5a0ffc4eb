//! The daemon killed at every call by which it changes what is on disk, and with no room on it: nothing that was answered
//! is lost, and nothing happens twice.
//!
//! `strace` tells of each such call before it is made, and holds it up for a moment, in which the daemon is killed.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};
use xlaunch_proto::command::{CommandSpec, Program};
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::submit_request::Work;
use xlaunch_proto::v1::{
    CancelRequest, DrainRequest, GetRequest, Job, ListRequest, NodeJobState, SubmitReply,
    SubmitRequest,
};
use xlaunch_tests::{DEADLINE, Node, Running, alive, wait_for};

/// Calls that change what is on disk.
const CALLS: &str = "fsync,fdatasync,/^rename,/^unlink,ftruncate";
/// Runs at a time: each waits for most of its time.
const RUNS: usize = 4;

/// A node and a connection with its daemon, whichever that is.
struct Case {
    node: Node,
    runtime: Runtime,
    client: Option<NodeClient<Channel>>,
    /// The daemon that is to be killed, until another takes its place.
    traced: Option<Traced>,
}

struct Traced {
    daemon: Running,
    calls: PathBuf,
    /// Of these, the one before which it is killed.
    kill_at: usize,
}

impl Case {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { node: Node::new(""), runtime, client: None, traced: None }
    }

    /// With a daemon that has nothing yet, and is killed before this one of its calls.
    fn killed_at(kill_at: usize) -> Self {
        let mut case = Self::new();
        case.node.end(Signal::TERM);
        std::fs::remove_dir_all(case.node.state()).unwrap();
        let calls = case.node.path().join("calls");
        let daemon = case.node.command();
        let mut strace = Command::new("strace");
        // -D: the daemon itself is our child. Agents are followed, too, but told apart below.
        strace.args(["-D", "-f", "-qq", "-e", "signal=none", "-e"]).arg(format!("trace={CALLS}"));
        strace.arg("-e").arg(format!("inject={CALLS}:delay_enter=8000")).arg("-o").arg(&calls);
        strace.arg("--").arg(daemon.get_program()).args(daemon.get_args()).current_dir("/");
        let daemon = Running::start(&mut strace);
        case.traced = Some(Traced { daemon, calls, kill_at });
        case
    }

    /// Calls until one is answered; where the daemon is gone, the next daemon.
    fn call<T>(&mut self, call: impl AsyncFn(&mut NodeClient<Channel>) -> Result<T, Status>) -> T {
        wait_for("an answer", || {
            if let Some(traced) = &mut self.traced
                && !traced.runs()
            {
                (self.traced, self.client) = (None, None);
                self.node.start();
            }
            if self.client.is_none() {
                self.client = self.runtime.block_on(connect(self.node.socket())).map(NodeClient::new);
            }
            let client = self.client.as_mut()?;
            let answer = self.runtime.block_on(async {
                tokio::select! {
                    answer = call(client) => Some(answer),
                    () = killed(self.traced.as_mut()) => None,
                }
            })?;
            match answer {
                Ok(answer) => Some(answer),
                Err(error) if is_lost(error.code()) => {
                    self.client = None;
                    None
                }
                Err(error) => panic!("{error}"),
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
        let since = std::time::Instant::now();
        loop {
            let job = self.get(job);
            if job.state() == state {
                return;
            }
            assert!(!is_over(&job) && since.elapsed() < DEADLINE, "{job:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn all(&mut self) -> Vec<(u64, NodeJobState)> {
        let request = ListRequest { ended: true, limit: 0 };
        let list = self.call(async |client| Ok(client.list(request).await?.into_inner()));
        list.jobs.iter().map(|job| (job.id, job.state())).collect()
    }
}

/// Whether a call ended so because its connection broke.
fn is_lost(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
}

fn is_over(job: &Job) -> bool {
    use NodeJobState::{Cancelled, Done, Failed, Lost};
    matches!(job.state(), Cancelled | Done | Failed | Lost)
}

impl Traced {
    /// Whether it runs still: it is killed here when its time has come.
    fn runs(&mut self) -> bool {
        let pid = self.daemon.pid();
        let text = std::fs::read_to_string(&self.calls).unwrap_or_default();
        if self.daemon.runs() && calls_of(pid, &text) >= self.kill_at {
            kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
            wait_for("its end", || (!alive(pid)).then_some(()));
        }
        self.daemon.runs()
    }
}

/// Calls that threads of this process have begun: lines `PID call(...`, or continued, `PID <... call resumed>`.
fn calls_of(pid: u32, text: &str) -> usize {
    let is_thread = |line: &&str| {
        let tid = line.split_whitespace().next().unwrap_or_default();
        tid.parse() == Ok(pid) || PathBuf::from(format!("/proc/{pid}/task/{tid}")).exists()
    };
    let begun = text.lines().filter(|line| !line.contains("<... ") && line.contains('('));
    begun.filter(is_thread).count()
}

/// Ends when the daemon that is to be killed has been.
async fn killed(traced: Option<&mut Traced>) {
    let Some(traced) = traced else { return std::future::pending().await };
    while traced.runs() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn connect(socket: PathBuf) -> Option<Channel> {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://daemon").connect_with_connector(connector).await.ok()
}

/// Whether processes can be traced here.
fn can_trace() -> bool {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "inject=fsync:delay_enter=1", "true"]);
    strace.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    strace.status().is_ok_and(|status| status.success())
}

/// The scenario, with a daemon that is killed before this one of its calls; `false` if it makes fewer.
fn survives(kill_at: usize) -> bool {
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
    let cancelled = case.call(async |client| Ok(client.cancel(CancelRequest { job: 3 }).await?.into_inner()));
    assert_eq!(cancelled.state(), Cancelled, "{cancelled:?}");
    case.drain(true);
    for (id, job) in &ids[..2] {
        case.wait(*job, Done);
        assert_eq!(case.node.lines("ran").iter().filter(|line| *line == id).count(), 1);
    }
    let was_killed = case.traced.is_none();
    if was_killed {
        case.node.end(Signal::KILL);
        case.client = None;
        case.node.start();
    } else if let Some(Traced { daemon, .. }) = case.traced.take() {
        daemon.signal(Signal::KILL);
        drop(daemon);
        case.client = None;
        case.node.start();
    }
    for (id, job) in &ids {
        let reply = case.submit(id, "echo again >> ran");
        assert_eq!((reply.job.unwrap().id, reply.repeated), (*job, true));
    }
    assert_eq!(case.all(), [(3, Cancelled), (2, Done), (1, Done)]);
    let mut ran = case.node.lines("ran");
    ran.sort();
    assert_eq!(ran, ["first", "second"]);
    was_killed
}

#[test]
fn a_daemon_that_is_killed_at_any_change_on_disk_loses_nothing_and_does_nothing_twice() {
    if !can_trace() {
        eprintln!("skipped: strace is missing, or may not trace here");
        return;
    }
    let (next, last) = (AtomicUsize::new(1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..RUNS {
            scope.spawn(|| {
                while !last.load(Ordering::Relaxed) {
                    let kill_at = next.fetch_add(1, Ordering::Relaxed);
                    let was_killed = std::panic::catch_unwind(|| survives(kill_at));
                    match was_killed {
                        Ok(was_killed) => drop(last.fetch_or(!was_killed, Ordering::Relaxed)),
                        Err(_) => panic!("killed at call {kill_at}"),
                    }
                }
            });
        }
    });
    let calls = next.load(Ordering::Relaxed) - RUNS;
    // Three submissions, a cancellation, two drains, two starts and two ends: each is in the journal.
    assert!(calls > 30, "{calls}");
}

#[test]
fn whoever_has_submitted_a_job_finds_it() {
    let mut case = Case::new();
    for number in 0..50 {
        let job = case.submit(&number.to_string(), "true").job.unwrap().id;
        assert_eq!(case.get(job).id, job);
    }
}

#[test]
fn a_request_that_is_sent_again_adds_no_second_job() {
    let mut case = Case::new();
    let mut ids = ["a", "b", "a"].map(|id| case.submit(id, "true"));
    assert_eq!(ids.each_ref().map(|reply| reply.repeated), [false, false, true]);
    assert_eq!(ids.each_mut().map(|reply| reply.job.take().unwrap().id), [1, 2, 1]);
    case.node.kill_and_start();
    case.client = None;
    assert_eq!(case.submit("b", "true").job.unwrap().id, 2);
    assert_eq!(case.all().len(), 2);
}

/// A node whose state is on a small disk of its own, which the daemon and its agents alone see.
struct Small {
    node: Node,
    /// Holds the disk.
    holder: Running,
}

impl Small {
    /// `None` where nothing can be mounted.
    fn new() -> Option<Self> {
        let mut node = Node::new("");
        node.end(Signal::TERM);
        let mut holder = Command::new("unshare");
        let mount = "mount -t tmpfs -o size=1m,mode=711 none \"$0\" && echo mounted >&2 && exec sleep 1000";
        let holder = Running::start(holder.args(["-m", "sh", "-c", mount]).arg(node.state()));
        let mut small = Self { node, holder };
        let mounted = wait_for("a disk", || {
            let runs = small.holder.runs();
            (small.holder.stderr().contains("mounted") || !runs).then_some(runs)
        });
        mounted.then_some(small)
    }

    fn start(&self) -> Running {
        let daemon = self.node.command();
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &self.holder.pid().to_string(), "--"]);
        let mut daemon =
            Running::start(command.arg(daemon.get_program()).args(daemon.get_args()).current_dir("/"));
        wait_for("the daemon", || {
            assert!(daemon.runs(), "{}", daemon.stderr());
            daemon.stderr().contains("listening on").then_some(())
        });
        daemon
    }

    /// The state, seen from here.
    fn state(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.pid()));
        root.join(self.node.state().strip_prefix("/").unwrap())
    }

    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.state().join("filler")).unwrap();
        while file.write_all(&[0; 512]).is_ok() {}
    }

    fn free(&self) {
        let _ = std::fs::remove_file(self.state().join("filler"));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Agents that wait for room end.
        self.free();
    }
}

#[test]
fn a_full_disk_keeps_jobs_out_and_loses_none() {
    let Some(small) = Small::new() else {
        eprintln!("skipped: a disk of its own takes root, and namespaces");
        return;
    };
    let (node, daemon) = (&small.node, small.start());
    let runs = node.submit_shell("while ! [ -e go ]; do sleep 0.05; done; seq 100000; touch over; exit 3");
    node.wait(runs, "running");
    assert_eq!(node.run(&["drain"]).code, 0);
    let waits = node.submit_shell("echo ran >> ran");
    small.fill();
    let refused = || {
        let run = node.run(&["submit", "--", "true"]);
        assert!(run.code != 0 && run.stderr.contains("No space left on device"), "{}", run.stderr);
    };
    refused();
    node.write("go", "");
    wait_for("the end of its work", || node.path().join("over").exists().then_some(()));
    refused();
    // The next daemon finds the disk full, too.
    daemon.signal(Signal::KILL);
    daemon.finish();
    let daemon = small.start();
    node.run(&["drain", "--undo"]);
    for _ in 0..20 {
        let states = [runs, waits].map(|job| node.job(job)["state"].clone());
        assert!(["starting", "running"].iter().any(|state| states[0] == *state), "{states:?}");
        assert!(["queued", "starting", "running", "done"].iter().any(|s| states[1] == *s), "{states:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    small.free();
    assert_eq!(node.wait(runs, "failed")["exit_code"], 1);
    assert_eq!(node.run(&["drain", "--undo"]).code, 0);
    node.wait(waits, "done");
    let next = node.submit_shell("echo ran >> ran");
    node.wait(next, "done");
    assert_eq!(node.lines("ran").len(), 2);
    daemon.signal(Signal::KILL);
    daemon.finish();
    let daemon = small.start();
    let states = [runs, waits, next].map(|job| node.job(job)["state"].clone());
    assert_eq!(states, ["failed", "done", "done"]);
    drop(daemon);
}
