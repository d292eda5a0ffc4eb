//! Load generator for the rendezvous: many simulated ranks on one node, or many simulated nodes with their coordinator.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a measurement prints")]

mod agents;
mod nodes;
mod ranks;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

/// File descriptors that each process needs in addition to one per connection.
const OTHER_DESCRIPTORS: u64 = 100;

/// Measures the rendezvous of simulated ranks or nodes.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    measurement: Measurement,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Measurement {
    /// Ranks of one node, each with its own connection to the agent.
    Ranks {
        #[arg(value_name = "RANKS", default_values_t = [1000, 10_000])]
        ranks: Vec<u32>,
    },
    /// Nodes, whose agents connect to a coordinator over TCP.
    Nodes(nodes::Setting),
    /// Child process: ranks that join at this socket.
    #[command(hide = true)]
    JoinAt { socket: PathBuf, ranks: u32 },
    /// Child process: agents of nodes, as described on stdin.
    #[command(hide = true)]
    SimulateAgents,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let text = match arguments.measurement {
        Measurement::Ranks { ranks } => {
            ranks::run(&ranks).await.map(|rows| text(&rows, ranks::table, arguments.json))
        }
        Measurement::Nodes(setting) => {
            nodes::run(setting).await.map(|row| text(&[row], nodes::table, arguments.json))
        }
        Measurement::JoinAt { socket, ranks } => ranks::join_all(&socket, ranks).await,
        Measurement::SimulateAgents => agents::simulate().await,
    };
    match text {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("failed to measure the rendezvous: {error}");
            ExitCode::FAILURE
        }
    }
}

fn text<T: Serialize>(rows: &[T], table: fn(&[T]) -> String, json: bool) -> String {
    if json { format!("{:#}\n", serde_json::json!(rows)) } else { table(rows) }
}

/// Raises the soft limit of open files to allow `count` connections. `owners` names their owners in errors.
fn raise_file_limit(count: u32, owners: &str) -> io::Result<()> {
    let needed = u64::from(count) + OTHER_DESCRIPTORS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < needed) {
        let limit = maximum.unwrap_or_default();
        return Err(io::Error::other(format!(
            "{count} {owners} need {needed} file descriptors, {limit} are allowed (ulimit -Hn)"
        )));
    }
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })?)
}
