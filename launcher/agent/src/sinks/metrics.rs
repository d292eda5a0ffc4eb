//! `metrics.jsonl`: one JSON object per line, keys as dashboards know them.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::clock;
use fs_err::File;
use serde_json::{Value, json};
use xlaunch_proto::v1::{EvalReport, StepReport};

/// The file of one run.
#[derive(Debug)]
pub struct Metrics {
    file: File,
    path: PathBuf,
}

impl Metrics {
    /// Creates the file in the run's directory.
    pub fn create(run_dir: &Path) -> std::io::Result<Self> {
        let path = run_dir.join("metrics.jsonl");
        Ok(Self { file: File::create(&path)?, path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A training step.
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    pub fn step(&mut self, step: &StepReport) -> std::io::Result<()> {
        self.write(json!({
            "_step": step.step,
            "_timestamp": now(),
            "train/loss": decimal(step.loss),
            "train/grad_norm": decimal(step.grad_norm),
            "train/lr": decimal(step.learning_rate),
            "perf/step_seconds": step.step_seconds,
            "perf/tokens_per_second": step.tokens as f64 / step.step_seconds.max(1e-9),
            "pool/live_bytes": step.pool_live_bytes,
            "pool/mapped_bytes": step.pool_mapped_bytes,
            "pool/peak_bytes": step.pool_peak_bytes,
            "pool/fragmentation": decimal(step.pool_fragmentation),
            "pool/driver_allocations": step.pool_driver_allocations,
        }))
    }

    /// An evaluation.
    pub fn eval(&mut self, eval: &EvalReport) -> std::io::Result<()> {
        self.write(json!({ "_step": eval.step, "_timestamp": now(), "val/loss": decimal(eval.loss) }))
    }

    fn write(&mut self, line: Value) -> std::io::Result<()> {
        // One write per line: a reader that follows the file sees whole lines.
        self.file.write_all(format!("{line}\n").as_bytes())
    }
}

/// The shortest decimal that is this f32, so that 0.1 does not become 0.10000000149.
fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn now() -> f64 {
    clock::unix().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_an_object_with_exact_values() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::create(dir.path()).unwrap();
        let step = StepReport { step: 3, loss: 0.1, step_seconds: 0.5, tokens: 100, ..Default::default() };
        metrics.step(&step).unwrap();
        metrics.eval(&EvalReport { step: 4, loss: 2.5, tokens: 10 }).unwrap();
        let text = fs_err::read_to_string(metrics.path()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["_step"], &lines[0]["train/loss"]), (&json!(3), &json!(0.1)));
        assert_eq!(lines[0]["perf/tokens_per_second"], json!(200.0));
        assert_eq!(lines[1]["val/loss"], json!(2.5));
    }
}
