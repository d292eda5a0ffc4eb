//! `xlaunch node`: the node and its GPUs, as a table for people and as JSON for programs.

use clap::Args;
use xlaunch_proto::v1::{Gpu, NodeStatus, NodeStatusRequest};

use super::connect::{At, Daemon};
use super::show::columns;
use crate::cli::console::{End, escape, fit, now, put, width};
use crate::cli::query::show::{bytes, percent, seconds, shown};
use xlaunch_agent::sinks::progress::clock;
use xlaunch_proto::json;
use xlaunch_proto::labels::gpu_state;

/// Options of `xlaunch node`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Node {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

pub(super) async fn show(options: Node) -> Result<(), End> {
    let mut daemon = Daemon::connect(&options.at).await?;
    let reply = daemon.client.status(NodeStatusRequest {}).await;
    let node = reply.map_err(|status| daemon.refusal(&status))?.into_inner();
    let text = match options.json {
        true => format!("{:#}\n", json::node(&node)),
        false => table(&node, now(), width()),
    };
    put(text.as_bytes())
}

/// The node and its GPUs; lines are cut at `width` characters.
fn table(node: &NodeStatus, now: u64, width: usize) -> String {
    let mut out = format!("{}\n{}\n", heading(node, now), counts(node));
    if !node.drained.is_empty() {
        out += &format!("drained: {}\n", escape(&node.drained));
    }
    if !node.gpu_problem.is_empty() {
        out += &format!("GPUs are not known: {}\n", escape(&node.gpu_problem));
    }
    if !node.gpus.is_empty() {
        let head = ["GPU", "NAME", "STATE", "JOB", "BUSY", "MEMORY", "POWER", "TEMP", "UUID"];
        let rows: Vec<_> = node.gpus.iter().map(gpu_row).collect();
        out += &format!("\n{}", columns(&head, &rows));
    }
    fit(&out, width)
}

/// Host, version, how long it is up.
pub(super) fn heading(node: &NodeStatus, now: u64) -> String {
    let up = clock(seconds(now.saturating_sub(node.started_unix_seconds)));
    format!(
        "{}  xlaunch {}  pid {}  up {up}  {} cores",
        escape(&node.host),
        escape(&node.version),
        node.daemon_pid,
        node.cores
    )
}

/// Jobs by state.
pub(super) fn counts(node: &NodeStatus) -> String {
    format!("jobs: {} running, {} queued, {} ended", node.jobs_running, node.jobs_queued, node.jobs_ended)
}

fn gpu_row(gpu: &Gpu) -> Vec<String> {
    let reason = if gpu.reason.is_empty() { String::new() } else { format!("  {}", gpu.reason) };
    vec![
        gpu.index.to_string(),
        gpu.name.clone(),
        gpu_state(gpu.state()).into(),
        if gpu.job == 0 { "-".into() } else { gpu.job.to_string() },
        shown(gpu.busy_percent, percent),
        memory(gpu),
        shown(gpu.power_watts, |watts| format!("{watts:.0}W")),
        shown(gpu.temperature_celsius, |degrees| format!("{degrees:.0}C")),
        format!("{}{reason}", gpu.uuid),
    ]
}

/// Such as `12.1G/141G`.
pub(super) fn memory(gpu: &Gpu) -> String {
    match (gpu.memory_used_bytes, gpu.memory_bytes) {
        (None, None) => "-".into(),
        (used, all) => format!("{}/{}", shown(used, bytes), shown(all, bytes)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use xlaunch_proto::v1::GpuState;

    use super::*;

    #[test]
    fn a_nodes_table_is_this() {
        let held = Gpu {
            uuid: "GPU-a".into(),
            name: "NVIDIA H200".into(),
            state: GpuState::Held.into(),
            job: 7,
            busy_percent: Some(98.4),
            memory_used_bytes: Some(12_100_000_000),
            memory_bytes: Some(141_000_000_000),
            power_watts: Some(650.2),
            temperature_celsius: Some(61.0),
            ..Default::default()
        };
        let sick = Gpu { index: 1, uuid: "GPU-b".into(), name: "NVIDIA H200".into(), ..Default::default() };
        let sick = Gpu { state: GpuState::Sick.into(), reason: "Xid 79".into(), ..sick };
        let status = NodeStatus {
            host: "node-17".into(),
            version: "0.1.0".into(),
            daemon_pid: 812,
            started_unix_seconds: 1000,
            drained: "new driver".into(),
            gpus: vec![held, sick],
            cores: 64,
            jobs_queued: 1,
            jobs_running: 2,
            jobs_ended: 40,
            ..Default::default()
        };
        let expected = "\
node-17  xlaunch 0.1.0  pid 812  up 3m05s  64 cores
jobs: 2 running, 1 queued, 40 ended
drained: new driver

GPU  NAME         STATE  JOB  BUSY  MEMORY      POWER  TEMP  UUID
0    NVIDIA H200  held   7    98%   12.1G/141G  650W   61C   GPU-a
1    NVIDIA H200  sick   -    -     -           -      -     GPU-b  Xid 79
";
        assert_eq!(table(&status, 1185, 100), expected);
        assert_eq!(json::node(&status)["gpus"][1]["job"], Value::Null);
    }
}
