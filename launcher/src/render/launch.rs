//! A launch and its ranks.

use xlaunch_proto::v1::{JobKind, MemberState, MemberStatus, RankStatus, Restart, StatusReply};

use super::text::{bytes, columns, escape, fit, or_dash, percent, seconds};
use xlaunch_spec::quantities::{count_text, rough_time_text};

/// Maximum number of restarts to list; only the last ones are shown.
const MAX_RESTARTS_SHOWN: usize = 3;

/// Returns a launch with its ranks. Lines are truncated to `width` characters.
pub(crate) fn table(reply: &StatusReply, now: u64, width: usize) -> String {
    let mut out = heading(reply, now);
    out += &restarts(reply, now);
    out += "\n";
    if !reply.nodes.is_empty() {
        out += &nodes(&reply.nodes);
        out += "\n";
    }
    out += &ranks(reply, width);
    fit(&out, width)
}

/// Returns a line per node of a job on several nodes.
fn nodes(nodes: &[MemberStatus]) -> String {
    let row = |node: &MemberStatus| {
        // A spare runs no ranks.
        let ranks = node.node_rank.filter(|_| node.workers > 0).map(|_| match node.workers {
            1 => node.first_rank.to_string(),
            workers => format!("{}-{}", node.first_rank, u64::from(node.first_rank) + u64::from(workers) - 1),
        });
        let is_quiet = matches!(node.state(), MemberState::Silent | MemberState::Lost);
        vec![
            or_dash(node.node_rank, |rank| rank.to_string()),
            node.state().label().to_owned(),
            ranks.unwrap_or_else(|| "-".into()),
            or_dash(is_quiet.then_some(node.seconds_since_heartbeat), rough_time_text),
            node.host.clone(),
            node.address.clone(),
        ]
    };
    let rows: Vec<_> = nodes.iter().map(row).collect();
    columns(&["NODE", "STATE", "RANKS", "SILENT", "HOST", "ADDRESS"], &rows)
}

/// Returns a line per rank, not truncated. `width` decides whether a note is on the same line or the next.
pub(crate) fn ranks(reply: &StatusReply, width: usize) -> String {
    let mut out = String::new();
    match reply.kind() {
        JobKind::Command => command_ranks(reply, width, &mut out),
        _ => trainer_ranks(reply, width, &mut out),
    }
    out
}

fn heading(reply: &StatusReply, now: u64) -> String {
    let mut out = format!("{}-{}  {}", escape(&reply.job_name), escape(&reply.job_id), reply.state().label());
    if !reply.reason.is_empty() {
        out += &format!(" ({})", escape(&reply.reason));
    }
    out += &format!(
        "\non {}, running for {}  pid {}  restarts {} of {}  {}\n",
        escape(&reply.host),
        rough_time_text(seconds(now.saturating_sub(reply.started_unix_seconds))),
        reply.launcher_pid,
        reply.restarts,
        reply.max_restarts,
        escape(&reply.command_line)
    );
    out += &format!("logs {}\n", escape(&reply.log_dir));
    if reply.kind() != JobKind::Command {
        out += &training(reply);
    }
    out + &time(reply)
}

/// Returns the last restarts, one per line.
pub(crate) fn restarts(reply: &StatusReply, now: u64) -> String {
    let line = |restart: &Restart| {
        let ago = rough_time_text(seconds(now.saturating_sub(restart.unix_ms / 1000)));
        let who = restart.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
        format!("attempt {} failed {ago} ago: {who}: {}\n", restart.attempt, escape(&restart.cause))
    };
    reply.past_restarts.iter().rev().take(MAX_RESTARTS_SHOWN).rev().map(line).collect()
}

/// Returns one line of training progress. Loss and speed are unknown before the first step, and if the node with rank 0
/// does not answer.
pub(crate) fn training(reply: &StatusReply) -> String {
    if reply.step == 0 {
        return format!("step {}\n", progress(reply));
    }
    format!(
        "step {}  loss {:.4}  {} tok/s{}\n",
        progress(reply),
        reply.loss,
        count_text(reply.tokens_per_second),
        reply.mfu.map_or_else(String::new, |mfu| format!("  MFU {:.1} %", 100.0 * mfu))
    )
}

/// Returns the progress as `120/500`, or `120` if the total is not known.
pub(crate) fn progress(reply: &StatusReply) -> String {
    if reply.total_steps == 0 {
        return reply.step.to_string();
    }
    format!("{}/{}", reply.step, reply.total_steps)
}

/// Returns one line with the break-down of the wall time.
pub(crate) fn time(reply: &StatusReply) -> String {
    reply.accounting.as_ref().map_or_else(String::new, |account| account.text() + "\n")
}

fn command_ranks(reply: &StatusReply, width: usize, out: &mut String) {
    // Most commands send no heartbeats, so the columns are shown only if needed.
    let has_heartbeats = reply.ranks.iter().any(|rank| rank.seconds_since_heartbeat.is_some());
    let heading = if has_heartbeats { "STEP    BEAT   " } else { "" };
    *out += &format!("RANK  PID      STATE    {heading}OUTPUT  CPU    MEMORY  GPU   GPU MEM\n");
    for rank in &reply.ranks {
        let sent = rank.seconds_since_heartbeat;
        let step = sent.filter(|_| rank.step > 0).map_or("-".into(), |_| rank.step.to_string());
        let heartbeat = format!("{step:<8}{:<7}", or_dash(sent, rough_time_text));
        let row = format!(
            "{:<6}{:<9}{:<9}{}{:<8}{:<7}{:<8}{:<6}{:<9}",
            rank.rank,
            rank.pid,
            rank.state().label(),
            if has_heartbeats { &heartbeat } else { "" },
            or_dash(rank.seconds_since_output, rough_time_text),
            or_dash(rank.cpu_percent, percent),
            or_dash(rank.memory_bytes, bytes),
            or_dash(rank.gpu_percent, percent),
            or_dash(rank.gpu_memory_bytes, bytes)
        );
        push_row(row, &note(rank), width, out);
    }
}

fn trainer_ranks(reply: &StatusReply, width: usize, out: &mut String) {
    *out += "RANK  PID     STATE   STEP    BEAT   CPU   MEMORY  GPU  POOL  MAPPED  PEAK  FRAG  DEVICE\n";
    for rank in &reply.ranks {
        // The first characters of a UUID distinguish the GPUs of a node.
        let device: String = rank.device_uuid.chars().take(12).collect();
        let row = format!(
            "{:<6}{:<8}{:<8}{:<8}{:<7}{:<6}{:<8}{:<5}{:<6}{:<8}{:<6}{:<6}{:<14}",
            rank.rank,
            rank.pid,
            rank.state().label(),
            rank.step,
            or_dash(rank.seconds_since_heartbeat, rough_time_text),
            or_dash(rank.cpu_percent, percent),
            or_dash(rank.memory_bytes, bytes),
            or_dash(rank.gpu_percent, percent),
            bytes(rank.pool_live_bytes),
            bytes(rank.pool_mapped_bytes),
            bytes(rank.pool_peak_bytes),
            percent(100.0 * f64::from(rank.pool_fragmentation)),
            escape(&device)
        );
        push_row(row, &note(rank), width, out);
    }
}

/// Appends a row with its note, on the same line if it fits into `width`, otherwise on the next line.
fn push_row(row: String, note: &str, width: usize, out: &mut String) {
    *out += row.trim_end();
    if !note.is_empty() && row.len().saturating_add(note.chars().count()) <= width {
        *out += &row[row.trim_end().len()..];
    } else if !note.is_empty() {
        *out += "\n      ";
    }
    *out += note;
    out.push('\n');
}

/// Returns how the rank ended, or what is unusual about it, and what its log files have lost.
fn note(rank: &RankStatus) -> String {
    let state = if rank.exit.is_empty() { &rank.hint } else { &rank.exit };
    let lost = rank.log_losses.iter().filter(|loss| loss.lost_bytes > 0);
    let lost = lost.map(|loss| format!("{} bytes of {} lost: {}", loss.lost_bytes, loss.file, loss.reason));
    let notes: Vec<String> = std::iter::once(state.clone()).filter(|it| !it.is_empty()).chain(lost).collect();
    escape(&notes.join("; "))
}

/// Returns one line per launch with its status, or the reason why there is none.
pub(crate) fn list(replies: &[(String, Result<StatusReply, String>)], now: u64, width: usize) -> String {
    let names: Vec<_> = replies.iter().map(|(name, _)| escape(name)).collect();
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max(4);
    let mut out = format!("{:<longest$}  STATE       RANKS  UP      COMMAND\n", "NAME");
    for (name, (_, reply)) in names.iter().zip(replies) {
        match reply {
            Ok(reply) => {
                let up = seconds(now.saturating_sub(reply.started_unix_seconds));
                out += &format!(
                    "{name:<longest$}  {:<12}{:<7}{:<8}{}\n",
                    reply.state().label(),
                    reply.world_size,
                    rough_time_text(up),
                    escape(&reply.command_line)
                );
            }
            Err(problem) => {
                // The name is in the first column already.
                let problem = problem
                    .strip_prefix(name)
                    .map_or(&problem[..], |rest| rest.trim_start_matches([':', ' ']));
                out += &format!("{name:<longest$}  {}\n", escape(problem));
            }
        }
    }
    fit(&out, width)
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::{Accounting, JobState, LogLoss, RankState};

    use super::*;

    fn reply() -> StatusReply {
        let rank = |rank| RankStatus {
            rank,
            pid: 4_000_000 + rank,
            state: RankState::Running.into(),
            seconds_since_output: Some(3.0),
            cpu_percent: Some(1600.4),
            memory_bytes: Some(123_400_000_000),
            gpu_percent: Some(100.0),
            gpu_memory_bytes: Some(141_000_000_000),
            ..Default::default()
        };
        let mut stalled = rank(1);
        stalled.cpu_percent = Some(0.0);
        stalled.gpu_percent = None;
        stalled.seconds_since_output = Some(312.0);
        stalled.hint = "no output for 312 s, no CPU time".into();
        StatusReply {
            job_id: "20261121-083242".into(),
            job_name: "train".into(),
            kind: JobKind::Command.into(),
            state: JobState::Running.into(),
            command_line: "train.py --lr 3".into(),
            host: "node-17".into(),
            launcher_pid: 4_194_303,
            started_unix_seconds: 1000,
            restarts: 1,
            max_restarts: 3,
            log_dir: "/run/user/1000/xlaunch-1000/train-20261121-083242".into(),
            world_size: 2,
            ranks: vec![rank(0), stalled],
            ..Default::default()
        }
    }

    #[test]
    fn command_launch_table() {
        insta::assert_snapshot!("command", table(&reply(), 1185, 100));
    }

    #[test]
    fn command_with_heartbeats_has_their_columns() {
        let mut reply = reply();
        (reply.ranks[0].step, reply.ranks[0].seconds_since_heartbeat) = (1200, Some(0.4));
        insta::assert_snapshot!("command-with-heartbeats", ranks(&reply, 100));
    }

    #[test]
    fn training_table_has_progress_and_memory_and_fits_80_columns_up_to_the_device() {
        let mut reply = reply();
        reply.kind = JobKind::Trainer.into();
        reply.ranks.truncate(1);
        let rank = &mut reply.ranks[0];
        (rank.pool_live_bytes, rank.pool_mapped_bytes) = (12_300_000_000, 45_600_000_000);
        (rank.pool_peak_bytes, rank.pool_fragmentation, rank.step) = (45_600_000_000, 0.02, 120);
        rank.device_uuid = "GPU-9b14ac54-acbc".into();
        rank.seconds_since_heartbeat = Some(0.4);
        (reply.step, reply.total_steps, reply.loss, reply.tokens_per_second) = (120, 500, 2.5, 46_123.0);
        reply.mfu = Some(0.412);
        reply.accounting =
            Some(Accounting { step_seconds: 59.1, start_seconds: 0.9, ..Accounting::default() });
        insta::assert_snapshot!("training", table(&reply, 1185, 100));
        assert_eq!(ranks(&reply, 100).find("  DEVICE"), Some(80));
    }

    #[test]
    fn what_is_not_known_yet_is_not_shown_as_zero() {
        let mut reply = reply();
        reply.kind = JobKind::Trainer.into();
        let line = |reply: &StatusReply| training(reply).trim_end().to_owned();
        reply.total_steps = 500;
        assert_eq!(line(&reply), "step 0/500");
        (reply.step, reply.total_steps, reply.loss) = (264, 0, 2.5);
        assert_eq!(line(&reply), "step 264  loss 2.5000  0 tok/s");
        let beat = |text: &str| text.lines().nth(1).unwrap()[30..].split_whitespace().next() == Some("-");
        assert!(beat(&ranks(&reply, 100)), "{}", ranks(&reply, 100));
    }

    #[test]
    fn nodes_are_listed_above_the_ranks() {
        let mut reply = reply();
        let node = |rank, state: MemberState, host: &str| MemberStatus {
            node_rank: rank,
            host: host.into(),
            address: "10.0.0.1".into(),
            state: state.into(),
            first_rank: rank.map_or(0, |rank| 8 * rank),
            workers: 8,
            seconds_since_heartbeat: 4.2,
        };
        reply.nodes = vec![
            node(Some(0), MemberState::Active, "node-17"),
            node(Some(1), MemberState::Silent, "a\nb"),
            node(Some(2), MemberState::Lost, "node-19"),
            node(None, MemberState::Spare, "node-20"),
            node(None, MemberState::Waiting, "node-21"),
        ];
        insta::assert_snapshot!("nodes", table(&reply, 1185, 100));
        (reply.kind, reply.total_steps) = (JobKind::Trainer.into(), 500);
        insta::assert_snapshot!("training-nodes", table(&reply, 1185, 100));
    }

    #[test]
    fn last_restarts_are_listed_above_the_ranks() {
        let mut reply = reply();
        let restart = |attempt: u32, cause: &str| Restart {
            unix_ms: 1_000_000 + u64::from(attempt) * 60_000,
            attempt,
            rank: (attempt > 1).then_some(1),
            cause: cause.into(),
        };
        reply.past_restarts = vec![
            restart(0, "old"),
            restart(1, "rendezvous timed out"),
            restart(2, "exit code 3\nx"),
            restart(3, "new"),
        ];
        insta::assert_snapshot!("restarts", table(&reply, 1185, 100));
    }

    #[test]
    fn note_about_exit_or_lost_output_goes_to_the_next_line_if_it_does_not_fit() {
        let mut reply = reply();
        reply.ranks[0].exit = "signal 26 (SIGVTALRM: a timer of CPU time ran out)".into();
        reply.ranks[1].log_losses = vec![LogLoss {
            file: "stdout.log".into(),
            lost_bytes: 4096,
            reason: "No space left on device".into(),
            ..Default::default()
        }];
        insta::assert_snapshot!("notes", table(&reply, 1185, 100));
        assert!(table(&reply, 1185, usize::MAX).contains("141G     signal 26"));
    }

    #[test]
    fn lines_are_truncated_and_escaped() {
        let mut reply = reply();
        reply.command_line = format!("\u{1b}[2J\u{202e}{}", "x".repeat(200));
        let text = table(&reply, 1185, 100);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("\\u{1b}[2J\\u{202e}xxx") && text.contains("xx...\n"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'));
    }

    #[test]
    fn hostile_names_and_notes_stay_on_their_line() {
        let mut reply = reply();
        (reply.reason, reply.host, reply.log_dir) = ("a\nb".into(), "c\nd".into(), "e\nf".into());
        (reply.job_name, reply.command_line) = ("g\nh".into(), "i\nj".into());
        (reply.ranks[0].hint, reply.ranks[1].exit) = ("k\n2     1".into(), "l\r\nm".into());
        assert_eq!(table(&reply, 1185, 200).lines().count(), 7);
        let replies = [("o\np".to_string(), Ok(reply)), ("q".to_string(), Err("r\ns".to_string()))];
        assert_eq!(list(&replies, 1185, 200).lines().count(), 3);
    }

    #[test]
    fn list_has_one_line_per_launch() {
        let replies =
            [("train-1".to_string(), Ok(reply())), ("b-2".to_string(), Err("is starting".to_string()))];
        insta::assert_snapshot!("list", list(&replies, 1185, 100));
    }
}
