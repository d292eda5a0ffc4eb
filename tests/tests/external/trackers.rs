//! Metrics in Weights & Biases and MLflow, by `examples/track.py`.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Job, Process, requirements};

xlaunch_harness::tests! {
    needs requirements::trackers:
    trackers_store_every_value_of_metrics_jsonl;
}

fn trackers_store_every_value_of_metrics_jsonl() {
    let job = Job::new();
    job.run_ok(&["--set", "train.eval_every=4", "--set", "train.sample=0"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/trackers.py");
    let output =
        Process::spawn(Command::new(requirements::python_path()).arg(script).arg(job.run_dir())).wait();
    assert_eq!(
        (output.code, output.stdout.as_str()),
        (0, "wandb: equal\nmlflow: equal\n"),
        "{}",
        output.stderr
    );
}
