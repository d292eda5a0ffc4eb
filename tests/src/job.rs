//! A job in a directory of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::process::{Finished, Running, xlaunch};

/// Sizes and data small enough for a step of a few milliseconds.
const CONFIG: &str = r#"
[model]
arch = "llama"
layers = 2
heads = 2
kv_heads = 2
dim = 32
ffn = 48
seq = 32
vocab = 256

[data]
train = ["text/*.txt"]

[train]
steps = 8
batch = 4
lr = 3e-3
warmup = 2
eval_every = 0
sample = 0

[engine]
device = "cpu"
"#;

/// A temporary directory with text and a configuration, and the environment that `xlaunch` gets.
#[derive(Debug)]
pub struct Job {
    dir: TempDir,
    environment: Vec<(String, String)>,
}

impl Default for Job {
    fn default() -> Self {
        Self::new()
    }
}

impl Job {
    /// A job that trains a tiny model on a little text.
    ///
    /// # Panics
    /// If the directory cannot be made; here and below.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let job = Self { dir, environment: Vec::new() };
        job.write("train.toml", CONFIG);
        let lines = (0..400).map(|i| format!("line {i}: {} and {}\n", i * i, i % 7));
        job.write("text/a.txt", lines.collect::<String>());
        job
    }

    /// A job whose workers are scripted: see the `fake_worker` program.
    pub fn scripted(fake_worker: &str, script: &str) -> Self {
        let mut job = Self::new();
        job.set("XLAUNCH_WORKER_PROGRAM", fake_worker);
        job.set("FAKE_WORKER", script);
        job
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a file below its directory.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(path, contents).expect("a file");
    }

    /// Sets a variable of the environment.
    pub fn set(&mut self, name: &str, value: &str) {
        self.environment.push((name.into(), value.into()));
    }

    /// The command `xlaunch ARGS` in its directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(xlaunch());
        command.args(args).current_dir(self.path()).env("CUDA_VISIBLE_DEVICES", "");
        // Where launches register: `xlaunch status` sees those of this job alone.
        command.env("XDG_RUNTIME_DIR", self.path()).env("TMPDIR", self.path());
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Starts `xlaunch train.toml ARGS`.
    pub fn start(&self, args: &[&str]) -> Running {
        Running::start(self.command(&[&["train.toml"], args].concat()).env("RUST_BACKTRACE", "0"))
    }

    /// Runs `xlaunch train.toml ARGS` to its end.
    pub fn run(&self, args: &[&str]) -> Finished {
        self.start(args).finish()
    }

    /// Runs it and expects success.
    pub fn run_well(&self, args: &[&str]) -> Finished {
        let finished = self.run(args);
        assert_eq!(finished.code, 0, "{}", finished.stderr);
        finished
    }

    /// Directory of the newest run.
    pub fn latest(&self) -> PathBuf {
        let link = self.path().join("runs/train/latest");
        std::fs::canonicalize(&link).unwrap_or(link)
    }

    /// The lines of the newest run's `metrics.jsonl`.
    pub fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.latest().join("metrics.jsonl")).expect("metrics");
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// The loss of every step of the newest run.
    pub fn losses(&self) -> Vec<f64> {
        self.metrics().iter().filter_map(|line| line["train/loss"].as_f64()).collect()
    }

    /// The bytes of a file of the newest run's checkpoint of this step.
    pub fn checkpoint(&self, step: u64, file: &str) -> Vec<u8> {
        let path = self.latest().join(format!("checkpoints/step-{step:08}")).join(file);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}
