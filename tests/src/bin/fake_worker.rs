//! A scripted worker for tests of the launcher.
//!
//! `FAKE_WORKER` holds one script per rank, separated by `;`; the last one is for all further ranks. A script is a list
//! of commands:
//!
//! - `join` takes part in the rendezvous as a worker of this job; `join:version`, `join:config` and `join:layout` do so
//!   with a value that differs from that of the other ranks. The agent's reply goes to stderr; a refusal ends the
//!   process with exit code 69;
//! - `stderr:TEXT` writes a line; `env` writes the environment to stdout;
//! - `sleep:MS` sleeps, `sleep` without a time does so forever; `ignore-sigterm` ignores SIGTERM from then on;
//! - `grandchild` starts a process that sleeps, in the process group of the worker;
//! - `exit:N` and `signal:N` end the process; `exit-plus:N` does so with N plus the number of the attempt, from 0.
//!   After the last command it exits with code 0.

#![expect(clippy::print_stdout, clippy::print_stderr, clippy::exit, reason = "what a scripted worker is for")]

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use xlaunch_proto::ids::Digest;
use xlaunch_proto::net::connect::{connect, endpoint};
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{GetJobRequest, JoinRequest};
use xlaunch_proto::{VERSION, env};

fn main() -> Result<(), Box<dyn Error>> {
    let rank: u32 = std::env::var("RANK")?.parse()?;
    let scripts = std::env::var("FAKE_WORKER")?;
    let scripts: Vec<&str> = scripts.split(';').collect();
    let script = scripts.get(rank as usize).or(scripts.last()).copied().unwrap_or_default();
    for word in script.split_whitespace() {
        let (command, argument) = word.split_once(':').unwrap_or((word, ""));
        match command {
            "join" => join(rank, argument)?,
            "stderr" => eprintln!("{argument}"),
            "env" => std::env::vars().for_each(|(name, value)| println!("{name}={value}")),
            "sleep" if argument.is_empty() => loop {
                std::thread::sleep(Duration::from_secs(1000));
            },
            "sleep" => std::thread::sleep(Duration::from_millis(argument.parse()?)),
            "ignore-sigterm" => ignore_sigterm()?,
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
        let socket = std::env::var(env::AGENT_SOCKET)?;
        let mut agent = AgentClient::new(connect(Path::new(&socket), endpoint()).await?);
        let attempt = std::env::var(env::ATTEMPT)?.parse()?;
        let request = GetJobRequest { rank, attempt, version: VERSION.into() };
        let job = agent.get_job(request).await?.into_inner();
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
