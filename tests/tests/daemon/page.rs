//! The daemon's web page: its API agrees with gRPC, and a browser shows a training job.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Node, Process, free_endpoint, requirements, send_signal, wait_for};

xlaunch_harness::tests! {
    http_api_and_metrics_agree_with_grpc,
    taken_address_of_the_page_does_not_end_the_daemon;
    needs requirements::promtool:
    promtool_accepts_metrics_and_alerts;
    needs requirements::browser:
    browser_shows_jobs_and_gpus;
}

/// A tiny job that restarts from its checkpoints.
const CONFIG: &str = "[model]\npreset = \"byte-tiny\"\nlayers = 1\ndim = 64\nheads = 2\nffn = 64\nseq = 32\n\
    [data]\ntrain = [\"text.txt\"]\n\
    [train]\nsteps = 200000\nbatch = 1\nwarmup = 2\neval_every = 0\nsample = 0\n\
    [checkpoint]\nevery = 20\n[launch]\nmax_restarts = 3\n";
/// Tokens per step: two ranks, one sequence of 32 tokens each.
const TOKENS_PER_STEP: f64 = 64.0;

/// A node with a GPU in each state, whose daemon serves the page, and a training job that was restarted once.
struct Case {
    node: Node,
    address: String,
    job: u64,
    _foreign: Process,
}

impl Case {
    fn new() -> Self {
        let foreign = Process::spawn(Command::new("sleep").arg("1000"));
        let used = format!("GPU-{:08} 0 {}", 2, foreign.pid());
        let gpus = ["GPU-00000000 0", "GPU-00000001 0", &used, "GPU-00000003 4"];
        let address = free_endpoint();
        let node = Node::with_gpus(
            &gpus,
            &format!("cpu_workers = 64\n[web]\nlisten = \"{address}\"\nshow_logs = true"),
        );
        node.write("text.txt", &"It was a dark and stormy night. ".repeat(2000));
        let config = node.write("tiny.toml", CONFIG).display().to_string();
        let holder = node.submit(&["--gpus", "1", "--name", "holder", "--", "sleep", "1000"]);
        node.wait(holder, "running");
        let job = node.submit(&["--gpus", "0", &config, "--nproc", "2"]);
        let case = Self { node, address, job, _foreign: foreign };
        case.wait_for_step(30);
        let worker = case.node.job(job)["status"]["ranks"][1]["pid"].as_u64().unwrap();
        send_signal(u32::try_from(worker).unwrap(), Signal::KILL);
        let restarts = || case.node.job(job)["status"]["past_restarts"].as_array().map(Vec::len);
        wait_for("a restart", || restarts().filter(|count| *count == 1));
        case.wait_for_step(200);
        case
    }

    fn wait_for_step(&self, step: u64) {
        let reached = || self.node.job(self.job)["status"]["step"].as_u64().filter(|at| *at >= step);
        wait_for(&format!("step {step}"), reached);
    }

    /// Returns the body of the reply to a GET request.
    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Returns the data of the page.
    fn api(&self, path: &str) -> Value {
        let body = self.get(&format!("/api/v1/{path}"));
        serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}"))
    }

    /// Returns a metric of the job, as read by Prometheus.
    fn metric(&self, name: &str) -> f64 {
        let (text, sample) = (self.get("/metrics"), format!("{name}{{job=\"{}\"}} ", self.job));
        let value = text.lines().find_map(|line| line.strip_prefix(&sample));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {sample} in {text}"))
    }
}

fn without(mut value: Value, keys: &[&str]) -> Value {
    keys.iter().for_each(|key| drop(value.as_object_mut().unwrap().remove(*key)));
    value
}

fn http_api_and_metrics_agree_with_grpc() {
    let case = Case::new();
    let job = case.job.to_string();
    assert_eq!(case.node.run(&["cancel", &job]).code, 0);
    case.node.wait(case.job, "cancelled");
    let page = case.api(&format!("jobs/{job}"));
    let client = case.node.job(case.job);
    for key in ["restarts", "step"] {
        assert_eq!(page[key], client["status"][key], "{key}");
    }
    assert!(client["history"].as_array().unwrap().len() > 100, "{client}");
    let page_only =
        ["unix_ms", "step", "total_steps", "loss", "tokens_per_second", "mfu", "restarts", "max_restarts"];
    // This differs by the time between the two requests.
    let age = ["status_age_seconds"];
    assert_eq!(without(without(page, &page_only), &age), without(client, &age));
    // Steps after the last checkpoint were repeated after the restart.
    let steps = case.metric("xlaunch_step_duration_seconds_count");
    assert!(steps >= case.metric("xlaunch_step"), "{steps}");
    assert_eq!(case.metric("xlaunch_tokens_total"), steps * TOKENS_PER_STEP);
    // Gradients in fp32.
    let bytes = case.metric("xlaunch_allreduce_bytes_total") / steps;
    assert!(bytes > 1e5 && bytes % 4.0 == 0.0, "{bytes}");
    let node = case.node.json(&["node"]);
    assert_eq!(case.api("node")["node"], node);
    let states: Vec<_> = node["gpus"].as_array().unwrap().iter().map(|gpu| gpu["state"].clone()).collect();
    assert_eq!(states, ["held", "free", "foreign", "sick"]);
}

fn taken_address_of_the_page_does_not_end_the_daemon() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let node = Node::new(&format!("[web]\nlisten = \"{address}\""));
    let problem = || node.json(&["node"])["page_problem"].as_str().unwrap().to_owned();
    assert!(problem().contains(&address), "{}", problem());
    let job = node.submit_shell("true");
    node.wait(job, "done");
    assert!(node.run(&["node"]).stdout.contains(&format!("page: failed to serve the page on {address}")));
    drop(taken);
    wait_for("the page", || TcpStream::connect(&address).ok());
    wait_for("no problem", || problem().is_empty().then_some(()));
}

/// Runs `promtool` with this input, which it must accept.
fn promtool(args: &[&str], input: &str) {
    let mut command = Command::new("promtool");
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "promtool {args:?}: {stdout}{stderr}");
}

fn promtool_accepts_metrics_and_alerts() {
    let deployed = |name: &str| format!("{}/../deploy/prometheus/{name}", env!("CARGO_MANIFEST_DIR"));
    promtool(&["check", "rules", &deployed("rules.yml")], "");
    promtool(&["test", "rules", &deployed("rules_test.yml")], "");
    promtool(&["check", "metrics"], &Case::new().get("/metrics"));
}

/// `XLAUNCH_TEST_PICTURES` names a directory for screenshots.
fn browser_shows_jobs_and_gpus() {
    let case = Case::new();
    let mut check = Command::new("node");
    check.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/web/page.mjs")).arg(format!("http://{}", case.address));
    check.arg(case.job.to_string()).args(std::env::var_os("XLAUNCH_TEST_PICTURES"));
    let output = check.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.lines().count() >= 12 && text.lines().all(|line| line.starts_with("ok ")), "{text}");
}
