//! What can be seen of a running launch: `status`, `logs`, `stop`, and the gRPC services behind them.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use xlaunch_proto::v1::LogsRequest;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_tests::{Finished, Job, Running, wait_for};

const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

/// A job that goes on until it is stopped, and then not for long.
const FOR_EVER: [&str; 4] = ["--set", "train.steps=1000000", "--set", "launch.shutdown_timeout=1.0"];

fn query(job: &Job, args: &[&str]) -> Finished {
    Running::start(&mut job.command(args)).finish()
}

fn status(job: &Job, args: &[&str]) -> Value {
    let answer = query(job, &[&["status", "--json"], args].concat());
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    serde_json::from_str(&answer.stdout).unwrap()
}

/// A runtime and a connection to the newest run's agent.
fn connect(job: &Job) -> (tokio::runtime::Runtime, Channel) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let socket = job.latest().join("agent.sock");
    let channel = runtime.block_on(channel(socket));
    (runtime, channel)
}

async fn channel(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://agent").connect_with_connector(connector).await.unwrap()
}

#[test]
fn status_and_stop_reach_a_running_job() {
    let job = Job::new();
    let run = job.start(&[&["--nproc", "2"], &FOR_EVER[..]].concat());
    run.wait_for_stderr("step 1/");
    let status = wait_for("a look at both ranks", || {
        let status = status(&job, &[]);
        let seen = |rank: &Value| rank["cpu_percent"].as_f64().is_some_and(|percent| percent > 1.0);
        status["ranks"].as_array().is_some_and(|ranks| ranks.iter().all(seen)).then_some(status)
    });
    assert_eq!((&status["kind"], &status["state"]), (&"trainer".into(), &"running".into()), "{status}");
    assert_eq!(status["launcher_pid"], run.pid(), "{status}");
    assert_eq!((&status["restarts"], &status["max_restarts"]), (&0.into(), &0.into()), "{status}");
    assert!(
        status["command_line"].as_str().unwrap().contains("train.toml --nproc 2 --set train.steps=1000000")
    );
    assert!(status["host"].as_str().is_some_and(|host| !host.is_empty()));
    let log_dir = std::fs::canonicalize(job.path().join(status["log_dir"].as_str().unwrap())).unwrap();
    assert_eq!(log_dir, job.latest().join("logs"));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(
        status["started_unix_seconds"].as_u64().is_some_and(|at| at <= now && at + 600 > now),
        "{status}"
    );
    assert_eq!((&status["world_size"], status["ranks"].as_array().map(Vec::len)), (&2.into(), Some(2)));
    for rank in status["ranks"].as_array().into_iter().flatten() {
        let bytes = |key: &str| rank[key].as_u64().unwrap_or(0);
        assert!(
            bytes("pool_live_bytes") > 0 && bytes("pool_live_bytes") <= bytes("pool_mapped_bytes"),
            "{rank}"
        );
        assert!(bytes("pool_mapped_bytes") <= bytes("pool_peak_bytes"), "{rank}");
        assert!(rank["pool_fragmentation"].is_f64() && bytes("memory_bytes") > 1_000_000, "{rank}");
        assert!(rank["seconds_since_output"].is_f64() && rank["hint"] == "", "{rank}");
    }
    let table = query(&job, &["status"]);
    for column in ["POOL LIVE", "MAPPED", "PEAK", "FRAG", "CPU"] {
        assert!(table.stdout.contains(column), "{}", table.stdout);
    }
    assert_eq!(query(&job, &["stop"]).code, 0);
    assert_eq!(run.finish().code, 143);
    let after = query(&job, &["status"]);
    assert!(after.code != 0 && after.stderr.contains("no launch"), "{}", after.stderr);
}

#[test]
fn launches_are_found_by_name_by_beginning_and_by_directory_from_anywhere() {
    let job = Job::scripted(FAKE_WORKER, "join say:ready sleep");
    let (first, second) = (job.start(&FOR_EVER), job.start(&FOR_EVER));
    first.wait_for_stderr("ready");
    second.wait_for_stderr("ready");
    let both = status(&job, &[]);
    let ids: Vec<String> =
        both.as_array().unwrap().iter().map(|run| run["job_id"].as_str().unwrap().to_string()).collect();
    assert_eq!(ids.len(), 2, "{both}");
    let list = query(&job, &["status"]).stdout;
    assert!(
        ids.iter().all(|id| list.contains(&format!("train-{id}"))) && list.lines().count() == 3,
        "{list}"
    );

    let ask = |dir: &str, run: &str| {
        let answer = Running::start(job.command(&["status", "--json", run]).current_dir(dir)).finish();
        serde_json::from_str::<Value>(&answer.stdout).map_err(|_| answer.stderr)
    };
    for id in &ids {
        assert_eq!(ask("/", &format!("train-{id}")).unwrap()["job_id"], id.as_str());
        let path = job.path().join("runs/train").join(id);
        assert_eq!(ask("/", path.to_str().unwrap()).unwrap()["job_id"], id.as_str());
    }
    let problem = ask("/", "train-").unwrap_err();
    assert!(problem.contains("which one") && ids.iter().all(|id| problem.contains(id)), "{problem}");
    let problem = ask("/", "another").unwrap_err();
    assert!(problem.contains("another") && problem.contains(&ids[0]), "{problem}");
    let problem = query(&job, &["stop"]).stderr;
    assert!(problem.contains("2 launches are running"), "{problem}");

    first.signal(rustix::process::Signal::KILL);
    assert_eq!(first.finish().code, 137);
    wait_for("the killed launch to be no launch", || status(&job, &[]).is_object().then_some(()));
    assert_eq!(ask("/", "train-").unwrap()["launcher_pid"], second.pid());
}

#[test]
fn a_watch_goes_on_until_the_launch_ends() {
    let job = Job::scripted(FAKE_WORKER, "join say:ready sleep");
    let run = job.start(&FOR_EVER);
    run.wait_for_stderr("ready");
    let table = Running::start(&mut job.command(&["status", "--watch", "0.1"]));
    let json = Running::start(&mut job.command(&["status", "--json", "--watch", "0.1"]));
    std::thread::sleep(Duration::from_secs(1));
    query(&job, &["stop"]);
    run.finish();
    let table = table.finish();
    assert!(table.code == 0 && table.stdout.matches("RANK").count() > 1, "{}", table.stdout);
    assert!(table.stdout.ends_with("has ended\n") && !table.stdout.contains('\u{1b}'), "{}", table.stdout);
    let json = json.finish();
    let lines: Vec<Value> = json.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(json.code == 0 && lines.len() > 1 && lines[0]["job_name"] == "train", "{}", json.stdout);
}

#[test]
fn logs_are_followed_through_a_restart_to_the_last_words() {
    let job = Job::scripted(FAKE_WORKER, "join say:one say:two pause:2000 say:last-words exit:3");
    let run = job.start(&["--set", "launch.max_restarts=1"]);
    run.wait_for_stderr("two");
    let tail = query(&job, &["logs", "--stderr", "--tail", "1"]);
    assert_eq!((tail.code, tail.stdout.as_str()), (0, "two\n"), "{}", tail.stderr);
    let followed = Running::start(&mut job.command(&["logs", "--stderr", "-f"]));
    let problem = query(&job, &["logs", "--rank", "7"]);
    assert!(problem.code != 0 && problem.stderr.contains("no rank 7"), "{}", problem.stderr);
    assert_eq!(run.finish().code, 1);
    let followed = followed.finish();
    let attempt = "joined 1 ranks\none\ntwo\nlast-words\n";
    assert_eq!((followed.code, followed.stdout), (0, attempt.repeat(2)), "{}", followed.stderr);
}

#[test]
fn the_services_say_what_they_are_and_that_they_serve() {
    let job = Job::scripted(FAKE_WORKER, "join say:ready sleep");
    let run = job.start(&FOR_EVER);
    run.wait_for_stderr("ready");
    let (runtime, channel) = connect(&job);
    runtime.block_on(async {
        let request = tonic_reflection::pb::v1::ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let stream = tokio_stream::once(request);
        let mut answers = ServerReflectionClient::new(channel.clone())
            .server_reflection_info(stream)
            .await
            .unwrap()
            .into_inner();
        let answer = answers.message().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
        let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
        for name in ["xlaunch.v1.Agent", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"] {
            assert!(names.contains(&name), "{names:?}");
        }
        for service in ["", "xlaunch.v1.Agent"] {
            let request = HealthCheckRequest { service: service.into() };
            let answer = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
            assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
        }
    });
}

#[test]
fn a_thousand_callers_that_do_not_read_hurt_nobody() {
    let job = Job::new();
    let run = job.start(&FOR_EVER);
    run.wait_for_stderr("step 1/");
    let (runtime, _) = connect(&job);
    runtime.block_on(async {
        // Logs are followed and never read, by more than are let in; connections are opened, and nothing is said.
        let mut streams = Vec::new();
        for _ in 0..100 {
            let socket = job.latest().join("agent.sock");
            let mut agent = AgentClient::new(channel(socket).await);
            let request = LogsRequest { stream: 2, follow: true, ..Default::default() };
            streams.push(tokio::time::timeout(Duration::from_secs(60), agent.logs(request)).await.unwrap());
        }
        assert!(streams.iter().any(Result::is_err), "readers are limited");
        let mut idle = Vec::new();
        for _ in 0..900 {
            idle.push(tokio::net::UnixStream::connect(job.latest().join("agent.sock")).await.ok());
        }
        assert!(status(&job, &[])["step"].as_u64().is_some_and(|step| step > 0));
        let steps = job.losses().len();
        while job.losses().len() < steps + 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        run.signal(rustix::process::Signal::TERM);
    });
    assert_eq!(run.finish().code, 143);
}
