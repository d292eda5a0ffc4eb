//! A sample node with jobs in all states, some with hostile names.

use std::sync::Arc;
use std::time::Instant;

use xlaunch_proto::v1::{
    Accounting, Gpu, GpuState, Job, JobKind, JobState, NodeJobState, NodeStatus, Progress, RankState,
    RankStatus, Restart, RestartCount, StatusReply, StepTimes, Totals,
};

use crate::view::{JobView, NodeView};

/// A hostile name, which a user can give to a job.
pub(super) const HOSTILE: &str = "<img src=x onerror=alert(1)>\"\n}\\ xlaunch_up 1 \u{202e}\r\t'";

pub(super) fn gpu_uuid(index: u32) -> String {
    format!("GPU-5a1e{index:04}-77d0-4c3f-9b52-0d3f5f1e2a00")
}

fn rank(rank: u32, step: u64) -> RankStatus {
    RankStatus {
        rank,
        local_rank: rank,
        pid: 31_400 + rank,
        state: RankState::Running.into(),
        device_uuid: gpu_uuid(rank),
        step,
        seconds_since_heartbeat: Some(0.4),
        pool_live_bytes: 3_100_000_000,
        pool_mapped_bytes: 3_600_000_000,
        pool_peak_bytes: 3_650_000_000,
        pool_fragmentation: 0.03,
        seconds_since_output: Some(1.5),
        cpu_percent: Some(101.5),
        memory_bytes: Some(2_400_000_000),
        gpu_percent: Some(97.0),
        gpu_memory_bytes: Some(4_400_000_000),
        ..Default::default()
    }
}

/// A typical loss curve that ends at `now`.
fn history(steps: u64, now: u64) -> Vec<Progress> {
    let every = (steps / 400).max(1);
    let points = (0..steps / every).map(|point| {
        let step = (point + 1) * every;
        #[expect(clippy::cast_precision_loss, reason = "a sample curve")]
        let x = step as f32;
        Progress {
            unix_ms: now - (steps - step) * 120,
            step,
            loss: 1.3 + 4.2 / (1.0 + x / 90.0) + 0.06 * (x * 0.7).sin() * (x * 0.013).cos(),
            tokens_per_second: 4.2e6 * f64::from(1.0 - 0.9 / (1.0 + x / 4.0) + 0.01 * (x * 0.31).sin()),
        }
    });
    points.collect()
}

pub(super) fn job(id: u64, name: &str, state: NodeJobState) -> JobView {
    let job = Job {
        id,
        name: name.into(),
        uid: 1000 + u32::try_from(id % 3).unwrap(),
        user: ["ada", "grace", ""][usize::try_from(id % 3).unwrap()].into(),
        kind: JobKind::Command.into(),
        state: state.into(),
        gpus_wanted: 2,
        command_line: format!("xlaunch --nproc-per-node 2 {name}.py --lr 3e-4"),
        work_dir: "/home/ada/work".into(),
        submitted_unix_ms: 1_795_000_000_000,
        ..Default::default()
    };
    JobView { job, ..Default::default() }
}

/// The sample node at `now`. Job 7 has finished `steps` of 2000 steps.
#[expect(clippy::too_many_lines, reason = "a list of jobs")]
pub(super) fn sample_node(now: u64, steps: u64) -> NodeView {
    let gpu = |index: u32, state: GpuState, job| Gpu {
        index,
        uuid: gpu_uuid(index),
        name: "NVIDIA H200".into(),
        state: state.into(),
        job,
        busy_percent: Some(if job == 0 { 0.0 } else { 97.0 }),
        memory_used_bytes: Some(if job == 0 { 600_000_000 } else { 5_000_000_000 }),
        memory_bytes: Some(150_754_820_096),
        power_watts: Some(if job == 0 { 76.2 } else { 641.7 }),
        temperature_celsius: Some(if job == 0 { 31.0 } else { 58.0 }),
        ..Default::default()
    };
    let mut gpus: Vec<_> = (0..4).map(|index| gpu(index, GpuState::Held, 7)).collect();
    gpus.push(gpu(4, GpuState::Free, 0));
    for (state, reason) in [
        (GpuState::Drained, "drained by root: fan is being replaced"),
        (GpuState::Sick, "Xid 79: the GPU has fallen off the bus"),
        (GpuState::Foreign, "used by a process outside any job"),
    ] {
        let index = u32::try_from(gpus.len()).unwrap();
        gpus.push(Gpu { reason: reason.into(), ..gpu(index, state, 0) });
    }

    let history = history(steps, now);
    let last = history.last().copied().unwrap_or_default();
    let mut training = job(7, "llama-28m", NodeJobState::Running);
    training.job.kind = JobKind::Trainer.into();
    training.job.command_line += HOSTILE;
    training.job.gpus = (0..4).map(gpu_uuid).collect();
    training.job.gpus_wanted = 4;
    training.job.started_unix_ms = now - steps * 120 - 5_000;
    let mut ranks: Vec<_> = (0..4).map(|number| rank(number, steps)).collect();
    ranks[3].hint = "no output for 312 s, no CPU time".into();
    ranks[3].seconds_since_output = Some(312.0);
    ranks[3].cpu_percent = Some(0.0);
    let status = StatusReply {
        job_id: "20261121-083242".into(),
        job_name: "llama-28m".into(),
        state: JobState::Running.into(),
        kind: JobKind::Trainer.into(),
        world_size: 4,
        ranks,
        step: steps,
        total_steps: 2000,
        loss: last.loss,
        tokens_per_second: last.tokens_per_second,
        mfu: Some(0.41),
        reason: "rank 2: signal 9 (SIGKILL: killed); restarting (1 of 3)".into(),
        totals: Some(Totals {
            tokens: steps * 32_768,
            all_reduce_bytes: steps * 133_800_000,
            step_seconds: 0.12 * f64::from(u32::try_from(steps).unwrap()),
            steps: vec![
                StepTimes { seconds: 0.1, steps: 0 },
                StepTimes { seconds: 0.25, steps },
                StepTimes { seconds: f64::INFINITY, steps: 0 },
            ],
        }),
        accounting: Some(Accounting {
            step_seconds: 86.4,
            repeated_seconds: 2.5,
            checkpoint_seconds: 0.75,
            evaluation_seconds: 3.25,
            start_seconds: 4.5,
            hang_seconds: 61.0,
            down_seconds: 0.5,
            hangs: 1,
            replica_mismatches: 2,
            skipped_saves: 3,
            failed_saves: 4,
            restarts: vec![RestartCount { cause: "killed".into(), restarts: 1 }],
        }),
        past_restarts: vec![Restart {
            unix_ms: now - 45_000,
            attempt: 0,
            rank: Some(2),
            cause: "signal 9 (SIGKILL: killed)".into(),
        }],
        attempt: 1,
        restarts: 1,
        max_restarts: 3,
        host: "node-17".into(),
        launcher_pid: 31_399,
        ..Default::default()
    };
    training.status = Some((Arc::new(status), Instant::now()));
    training.history = history.into();

    let mut diverged = job(6, "gpt2-124m", NodeJobState::Failed);
    diverged.job.kind = JobKind::Trainer.into();
    diverged.job.started_unix_ms = now - 1_900_000;
    diverged.job.ended_unix_ms = now - 600_000;
    diverged.job.exit_code = Some(1);
    diverged.job.reason = "a worker failed: exit code 1".into();
    diverged.job.report = "rank 2 of 4 failed first: exit code 1\n  the loss is not finite at step 412\n  \
                           what to do: lower train.lr, or turn on train.clip\n"
        .into();
    let status = StatusReply {
        kind: JobKind::Trainer.into(),
        state: JobState::Failed.into(),
        step: 412,
        total_steps: 1000,
        loss: f32::NAN,
        ..Default::default()
    };
    diverged.status = Some((Arc::new(status), Instant::now()));
    diverged.history = (1..=412)
        .map(|step| Progress {
            unix_ms: now - 1_900_000 + step * 1000,
            step,
            loss: if step > 405 { f32::NAN } else { 8.0 / f32::from(u16::try_from(step).unwrap()).sqrt() },
            tokens_per_second: 5.1e5,
        })
        .collect();

    let mut waiting = job(8, "eval", NodeJobState::Queued);
    waiting.job.queue_position = 1;
    waiting.job.reason = "waits for GPUs: 2 wanted, 1 free".into();
    let mut hostile = job(9, HOSTILE, NodeJobState::Queued);
    hostile.job.queue_position = 2;
    hostile.job.reason = HOSTILE.repeat(200);
    let mut lost = job(3, "sweep-3", NodeJobState::Lost);
    lost.job.reason = "the node was rebooted while it ran".into();
    lost.job.started_unix_ms = now - 90_000_000;
    lost.job.ended_unix_ms = now - 86_400_000;
    let mut done = job(5, "tokenize", NodeJobState::Done);
    done.job.exit_code = Some(0);
    done.job.started_unix_ms = now - 9_000_000;
    done.job.ended_unix_ms = now - 1_800_000;
    let cancelled = job(4, "sweep-4", NodeJobState::Cancelled);

    let jobs = [training, diverged, waiting, hostile, lost, done, cancelled];
    NodeView {
        node: NodeStatus {
            memory_bytes: 512 << 30,
            page_problem: String::new(),
            config_problems: Vec::new(),
            host: "node-17".into(),
            version: "0.1.0".into(),
            daemon_pid: 812,
            started_unix_seconds: now / 1000 - 200_000,
            drained: String::new(),
            gpus,
            cores: 192,
            jobs_queued: 2,
            jobs_running: 1,
            jobs_ended: 4,
            gpu_problem: String::new(),
        },
        examined: [12, 1, 0],
        jobs: jobs.into_iter().map(|job| (job.job.id, Arc::new(job))).collect(),
    }
}
