//! `[observe] trace`: what host and device did in some steps, for Perfetto and Chrome.
//!
//! ```text
//! host            | step 11 [wait for data][forward][backward][sums][optimizer][read back] | step 12 ...
//! compute stream  |           [embed_fwd][norm_fwd][product ...]...                        | ...
//! ```
//! Phases are [`span`]s of the trainer's thread: what the host does in them is to compute on a CPU, to enqueue on a GPU.
//! Heartbeats tell the present one.
//! Kernels come from the back end's profiler. The file, in the Trace Event Format, is `trace-rank<R>.json` in the run's
//! directory. Where a profiler that takes NVTX ranges is attached, it gets every phase, in all steps.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use xlaunch_engine::{KernelSpan, nvtx};
use xlaunch_proto::v1;

use crate::doing;
use crate::error::{Result, WorkerError};

/// Steps of a job before the traced ones, where it is long enough: caches and clocks have settled by then.
const SETTLED: u64 = 10;
/// Tracks of a process.
const HOST: u32 = 0;
const DEVICE: u32 = 1;

thread_local!(static PHASES: RefCell<Option<Vec<Phase>>> = const { RefCell::new(None) });

/// A phase that is over.
#[derive(Clone, Copy, Debug)]
struct Phase {
    name: &'static str,
    begin: Instant,
    end: Instant,
}

/// Ends its phase when dropped.
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub(super) struct Span {
    name: &'static str,
    outer: v1::Phase,
    begin: Option<Instant>,
    _range: Option<nvtx::Range>,
}

/// Begins a phase of this thread. It costs next to nothing while nobody listens.
pub(super) fn span(phase: v1::Phase) -> Span {
    let (name, outer) = (phase.name(), doing::enter(phase));
    let listening = PHASES.with_borrow(Option::is_some);
    Span { name, outer, begin: listening.then(Instant::now), _range: nvtx::range(name) }
}

impl Drop for Span {
    fn drop(&mut self) {
        doing::enter(self.outer);
        let Some(begin) = self.begin else { return };
        let phase = Phase { name: self.name, begin, end: Instant::now() };
        PHASES.with_borrow_mut(|phases| {
            if let Some(phases) = phases {
                phases.push(phase);
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
    start: Instant,
    step: Instant,
    events: Vec<Value>,
}

impl Tracer {
    /// `count` steps of those in `job` are traced: after ten of them, or after the first where the job is too short for
    /// that; none if `count` is 0.
    pub fn new(count: u64, job: Range<u64>, run_dir: &Path, rank: usize) -> Self {
        let begin = match job.start + SETTLED {
            settled if settled.saturating_add(count) <= job.end => settled,
            _ => (job.start + 1).min(job.end.saturating_sub(1)).max(job.start),
        };
        Self {
            steps: begin..begin.saturating_add(count).min(job.end),
            path: run_dir.join(format!("trace-rank{rank}.json")),
            rank,
            start: Instant::now(),
            step: Instant::now(),
            events: Vec::new(),
        }
    }

    /// Whether `step` is to be traced.
    pub(super) fn traces(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }

    /// Begins to listen if `step` is to be traced.
    pub(super) fn begin(&mut self, step: u64) {
        if self.traces(step) {
            self.step = Instant::now();
            PHASES.set(Some(Vec::new()));
        }
    }

    /// A step is over, with its last phase; `kernels` ran in it. Behind the last traced step the file is written.
    pub(super) fn end(&mut self, step: u64, kernels: &[KernelSpan]) -> Result<()> {
        if !self.traces(step) {
            return Ok(());
        }
        let phases = PHASES.take().unwrap_or_default();
        let over = phases.iter().map(|phase| phase.end).max().unwrap_or(self.step);
        let micros = |instant: Instant| instant.duration_since(self.start).as_secs_f64() * 1e6;
        let (rank, begin) = (self.rank, micros(self.step));
        let event = |track, name: &str, ts, dur| complete(rank, track, name, ts, dur);
        let whole = event(HOST, &format!("step {}", step + 1), begin, micros(over) - begin);
        let phases = phases.iter().map(|phase| {
            event(HOST, phase.name, micros(phase.begin), micros(phase.end) - micros(phase.begin))
        });
        let kernels = kernels
            .iter()
            .map(|kernel| event(DEVICE, &kernel.name, begin + kernel.start * 1e6, kernel.seconds * 1e6));
        let events: Vec<Value> = std::iter::once(whole).chain(phases).chain(kernels).collect();
        self.events.extend(events);
        if step + 1 == self.steps.end { self.finish() } else { Ok(()) }
    }

    /// Writes what was traced, if that was not done before.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.events.is_empty() {
            return Ok(());
        }
        let rank = self.rank;
        let mut all = vec![
            named(rank, HOST, "process_name", &format!("rank {rank}")),
            named(rank, HOST, "thread_name", "host"),
            named(rank, DEVICE, "thread_name", "compute stream"),
        ];
        all.append(&mut self.events);
        let text = json!({ "traceEvents": all, "displayTimeUnit": "ms" }).to_string();
        let io = |source| WorkerError::Io { what: "failed to write a trace".into(), source };
        fs_err::write(&self.path, text).map_err(io)
    }
}

/// A span of a track; times in microseconds.
fn complete(rank: usize, track: u32, name: &str, ts: f64, dur: f64) -> Value {
    json!({ "ph": "X", "name": name, "ts": ts, "dur": dur, "pid": rank, "tid": track })
}

/// What a process or a track is called.
fn named(rank: usize, track: u32, what: &str, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": rank, "tid": track, "args": { "name": name } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(count: u64, job: Range<u64>) -> Range<u64> {
        Tracer::new(count, job, Path::new(""), 0).steps
    }

    #[test]
    fn traced_steps_come_after_ten_or_after_the_first() {
        assert_eq!(steps(3, 0..100), 10..13);
        assert_eq!(steps(3, 50..100), 60..63);
        assert_eq!(steps(3, 0..12), 1..4);
        assert_eq!(steps(30, 0..12), 1..12);
        assert_eq!(steps(2, 0..1), 0..1);
        assert!(steps(0, 0..100).is_empty() && steps(0, 5..5).is_empty() && steps(2, 5..5).is_empty());
    }

    #[test]
    fn phases_and_kernels_lie_in_their_step_and_nothing_is_kept_outside() {
        let dir = tempfile::tempdir().unwrap();
        let mut tracer = Tracer::new(1, 0..2, dir.path(), 3);
        drop(span(v1::Phase::Sample));
        tracer.begin(0);
        tracer.end(0, &[]).unwrap();
        tracer.begin(1);
        drop(span(v1::Phase::Forward));
        let kernel = KernelSpan { name: "norm_fwd".into(), start: 1e-6, seconds: 2e-6 };
        tracer.end(1, &[kernel]).unwrap();
        drop(span(v1::Phase::Sample));
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
