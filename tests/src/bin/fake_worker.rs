//! A worker that does what it is told, for tests of the launcher.
//!
//! `FAKE_WORKER` holds one entry per rank, separated by `;`, the last for all further ranks. An entry is words:
//!
//! - `join` meets the others as a worker of this job would; `join:version`, `join:config`, `join:layout` with a value that
//!   nobody else has; what the agent answers goes to stderr, and a refusal ends the process with 69;
//! - `say:TEXT` writes a line to stderr; `environment` writes the environment to stdout; `pause:MS` waits;
//! - `grandchild` starts a process that sleeps, in this process group; `sleep` waits for ever; `deaf` ignores SIGTERM;
//! - `exit:N` and `signal:N` end the process. So does the end of the entry, with 0.

#![expect(clippy::print_stdout, clippy::print_stderr, clippy::exit, reason = "what a scripted worker is for")]

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tonic::transport::{Channel, Endpoint, Uri};
use xlaunch_proto::ids::Digest;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{GetJobRequest, JoinRequest};
use xlaunch_proto::{VERSION, env};

fn main() -> Result<(), Box<dyn Error>> {
    let rank: u32 = std::env::var("RANK")?.parse()?;
    let script = std::env::var("FAKE_WORKER")?;
    let entries: Vec<&str> = script.split(';').collect();
    let entry = entries.get(rank as usize).or(entries.last()).copied().unwrap_or_default();
    for word in entry.split_whitespace() {
        let (verb, argument) = word.split_once(':').unwrap_or((word, ""));
        match verb {
            "join" => join(rank, argument)?,
            "say" => eprintln!("{argument}"),
            "pause" => std::thread::sleep(Duration::from_millis(argument.parse()?)),
            "environment" => std::env::vars().for_each(|(name, value)| println!("{name}={value}")),
            "grandchild" => drop(Command::new("sleep").arg("1000").spawn()?),
            "deaf" => ignore_terminate(),
            "sleep" => loop {
                std::thread::sleep(Duration::from_secs(1000));
            },
            "exit" => std::process::exit(argument.parse()?),
            "signal" => {
                let signal = Signal::from_named_raw(argument.parse()?).ok_or("no such signal")?;
                kill_process(getpid(), signal)?;
            }
            _ => return Err(format!("unknown word {word}").into()),
        }
    }
    Ok(())
}

/// Takes SIGTERM and does nothing.
fn ignore_terminate() {
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime {
            runtime.block_on(async {
                let mut terminate =
                    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).ok();
                while let Some(terminate) = &mut terminate {
                    terminate.recv().await;
                }
            });
        }
    });
    // Until the handler is in place.
    std::thread::sleep(Duration::from_millis(200));
}

fn join(rank: u32, odd: &str) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(async {
        let mut agent = AgentClient::new(connect().await?);
        let attempt = std::env::var(env::ATTEMPT)?.parse()?;
        let request = GetJobRequest { rank, attempt, version: VERSION.into() };
        let job = agent.get_job(request).await?.into_inner();
        let spec = JobSpec::from_json(&job.spec_json)?;
        let own =
            |what: &str, common: Vec<u8>| if odd == what { Digest::of(b"odd").0.to_vec() } else { common };
        let request = JoinRequest {
            rank,
            attempt,
            version: if odd == "version" { "0.0.1".into() } else { VERSION.into() },
            config_hash: own("config", spec.digest().0.to_vec()),
            layout_hash: own("layout", Digest::of(b"layout").0.to_vec()),
            device_uuid: "cpu".into(),
            nccl_id: Vec::new(),
            ring_address: "nowhere".into(),
            pid: std::process::id(),
        };
        Ok::<_, Box<dyn Error>>(agent.join(request).await)
    })?;
    match answer {
        Ok(reply) => eprintln!("joined {} ranks", reply.into_inner().world_size),
        Err(status) => {
            eprintln!("refused: {}", status.message());
            std::process::exit(69);
        }
    }
    Ok(())
}

async fn connect() -> Result<Channel, Box<dyn Error>> {
    let socket = std::env::var(env::AGENT_SOCKET)?;
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(
                tokio::net::UnixStream::connect(socket).await?,
            ))
        }
    });
    Ok(Endpoint::from_static("http://agent").connect_with_connector(connector).await?)
}
