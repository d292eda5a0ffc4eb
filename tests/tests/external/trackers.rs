//! Metrics in Weights & Biases and MLflow, by `examples/track.py`.

use xlaunch_tests::{Job, peer, requirements, run_ok};

xlaunch_harness::tests! {
    needs requirements::trackers:
    trackers_store_every_value_of_metrics_jsonl;
}

fn trackers_store_every_value_of_metrics_jsonl() {
    let job = Job::new();
    job.run_ok(&["--set", "train.eval_every=4", "--set", "train.sample=0"]);
    assert_eq!(run_ok(peer("trackers.py").arg(job.run_dir())), "wandb: equal\nmlflow: equal\n");
}
