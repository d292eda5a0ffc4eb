//! What a run came to, for stdout.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use xlaunch_proto::v1::{EvalReport, StepReport, TrainStarted};

use crate::sinks::progress::{clock, count};

/// What is kept of a run while it goes on.
#[derive(Debug, Default)]
pub struct Summary {
    /// Sizes, from rank 0.
    pub started: Option<TrainStarted>,
    /// The last evaluation.
    pub eval: Option<EvalReport>,
    /// The newest checkpoint.
    pub checkpoint: Option<String>,
    /// Text sampled from the model.
    pub sample: String,
    /// Largest difference of any rank's parameters from rank 0's, where it was checked.
    pub replica_difference: Option<f64>,
    first: Option<StepReport>,
    last: Option<StepReport>,
    step_seconds: Vec<f64>,
}

impl Summary {
    /// A step of rank 0.
    pub fn step(&mut self, step: &StepReport) {
        self.first.get_or_insert(*step);
        self.last = Some(*step);
        self.step_seconds.push(step.step_seconds);
    }

    /// Steps completed, earlier runs included.
    pub fn steps(&self) -> u64 {
        self.last.map_or(0, |last| last.step + 1)
    }

    /// The text. Speed is the median over the second half of the steps.
    pub fn text(&self, world: u32, wall: Duration, metrics: Option<PathBuf>) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{name:<12}{value}");
        };
        if let Some(started) = &self.started {
            #[expect(clippy::cast_precision_loss, reason = "shown to people")]
            let parameters = count(started.parameters as f64);
            let ranks = if world == 1 { "1 rank".into() } else { format!("{world} ranks") };
            line(
                "model",
                format!("{parameters} parameters, {}, {ranks} on {}", started.precision, started.device_name),
            );
        }
        if let (Some(first), Some(last)) = (&self.first, &self.last) {
            line("steps", format!("{} in {}", last.step + 1, clock(wall.as_secs_f64())));
            line("loss", format!("{:.4} -> {:.4}", first.loss, last.loss));
            if let Some(eval) = &self.eval {
                line("val loss", format!("{:.4}", eval.loss));
            }
            #[expect(clippy::cast_precision_loss, reason = "shown to people")]
            let speed = last.tokens as f64 / self.median_seconds();
            line("speed", format!("{} tok/s", count(speed)));
        }
        if let Some(difference) = self.replica_difference {
            line("replicas", format!("largest parameter difference {difference:e}"));
        }
        if let Some(checkpoint) = &self.checkpoint {
            line("checkpoint", checkpoint.clone());
        }
        if let Some(metrics) = metrics {
            line("metrics", metrics.display().to_string());
        }
        if !self.sample.is_empty() {
            let _ = writeln!(out, "\nthe model writes:");
            for text in self.sample.lines() {
                let _ = writeln!(out, "  | {text}");
            }
        }
        out
    }

    fn median_seconds(&self) -> f64 {
        let mut times = self.step_seconds[self.step_seconds.len() / 2..].to_vec();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
    }
}
