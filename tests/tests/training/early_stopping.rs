//! Early stopping: `train.patience` ends a run whose validation loss no longer improves, after the same step whether it
//! was resumed or not, and keeps the best checkpoint.

use serde_json::Value;
use xlaunch_tests::Job;

xlaunch_harness::tests! {
    run_ends_after_evaluations_without_improvement_and_keeps_the_best_checkpoint,
    run_resumed_on_fewer_ranks_stops_after_the_same_step,
    patience_without_evaluations_is_refused;
}

/// Evaluations every two steps, of text that never follows the training data: the more is learned, the worse its loss.
/// So the first evaluation is the best.
const SETTINGS: [&str; 9] = [
    "train.steps=100",
    "train.lr=5e-3",
    "train.eval_every=2",
    "train.patience=3",
    "train.schedule=constant",
    "data.val=val.txt",
    "checkpoint.dir=saved",
    "checkpoint.keep=1",
    "checkpoint.async=false",
];

fn job() -> Job {
    let job = Job::new();
    job.write("val.txt", "iZnZ".repeat(100));
    job
}

fn args<'a>(settings: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    settings.chain(more.iter().copied()).collect()
}

fn checkpoints(job: &Job) -> Vec<String> {
    let entries = std::fs::read_dir(job.path().join("saved")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    names
}

fn run_ends_after_evaluations_without_improvement_and_keeps_the_best_checkpoint() {
    let job = job();
    let run = job.run_ok(&args(&[], &["--nproc", "2"]));
    assert_eq!(job.losses().len(), 8, "{}", run.stderr);
    let metrics = job.metrics();
    let evaluations: Vec<&Value> = metrics.iter().filter(|line| line["val/loss"].is_f64()).collect();
    assert!(evaluations.iter().all(|line| line["val/best_step"] == 2), "{evaluations:?}");
    let best = evaluations[0]["val/loss"].as_f64().unwrap();
    let reason = format!("validation loss has not improved in 3 evaluations; best {best:.4} at step 2");
    assert!(run.stderr.contains(&format!("xlaunch: stopping early: {reason}\n")), "{}", run.stderr);
    let best = job.path().join("saved/step-00000002");
    for line in [format!("stopped     early: {reason}\n"), format!("best        {}\n", best.display())] {
        assert!(run.stdout.contains(&line), "{line} in {}", run.stdout);
    }
    let summary = std::fs::read_to_string(job.run_dir().join("summary.json")).unwrap();
    assert!(summary.contains(&format!("stopped early: {reason}")), "{summary}");
    assert_eq!(checkpoints(&job), ["step-00000002", "step-00000008"]);

    // The run is over, until the user allows more evaluations.
    let over = job.run_ok(&args(&[], &["--nproc", "2", "--resume"]));
    assert!(over.stderr.contains("nothing is left to train"), "{}", over.stderr);
    assert!(over.stderr.contains("raise `train.patience` to continue"), "{}", over.stderr);
    job.run_ok(&args(&["train.patience=5"], &["--nproc", "2", "--resume"]));
    assert_eq!(job.losses().len(), 12);
    assert_eq!(checkpoints(&job), ["step-00000002", "step-00000008", "step-00000012"], "8 is the source");
}

fn run_resumed_on_fewer_ranks_stops_after_the_same_step() {
    let job = job();
    job.run_ok(&args(&["train.steps=4"], &["--nproc", "2"]));
    let resumed = job.run_ok(&args(&["train.batch=8"], &["--nproc", "1", "--resume"]));
    assert!(resumed.stderr.contains("resuming at step 5 "), "{}", resumed.stderr);
    assert!(resumed.stderr.contains("not improved in 3 evaluations"), "{}", resumed.stderr);
    assert_eq!(job.losses().len(), 8);
    assert_eq!(checkpoints(&job), ["step-00000002", "step-00000004", "step-00000008"], "4 is the source");
}

fn patience_without_evaluations_is_refused() {
    let job = job();
    job.write("wrong.toml", "[train]\npatience = 3\neval_every = 0\n");
    let refused =
        xlaunch_tests::Process::spawn(job.command(&["wrong.toml"]).env("RUST_BACKTRACE", "0")).wait();
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    let problem =
        "wrong.toml:2:12: train.patience: early stopping needs evaluations, but train.eval_every = 0";
    assert!(refused.stderr.contains(problem), "{}", refused.stderr);
    job.write("val.txt", "short");
    let refused = job.run(&args(&["data.val=[]", "data.val_fraction=0"], &[]));
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("train.patience: evaluation is off"), "{}", refused.stderr);
}
