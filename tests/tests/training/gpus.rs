//! Jobs on several GPUs of the emulator in `tests/kernels`: the CUDA back end with a replacement for NCCL.

use std::path::{Path, PathBuf};

use xlaunch_harness::emulator;
use xlaunch_tests::{Job, Process, build_nvml};

use crate::preferences::write_model_and_pairs;

xlaunch_harness::tests! {
    needs emulator::find_compiler:
        dividing_a_model_changes_no_bit_on_gpus,
        experts_divided_among_gpus_train_as_on_the_cpu,
        experts_train_on_gpus_as_on_the_cpu,
        pairs_of_answers_are_compared_on_gpus_as_on_the_cpu,
        owners_of_matrices_change_no_bit_on_gpus,
        three_gpus_divide_a_model_and_add_up_micro_steps;
}

/// A job, and the emulated GPUs: their libraries, which all tests share, and that of the driver's management.
struct Gpus {
    job: Job,
    emulator: PathBuf,
    management: PathBuf,
}

impl Gpus {
    fn new(count: usize) -> Self {
        let job = Job::new();
        let emulator = emulator::build(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
        let lines = (0..count).map(|index| format!("GPU-00000000-0000-0000-0000-{index:012} 0\n"));
        job.write("management/gpus", lines.collect::<String>());
        let management = job.path().join("management");
        build_nvml(&management);
        Self { job, emulator, management }
    }

    /// Returns the losses of a run, and its number of NCCL operations.
    fn train(&self, settings: &[&str]) -> (Vec<f64>, usize) {
        let settings = settings.iter().flat_map(|setting| ["--set", setting]);
        let fixed = [
            "engine.device=cuda",
            // Captures are not emulated.
            "engine.exec=stream",
            "engine.deterministic=true",
            // Two blocks are in memory at a time.
            "model.layers=4",
            "train.steps=3",
            "checkpoint.every=0",
        ];
        let fixed = fixed.iter().flat_map(|setting| ["--set", setting]);
        let mut command = self.job.command(&["train.toml"]);
        let cache = self.job.path().join("cache");
        emulator::use_in(command.args(fixed).args(settings), &self.emulator, &cache);
        let libraries = [&self.management, &self.emulator];
        command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
        let operations = self.job.path().join("operations");
        command.env_remove("CUDA_VISIBLE_DEVICES").env("NCCL_OPERATIONS", &operations);
        let output = Process::spawn(&mut command).wait();
        assert_eq!(output.code, 0, "{}", output.stderr);
        // A job with one rank writes no such file.
        let found = std::fs::read_to_string(&operations).unwrap_or("0".into());
        let _ = std::fs::remove_file(operations);
        (self.job.losses(), found.trim().parse().unwrap())
    }
}

/// Buckets are smaller than most parameters, so that these are cut.
fn dividing_a_model_changes_no_bit_on_gpus() {
    let gpus = Gpus::new(2);
    let train = |shard: &str| {
        let shard = format!("comm.shard={shard}");
        let (losses, operations) =
            gpus.train(&["launch.nproc=2", "train.batch=2", "comm.bucket_mb=0.002", &shard]);
        // At most two gathers and a reduction per block and step, and some for the rest; with one call per bucket there
        // would be hundreds.
        assert!((1..=3 * 20).contains(&operations), "{shard}: {operations} operations");
        losses
    };
    let divided = ["optimizer", "gradients", "parameters"].map(train);
    assert_eq!(divided[0].len(), 3);
    assert!(divided.iter().all(|losses| *losses == divided[0]), "{divided:?}");
    // The norm of gradients, to which each rank adds its part, is rounded differently, as are sums in bf16.
    let close = |losses: Vec<f64>, tolerance: f64| {
        let pairs = losses.iter().zip(&divided[0]);
        assert!(pairs.clone().all(|(a, b)| (a - b).abs() < tolerance * b), "{losses:?}, {:?}", divided[0]);
        assert!(losses[2] < losses[0], "{losses:?}");
    };
    close(train("none"), 1e-5);
    close(gpus.train(&["launch.nproc=1", "train.batch=4"]).0, 1e-3);
}

/// The shards of three ranks are not equal, and gradients in slots are reduced in every micro-step.
fn three_gpus_divide_a_model_and_add_up_micro_steps() {
    let gpus = Gpus::new(3);
    let train = |shard: &str| {
        let shard = format!("comm.shard={shard}");
        let steps = ["launch.nproc=3", "train.batch=1", "train.accumulate=2", "comm.bucket_mb=0.002"];
        gpus.train(&[&steps[..], &[&shard]].concat()).0
    };
    let [none, optimizer, gradients, parameters] =
        ["none", "optimizer", "gradients", "parameters"].map(train);
    assert_eq!(gradients, parameters);
    for divided in [&optimizer, &gradients] {
        let pairs = divided.iter().zip(&none);
        assert!(pairs.clone().all(|(a, b)| (a - b).abs() < 1e-3 * b), "{divided:?}, {none:?}");
        assert!(divided.len() == 3 && divided[2] < divided[0], "{divided:?}");
    }
}

/// The reference of a model that is divided is whole on every GPU.
fn pairs_of_answers_are_compared_on_gpus_as_on_the_cpu() {
    let gpus = Gpus::new(2);
    write_model_and_pairs(&gpus.job, 4);
    let common = [
        "checkpoint.init=\"base\"",
        "data.train=\"pairs\"",
        "model.seq=64",
        "engine.precision=fp32",
        "train.lr=0.01",
    ];
    let train = |settings: &[&str]| gpus.train(&[&common[..], settings].concat()).0;
    let cpu = train(&["launch.nproc=1", "train.batch=4", "engine.device=cpu"]);
    assert!(cpu[0] > cpu[2] && cpu.len() == 3, "{cpu:?}");
    let one = train(&["launch.nproc=1", "train.batch=4", "train.classifier_chunk=50"]);
    let divided =
        train(&["launch.nproc=2", "train.batch=2", "comm.shard=parameters", "comm.bucket_mb=0.002"]);
    for losses in [one, divided] {
        let close = losses.iter().zip(&cpu).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close && losses.len() == 3, "{losses:?} {cpu:?}");
    }
}

/// The load of an expert is that of both ranks, which all-reduce it between forward and backward.
fn experts_train_on_gpus_as_on_the_cpu() {
    let gpus = Gpus::new(2);
    let experts = ["model.experts=4", "model.expert_ffn=24", "model.dense_layers=1", "engine.precision=fp32"];
    let train = |settings: &[&str]| gpus.train(&[&experts[..], settings].concat()).0;
    let cpu = train(&["launch.nproc=1", "train.batch=4", "engine.device=cpu"]);
    let two = train(&["launch.nproc=2", "train.batch=2"]);
    let divided =
        train(&["launch.nproc=2", "train.batch=2", "comm.shard=parameters", "comm.bucket_mb=0.002"]);
    for losses in [two, divided] {
        let pairs = losses.iter().zip(&cpu);
        assert!(
            losses.len() == 3 && pairs.clone().all(|(a, b)| (a - b).abs() < 1e-5 * b),
            "{losses:?}, {cpu:?}"
        );
    }
}

/// Groups exchange tokens on the stream of the kernels, with communicators of their own.
fn experts_divided_among_gpus_train_as_on_the_cpu() {
    let gpus = Gpus::new(4);
    let experts = ["model.experts=4", "model.expert_ffn=24", "model.layers=3", "engine.precision=fp32"];
    let train = |settings: &[&str]| gpus.train(&[&experts[..], settings].concat()).0;
    let cpu = train(&["launch.nproc=1", "train.batch=4", "engine.device=cpu"]);
    for settings in [
        ["launch.nproc=2", "train.batch=2", "comm.experts=2", "train.recompute=cheap"],
        ["launch.nproc=4", "train.batch=1", "comm.experts=2", "comm.shard=optimizer"],
    ] {
        let losses = train(&settings);
        let pairs = losses.iter().zip(&cpu);
        assert!(
            losses.len() == 3 && pairs.clone().all(|(a, b)| (a - b).abs() < 1e-5 * b),
            "{settings:?}: {losses:?}, {cpu:?}"
        );
    }
}

/// Ranks own different numbers of matrices of a shape, which are multiplied in batches.
fn owners_of_matrices_change_no_bit_on_gpus() {
    let gpus = Gpus::new(3);
    let train = |owners: &str| {
        let owners = format!("muon.owners={owners}");
        let muon = ["train.optimizer=muon", "muon.normuon=true", "comm.shard=parameters", &owners];
        let small =
            ["launch.nproc=3", "train.batch=1", "comm.bucket_mb=0.002", "model.layers=2", "train.steps=2"];
        gpus.train(&[&small[..], &muon].concat()).0
    };
    let [owned, everywhere] = ["always", "never"].map(train);
    assert_eq!(owned, everywhere);
    assert!(owned.len() == 2 && owned[1] < owned[0], "{owned:?}");
}
