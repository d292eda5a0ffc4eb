//! `[observe] trace`: a timeline of host and device during some steps, for Perfetto and Chrome's tracing page.
//!
//! ```text
//! host            | step 11 [wait for data][forward][backward][all-reduce][optimizer][read back] | step 12 ...
//! compute stream  |           [embed_fwd][norm_fwd][gemm ...]...                                 | ...
//! ```
//! Phases are [`span`]s of the training thread, in which the host computes (CPU) or enqueues work (GPU). Heartbeats
//! report the current phase. Kernels come from the back end's profiler. The file, in the Trace Event Format, is
//! `trace-rank<R>.json` in the run's directory. An attached profiler gets an NVTX range for every phase of all steps.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use xlaunch_engine::{KernelSpan, nvtx};
use xlaunch_proto::v1::Phase;

use crate::error::{Result, WorkerError};
use crate::phase;

/// Number of steps before the traced ones, if the job is long enough: by then caches are warm and clocks are stable.
const WARMUP_STEPS: u64 = 10;
/// Tracks of the timeline, which are thread ids in the Trace Event Format.
const HOST_TRACK: u32 = 0;
const DEVICE_TRACK: u32 = 1;

// Finished phases of the step being traced; `None` outside traced steps.
thread_local!(static PHASES: RefCell<Option<Vec<FinishedPhase>>> = const { RefCell::new(None) });

#[derive(Clone, Copy, Debug)]
struct FinishedPhase {
    name: &'static str,
    begin: Instant,
    end: Instant,
}

/// Ends its phase when dropped.
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub(super) struct Span {
    name: &'static str,
    /// Phases nest; this is the phase to resume at the end.
    outer: Phase,
    /// Start of the phase; `None` outside traced steps.
    begin: Option<Instant>,
    _range: Option<nvtx::Range>,
}

/// Begins a phase of this thread. Outside traced steps this costs one atomic write.
pub(super) fn span(phase: Phase) -> Span {
    let (name, outer) = (phase.label(), phase::enter(phase));
    let tracing = PHASES.with_borrow(Option::is_some);
    Span { name, outer, begin: tracing.then(Instant::now), _range: nvtx::range(name) }
}

impl Drop for Span {
    fn drop(&mut self) {
        phase::enter(self.outer);
        let Some(begin) = self.begin else { return };
        let finished = FinishedPhase { name: self.name, begin, end: Instant::now() };
        PHASES.with_borrow_mut(|phases| {
            if let Some(phases) = phases {
                phases.push(finished);
            }
        });
    }
}

/// Collects the traced steps of one rank.
#[derive(Debug)]
pub struct Tracer {
    steps: Range<u64>,
    path: PathBuf,
    rank: usize,
    /// Origin of the timeline.
    start: Instant,
    /// Start of the current traced step.
    step_start: Instant,
    events: Vec<Value>,
}

impl Tracer {
    /// Creates a tracer of `count` of the steps `job`, after ten warm-up steps, or after one if the job is too short
    /// for that.
    pub fn new(count: u64, job: Range<u64>, run_dir: &Path, rank: usize) -> Self {
        let begin = match job.start + WARMUP_STEPS {
            warm if warm.saturating_add(count) <= job.end => warm,
            _ => (job.start + 1).min(job.end.saturating_sub(1)).max(job.start),
        };
        Self {
            steps: begin..begin.saturating_add(count).min(job.end),
            path: run_dir.join(format!("trace-rank{rank}.json")),
            rank,
            start: Instant::now(),
            step_start: Instant::now(),
            events: Vec::new(),
        }
    }

    /// Returns whether `step` is traced.
    pub(super) fn traces(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }

    /// Starts collecting phases if `step` is traced.
    pub(super) fn begin(&mut self, step: u64) {
        if self.traces(step) {
            self.step_start = Instant::now();
            PHASES.set(Some(Vec::new()));
        }
    }

    /// Records a finished step and its kernels. Writes the file after the last traced step.
    pub(super) fn end(&mut self, step: u64, kernels: &[KernelSpan]) -> Result<()> {
        if !self.traces(step) {
            return Ok(());
        }
        let phases = PHASES.take().unwrap_or_default();
        let end = phases.iter().map(|phase| phase.end).max().unwrap_or(self.step_start);
        let micros = |instant: Instant| instant.duration_since(self.start).as_secs_f64() * 1e6;
        let (rank, begin) = (self.rank, micros(self.step_start));
        let event = |track, name: &str, ts, dur| complete_event(rank, track, name, ts, dur);
        let whole = event(HOST_TRACK, &format!("step {}", step + 1), begin, micros(end) - begin);
        let phases = phases.iter().map(|phase| {
            event(HOST_TRACK, phase.name, micros(phase.begin), micros(phase.end) - micros(phase.begin))
        });
        let kernels = kernels.iter().map(|kernel| {
            event(DEVICE_TRACK, &kernel.name, begin + kernel.start * 1e6, kernel.seconds * 1e6)
        });
        let events: Vec<Value> = std::iter::once(whole).chain(phases).chain(kernels).collect();
        self.events.extend(events);
        if step + 1 == self.steps.end { self.finish() } else { Ok(()) }
    }

    /// Writes the file, unless it is already written or nothing was traced.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.events.is_empty() {
            return Ok(());
        }
        let rank = self.rank;
        let mut all = vec![
            name_event(rank, HOST_TRACK, "process_name", &format!("rank {rank}")),
            name_event(rank, HOST_TRACK, "thread_name", "host"),
            name_event(rank, DEVICE_TRACK, "thread_name", "compute stream"),
        ];
        all.append(&mut self.events);
        let text = json!({ "traceEvents": all, "displayTimeUnit": "ms" }).to_string();
        let io = |source| WorkerError::Io { what: "failed to write a trace".into(), source };
        fs_err::write(&self.path, text).map_err(io)
    }
}

/// Builds a "complete" event; times are in microseconds.
fn complete_event(rank: usize, track: u32, name: &str, ts: f64, dur: f64) -> Value {
    json!({ "ph": "X", "name": name, "ts": ts, "dur": dur, "pid": rank, "tid": track })
}

/// Builds a "metadata" event that names a process or a track.
fn name_event(rank: usize, track: u32, what: &str, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": rank, "tid": track, "args": { "name": name } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(count: u64, job: Range<u64>) -> Range<u64> {
        Tracer::new(count, job, Path::new(""), 0).steps
    }

    #[test]
    fn traced_steps_follow_ten_warm_up_steps_or_one_in_short_jobs() {
        assert_eq!(steps(3, 0..100), 10..13);
        assert_eq!(steps(3, 50..100), 60..63);
        assert_eq!(steps(3, 0..12), 1..4);
        assert_eq!(steps(30, 0..12), 1..12);
        assert_eq!(steps(2, 0..1), 0..1);
        assert!(steps(0, 0..100).is_empty() && steps(0, 5..5).is_empty() && steps(2, 5..5).is_empty());
    }

    #[test]
    fn trace_contains_phases_and_kernels_of_traced_steps_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut tracer = Tracer::new(1, 0..2, dir.path(), 3);
        drop(span(Phase::Sample));
        tracer.begin(0);
        tracer.end(0, &[]).unwrap();
        tracer.begin(1);
        drop(span(Phase::Forward));
        let kernel = KernelSpan { name: "norm_fwd".into(), start: 1e-6, seconds: 2e-6 };
        tracer.end(1, &[kernel]).unwrap();
        drop(span(Phase::Sample));
        let text = fs_err::read_to_string(dir.path().join("trace-rank3.json")).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["step 2", "forward", "norm_fwd"]);
        let step = spans[0]["ts"].as_f64().unwrap();
        assert!((spans[2]["ts"].as_f64().unwrap() - step - 1.0).abs() < 1e-3);
        assert_eq!(
            (&spans[2]["dur"], &spans[2]["tid"], &spans[2]["pid"]),
            (&json!(2.0), &json!(1), &json!(3))
        );
    }
}
