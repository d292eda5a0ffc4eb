//! `xlaunch rendezvous`: a coordinator outside the nodes that train, so that a job survives the loss of any node. It
//! serves one job, and exits with the job's exit code.

use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use xlaunch_cluster::hosting::Standalone;
use xlaunch_cluster::nodes::Nodes;
use xlaunch_proto::env;
use xlaunch_spec::command::{Backend, Endpoint, GroupSpec, NodeCount, Security};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::output::{QueryError, print_note};
use super::torchrun;

/// Options of `xlaunch rendezvous`.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: that of the job; 143 after SIGTERM, 69 if the address cannot be used.")]
pub(super) struct Rendezvous {
    /// Name or address at which the nodes reach this host, and a port [default port: 29400]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = endpoint)]
    listen: Endpoint,
    /// Id of the job; launches with another id are refused
    #[arg(long, value_name = "ID")]
    rdzv_id: Option<String>,
    /// File with the token of the job, at least 16 bytes and the same on all nodes [env: XLAUNCH_TOKEN, the token
    /// itself]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Use plain TCP without authentication, for a trusted network
    #[arg(long, conflicts_with = "token_file")]
    rdzv_insecure: bool,
}

pub(super) async fn run(options: Rendezvous) -> Result<ExitCode, QueryError> {
    let token_file = options.token_file.clone();
    let nodes = Nodes { spec: spec(options)?, token_file };
    let failed = |error: std::io::Error| Refusal::new(ExitCode::Internal, error.to_string());
    let mut terminated = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(failed)?;
    let (notices, mut lines) = mpsc::unbounded_channel();
    let coordinator = Standalone::start(&nodes, notices).await?;
    print_note(&format!(
        "xlaunch: coordinating one job at {0}; start its nodes with `--rdzv-endpoint {0} --rdzv-conf is_host=0`",
        nodes.spec.endpoint
    ));
    let mut ended = pin!(coordinator.ended());
    loop {
        tokio::select! {
            exit_code = &mut ended => return Ok(exit(exit_code)),
            _ = terminated.recv() => return Ok(ExitCode::Stopped),
            _ = interrupted.recv() => return Ok(ExitCode::Interrupted),
            Some(line) = lines.recv() => print_note(&format!("xlaunch: {line}")),
        }
    }
}

fn spec(options: Rendezvous) -> Result<GroupSpec, Refusal> {
    let Rendezvous { listen, rdzv_id, token_file, rdzv_insecure } = options;
    let has_token = std::env::var_os(env::TOKEN).is_some_and(|token| !token.is_empty());
    let security = if rdzv_insecure {
        Security::Insecure
    } else if token_file.is_some() || has_token {
        Security::Token
    } else {
        return Err(usage(format!(
            "nodes need a secret token: --token-file FILE or {}, at least 16 bytes and the same on every node; on a \
             trusted network, --rdzv-insecure turns authentication off",
            env::TOKEN
        )));
    };
    if security == Security::Insecure {
        print_note(&format!(
            "warning: plain TCP without authentication: any host that reaches {listen} can join this job; --token-file \
             turns on TLS"
        ));
    }
    // The agents of the nodes bring the actual numbers.
    let nodes = NodeCount { min: 1, max: 1 };
    let spec = GroupSpec { run_id: rdzv_id, ..GroupSpec::new(nodes, Backend::Dynamic, listen, security) };
    spec.check().map_err(|error| usage(error.to_string()))?;
    Ok(spec)
}

fn endpoint(text: &str) -> Result<Endpoint, String> {
    if text.is_empty() || text.starts_with(':') {
        return Err("expected HOST or HOST:PORT".into());
    }
    let (host, port) = torchrun::group_endpoint(text)?;
    if host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
        return Err("expected one address of this host, the one that the nodes reach".into());
    }
    Ok(Endpoint { host, ports: vec![port.unwrap_or(torchrun::DYNAMIC_PORT)] })
}

fn usage(message: String) -> Refusal {
    Refusal::new(ExitCode::Usage, message)
}

/// Converts the job's exit code. A command's exit codes are its own, so they need not be in the table.
fn exit(code: Option<u32>) -> ExitCode {
    let Some(code) = code.and_then(|code| u8::try_from(code).ok()) else { return ExitCode::Internal };
    ExitCode::from_code(code.into()).unwrap_or(ExitCode::Worker(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_one_that_nodes_can_reach() {
        let listen = |text| endpoint(text).map(|it| it.to_string());
        assert_eq!(listen("[fd77::1]:7").unwrap(), "[fd77::1]:7");
        assert_eq!(listen("h0").unwrap(), "h0:29400");
        for refused in ["0.0.0.0:29400", "[::]:29400", "fd77::1:6000", "", ":29400", "h0:0"] {
            assert!(listen(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn coordinator_exits_as_its_job_does() {
        assert_eq!(exit(Some(0)), ExitCode::Done);
        assert_eq!(exit(Some(75)), ExitCode::Retryable);
        assert_eq!(exit(Some(42)).code(), 42);
        assert_eq!(exit(None), ExitCode::Internal);
    }
}
