//! Formats the stacks of a rank as text, for `hang.txt` and `xlaunch stacks`.

use std::fmt::Write;
use std::time::Duration;

use xlaunch_proto::v1::{ProcessStacks, RankStacks, RecordedActivity, StackDump, ThreadState};

use crate::report::escaped;

/// Formats all that is known about a rank. Control characters are escaped.
pub fn text(rank: &RankStacks) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "rank {}", rank.rank);
    if let Some(activity) = &rank.activity {
        let _ = writeln!(out, "  {}", self::activity(activity, rank.unix_ms));
    }
    if rank.processes.is_empty() {
        out.push_str("  its process has exited\n");
    }
    rank.processes.iter().for_each(|one| process(&mut out, one));
    out
}

/// Formats the activity, such as `phase: backward for 3.2 s, step 9, last collective: 41 (bucket 3)`.
fn activity(recorded: &RecordedActivity, now_ms: u64) -> String {
    let since = Duration::from_millis(now_ms.saturating_sub(recorded.unix_ms)).as_secs_f64();
    let mut text = format!("phase: {} for {since:.1} s", recorded.phase().label());
    if recorded.step > 0 {
        let _ = write!(text, ", step {}", recorded.step);
    }
    if recorded.collectives > 0 {
        let _ = write!(text, ", last collective: {}", recorded.collectives);
    }
    if recorded.bucket > 0 {
        let starting = if recorded.starting { ", being started" } else { "" };
        let _ = write!(text, " (bucket {}{starting})", recorded.bucket);
    }
    text
}

fn process(out: &mut String, process: &ProcessStacks) {
    let ProcessStacks { pid, parent, name, state, tracer_pid, threads, dumps } = process;
    let _ = write!(out, "  process {pid} ({}), state {}, parent {parent}", escaped(name), escaped(state));
    if *tracer_pid != 0 {
        let _ = write!(out, ", traced by process {tracer_pid}");
    }
    out.push('\n');
    for ThreadState { tid, name, state, wait_channel, syscall } in threads {
        let _ = write!(out, "    thread {tid:<8} {:<16} {}", escaped(name), escaped(state));
        if !wait_channel.is_empty() {
            let _ = write!(out, "  in {}", escaped(wait_channel));
        }
        if !syscall.is_empty() {
            let _ = write!(out, "  system call {}", escaped(syscall));
        }
        out.push('\n');
    }
    for StackDump { tool, text, problem } in dumps {
        let separator = if tool.is_empty() || problem.is_empty() { "" } else { ": " };
        let _ = writeln!(out, "    {}{separator}{}", escaped(tool), escaped(problem));
        for line in text.lines() {
            let _ = writeln!(out, "      {}", escaped(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::Phase;

    use super::*;

    #[test]
    fn text_names_phase_step_collective_and_bucket_and_escapes_names() {
        let thread = ThreadState {
            tid: 8,
            name: "ring\x1b[2J".into(),
            state: "S".into(),
            wait_channel: "futex_wait".into(),
            syscall: "202 0x1".into(),
        };
        let dumps = vec![
            StackDump { tool: "gdb".into(), text: "#0 a\n#1 b\n".into(), problem: String::new() },
            StackDump { tool: "py-spy".into(), text: String::new(), problem: "stopped after 10 s".into() },
        ];
        let process = ProcessStacks {
            pid: 7,
            parent: 1,
            name: "xlaunch".into(),
            state: "S".into(),
            tracer_pid: 0,
            threads: vec![thread],
            dumps,
        };
        let activity = RecordedActivity {
            phase: Phase::Backward.into(),
            step: 9,
            collectives: 41,
            bucket: 3,
            starting: true,
            unix_ms: 1_000_000,
        };
        let rank =
            RankStacks { rank: 2, activity: Some(activity), processes: vec![process], unix_ms: 1_003_210 };
        let text = text(&rank);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "rank 2");
        let ends = "s, step 9, last collective: 41 (bucket 3, being started)";
        assert_eq!(lines[1], format!("  phase: backward for 3.2 {ends}"));
        assert_eq!(lines[2], "  process 7 (xlaunch), state S, parent 1");
        assert!(lines[3].contains("ring\\u{1b}[2J") && lines[3].contains("in futex_wait"), "{text}");
        let dumps = ["    gdb", "      #0 a", "      #1 b", "    py-spy: stopped after 10 s"];
        assert_eq!(lines[4..], dumps);
    }
}
