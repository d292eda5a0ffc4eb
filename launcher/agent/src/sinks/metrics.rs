//! Writes `metrics.jsonl`: one JSON object per line, with the keys of [`xlaunch_proto::metrics`]. Step numbers only
//! increase; see [`Points`].

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xlaunch_proto::metrics::{EXPERT_LOADS, Number, Point};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{SourceLoss, SourceReport};

use super::points::Points;
use super::{RankReport, ReportSink};
use xlaunch_host::clock;

#[derive(Debug)]
pub(crate) struct Metrics {
    points: Points,
}

impl ReportSink for Metrics {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        if let Report::TrainStarted(started) = &report.report {
            return self.points.begin(started.first_step);
        }
        let Some(Point { step, values }) = Point::of(&report.report) else { return self.points.flush() };
        let mut line = json!({ "_step": step, "_timestamp": clock::unix().as_secs_f64() });
        for (metric, value) in values {
            line[metric.key] = value.json();
        }
        if let Report::Experts(experts) = &report.report {
            let shares = |shares: &[f32]| -> Value {
                shares.iter().map(|share| Number::Single(*share).json()).collect()
            };
            let loads = experts.loads.iter();
            line[EXPERT_LOADS] =
                loads.map(|loads| (loads.block.to_string(), shares(&loads.shares))).collect();
        }
        if let Report::Eval(eval) = &report.report {
            for SourceReport { name, tokens, epochs, .. } in &eval.sources {
                line[format!("data/tokens/{name}")] = json!(tokens);
                line[format!("data/epochs/{name}")] = json!(epochs);
            }
            for SourceLoss { name, loss } in &eval.losses {
                line[format!("val/loss/{name}")] = Number::Single(*loss).json();
            }
        }
        self.points.append(&line)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.points.flush()
    }

    fn take_warning(&mut self) -> Option<String> {
        self.points.take_warning()
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
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use xlaunch_proto::v1::{EvalReport, ExpertLoads, ExpertReport, StepReport};

    use super::*;

    #[test]
    fn every_key_is_documented() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/quickstart.md");
        let text = fs_err::read_to_string(path).unwrap();
        for metric in &xlaunch_proto::metrics::METRICS {
            assert!(text.contains(&format!("`{}`", metric.key)), "{} is not documented", metric.key);
        }
    }

    #[test]
    fn each_line_is_a_json_object_with_exact_decimals() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::create(dir.path(), None);
        let mut write = |report| {
            metrics.report(&RankReport { rank: 0, at: Instant::now(), report }).unwrap();
        };
        let step = StepReport {
            step: 3,
            loss: 0.1,
            step_seconds: 0.5,
            tokens: 100,
            mfu: Some(0.25),
            ..Default::default()
        };
        write(Report::Step(step));
        write(Report::Eval(EvalReport { step: 4, loss: 2.5, tokens: 10, ..Default::default() }));
        let bits_per_byte = Some(1.25);
        write(Report::Eval(EvalReport {
            step: 5,
            loss: 2.5,
            tokens: 10,
            bits_per_byte,
            ..Default::default()
        }));
        let loads = vec![ExpertLoads { block: 1, shares: vec![0.1, 0.9] }];
        write(Report::Experts(ExpertReport { step: 6, loads }));
        let text = fs_err::read_to_string(Metrics::path(dir.path())).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["_step"], &lines[0]["train/loss"]), (&json!(3), &json!(0.1)));
        assert_eq!(lines[0]["perf/tokens_per_second"], json!(200.0));
        assert_eq!(lines[0]["perf/mfu"], json!(0.25));
        assert_eq!((&lines[1]["val/loss"], &lines[1]["val/bits_per_byte"]), (&json!(2.5), &Value::Null));
        assert_eq!(lines[2]["val/bits_per_byte"], json!(1.25));
        assert_eq!((&lines[3]["_step"], &lines[3]["experts/load"]), (&json!(6), &json!({ "1": [0.1, 0.9] })));
    }
}
