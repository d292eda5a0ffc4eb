//! The values of training steps and evaluations, for `metrics.jsonl`, TensorBoard, Prometheus and reports. A new value
//! is a field of [`StepReport`], which the worker sets, and an entry of [`METRICS`].

use serde_json::Value;

use crate::v1::worker_report::Report;
use crate::v1::{EvalReport, StepReport};

/// A value that is reported after each step, or after each evaluation.
#[derive(Debug)]
pub struct Metric {
    /// Key in `metrics.jsonl`.
    pub key: &'static str,
    /// True if TensorBoard gets the value, with the key as its tag.
    pub in_tensorboard: bool,
    /// A tag that was renamed, and is kept for one release.
    pub deprecated_tag: Option<&'static str>,
    /// The gauge in `/metrics` that has the value of the last step.
    pub gauge: Option<Gauge>,
    /// The chart of a report that has the curve.
    pub chart: Option<Chart>,
    get: Get,
}

/// A gauge of Prometheus.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the terms are those of Prometheus")]
pub struct Gauge {
    pub name: &'static str,
    pub help: &'static str,
    pub series: Series,
}

/// The series of a gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Series {
    /// One per job, with the value of rank 0, until an hour after the end of the job.
    Job,
    /// One per job that has not ended, with the value of rank 0.
    RunningJob,
    /// One per rank.
    Rank,
}

/// A chart of a report. Metrics with the same id share the chart of the first.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "a chart has an id, a title and a unit")]
pub struct Chart {
    pub id: &'static str,
    pub title: &'static str,
    pub unit: &'static str,
}

#[derive(Debug)]
enum Get {
    Step(fn(&StepReport) -> Option<Number>),
    Eval(fn(&EvalReport) -> Option<Number>),
}

/// A value with the type that it has in the report.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the variants are types")]
pub enum Number {
    Single(f32),
    Double(f64),
    Whole(u64),
}

/// All metrics, in the order of the charts and of the values in TensorBoard's events.
pub static METRICS: [Metric; 21] =
    [
        step("train/loss", |step| Some(Number::Single(step.loss)))
            .tensorboard()
            .gauge("xlaunch_loss", "Training loss of the last step, in nats per token.", Series::Job)
            .chart("loss", "Loss", "nats per token"),
        eval("val/loss", |eval| Some(Number::Single(eval.loss))).tensorboard().chart(
            "loss",
            "Loss",
            "nats per token",
        ),
        eval("val/bits_per_byte", |eval| eval.bits_per_byte.map(Number::Double)).tensorboard().chart(
            "bits",
            "Validation loss",
            "bits per byte",
        ),
        eval("val/preference_accuracy", |eval| eval.preference_accuracy.map(Number::Double))
            .tensorboard()
            .chart("preferences", "Preferences", "share of pairs in the right order"),
        eval("val/best_step", |eval| eval.best.map(|best| Number::Whole(best.step))),
        step("train/lr", |step| Some(Number::Single(step.learning_rate)))
            .tensorboard()
            .deprecated_tag("lr")
            .chart("lr", "Learning rate", ""),
        step("train/grad_norm", |step| Some(Number::Single(step.grad_norm))).tensorboard().chart(
            "norm",
            "Gradient norm",
            "L2, before clipping",
        ),
        step("train/skipped_steps", |step| Some(Number::Whole(step.skipped_steps))).tensorboard(),
        step("experts/aux_loss", |step| step.router_aux_loss.map(Number::Single)).tensorboard().chart(
            "balance",
            "Load-balancing loss",
            "1 is balanced",
        ),
        step("experts/busiest_share", |step| step.expert_busiest_share.map(Number::Single))
            .tensorboard()
            .chart("busiest", "Busiest expert", "share of the choices of a layer"),
        step("experts/load_entropy", |step| step.expert_load_entropy.map(Number::Single))
            .tensorboard()
            .chart("entropy", "Entropy of the loads of experts", "1 is balanced"),
        step("preferences/accuracy", |step| step.preference_accuracy.map(Number::Single))
            .tensorboard()
            .chart("preferences", "Preferences", "share of pairs in the right order"),
        step("preferences/margin", |step| step.preference_margin.map(Number::Single)).tensorboard().chart(
            "margin",
            "Margin of preferences",
            "nats, times dpo.beta",
        ),
        step("perf/tokens_per_second", |step| Some(Number::Double(tokens_per_second(step))))
            .tensorboard()
            .deprecated_tag("perf/tokens_per_s")
            .gauge(
                "xlaunch_tokens_per_second",
                "Throughput of the last step, over all ranks.",
                Series::RunningJob,
            )
            .chart("speed", "Throughput", "tokens per second"),
        step("perf/step_seconds", |step| Some(Number::Double(step.step_seconds))).tensorboard(),
        step("perf/mfu", |step| step.mfu.map(Number::Double))
            .tensorboard()
            .gauge(
                "xlaunch_mfu_ratio",
                "Model FLOPs utilisation of the last step, from 0 to 1.",
                Series::RunningJob,
            )
            .chart("mfu", "Model FLOPs utilisation", "1 is the peak rate"),
        step("pool/live_bytes", |step| Some(Number::Whole(step.pool_live_bytes))).gauge(
            "xlaunch_pool_live_bytes",
            "Device memory allocated from the rank's pool.",
            Series::Rank,
        ),
        step("pool/mapped_bytes", |step| Some(Number::Whole(step.pool_mapped_bytes))).gauge(
            "xlaunch_pool_mapped_bytes",
            "Device memory mapped by the rank's pool.",
            Series::Rank,
        ),
        step("pool/peak_bytes", |step| Some(Number::Whole(step.pool_peak_bytes))).gauge(
            "xlaunch_pool_peak_bytes",
            "Peak device memory mapped by the rank's pool.",
            Series::Rank,
        ),
        step("pool/fragmentation", |step| Some(Number::Single(step.pool_fragmentation))),
        step("pool/driver_allocations", |step| Some(Number::Whole(step.pool_driver_allocations))),
    ];

/// The key of an [`ExpertReport`](crate::v1::ExpertReport) in `metrics.jsonl`, and its tag in TensorBoard, before the
/// block.
pub const EXPERT_LOADS: &str = "experts/load";

const fn step(key: &'static str, get: fn(&StepReport) -> Option<Number>) -> Metric {
    Metric::new(key, Get::Step(get))
}

const fn eval(key: &'static str, get: fn(&EvalReport) -> Option<Number>) -> Metric {
    Metric::new(key, Get::Eval(get))
}

impl Metric {
    const fn new(key: &'static str, get: Get) -> Self {
        Self { key, in_tensorboard: false, deprecated_tag: None, gauge: None, chart: None, get }
    }

    const fn tensorboard(self) -> Self {
        Self { in_tensorboard: true, ..self }
    }

    const fn deprecated_tag(self, tag: &'static str) -> Self {
        Self { deprecated_tag: Some(tag), ..self }
    }

    const fn gauge(self, name: &'static str, help: &'static str, series: Series) -> Self {
        Self { gauge: Some(Gauge { name, help, series }), ..self }
    }

    const fn chart(self, id: &'static str, title: &'static str, unit: &'static str) -> Self {
        Self { chart: Some(Chart { id, title, unit }), ..self }
    }

    /// Returns the value after a step; `None` if it is not known, or belongs to evaluations.
    pub fn of_step(&self, step: &StepReport) -> Option<Number> {
        if let Get::Step(get) = self.get { get(step) } else { None }
    }
}

/// The values of a step or an evaluation. Loads of experts are lists, so a report about them has no values here.
#[derive(Debug)]
pub struct Point {
    /// Completed steps.
    pub step: u64,
    /// The values that are known.
    pub values: Vec<(&'static Metric, Number)>,
}

impl Point {
    /// Returns the values of a report; `None` if it is not about a step, its experts or an evaluation.
    pub fn of(report: &Report) -> Option<Self> {
        let value = |metric: &Metric| match (report, &metric.get) {
            (Report::Step(step), Get::Step(get)) => get(step),
            (Report::Eval(eval), Get::Eval(get)) => get(eval),
            _ => None,
        };
        let step = match report {
            Report::Step(step) => step.step,
            Report::Eval(eval) => eval.step,
            Report::Experts(experts) => experts.step,
            _ => return None,
        };
        Some(Self { step, values: METRICS.iter().filter_map(|it| Some((it, value(it)?))).collect() })
    }
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "shown to people")]
impl Number {
    /// Returns the value as JSON: for an f32 the shortest decimal that rounds to it, such as 0.1 and not 0.10000000149;
    /// null if it is not finite.
    pub fn json(self) -> Value {
        match self {
            Self::Single(value) => value.to_string().parse::<f64>().map_or(Value::Null, Value::from),
            Self::Double(value) => value.into(),
            Self::Whole(value) => value.into(),
        }
    }

    /// Returns the value as a float.
    pub fn f64(self) -> f64 {
        match self {
            Self::Single(value) => value.into(),
            Self::Double(value) => value,
            Self::Whole(value) => value as f64,
        }
    }

    /// Returns the value as a single-precision float.
    pub fn f32(self) -> f32 {
        match self {
            Self::Single(value) => value,
            Self::Double(value) => value as f32,
            Self::Whole(value) => value as f32,
        }
    }
}

/// Returns the tokens per second of a step, over all ranks; 0 before the first step.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub fn tokens_per_second(step: &StepReport) -> f64 {
    if step.step_seconds > 0.0 { step.tokens as f64 / step.step_seconds } else { 0.0 }
}
