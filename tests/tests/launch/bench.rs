//! `xlaunch bench rendezvous` with many nodes.

use serde_json::Value;
use xlaunch_tests::Launch;

xlaunch_harness::tests! {
    nodes_join_over_tcp_and_tls_and_all_learn_of_a_failure,
    fewer_ranks_than_nodes_are_refused;
}

fn nodes_join_over_tcp_and_tls_and_all_learn_of_a_failure() {
    for (tls, words) in [(false, &["--json"][..]), (true, &["--json", "--tls"][..])] {
        let options = ["bench", "rendezvous", "--nodes", "20", "--ranks", "45", "--hold", "1"];
        let run = Launch::new().run(&[&options, words].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        let found: Value = serde_json::from_str(&run.stdout).unwrap();
        let row = &found[0];
        assert_eq!((&row["nodes"], &row["ranks"], &row["tls"]), (&20.into(), &45.into(), &tls.into()));
        for key in ["join_seconds", "join_cpu_seconds", "failure_seconds", "peak_memory_bytes"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} in {found}");
        }
        assert_eq!(row["held_seconds"], 1.0);
    }
}

fn fewer_ranks_than_nodes_are_refused() {
    let run = Launch::new().run(&["bench", "rendezvous", "--nodes", "20", "--ranks", "19"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("19 ranks are fewer than 20 nodes"), "{}", run.stderr);
}
