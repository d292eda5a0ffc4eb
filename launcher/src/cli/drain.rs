//! `xlaunch drain`.

use clap::Args;
use xlaunch_proto::v1::{DrainRequest, Gpu, GpuState, NodeStatus};
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::text::{self, escape};
use xlaunch_spec::refusal::Refusal;

/// Options of `xlaunch drain`.
#[derive(Debug, Args)]
pub(super) struct Drain {
    /// Drain only this GPU: its UUID, a prefix of it, or its index in nvidia-smi; may be repeated
    #[arg(long = "gpu", value_name = "UUID|INDEX")]
    gpus: Vec<String>,
    /// Reason to show to users whose jobs are waiting
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, conflicts_with = "undo")]
    reason: String,
    /// Accept jobs again. Without --gpu, GPUs that were drained individually stay drained
    #[arg(long)]
    undo: bool,
    /// Print the node as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: Drain) -> Result<ExitCode, QueryError> {
    let mut daemon = DaemonClient::connect(&options.daemon).await?;
    let gpus = uuids(&mut daemon, &options.gpus).await?;
    let request = DrainRequest { gpus: gpus.clone(), undo: options.undo, reason: options.reason };
    let node = daemon.drain(request).await?;
    let answer = if options.json { text::json(&node) } else { drained(&node, &gpus, options.undo) };
    print(answer.as_bytes())?;
    Ok(ExitCode::Done)
}

/// Returns the UUIDs of GPUs that are named by index, UUID or UUID prefix.
pub(super) async fn uuids(daemon: &mut DaemonClient, named: &[String]) -> Result<Vec<String>, Refusal> {
    if named.is_empty() {
        return Ok(Vec::new());
    }
    let known = daemon.node().await?.gpus;
    named.iter().map(|name| uuid(&known, name)).collect()
}

/// The UUID of the GPU with this index, UUID or UUID prefix.
fn uuid(gpus: &[Gpu], named: &str) -> Result<String, Refusal> {
    let index: Option<u32> = named.parse().ok();
    let is_meant = |gpu: &&Gpu| match index {
        Some(index) => gpu.index == index,
        None => !named.is_empty() && gpu.uuid.starts_with(named),
    };
    let meant: Vec<_> = gpus.iter().filter(is_meant).collect();
    match meant[..] {
        [gpu] => Ok(gpu.uuid.clone()),
        [] => Err(Refusal::new(ExitCode::Usage, format!("no GPU `{named}`; `xlaunch node` lists all GPUs"))),
        _ => Err(Refusal::new(ExitCode::Usage, format!("several GPUs start with `{named}`"))),
    }
}

fn drained(node: &NodeStatus, gpus: &[String], undo: bool) -> String {
    let host = escape(&node.host);
    let jobs = match (undo, node.jobs_running) {
        (true, _) | (false, 0) => String::new(),
        (false, 1) => "; 1 running job continues".into(),
        (false, jobs) => format!("; {jobs} running jobs continue"),
    };
    let what = match gpus {
        [] => host,
        gpus => format!("{} of {host}", gpus.join(", ")),
    };
    let state = if undo { "accepts jobs again" } else { "drained" };
    let mut out = format!("{what}: {state}{jobs}\n");
    if undo && gpus.is_empty() {
        let is_drained = |gpu: &&Gpu| gpu.state() == GpuState::Drained;
        for gpu in node.gpus.iter().filter(is_drained) {
            let (index, reason) = (gpu.index, escape(&gpu.reason));
            out += &format!("GPU {index} stays drained ({reason}): `xlaunch drain --undo --gpu {index}`\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_index_and_by_uuid_prefix() {
        let gpu = |index, uuid: &str| Gpu { index, uuid: uuid.into(), ..Default::default() };
        let gpus = [gpu(0, "GPU-1a"), gpu(1, "GPU-1b"), gpu(10, "GPU-2")];
        for (named, found) in [("1", "GPU-1b"), ("10", "GPU-2"), ("GPU-2", "GPU-2"), ("GPU-1a", "GPU-1a")] {
            assert_eq!(uuid(&gpus, named).unwrap(), found);
        }
        for (named, problem) in
            [("2", "no GPU `2`"), ("GPU-1", "several GPUs"), ("", "no GPU"), ("x", "no GPU `x`")]
        {
            let refusal = uuid(&gpus, named).unwrap_err();
            assert!(refusal.message.contains(problem), "{}", refusal.message);
        }
    }

    #[test]
    fn drain_names_the_node_or_the_gpus() {
        let node = NodeStatus { host: "node-17".into(), jobs_running: 2, ..Default::default() };
        assert_eq!(drained(&node, &[], false), "node-17: drained; 2 running jobs continue\n");
        assert_eq!(drained(&node, &["GPU-a".into()], true), "GPU-a of node-17: accepts jobs again\n");
        let gpu =
            Gpu { index: 3, reason: "fan".into(), state: GpuState::Drained.into(), ..Default::default() };
        let node = NodeStatus { gpus: vec![Gpu::default(), gpu], ..node };
        let stays = "GPU 3 stays drained (fan): `xlaunch drain --undo --gpu 3`\n";
        assert_eq!(drained(&node, &[], true), format!("node-17: accepts jobs again\n{stays}"));
    }
}
