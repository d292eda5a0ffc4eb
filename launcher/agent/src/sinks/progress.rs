//! Shows progress on stderr: a bar on a terminal that can redraw lines, plain lines otherwise.

use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    CheckpointFailed, CheckpointNotDeleted, CheckpointSkipped, EvalReport, SampleReport, StepReport,
    TrainStarted,
};
use xlaunch_spec::quantities::{count_text, counted, rough_time_text};

use super::{RankReport, ReportSink};
use crate::stderr::print_line;

/// Minimum interval between plain step lines.
const PLAIN_LINE_INTERVAL: Duration = Duration::from_secs(1);
/// Weight of the newest step in the moving average of the step time.
const STEP_TIME_SMOOTHING: f64 = 0.1;
/// Number of steps after which the expected time is printed. The median of so many step times is not affected by the
/// steps that compile kernels or capture graphs.
const STEPS_TO_ESTIMATE: usize = 10;

#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Option<Instant>,
    seconds_per_step: f64,
    /// Tokens of a step, as last printed.
    tokens_per_step: Option<u64>,
    /// Durations of the first steps, in seconds.
    first_times: Vec<f64>,
}

impl Default for Progress {
    fn default() -> Self {
        // The library hides bars, and lines that are printed above them, if `TERM` is `dumb` or not set.
        Self::new(!ProgressDrawTarget::stderr().is_hidden())
    }
}

impl ReportSink for Progress {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        match &report.report {
            Report::TrainStarted(started) => self.started(started),
            Report::Step(step) => self.step(step, report.at),
            Report::Eval(eval) => self.eval(eval),
            Report::Sample(sample) => self.sample(sample),
            Report::CheckpointFailed(CheckpointFailed { step, path, reason }) => {
                self.print(&format!("checkpoint of step {step} failed: {path}: {reason}"));
            }
            Report::CheckpointNotDeleted(CheckpointNotDeleted { path, reason }) => {
                self.print(&format!("warning: old checkpoints are not deleted: {path}: {reason}"));
            }
            Report::CheckpointSkipped(CheckpointSkipped { step, .. }) => {
                self.print(&format!(
                    "checkpoint of step {step} skipped: the one before is still being written"
                ));
            }
            _ => {}
        }
        Ok(())
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        self.print(line);
        Ok(())
    }

    /// Leaves the bar on the screen, with the cursor below it.
    fn finish(&mut self) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            if bar.position() == 0 {
                bar.finish_and_clear();
            } else {
                bar.abandon();
                // Errors are ignored, as in `print`.
                let _ = writeln!(io::stderr());
            }
        }
        Ok(())
    }
}

impl Progress {
    fn new(shows_bars: bool) -> Self {
        let bar = shows_bars.then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
            let template = "{bar:12.cyan/blue} {pos}/{len} {wide_msg}";
            bar.set_style(
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Self {
            bar,
            total: 0,
            last_line: None,
            seconds_per_step: 0.0,
            tokens_per_step: None,
            first_times: Vec::new(),
        }
    }

    fn started(&mut self, started: &TrainStarted) {
        self.total = started.total_steps;
        if let Some(bar) = &self.bar {
            bar.set_length(self.total);
            bar.set_position(started.first_step);
        }
        if let Some(line) = self.announcement(started) {
            self.print(&line);
        }
    }

    /// Returns the line that describes the job, or how its steps differ from what the last such line said; `None` if
    /// they do not.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    fn announcement(&mut self, started: &TrainStarted) -> Option<String> {
        let tokens = started.tokens_per_step;
        match self.tokens_per_step.replace(tokens) {
            None => Some(job_line(started)),
            Some(before) if before != tokens => Some(format!(
                "xlaunch: the number of ranks has changed: {} tokens per step instead of {}",
                count_text(tokens as f64),
                count_text(before as f64)
            )),
            Some(_) => None,
        }
    }

    fn step(&mut self, step: &StepReport, now: Instant) {
        self.seconds_per_step = match self.seconds_per_step {
            0.0 => step.step_seconds,
            old => old + STEP_TIME_SMOOTHING * (step.step_seconds - old),
        };
        let done = step.step;
        if let Some(line) = self.expected_time(step) {
            self.print(&line);
        }
        if step.skipped {
            let (loss, norm) = (step.loss, step.grad_norm);
            let total = self.total;
            self.print(&format!(
                "step {done}/{total}  skipped: the loss is {loss}, the gradient norm {norm}"
            ));
        }
        let text = self.describe(step);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(text);
            return;
        }
        let due = self.last_line.is_none_or(|last| now.duration_since(last) >= PLAIN_LINE_INTERVAL);
        if due || done == self.total {
            self.last_line = Some(now);
            self.print(&format!("step {done}/{}  {text}", self.total));
        }
    }

    /// Returns the line with the expected time, once: after [`STEPS_TO_ESTIMATE`] steps, if at least as many remain.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    fn expected_time(&mut self, step: &StepReport) -> Option<String> {
        if self.first_times.len() >= STEPS_TO_ESTIMATE {
            return None;
        }
        self.first_times.push(step.step_seconds);
        let left = self.total.saturating_sub(step.step);
        if self.first_times.len() < STEPS_TO_ESTIMATE || left < STEPS_TO_ESTIMATE as u64 {
            return None;
        }
        let mut times = self.first_times.clone();
        times.sort_by(f64::total_cmp);
        let seconds = left as f64 * times[times.len() / 2];
        Some(format!("xlaunch: expected time: {} for the remaining {left} steps", rough_time_text(seconds)))
    }

    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    fn describe(&self, step: &StepReport) -> String {
        let left = self.total.saturating_sub(step.step) as f64 * self.seconds_per_step;
        format!(
            "loss {:.4}  lr {:.2e}  grad norm {:.2}  {} tok/s{}  {} left",
            step.loss,
            step.learning_rate,
            step.grad_norm,
            count_text(step.tokens as f64 / self.seconds_per_step.max(1e-9)),
            self.mfu(step).map_or_else(String::new, |mfu| format!("  MFU {:.1} %", 100.0 * mfu)),
            rough_time_text(left)
        )
    }

    /// MFU at the smoothed speed that the line shows.
    fn mfu(&self, step: &StepReport) -> Option<f64> {
        step.mfu.map(|mfu| mfu * step.step_seconds / self.seconds_per_step.max(1e-9))
    }

    fn eval(&mut self, eval: &EvalReport) {
        let bits = eval.bits_per_byte.map_or_else(String::new, |bits| format!("  {bits:.4} bits per byte"));
        let order = in_order(eval).map_or_else(String::new, |order| format!("  {order}"));
        let by_source: String =
            eval.losses.iter().map(|it| format!("  {} {:.4}", it.name, it.loss)).collect();
        let EvalReport { step, loss, tokens, .. } = eval;
        let size = counted(*tokens, if order.is_empty() { "token" } else { "pair" });
        self.print(&format!("step {step}  val loss {loss:.4}{bits}{order}{by_source} ({size})"));
        if let Some(reason) = early_stop(eval) {
            self.print(&format!("xlaunch: stopping early: {reason}"));
            self.total = eval.step;
        }
    }

    /// Prints a sample of the model's text, except the last one, which the summary shows.
    fn sample(&self, sample: &SampleReport) {
        if sample.step >= self.total {
            return;
        }
        let text = format!("{}{}", sample.prompt, sample.text);
        let lines: String = text.lines().map(|line| format!("\n  | {line}")).collect();
        self.print(&format!("step {}  the model writes:{lines}", sample.step));
    }

    /// Prints a line, above the bar if there is one.
    fn print(&self, line: &str) {
        match &self.bar {
            // `println` of the bar fills lines up to the width of the terminal and relies on its wrapping. What records
            // the output without wrapping, such as a notebook, would lose them.
            Some(bar) if self.total > 0 => bar.suspend(|| print_line(format_args!("{line}"))),
            _ => print_line(format_args!("{line}")),
        }
    }
}

/// Returns the line that describes a job when it starts: the size of the model, the number of epochs, and the tensors
/// that are sharded across ranks.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn job_line(started: &TrainStarted) -> String {
    let TrainStarted { parameters, total_steps, tokens_per_step, train_tokens, total_tokens, .. } = started;
    let tokens = *total_tokens as f64;
    let epochs = tokens / (*train_tokens).max(1) as f64;
    format!(
        "xlaunch: {} parameters, {} of {} tokens: {} tokens, {epochs:.2} epochs of {}{}",
        count_text(*parameters as f64),
        counted(*total_steps, "step"),
        count_text(*tokens_per_step as f64),
        count_text(tokens),
        count_text(*train_tokens as f64),
        match started.sharded.as_str() {
            "" => String::new(),
            what => format!("; {what} sharded"),
        }
    )
}

/// Returns how many pairs of answers an evaluation has found in order; `None` if it compared none.
pub(crate) fn in_order(eval: &EvalReport) -> Option<String> {
    eval.preference_accuracy.map(|share| format!("{:.1} % of pairs in order", 100.0 * share))
}

/// Returns the reason if training ends early with this evaluation.
pub(crate) fn early_stop(eval: &EvalReport) -> Option<String> {
    let count = Some(eval.stopped_after).filter(|count| *count > 0)?;
    let best = eval.best?;
    let evaluations = if count == 1 { "the last evaluation".into() } else { format!("{count} evaluations") };
    Some(format!(
        "validation loss has not improved in {evaluations}; best {:.4} at step {}",
        best.loss, best.step
    ))
}

/// Returns the line that says where an attempt resumes; `None` if it starts at the beginning or has no steps left.
/// Steps count from 1, as in the other lines.
pub(crate) fn resume_line(started: &TrainStarted, source: impl fmt::Display) -> Option<String> {
    let step = started.first_step + 1;
    (1..started.total_steps)
        .contains(&started.first_step)
        .then(|| format!("resuming at step {step} from {source}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_of_an_early_stop_counts_evaluations() {
        let reason = |stopped_after| {
            let best = Some(xlaunch_proto::v1::BestEvaluation { step: 3, loss: 1.25 });
            early_stop(&EvalReport { stopped_after, best, ..Default::default() })
        };
        let text = "validation loss has not improved in the last evaluation; best 1.2500 at step 3";
        assert_eq!(reason(1).as_deref(), Some(text));
        assert!(reason(2).is_some_and(|text| text.contains("in 2 evaluations;")));
        assert_eq!(reason(0), None);
    }

    #[test]
    fn resume_line_names_the_next_step_and_the_checkpoint() {
        let line = |first_step| {
            let started = TrainStarted { first_step, total_steps: 100, ..Default::default() };
            resume_line(&started, "/runs/a/checkpoints/step-00000030")
        };
        let expected = "resuming at step 31 from /runs/a/checkpoints/step-00000030";
        assert_eq!(line(30).as_deref(), Some(expected));
        assert_eq!((line(0), line(100)), (None, None));
    }

    #[test]
    fn first_lines_describe_the_job_and_its_expected_time() {
        let started = TrainStarted {
            parameters: 28_300_000,
            total_steps: 1000,
            tokens_per_step: 65_536,
            train_tokens: 40_000_000,
            total_tokens: 65_536_000,
            ..Default::default()
        };
        let expected =
            "xlaunch: 28.3M parameters, 1000 steps of 65.5K tokens: 65.5M tokens, 1.64 epochs of 40.0M";
        assert_eq!(job_line(&started), expected);
        let sharded = TrainStarted { sharded: "optimizer".into(), ..started.clone() };
        assert_eq!(job_line(&sharded), format!("{expected}; optimizer sharded"));
        // Some of the steps had a smaller batch.
        let continued = TrainStarted { total_tokens: 40_000_000, ..started.clone() };
        let line = job_line(&continued);
        assert!(line.ends_with("1000 steps of 65.5K tokens: 40.0M tokens, 1.00 epochs of 40.0M"), "{line}");

        let mut progress = Progress::new(false);
        assert_eq!(progress.announcement(&started).as_deref(), Some(expected));
        assert_eq!(progress.announcement(&started), None);
        let smaller = TrainStarted { tokens_per_step: 32_768, ..started.clone() };
        assert_eq!(
            progress.announcement(&smaller).as_deref(),
            Some("xlaunch: the number of ranks has changed: 32.8K tokens per step instead of 65.5K")
        );
        progress.started(&started);
        // The first step compiles kernels.
        let seconds = |step| if step == 1 { 60.0 } else { 0.5 };
        let mut lines = (1..=20).filter_map(|step| {
            progress.expected_time(&StepReport { step, step_seconds: seconds(step), ..Default::default() })
        });
        assert_eq!(
            lines.next().as_deref(),
            Some("xlaunch: expected time: 8m15s for the remaining 990 steps")
        );
        assert_eq!(lines.next(), None);
    }

    #[test]
    fn step_line_shows_loss_speed_and_time_left() {
        let mut progress = Progress::new(false);
        progress.started(&TrainStarted { total_steps: 100, ..Default::default() });
        progress.seconds_per_step = 0.5;
        let step = StepReport {
            step: 10,
            loss: 2.5,
            learning_rate: 1e-3,
            grad_norm: 0.75,
            tokens: 1024,
            step_seconds: 0.25,
            mfu: Some(0.824),
            ..Default::default()
        };
        assert_eq!(
            progress.describe(&step),
            "loss 2.5000  lr 1.00e-3  grad norm 0.75  2.05K tok/s  MFU 41.2 %  45s left"
        );
    }
}
