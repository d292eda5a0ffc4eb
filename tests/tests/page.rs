//! The daemon's page: it reads what gRPC answers, and a browser shows that of a job that trains.
//!
//! The browser's part needs node, Chromium (or `CHROMIUM`) and playwright-core, which is looked for in the directory
//! `XLAUNCH_TEST_BROWSER`; without them it says so and is skipped. `XLAUNCH_TEST_PICTURES` names a directory for pictures.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use xlaunch_tests::{Node, Running, wait_for};

/// A node with GPUs of all kinds, whose daemon serves a page; a job that has begun again trains.
struct Case {
    node: Node,
    address: String,
    job: u64,
    _stranger: Running,
}

impl Case {
    fn new() -> Self {
        let stranger = Running::start(Command::new("sleep").arg("1000"));
        let used = format!("GPU-{:08} 0 {}", 2, stranger.pid());
        let gpus = ["GPU-00000000 0", "GPU-00000001 0", &used, "GPU-00000003 4"];
        // Nobody else has this port for as long as it takes to use it again.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let node = Node::with_gpus(&gpus, &format!("cpu_workers = 64\n[web]\nlisten = \"{address}\""));
        node.write("text.txt", &"It was a dark and stormy night. ".repeat(2000));
        let text = "[model]\npreset = \"byte-tiny\"\nlayers = 1\ndim = 64\nheads = 2\nffn = 64\nseq = 32\n\
            [data]\ntrain = [\"text.txt\"]\n[train]\nsteps = 200000\nbatch = 1\nwarmup = 2\neval_every = 0\nsample = 0\n\
            [checkpoint]\nevery = 20\n[launch]\nmax_restarts = 3\n";
        let config = node.write("tiny.toml", text);
        let holds = node.submit(&["--gpus", "1", "--name", "holds", "--", "sleep", "1000"]);
        node.wait(holds, "running");
        let job = node.submit(&["--gpus", "0", &config.display().to_string(), "--nproc", "2"]);
        let case = Self { node, address, job, _stranger: stranger };
        case.wait_for_step(30);
        let pid = case.node.job(job)["status"]["ranks"][1]["pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
        let restarts = || case.node.job(job)["status"]["past_restarts"].as_array().map(Vec::len);
        wait_for("a restart", || restarts().filter(|count| *count == 1));
        case.wait_for_step(200);
        case
    }

    fn wait_for_step(&self, step: u64) {
        let at = || self.node.job(self.job)["status"]["step"].as_u64().filter(|at| *at >= step);
        wait_for("steps", at);
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// What the page is answered.
    fn api(&self, path: &str) -> Value {
        let body = self.get(&format!("/api/v1/{path}"));
        serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}"))
    }

    /// The job's sample of this name, as Prometheus reads it.
    fn sample(&self, name: &str) -> f64 {
        let (text, sample) = (self.get("/metrics"), format!("{name}{{job=\"{}\"}} ", self.job));
        let value = text.lines().find_map(|line| line.strip_prefix(&sample));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {sample} in {text}"))
    }

    /// What a client is answered over gRPC.
    fn client(&self, args: &[&str]) -> Value {
        let run = self.node.run(args);
        serde_json::from_str(&run.stdout).unwrap_or_else(|_| panic!("{}{}", run.stdout, run.stderr))
    }
}

/// Without these keys.
fn without(mut value: Value, keys: &[&str]) -> Value {
    keys.iter().for_each(|key| drop(value.as_object_mut().unwrap().remove(*key)));
    value
}

#[test]
fn the_page_reads_what_grpc_answers() {
    let case = Case::new();
    let number = case.job.to_string();
    assert_eq!(case.node.run(&["cancel", &number]).code, 0);
    case.node.wait(case.job, "cancelled");
    let page = case.api(&format!("jobs/{number}"));
    let client = case.client(&["status", &number, "--json"]);
    assert_eq!(
        (&page["restarts"], &page["step"]),
        (&client["status"]["restarts"], &client["status"]["step"])
    );
    assert!(client["history"].as_array().unwrap().len() > 100, "{client}");
    let of_the_page =
        ["unix_ms", "step", "total_steps", "loss", "tokens_per_second", "restarts", "max_restarts"];
    // It passes with time.
    let age = ["status_age_seconds"];
    assert_eq!(without(without(page, &of_the_page), &age), without(client, &age));
    // Those since the checkpoint, if there were any, have been made again.
    let steps = case.sample("xlaunch_step_duration_seconds_count");
    assert!(steps >= case.sample("xlaunch_step"), "{steps}");
    // Of each rank, 32 tokens; two ranks sum fp32 gradients of the same parameters in each step.
    assert_eq!(case.sample("xlaunch_tokens_total"), steps * 64.0);
    let bytes = case.sample("xlaunch_allreduce_bytes_total") / steps;
    assert!(bytes > 1e5 && bytes % 4.0 == 0.0, "{bytes}");
    let node = case.client(&["node", "--json"]);
    assert_eq!(case.api("node")["node"], node);
    let states: Vec<_> = node["gpus"].as_array().unwrap().iter().map(|gpu| gpu["state"].clone()).collect();
    assert_eq!(states, ["held", "free", "foreign", "sick"]);
}

#[test]
fn a_browser_shows_it() {
    let browser = std::env::var("XLAUNCH_TEST_BROWSER").unwrap_or_default();
    if !Path::new(&browser).join("node_modules/playwright-core").exists() {
        eprintln!("skipped: XLAUNCH_TEST_BROWSER names no directory with playwright-core");
        return;
    }
    let case = Case::new();
    let mut check = Command::new("node");
    check.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/web/page.mjs")).arg(format!("http://{}", case.address));
    check.arg(case.job.to_string()).args(std::env::var_os("XLAUNCH_TEST_PICTURES"));
    let output = check.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.lines().count() >= 12 && text.lines().all(|line| line.starts_with("ok ")), "{text}");
}
