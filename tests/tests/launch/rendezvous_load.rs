//! The rendezvous of many simulated ranks and nodes.

use std::process::{Command, Output};

use serde_json::Value;

xlaunch_harness::tests! {
    nodes_join_over_tcp_and_tls_and_all_learn_of_a_failure,
    ranks_of_one_node_join_and_too_few_file_descriptors_are_named;
}

const LOAD: &str = env!("CARGO_BIN_EXE_rendezvous_load");

fn measured(arguments: &[&str]) -> Value {
    let Output { stdout, stderr, status } = Command::new(LOAD).args(arguments).output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

fn nodes_join_over_tcp_and_tls_and_all_learn_of_a_failure() {
    for (tls, words) in [(false, &[][..]), (true, &["--tls"][..])] {
        let found = measured(&[&["--json", "nodes", "20", "45", "--hold", "1"], words].concat());
        let row = &found[0];
        assert_eq!((&row["nodes"], &row["ranks"], &row["tls"]), (&20.into(), &45.into(), &tls.into()));
        for key in ["join_seconds", "join_cpu_seconds", "failure_seconds", "peak_memory_bytes"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} in {found}");
        }
        assert_eq!(row["held_seconds"], 1.0);
    }
}

fn ranks_of_one_node_join_and_too_few_file_descriptors_are_named() {
    let found = measured(&["--json", "ranks", "50", "200"]);
    assert_eq!((&found[0]["ranks"], &found[1]["ranks"]), (&50.into(), &200.into()));
    assert!(found[1]["seconds"].as_f64().unwrap() > 0.0, "{found}");
    let limited = format!("ulimit -n 150; exec {LOAD} ranks 200");
    let refused = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "{error}");
    for words in ["200 ranks", "300", "150"] {
        assert!(error.contains(words), "{words} in {error}");
    }
}
