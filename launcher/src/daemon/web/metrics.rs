//! `/metrics`: the view as OpenMetrics text, made anew for every scrape.
//!
//! What the exporter of DCGM tells of GPUs is not told again: series of both meet by the label `UUID`, which it writes so. The
//! label `job` is the job's number on its node; `honor_labels: true` lets Prometheus keep it. A job that has ended is told of
//! for an hour more, so that an alert about it fires, and ends; of its workers and its speed nothing is told any more.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use xlaunch_proto::v1::{NodeJobState, Progress, RankState, RankStatus, StatusReply};

use super::api::{gpu_state, has_trained, kind, node_job_state};
use crate::daemon::view::{JobView, NodeView};

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long an ended job is told of, in milliseconds.
const ENDED_MS: u64 = 3_600_000;
/// Characters of a text that a user chose.
const TEXT: usize = 128;

/// The answer to a scrape at `now`, in milliseconds since 1970.
pub(super) fn text(view: Arc<NodeView>, now: u64) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape { view, now }));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(out)
}

/// A metric: its name without the `_total` of counters, what it is, and its samples.
struct Metric(&'static str, &'static str, Samples);

enum Samples {
    Gauge(fn(&Scrape) -> Vec<Sample>),
    Counter(fn(&Scrape) -> Vec<(Labels, u64)>),
}

type Labels = Vec<(&'static str, String)>;
type Sample = (Labels, f64);

#[derive(Debug)]
struct Scrape {
    view: Arc<NodeView>,
    now: u64,
}

const METRICS: [Metric; 19] = [
    Metric(
        "xlaunch_build_info",
        "Version of the daemon.",
        Samples::Gauge(|scrape| vec![(vec![("version", scrape.view.node.version.clone())], 1.0)]),
    ),
    Metric(
        "xlaunch_drained",
        "1 if no job is started on this node.",
        Samples::Gauge(|scrape| vec![(Vec::new(), flag(!scrape.view.node.drained.is_empty()))]),
    ),
    Metric("xlaunch_jobs", "Jobs that the daemon knows, by state.", Samples::Gauge(jobs)),
    Metric(
        "xlaunch_job_info",
        "1 for each job that waits, runs, or ended in the last hour.",
        Samples::Gauge(job_info),
    ),
    Metric(
        "xlaunch_job_status_age_seconds",
        "Since the job's agent last answered.",
        Samples::Gauge(|scrape| {
            let age = |job: &JobView| job.status.as_ref().map(|(_, at)| at.elapsed().as_secs_f64());
            scrape.live().filter_map(|job| Some((of(job), age(job)?))).collect()
        }),
    ),
    Metric(
        "xlaunch_step",
        "Steps that the job has done.",
        Samples::Gauge(|scrape| trained(scrape.recent(), |_, status| Some(whole(status.step)))),
    ),
    Metric(
        "xlaunch_loss",
        "Of the last step, in nats per token.",
        Samples::Gauge(|scrape| trained(scrape.recent(), |_, status| Some(f64::from(status.loss)))),
    ),
    Metric(
        "xlaunch_tokens_per_second",
        "In the last step, over all ranks.",
        Samples::Gauge(|scrape| trained(scrape.live(), |_, status| Some(status.tokens_per_second))),
    ),
    Metric(
        "xlaunch_step_seconds",
        "Mean over the last steps, with what comes between them.",
        Samples::Gauge(|scrape| trained(scrape.live(), |job, _| step_seconds(&job.history))),
    ),
    Metric(
        "xlaunch_worker_restarts",
        "Starts of all workers of the job after the first.",
        Samples::Counter(|scrape| {
            let restarts = |job: &JobView| job.status.as_ref().map(|(status, _)| u64::from(status.restarts));
            scrape.recent().filter_map(|job| Some((of(job), restarts(job)?))).collect()
        }),
    ),
    Metric(
        "xlaunch_worker_up",
        "1 if the worker runs.",
        Samples::Gauge(|scrape| {
            scrape.workers(|worker| {
                Some(flag(!matches!(worker.state(), RankState::Exited | RankState::Unspecified)))
            })
        }),
    ),
    Metric(
        "xlaunch_worker_cpu_percent",
        "Of the worker with its children; 100 is a core.",
        Samples::Gauge(|scrape| scrape.workers(|worker| worker.cpu_percent)),
    ),
    Metric(
        "xlaunch_worker_memory_bytes",
        "Resident, of the worker with its children.",
        Samples::Gauge(|scrape| scrape.workers(|worker| worker.memory_bytes.map(whole))),
    ),
    Metric(
        "xlaunch_worker_seconds_since_output",
        "Since the worker last wrote a line.",
        Samples::Gauge(|scrape| scrape.workers(|worker| worker.seconds_since_output)),
    ),
    Metric(
        "xlaunch_pool_live_bytes",
        "Device memory that the rank's pool has handed out.",
        Samples::Gauge(|scrape| scrape.workers(|worker| pool(worker, worker.pool_live_bytes))),
    ),
    Metric(
        "xlaunch_pool_mapped_bytes",
        "Device memory that the rank's pool holds.",
        Samples::Gauge(|scrape| scrape.workers(|worker| pool(worker, worker.pool_mapped_bytes))),
    ),
    Metric(
        "xlaunch_pool_peak_bytes",
        "Most device memory that the rank's pool has held.",
        Samples::Gauge(|scrape| scrape.workers(|worker| pool(worker, worker.pool_peak_bytes))),
    ),
    Metric("xlaunch_gpu_info", "1 for each GPU, with the daemon's view of it.", Samples::Gauge(gpu_info)),
    Metric("xlaunch_gpu_job", "1 for each GPU that a job holds.", Samples::Gauge(gpu_job)),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Metric(name, help, samples) in &METRICS {
            match samples {
                Samples::Gauge(samples) => {
                    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                    for (labels, value) in samples(self) {
                        metric.encode_family(&labels)?.encode_gauge(&value)?;
                    }
                }
                Samples::Counter(samples) => {
                    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                    for (labels, value) in samples(self) {
                        metric.encode_family(&labels)?.encode_counter::<Labels, _, u64>(&value, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Scrape {
    fn recent(&self) -> impl Iterator<Item = &JobView> {
        let recent = |job: &&JobView| self.now.saturating_sub(job.job.ended_unix_ms) < ENDED_MS;
        self.view.jobs.values().map(AsRef::as_ref).filter(move |job| !job.has_ended() || recent(job))
    }

    fn live(&self) -> impl Iterator<Item = &JobView> {
        self.view.jobs.values().map(AsRef::as_ref).filter(|job| !job.has_ended())
    }

    /// A sample of each worker.
    fn workers(&self, value: fn(&RankStatus) -> Option<f64>) -> Vec<Sample> {
        let mut samples = Vec::new();
        for job in self.live() {
            for worker in job.status.iter().flat_map(|(status, _)| &status.ranks) {
                if let Some(value) = value(worker) {
                    let mut labels = of(job);
                    labels.push(("rank", worker.rank.to_string()));
                    samples.push((labels, value));
                }
            }
        }
        samples
    }
}

/// A sample of each training job of these that has done a step.
fn trained<'a>(
    jobs: impl Iterator<Item = &'a JobView>,
    value: fn(&JobView, &StatusReply) -> Option<f64>,
) -> Vec<Sample> {
    let sample = |job: &JobView| {
        let (status, _) = job.status.as_ref().filter(|(status, _)| has_trained(status))?;
        Some((of(job), value(job, status)?))
    };
    jobs.filter_map(sample).collect()
}

fn jobs(scrape: &Scrape) -> Vec<Sample> {
    use NodeJobState::{Cancelled, Done, Failed, Lost, Queued, Running, Starting, Stopping};
    let count = |state| scrape.view.jobs.values().filter(|job| job.job.state() == state).count();
    let states = [Queued, Starting, Running, Stopping, Done, Failed, Cancelled, Lost];
    let sample = |state| (vec![("state", node_job_state(state).into())], whole(count(state) as u64));
    states.into_iter().map(sample).collect()
}

fn job_info(scrape: &Scrape) -> Vec<Sample> {
    let sample = |view: &JobView| {
        let job = &view.job;
        let mut labels = of(view);
        labels.push(("name", short(&job.name)));
        labels.push(("user", if job.user.is_empty() { job.uid.to_string() } else { short(&job.user) }));
        labels.push(("kind", kind(job.kind()).into()));
        labels.push(("state", node_job_state(job.state()).into()));
        (labels, 1.0)
    };
    scrape.recent().map(sample).collect()
}

fn gpu_info(scrape: &Scrape) -> Vec<Sample> {
    let gpus = scrape.view.node.gpus.iter().map(|gpu| {
        let labels = vec![
            ("gpu", gpu.index.to_string()),
            ("UUID", gpu.uuid.clone()),
            ("name", gpu.name.clone()),
            ("state", gpu_state(gpu.state()).into()),
        ];
        (labels, 1.0)
    });
    gpus.collect()
}

fn gpu_job(scrape: &Scrape) -> Vec<Sample> {
    let held = scrape.view.node.gpus.iter().filter(|gpu| gpu.job != 0);
    held.map(|gpu| (vec![("UUID", gpu.uuid.clone()), ("job", gpu.job.to_string())], 1.0)).collect()
}

/// Seconds per step between the last two points of a history in which steps went by.
fn step_seconds(history: &[Progress]) -> Option<f64> {
    let [.., before, last] = history else { return None };
    let steps = last.step.checked_sub(before.step).filter(|steps| *steps > 0)?;
    let ms = last.unix_ms.checked_sub(before.unix_ms)?;
    Some(whole(ms) / 1000.0 / whole(steps))
}

/// Workers without a pool, such as those of commands, have nothing to tell.
fn pool(worker: &RankStatus, bytes: u64) -> Option<f64> {
    (worker.pool_peak_bytes > 0).then(|| whole(bytes))
}

fn of(job: &JobView) -> Labels {
    vec![("job", job.job.id.to_string())]
}

fn flag(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

#[expect(clippy::cast_precision_loss, reason = "samples are floats; bytes and steps stay far below 2^53")]
fn whole(value: u64) -> f64 {
    value as f64
}

/// Every series carries its labels at every scrape: the beginning of a text will do.
fn short(text: &str) -> String {
    text.chars().take(TEXT).collect()
}
