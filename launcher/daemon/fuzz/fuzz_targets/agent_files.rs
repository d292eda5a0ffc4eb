//! Fuzzes the reports of an agent, which is a process of the job's user: result and status, as files and as messages,
//! and the daemon's record of the agent. Reports must be bounded before they are kept, encoded, shown on the page and
//! in `/metrics`, and printed by the clients.
#![no_main]

#[path = "../../../src/render/mod.rs"]
#[allow(dead_code, reason = "not everything is rendered here")]
mod render;

use std::collections::BTreeSet;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use serde_json::json;
use xlaunch_daemon::files::AgentRecord;
use xlaunch_daemon::fuzz::{History, page_and_metrics};
use xlaunch_daemon::state::{JobResult, Submitted};
use xlaunch_daemon::view::JobView;
use xlaunch_proto::v1::{
    Job, JobKind, JobState, Progress, RankState, RankStatus, Restart, StatusReply, StepTimes, Totals,
};

const WIDTH: usize = 80;
const NOW: u64 = 1_000_000;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Record(&'a [u8]),
    /// Two optional statuses and a result.
    Report(Status<'a>, Option<Status<'a>>, Option<&'a [u8]>),
    Log(&'a [u8], u8),
}

#[derive(Arbitrary, Debug)]
enum Status<'a> {
    Wire(&'a [u8]),
    Reply(Reply<'a>),
}

#[derive(Arbitrary, Debug)]
struct Reply<'a> {
    text: [&'a str; 5],
    trainer: bool,
    state: u8,
    numbers: [u32; 4],
    times: [u64; 3],
    loss: f32,
    speed: f64,
    ranks: Vec<Rank<'a>>,
    restarts: Vec<(u64, u32, Option<u32>, &'a str)>,
    history: Vec<(u64, u64, f32, f64)>,
    totals: Option<(u64, f64, Vec<(f64, u64)>, bool)>,
    repeat: u8,
}

#[derive(Arbitrary, Debug)]
struct Rank<'a> {
    rank: u8,
    state: u8,
    text: [&'a str; 3],
    heartbeat: Option<f64>,
    output: Option<f64>,
    cpu: Option<f64>,
    bytes: Option<u64>,
    pool: [u64; 3],
    fragmentation: f32,
}

impl Rank<'_> {
    fn message(&self) -> RankStatus {
        let [device_uuid, exit, hint] = self.text.map(String::from);
        let [pool_live_bytes, pool_mapped_bytes, pool_peak_bytes] = self.pool;
        RankStatus {
            rank: self.rank.into(),
            state: RankState::try_from(i32::from(self.state % 9)).unwrap_or_default().into(),
            device_uuid,
            exit,
            hint,
            seconds_since_heartbeat: self.heartbeat,
            seconds_since_output: self.output,
            cpu_percent: self.cpu,
            gpu_percent: self.cpu,
            memory_bytes: self.bytes,
            gpu_memory_bytes: self.bytes,
            pool_live_bytes,
            pool_mapped_bytes,
            pool_peak_bytes,
            pool_fragmentation: self.fragmentation,
            ..RankStatus::default()
        }
    }
}

impl Status<'_> {
    fn message(&self) -> Option<StatusReply> {
        let reply = match self {
            Self::Wire(bytes) => return StatusReply::decode(*bytes).ok(),
            Self::Reply(reply) => reply,
        };
        let [job_name, reason, command_line, host, log_dir] = reply.text.map(String::from);
        let [attempt, restarts, max_restarts, world_size] = reply.numbers;
        let [step, total_steps, started_unix_seconds] = reply.times;
        let restart = |&(unix_ms, attempt, rank, cause): &(u64, u32, Option<u32>, &str)| Restart {
            unix_ms,
            attempt,
            rank,
            cause: cause.into(),
        };
        let point = |&(unix_ms, step, loss, tokens_per_second): &(u64, u64, f32, f64)| Progress {
            unix_ms,
            step,
            loss,
            tokens_per_second,
        };
        let totals = reply.totals.as_ref().map(|(tokens, step_seconds, steps, closed)| Totals {
            tokens: *tokens,
            step_seconds: *step_seconds,
            steps: steps
                .iter()
                .copied()
                .chain(closed.then_some((f64::INFINITY, 1)))
                .map(|(seconds, steps)| StepTimes { seconds, steps })
                .collect(),
            ..Totals::default()
        });
        let ranks: Vec<_> = reply.ranks.iter().map(Rank::message).collect();
        let repeated = |count: usize| ranks.iter().cloned().cycle().take(ranks.len() * count).collect();
        Some(StatusReply {
            job_name,
            reason,
            command_line,
            host,
            log_dir,
            kind: if reply.trainer { JobKind::Trainer } else { JobKind::Command }.into(),
            state: JobState::try_from(i32::from(reply.state % 9)).unwrap_or_default().into(),
            attempt,
            restarts,
            max_restarts,
            world_size,
            step,
            total_steps,
            started_unix_seconds,
            loss: reply.loss,
            tokens_per_second: reply.speed,
            ranks: repeated(usize::from(reply.repeat % 4) + 1),
            past_restarts: reply.restarts.iter().map(restart).collect(),
            history: reply.history.iter().map(point).collect(),
            totals,
            ..StatusReply::default()
        })
    }
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Record(json) => {
        let Ok(record) = serde_json::from_slice::<AgentRecord>(json) else { return };
        let written = serde_json::to_vec(&record).expect("plain data");
        assert_eq!(serde_json::from_slice::<AgentRecord>(&written).expect("as written"), record);
    }
    Input::Report(first, second, result) => {
        let statuses = [Some(first), second].into_iter().flatten().filter_map(|status| status.message());
        report(statuses.collect(), result.and_then(|json| serde_json::from_slice(json).ok()));
    }
    Input::Log(bytes, cut) => log(bytes, cut.into()),
});

fn report(statuses: Vec<StatusReply>, result: Option<JobResult>) {
    let submitted = Submitted {
        job: 7,
        request_id: "r".into(),
        name: "n".into(),
        command_line: "c".into(),
        trainer: true,
        at: 1,
        ..Submitted::default()
    };
    let mut history = History::default();
    let (view, restarts) = history.view(submitted, statuses, result);
    assert!(restarts.iter().all(|restart| restart.cause.chars().count() <= 500));
    assert_eq!(History::parse(&history.encode()).expect("as written"), history);
    assert!(history.compacted().has_same_jobs(&history));

    let message = view.to_message(true);
    assert!(message.encoded_len() <= 160 << 10, "{} bytes", message.encoded_len());
    let bytes = message.encode_to_vec();
    assert_eq!(Job::decode(&*bytes).expect("as written").encode_to_vec(), bytes);
    page(&view);
    printed(&message);
}

/// Checks that the JSON is valid and that the metrics are lines of distinct series.
fn page(view: &JobView) {
    let (page, metrics) = page_and_metrics(view);
    let text = page.to_string();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("as written").to_string(), text);
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    let mut series = BTreeSet::new();
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        assert!(name.starts_with("xlaunch_") && value.parse::<f64>().is_ok(), "{line}");
        assert!(series.insert(name), "{name} occurs twice");
    }
}

/// Checks that printed text contains no terminal control sequences and no more lines than its ranks and restarts may
/// take.
fn printed(job: &Job) {
    let ranks = job.status.as_ref().map_or(0, |status| status.ranks.len());
    let text = render::job::text(job, NOW, WIDTH);
    let report = job.report.lines().count();
    assert_lines(&text, 14 + report + 2 * ranks);
    assert_lines(&render::jobs::table(std::slice::from_ref(job), NOW, WIDTH), 2);
    let _ = json!(job).to_string();
    if let Some(status) = &job.status {
        assert_lines(&render::launch::table(status, NOW, WIDTH), 9 + 2 * ranks);
        let list = [(status.job_name.clone(), Ok(status.clone())), ("b".into(), Err(status.reason.clone()))];
        assert_lines(&render::launch::list(&list, NOW, WIDTH), 3);
        let _ = json!(status).to_string();
    }
}

fn assert_lines(text: &str, most: usize) {
    assert!(
        text.lines().all(|line| line.chars().count() <= WIDTH && !line.chars().any(char::is_control)),
        "{text}"
    );
    assert!(text.lines().count() <= most, "more than {most} lines:\n{text}");
}

/// Checks that the text of a log does not depend on the chunks in which it arrives, up to an incomplete character at
/// its end.
fn log(bytes: &[u8], cut: usize) {
    let (first, second) = bytes.split_at(cut.min(bytes.len()));
    let mut chunks = render::sanitize::LogSanitizer::default();
    let text = chunks.text(first) + &chunks.text(second);
    assert_eq!(text, render::sanitize::LogSanitizer::default().text(bytes));
    assert!(text.chars().all(|c| !c.is_control() || "\n\t\r".contains(c)));
}
