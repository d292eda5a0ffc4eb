//! A training job in a temporary directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::{Output, Process, c_library, xlaunch_path, xlaunch_with_fail_points};

/// A model and data small enough for steps of a few milliseconds.
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

/// A temporary directory with text and `train.toml`, and environment variables for `xlaunch`.
#[derive(Debug)]
pub struct Job {
    dir: TempDir,
    fail_points: bool,
    environment: Vec<(String, String)>,
}

impl Default for Job {
    fn default() -> Self {
        Self::new()
    }
}

impl Job {
    /// Creates a job that trains a tiny model for eight steps.
    ///
    /// # Panics
    /// Here and below: if a file cannot be written or read.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("create a temporary directory");
        let job = Self { dir, fail_points: false, environment: Vec::new() };
        job.write("train.toml", CONFIG);
        let lines = (0..400).map(|i| format!("line {i}: {} and {}\n", i * i, i % 7));
        job.write("text/a.txt", lines.collect::<String>());
        job
    }

    /// Creates a job with scripted workers: see the `fake_worker` program.
    pub fn scripted(fake_worker: &str, script: &str) -> Self {
        let mut job = Self::new();
        job.set_env("XLAUNCH_WORKER_PROGRAM", fake_worker);
        job.set_env("FAKE_WORKER", script);
        job
    }

    /// Creates a job for a build with fail points, with these rules in `XLAUNCH_FAIL`; see `docs/fail-points.md`.
    pub fn with_fail_points(rules: &str) -> Self {
        let mut job = Self { fail_points: true, ..Self::new() };
        if !rules.is_empty() {
            job.set_env("XLAUNCH_FAIL", rules);
        }
        job
    }

    /// Returns the job's directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a file, creating its directory.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a parent")).expect("create a directory");
        std::fs::write(path, contents).expect("write a file");
    }

    /// Sets an environment variable for `xlaunch`.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.environment.push((name.into(), value.into()));
    }

    /// Creates a directory like one of a cloud drive; see `drive.c`.
    pub fn create_drive(&mut self, name: &str) {
        let (drive, library) = (self.path().join(name), self.path().join("drive.so"));
        std::fs::create_dir(&drive).expect("create a directory");
        c_library::build("drive.c", &library);
        self.set_env("LD_PRELOAD", &library.display().to_string());
        self.set_env("DRIVE", &drive.display().to_string());
    }

    /// Returns the command `xlaunch ARGS` in the job's directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let program = if self.fail_points { xlaunch_with_fail_points() } else { xlaunch_path() };
        let mut command = Command::new(program);
        command.args(args).current_dir(self.path()).env("CUDA_VISIBLE_DEVICES", "");
        // Launches register here, so `xlaunch status` sees only those of this job.
        command.env("XDG_RUNTIME_DIR", self.path()).env("TMPDIR", self.path());
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Same as [`Self::command`], after `ulimit` with these arguments.
    pub fn limited_command(&self, limit: &str, args: &[&str]) -> Command {
        let command = self.command(args);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit} && exec \"$@\""), "sh"]);
        shell.arg(command.get_program()).args(command.get_args()).current_dir(self.path());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell
    }

    /// Starts `xlaunch train.toml ARGS`.
    pub fn spawn(&self, args: &[&str]) -> Process {
        Process::spawn(self.command(&[&["train.toml"], args].concat()).env("RUST_BACKTRACE", "0"))
    }

    /// Runs `xlaunch train.toml ARGS` to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        self.spawn(args).wait()
    }

    /// Same as [`Self::run`], and expects exit code 0.
    pub fn run_ok(&self, args: &[&str]) -> Output {
        let output = self.run(args);
        assert_eq!(output.code, 0, "{}", output.stderr);
        output
    }

    /// Returns the directory of the newest run.
    pub fn run_dir(&self) -> PathBuf {
        let link = self.path().join("runs/train/latest");
        std::fs::canonicalize(&link).unwrap_or(link)
    }

    /// Returns the lines of the newest run's `metrics.jsonl`, without one that is still being written.
    pub fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.run_dir().join("metrics.jsonl")).expect("read metrics");
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// Returns the loss of every step of the newest run.
    pub fn losses(&self) -> Vec<f64> {
        self.metrics().iter().filter_map(|line| line["train/loss"].as_f64()).collect()
    }

    /// Returns the bytes of a file in the newest run's checkpoint of this step.
    pub fn checkpoint(&self, step: u64, file: &str) -> Vec<u8> {
        let path = self.run_dir().join(format!("checkpoints/step-{step:08}")).join(file);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Returns [`read_state`] of the newest run's checkpoint of this step.
    pub fn saved_state(&self, step: u64) -> BTreeMap<String, Vec<u8>> {
        read_state(&self.run_dir().join(format!("checkpoints/step-{step:08}")))
    }

    /// Returns the standard error of a scripted worker's first attempt so far.
    pub fn worker_stderr(&self, rank: usize) -> String {
        let path = self.run_dir().join(format!("logs/attempt_0/{rank}/stderr.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

/// Returns parameters (`wte.weight`) and moments (`m.wte.weight`, `v.wte.weight`) of a checkpoint as bytes, regardless
/// of how many ranks have saved them.
///
/// # Panics
/// If the checkpoint cannot be read.
pub fn read_state(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut parts: BTreeMap<(String, usize), Vec<u8>> = BTreeMap::new();
    for path in files.map(|entry| entry.expect("an entry").path()) {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("read tensors");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        for (name, tensor) in tensors.iter() {
            // Moments are saved in parts: `m.wte.weight[0:128]`.
            let (name, first) = match name.split_once('[') {
                Some((name, part)) => (name, part.split(':').next().unwrap_or_default()),
                None => (name, "0"),
            };
            let first = first.parse().expect("an index");
            parts.insert((name.to_owned(), first), tensor.data().to_vec());
        }
    }
    let mut state: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for ((name, _), bytes) in parts {
        state.entry(name).or_default().extend(bytes);
    }
    state
}
