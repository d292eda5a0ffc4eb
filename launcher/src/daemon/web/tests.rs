//! A made-up node, asked through real sockets.

use std::process::Stdio;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use xlaunch_proto::v1::{
    Gpu, GpuState, Job, JobKind, JobState, NodeJobState, NodeStatus, Progress, RankState, RankStatus,
    Restart, StatusReply, StepTimes, Totals,
};

use super::*;
use crate::clock::unix_ms;
use crate::daemon::view::{JobView, NodeView};

const HANGS: Duration = Duration::from_secs(60);
/// What a user may name a job.
const HOSTILE: &str = "<img src=x onerror=alert(1)>\"\n}\\ xlaunch_up 1 \u{202e}\r\t'";

fn gpu_uuid(index: u32) -> String {
    format!("GPU-5a1e{index:04}-77d0-4c3f-9b52-0d3f5f1e2a00")
}

fn rank(rank: u32, step: u64) -> RankStatus {
    RankStatus {
        rank,
        local_rank: rank,
        pid: 31_400 + rank,
        state: RankState::Running.into(),
        device_uuid: gpu_uuid(rank),
        step,
        seconds_since_heartbeat: 0.4,
        pool_live_bytes: 3_100_000_000,
        pool_mapped_bytes: 3_600_000_000,
        pool_peak_bytes: 3_650_000_000,
        pool_fragmentation: 0.03,
        seconds_since_output: Some(1.5),
        cpu_percent: Some(101.5),
        memory_bytes: Some(2_400_000_000),
        gpu_percent: Some(97.0),
        gpu_memory_bytes: Some(4_400_000_000),
        ..Default::default()
    }
}

/// A curve such as training gives, ending now.
fn history(steps: u64, now: u64) -> Vec<Progress> {
    let every = (steps / 400).max(1);
    let points = (0..steps / every).map(|point| {
        let step = (point + 1) * every;
        #[expect(clippy::cast_precision_loss, reason = "a made-up curve")]
        let x = step as f32;
        Progress {
            unix_ms: now - (steps - step) * 120,
            step,
            loss: 1.3 + 4.2 / (1.0 + x / 90.0) + 0.06 * (x * 0.7).sin() * (x * 0.013).cos(),
            tokens_per_second: 4.2e6 * f64::from(1.0 - 0.9 / (1.0 + x / 4.0) + 0.01 * (x * 0.31).sin()),
        }
    });
    points.collect()
}

fn job(id: u64, name: &str, state: NodeJobState) -> JobView {
    let job = Job {
        id,
        name: name.into(),
        uid: 1000 + u32::try_from(id % 3).unwrap(),
        user: ["ada", "grace", ""][usize::try_from(id % 3).unwrap()].into(),
        kind: JobKind::Command.into(),
        state: state.into(),
        gpus_wanted: 2,
        command_line: format!("xlaunch --nproc-per-node 2 {name}.py --lr 3e-4"),
        work_dir: "/home/ada/work".into(),
        submitted_unix_ms: 1_795_000_000_000,
        ..Default::default()
    };
    JobView { job, ..Default::default() }
}

/// A node with jobs in all states at `now`; job 7 has trained `steps` of 2000.
fn made_up(now: u64, steps: u64) -> NodeView {
    let gpu = |index: u32, state: GpuState, job| Gpu {
        index,
        uuid: gpu_uuid(index),
        name: "NVIDIA H200".into(),
        state: state.into(),
        job,
        busy_percent: Some(if job == 0 { 0.0 } else { 97.0 }),
        memory_used_bytes: Some(if job == 0 { 600_000_000 } else { 5_000_000_000 }),
        memory_bytes: Some(150_754_820_096),
        power_watts: Some(if job == 0 { 76.2 } else { 641.7 }),
        temperature_celsius: Some(if job == 0 { 31.0 } else { 58.0 }),
        ..Default::default()
    };
    let mut gpus: Vec<_> = (0..4).map(|index| gpu(index, GpuState::Held, 7)).collect();
    gpus.push(gpu(4, GpuState::Free, 0));
    for (state, reason) in [
        (GpuState::Drained, "drained by root: fan is being replaced"),
        (GpuState::Sick, "Xid 79: the GPU has fallen off the bus"),
        (GpuState::Foreign, "used by process 4711 (python)"),
    ] {
        let index = u32::try_from(gpus.len()).unwrap();
        gpus.push(Gpu { reason: reason.into(), ..gpu(index, state, 0) });
    }

    let history = history(steps, now);
    let last = history.last().copied().unwrap_or_default();
    let mut training = job(7, "llama-28m", NodeJobState::Running);
    training.job.kind = JobKind::Trainer.into();
    training.job.command_line += HOSTILE;
    training.job.gpus = (0..4).map(gpu_uuid).collect();
    training.job.gpus_wanted = 4;
    training.job.started_unix_ms = now - steps * 120 - 5_000;
    let mut ranks: Vec<_> = (0..4).map(|number| rank(number, steps)).collect();
    ranks[3].hint = "silent for 312 s, no CPU".into();
    ranks[3].seconds_since_output = Some(312.0);
    ranks[3].cpu_percent = Some(0.0);
    let status = StatusReply {
        job_id: "20261121-083242".into(),
        job_name: "llama-28m".into(),
        state: JobState::Running.into(),
        kind: JobKind::Trainer.into(),
        world_size: 4,
        ranks,
        step: steps,
        total_steps: 2000,
        loss: last.loss,
        tokens_per_second: last.tokens_per_second,
        reason: "rank 2: signal 9 (SIGKILL: killed, perhaps for lack of memory); restarting (1 of 3)".into(),
        totals: Some(Totals {
            tokens: steps * 32_768,
            all_reduce_bytes: steps * 133_800_000,
            step_seconds: 0.12 * f64::from(u32::try_from(steps).unwrap()),
            steps: vec![
                StepTimes { seconds: 0.1, steps: 0 },
                StepTimes { seconds: 0.25, steps },
                StepTimes { seconds: f64::INFINITY, steps: 0 },
            ],
        }),
        past_restarts: vec![Restart {
            unix_ms: now - 45_000,
            attempt: 0,
            rank: Some(2),
            cause: "signal 9 (SIGKILL: killed, perhaps for lack of memory)".into(),
        }],
        attempt: 1,
        restarts: 1,
        max_restarts: 3,
        host: "node-17".into(),
        launcher_pid: 31_399,
        ..Default::default()
    };
    training.status = Some((Arc::new(status), Instant::now()));
    training.history = history.into();

    let mut diverged = job(6, "gpt2-124m", NodeJobState::Failed);
    diverged.job.kind = JobKind::Trainer.into();
    diverged.job.started_unix_ms = now - 1_900_000;
    diverged.job.ended_unix_ms = now - 600_000;
    diverged.job.exit_code = Some(1);
    diverged.job.reason = "a worker failed: exit code 1".into();
    diverged.job.report = "rank 2 of 4 failed first: exit code 1\n  the loss is not finite at step 412\n  \
                           what to do: lower train.lr, or turn on train.clip\n"
        .into();
    let status = StatusReply {
        kind: JobKind::Trainer.into(),
        state: JobState::Failed.into(),
        step: 412,
        total_steps: 1000,
        loss: f32::NAN,
        ..Default::default()
    };
    diverged.status = Some((Arc::new(status), Instant::now()));
    diverged.history = (1..=412)
        .map(|step| Progress {
            unix_ms: now - 1_900_000 + step * 1000,
            step,
            loss: if step > 405 { f32::NAN } else { 8.0 / f32::from(u16::try_from(step).unwrap()).sqrt() },
            tokens_per_second: 5.1e5,
        })
        .collect();

    let mut waiting = job(8, "eval", NodeJobState::Queued);
    waiting.job.queue_position = 1;
    waiting.job.reason = "waits for 2 GPUs: 1 is free".into();
    let mut hostile = job(9, HOSTILE, NodeJobState::Queued);
    hostile.job.queue_position = 2;
    hostile.job.reason = HOSTILE.repeat(200);
    let mut lost = job(3, "sweep-3", NodeJobState::Lost);
    lost.job.reason = "the node was started again".into();
    lost.job.started_unix_ms = now - 90_000_000;
    lost.job.ended_unix_ms = now - 86_400_000;
    let mut done = job(5, "tokenize", NodeJobState::Done);
    done.job.exit_code = Some(0);
    done.job.started_unix_ms = now - 9_000_000;
    done.job.ended_unix_ms = now - 1_800_000;
    let cancelled = job(4, "sweep-4", NodeJobState::Cancelled);

    let jobs = [training, diverged, waiting, hostile, lost, done, cancelled];
    NodeView {
        node: NodeStatus {
            host: "node-17".into(),
            version: "0.1.0".into(),
            daemon_pid: 812,
            started_unix_seconds: now / 1000 - 200_000,
            drained: String::new(),
            gpus,
            cores: 192,
            jobs_queued: 2,
            jobs_running: 1,
            jobs_ended: 4,
            gpu_problem: String::new(),
        },
        jobs: jobs.into_iter().map(|job| (job.job.id, Arc::new(job))).collect(),
    }
}

/// A page of the made-up node, until it is dropped.
struct Served {
    address: String,
    view: watch::Sender<Arc<NodeView>>,
    _orders: mpsc::Receiver<crate::daemon::orders::Order>,
    _ended: oneshot::Sender<()>,
}

impl Served {
    async fn new() -> Self {
        Self::on(Listen::Tcp(([127, 0, 0, 1], 0).into())).await
    }

    async fn on(listen: Listen) -> Self {
        let listener = Listener::bind(&listen).await.unwrap();
        let address = match (&listener, &listen) {
            (Listener::Tcp(listener), _) => listener.local_addr().unwrap().to_string(),
            (_, Listen::Unix(path)) => path.to_str().unwrap().to_string(),
            _ => unreachable!(),
        };
        let (orders, orders_end) = mpsc::channel(1);
        let (view, seen) = watch::channel(Arc::new(made_up(unix_ms(), 800)));
        let (ended, end) = oneshot::channel::<()>();
        let logs: LogTail = Arc::new(|job, rank, stderr, lines| {
            Box::pin(async move {
                if rank == 13 {
                    return Err("rank 13 has no log".into());
                }
                let stream = if stderr { "stderr" } else { "stdout" };
                Ok((1..=lines)
                    .map(|line| format!("{stream} of job {job}, rank {rank}: line {line} <b>"))
                    .collect())
            })
        });
        tokio::spawn(serve_on(listener, Node::new(orders, seen), logs, async {
            let _ = end.await;
        }));
        Self { address, view, _orders: orders_end, _ended: ended }
    }

    async fn connect(&self) -> Box<dyn listen::Stream> {
        match self.address.starts_with('/') {
            true => Box::new(UnixStream::connect(&self.address).await.unwrap()),
            false => Box::new(TcpStream::connect(&self.address).await.unwrap()),
        }
    }

    /// The whole answer to these bytes, which ask for the end of the connection.
    async fn ask(&self, request: &str) -> Answer {
        let exchange = async {
            let mut stream = self.connect().await;
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            String::from_utf8(answer).unwrap()
        };
        let text = tokio::time::timeout(HANGS, exchange).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?} to {request:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: body.into() }
    }

    async fn get(&self, path: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).await
    }

    async fn json(&self, path: &str) -> Value {
        let answer = self.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        serde_json::from_str(&answer.body).unwrap()
    }
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

#[tokio::test]
async fn the_node_and_its_jobs_are_shown_as_json() {
    let served = Served::new().await;
    let node = served.json("/api/v1/node").await;
    assert_eq!(node["node"]["host"], "node-17");
    let gpus = &node["node"]["gpus"];
    assert_eq!(gpus[6]["state"], "sick");
    assert_eq!((&gpus[0]["job"], &gpus[4]["job"]), (&json!(7), &Value::Null));
    // Those that run, those that wait by their turn, those that have ended.
    let ids: Vec<_> =
        node["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [7, 8, 9, 6, 5, 4, 3]);
    assert_eq!((&node["jobs"][0]["step"], &node["jobs"][0]["restarts"]), (&json!(800), &json!(1)));
    assert_eq!((&node["jobs"][1]["step"], &node["jobs"][1]["started_unix_ms"]), (&Value::Null, &Value::Null));
    assert_eq!((&node["jobs"][2]["name"], &node["jobs"][3]["loss"]), (&json!(HOSTILE), &json!("NaN")));

    let job = served.json("/api/v1/jobs/7").await;
    assert_eq!(job["history"].as_array().unwrap().len(), 400);
    assert_eq!(job["history"][399]["step"], 800);
    assert_eq!(job["status"]["ranks"][3]["hint"], "silent for 312 s, no CPU");
    assert_eq!(job["status"]["past_restarts"][0]["rank"], 2);
    assert_eq!(job["loss"], job["history"][399]["loss"]);
    let failed = served.json("/api/v1/jobs/6").await;
    assert!(failed["report"].as_str().unwrap().contains("rank 2 of 4"), "{failed}");
}

#[tokio::test]
async fn of_many_jobs_none_that_runs_is_left_out() {
    let served = Served::new().await;
    let mut view = made_up(unix_ms(), 10);
    for id in 100..700 {
        view.jobs.insert(id, Arc::new(job(id, "old", NodeJobState::Done)));
    }
    served.view.send_replace(Arc::new(view));
    let node = served.json("/api/v1/node").await;
    assert_eq!((&node["jobs"][0]["id"], &node["jobs"][3]["id"]), (&json!(7), &json!(699)));
    assert_eq!(node["jobs_left_out"], json!(607 - node["jobs"].as_array().unwrap().len()));
    assert!(node["jobs_left_out"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn the_end_of_a_log_is_shown() {
    let served = Served::new().await;
    let log = served.json("/api/v1/jobs/7/logs?rank=2&stream=stderr&lines=3").await;
    assert_eq!(log["lines"].as_array().unwrap().len(), 3);
    assert_eq!(log["lines"][2], "stderr of job 7, rank 2: line 3 <b>");
    assert_eq!(served.json("/api/v1/jobs/7/logs").await["lines"][0], "stdout of job 7, rank 0: line 1 <b>");
    for (path, status, why) in [
        ("7/logs?rank=13", 404, "rank 13 has no log"),
        ("7/logs?lines=501", 400, "1 to 500"),
        ("7/logs?lines=0", 400, "1 to 500"),
        ("7/logs?stream=both", 400, "stdout or stderr"),
        ("7/logs?rank=-1", 400, "rank=R"),
        ("7/logs?path=/etc/passwd", 400, "it takes"),
        ("70/logs", 404, "no job 70"),
        ("seven/logs", 400, "numbers"),
        ("seven", 400, "numbers"),
        ("70", 404, "no job 70"),
    ] {
        let answer = served.get(&format!("/api/v1/jobs/{path}")).await;
        assert_eq!(answer.status, status, "{path}");
        let error: Value = serde_json::from_str(&answer.body).unwrap();
        assert!(error["error"].as_str().unwrap().contains(why), "{path}: {error}");
    }
}

#[tokio::test]
async fn the_page_and_its_files_are_there_and_say_what_browsers_may_do() {
    let served = Served::new().await;
    let page = served.get("/").await;
    for file in ["page.css", "page.js", "icon.svg"] {
        assert!(page.body.contains(&format!("\"/assets/{file}\"")), "{file}");
    }
    for (path, kind) in [
        ("/", "text/html"),
        ("/assets/page.css", "text/css"),
        ("/assets/page.js", "text/javascript"),
        ("/assets/chart.js", "text/javascript"),
        ("/assets/icon.svg", "image/svg+xml"),
        ("/api/v1/node", "application/json"),
        ("/metrics", "application/openmetrics-text"),
    ] {
        let answer = served.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        for line in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "x-frame-options: deny",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(line), "{path} lacks {line:?}: {}", answer.head);
        }
        assert!(!answer.head.contains("access-control"), "{path}");
    }
    // The policy would keep these from working, and they from being noticed.
    assert!(
        !page.body.contains("<style") && !page.body.contains(" style=") && !page.body.contains("onclick")
    );
    assert_eq!(served.get("/assets/mod.rs").await.status, 404);
    assert_eq!(served.get("/favicon.ico").await.status, 404);
}

#[tokio::test]
async fn nothing_can_be_changed() {
    let served = Served::new().await;
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NEW"] {
        let request =
            format!("{method} /api/v1/jobs/7 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let answer = served.ask(&request).await;
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("allow: get, head"), "{method}: {}", answer.head);
    }
    let head = served.ask("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    let body = "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    assert_eq!(served.ask(body).await.status, 413);
}

#[tokio::test]
async fn only_who_names_this_host_is_answered() {
    let served = Served::new().await;
    for (status, host) in [
        (200, "Host: localhost:9470\r\n"),
        (200, "Host: 127.0.0.1\r\n"),
        (200, "Host: [::1]:9470\r\n"),
        (403, "Host: evil.example:9470\r\n"),
        (403, "Host: localhost\r\nHost: evil.example\r\n"),
        (403, ""),
    ] {
        let answer =
            served.ask(&format!("GET /api/v1/node HTTP/1.1\r\n{host}Connection: close\r\n\r\n")).await;
        assert_eq!(answer.status, status, "{host:?}");
        assert_eq!(answer.body.contains("node-17"), status == 200, "{host:?}");
        assert!(status == 200 || answer.body.contains("http://localhost"), "{}", answer.body);
    }
    let proxied = "GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(served.ask(proxied).await.status, 403);

    let dir = tempfile::tempdir().unwrap();
    let served = Served::on(Listen::Unix(dir.path().join("web.sock"))).await;
    let proxied = "GET / HTTP/1.1\r\nHost: node-17.example\r\nConnection: close\r\n\r\n";
    assert_eq!(served.ask(proxied).await.status, 200);
}

#[tokio::test]
async fn who_never_ends_a_request_keeps_nobody_out() {
    let served = Served::new().await;
    let many = async {
        let mut slow = Vec::new();
        for number in 0..1000 {
            let mut stream = TcpStream::connect(&served.address).await.unwrap();
            // Some never speak, some never end.
            if number % 2 == 0 {
                let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: loc").await;
            }
            slow.push(stream);
        }
        slow
    };
    // They do not even keep each other out, as they would if each had to wait for one before it to be given up.
    let mut slow = tokio::time::timeout(HANGS, many).await.expect("new ones have to wait");
    for path in ["/metrics", "/"] {
        assert_eq!(served.get(path).await.status, 200);
    }
    // The first had to go; the last has its time.
    let mut rest = Vec::new();
    let end = tokio::time::timeout(HANGS, slow[0].read_to_end(&mut rest)).await.expect("it is still open");
    assert!(end.is_err() || rest.is_empty(), "{rest:?}");
    let last = &mut slow[998];
    last.write_all(b"alhost\r\nConnection: close\r\n\r\n").await.unwrap();
    tokio::time::timeout(HANGS, last.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&rest));
}

#[tokio::test]
async fn a_connection_that_asks_and_is_silent_is_closed() {
    let served = Served::new().await;
    let mut stream = TcpStream::connect(&served.address).await.unwrap();
    stream.write_all(b"GET /assets/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT").await.unwrap();
    let mut answers = Vec::new();
    tokio::time::timeout(HANGS, stream.read_to_end(&mut answers)).await.expect("it is still open").unwrap();
    let answers = String::from_utf8(answers).unwrap();
    assert!(answers.starts_with("HTTP/1.1 200"), "{answers}");
    assert!(!answers.contains("<!doctype html>"), "{answers}");
}

#[tokio::test]
async fn a_node_that_ends_closes_its_page() {
    let served = Served::new().await;
    let (mut stream, address) = (served.connect().await, served.address.clone());
    drop(served);
    let mut rest = Vec::new();
    let end = tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await.expect("it is still open");
    assert!(end.is_err() || rest.is_empty());
    assert!(TcpStream::connect(&address).await.is_err(), "it still listens");
}

/// A program from the environment, or from the path.
fn program(name: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: there is no {name} in PATH");
    }
    found
}

/// `XLAUNCH_TEST_BROWSER` names a directory whose `node_modules` has playwright-core.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_shows_what_the_api_says() {
    let (Some(node), true) = (program("node"), std::env::var_os("XLAUNCH_TEST_BROWSER").is_some()) else {
        eprintln!("skipped: XLAUNCH_TEST_BROWSER names no directory with playwright-core");
        return;
    };
    let served = Served::new().await;
    let mut script = tokio::process::Command::new(node);
    script.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/web/page.mjs"));
    script.arg(format!("http://{}", served.address)).arg("7");
    // Where pictures are wanted.
    script.args(std::env::var_os("XLAUNCH_TEST_PICTURES"));
    let script = script.kill_on_drop(true).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut steps = 800;
    let mut done = std::pin::pin!(script.wait_with_output());
    let output = loop {
        tokio::select! {
            output = &mut done => break output.unwrap(),
            () = tokio::time::sleep(Duration::from_millis(500)) => {
                steps = 2000.min(steps + 4);
                served.view.send_replace(Arc::new(made_up(unix_ms(), steps)));
            }
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    eprintln!("{text}");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// A file of `deploy/`.
fn deployed(name: &str) -> std::path::PathBuf {
    std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy")).join(name)
}

/// Names in a text that begin so.
fn names(text: &str, beginning: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(beginning)).map(Into::into).collect()
}

#[test]
fn dashboard_and_alerts_ask_for_metrics_that_there_are() {
    let text = metrics::text(Arc::new(made_up(unix_ms(), 800)), unix_ms()).unwrap();
    let exported: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let has = |name: &String| exported.iter().any(|line| line.split(['{', ' ']).next() == Some(name));
    let rules = fs_err::read_to_string(deployed("prometheus/rules.yml")).unwrap();
    let expressions: String = rules.lines().filter(|line| line.trim_start().starts_with("expr:")).collect();
    let dashboard = fs_err::read_to_string(deployed("grafana/xlaunch.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut asked = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            asked.push(target["expr"].as_str().unwrap());
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        asked.extend(variable["definition"].as_str());
    }
    let asked = names(&asked.join(" "), "xlaunch_");
    assert!(asked.len() > 15, "{asked:?}");
    for name in asked.iter().chain(&names(&expressions, "xlaunch_")) {
        assert!(has(name), "{name} is asked for, and not exported");
    }
    // What DCGM's exporter tells is told by it alone.
    assert!(names(&text, "DCGM").is_empty());
}

#[test]
fn prometheus_takes_the_metrics_and_the_alerts() {
    let Some(promtool) = program("promtool") else { return };
    let run = |arguments: &[&str], input: &str| {
        use std::io::Write;
        let mut child = std::process::Command::new(&promtool);
        child.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "promtool {arguments:?}: {out}{err}");
    };
    run(&["check", "rules", deployed("prometheus/rules.yml").to_str().unwrap()], "");
    run(&["test", "rules", deployed("prometheus/rules_test.yml").to_str().unwrap()], "");
    let text = metrics::text(Arc::new(made_up(unix_ms(), 800)), unix_ms()).unwrap();
    // It reads the older text format, in which comments name counters as samples do.
    let counters = ["xlaunch_worker_restarts", "xlaunch_tokens", "xlaunch_allreduce_bytes"];
    let older =
        counters.iter().fold(text, |text, name| text.replace(&format!("{name} "), &format!("{name}_total ")));
    run(&["check", "metrics"], &older);
}

#[test]
fn what_users_name_breaks_no_line_of_the_metrics() {
    let mut view = made_up(unix_ms(), 800);
    let long = format!("{HOSTILE}{}", "\u{1f600}\\\"\n".repeat(2000));
    view.jobs.insert(10, Arc::new(job(10, &long, NodeJobState::Queued)));
    let text = metrics::text(Arc::new(view), unix_ms()).unwrap();
    let line = text.lines().find(|line| line.contains("job=\"9\"")).unwrap();
    let name = r#"name="<img src=x onerror=alert(1)>\"\n}\\ xlaunch_up 1 "#;
    assert!(line.contains(name) && line.ends_with("state=\"queued\"} 1.0"), "{line}");
    let line = text.lines().find(|line| line.contains("job=\"10\"")).unwrap();
    assert!(line.len() < 2000 && line.ends_with("state=\"queued\"} 1.0"), "{line}");
    assert!(!text.lines().any(|line| line.starts_with("}") || line.starts_with("xlaunch_up")), "{text}");
    assert!(text.ends_with("\n# EOF\n"));
}

#[test]
fn metrics_tell_of_jobs_as_long_as_it_makes_sense() {
    let now = unix_ms();
    let text = metrics::text(Arc::new(made_up(now, 800)), now).unwrap();
    let has = |sample: &str| text.lines().any(|line| line.starts_with(sample));
    for sample in [
        "xlaunch_jobs{state=\"lost\"} 1.0",
        "xlaunch_job_info{job=\"7\",name=\"llama-28m\",user=\"grace\",kind=\"trainer\",state=\"running\"} 1.0",
        "xlaunch_job_info{job=\"8\",name=\"eval\",user=\"1002\",kind=\"command\",state=\"queued\"} 1.0",
        "xlaunch_step{job=\"7\"} 800.0",
        "xlaunch_step_duration_seconds_sum{job=\"7\"} 96.0",
        "xlaunch_step_duration_seconds_count{job=\"7\"} 800",
        "xlaunch_step_duration_seconds_bucket{le=\"0.1\",job=\"7\"} 0",
        "xlaunch_step_duration_seconds_bucket{le=\"+Inf\",job=\"7\"} 800",
        "xlaunch_tokens_total{job=\"7\"} 26214400",
        "xlaunch_allreduce_bytes_total{job=\"7\"} 107040000000",
        "xlaunch_tokens_per_second{job=\"7\"} 4",
        "xlaunch_worker_restarts_total{job=\"7\"} 1",
        "xlaunch_worker_up{job=\"7\",rank=\"3\"} 1.0",
        "xlaunch_worker_hint{job=\"7\",rank=\"2\"} 0.0",
        "xlaunch_worker_hint{job=\"7\",rank=\"3\"} 1.0",
        "xlaunch_pool_mapped_bytes{job=\"7\",rank=\"0\"} 3600000000.0",
        "xlaunch_gpu_job{UUID=\"GPU-5a1e0001-77d0-4c3f-9b52-0d3f5f1e2a00\",job=\"7\"} 1.0",
        "xlaunch_drained 0.0",
        // It failed ten minutes ago: an alert has a loss and a state to tell of.
        "xlaunch_job_info{job=\"6\",name=\"gpt2-124m\",user=\"ada\",kind=\"trainer\",state=\"failed\"} 1.0",
        "xlaunch_loss{job=\"6\"} NaN",
    ] {
        assert!(has(sample), "{sample} is missing in {text}");
    }
    for sample in [
        // Nothing is fast that has ended, and a day ago is long ago.
        "xlaunch_tokens_per_second{job=\"6\"}",
        "xlaunch_step_duration_seconds_sum{job=\"6\"}",
        "xlaunch_job_status_age_seconds{job=\"6\"}",
        "xlaunch_job_info{job=\"3\"",
        "xlaunch_loss{job=\"8\"}",
        "xlaunch_gpu_job{UUID=\"GPU-5a1e0004",
    ] {
        assert!(!has(sample), "{sample} is in {text}");
    }
}
