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
use xlaunch_proto::v1::{NodeJobState, RankState, RankStatus, StatusReply, StepTimes, Totals};

use super::api::has_trained;
use crate::view::{JobView, NodeView};
use xlaunch_proto::labels::{gpu_state, kind, node_job_state};

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

type Labels = Vec<(&'static str, String)>;
type Sample = (Labels, f64);

#[derive(Debug)]
struct Scrape {
    view: Arc<NodeView>,
    now: u64,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        self.node(&mut out)?;
        self.jobs(&mut out)?;
        self.workers(&mut out)
    }
}

/// Where metrics are written.
struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn gauge(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in samples {
            match labels.is_empty() {
                true => metric.encode_gauge(&value)?,
                false => metric.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }

    /// The samples' name ends in `_total`.
    fn counter(
        &mut self,
        name: &str,
        help: &str,
        samples: impl Iterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in samples {
            metric.encode_family(&labels)?.encode_counter::<Labels, _, u64>(&value, None)?;
        }
        Ok(())
    }

    /// Of steps, by how long they took.
    fn histogram(&mut self, name: &str, help: &str, jobs: &[(Labels, Totals)]) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, totals) in jobs {
            let bucket = |times: &StepTimes| (times.seconds, times.steps);
            let buckets: Vec<_> = totals.steps.iter().map(bucket).collect();
            let count = totals.steps.iter().map(|times| times.steps).sum();
            metric.encode_family(labels)?.encode_histogram::<Labels>(
                totals.step_seconds,
                count,
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}

impl Scrape {
    fn node(&self, out: &mut Out<'_>) -> fmt::Result {
        let node = &self.view.node;
        let build = (vec![("version", node.version.clone())], 1.0);
        out.gauge("xlaunch_build_info", "Version of the daemon.", [build])?;
        let drained = (Vec::new(), flag(!node.drained.is_empty()));
        out.gauge("xlaunch_drained", "1 if no job is started on this node.", [drained])?;
        let gpus = node.gpus.iter().map(|gpu| {
            let labels = vec![
                ("gpu", gpu.index.to_string()),
                ("UUID", gpu.uuid.clone()),
                ("name", gpu.name.clone()),
                ("state", gpu_state(gpu.state()).into()),
            ];
            (labels, 1.0)
        });
        out.gauge("xlaunch_gpu_info", "1 for each GPU, with the daemon's view of it.", gpus)?;
        let held = node.gpus.iter().filter(|gpu| gpu.job != 0);
        let held = held.map(|gpu| (vec![("UUID", gpu.uuid.clone()), ("job", gpu.job.to_string())], 1.0));
        out.gauge("xlaunch_gpu_job", "1 for each GPU that a job holds.", held)
    }

    fn jobs(&self, out: &mut Out<'_>) -> fmt::Result {
        use NodeJobState::{Cancelled, Done, Failed, Lost, Queued, Running, Starting, Stopping};
        let count = |state| self.view.jobs.values().filter(|job| job.job.state() == state).count();
        let states = [Queued, Starting, Running, Stopping, Done, Failed, Cancelled, Lost];
        let states =
            states.map(|state| (vec![("state", node_job_state(state).into())], whole(count(state) as u64)));
        out.gauge("xlaunch_jobs", "Jobs that the daemon knows, by state.", states)?;
        let help = "1 for each job that waits, runs, or ended in the last hour.";
        out.gauge("xlaunch_job_info", help, self.recent().map(info))?;
        let age = |job: &JobView| Some((of(job), job.status.as_ref()?.1.elapsed().as_secs_f64()));
        out.gauge(
            "xlaunch_job_status_age_seconds",
            "Since the job's agent last answered.",
            self.live().filter_map(age),
        )?;

        let steps = trained(self.recent(), |_, status| Some(whole(status.step)));
        out.gauge("xlaunch_step", "Steps that the job has done.", steps)?;
        let losses = trained(self.recent(), |_, status| Some(f64::from(status.loss)));
        out.gauge("xlaunch_loss", "Of the last step, in nats per token.", losses)?;
        let speeds = trained(self.live(), |_, status| Some(status.tokens_per_second));
        out.gauge("xlaunch_tokens_per_second", "In the last step, over all ranks.", speeds)?;
        let totals = |job: &JobView| Some((of(job), job.status.as_ref()?.0.totals.clone()?));
        let totals: Vec<_> = self.recent().filter_map(totals).collect();
        let help =
            "Steps of the job, with what comes between them; those made again after a restart count again.";
        out.histogram("xlaunch_step_duration_seconds", help, &totals)?;
        let tokens = totals.iter().map(|(labels, totals)| (labels.clone(), totals.tokens));
        out.counter("xlaunch_tokens", "That the job has been trained on, by all ranks.", tokens)?;
        let bytes = totals.iter().map(|(labels, totals)| (labels.clone(), totals.all_reduce_bytes));
        out.counter("xlaunch_allreduce_bytes", "Gradients that were summed over ranks, of one rank.", bytes)?;
        let restarts = |job: &JobView| Some((of(job), job.status.as_ref()?.0.restarts.into()));
        let restarts = self.recent().filter_map(restarts);
        out.counter("xlaunch_worker_restarts", "Starts of all workers of the job after the first.", restarts)
    }

    fn workers(&self, out: &mut Out<'_>) -> fmt::Result {
        let gone = |rank: &RankStatus| matches!(rank.state(), RankState::Exited | RankState::Unspecified);
        out.gauge("xlaunch_worker_up", "1 if the worker runs.", self.ranks(|rank| Some(flag(!gone(rank)))))?;
        let cpu = self.ranks(|rank| rank.cpu_percent);
        out.gauge("xlaunch_worker_cpu_percent", "Of the worker with its children; 100 is a core.", cpu)?;
        let memory = self.ranks(|rank| rank.memory_bytes.map(whole));
        out.gauge("xlaunch_worker_memory_bytes", "Resident, of the worker with its children.", memory)?;
        let silence = self.ranks(|rank| rank.seconds_since_output);
        out.gauge("xlaunch_worker_seconds_since_output", "Since the worker last wrote a line.", silence)?;
        let help = "1 if the worker should be looked at: it has been silent and idle for long.";
        out.gauge("xlaunch_worker_hint", help, self.ranks(|rank| Some(flag(!rank.hint.is_empty()))))?;

        // Workers of commands have no pool.
        let pool = |rank: &RankStatus, bytes| (rank.pool_peak_bytes > 0).then(|| whole(bytes));
        let live = self.ranks(|rank| pool(rank, rank.pool_live_bytes));
        out.gauge("xlaunch_pool_live_bytes", "Device memory that the rank's pool has handed out.", live)?;
        let mapped = self.ranks(|rank| pool(rank, rank.pool_mapped_bytes));
        out.gauge("xlaunch_pool_mapped_bytes", "Device memory that the rank's pool holds.", mapped)?;
        let peak = self.ranks(|rank| pool(rank, rank.pool_peak_bytes));
        out.gauge("xlaunch_pool_peak_bytes", "Most device memory that the rank's pool has held.", peak)
    }

    /// Jobs that have not ended, and those that have a short time ago.
    fn recent(&self) -> impl Iterator<Item = &JobView> {
        let recent = |job: &&JobView| self.now.saturating_sub(job.job.ended_unix_ms) < ENDED_MS;
        self.view.jobs.values().map(AsRef::as_ref).filter(move |job| !job.has_ended() || recent(job))
    }

    fn live(&self) -> impl Iterator<Item = &JobView> {
        self.view.jobs.values().map(AsRef::as_ref).filter(|job| !job.has_ended())
    }

    /// A sample of each worker.
    fn ranks(&self, value: impl Fn(&RankStatus) -> Option<f64>) -> Vec<Sample> {
        let mut samples = Vec::new();
        for job in self.live() {
            for rank in job.status.iter().flat_map(|(status, _)| &status.ranks) {
                if let Some(value) = value(rank) {
                    samples.push((
                        vec![("job", job.job.id.to_string()), ("rank", rank.rank.to_string())],
                        value,
                    ));
                }
            }
        }
        samples
    }
}

/// A sample of each of these jobs that has done a step of training.
fn trained<'a>(
    jobs: impl Iterator<Item = &'a JobView>,
    value: fn(&JobView, &StatusReply) -> Option<f64>,
) -> impl Iterator<Item = Sample> {
    jobs.filter_map(move |job| {
        let (status, _) = job.status.as_ref().filter(|(status, _)| has_trained(status))?;
        Some((of(job), value(job, status)?))
    })
}

fn info(view: &JobView) -> Sample {
    let job = &view.job;
    let user = if job.user.is_empty() { job.uid.to_string() } else { short(&job.user) };
    let labels = vec![
        ("job", job.id.to_string()),
        ("name", short(&job.name)),
        ("user", user),
        ("kind", kind(job.kind()).into()),
        ("state", node_job_state(job.state()).into()),
    ];
    (labels, 1.0)
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
