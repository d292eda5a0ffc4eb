//! Views of a running launch: `status`, `logs`, `stop`, and the gRPC services that they use.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use xlaunch_proto::connect::{connect, endpoint};
use xlaunch_proto::v1::LogsRequest;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_tests::{Job, Output, Process, wait_for};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    status_shows_ranks_of_running_job_and_stop_stops_it,
    launches_are_found_by_name_prefix_and_directory_from_anywhere,
    status_watch_ends_with_the_launch,
    logs_follow_through_restart_to_the_last_line,
    reflection_and_health_describe_the_services,
    thousand_clients_that_do_not_read_do_not_disturb_training;
}

/// A job that runs until it is stopped, and then stops quickly.
const ENDLESS: [&str; 4] = ["--set", "train.steps=1000000", "--set", "launch.shutdown_timeout=1.0"];

fn query(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(args)).wait()
}

fn status(job: &Job, args: &[&str]) -> Value {
    let output = query(job, &[&["status", "--json"], args].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn status_shows_ranks_of_running_job_and_stop_stops_it() {
    let job = Job::new();
    let run = job.spawn(&[&["--nproc", "2"], &ENDLESS[..]].concat());
    run.wait_for_stderr("step 1/");
    let status = wait_for("CPU usage of both ranks", || {
        let status = status(&job, &[]);
        let sampled = |rank: &Value| rank["cpu_percent"].as_f64().is_some_and(|percent| percent > 1.0);
        status["ranks"].as_array().is_some_and(|ranks| ranks.iter().all(sampled)).then_some(status)
    });
    assert_eq!((&status["kind"], &status["state"]), (&"trainer".into(), &"running".into()), "{status}");
    assert_eq!(status["launcher_pid"], run.pid(), "{status}");
    assert_eq!((&status["restarts"], &status["max_restarts"]), (&0.into(), &0.into()), "{status}");
    let command_line = status["command_line"].as_str().unwrap();
    assert!(command_line.contains("train.toml --nproc 2 --set train.steps=1000000"), "{command_line}");
    assert!(status["host"].as_str().is_some_and(|host| !host.is_empty()));
    let log_dir = std::fs::canonicalize(job.path().join(status["log_dir"].as_str().unwrap())).unwrap();
    assert_eq!(log_dir, job.run_dir().join("logs"));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let started = status["started_unix_seconds"].as_u64().unwrap();
    assert!(started <= now && started + 600 > now, "{status}");
    assert_eq!((&status["world_size"], status["ranks"].as_array().map(Vec::len)), (&2.into(), Some(2)));
    for rank in status["ranks"].as_array().into_iter().flatten() {
        let bytes = |key: &str| rank[key].as_u64().unwrap_or(0);
        let live = bytes("pool_live_bytes");
        assert!(live > 0 && live <= bytes("pool_mapped_bytes"), "{rank}");
        assert!(bytes("pool_mapped_bytes") <= bytes("pool_peak_bytes"), "{rank}");
        assert!(rank["pool_fragmentation"].is_f64() && bytes("memory_bytes") > 1_000_000, "{rank}");
        assert!(rank["seconds_since_output"].is_f64() && rank["hint"] == "", "{rank}");
    }
    let table = query(&job, &["status"]);
    for column in ["POOL", "MAPPED", "PEAK", "FRAG", "CPU", "MEMORY"] {
        assert!(table.stdout.contains(column), "{}", table.stdout);
    }
    assert_eq!(query(&job, &["stop"]).code, 0);
    assert_eq!(run.wait().code, 143);
    let after = query(&job, &["status"]);
    assert!(after.code != 0 && after.stderr.contains("no launch"), "{}", after.stderr);
}

fn launches_are_found_by_name_prefix_and_directory_from_anywhere() {
    let job = Job::scripted(FAKE_WORKER, "join stderr:ready sleep");
    let (first, second) = (job.spawn(&ENDLESS), job.spawn(&ENDLESS));
    first.wait_for_stderr("ready");
    second.wait_for_stderr("ready");
    let both = status(&job, &[]);
    let ids = both.as_array().unwrap().iter().map(|run| run["job_id"].as_str().unwrap().to_owned());
    let ids: Vec<String> = ids.collect();
    assert_eq!(ids.len(), 2, "{both}");
    let list = query(&job, &["status"]).stdout;
    assert!(ids.iter().all(|id| list.contains(&format!("train-{id}"))), "{list}");
    assert_eq!(list.lines().count(), 3, "{list}");

    let status_from = |dir: &str, run: &str| {
        let output = Process::spawn(job.command(&["status", "--json", run]).current_dir(dir)).wait();
        serde_json::from_str::<Value>(&output.stdout).map_err(|_| output.stderr)
    };
    for id in &ids {
        assert_eq!(status_from("/", &format!("train-{id}")).unwrap()["job_id"], id.as_str());
        let path = job.path().join("runs/train").join(id);
        assert_eq!(status_from("/", path.to_str().unwrap()).unwrap()["job_id"], id.as_str());
    }
    let ambiguous = status_from("/", "train-").unwrap_err();
    assert!(ids.iter().all(|id| ambiguous.contains(id)), "{ambiguous}");
    let unknown = status_from("/", "another").unwrap_err();
    assert!(unknown.contains("another") && unknown.contains(&ids[0]), "{unknown}");
    let unnamed = query(&job, &["stop"]).stderr;
    assert!(unnamed.contains("2 launches"), "{unnamed}");

    first.signal(Signal::KILL);
    assert_eq!(first.wait().code, 137);
    wait_for("the killed launch to be forgotten", || status(&job, &[]).is_object().then_some(()));
    assert_eq!(status_from("/", "train-").unwrap()["launcher_pid"], second.pid());
}

fn status_watch_ends_with_the_launch() {
    let job = Job::scripted(FAKE_WORKER, "join stderr:ready sleep");
    let run = job.spawn(&ENDLESS);
    run.wait_for_stderr("ready");
    let table = Process::spawn(&mut job.command(&["status", "--watch", "0.1"]));
    let json = Process::spawn(&mut job.command(&["status", "--json", "--watch", "0.1"]));
    wait_for("two updates of each", || {
        let tables = table.stdout().matches("RANK").count();
        (tables > 1 && json.stdout().lines().count() > 1).then_some(())
    });
    query(&job, &["stop"]);
    run.wait();
    let table = table.wait();
    assert!(table.code == 0 && table.stdout.matches("RANK").count() > 1, "{}", table.stdout);
    assert!(table.stdout.ends_with("has ended\n") && !table.stdout.contains('\u{1b}'), "{}", table.stdout);
    let json = json.wait();
    let lines: Vec<Value> = json.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(json.code == 0 && lines.len() > 1 && lines[0]["job_name"] == "train", "{}", json.stdout);
    let none = query(&job, &["status", "--watch", "7"]);
    assert!(none.code == 1 && none.stderr.contains("; JOB goes before --watch"), "{}", none.stderr);
}

fn logs_follow_through_restart_to_the_last_line() {
    let job = Job::scripted(FAKE_WORKER, "join stderr:one stderr:two sleep:2000 stderr:last-line exit:3");
    let run = job.spawn(&["--set", "launch.max_restarts=1"]);
    run.wait_for_stderr("two");
    let tail = query(&job, &["logs", "--stderr", "--tail", "1"]);
    assert_eq!((tail.code, tail.stdout.as_str()), (0, "two\n"), "{}", tail.stderr);
    let followed = Process::spawn(&mut job.command(&["logs", "--stderr", "-f"]));
    let unknown = query(&job, &["logs", "--rank", "7"]);
    assert!(unknown.code != 0 && unknown.stderr.contains("rank 7"), "{}", unknown.stderr);
    assert_eq!(run.wait().code, 1);
    let followed = followed.wait();
    let attempt = "joined 1 ranks\none\ntwo\nlast-line\n";
    assert_eq!((followed.code, followed.stdout), (0, attempt.repeat(2)), "{}", followed.stderr);
}

fn reflection_and_health_describe_the_services() {
    let job = Job::scripted(FAKE_WORKER, "join stderr:ready sleep");
    let run = job.spawn(&ENDLESS);
    run.wait_for_stderr("ready");
    runtime().block_on(async {
        let channel = connect(&job.run_dir().join("agent.sock"), endpoint()).await.unwrap();
        let list = MessageRequest::ListServices(String::new());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let mut reflection = ServerReflectionClient::new(channel.clone());
        let replies = reflection.server_reflection_info(tokio_stream::once(request)).await.unwrap();
        let reply = replies.into_inner().message().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = reply else { panic!("{reply:?}") };
        let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
        for name in ["xlaunch.v1.Agent", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"] {
            assert!(names.contains(&name), "{names:?}");
        }
        for service in ["", "xlaunch.v1.Agent"] {
            let request = HealthCheckRequest { service: service.into() };
            let reply = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
            assert_eq!(reply.status(), ServingStatus::Serving, "{service:?}");
        }
    });
}

fn thousand_clients_that_do_not_read_do_not_disturb_training() {
    let job = Job::new();
    let run = job.spawn(&ENDLESS);
    run.wait_for_stderr("step 1/");
    let socket = job.run_dir().join("agent.sock");
    runtime().block_on(async {
        // Followers of logs that never read, more than the agent admits.
        let mut streams = Vec::new();
        for _ in 0..100 {
            let mut agent = AgentClient::new(connect(&socket, endpoint()).await.unwrap());
            let request = LogsRequest { stream: 2, follow: true, ..Default::default() };
            streams.push(tokio::time::timeout(Duration::from_secs(60), agent.logs(request)).await.unwrap());
        }
        assert!(streams.iter().any(Result::is_err), "the number of followers is limited");
        // A separate process, because of its file descriptors.
        let mut hold = Command::new(env!("CARGO_BIN_EXE_daemon_load"));
        let hostile = Process::spawn(hold.arg("hostile-clients").arg(&socket).arg("900"));
        hostile.wait_for_stderr("holding 900 connections");
        assert!(status(&job, &[])["step"].as_u64().is_some_and(|step| step > 0));
        let steps = job.losses().len();
        while job.losses().len() < steps + 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code, 143);
}
