//! Tests of the bench program `benches/alloc`, and of the models of allocators that it compares.

#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

#[expect(dead_code, reason = "`main` of the bench")]
#[path = "../benches/alloc/main.rs"]
mod bench;

use bench::replay::{RECORDED, Trace};
use bench::{Arguments, run};
use xlaunch_pool::{Options, Pool};

const LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    0,0.1,allocate,0x10,1000,0\n0,0.2,allocate,0x20,3000000,0\n0,0.3,free,0x20,3000000,0\n";

fn parse(arguments: &[&str]) -> Result<Arguments, String> {
    Arguments::parse(arguments.iter().map(|argument| (*argument).to_owned()))
}

/// Writes a trace and returns its path.
fn trace_file(dir: &tempfile::TempDir, name: &str, log: &str) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, log).unwrap();
    path.display().to_string()
}

#[test]
fn tables_show_timings_and_memory_of_recorded_and_given_traces() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace_file(&dir, "own.csv", LOG);
    let tables = run(&parse(&["--runs", "1", &trace]).unwrap()).unwrap();
    for words in [
        "nanoseconds",
        "from a plan",
        "llama-28m",
        "gpt2-124m",
        "PyTorch's algorithm",
        "lower bound",
        "driver allocations",
        &trace,
    ] {
        assert!(tables.contains(words), "{words} in {tables}");
    }
}

#[test]
fn json_holds_every_row_of_the_tables() {
    let text = run(&parse(&["--bench", "--json", "--runs", "1"]).unwrap()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let timings = json["timings"].as_array().unwrap();
    assert!(
        timings.len() >= 4 && timings.iter().all(|row| row["nanoseconds"].as_f64() > Some(0.0)),
        "{json}"
    );
    assert_eq!(timings.len() == 4, json["no_device"].is_string());
    let traces = json["traces"].as_array().unwrap();
    assert_eq!(traces.len(), RECORDED.len());
    for trace in traces {
        let live = trace["peak_live_bytes"].as_u64().unwrap();
        let outcomes = trace["outcomes"].as_array().unwrap();
        assert_eq!(outcomes.len(), 5);
        assert!(outcomes.iter().all(|row| row["mapped_bytes"].as_u64().unwrap() >= live), "{trace}");
        assert_eq!(
            trace["driver_allocations"].as_array().map(Vec::len),
            trace["steps"].as_u64().map(|n| n as usize)
        );
    }
}

#[test]
fn unreadable_traces_and_unknown_options_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = trace_file(&dir, "odd.csv", "Thread,Time,Action,Pointer,Size,Stream\n0,0,grow,0x1,1,0\n");
    let refused = |arguments: &[&str]| parse(arguments).and_then(|arguments| run(&arguments)).unwrap_err();
    assert!(refused(&["nowhere.csv"]).contains("cannot read nowhere.csv"));
    assert!(refused(&[&damaged]).contains("odd.csv, line 2"));
    assert!(refused(&["--fast"]).contains("`--fast`"));
    assert!(refused(&["--runs", "0"]).contains("--runs"));
}

#[test]
fn log_is_split_into_start_and_step() {
    let trace = Trace::parse(LOG).unwrap();
    assert_eq!((trace.start.len(), trace.step.len()), (1, 2));
    assert_eq!(trace.peak_live(), 3_001_000);
}

#[test]
fn log_of_a_pool_can_be_replayed() {
    let pool = Pool::host(Options { trace: 1000, ..Options::default() });
    let _kept = [3000, 5 << 20, 70_000].map(|len| pool.alloc::<u8>(len).unwrap());
    drop(pool.alloc::<u8>(2 << 20).unwrap());
    let trace = Trace::parse(&pool.snapshot().rmm_csv()).unwrap();
    assert_eq!((trace.start.len(), trace.step.len()), (3, 2));
}

#[test]
fn damaged_log_is_refused_with_its_line() {
    for (line, reason) in
        [("0,0,free,0x30,1,0", "not in use"), ("x", "six fields"), ("0,0,grow,0x1,1,0", "neither")]
    {
        let error = Trace::parse(&format!("{LOG}{line}\n")).unwrap_err();
        assert_eq!(error.line, 5);
        assert!(error.reason.contains(reason), "{error}");
    }
}

#[test]
fn recorded_steps_call_the_driver_once_and_map_little_more_than_is_live() {
    for (name, log) in RECORDED {
        let trace = Trace::parse(log).unwrap();
        let calls = trace.driver_allocations(4);
        assert!(calls[0] > 0 && calls[1..] == [0, 0, 0], "{name}: {calls:?}");
        let (outcomes, live) = (trace.compare(4), trace.peak_live());
        let ratio = |index: usize| outcomes[index].mapped_bytes as f64 / live as f64;
        let (classes, torch, ours, planned, bound) = (ratio(0), ratio(1), ratio(2), ratio(3), ratio(4));
        assert!(ours <= 1.03 && ours <= torch && torch < classes, "{name}: {ours}, {torch}, {classes}");
        assert!(planned <= 1.015 * bound, "{name}: {planned} of {bound}");
    }
}

#[test]
fn models_map_as_their_algorithms_would() {
    let trace = Trace::parse(LOG).unwrap();
    let outcomes = trace.compare(3);
    assert!(outcomes.iter().all(|outcome| outcome.mapped_bytes >= trace.peak_live()));
    assert_eq!(outcomes[0].mapped_bytes, 1024 + (4 << 20));
    // PyTorch: a segment of 2 MiB for the small buffer, one of 20 MiB for the large one.
    assert_eq!(outcomes[1].mapped_bytes, 22 << 20);
}
