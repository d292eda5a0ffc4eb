//! The trainer end to end on CPUs: what a run leaves behind, and that neither the number of ranks nor an interruption
//! changes it.

use rustix::process::Signal;
use xlaunch_tests::Job;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer-00000-of-00001.safetensors";

#[test]
fn a_run_reports_steps_and_leaves_metrics_a_checkpoint_and_a_sample() {
    let job = Job::new();
    let run = job.run_well(&["--nproc", "2", "--set", "train.sample=20", "--set", "train.eval_every=4"]);
    for text in ["step 8/8", "loss", "lr ", "grad norm", "tok/s", "left", "val loss"] {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
    for text in ["2 ranks on CPU", "steps       8", "checkpoint", "metrics.jsonl", "the model writes:"] {
        assert!(run.stdout.contains(text), "{text} in {}", run.stdout);
    }
    let metrics = job.metrics();
    let steps: Vec<_> = metrics.iter().filter(|line| line["train/loss"].is_f64()).collect();
    assert_eq!(steps.len(), 8);
    assert!(steps.iter().all(|step| step["train/grad_norm"].is_f64() && step["pool/mapped_bytes"].is_u64()));
    assert_eq!(metrics.iter().filter(|line| line["val/loss"].is_f64()).count(), 2);
    assert!(!job.checkpoint(8, "manifest.json").is_empty());
}

#[test]
fn the_number_of_ranks_changes_no_loss_and_all_ranks_hold_the_same_parameters() {
    let run = |ranks: usize, model: &str| {
        let job = Job::new();
        let batch = format!("train.batch={}", 8 / ranks);
        let run = job.run_well(&[
            "--nproc",
            &ranks.to_string(),
            "--set",
            &batch,
            "--set",
            model,
            "--set",
            "observe.check_replicas=true",
        ]);
        assert!(run.stdout.contains("largest parameter difference 0e0"), "{}", run.stdout);
        job.losses()
    };
    for model in ["model.arch=\"llama\"", "model.arch=\"gpt2\""] {
        let one = run(1, model);
        assert_eq!(one.len(), 8);
        for ranks in [2, 4] {
            for (step, (a, b)) in run(ranks, model).iter().zip(&one).enumerate() {
                assert!((a - b).abs() <= 1e-6 * b, "{model}, {ranks} ranks, step {step}: {a} and {b}");
            }
        }
    }
}

#[test]
fn micro_steps_make_the_same_batch() {
    let losses = |batch: &str, accumulate: &str| {
        let job = Job::new();
        job.run_well(&["--set", batch, "--set", accumulate]);
        job.losses()
    };
    let (whole, parts) =
        (losses("train.batch=8", "train.accumulate=1"), losses("train.batch=2", "train.accumulate=4"));
    for (a, b) in whole.iter().zip(&parts) {
        assert!((a - b).abs() <= 1e-6 * a, "{whole:?} and {parts:?}");
    }
}

#[test]
fn the_same_command_gives_the_same_bits() {
    let bits = || {
        let job = Job::new();
        job.run_well(&["--nproc", "2"]);
        (job.losses(), job.checkpoint(8, MODEL))
    };
    assert!(bits() == bits());
}

#[test]
fn a_tiny_model_learns_eight_sequences_by_heart() {
    let job = Job::new();
    // Eight windows of 32 tokens and the token behind the last. Each begins with a byte of its own: nothing is left to
    // guess.
    let text: Vec<u8> = (0..257_u32)
        .map(|i| if i % 32 == 0 { b'A' + (i / 32) as u8 } else { b'a' + (i * i * 31 % 113 % 26) as u8 })
        .collect();
    job.write("text/a.txt", text);
    let settings = [
        "data.val_fraction=0.0",
        "train.steps=600",
        "train.batch=8",
        "train.lr=5e-3",
        "train.weight_decay=0.0",
        "model.dim=64",
    ];
    let args: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    job.run_well(&args);
    let last = job.losses().last().copied();
    assert!(last.is_some_and(|loss| loss < 0.1), "{last:?}");
}

#[test]
fn resumed_is_uninterrupted_bit_for_bit() {
    let whole = Job::new();
    whole.run_well(&["--nproc", "2", "--set", "train.steps=12"]);

    let parts = Job::new();
    parts.run_well(&[
        "--nproc",
        "2",
        "--set",
        "train.steps=12",
        "--set",
        "checkpoint.every=5",
        "--set",
        "checkpoint.keep=0",
    ]);
    // As if the run had been lost after step 5.
    for step in [10, 12] {
        std::fs::remove_dir_all(parts.latest().join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    let resumed = parts.run_well(&["--nproc", "2", "--set", "train.steps=12", "--resume"]);
    assert!(resumed.stderr.contains("resuming at step 5"), "{}", resumed.stderr);
    assert_eq!(parts.losses(), whole.losses()[5..]);
    assert!(parts.checkpoint(12, MODEL) == whole.checkpoint(12, MODEL));
}

#[test]
fn interrupted_and_resumed_is_uninterrupted_bit_for_bit() {
    interrupted_is_uninterrupted(&["--nproc", "2", "--set", "train.steps=400"]);
}

/// Runs a job of 400 steps, and again with an interrupt and a resume in between; returns the one that was left alone.
fn interrupted_is_uninterrupted(args: &[&str]) -> Job {
    let whole = Job::new();
    whole.run_well(args);

    let parts = Job::new();
    let first = parts.start(args);
    first.wait_for_stderr("step 1/");
    first.signal(Signal::INT);
    let first = first.finish();
    assert_eq!(first.code, 143, "{}", first.stderr);
    let before = parts.losses();
    assert!(before.len() < 400, "it ended before the signal came");
    parts.run_well(&[args, &["--resume"]].concat());
    assert_eq!([before, parts.losses()].concat(), whole.losses());
    assert!(parts.checkpoint(400, MODEL) == whole.checkpoint(400, MODEL));
    whole
}

const SHARED: &str = "comm.shard_optimizer=true";

/// Runs with `settings`; whatever ranks share, all must end with the same parameters. What the model writes.
fn train(job: &Job, ranks: &str, settings: &[&str]) -> String {
    let settings = settings.iter().chain(&["observe.check_replicas=true"]).flat_map(|set| ["--set", set]);
    let run = job.run_well(&["--nproc", ranks].into_iter().chain(settings).collect::<Vec<_>>());
    assert!(run.stdout.contains("largest parameter difference 0e0"), "{}", run.stdout);
    run.stdout.split("the model writes:").skip(1).collect()
}

#[test]
fn a_shared_optimizer_changes_no_bit_unless_gradients_are_clipped_and_then_no_loss() {
    for ranks in ["2", "4"] {
        for model in ["model.arch=\"llama\"", "model.arch=\"gpt2\""] {
            // Small buckets, so that there are several.
            let common = [model, "comm.bucket_mb=0.02", "train.batch=2", "train.accumulate=2"];
            let run = |settings: &[&str]| {
                let job = Job::new();
                train(&job, ranks, &[&common[..], &["train.eval_every=3"], settings].concat());
                let series = |key| job.metrics().iter().filter_map(|line| line[key].as_f64()).collect();
                let series: [Vec<f64>; 3] = ["train/loss", "val/loss", "train/grad_norm"].map(series);
                assert_eq!(series.each_ref().map(Vec::len), [8, 3, 8]);
                (series, [MODEL, OPTIMIZER].map(|file| job.checkpoint(8, file)))
            };
            let whole = run(&["train.clip=0.0"]);
            for overlap in ["comm.overlap=true", "comm.overlap=false"] {
                let shared = run(&[SHARED, overlap, "train.clip=0.0"]);
                assert!(shared.0[..2] == whole.0[..2], "{ranks} ranks, {model}, {overlap}: losses");
                assert!(shared.1 == whole.1, "{ranks} ranks, {model}, {overlap}: parameters and moments");
            }
            // Ranks' parts of the norm are rounded before they are added up.
            let (shared, whole) = (run(&[SHARED]).0, run(&[]).0);
            assert!(whole[2].iter().any(|norm| *norm > 1.0), "clipping has something to do: {whole:?}");
            for (a, b) in shared.iter().flatten().zip(whole.iter().flatten()) {
                assert!((a - b).abs() <= 1e-6 * b, "{ranks} ranks, {model}: {shared:?} and {whole:?}");
            }
        }
    }
}

#[test]
fn a_shared_optimizer_and_a_whole_one_go_on_from_each_others_checkpoints() {
    let common = ["train.clip=0.0", "checkpoint.every=4", "comm.bucket_mb=0.02", "train.sample=200"];
    let whole = Job::new();
    let text = train(&whole, "2", &common);
    assert!(text.len() > 200, "{text}");
    for (before, after) in [(true, false), (false, true), (true, true)] {
        let job = Job::new();
        let way = |shared: bool| format!("comm.shard_optimizer={shared}");
        train(&job, "2", &[&common[..], &[&way(before)]].concat());
        let four = job.latest().join("checkpoints/step-00000004").display().to_string();
        let resume = format!("checkpoint.resume={four:?}");
        assert_eq!(train(&job, "2", &[&common[..], &[&way(after), &resume]].concat()), text);
        assert_eq!(job.losses(), whole.losses()[4..], "shared before {before}, after {after}");
        for file in [MODEL, OPTIMIZER] {
            assert!(job.checkpoint(8, file) == whole.checkpoint(8, file), "{file}: {before}, {after}");
        }
        if before {
            // The same batch by one rank: equal but for the order of sums.
            train(&job, "1", &[&common[..], &[&resume, "train.batch=8"]].concat());
            for (a, b) in job.losses().iter().zip(&whole.losses()[4..]) {
                assert!((a - b).abs() <= 1e-6 * b, "by one rank: {a} and {b}");
            }
        }
    }
}

#[test]
fn stopping_and_evaluating_ranks_that_share_work_is_as_ever() {
    let args = ["--nproc", "2", "--set", SHARED, "--set", "train.steps=400", "--set", "train.eval_every=100"];
    let whole = interrupted_is_uninterrupted(&args);
    assert_eq!(whole.metrics().iter().filter(|line| line["val/loss"].is_f64()).count(), 4);
}

#[test]
fn ranks_that_cannot_share_equally_are_refused() {
    let run = Job::new().run(&["--nproc", "3", "--set", SHARED]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    for text in ["comm.shard_optimizer", "3 ranks", "1, 2, 4 or 8"] {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
}

#[test]
fn a_checkpoint_without_its_last_file_or_with_a_changed_byte_does_not_exist() {
    let job = Job::new();
    let args = ["--set", "checkpoint.every=4", "--set", "checkpoint.dir=\"saved\""];
    job.run_well(&args);
    let saved = job.path().join("saved");
    std::fs::remove_file(saved.join("step-00000008/manifest.json")).unwrap();
    let resumed = job.run_well(&[&args[..], &["--resume"]].concat());
    assert!(resumed.stderr.contains("resuming at step 4"), "{}", resumed.stderr);

    let mut weights = std::fs::read(saved.join("step-00000004").join(MODEL)).unwrap();
    let middle = weights.len() / 2;
    weights[middle] ^= 1;
    std::fs::write(saved.join("step-00000004").join(MODEL), weights).unwrap();
    let refused = job.run(&["--resume=saved/step-00000004"]);
    assert_eq!(refused.code, 65, "{}", refused.stderr);
    assert!(refused.stderr.contains(MODEL), "{}", refused.stderr);
}
