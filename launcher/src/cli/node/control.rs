//! `xlaunch cancel`, `drain`, and `stop` of a job.

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{CancelRequest, DrainRequest, Gpu, Job, NodeJobState, NodeStatus, NodeStatusRequest};

use super::connect::{At, Daemon};
use super::show;
use crate::cli::console::{End, escape, put, say};
use xlaunch_agent::Refusal;
use xlaunch_proto::json;
use xlaunch_proto::labels::node_job_state;

/// Options of `xlaunch cancel`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Cancel {
    /// Numbers, as `xlaunch jobs` shows them.
    #[arg(value_name = "JOB", required = true)]
    jobs: Vec<u64>,
    /// Print the jobs as JSON, a list.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

/// Options of `xlaunch drain`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Drain {
    /// This GPU alone, by UUID or the beginning of one, or as nvidia-smi counts; may be repeated. Default: the whole node.
    #[arg(long = "gpu", value_name = "UUID|INDEX")]
    gpus: Vec<String>,
    /// For whoever asks why nothing starts.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    /// Start jobs again.
    #[arg(long)]
    undo: bool,
    /// Print the node as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

/// What has become of several jobs.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Those that will end, or have.
    pub(super) jobs: Vec<Job>,
    pub(super) problems: String,
}

impl Told {
    /// The jobs, a line each.
    pub(super) fn answer(&self) -> String {
        self.jobs.iter().map(cancelled).collect()
    }
}

pub(super) async fn cancel(options: Cancel) -> Result<ExitCode, End> {
    let mut daemon = Daemon::connect(&options.at).await?;
    let (told, exit) = cancel_all(&mut daemon, &options.jobs).await;
    if !told.problems.is_empty() {
        say(&told.problems);
    }
    let answer = match options.json {
        true => format!("{:#}\n", told.jobs.iter().map(show::json).collect::<serde_json::Value>()),
        false => told.answer(),
    };
    put(answer.as_bytes())?;
    Ok(exit)
}

/// Ends the jobs, all that can be; the exit code is that of the first that cannot.
pub(super) async fn cancel_all(daemon: &mut Daemon, jobs: &[u64]) -> (Told, ExitCode) {
    let (mut told, mut exit) = (Told::default(), ExitCode::Done);
    for &job in jobs {
        match daemon.client.cancel(CancelRequest { job }).await {
            Ok(reply) => told.jobs.push(reply.into_inner()),
            Err(status) => {
                let refusal = daemon.refusal(&status);
                told.problems += &format!("error: {}\n", refusal.message);
                if exit == ExitCode::Done {
                    exit = refusal.exit;
                }
            }
        }
    }
    (told, exit)
}

/// Ends a job as `xlaunch stop` ends a launch.
pub(in crate::cli) async fn stop(mut daemon: Daemon, job: u64) -> Result<(), End> {
    let reply = daemon.client.cancel(CancelRequest { job }).await;
    let job = reply.map_err(|status| daemon.refusal(&status))?.into_inner();
    put(cancelled(&job).as_bytes())
}

#[cfg(test)]
impl Drain {
    /// The whole node.
    pub(super) fn all(at: At) -> Self {
        Self { gpus: Vec::new(), reason: String::new(), undo: false, json: false, at }
    }
}

/// What has become of it.
pub(super) fn cancelled(job: &Job) -> String {
    let id = job.id;
    match job.state() {
        NodeJobState::Cancelled => format!("job {id} is cancelled\n"),
        NodeJobState::Done | NodeJobState::Failed | NodeJobState::Lost => {
            format!("job {id} has ended already: {}\n", node_job_state(job.state()))
        }
        _ => format!("job {id} is asked to stop\n"),
    }
}

pub(super) async fn drain(options: Drain) -> Result<(), End> {
    let mut daemon = Daemon::connect(&options.at).await?;
    let gpus = match &options.gpus[..] {
        [] => Vec::new(),
        named => {
            let reply = daemon.client.status(NodeStatusRequest {}).await;
            let known = reply.map_err(|status| daemon.refusal(&status))?.into_inner().gpus;
            named.iter().map(|named| uuid(&known, named)).collect::<Result<_, _>>()?
        }
    };
    let request = DrainRequest { gpus: gpus.clone(), undo: options.undo, reason: options.reason };
    let reply = daemon.client.drain(request).await;
    let node = reply.map_err(|status| daemon.refusal(&status))?.into_inner();
    let answer = match options.json {
        true => format!("{:#}\n", json::node(&node)),
        false => drained(&node, &gpus, options.undo),
    };
    put(answer.as_bytes())
}

/// The UUID of the GPU of this index, UUID, or beginning of a UUID.
fn uuid(gpus: &[Gpu], named: &str) -> Result<String, Refusal> {
    let index: Option<u32> = named.parse().ok();
    let is_meant = |gpu: &&Gpu| match index {
        Some(index) => gpu.index == index,
        None => !named.is_empty() && gpu.uuid.starts_with(named),
    };
    let meant: Vec<_> = gpus.iter().filter(is_meant).collect();
    match meant[..] {
        [gpu] => Ok(gpu.uuid.clone()),
        [] => {
            Err(Refusal::new(ExitCode::Usage, format!("there is no GPU {named}; `xlaunch node` lists all")))
        }
        _ => Err(Refusal::new(ExitCode::Usage, format!("more than one GPU begins with {named}"))),
    }
}

fn drained(node: &NodeStatus, gpus: &[String], undo: bool) -> String {
    let host = escape(&node.host);
    let jobs = match (undo, node.jobs_running) {
        (true, _) | (false, 0) => String::new(),
        (false, 1) => "; 1 job that runs goes on".into(),
        (false, jobs) => format!("; {jobs} jobs that run go on"),
    };
    let what = match gpus {
        [] => host,
        gpus => format!("{} of {host}", gpus.join(", ")),
    };
    let verb = if undo { "is in service" } else { "takes no more jobs" };
    format!("{what}: {verb}{jobs}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_index_and_by_the_beginning_of_their_uuid() {
        let gpu = |index, uuid: &str| Gpu { index, uuid: uuid.into(), ..Default::default() };
        let gpus = [gpu(0, "GPU-1a"), gpu(1, "GPU-1b"), gpu(10, "GPU-2")];
        for (named, found) in [("1", "GPU-1b"), ("10", "GPU-2"), ("GPU-2", "GPU-2"), ("GPU-1a", "GPU-1a")] {
            assert_eq!(uuid(&gpus, named).unwrap(), found);
        }
        for (named, problem) in
            [("2", "no GPU 2"), ("GPU-1", "more than one"), ("", "no GPU"), ("x", "no GPU x")]
        {
            let refusal = uuid(&gpus, named).unwrap_err();
            assert!(refusal.message.contains(problem), "{}", refusal.message);
        }
    }

    #[test]
    fn what_is_out_of_service_is_said() {
        let node = NodeStatus { host: "node-17".into(), jobs_running: 2, ..Default::default() };
        assert_eq!(drained(&node, &[], false), "node-17: takes no more jobs; 2 jobs that run go on\n");
        assert_eq!(drained(&node, &["GPU-a".into()], true), "GPU-a of node-17: is in service\n");
    }
}
