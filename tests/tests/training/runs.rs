//! Outputs of a training run; neither the number of ranks nor an interruption changes the result.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Process, read_state, requirements};

xlaunch_harness::tests! {
    run_reports_steps_and_leaves_metrics_checkpoint_and_sample,
    losses_do_not_depend_on_number_of_ranks,
    validation_loss_does_not_depend_on_number_of_ranks,
    gradient_accumulation_equals_one_large_batch,
    same_command_gives_the_same_bits,
    tiny_model_memorizes_eight_sequences,
    resumed_run_equals_uninterrupted_run_bit_for_bit,
    interrupted_and_resumed_run_equals_uninterrupted_run_bit_for_bit,
    run_on_a_drive_without_links_sockets_locks_and_synced_directories_is_resumed,
    stop_ends_the_sampling_of_a_text,
    full_disk_behind_the_console_fails_answers_and_no_run,
    limit_on_file_sizes_fails_checkpoints_like_a_full_disk,
    suspended_launcher_ends_no_run,
    sharded_optimizer_equals_replicated_optimizer,
    sharded_and_replicated_optimizer_resume_from_each_others_checkpoints,
    checkpoint_saved_with_other_buckets_is_resumed_bit_for_bit,
    sharded_optimizer_stops_resumes_and_evaluates,
    muon_depends_neither_on_the_number_of_ranks_nor_on_interruptions,
    normuon_resumes_on_another_number_of_ranks,
    learning_rates_of_groups_are_scaled,
    learning_rate_factors_without_effect_are_refused,
    checkpoint_of_divided_experts_is_resumed_in_any_division,
    experts_that_ranks_cannot_divide_are_refused,
    biases_of_routers_are_resumed_bit_for_bit,
    run_is_not_continued_with_another_optimizer_unless_confirmed,
    checkpoint_without_manifest_or_with_changed_byte_is_not_used,
    resume_in_another_directory_names_the_checkpoint_beside_the_configuration;
    needs requirements::mount_namespace:
    metrics_of_a_disk_that_is_full_for_a_while_have_every_step_once;
}

const MODEL: &str = "model.safetensors";
const MUON: &str = "train.optimizer=\"muon\"";
const SHARD_OPTIMIZER: &str = "comm.shard=\"optimizer\"";

/// Asserts that the values differ only by rounding, from a different order of additions.
fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-6 * b.abs(), "{what}, step {step}: {a} and {b}");
    }
}

/// `--set` before each setting.
fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

fn run_reports_steps_and_leaves_metrics_checkpoint_and_sample() {
    let job = Job::new();
    let run = job.run_ok(&["--nproc", "2", "--set", "train.sample=20", "--set", "train.eval_every=4"]);
    for text in ["step 8/8", "loss", "lr ", "grad norm", "tok/s", "val loss"] {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
    for text in ["2 ranks on CPU", "steps       8", "checkpoint", "metrics.jsonl", "the model writes:"] {
        assert!(run.stdout.contains(text), "{text} in {}", run.stdout);
    }
    let metrics = job.metrics();
    let steps: Vec<_> = metrics.iter().filter(|line| line["train/loss"].is_f64()).collect();
    let numbers = steps.iter().map(|step| step["_step"].as_u64()).collect::<Vec<_>>();
    assert_eq!(numbers, (1..=8).map(Some).collect::<Vec<_>>());
    assert!(steps.iter().all(|step| step["train/grad_norm"].is_f64() && step["pool/mapped_bytes"].is_u64()));
    assert_eq!(metrics.iter().filter(|line| line["val/loss"].is_f64()).count(), 2);
    assert!(!job.checkpoint(8, "manifest.json").is_empty());
}

/// Runs with these settings, and expects all ranks to end with the same parameters. Returns the sampled text.
fn train(job: &Job, ranks: usize, settings: &[&str]) -> String {
    let ranks = ranks.to_string();
    let settings = set(&[settings, &["observe.check_replicas=true", "observe.check_every=3"]].concat());
    let run = job.run_ok(&[&["--nproc", &ranks], &settings[..]].concat());
    assert!(run.stdout.contains("difference 0e0"), "{}", run.stdout);
    run.stdout.split("the model writes:").skip(1).collect()
}

fn losses_do_not_depend_on_number_of_ranks() {
    let losses = |ranks: usize, model: &str| {
        let job = Job::new();
        train(&job, ranks, &[&format!("train.batch={}", 8 / ranks), model]);
        job.losses()
    };
    for model in ["model.arch=\"llama\"", "model.arch=\"gpt2\""] {
        let one = losses(1, model);
        assert_eq!(one.len(), 8);
        for ranks in [2, 4] {
            assert_close(&losses(ranks, model), &one, &format!("{model}, {ranks} ranks"));
        }
    }
}

fn validation_loss_does_not_depend_on_number_of_ranks() {
    // A learning rate that changes no weight: the global batch, and thus training, depends on the number of ranks.
    let common = ["train.steps=2", "train.eval_every=1", "train.lr=1e-30", "train.warmup=0"];
    let evaluate = |ranks: &str, settings: &[&str]| {
        let job = Job::new();
        let run = job.run_ok(&[&["--nproc", ranks], &set(&[&common[..], settings].concat())[..]].concat());
        let losses: Vec<_> = job.metrics().iter().filter_map(|line| line["val/loss"].as_f64()).collect();
        assert_eq!(losses.len(), 2, "{}", run.stderr);
        (losses, run.stderr)
    };
    for (settings, tokens) in [
        // Two batches of four; all three, with none for one rank of four; a single sequence.
        (["train.eval_batches=2", "train.batch=4"], 256),
        (["train.eval_batches=1000000000000000000", "train.batch=5"], 416),
        (["data.val_fraction=0.005", "train.batch=4"], 32),
    ] {
        let (one, _) = evaluate("1", &settings);
        for ranks in ["2", "4"] {
            for sharded in ["comm.shard=\"none\"", SHARD_OPTIMIZER] {
                let (losses, stderr) = evaluate(ranks, &[&settings[..], &[sharded]].concat());
                assert_eq!(losses, one, "{ranks} ranks, {settings:?}, {sharded}");
                assert!(stderr.contains(&format!("({tokens} tokens)")), "{tokens} in {stderr}");
            }
        }
    }
}

fn gradient_accumulation_equals_one_large_batch() {
    let losses = |batch: &str, accumulate: &str| {
        let job = Job::new();
        job.run_ok(&set(&[batch, accumulate]));
        job.losses()
    };
    let whole = losses("train.batch=8", "train.accumulate=1");
    assert_close(&losses("train.batch=2", "train.accumulate=4"), &whole, "4 micro-steps");
}

fn same_command_gives_the_same_bits() {
    let bits = || {
        let job = Job::new();
        job.run_ok(&["--nproc", "2"]);
        (job.losses(), job.checkpoint(8, MODEL))
    };
    assert!(bits() == bits());
}

fn tiny_model_memorizes_eight_sequences() {
    let job = Job::new();
    // Eight windows of 32 tokens plus the token after the last one. Each window begins with a different byte, so every
    // next token can be predicted.
    let text: Vec<u8> = (0..257_u32)
        .map(|i| if i % 32 == 0 { b'A' + (i / 32) as u8 } else { b'a' + (i * i * 31 % 113 % 26) as u8 })
        .collect();
    job.write("text/a.txt", text);
    job.run_ok(&set(&[
        "data.val_fraction=0.0",
        "train.steps=600",
        "train.batch=8",
        "train.lr=5e-3",
        "train.weight_decay=0.0",
        "model.dim=64",
    ]));
    let last = job.losses().last().copied();
    assert!(last.is_some_and(|loss| loss < 0.1), "{last:?}");
}

fn resumed_run_equals_uninterrupted_run_bit_for_bit() {
    let args = ["--nproc", "2", "--set", "train.steps=12"];
    let whole = Job::new();
    whole.run_ok(&args);

    let resumed = Job::new();
    resumed.run_ok(
        &[&args[..], &set(&["checkpoint.every=5", "checkpoint.keep=0", "checkpoint.async=false"])].concat(),
    );
    // Simulates a run that was lost after step 5.
    for step in [10, 12] {
        std::fs::remove_dir_all(resumed.run_dir().join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    resumed.run_ok(&[&args[..], &["--resume"]].concat());
    assert_eq!(resumed.losses(), whole.losses());
    assert!(resumed.checkpoint(12, MODEL) == whole.checkpoint(12, MODEL));
}

fn interrupted_and_resumed_run_equals_uninterrupted_run_bit_for_bit() {
    assert_interruption_changes_nothing(&["--nproc", "2", "--set", "train.steps=400"]);
}

fn run_on_a_drive_without_links_sockets_locks_and_synced_directories_is_resumed() {
    let mut job = Job::new();
    job.create_drive("drive");
    let run =
        |args: &[&str]| job.run_ok(&[&["--nproc", "2", "--set", "job.output=\"drive\""], args].concat());
    run(&["--set", "train.steps=4"]);
    let resumed = run(&["--resume"]);
    assert!(resumed.stderr.contains("resuming at step 5"), "{}", resumed.stderr);
    let shared = run(&["--set", "checkpoint.dir=\"drive/checkpoints\"", "--set", "train.steps=4"]);
    let warning =
        "checkpoints: its file system has no locks (Function not implemented (os error 38)); make sure";
    assert!(shared.stderr.contains(warning), "{}", shared.stderr);
    let export =
        Process::spawn(&mut job.command(&["export", "drive/checkpoints", "--output", "drive/model"])).wait();
    assert_eq!(export.code, 0, "{}", export.stderr);
}

fn stop_ends_the_sampling_of_a_text() {
    let limit = ["launch.shutdown_timeout=5", "launch.shutdown_timeout_max=20", "train.sample=100000000"];
    let stopped_at = |step: &str, settings: &[&str]| {
        let job = Job::new();
        let run = job.spawn(&[&["--nproc", "2"], &*set(&[&limit, settings].concat())].concat());
        run.wait_for_stderr(step);
        run.signal(Signal::INT);
        (job, run.wait())
    };
    let (job, run) = stopped_at("step 1/8", &["train.sample_every=1"]);
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert_eq!(job.losses().len(), 1);
    assert!(!job.checkpoint(1, MODEL).is_empty());
    // The run that continues it samples the text, and a later one has it once.
    for steps in [5, 8] {
        let steps_key = format!("train.steps={steps}");
        let settings = set(&["train.sample_every=1", "train.sample=4", &steps_key]);
        job.run_ok(&[&["--nproc", "2", "--resume"], &*settings].concat());
        let samples = std::fs::read_to_string(job.run_dir().join("samples.jsonl")).unwrap();
        let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["_step"].as_u64();
        assert_eq!(samples.lines().map(step).collect::<Vec<_>>(), (1..=steps).map(Some).collect::<Vec<_>>());
    }
    // After the last step, only the text remains to be done.
    let (job, run) = stopped_at("step 8/8", &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(!job.checkpoint(8, MODEL).is_empty());
}

/// Workers continue while no process reads their reports, thousands of which are read at once afterwards. They fit into
/// the queue of `metrics.jsonl`, so none is dropped however slow the machine is.
fn suspended_launcher_ends_no_run() {
    let job = Job::new();
    let settings = ["train.steps=3500", "model.dim=16", "model.seq=8", "train.batch=1"];
    let run = job.spawn(&[&["--nproc", "2"], &*set(&settings)].concat());
    run.wait_for_stderr("step 1/");
    run.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(3));
    run.signal(Signal::CONT);
    let run = run.wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(job.losses().len(), 3500);
}

/// A run's final output only describes what the run has done; for a query, the answer is the whole purpose.
fn full_disk_behind_the_console_fails_answers_and_no_run() {
    let job = Job::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let run = job.command(&["train.toml"]).stdout(full()).stderr(full()).status().unwrap();
    assert_eq!(run.code(), Some(0));
    assert!(!job.checkpoint(8, MODEL).is_empty());
    let generate =
        ["generate", "runs/train/latest", "--device", "cpu", "--temperature", "0", "--prompt", "line"];
    let help = [&["--help"][..], &["--version"], &["status", "--help"]];
    for query in [&["gen", "schema"][..], &["train.toml", "--dry-run"], &generate].into_iter().chain(help) {
        let output = job.command(query).stdout(full()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{query:?}: {stderr}");
        assert!(stderr.contains("failed to write to stdout: No space left on device"), "{query:?}: {stderr}");
    }
}

fn limit_on_file_sizes_fails_checkpoints_like_a_full_disk() {
    let job = Job::new();
    let mut command = job.limited_command("-f 40", &["train.toml", "--set", "checkpoint.every=2"]);
    let run = Process::spawn(&mut command).wait();
    assert_eq!(run.code, 65, "{}", run.stderr);
    for step in [2, 8] {
        let mut lines = run.stderr.lines();
        let line = lines.find(|line| line.starts_with(&format!("checkpoint of step {step} failed: ")));
        assert!(line.is_some_and(|line| line.ends_with("File too large (os error 27)")), "{}", run.stderr);
    }
    assert_eq!(job.losses().len(), 8);
}

/// Runs a job of 400 steps twice, the second time with an interrupt and a resume. Returns the uninterrupted job.
fn assert_interruption_changes_nothing(args: &[&str]) -> Job {
    let whole = Job::new();
    whole.run_ok(args);

    let resumed = Job::new();
    let run = resumed.spawn(args);
    run.wait_for_stderr("step 1/");
    run.signal(Signal::QUIT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert!(resumed.losses().len() < 400, "it finished before the signal");
    resumed.run_ok(&[args, &["--resume"]].concat());
    assert_eq!(resumed.losses(), whole.losses());
    assert!(resumed.checkpoint(400, MODEL) == whole.checkpoint(400, MODEL));
    whole
}

fn sharded_optimizer_equals_replicated_optimizer() {
    for ranks in [2, 4] {
        for model in ["model.arch=\"llama\"", "model.arch=\"gpt2\""] {
            // Small buckets, so that there are several, even for one matrix.
            let common = [model, "comm.bucket_mb=0.005", "train.batch=2", "train.accumulate=2"];
            let run = |settings: &[&str]| {
                let job = Job::new();
                train(&job, ranks, &[&common[..], &["train.eval_every=3"], settings].concat());
                let series = |key| job.metrics().iter().filter_map(|line| line[key].as_f64()).collect();
                let series: [Vec<f64>; 3] = ["train/loss", "val/loss", "train/grad_norm"].map(series);
                assert_eq!(series.each_ref().map(Vec::len), [8, 3, 8]);
                (series, job.saved_state(8))
            };
            let replicated = run(&["train.clip=0.0"]);
            for overlap in ["comm.overlap=true", "comm.overlap=false"] {
                let sharded = run(&[SHARD_OPTIMIZER, overlap, "train.clip=0.0"]);
                assert!(sharded.0[..2] == replicated.0[..2], "{ranks} ranks, {model}, {overlap}: losses");
                assert!(sharded.1 == replicated.1, "{ranks} ranks, {model}, {overlap}: parameters, moments");
            }
            // With clipping, the shards' contributions to the gradient norm are rounded before they are added.
            let (sharded, replicated) = (run(&[SHARD_OPTIMIZER]).0, run(&[]).0);
            assert!(replicated[2].iter().any(|norm| *norm > 1.0), "something is clipped: {replicated:?}");
            for (sharded, replicated) in sharded.iter().zip(&replicated) {
                assert_close(sharded, replicated, &format!("{ranks} ranks, {model}, clipped"));
            }
        }
    }
}

fn sharded_and_replicated_optimizer_resume_from_each_others_checkpoints() {
    let common = [
        "train.clip=0.0",
        "checkpoint.every=4",
        "checkpoint.async=false",
        "comm.bucket_mb=0.02",
        "train.sample=200",
    ];
    let whole = Job::new();
    let text = train(&whole, 2, &common);
    assert!(text.len() > 200, "{text}");
    for (before, after) in [(true, false), (false, true), (true, true)] {
        let job = Job::new();
        let sharded = |shard: bool| format!("comm.shard={:?}", if shard { "optimizer" } else { "none" });
        train(&job, 2, &[&common[..], &[&sharded(before)]].concat());
        let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
        let resume = format!("checkpoint.resume={checkpoint:?}");
        assert_eq!(train(&job, 2, &[&common[..], &[&sharded(after), &resume]].concat()), text);
        assert_eq!(job.losses(), whole.losses(), "sharded before {before}, after {after}");
        assert!(job.saved_state(8) == whole.saved_state(8), "{before}, {after}");
        if before {
            // The same global batch on one rank.
            train(&job, 1, &[&common[..], &[&resume, "train.batch=8"]].concat());
            assert_close(&job.losses(), &whole.losses(), "one rank");
        }
    }
}

fn checkpoint_saved_with_other_buckets_is_resumed_bit_for_bit() {
    // Matrices and tables are cut into several buckets, which does not change the sum of two ranks' gradients.
    let common = ["train.clip=0.0", "checkpoint.every=4", "checkpoint.async=false", "comm.bucket_mb=0.005"];
    let train = |job: &Job, settings: &[&str]| {
        job.run_ok(&[&["--nproc", "2"], &set(&[&common[..], settings].concat())[..]].concat());
    };
    let whole = Job::new();
    train(&whole, &[]);
    for shard in ["none", "optimizer", "gradients", "parameters"] {
        let shard = format!("comm.shard={shard:?}");
        // In the checkpoint, each parameter is in the shards of one bucket, or of several.
        for saved in ["comm.bucket_mb=25.0", "comm.bucket_mb=0.005"] {
            let job = Job::new();
            train(&job, &[&shard, saved]);
            assert!(job.saved_state(8) == whole.saved_state(8), "{shard}, {saved}");
            let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
            train(&job, &[&shard, &format!("checkpoint.resume={checkpoint:?}")]);
            assert_eq!(job.losses(), whole.losses(), "{shard}, {saved}");
            assert!(job.saved_state(8) == whole.saved_state(8), "{shard}, {saved}");
        }
    }
}

fn sharded_optimizer_stops_resumes_and_evaluates() {
    let args = ["--nproc", "2", "--set", SHARD_OPTIMIZER, "--set", "train.steps=400"];
    let whole =
        assert_interruption_changes_nothing(&[&args[..], &["--set", "train.eval_every=100"]].concat());
    assert_eq!(whole.metrics().iter().filter(|line| line["val/loss"].is_f64()).count(), 4);
}

fn muon_depends_neither_on_the_number_of_ranks_nor_on_interruptions() {
    let losses = |ranks: usize, shard: &str, keys: &[&str]| {
        let job = Job::new();
        let shared = [MUON, &format!("train.batch={}", 12 / ranks), &format!("comm.shard={shard:?}")];
        train(&job, ranks, &[&shared, keys].concat());
        job.losses()
    };
    let [owners, normuon] = ["muon.owners=\"always\"", "muon.normuon=true"];
    for keys in [&[owners][..], &[owners, normuon]] {
        let one = losses(1, "none", keys);
        for (ranks, shard) in
            [(2, "none"), (3, "none"), (4, "none"), (2, "optimizer"), (3, "gradients"), (4, "parameters")]
        {
            assert_close(&losses(ranks, shard, keys), &one, &format!("{ranks} ranks, {shard}, {keys:?}"));
        }
    }
    let keys = set(&[MUON, owners, normuon, SHARD_OPTIMIZER, "train.steps=400"]);
    assert_interruption_changes_nothing(&[&["--nproc", "2"], &keys[..]].concat());
}

fn normuon_resumes_on_another_number_of_ranks() {
    let common =
        [MUON, "muon.normuon=true", "muon.owners=\"always\"", "checkpoint.every=4", "checkpoint.async=false"];
    let job = Job::new();
    train(&job, 2, &[&common[..], &["train.batch=6", SHARD_OPTIMIZER]].concat());
    let whole = job.losses();
    let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
    let resume = format!("checkpoint.resume={checkpoint:?}");
    for (ranks, batch, shard) in [(3, 4, "none"), (4, 3, "optimizer")] {
        let (batch, shard) = (format!("train.batch={batch}"), format!("comm.shard={shard:?}"));
        train(&job, ranks, &[&common[..], &[&batch, &shard, &resume]].concat());
        assert_close(&job.losses(), &whole, &format!("{ranks} ranks"));
    }
}

fn learning_rates_of_groups_are_scaled() {
    let group = |name: &str| match name {
        "wte.weight" | "wpe.weight" => "embeddings",
        "head.weight" => "head",
        _ if name.contains("ln") || name.ends_with("bias") => "vectors",
        _ => "matrices",
    };
    let weights = |scaled: &str, scale: u32, shard: &str| {
        let job = Job::new();
        let scale = format!("lr_scale.{scaled}={scale}");
        let shard = format!("comm.shard={shard:?}");
        train(&job, 2, &["train.steps=1", "model.tied=false", &shard, &scale]);
        let state = read_state(&job.run_dir().join("checkpoints/step-00000001"));
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        let values = |bytes: Vec<u8>| bytes.chunks_exact(4).map(value).collect();
        let parameters =
            state.into_iter().filter(|(name, _)| !name.starts_with("m.") && !name.starts_with("v."));
        parameters.map(|(name, bytes)| (name, values(bytes))).collect::<BTreeMap<String, Vec<f32>>>()
    };
    for (scaled, shard) in [("embeddings", "none"), ("head", "optimizer"), ("vectors", "optimizer")] {
        // One step: a factor of 0 leaves the initial weights, and others multiply the step from there.
        let [before, once, four_times] = [0, 1, 4].map(|scale| weights(scaled, scale, shard));
        let mut found = false;
        for (name, before) in &before {
            let change = |after: &BTreeMap<String, Vec<f32>>| {
                let change = after[name].iter().zip(before).map(|(after, before)| f64::from(after - before));
                change.map(|change| change * change).sum::<f64>().sqrt()
            };
            let expected = if group(name) == scaled { 4.0 * change(&once) } else { change(&once) };
            assert!((change(&four_times) - expected).abs() <= 1e-3 * expected, "{scaled}: {name}");
            found |= group(name) == scaled && expected > 0.0;
        }
        assert!(found, "{scaled}: nothing moves");
    }
}

fn learning_rate_factors_without_effect_are_refused() {
    let job = Job::new();
    for (settings, text) in [
        (&["lr_scale.head=2.0", "model.tied=true"][..], "the head is tied to the embeddings"),
        (&["lr_scale.lora_b=16.0"], "no adapters are trained"),
        (&["lr_scale.embeddings=-1.0"], "lr_scale.embeddings"),
        (&["lr_scale.norms=2.0"], "lr_scale.norms"),
    ] {
        let refused = job.run(&set(settings));
        assert_eq!(refused.code, 2, "{settings:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(text), "{text} in {}", refused.stderr);
    }
}

fn checkpoint_of_divided_experts_is_resumed_in_any_division() {
    let common = [
        "model.experts=4",
        "model.experts_per_token=2",
        "model.expert_ffn=24",
        "checkpoint.every=4",
        "checkpoint.async=false",
        "train.eval_every=4",
    ];
    let divisions =
        [(2, 1, "none"), (2, 2, "none"), (4, 2, "optimizer"), (4, 2, "none"), (4, 4, "optimizer")];
    let run = |job: &Job, (ranks, experts, shard): (usize, usize, &str), settings: &[&str]| {
        let (batch, experts) = (format!("train.batch={}", 8 / ranks), format!("comm.experts={experts}"));
        let shard = format!("comm.shard={shard:?}");
        train(job, ranks, &[&common[..], &[&batch, &experts, &shard], settings].concat())
    };
    let whole = Job::new();
    run(&whole, (1, 1, "none"), &[]);
    let evaluations = |job: &Job| -> Vec<f64> {
        job.metrics().iter().filter_map(|line| line["val/loss"].as_f64()).collect()
    };
    for before in divisions {
        let job = Job::new();
        run(&job, before, &[]);
        assert_close(&job.losses(), &whole.losses(), &format!("{before:?}"));
        assert_close(&evaluations(&job), &evaluations(&whole), &format!("evaluations, {before:?}"));
        let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
        let resume = format!("checkpoint.resume={checkpoint:?}");
        for after in [(1, 1, "none"), (2, 2, "none"), (4, 2, "optimizer"), (4, 4, "none")] {
            run(&job, after, &[&resume]);
            assert_close(&job.losses(), &whole.losses(), &format!("{before:?}, then {after:?}"));
        }
    }
}

fn biases_of_routers_are_resumed_bit_for_bit() {
    let common = [
        "model.experts=4",
        "model.expert_ffn=24",
        "model.shared_experts=2",
        "model.shared_gate=true",
        "model.router=\"sigmoid\"",
        "model.router_bias=true",
        "train.router_aux_loss_coef=0",
        "train.router_bias_rate=0.02",
        "checkpoint.every=4",
        "checkpoint.async=false",
    ];
    for (ranks, shard) in [(1, "none"), (2, "optimizer"), (2, "parameters")] {
        let job = Job::new();
        let shard = format!("comm.shard={shard:?}");
        let settings = [&common[..], &[&shard]].concat();
        train(&job, ranks, &settings);
        let (first, whole) = (job.checkpoint(4, MODEL), job.checkpoint(8, MODEL));
        assert_ne!(first, whole);
        let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
        train(&job, ranks, &[&settings[..], &[&format!("checkpoint.resume={checkpoint:?}")]].concat());
        assert!(job.checkpoint(8, MODEL) == whole, "{ranks} ranks, {shard}");
    }
}

fn experts_that_ranks_cannot_divide_are_refused() {
    let job = Job::new();
    let experts = ["model.experts=6", "model.expert_ffn=24"];
    for (ranks, settings, expected) in [
        ("3", &["comm.experts=2"][..], "3 ranks cannot be divided into groups of 2"),
        ("4", &["comm.experts=4"], "model.experts = 6 cannot be divided among 4 ranks"),
        ("2", &["comm.experts=2", "comm.shard=\"gradients\""], "\"none\" or \"optimizer\""),
        ("2", &["comm.experts=2", "checkpoint.memory=\"on\""], "\"auto\" or \"off\""),
        (
            "2",
            &["comm.experts=2", "model.experts=0", "model.expert_ffn=0"],
            "the model has no experts to divide",
        ),
    ] {
        for dry_run in [&[][..], &["--dry-run"]] {
            let settings = set(&[&experts[..], settings].concat());
            let refused = job.run(&[&["--nproc", ranks], &settings[..], dry_run].concat());
            assert_eq!(refused.code, 2, "{refused:?}");
            assert!(refused.stderr.contains(expected), "{expected}: {}", refused.stderr);
        }
    }
}

fn run_is_not_continued_with_another_optimizer_unless_confirmed() {
    let job = Job::new();
    job.run_ok(&set(&["checkpoint.every=8"]));
    let resume = ["--resume", "--set", MUON, "--set", "train.steps=12"];
    let refused = job.run(&resume);
    assert_eq!(refused.code, 65, "{}", refused.stderr);
    for text in ["train.optimizer was adamw, is now muon", "--resume-changed"] {
        assert!(refused.stderr.contains(text), "{text} in {}", refused.stderr);
    }
    let confirmed = job.run_ok(&[&resume[..], &["--resume-changed"]].concat());
    assert!(confirmed.stderr.contains("train.optimizer was adamw, is now muon"), "{}", confirmed.stderr);
    assert!(!job.checkpoint(12, MODEL).is_empty());
    let back = job.run(&[&["--resume"], &set(&["train.steps=16"])[..]].concat());
    assert_eq!(back.code, 65, "{}", back.stderr);
    assert!(back.stderr.contains("train.optimizer was muon, is now adamw"), "{}", back.stderr);
}

fn checkpoint_without_manifest_or_with_changed_byte_is_not_used() {
    let job = Job::new();
    let args = set(&["checkpoint.every=4", "checkpoint.async=false", "checkpoint.dir=\"saved\""]);
    job.run_ok(&args);
    let saved = job.path().join("saved");
    std::fs::remove_file(saved.join("step-00000008/manifest.json")).unwrap();
    let resumed = job.run_ok(&[&args[..], &["--resume"]].concat());
    assert!(resumed.stderr.contains("resuming at step 5 "), "{}", resumed.stderr);

    let weights = saved.join("step-00000004").join(MODEL);
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let refused = job.run(&["--resume=saved/step-00000004"]);
    assert_eq!(refused.code, 65, "{}", refused.stderr);
    assert!(refused.stderr.contains(MODEL), "{}", refused.stderr);
}

fn resume_in_another_directory_names_the_checkpoint_beside_the_configuration() {
    let job = Job::new();
    job.run_ok(&[]);
    let other = job.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let config = job.path().join("train.toml");
    let elsewhere = |more: &[&str]| {
        let args = [&[config.to_str().unwrap(), "--set", "train.steps=12"], more].concat();
        Process::spawn(job.command(&args).current_dir(&other)).wait()
    };
    let output = elsewhere(&["--resume"]);
    assert_eq!(output.code, 2, "{}", output.stderr);
    let found = job.run_dir().join("checkpoints/step-00000008");
    assert!(output.stderr.contains(&format!("--resume={}", found.display())), "{}", output.stderr);
    let output = elsewhere(&[&format!("--resume={}", found.display())]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    // Now there is a checkpoint here.
    let output = elsewhere(&["--resume", "--set", "train.steps=14"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
}

/// The run's directory is on a separate small disk that only the shell below sees.
fn metrics_of_a_disk_that_is_full_for_a_while_have_every_step_once() {
    let job = Job::new();
    std::fs::create_dir(job.path().join("runs")).unwrap();
    let script = r#"
        mount -t tmpfs -o size=1m none runs
        metrics=runs/train/latest/metrics.jsonl
        "$@" > stdout 2> stderr & pid=$!
        until grep -qs . $metrics; do sleep 0.02; done
        cat /dev/zero > runs/filler 2> /dev/null
        until grep -q 'cannot be written' stderr || ! kill -0 $pid; do sleep 0.02; done
        rm runs/filler
        wait $pid && cat $metrics
    "#;
    let settings =
        ["train.steps=800", "train.batch=16", "checkpoint.dir=\"saved\"", "observe.tensorboard=true"];
    let args: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    let command = job.command(&[&["train.toml"], &args[..]].concat());
    let mut shell = Command::new("unshare");
    shell.args(["-m", "sh", "-c", script, "sh"]).arg(command.get_program()).args(command.get_args());
    shell.current_dir(job.path());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = Process::spawn(&mut shell).wait();
    let stderr = std::fs::read_to_string(job.path().join("stderr")).unwrap();
    assert_eq!(output.code, 0, "{stderr}");
    assert!(stderr.contains("metrics.jsonl cannot be written: "), "{stderr}");
    let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["_step"].as_u64().unwrap();
    let steps: Vec<u64> = output.stdout.lines().map(step).collect();
    assert_eq!(steps, (1..=800).collect::<Vec<_>>(), "{stderr}");
    assert!(!stderr.contains("is incomplete"), "{stderr}");
}
