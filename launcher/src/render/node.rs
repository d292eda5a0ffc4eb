//! The node and its GPUs.

use xlaunch_proto::v1::{Gpu, NodeStatus};

use super::text::{bytes, columns, escape, fit, or_dash, percent, seconds};
use xlaunch_spec::quantities::rough_time_text;

/// Returns the node and its GPUs. Lines are truncated to `width` characters.
pub(crate) fn table(node: &NodeStatus, now: u64, width: usize) -> String {
    let mut out = format!("{}\n{}\n", heading(node, now), counts(node));
    if !node.drained.is_empty() {
        out += &format!("drained: {}\n", escape(&node.drained));
    }
    if !node.page_problem.is_empty() {
        out += &format!("page: {}\n", escape(&node.page_problem));
    }
    for problem in &node.config_problems {
        // The lines of the file with the error are indented, so that none can be mistaken for a line of the table.
        let lines: Vec<_> = problem.trim_end().lines().map(escape).collect();
        out += &format!("daemon.toml: {}\n", lines.join("\n  "));
    }
    if !node.gpu_problem.is_empty() {
        out += &format!("GPUs unknown: {}\n", escape(&node.gpu_problem));
    }
    if !node.gpus.is_empty() {
        let head = ["GPU", "NAME", "STATE", "JOB", "BUSY", "MEMORY", "POWER", "TEMP", "UUID"];
        let rows: Vec<_> = node.gpus.iter().map(gpu_row).collect();
        out += &format!("\n{}", columns(&head, &rows));
    }
    fit(&out, width)
}

pub(crate) fn heading(node: &NodeStatus, now: u64) -> String {
    let up = rough_time_text(seconds(now.saturating_sub(node.started_unix_seconds)));
    // `top` also works without a daemon.
    let daemon = match node.daemon_pid {
        0 => String::new(),
        pid => format!("pid {pid}  up {up}  "),
    };
    format!("{}  xlaunch {}  {daemon}{} cores", escape(&node.host), escape(&node.version), node.cores)
}

pub(crate) fn counts(node: &NodeStatus) -> String {
    format!("jobs: {} running, {} queued, {} ended", node.jobs_running, node.jobs_queued, node.jobs_ended)
}

fn gpu_row(gpu: &Gpu) -> Vec<String> {
    let reason = if gpu.reason.is_empty() { String::new() } else { format!("  {}", gpu.reason) };
    vec![
        gpu.index.to_string(),
        gpu.name.clone(),
        gpu.state().label().into(),
        if gpu.job == 0 { "-".into() } else { gpu.job.to_string() },
        or_dash(gpu.busy_percent, percent),
        memory(gpu),
        or_dash(gpu.power_watts, |watts| format!("{watts:.0}W")),
        or_dash(gpu.temperature_celsius, |degrees| format!("{degrees:.0}C")),
        format!("{}{reason}", gpu.uuid),
    ]
}

/// Returns used and total memory, such as `12.1G/141G`.
pub(crate) fn memory(gpu: &Gpu) -> String {
    match (gpu.memory_used_bytes, gpu.memory_bytes) {
        (None, None) => "-".into(),
        (used, all) => format!("{}/{}", or_dash(used, bytes), or_dash(all, bytes)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use xlaunch_proto::v1::GpuState;

    use super::*;

    #[test]
    fn node_table() {
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
        insta::assert_snapshot!("node", table(&status, 1185, 100));
        assert_eq!(json!(status)["gpus"][1]["job"], Value::Null);
    }

    #[test]
    fn problems_of_the_node_have_a_line_each() {
        let status = NodeStatus {
            host: "node-17\u{1b}[2J".into(),
            version: "0.1.0".into(),
            drained: "new driver\njobs: 0 running".into(),
            page_problem: "127.0.0.1:8080: address in use".into(),
            config_problems: vec![
                "line 3: unknown key `lissen`\n3 | lissen = 1\u{1b}[2J\n  | ^^^^^^\n".into(),
            ],
            gpu_problem: "NVML did not answer".into(),
            cores: 64,
            ..Default::default()
        };
        insta::assert_snapshot!("problems", table(&status, 1185, 100));
    }
}
