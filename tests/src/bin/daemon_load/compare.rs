//! Compares daemons of several binaries, measured in turn, so that other load on the machine affects all of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use xlaunch_tests::{BINARY_VARIABLE, Process};

/// Arguments, and the results to show: heading, key.
type Measurement = (&'static [&'static str], &'static [(&'static str, &'static str)]);

/// Measurements of each round.
const MEASUREMENTS: [Measurement; 3] = [
    (
        &["status", "--json"],
        &[("Status, Get: median ms", "median_ms"), ("99th", "p99_ms"), ("per second", "queries_per_second")],
    ),
    (
        // A user has at most 16 lists in progress.
        &["status", "--list", "--pipelined", "1", "--json"],
        &[("List: median ms", "median_ms"), ("99th", "p99_ms"), ("per second", "queries_per_second")],
    ),
    (&["idle", "--seconds", "3", "--json"], &[("idle: RSS KiB", "resident_kib")]),
];

/// Prints, for each result of each binary, the median over all rounds with the lowest and highest value.
pub(crate) fn compare(binaries: &[PathBuf], rounds: usize, seconds: f64) {
    let columns = MEASUREMENTS.iter().map(|(_, results)| results.len()).sum();
    let mut results = vec![vec![Vec::new(); columns]; binaries.len()];
    for _ in 0..rounds {
        for (binary, results) in binaries.iter().zip(&mut results) {
            let found = MEASUREMENTS.iter().flat_map(|(arguments, keys)| {
                let found = measure(binary, arguments, seconds);
                keys.iter().map(move |(_, key)| found[key].as_f64().unwrap())
            });
            results.iter_mut().zip(found).for_each(|(column, value)| column.push(value));
        }
    }
    for (binary, results) in binaries.iter().zip(&mut results) {
        println!("{}, {rounds} rounds", binary.display());
        let headings = MEASUREMENTS.iter().flat_map(|(_, keys)| keys.iter().map(|(heading, _)| heading));
        for (heading, values) in headings.zip(results) {
            values.sort_by(f64::total_cmp);
            let (lowest, highest) = (values[0], values[values.len() - 1]);
            println!("  {heading:<24} {:>9.2}  ({lowest:.2} to {highest:.2})", values[values.len() / 2]);
        }
    }
}

fn measure(binary: &Path, arguments: &[&str], seconds: f64) -> Value {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments).env(BINARY_VARIABLE, binary);
    if arguments[0] == "status" {
        command.args(["--seconds", &seconds.to_string()]);
    }
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}
