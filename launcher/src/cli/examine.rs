//! `xlaunch doctor --daemon`: makes the node's daemon examine idle GPUs and drain those that fail.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use xlaunch_proto::v1::{ExaminationState, ExamineReply, ExamineRequest, ExaminedGpu, Finding, FindingLevel};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::parse_time;

use super::drain::uuids;
use super::output::{QueryError, print, print_note};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::text::{self, escape};

/// Options of `xlaunch doctor --daemon`.
#[derive(Debug, Args)]
pub(super) struct Examine {
    /// Examine only this GPU: its UUID, a prefix of it, or its index in nvidia-smi; may be repeated
    #[arg(long = "gpu", value_name = "UUID|INDEX", requires = "daemon")]
    gpus: Vec<String>,
    /// Drain GPUs that have no result after this time, such as 90s or 30m [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "daemon")]
    timeout: Option<Duration>,
    #[command(flatten)]
    address: DaemonAddress,
}

pub(super) async fn run(options: Examine, as_json: bool) -> Result<ExitCode, QueryError> {
    let mut daemon = DaemonClient::connect(&options.address).await?;
    let gpus = uuids(&mut daemon, &options.gpus).await?;
    let request = ExamineRequest { gpus, timeout_seconds: options.timeout.map(|timeout| timeout.as_secs()) };
    let reply = daemon.examine(request, |started| print_note(&start_line(started))).await?;
    let healthy = is_healthy(&reply);
    let text = if as_json { json(&reply, healthy) } else { table(&reply) };
    print(text.as_bytes())?;
    Ok(if healthy { ExitCode::Done } else { ExitCode::Gpu })
}

fn start_line(started: &ExamineReply) -> String {
    let examined = started.gpus.iter().filter(|gpu| gpu.state() == ExaminationState::Examined);
    let indices: Vec<String> = examined.map(|gpu| gpu.index.to_string()).collect();
    format!("examining GPU {}; jobs wait for it meanwhile", indices.join(", "))
}

/// Returns whether every examined GPU has passed, and no check of the node has failed.
fn is_healthy(reply: &ExamineReply) -> bool {
    use ExaminationState::{Passed, Skipped};
    let is_fine = |gpu: &ExaminedGpu| matches!(gpu.state(), Passed | Skipped);
    let is_failure = |finding: &Finding| finding.level() == FindingLevel::Failure;
    reply.gpus.iter().all(is_fine) && !reply.findings.iter().any(is_failure)
}

fn json(reply: &ExamineReply, healthy: bool) -> String {
    text::json(&json!({ "healthy": healthy, "gpus": reply.gpus, "findings": reply.findings }))
}

/// Formats the findings as `xlaunch doctor` does, then the result of each GPU.
fn table(reply: &ExamineReply) -> String {
    let mut out = String::new();
    for finding in &reply.findings {
        let who = finding.gpu_index.map(|index| format!("GPU {index} ({}): ", finding.gpu_uuid));
        let text = format!("{}{}", who.unwrap_or_default(), finding.message);
        out += &format!("{:<9}{}\n", finding.level().label(), escape(&text));
        if !finding.help.is_empty() {
            out += &format!("{:<9}help: {}\n", "", escape(&finding.help));
        }
    }
    for gpu in &reply.gpus {
        let drained = if gpu.state() == ExaminationState::Failed { "drained, " } else { "" };
        let why = match gpu.reason.as_str() {
            "" => String::new(),
            reason => format!(": {drained}{reason}"),
        };
        let text = format!("GPU {} ({}){why}", gpu.index, gpu.uuid);
        out += &format!("{:<9}{}\n", gpu.state().label(), escape(&text));
    }
    if reply.gpus.is_empty() {
        out += "there is no GPU\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, state: ExaminationState, reason: &str) -> ExaminedGpu {
        ExaminedGpu { index, uuid: format!("GPU-{index}"), state: state.into(), reason: reason.into() }
    }

    #[test]
    fn table_has_findings_and_the_result_of_each_gpu() {
        use ExaminationState::{Failed, Passed, Skipped, Unknown};
        let finding = Finding {
            level: FindingLevel::Failure.into(),
            check: "results".into(),
            gpu_index: Some(1),
            gpu_uuid: "GPU-1".into(),
            message: "2 wrong elements\u{1b}".into(),
            help: "replace it".into(),
        };
        let reply = ExamineReply {
            gpus: vec![
                gpu(0, Passed, ""),
                gpu(1, Failed, "doctor: results: 2 wrong elements"),
                gpu(2, Skipped, "job 7 runs on it"),
                gpu(3, Unknown, "it could not be measured"),
            ],
            done: true,
            findings: vec![finding],
        };
        let expected = "\
failure  GPU 1 (GPU-1): 2 wrong elements\\u{1b}
         help: replace it
passed   GPU 0 (GPU-0)
failed   GPU 1 (GPU-1): drained, doctor: results: 2 wrong elements
skipped  GPU 2 (GPU-2): job 7 runs on it
unknown  GPU 3 (GPU-3): it could not be measured
";
        assert_eq!(table(&reply), expected);
        let healthy = |gpus| is_healthy(&ExamineReply { gpus, ..ExamineReply::default() });
        let results = [Passed, Skipped, Failed, Unknown].map(|state| healthy(vec![gpu(0, state, "")]));
        assert_eq!(results, [true, true, false, false]);
        assert!(!is_healthy(&ExamineReply { gpus: Vec::new(), ..reply }));
    }
}
