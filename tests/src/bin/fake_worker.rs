//! A scripted worker for tests of the launcher.
//!
//! `FAKE_WORKER` contains one script per rank, separated by `;`; the last one applies to all further ranks. A script is
//! a list of commands:
//!
//! - `join` takes part in the rendezvous as a worker of this job; `join:version`, `join:config` and `join:layout` do so
//!   with a value that differs from the other ranks'. The agent's reply goes to stderr; a refusal ends the process with
//!   exit code 69;
//! - `bench` reports plausible results for the benchmark that the agent requests;
//! - `stderr:TEXT` writes a line; `env` writes the environment to stdout;
//! - `sleep:MS` sleeps, `sleep` without a time does so forever; `ignore-sigterm` ignores SIGTERM from then on;
//! - `allocate` allocates memory endlessly;
//! - `grandchild` starts a sleeping process in the worker's process group;
//! - `exit:N` and `signal:N` end the process; `exit-plus:N` exits with N plus the number of the attempt, counted from
//!   0. After the last command the process exits with code 0.

#![expect(clippy::print_stdout, clippy::print_stderr, clippy::exit, reason = "what a scripted worker does")]

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tonic::transport::Channel;
use xlaunch_proto::connect::{connect, endpoint};
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AllReduceReport, Calibration, Finished, GetJobReply, GetJobRequest, Hello, JoinRequest, WorkerReport,
};
use xlaunch_proto::{VERSION, env};
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::JobSpec;

fn main() -> Result<(), Box<dyn Error>> {
    let rank: u32 = std::env::var("RANK")?.parse()?;
    let scripts = std::env::var("FAKE_WORKER")?;
    let scripts: Vec<&str> = scripts.split(';').collect();
    let script = scripts.get(rank as usize).or(scripts.last()).copied().unwrap_or_default();
    for word in script.split_whitespace() {
        let (command, argument) = word.split_once(':').unwrap_or((word, ""));
        match command {
            "join" => join(rank, argument)?,
            "bench" => bench(rank)?,
            "stderr" => eprintln!("{argument}"),
            "env" => std::env::vars().for_each(|(name, value)| println!("{name}={value}")),
            "sleep" if argument.is_empty() => loop {
                std::thread::sleep(Duration::from_secs(1000));
            },
            "sleep" => std::thread::sleep(Duration::from_millis(argument.parse()?)),
            "ignore-sigterm" => ignore_sigterm()?,
            "allocate" => {
                let mut all = Vec::new();
                loop {
                    all.push(vec![1_u8; 1 << 20]);
                }
            }
            "grandchild" => drop(Command::new("sleep").arg("1000").spawn()?),
            "exit" => std::process::exit(argument.parse()?),
            "exit-plus" => {
                let attempt: i32 = std::env::var(env::ATTEMPT)?.parse()?;
                std::process::exit(argument.parse::<i32>()? + attempt)
            }
            "signal" => {
                let signal = Signal::from_named_raw(argument.parse()?).ok_or("unknown signal")?;
                kill_process(getpid(), signal)?;
            }
            _ => return Err(format!("unknown command `{word}`").into()),
        }
    }
    Ok(())
}

/// Installs a handler that does nothing.
fn ignore_sigterm() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _context = runtime.enter();
    // tokio keeps the handler when stream and runtime are dropped.
    drop(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?);
    Ok(())
}

fn join(rank: u32, mismatch: &str) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reply = runtime.block_on(async {
        let (mut agent, attempt, job) = get_job(rank).await?;
        let spec = JobSpec::from_json(&job.spec_json)?;
        let hash = |field: &str, common: Vec<u8>| {
            if mismatch == field { Digest::of(b"mismatch").0.to_vec() } else { common }
        };
        let request = JoinRequest {
            rank,
            attempt,
            version: if mismatch == "version" { "0.0.1".into() } else { VERSION.into() },
            config_hash: hash("config", spec.digest().0.to_vec()),
            layout_hash: hash("layout", Digest::of(b"layout").0.to_vec()),
            device_uuid: "cpu".into(),
            nccl_id: Vec::new(),
            ring_address: "nowhere".into(),
            pid: std::process::id(),
        };
        Ok::<_, Box<dyn Error>>(agent.join(request).await)
    })?;
    match reply {
        Ok(reply) => eprintln!("joined {} ranks", reply.into_inner().world_size),
        Err(status) => {
            eprintln!("refused: {}", status.message());
            std::process::exit(69);
        }
    }
    Ok(())
}

fn bench(rank: u32) -> Result<(), Box<dyn Error>> {
    join(rank, "")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut agent, attempt, job) = get_job(rank).await?;
        let results = match job.bench.and_then(|bench| bench.kind) {
            Some(Kind::Device(_)) => {
                let rates =
                    Calibration { fp32_gemm_flops: 1e12, copy_bytes_per_second: 1e12, ..Default::default() };
                vec![Report::Calibration(Calibration { wrong: Some(0), ..rates })]
            }
            Some(Kind::AllReduce(bench)) => {
                let report = |count| Report::AllReduce(AllReduceReport { count, seconds: 1e-3, wrong: 0 });
                bench.counts.into_iter().map(report).collect()
            }
            _ => return Err("no benchmark is asked for".into()),
        };
        let all = std::iter::once(Report::Hello(Hello { rank, attempt }))
            .chain(results)
            .chain([Report::Finished(Finished::default())]);
        let all: Vec<_> = all.map(|report| WorkerReport { report: Some(report) }).collect();
        let mut commands = agent.session(tokio_stream::iter(all)).await?.into_inner();
        // The end of the stream means that the last report has arrived.
        while commands.message().await?.is_some() {}
        Ok(())
    })
}

/// Connects to the agent and asks for the job. Returns both, with the number of the attempt.
async fn get_job(rank: u32) -> Result<(AgentClient<Channel>, u32, GetJobReply), Box<dyn Error>> {
    let socket = std::env::var(env::AGENT_SOCKET)?;
    let mut agent = AgentClient::new(connect(Path::new(&socket), endpoint()).await?);
    let attempt = std::env::var(env::ATTEMPT)?.parse()?;
    let request = GetJobRequest { rank, attempt, version: VERSION.into() };
    let job = agent.get_job(request).await?.into_inner();
    Ok((agent, attempt, job))
}
