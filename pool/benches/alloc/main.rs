//! Measures the pool's cost and memory use, and compares it with other allocators.
//!
//! ```text
//! cargo bench -p xlaunch-pool                              two tables: time of a request, memory of recorded steps
//! cargo bench -p xlaunch-pool -- --json pool-rank0.csv     as JSON, with a trace of your own
//! cargo bench -p xlaunch-pool --no-run                     builds the program and prints its path, for other hosts
//! ```
//! A trace is a log in the replay format of the RAPIDS Memory Manager: `Snapshot::rmm_csv` writes one. Rows of device
//! allocators are measured if there is a GPU.

#[cfg(feature = "cuda")]
mod device;
pub(crate) mod replay;
pub(crate) mod report;
#[allow(dead_code, reason = "tests use the rest of the simulated device")]
#[path = "../../tests/common/sim.rs"]
mod sim;
mod timings;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: alloc [--json] [--runs N] [TRACE.csv]...

  --json      print JSON
  --runs N    repetitions of every measurement, of which the median is reported (default: 9)";

/// The arguments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) json: bool,
    pub(crate) runs: usize,
    pub(crate) traces: Vec<PathBuf>,
}

impl Arguments {
    /// Parses arguments. `--bench`, which `cargo bench` adds, is ignored.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self { json: false, runs: 9, traces: Vec::new() };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => {}
                "--json" => parsed.json = true,
                "--runs" => {
                    let runs = arguments.next().and_then(|runs| runs.parse().ok());
                    parsed.runs = runs.filter(|runs| *runs > 0).ok_or("--runs needs a positive number")?;
                }
                flag if flag.starts_with('-') => return Err(format!("unknown option `{flag}`\n\n{USAGE}")),
                path => parsed.traces.push(path.into()),
            }
        }
        Ok(parsed)
    }
}

/// Measures, and formats the result.
pub(crate) fn run(arguments: &Arguments) -> Result<String, String> {
    let traces = report::load_traces(&arguments.traces)?;
    let report = report::measure(arguments.runs, &traces).map_err(|error| error.to_string())?;
    Ok(if arguments.json { report.json() } else { report.tables() })
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the result of the program")]
fn main() -> ExitCode {
    match Arguments::parse(std::env::args().skip(1)).and_then(|arguments| run(&arguments)) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}
