use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::KeyCode;
use xlaunch_proto::v1::{NodeStatus, Progress, RankState, RankStatus, StatusReply};

use super::super::state::{Snapshot, Update};
use super::*;

fn frame(state: &State, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    terminal.backend().buffer().clone()
}

/// The lines of a frame without trailing spaces.
fn text(state: &State, width: u16, height: u16) -> String {
    let frame = frame(state, width, height);
    let mut out = String::new();
    for line in frame.content().chunks(usize::from(width)) {
        out += line.iter().map(|cell| cell.symbol()).collect::<String>().trim_end();
        out.push('\n');
    }
    out
}

fn gpu(index: u32) -> Gpu {
    let busy = [98.4, 0.0, 31.0][index as usize % 3];
    Gpu {
        index,
        uuid: format!("GPU-{index}"),
        name: "NVIDIA H200".into(),
        state: GpuState::Held.into(),
        job: 7,
        busy_percent: Some(busy),
        memory_used_bytes: Some(12_100_000_000),
        memory_bytes: Some(141_000_000_000),
        power_watts: Some(650.2),
        temperature_celsius: Some(61.0),
        ..Default::default()
    }
}

fn training() -> Job {
    let rank = |rank| RankStatus {
        rank,
        pid: 812 + rank,
        state: RankState::Running.into(),
        step: 120,
        cpu_percent: Some(101.0),
        gpu_percent: Some(98.0),
        device_uuid: format!("GPU-{rank}"),
        ..Default::default()
    };
    let status = StatusReply {
        kind: JobKind::Trainer.into(),
        world_size: 2,
        step: 120,
        total_steps: 500,
        loss: 2.5,
        tokens_per_second: 46_123.0,
        mfu: Some(0.412),
        ranks: vec![rank(0), rank(1)],
        ..Default::default()
    };
    let point = |step: u64| Progress {
        unix_ms: step,
        step,
        loss: if step == 50 { f32::NAN } else { 5.0 - 2.5 * step as f32 / 119.0 },
        tokens_per_second: 40_000.0 + 100.0 * (step % 60) as f64,
    };
    Job {
        id: 7,
        name: "train".into(),
        user: "anna".into(),
        kind: JobKind::Trainer.into(),
        state: NodeJobState::Running.into(),
        gpus_wanted: 2,
        gpus: vec!["GPU-0".into(), "GPU-1".into()],
        command_line: "train.toml".into(),
        started_unix_ms: 1_000_000,
        status: Some(status),
        history: (0..120).map(point).collect(),
        ..Default::default()
    }
}

fn queued(id: u64) -> Job {
    let state = NodeJobState::Queued.into();
    let position = u32::try_from(id).unwrap();
    Job {
        id,
        name: format!("sweep-{id}"),
        user: "ben".into(),
        state,
        gpus_wanted: 4,
        queue_position: position,
        reason: "needs 4 GPUs, 0 are free".into(),
        command_line: "sweep.py".into(),
        ..Default::default()
    }
}

fn failed() -> Job {
    Job {
        id: 3,
        name: "eval".into(),
        user: "anna".into(),
        state: NodeJobState::Failed.into(),
        reason: "rank 1: exit code 1".into(),
        command_line: "eval.py".into(),
        started_unix_ms: 1_000_000,
        ended_unix_ms: 1_008_000,
        report: "rank 1 failed: exit code 1\n  ValueError: no data\n".into(),
        ..Default::default()
    }
}

fn state(gpus: u32, jobs: &[Job]) -> State {
    let node = NodeStatus {
        host: "node-17".into(),
        version: "0.1.0".into(),
        daemon_pid: 812,
        started_unix_seconds: 1000,
        gpus: (0..gpus).map(gpu).collect(),
        cores: 64,
        jobs_queued: 1,
        jobs_running: 1,
        jobs_ended: 40,
        ..Default::default()
    };
    let mut state = State::new(true);
    let detail = jobs.first().cloned();
    state.update(Update::Snapshot(Box::new(Snapshot { node, jobs: jobs.to_vec(), detail })));
    state.set_time(1_185_000);
    state
}

#[test]
fn small_terminal_shows_node_gpus_jobs_and_selected_job() {
    insta::assert_snapshot!("node", text(&state(2, &[training(), queued(8), failed()]), 80, 24));
}

#[test]
fn many_gpus_are_drawn_two_per_line() {
    insta::assert_snapshot!("many-gpus", text(&state(8, &[training(), queued(8), failed()]), 80, 24));
}

#[test]
fn zoomed_job_shows_its_report() {
    let mut state = state(2, &[failed()]);
    state.key(KeyCode::Enter.into());
    insta::assert_snapshot!("zoomed", text(&state, 80, 10));
}

#[test]
fn selected_job_of_a_long_list_is_visible() {
    let jobs: Vec<_> = (1..100).map(queued).collect();
    let mut state = state(2, &jobs);
    for _ in 0..70 {
        state.key(KeyCode::Down.into());
    }
    let text = text(&state, 80, 24);
    assert!(text.contains("\n> 71   sweep-71 "), "{text}");
    assert!(text.contains("-- job 71  sweep-71  queued, position 71"), "{text}");
}

#[test]
fn every_terminal_size_is_drawn() {
    let mut zoomed = state(8, &[training()]);
    zoomed.key(KeyCode::Enter.into());
    let states = [State::new(true), state(8, &[training(), failed()]), state(0, &[]), zoomed];
    for (width, height) in [(1, 1), (2, 30), (200, 2), (10, 5), (40, 12), (80, 7), (300, 90)] {
        for state in &states {
            frame(state, width, height);
        }
    }
}

#[test]
fn no_color_disables_colours() {
    let mut state = state(2, &[training(), queued(8), failed()]);
    let has_colours = |state: &State| {
        let frame = frame(state, 80, 24);
        frame.content().iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(has_colours(&state));
    state.without_colours();
    assert!(!has_colours(&state));
}

#[test]
fn hostile_text_is_escaped() {
    let hostile = "\u{1b}[2J\u{202e}a\nb".to_owned();
    let mut job = Job { name: hostile.clone(), user: hostile.clone(), ..failed() };
    (job.reason, job.command_line, job.report) = (hostile.clone(), hostile.clone(), hostile.clone());
    let mut state = state(1, &[job]);
    state.update(Update::Error(hostile));
    let text = text(&state, 200, 24);
    assert!(text.contains("\\u{202e}a") && !text.contains(['\u{1b}', '\u{202e}']), "{text}");
    assert!(text.contains("-- job 3  \\u{1b}[2J\\u{202e}a\\u{a}b  failed"), "{text}");
}
