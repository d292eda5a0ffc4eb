//! `--dry-run`, and the configuration keys that reduce a job's memory.

use xlaunch_tests::{Job, Output};

xlaunch_harness::tests! {
    dry_run_predicts_the_memory_of_the_run_and_starts_nothing,
    job_that_does_not_fit_is_told_what_makes_it_fit,
    job_fits_into_a_limit_exactly_if_it_runs_with_it,
    blocks_smaller_than_a_bucket_are_divided_by_smaller_ones,
    checkpoint_to_resume_from_is_checked,
    job_on_gpus_is_planned_without_one,
    mistakes_are_found_without_a_start,
    recomputed_blocks_and_chunks_of_the_loss_train_alike,
    divided_gradients_and_parameters_train_alike_and_continue_on_one_rank;
}

/// Returns the sizes that a report names, in MiB.
fn sizes(report: &Output, name: &str) -> f64 {
    let line = report.stdout.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {report:?}"));
    let (number, unit) = line.trim().split_once(' ').unwrap();
    assert_eq!(unit, "MiB", "{line}");
    number.parse().unwrap()
}

fn dry_run_predicts_the_memory_of_the_run_and_starts_nothing() {
    for change in [
        "train.accumulate=1",
        "train.accumulate=3",
        "comm.shard=\"optimizer\"",
        "comm.shard=\"gradients\"",
        "comm.shard=\"parameters\"",
        "train.recompute=\"cheap\"",
        "train.recompute=\"block\"",
        "train.classifier_chunk=50",
        "model.arch=\"gpt2\"",
        "model.experts=4",
        "comm.experts=2",
    ] {
        let experts = if change.contains("experts") { ["--set", "model.experts=4"].as_slice() } else { &[] };
        // The model is large enough for the pool to grow several times.
        let args = ["--nproc", "2", "--set", "train.batch=40", "--set", "model.seq=64", "--set", change];
        let (args, job) = ([&args[..], experts].concat(), Job::new());
        let report = job.run(&[&args[..], &["--dry-run"]].concat());
        assert_eq!(report.code, 0, "{report:?}");
        assert!(!job.path().join("runs").exists(), "a run was created");
        assert!(report.stdout.contains("fits          yes, into "), "{report:?}");
        job.run_ok(&args);
        let metrics = job.metrics();
        let peak = metrics.iter().filter_map(|line| line["pool/peak_bytes"].as_u64()).max().unwrap();
        let predicted = sizes(&report, "each rank");
        assert!(
            (predicted - peak as f64 / f64::from(1 << 20)).abs() < 0.1,
            "{change}: {predicted} MiB, {peak}"
        );
    }
}

fn job_that_does_not_fit_is_told_what_makes_it_fit() {
    let job = Job::new();
    let mut args = ["--nproc", "2", "--set", "train.batch=40", "--set", "model.seq=64", "--dry-run"].to_vec();
    let all = sizes(&job.run(&args), "each rank");
    let limit = format!("engine.memory_limit_mb={}", (all / 2.0) as u64);
    args.extend(["--set", &limit]);
    let report = job.run(&args);
    assert_eq!(report.code, 2, "{report:?}");
    assert!(report.stdout.contains("fits          no, there is "), "{report:?}");
    let changes = report.stdout.lines().skip_while(|line| !line.starts_with("fits")).skip(1);
    let changes: Vec<&str> = changes.map(|line| line.split(": ").next().unwrap().trim()).collect();
    assert!(!changes.is_empty() && report.stdout.ends_with(", which fits\n"), "{report:?}");
    let keys: Vec<String> = changes.iter().flat_map(|line| line.split(", ")).map(str::to_owned).collect();
    keys.iter().for_each(|key| args.extend(["--set", key]));
    let report = job.run(&args);
    assert!(report.code == 0 && report.stdout.contains("fits          yes, into "), "{report:?}");
    args.retain(|arg| *arg != "--dry-run");
    job.run_ok(&args);

    // The weights alone are too large.
    let too_large = ["--dry-run", "--set", "engine.memory_limit_mb=1"];
    let report = job.run(&too_large);
    assert_eq!(report.code, 2, "{report:?}");
    // The exit code is the same even if the reader of the report has gone.
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = job.command(&[&["train.toml"], &too_large[..]].concat());
    assert_eq!(command.stdout(closed).status().unwrap().code(), Some(2));
    assert!(report.stdout.ends_with("no other configuration change makes it fit\n"), "{report:?}");
}

/// A pool that reaches its limit frees its unused memory.
fn job_fits_into_a_limit_exactly_if_it_runs_with_it() {
    let mut codes = Vec::new();
    for limit in 1..=6 {
        let job = Job::new();
        let limit = format!("engine.memory_limit_mb={limit}");
        let args = ["--set", "model.seq=64", "--set", "train.batch=8", "--set", &limit];
        let dry = job.run(&[&args[..], &["--dry-run"]].concat());
        let run = job.run(&args);
        assert_eq!(dry.code == 0, run.code == 0, "{limit}: {dry:?}\n{run:?}");
        codes.push(run.code);
    }
    assert!(codes.contains(&0) && codes.contains(&76), "{codes:?}");
}

fn blocks_smaller_than_a_bucket_are_divided_by_smaller_ones() {
    let job = Job::new();
    let model = ["model.dim=256", "model.ffn=1024", "model.layers=6", "train.batch=1", "model.seq=16"];
    let mut args: Vec<&str> = model.iter().flat_map(|key| ["--set", key]).collect();
    args.extend(["--nproc", "4"]);
    let divided = |keys: &[&str]| {
        let keys: Vec<&str> = keys.iter().flat_map(|key| ["--set", *key]).collect();
        sizes(&job.run(&[&args[..], &keys, &["--dry-run"]].concat()), "each rank")
    };
    let optimizer = divided(&["comm.shard=optimizer"]);
    let limit = format!("engine.memory_limit_mb={}", (optimizer * 0.7) as u64);
    let report = job.run(&[&args[..], &["--dry-run", "--set", &limit]].concat());
    let line = report.stdout.lines().last().unwrap();
    let change = "comm.shard = \"parameters\", comm.bucket_mb = ";
    assert!(line.contains(change) && line.ends_with("which fits"), "{report:?}");
    let keys: Vec<&str> = line.split(": ").next().unwrap().trim().split(", ").collect();
    assert!(divided(&keys) < 0.7 * optimizer && divided(&keys[..1]) > 0.9 * optimizer, "{line}");
}

fn checkpoint_to_resume_from_is_checked() {
    let job = Job::new();
    job.run_ok(&["--nproc", "2"]);
    let checkpoint = format!("--resume={}", job.run_dir().join("checkpoints/step-00000008").display());
    for (args, code, words) in [
        (vec!["--resume=nowhere"], 65, "no checkpoint in "),
        (vec![&*checkpoint, "--set", "model.dim=64"], 65, "written by another model"),
        (vec![&*checkpoint, "--set", "train.steps=12", "--set", "job.seed=3"], 65, "job.seed"),
        (vec![&*checkpoint, "--set", "train.steps=12"], 0, ""),
    ] {
        let report = job.run(&[&args[..], &["--nproc", "2", "--dry-run"]].concat());
        assert!(report.code == code && report.stderr.contains(words), "{args:?}: {report:?}");
    }
}

fn job_on_gpus_is_planned_without_one() {
    let job = Job::new();
    let report = job.run(&["--dry-run", "--set", "engine.device=\"cuda\"", "--nproc", "8"]);
    assert!(report.stdout.starts_with("ranks         8 x GPU\n"), "{report:?}");
    assert!(report.stdout.contains("libraries "), "{report:?}");
}

fn mistakes_are_found_without_a_start() {
    const AUTO: &str = "--set=engine.device=\"auto\"";
    let job = Job::new();
    for (args, code, words) in [
        (vec!["--set", "data.train=[\"missing\"]"], 65, "data.train: no file matches"),
        (vec!["--set", "checkpoint.init=missing"], 65, "missing: it does not exist"),
        (vec!["--set", "train.recompute=\"some\""], 2, "train.recompute"),
        (vec![AUTO, "--set=engine.precision=\"fp8\""], 2, "only \"fp32\" is supported without a GPU"),
        (vec![AUTO, "--set=comm.dtype=\"bf16\""], 2, "bf16 gradients need bf16 activations"),
    ] {
        let report = job.run(&[&args[..], &["--dry-run"]].concat());
        assert!(report.code == code && report.stderr.contains(words), "{args:?}: {report:?}");
    }
}

fn recomputed_blocks_and_chunks_of_the_loss_train_alike() {
    for arch in ["llama", "gpt2"] {
        let train = |change: &str| {
            let job = Job::new();
            let arch = format!("model.arch=\"{arch}\"");
            job.run_ok(&["--nproc", "2", "--set", &arch, "--set", change]);
            (job.losses(), job.checkpoint(8, "model.safetensors"))
        };
        let expected = train("train.recompute=\"none\"");
        for change in ["train.recompute=\"cheap\"", "train.recompute=\"block\""] {
            assert_eq!(train(change), expected, "{arch} {change}");
        }
        // The gradient of the head is added up in a different order.
        let (losses, _) = train("train.classifier_chunk=7");
        let near = losses.iter().zip(&expected.0).all(|(ours, theirs)| (ours - theirs).abs() < 1e-4 * theirs);
        assert!(near && losses.len() == expected.0.len(), "{losses:?} {:?}", expected.0);
    }
}

fn divided_gradients_and_parameters_train_alike_and_continue_on_one_rank() {
    // Buckets are small, so that several take turns in the same memory.
    let common = ["--set", "comm.bucket_mb=0.01", "--set", "model.layers=4", "--set", "train.eval_every=3"];
    let train = |ranks: &str, shard: &str| {
        let job = Job::new();
        let shard = format!("comm.shard=\"{shard}\"");
        let output = job.run_ok(&[&common[..], &["--nproc", ranks, "--set", &shard]].concat());
        let held_out: Vec<_> = job.metrics().iter().filter_map(|line| line["val/loss"].as_f64()).collect();
        let found = (job.losses(), held_out, job.saved_state(8));
        let more = [&common[..], &["--resume", "--set", "train.steps=10", "--set", &shard]].concat();
        job.run_ok(&[&more[..], &["--nproc", "1"]].concat());
        (output, found, job.losses())
    };
    // Shards of three ranks are not equal.
    for ranks in ["4", "3"] {
        let (_, expected, continued) = train(ranks, "optimizer");
        assert!(!expected.1.is_empty() && continued.len() == 10, "{:?} {continued:?}", expected.1);
        for shard in ["gradients", "parameters"] {
            let (output, found, more) = train(ranks, shard);
            assert!(output.stderr.contains(&format!("; {shard} sharded\n")), "{}", output.stderr);
            assert_eq!(
                (&found.0, &found.1, &more),
                (&expected.0, &expected.1, &continued),
                "{ranks} {shard}"
            );
            assert!(found.2 == expected.2, "{ranks} {shard}");
        }
    }
}
