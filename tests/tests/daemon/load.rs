//! The load generator.

use std::process::Command;

use serde_json::Value;
use xlaunch_tests::Process;

xlaunch_harness::tests! {
    status_load_reports_rate_and_latency;
}

fn status_load_reports_rate_and_latency() {
    let mut load = Command::new(env!("CARGO_BIN_EXE_daemon_load"));
    load.args(["status", "--connections", "2", "--pipelined", "3", "--seconds", "0.1", "--json"]);
    let run = Process::spawn(&mut load).wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let found: Value = serde_json::from_str(&run.stdout).unwrap();
    let number = |key: &str| found[key].as_f64().unwrap_or_else(|| panic!("{key} in {found}"));
    // Each of six clients sends at least two queries.
    assert!(number("queries") >= 12.0 && number("queries_per_second") > 0.0, "{found}");
    assert!(number("median_ms") > 0.0 && number("p99_ms") >= number("median_ms"), "{found}");
}
