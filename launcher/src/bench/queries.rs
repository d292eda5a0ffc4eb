//! `xlaunch bench status`: how many questions the daemon's service answers, and what that costs.
//!
//! The service runs on a thread of its own, on one core at most, with a node of 8 GPUs and a hundred jobs that nothing
//! happens to. Its callers share the other cores of this machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::transport::Channel;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::{GetRequest, Gpu, Job, NodeJobState, NodeStatus, NodeStatusRequest, StatusReply};

use super::percentile;
use xlaunch_agent::Refusal;
use xlaunch_daemon::commands::NodeHandle;
use xlaunch_daemon::service::access::Access;
use xlaunch_daemon::service::{listener, serve};
use xlaunch_daemon::view::{JobView, NodeView};

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Jobs of the node.
const JOBS: u64 = 100;
/// GPUs of the node, and ranks of each job.
const GPUS: u32 = 8;

/// How hard to ask.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Connections at a time, at most 64.
    pub(crate) connections: usize,
    /// Questions at a time on each, at most 32.
    pub(crate) pipelined: usize,
    /// How long.
    pub(crate) time: Duration,
}

/// What was found.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Found {
    /// Questions that were answered: one about the node for each about a job.
    pub(crate) queries: usize,
    /// Of them, in a second.
    pub(crate) queries_per_second: f64,
    /// Milliseconds to an answer: the one in the middle.
    pub(crate) median_ms: f64,
    /// Milliseconds: all but one in a hundred are no longer.
    pub p99_ms: f64,
    /// Use of the service's core, 100 for all of it.
    pub(crate) service_cpu_percent: f64,
}

/// Asks for a while.
///
/// # Errors
/// Where the service cannot be started or does not answer.
pub(crate) fn run(load: Load) -> Result<Found, Refusal> {
    let failed = |error: std::io::Error| {
        Refusal::new(ExitCode::Internal, format!("failed to ask the daemon's service: {error}"))
    };
    measure(load).map_err(failed)
}

fn measure(load: Load) -> std::io::Result<Found> {
    let dir = super::scratch()?;
    let socket = dir.path().join("node.sock");
    let (listening, listens) = std::sync::mpsc::channel();
    let (end, ended) = oneshot::channel::<()>();
    let at = socket.clone();
    let service = std::thread::Builder::new().name("service".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let (_shown, view) = watch::channel(Arc::new(node()));
            let (commands, _receiver) = mpsc::channel(1);
            let listener = listener::bind(&at, None)?;
            // Whoever waits for this has gone where that fails.
            let _ = listening.send(());
            let before = thread_time();
            let ended = async { ended.await.unwrap_or_default() };
            serve(listener, NodeHandle::new(commands, view), Access::new(""), ended).await?;
            std::io::Result::Ok(thread_time().saturating_sub(before))
        })
    })?;
    // Where the service has failed, its error is below.
    let _ = listens.recv();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let start = Instant::now();
    let times = runtime.block_on(ask(&socket, load));
    let seconds = start.elapsed().as_secs_f64();
    drop(end);
    let used = service.join().map_err(|_| std::io::Error::other("the service has panicked"))??;
    let mut times = times?;
    times.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let queries_per_second = times.len() as f64 / seconds;
    Ok(Found {
        queries: times.len(),
        queries_per_second,
        median_ms: percentile(&times, 0.5),
        p99_ms: percentile(&times, 0.99),
        service_cpu_percent: used.as_secs_f64() / seconds * 100.0,
    })
}

/// The figures, a line each.
pub(crate) fn table(found: &Found) -> String {
    format!(
        "queries per second       {:.0}\ntime to an answer        {:.2} ms median, {:.2} ms 99th percentile\n\
         CPU of the service       {:.0} %\n",
        found.queries_per_second, found.median_ms, found.p99_ms, found.service_cpu_percent
    )
}

/// The time of each answer, in milliseconds.
async fn ask(socket: &std::path::Path, load: Load) -> std::io::Result<Vec<f64>> {
    let deadline = Instant::now() + load.time;
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..load.connections {
        let client = NodeClient::new(crate::client::connect(socket, PATIENCE).await?);
        (0..load.pipelined).for_each(|_| drop(callers.spawn(caller(client.clone(), deadline))));
    }
    let mut times = Vec::new();
    while let Some(answered) = callers.join_next().await {
        times.extend(answered.map_err(std::io::Error::other)?.map_err(std::io::Error::other)?);
    }
    Ok(times)
}

async fn caller(mut client: NodeClient<Channel>, deadline: Instant) -> Result<Vec<f64>, tonic::Status> {
    let mut times = Vec::new();
    let mut job = 0;
    loop {
        let asked = Instant::now();
        client.status(NodeStatusRequest {}).await?;
        times.push(asked.elapsed().as_secs_f64() * 1e3);
        let asked = Instant::now();
        job = job % JOBS + 1;
        client.get(GetRequest { job }).await?;
        times.push(asked.elapsed().as_secs_f64() * 1e3);
        if Instant::now() >= deadline {
            return Ok(times);
        }
    }
}

/// A node that is busy.
fn node() -> NodeView {
    let uid = rustix::process::getuid().as_raw();
    let gpu = |index| Gpu {
        index,
        uuid: format!("GPU-{index:032}"),
        job: u64::from(index) + 1,
        ..Default::default()
    };
    let status = Arc::new(StatusReply {
        ranks: vec![Default::default(); GPUS as usize],
        log_dir: "/home/someone/runs/job/2026-01-01/logs".into(),
        ..Default::default()
    });
    let job = |id| {
        let job = Job {
            id,
            uid,
            name: format!("job {id}"),
            state: NodeJobState::Running.into(),
            command_line: "xlaunch --nproc-per-node 8 train.py --lr 3e-4".into(),
            ..Default::default()
        };
        let status = Some((status.clone(), Instant::now()));
        (id, Arc::new(JobView { job, status, ..Default::default() }))
    };
    NodeView {
        node: NodeStatus { gpus: (0..GPUS).map(gpu).collect(), ..Default::default() },
        jobs: (1..=JOBS).map(job).collect(),
    }
}

/// Time that this thread has run.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_asked_and_counted() {
        let load = Load { connections: 2, pipelined: 3, time: Duration::from_millis(1) };
        let found = run(load).unwrap();
        // Each caller asks twice at least.
        assert!(found.queries >= 12, "{found:?}");
        assert!(table(&found).contains("CPU"));
        assert!(found.median_ms > 0.0 && found.p99_ms >= found.median_ms, "{found:?}");
    }
}
