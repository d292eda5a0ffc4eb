//! `/metrics`: the view in OpenMetrics or Prometheus text format, encoded anew for each scrape.
//!
//! GPU measurements are left to dcgm-exporter, whose series can be joined with these on the label `UUID`. The label
//! `job` is the job's id on its node; Prometheus keeps it with `honor_labels: true`. Ended jobs are exported for
//! another hour, without their workers and throughput, so that alerts on them can fire and resolve.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use xlaunch_proto::metrics::{Gauge, METRICS, Metric, Series};
use xlaunch_proto::v1::{
    Accounting, ExaminationState, NodeJobState, RankState, RankStatus, StatusReply, StepReport, StepTimes,
    Totals,
};

use super::api::has_trained;
use crate::view::{JobView, NodeView};

const OPEN_METRICS: &str = "application/openmetrics-text";
/// Time for which an ended job is exported, in milliseconds.
const ENDED_JOB_RETENTION_MS: u64 = 3_600_000;
/// Maximum length of label values that users choose.
const MAX_LABEL_CHARS: usize = 128;

/// A format of the response to a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    OpenMetrics,
    /// The older format, which every scraper reads. The names of counters end with `_total` in comments too.
    Prometheus,
}

impl Format {
    /// Returns the format for a scraper that sends this `Accept` header.
    pub(super) fn accepted_by(accept: &str) -> Self {
        if accept.contains(OPEN_METRICS) { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub(super) fn content_type(self) -> String {
        match self {
            Self::OpenMetrics => format!("{OPEN_METRICS}; version=1.0.0; charset=utf-8"),
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8".into(),
        }
    }
}

/// Returns the response to a scrape at `now`, in milliseconds since 1970.
pub(crate) fn text(view: Arc<NodeView>, now: u64, format: Format) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape { view, now, format }));
    let mut out = String::new();
    text::encode_registry(&mut out, &registry)?;
    if format == Format::OpenMetrics {
        text::encode_eof(&mut out)?;
    }
    Ok(out)
}

type Labels = Vec<(&'static str, String)>;
type Sample = (Labels, f64);

#[derive(Debug)]
struct Scrape {
    view: Arc<NodeView>,
    now: u64,
    format: Format,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder, self.format);
        self.node(&mut out)?;
        self.jobs(&mut out)?;
        self.workers(&mut out)
    }
}

/// Writes metric families.
struct Out<'a>(DescriptorEncoder<'a>, Format);

impl Out<'_> {
    fn gauge(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in samples {
            if labels.is_empty() {
                metric.encode_gauge(&value)?
            } else {
                metric.encode_family(&labels)?.encode_gauge(&value)?
            }
        }
        Ok(())
    }

    /// Writes a counter. The encoder appends `_total` to the names of samples.
    fn counter<V: EncodeCounterValue + EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl Iterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        if self.1 == Format::Prometheus {
            let name = format!("{name}_total");
            let mut metric = self.0.encode_descriptor(&name, help, None, MetricType::Counter)?;
            return samples.into_iter().try_for_each(|(labels, value)| {
                // Only counters get a second suffix.
                metric.encode_family(&labels)?.encode_gauge(&value)
            });
        }
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in samples {
            metric.encode_family(&labels)?.encode_counter::<Labels, _, u64>(&value, None)?;
        }
        Ok(())
    }

    /// Writes the histogram of step durations of each job.
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
        out.gauge("xlaunch_drained", "1 if the node is drained and starts no jobs.", [drained])?;
        let gpus = node.gpus.iter().map(|gpu| {
            let labels = vec![
                ("gpu", gpu.index.to_string()),
                ("UUID", gpu.uuid.clone()),
                ("name", gpu.name.clone()),
                ("state", gpu.state().label().into()),
            ];
            (labels, 1.0)
        });
        out.gauge("xlaunch_gpu_info", "1 for each GPU, with its state for the daemon.", gpus)?;
        let held = node.gpus.iter().filter(|gpu| gpu.job != 0);
        let held = held.map(|gpu| (vec![("UUID", gpu.uuid.clone()), ("job", gpu.job.to_string())], 1.0));
        out.gauge("xlaunch_gpu_job", "1 for each GPU that a job holds, with the job.", held)?;
        let results = [ExaminationState::Passed, ExaminationState::Failed, ExaminationState::Unknown];
        let results = results.map(|state| vec![("result", state.label().to_owned())]);
        let help = "GPUs examined by `xlaunch doctor --daemon` since the daemon was started.";
        out.counter("xlaunch_gpus_examined", help, results.into_iter().zip(self.view.examined))
    }

    fn jobs(&self, out: &mut Out<'_>) -> fmt::Result {
        use NodeJobState::{Cancelled, Done, Failed, Lost, Queued, Running, Starting, Stopping};
        let count = |state| self.view.jobs.values().filter(|job| job.job.state() == state).count();
        let states = [Queued, Starting, Running, Stopping, Done, Failed, Cancelled, Lost];
        let states = states.map(|state| (vec![("state", state.label().into())], whole(count(state) as u64)));
        out.gauge("xlaunch_jobs", "Number of jobs by state; ended jobs until they are forgotten.", states)?;
        let waiting = self.view.jobs.values().filter(|job| job.waits_for_gpus).count();
        let help = "Queued jobs that need GPUs, are not held and have no open dependencies.";
        out.gauge("xlaunch_jobs_waiting_for_gpus", help, [(Vec::new(), whole(waiting as u64))])?;
        let help = "1 for each job that is queued, is running, or ended within the last hour.";
        out.gauge("xlaunch_job_info", help, self.recent().map(info))?;
        let age = |job: &JobView| Some((of(job), job.status.as_ref()?.1.elapsed().as_secs_f64()));
        out.gauge(
            "xlaunch_job_status_age_seconds",
            "Time since the last status of the job's agent.",
            self.unfinished().filter_map(age),
        )?;

        let steps = trained(self.recent(), |status| Some(whole(status.step)));
        out.gauge("xlaunch_step", "Last finished training step.", steps)?;
        for (metric, gauge) in gauges().filter(|(_, gauge)| gauge.series != Series::Rank) {
            let jobs = self.recent().filter(|job| gauge.series == Series::Job || !job.has_ended());
            let value = |status: &StatusReply| Some(metric.of_step(&last_step(status))?.f64());
            out.gauge(gauge.name, gauge.help, trained(jobs, value))?;
        }
        let totals = |job: &JobView| Some((of(job), job.status.as_ref()?.0.totals.clone()?));
        let totals: Vec<_> = self.recent().filter_map(totals).collect();
        let help = "Duration of training steps with pauses between them; steps repeated after a restart count again.";
        out.histogram("xlaunch_step_duration_seconds", help, &totals)?;
        let tokens = totals.iter().map(|(labels, totals)| (labels.clone(), totals.tokens));
        out.counter("xlaunch_tokens", "Tokens trained on, over all ranks.", tokens)?;
        let bytes = totals.iter().map(|(labels, totals)| (labels.clone(), totals.all_reduce_bytes));
        out.counter("xlaunch_allreduce_bytes", "Bytes of gradients all-reduced, per rank.", bytes)?;
        let restarts = |job: &JobView| Some((of(job), u64::from(job.status.as_ref()?.0.restarts)));
        let restarts = self.recent().filter_map(restarts);
        out.counter("xlaunch_worker_restarts", "Restarts of the job's worker group.", restarts)?;
        self.accounting(out)
    }

    /// Writes how each job's time was spent, and its failures.
    fn accounting(&self, out: &mut Out<'_>) -> fmt::Result {
        let account = |job: &JobView| Some((of(job), job.status.as_ref()?.0.accounting.clone()?));
        let accounts: Vec<(Labels, Accounting)> = self.recent().filter_map(account).collect();
        let labelled =
            |labels: &Labels, name, value: &str| [&labels[..], &[(name, value.to_owned())]].concat();
        let time = accounts.iter().flat_map(|(labels, account)| {
            let kinds = account.kinds().into_iter();
            kinds.map(|(kind, seconds)| (labelled(labels, "kind", kind), seconds))
        });
        out.counter("xlaunch_time_seconds", "Wall time of the job, by use.", time)?;
        let restarts = accounts.iter().flat_map(|(labels, account)| {
            let counts = account.restarts.iter();
            counts.map(|count| (labelled(labels, "cause", &count.cause), count.restarts))
        });
        out.counter("xlaunch_restarts", "Restarts of the job's worker group, by cause.", restarts)?;
        let mut count = |name, help, value: fn(&Accounting) -> u64| {
            out.counter(name, help, accounts.iter().map(|(labels, account)| (labels.clone(), value(account))))
        };
        count("xlaunch_hangs", "Number of hangs of ranks.", |account| account.hangs)?;
        let help = "Attempts that ended because the parameters of ranks differed.";
        count("xlaunch_replica_mismatches", help, |account| account.replica_mismatches)?;
        let help = "Checkpoints that were due while the previous one was still being written.";
        count("xlaunch_skipped_checkpoints", help, |account| account.skipped_saves)?;
        count("xlaunch_failed_checkpoints", "Checkpoints that could not be saved.", |account| {
            account.failed_saves
        })
    }

    fn workers(&self, out: &mut Out<'_>) -> fmt::Result {
        let exited = |rank: &RankStatus| matches!(rank.state(), RankState::Exited | RankState::Unspecified);
        let up = self.ranks(|rank| Some(flag(!exited(rank))));
        out.gauge("xlaunch_worker_up", "1 if the worker runs.", up)?;
        let cpu = self.ranks(|rank| rank.cpu_percent);
        let help = "CPU use of the worker and its children; 100 is one core.";
        out.gauge("xlaunch_worker_cpu_percent", help, cpu)?;
        let memory = self.ranks(|rank| rank.memory_bytes.map(whole));
        let help = "Resident memory of the worker and its children.";
        out.gauge("xlaunch_worker_memory_bytes", help, memory)?;
        let since = self.ranks(|rank| rank.seconds_since_output);
        let help = "Time since the worker last wrote a line of output.";
        out.gauge("xlaunch_worker_seconds_since_output", help, since)?;
        let help =
            "1 if the worker needs attention, for example after a long time without output and CPU use.";
        out.gauge("xlaunch_worker_hint", help, self.ranks(|rank| Some(flag(!rank.hint.is_empty()))))?;

        for (metric, gauge) in gauges().filter(|(_, gauge)| gauge.series == Series::Rank) {
            let value = |rank: &RankStatus| Some(metric.of_step(&last_step_of_rank(rank)?)?.f64());
            out.gauge(gauge.name, gauge.help, self.ranks(value))?;
        }
        Ok(())
    }

    /// Returns unfinished jobs and jobs that ended recently.
    fn recent(&self) -> impl Iterator<Item = &JobView> {
        let recent = |job: &&JobView| self.now.saturating_sub(job.job.ended_unix_ms) < ENDED_JOB_RETENTION_MS;
        self.view.jobs.values().map(AsRef::as_ref).filter(move |job| !job.has_ended() || recent(job))
    }

    fn unfinished(&self) -> impl Iterator<Item = &JobView> {
        self.view.jobs.values().map(AsRef::as_ref).filter(|job| !job.has_ended())
    }

    /// Returns one sample per worker.
    fn ranks(&self, value: impl Fn(&RankStatus) -> Option<f64>) -> Vec<Sample> {
        let mut samples = Vec::new();
        for job in self.unfinished() {
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

/// Returns one sample per job that has completed a training step.
fn trained<'a>(
    jobs: impl Iterator<Item = &'a JobView>,
    value: impl Fn(&StatusReply) -> Option<f64>,
) -> impl Iterator<Item = Sample> {
    jobs.filter_map(move |job| {
        let (status, _) = job.status.as_ref().filter(|(status, _)| has_trained(status))?;
        Some((of(job), value(status)?))
    })
}

/// Returns the metrics of training steps that have a gauge.
fn gauges() -> impl Iterator<Item = (&'static Metric, Gauge)> {
    METRICS.iter().filter_map(|metric| Some((metric, metric.gauge?)))
}

/// Returns the last step of rank 0. Agents up to version 0.2 send only these values of it.
fn last_step(status: &StatusReply) -> StepReport {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a speed, rounded")]
    let tokens = status.tokens_per_second as u64;
    status.last_step.unwrap_or_else(|| StepReport {
        loss: status.loss,
        tokens,
        step_seconds: 1.0,
        mfu: status.mfu,
        ..StepReport::default()
    })
}

/// Returns the last step of a rank, if it belongs to the built-in trainer. Agents up to version 0.2 send only these
/// values of it.
fn last_step_of_rank(rank: &RankStatus) -> Option<StepReport> {
    let older = || StepReport {
        pool_live_bytes: rank.pool_live_bytes,
        pool_mapped_bytes: rank.pool_mapped_bytes,
        pool_peak_bytes: rank.pool_peak_bytes,
        ..StepReport::default()
    };
    rank.last_step.or_else(|| (rank.pool_peak_bytes > 0).then(older))
}

fn info(view: &JobView) -> Sample {
    let job = &view.job;
    let user = if job.user.is_empty() { job.uid.to_string() } else { short(&job.user) };
    let labels = vec![
        ("job", job.id.to_string()),
        ("name", short(&job.name)),
        ("user", user),
        ("kind", job.kind().label().into()),
        ("state", job.state().label().into()),
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

/// Truncates a label value, because every series repeats it in every scrape.
fn short(text: &str) -> String {
    text.chars().take(MAX_LABEL_CHARS).collect()
}
