//! A process that saves checkpoints in a loop is killed at random moments. Every checkpoint that it has reported as
//! saved must exist and be complete, and nothing incomplete may be taken for a checkpoint.
//!
//! `XLAUNCH_TEST_KILLS=10000 cargo test --release -p xlaunch-worker --test killed_saves` for a long run.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests; the child prints what it has saved")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rayon::ThreadPoolBuilder;
use xlaunch_comm::bucket::Plan;
use xlaunch_comm::{Groups, Sharding};
use xlaunch_engine::{HostAllocator, HostBuffer};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_spec::model::{ModelSection, ModelShape};
use xlaunch_worker::checkpoint::saver::{Buffers, Exchange, Saver, Settings, Written};
use xlaunch_worker::checkpoint::{
    Piece, Portion, Retention, Snapshot, State, VERSION, directory, name, read,
};
use xlaunch_worker::model::layout::{ALIGN, Layout};

/// Variable with the directory in which this process saves until it is killed.
const DIR: &str = "XLAUNCH_TEST_SAVE_IN";
/// Variable with the number of kills.
const KILLS: &str = "XLAUNCH_TEST_KILLS";
/// Default number of kills, which takes a few seconds.
const DEFAULT_KILLS: u32 = 200;
const RUN: &str = "run";

fn main() -> ExitCode {
    if let Some(dir) = std::env::var_os(DIR) {
        save_until_killed(Path::new(&dir));
        return ExitCode::SUCCESS;
    }
    let mut groups = Vec::new();
    xlaunch_harness::groups!(groups; no_kill_costs_a_reported_checkpoint_or_leaves_a_bad_one;);
    xlaunch_harness::run(env!("CARGO_CRATE_NAME"), 1, groups)
}

fn shape() -> ModelShape {
    let section = ModelSection {
        layers: Some(1),
        dim: Some(16),
        heads: Some(2),
        ffn: Some(24),
        vocab: Some(301),
        ..ModelSection::default()
    };
    section.resolve().unwrap()
}

fn no_kill_costs_a_reported_checkpoint_or_leaves_a_bad_one() {
    let kills = std::env::var(KILLS).map_or(DEFAULT_KILLS, |kills| kills.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (mut saved, mut random) = (0, 0x9e37_79b9_7f4a_7c15_u64);
    for kill in 0..kills {
        let executable = std::env::current_exe().unwrap();
        let mut child = Command::new(executable).env(DIR, dir.path()).stdout(Stdio::piped()).spawn().unwrap();
        let mut reported = BufReader::new(child.stdout.take().unwrap()).lines();
        // Kill at a random moment during the next few saves. The generator is xorshift64.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Before the second save is reported, what earlier kills left is removed, however slow the process is.
        let first = [reported.next().unwrap(), reported.next().unwrap()];
        std::thread::sleep(Duration::from_micros(random % 20_000));
        child.kill().unwrap();
        child.wait().unwrap();
        for line in first.into_iter().chain(reported) {
            // The last line may be cut off.
            saved = saved.max(line.unwrap().parse().unwrap_or(0));
        }
        directory::clean(dir.path()).unwrap();
        let found = directory::scan(dir.path()).unwrap();
        for checkpoint in &found {
            assert!(checkpoint.state.is_ok(), "kill {kill}: {checkpoint:?}");
        }
        let newest = found.first().unwrap();
        assert!(newest.step >= saved, "kill {kill}: step {saved} was saved, {} was found", newest.step);
        assert_complete(&newest.path, newest.step);
        let entries = std::fs::read_dir(dir.path()).unwrap().count();
        // Two checkpoints, one that is to be removed, and a link.
        assert!(entries <= 4, "kill {kill} left {entries} entries");
    }
    println!("{kills} kills, {saved} checkpoints");
}

/// Reads the whole checkpoint, so that every hash is verified.
fn assert_complete(path: &Path, step: u64) {
    let layout = Layout::new(&shape());
    let threads = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let wrong = Mutex::new(0);
    let sink = |Piece { values, .. }: Piece| {
        *wrong.lock().unwrap() += values.iter().filter(|value| **value != value_of(step)).count();
        Ok(())
    };
    let everything: Vec<_> = std::iter::once(0..layout.len).collect();
    read(path, &shape(), &layout, &everything, &threads, &sink).unwrap();
    assert_eq!(wrong.into_inner().unwrap(), 0, "values of another step in {}", path.display());
}

/// Returns the value of every element after `step` steps.
#[expect(clippy::cast_precision_loss, reason = "there are few steps")]
fn value_of(step: u64) -> f32 {
    step as f32
}

fn save_until_killed(dir: &Path) {
    let layout = Layout::new(&shape());
    let sharding =
        Sharding::replicated(Plan::new(&layout.ends(), ALIGN, 4, 1 << 20, 1 << 20), Groups::single(0, 1));
    let portion = Portion::new(&layout, &sharding, 0, 1);
    let len = portion.len();
    let settings = Settings {
        dir: dir.into(),
        layout: layout.trained().clone(),
        portion,
        rank: 0,
        writers: 1,
        retention: Retention { newest: 2, ..Retention::default() },
        tokenizer: Some(b"{}".to_vec()),
        source: None,
        host: HostAllocator::default(),
        buffers: Buffers::Own,
    };
    let mut saver = Saver::start(settings, Box::new(Alone(None))).unwrap();
    saver.wait().unwrap();
    let first = directory::newest(dir).map_or(0, |path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        name.trim_start_matches("step-").parse::<u64>().unwrap()
    });
    for step in first + 1.. {
        let values = || HostBuffer::from(vec![value_of(step); len]);
        // Every other save replaces the previous checkpoint.
        for _ in 0..1 + step % 2 {
            let snapshot = Snapshot { params: values(), m: values(), v: values(), slot: None };
            saver.begin(snapshot, state(step), Instant::now());
            saver.wait().unwrap();
        }
    }
}

fn state(step: u64) -> State {
    State {
        version: VERSION,
        step,
        sequences: step,
        world_size: 1,
        model: shape(),
        seed: 1,
        run: RUN.into(),
        parents: Vec::new(),
        data: None,
        batch: None,
        warmup: None,
        val_loss: None,
        best: None,
        end_of_text: None,
        inherited: None,
        adapted: None,
        reference: None,
        spec: serde_json::Value::Null,
    }
}

/// Exchange of a single rank, whose own answer completes the save. Prints the steps that are saved.
struct Alone(Option<Result<Vec<Written>, String>>);

impl Exchange for Alone {
    fn written(&mut self, _step: u64, result: Result<Vec<Written>, String>) {
        self.0 = Some(result);
    }

    fn all_written(&mut self, _step: u64) -> Result<Vec<Written>, String> {
        self.0.take().unwrap()
    }

    fn flush(&mut self) {}

    fn report(&mut self, report: Report) {
        match report {
            Report::Checkpoint(saved) => {
                println!("{}", saved.step);
                std::io::stdout().flush().unwrap();
            }
            failed => panic!("{failed:?} of {}", name(0)),
        }
    }
}
