//! Compares the answers of `xlaunch serve` with transformers, and evaluates a model through it with
//! lm-evaluation-harness.

use xlaunch_tests::{requirements, run_ok, transformers_peer, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    log_probabilities_are_those_of_transformers;
    needs requirements::evaluation_harness:
    evaluation_harness_gets_the_scores_of_the_exported_model;
}

fn log_probabilities_are_those_of_transformers() {
    let mut served = transformers_peer("served.py");
    let output = run_ok(served.env("TRANSFORMERS_VERBOSITY", "error").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": equal: log-probabilities, texts, chats\n").count(), 4, "{output}");
}

fn evaluation_harness_gets_the_scores_of_the_exported_model() {
    let output = run_ok(transformers_peer("harness.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches("30 of 30 samples are equal").count(), 6, "{output}");
    assert_eq!(output.matches("6 of 6 samples are equal").count(), 2, "{output}");
}
