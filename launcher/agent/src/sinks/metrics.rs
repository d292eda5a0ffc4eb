//! Writes `metrics.jsonl`: one JSON object per line, with the keys that dashboards use. Step numbers only increase; see
//! [`Points`].

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{EvalReport, StepReport};

use super::points::Points;
use super::{RankReport, ReportSink};
use xlaunch_host::clock;

#[derive(Debug)]
pub(crate) struct Metrics {
    points: Points,
}

impl ReportSink for Metrics {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        match &report.report {
            Report::TrainStarted(started) => self.points.begin(started.first_step),
            Report::Step(step) => self.step(step),
            Report::Eval(eval) => self.eval(eval),
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        self.points.flush()
    }

    fn missing(&self) -> u64 {
        self.points.missing()
    }
}

impl Metrics {
    /// Creates the file in the run's directory. `parent` is the directory of the run that this one continues.
    pub(crate) fn create(run_dir: &Path, parent: Option<&Path>) -> Self {
        let points = Points::new(Self::path(run_dir), parent.map(Self::path));
        Self { points: points.created() }
    }

    pub(crate) fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("metrics.jsonl")
    }

    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    fn step(&mut self, step: &StepReport) -> io::Result<()> {
        let mut line = json!({
            "_step": step.step,
            "_timestamp": now(),
            "train/loss": decimal(step.loss),
            "train/grad_norm": decimal(step.grad_norm),
            "train/lr": decimal(step.learning_rate),
            "train/skipped_steps": step.skipped_steps,
            "perf/step_seconds": step.step_seconds,
            "perf/tokens_per_second": step.tokens as f64 / step.step_seconds.max(1e-9),
            "pool/live_bytes": step.pool_live_bytes,
            "pool/mapped_bytes": step.pool_mapped_bytes,
            "pool/peak_bytes": step.pool_peak_bytes,
            "pool/fragmentation": decimal(step.pool_fragmentation),
            "pool/driver_allocations": step.pool_driver_allocations,
        });
        if let Some(mfu) = step.mfu {
            line["perf/mfu"] = mfu.into();
        }
        self.points.append(&line)
    }

    fn eval(&mut self, eval: &EvalReport) -> io::Result<()> {
        let mut point = json!({ "_step": eval.step, "_timestamp": now(), "val/loss": decimal(eval.loss) });
        if let Some(bits) = eval.bits_per_byte {
            point["val/bits_per_byte"] = bits.into();
        }
        self.points.append(&point)
    }
}

/// Returns the shortest decimal that rounds to this f32: 0.1, not 0.10000000149.
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
    fn each_line_is_a_json_object_with_exact_decimals() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::create(dir.path(), None);
        let step = StepReport {
            step: 3,
            loss: 0.1,
            step_seconds: 0.5,
            tokens: 100,
            mfu: Some(0.25),
            ..Default::default()
        };
        metrics.step(&step).unwrap();
        metrics.eval(&EvalReport { step: 4, loss: 2.5, tokens: 10, bits_per_byte: None }).unwrap();
        metrics.eval(&EvalReport { step: 5, loss: 2.5, tokens: 10, bits_per_byte: Some(1.25) }).unwrap();
        let text = fs_err::read_to_string(Metrics::path(dir.path())).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["_step"], &lines[0]["train/loss"]), (&json!(3), &json!(0.1)));
        assert_eq!(lines[0]["perf/tokens_per_second"], json!(200.0));
        assert_eq!(lines[0]["perf/mfu"], json!(0.25));
        assert_eq!((&lines[1]["val/loss"], &lines[1]["val/bits_per_byte"]), (&json!(2.5), &Value::Null));
        assert_eq!(lines[2]["val/bits_per_byte"], json!(1.25));
    }
}
