//! The status of a job and its ranks, for both kinds of job.
//!
//! The driver records events and the monitor records its samples; [`Board::reply`] answers a status query. Everything
//! that changes with time alone (ages, hints) is computed on request.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xlaunch_proto::metrics::tokens_per_second;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{JobKind, JobState, RankState, RankStatus, Restart, StatusReply};

use super::history::{self, History};
use super::sample::Usage;
use super::time::TimeAccount;
use crate::activity::ActivityRecord;
use crate::logs::LogRecord;
use crate::run_dir::rank_dir;
use crate::stacks::Subject;
use xlaunch_cluster::Assignment;
use xlaunch_host::clock;
use xlaunch_host::devices;

/// A rank that uses less CPU than this, in percent of a core, counts as idle.
const IDLE_CPU_PERCENT: f64 = 1.0;
/// The most recent restarts that a status reply contains.
pub const MAX_PAST_RESTARTS: usize = 20;

/// The properties of a launch that are known from its start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Built-in trainer or command.
    pub kind: JobKind,
    /// Run id, unique among the job's runs.
    pub id: String,
    /// Name of the job.
    pub name: String,
    /// Command line, quoted for a shell.
    pub command_line: String,
    /// Maximum number of restarts.
    pub max_restarts: u32,
    /// Total number of training steps; 0 for a command.
    pub total_steps: u64,
    /// Directory that contains `attempt_<n>/<local rank>/{stdout,stderr}.log`.
    pub log_dir: PathBuf,
    /// A rank that has no output and uses neither CPU nor GPU for this long gets a hint.
    pub stall_timeout: Duration,
}

/// The state of a job as status queries see it.
#[derive(Clone, Debug)]
pub struct Board {
    launch: Launch,
    /// The fields of a reply that are neither computed on request nor those of `launch`.
    status: StatusReply,
    history: History,
    /// Account of the job's time.
    pub(crate) time: TimeAccount,
    /// Ranks by local rank, like everything here.
    ranks: Vec<Rank>,
    assignment: Assignment,
    /// This node is a spare: it waits to replace another one.
    spare: bool,
    /// The coordinator can be reached.
    connected: bool,
    /// The workers of the attempt write nothing any more.
    attempt_over: bool,
    /// Time of the monitor's last sample.
    last_sample: Option<Instant>,
    /// Highest memory use of all ranks together in any sample.
    peak_memory_bytes: u64,
}

#[derive(Clone, Debug, Default)]
struct Rank {
    status: RankStatus,
    last_report: Option<Instant>,
    last_output: Option<Instant>,
    /// Time since which it has used neither CPU nor GPU.
    idle_since: Option<Instant>,
    /// Hint from the hang detector.
    hint: Option<String>,
    activity: Option<ActivityRecord>,
    /// Records of stdout and stderr.
    logs: Option<[Arc<LogRecord>; 2]>,
    /// Last step that a command's rank wrote in a heartbeat.
    heartbeat_step: Option<u64>,
}

impl Board {
    /// Creates the status of a launch that starts now.
    pub fn new(launch: Launch) -> Self {
        Self {
            launch,
            status: StatusReply {
                host: devices::host_name(),
                launcher_pid: std::process::id(),
                started_unix_seconds: clock::unix().as_secs(),
                state: JobState::Starting.into(),
                ..StatusReply::default()
            },
            history: History::default(),
            time: TimeAccount::new(Instant::now()),
            ranks: Vec::new(),
            assignment: Assignment::default(),
            spare: false,
            connected: true,
            attempt_over: false,
            last_sample: None,
            peak_memory_bytes: 0,
        }
    }

    /// Replaces the launch's properties, once it has a run.
    pub(crate) fn set_launch(&mut self, launch: Launch) {
        self.launch = launch;
    }

    /// Makes this node a spare without ranks, or ends that.
    pub(crate) fn set_spare(&mut self, spare: bool) {
        if spare {
            self.reset(self.status.attempt, 0, &Assignment::default());
        }
        self.spare = spare;
    }

    /// Returns whether this node is a spare.
    pub(crate) fn is_spare(&self) -> bool {
        self.spare
    }

    /// Records whether the coordinator can be reached.
    pub(crate) fn set_connected(&mut self, connected: bool) {
        self.connected = connected;
    }

    /// Begins an attempt with `workers` ranks on this node.
    pub fn reset(&mut self, attempt: u32, workers: u32, assignment: &Assignment) {
        self.status.attempt = attempt;
        (self.assignment, self.spare, self.attempt_over) = (assignment.clone(), false, false);
        let Assignment { first_rank, node_rank, .. } = *assignment;
        let status = |local_rank| RankStatus {
            rank: first_rank + local_rank,
            local_rank,
            node_rank,
            ..Default::default()
        };
        self.ranks = (0..workers).map(|rank| Rank { status: status(rank), ..Default::default() }).collect();
    }

    /// Records that all output of the attempt is in its logs.
    pub(crate) fn attempt_ended(&mut self) {
        self.attempt_over = true;
    }

    /// Sets the state of the job.
    pub fn set_state(&mut self, state: JobState) {
        self.status.set_state(state);
    }

    /// Sets the latest message of the state machine to the user.
    pub(crate) fn set_reason(&mut self, reason: &str) {
        self.status.reason = reason.into();
    }

    /// Records that an attempt has failed and another one follows.
    pub(crate) fn add_restart(&mut self, restart: Restart) {
        let restarts = &mut self.status.past_restarts;
        restarts.drain(..(restarts.len() + 1).saturating_sub(MAX_PAST_RESTARTS));
        restarts.push(restart);
    }

    /// Returns the directory with the logs of all attempts.
    pub(super) fn log_root(&self) -> PathBuf {
        self.launch.log_dir.clone()
    }

    /// Records that the rank's process has started.
    pub(crate) fn spawned(&mut self, rank: u32, pid: u32, now: Instant) {
        // The ranks of a command do not join, so they count as running at once.
        let is_command = self.launch.kind == JobKind::Command;
        if let Some(rank) = self.rank(rank) {
            rank.status.pid = pid;
            rank.status.set_state(if is_command { RankState::Running } else { RankState::Started });
            rank.last_output = Some(now);
        }
    }

    /// Sets the activity record of the rank's worker.
    pub(crate) fn set_activity(&mut self, rank: u32, activity: Option<ActivityRecord>) {
        if let Some(rank) = self.rank(rank) {
            rank.activity = activity;
        }
    }

    /// Sets the log records of the rank's output.
    pub(crate) fn set_logs(&mut self, rank: u32, logs: [Arc<LogRecord>; 2]) {
        if let Some(rank) = self.rank(rank) {
            rank.logs = Some(logs);
        }
    }

    /// Returns the record of a rank's stdout or stderr in the current attempt.
    pub(super) fn log_record(&self, rank: u32, stderr: bool) -> Option<Arc<LogRecord>> {
        let [out, err] = self.ranks.get(rank as usize)?.logs.clone()?;
        Some(if stderr { err } else { out })
    }

    /// Records that the rank has joined the others.
    pub fn joined(&mut self, rank: u32, device_uuid: &str) {
        if let Some(Rank { status, .. }) = self.rank(rank) {
            status.device_uuid = device_uuid.into();
            status.set_state(RankState::Joined);
        }
    }

    /// Records a report of the rank.
    pub(crate) fn reported(&mut self, rank: u32, report: &Report, now: Instant) {
        if let Some(Rank { status, last_report, .. }) = self.rank(rank) {
            *last_report = Some(now);
            if status.state() != RankState::Exited {
                status.set_state(RankState::Running);
            }
            if let Report::Step(step) = report {
                status.step = step.step;
                status.last_step = Some(*step);
                status.pool_live_bytes = step.pool_live_bytes;
                status.pool_mapped_bytes = step.pool_mapped_bytes;
                status.pool_peak_bytes = step.pool_peak_bytes;
                status.pool_fragmentation = step.pool_fragmentation;
            }
        }
        if rank == 0 {
            self.time.reported(report, now);
        }
        match report {
            // With `train.epochs`, the number of steps is not known before.
            Report::TrainStarted(started) => self.launch.total_steps = started.total_steps,
            Report::Step(step) if rank == 0 => {
                self.status.last_step = Some(*step);
                self.history.add(clock::unix_ms(), step);
                history::count(self.status.totals.get_or_insert_default(), step);
            }
            _ => {}
        }
    }

    /// Records a heartbeat of a command's rank, perhaps with its step.
    pub(crate) fn heartbeat(&mut self, rank: u32, step: Option<u64>, now: Instant) {
        if let Some(rank) = self.rank(rank) {
            rank.last_report = Some(now);
            rank.heartbeat_step = step.or(rank.heartbeat_step);
            rank.status.step = rank.heartbeat_step.unwrap_or(0);
            self.time.heartbeat(now);
        }
    }

    /// Records that the rank's process has exited; `exit` describes how.
    pub(crate) fn exited(&mut self, rank: u32, exit: String) {
        if let Some(Rank { status, idle_since, .. }) = self.rank(rank) {
            status.exit = exit;
            status.set_state(RankState::Exited);
            *idle_since = None;
        }
    }

    /// Records the resource usage of the rank's processes, unless `pid` belongs to an earlier attempt.
    pub(super) fn set_usage(&mut self, rank: u32, pid: u32, usage: &Usage, now: Instant) {
        let Some(rank) = self.rank(rank).filter(|rank| rank.pid() == Some(pid)) else { return };
        rank.status.cpu_percent = Some(usage.cpu_percent);
        rank.status.memory_bytes = Some(usage.memory_bytes);
        rank.status.gpu_percent = usage.gpu_percent;
        rank.status.gpu_memory_bytes = usage.gpu_memory_bytes;
        let computes = usage.runnable || usage.cpu_percent >= IDLE_CPU_PERCENT;
        let idle = !computes && usage.gpu_percent.unwrap_or(0.0) == 0.0;
        rank.idle_since = idle.then(|| rank.idle_since.unwrap_or(now));
    }

    /// Records when the rank last wrote to stdout or stderr, unless `pid` belongs to an earlier attempt.
    pub(super) fn set_last_output(&mut self, rank: u32, pid: u32, at: Instant) {
        if let Some(rank) = self.rank(rank).filter(|rank| rank.pid() == Some(pid)) {
            rank.last_output = rank.last_output.max(Some(at));
        }
    }

    /// Replaces the hang detector's hints for all ranks.
    pub(crate) fn set_hints(&mut self, mut hints: BTreeMap<u32, String>) {
        for (number, rank) in (0..).zip(&mut self.ranks) {
            rank.hint = hints.remove(&number);
        }
    }

    /// Records that the monitor has sampled all ranks.
    pub(super) fn sampled(&mut self, now: Instant) {
        self.last_sample = Some(now);
        let memory = self.ranks.iter().filter_map(|rank| rank.status.memory_bytes).sum();
        self.peak_memory_bytes = self.peak_memory_bytes.max(memory);
    }

    /// Returns the highest memory use of all ranks together in any sample.
    pub(crate) fn peak_memory_bytes(&self) -> u64 {
        self.peak_memory_bytes
    }

    /// Returns whether the last sample was taken at or after `moment`.
    pub(super) fn is_sampled_since(&self, moment: Instant) -> bool {
        self.last_sample >= Some(moment)
    }

    /// Returns the current attempt, counted from 0.
    pub(super) fn attempt(&self) -> u32 {
        self.status.attempt
    }

    /// Returns the number of ranks on this node.
    pub(super) fn workers(&self) -> u32 {
        u32::try_from(self.ranks.len()).unwrap_or(u32::MAX)
    }

    /// Converts a local rank to a rank of the job.
    pub(crate) fn rank_of(&self, local_rank: u32) -> u32 {
        self.assignment.first_rank.saturating_add(local_rank)
    }

    /// Converts a rank of the job to a local rank, if it is on this node.
    pub(crate) fn local_rank(&self, rank: u32) -> Option<u32> {
        rank.checked_sub(self.assignment.first_rank).filter(|local| *local < self.workers())
    }

    /// Returns this node's place in the attempt.
    pub(crate) fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Returns whether all output of the attempt is in its logs.
    pub(super) fn is_attempt_over(&self) -> bool {
        self.attempt_over
    }

    /// Returns whether the job has ended.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.status.state(), JobState::Done | JobState::Failed)
    }

    /// Returns the directory for the output of a rank in the current attempt.
    pub(super) fn log_dir(&self, rank: u32) -> PathBuf {
        rank_dir(&self.launch.log_dir, self.status.attempt, rank)
    }

    /// Returns local rank and process id of every running worker.
    pub(super) fn running(&self) -> Vec<(u32, u32)> {
        self.ranks.iter().filter_map(|rank| Some((rank.status.local_rank, rank.pid()?))).collect()
    }

    /// Returns every running worker, to be examined.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        let subject = |rank: &Rank| {
            let activity = rank.activity.clone();
            Some(Subject { rank: rank.status.local_rank, pid: rank.pid()?, activity })
        };
        self.ranks.iter().filter_map(subject).collect()
    }

    /// Returns a hint for the user if this rank seems to hang.
    pub(crate) fn hint(&self, rank: u32, now: Instant) -> Option<String> {
        let rank = self.ranks.get(rank as usize)?;
        rank.pid()?;
        if rank.hint.is_some() {
            return rank.hint.clone();
        }
        let without_output = now.saturating_duration_since(rank.last_output?);
        let idle = now.saturating_duration_since(rank.idle_since?);
        idle_hint(without_output, idle, rank.status.gpu_percent.is_some(), self.launch.stall_timeout)
    }

    /// Returns the reply to a status query at `now`.
    pub fn reply(&self, now: Instant, history: bool) -> StatusReply {
        let since = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let ranks = self.ranks.iter().map(|rank| RankStatus {
            seconds_since_heartbeat: rank.last_report.map(since),
            seconds_since_output: rank.last_output.map(since),
            hint: self.hint(rank.status.local_rank, now).unwrap_or_default(),
            log_losses: rank.logs.iter().flatten().filter_map(|log| log.loss()).collect(),
            ..rank.status.clone()
        });
        let last_step = self.status.last_step;
        let step = last_step.unwrap_or_default();
        let lowest_step = self.ranks.iter().filter_map(|rank| rank.heartbeat_step).min();
        StatusReply {
            job_id: self.launch.id.clone(),
            job_name: self.launch.name.clone(),
            kind: self.launch.kind.into(),
            command_line: self.launch.command_line.clone(),
            max_restarts: self.launch.max_restarts,
            total_steps: self.launch.total_steps,
            log_dir: self.launch.log_dir.to_string_lossy().into_owned(),
            world_size: self.assignment.world,
            restarts: self.assignment.restarts,
            ranks: ranks.collect(),
            step: last_step.map(|step| step.step).or(lowest_step).unwrap_or(0),
            loss: step.loss,
            tokens_per_second: tokens_per_second(&step),
            mfu: step.mfu,
            spare: self.spare && self.connected,
            accounting: Some(self.time.accounting(now)),
            history: if history { self.history.points().to_vec() } else { Vec::new() },
            ..self.status.clone()
        }
    }

    fn rank(&mut self, rank: u32) -> Option<&mut Rank> {
        self.ranks.get_mut(rank as usize)
    }
}

impl Rank {
    /// Returns the process id while the process runs.
    fn pid(&self) -> Option<u32> {
        (self.status.pid != 0 && self.status.state() != RankState::Exited).then_some(self.status.pid)
    }
}

/// Returns the hint for a rank that has been idle and without output for so long that it may hang. A rank that waits
/// for its peers in a collective keeps its GPU or a core busy, so an idle rank is the one that the others wait for.
fn idle_hint(without_output: Duration, idle: Duration, has_gpu: bool, timeout: Duration) -> Option<String> {
    if without_output.min(idle) < timeout {
        return None;
    }
    let idle = if has_gpu { "CPU and GPU idle" } else { "CPU idle" };
    Some(format!("no output for {} s, {idle}", without_output.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board() -> Board {
        let mut board = Board::new(Launch {
            kind: JobKind::Command,
            id: "1".into(),
            name: "n".into(),
            command_line: "n".into(),
            max_restarts: 3,
            total_steps: 500,
            log_dir: "/logs".into(),
            stall_timeout: Duration::from_secs(300),
        });
        board.reset(1, 2, &Assignment { restarts: 1, ..assignment() });
        board
    }

    fn assignment() -> Assignment {
        Assignment { nodes: 1, world: 2, ..Assignment::default() }
    }

    fn usage(cpu_percent: f64, gpu_percent: Option<f64>) -> Usage {
        Usage { cpu_percent, runnable: false, memory_bytes: 7, gpu_percent, gpu_memory_bytes: None }
    }

    #[test]
    fn rank_without_output_that_is_idle_gets_a_hint_at_the_timeout() {
        let (mut board, start) = (board(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        board.spawned(1, 42, start);
        board.set_usage(1, 42, &usage(0.2, Some(0.0)), at(10));
        board.set_usage(1, 42, &usage(0.0, Some(0.0)), at(200));
        assert_eq!(board.hint(1, at(309)), None, "idle for 299 s");
        assert_eq!(board.hint(1, at(310)).as_deref(), Some("no output for 310 s, CPU and GPU idle"));
        assert_eq!(board.reply(at(310), false).ranks[1].hint, "no output for 310 s, CPU and GPU idle");
        board.set_last_output(1, 42, at(305));
        assert_eq!(board.hint(1, at(330)), None, "it has printed");
        assert_eq!(board.hint(1, at(700)).as_deref(), Some("no output for 395 s, CPU and GPU idle"));
        board.set_usage(1, 42, &usage(0.0, Some(3.0)), at(700));
        assert_eq!(board.hint(1, at(700)), None, "its GPU works");
        board.set_usage(1, 42, &usage(0.0, None), at(701));
        assert_eq!(board.hint(1, at(1100)).as_deref(), Some("no output for 795 s, CPU idle"));
        board.exited(1, "exit code 0".into());
        assert_eq!(board.hint(1, at(1100)), None, "it is gone");
    }

    #[test]
    fn step_of_a_command_is_the_lowest_that_its_ranks_wrote() {
        let (mut board, now) = (board(), Instant::now());
        (0..2).for_each(|rank| board.spawned(rank, 42, now));
        let seen = |board: &Board| {
            let reply = board.reply(now + Duration::from_secs(3), false);
            (
                reply.step,
                [0, 1].map(|rank| (reply.ranks[rank].step, reply.ranks[rank].seconds_since_heartbeat)),
            )
        };
        assert_eq!(seen(&board), (0, [(0, None), (0, None)]));
        board.heartbeat(1, Some(8), now);
        assert_eq!(seen(&board), (8, [(0, None), (8, Some(3.0))]), "rank 0 reports no step");
        board.heartbeat(0, Some(7), now);
        board.heartbeat(0, None, now + Duration::from_secs(1));
        assert_eq!(seen(&board), (7, [(7, Some(2.0)), (8, Some(3.0))]));
        board.reset(2, 2, &Assignment { restarts: 2, ..assignment() });
        assert_eq!(seen(&board), (0, [(0, None), (0, None)]));
    }

    #[test]
    fn samples_of_an_earlier_process_are_ignored() {
        let (mut board, now) = (board(), Instant::now());
        board.spawned(0, 42, now);
        board.reset(2, 2, &Assignment { restarts: 2, ..assignment() });
        board.spawned(0, 43, now);
        board.set_usage(0, 42, &usage(50.0, None), now);
        assert_eq!(board.reply(now, false).ranks[0].cpu_percent, None);
        assert_eq!((board.running(), board.reply(now, false).restarts), (vec![(0, 43)], 2));
    }

    #[test]
    fn process_that_waits_for_a_core_is_not_idle() {
        let (mut board, start) = (board(), Instant::now());
        board.spawned(0, 42, start);
        board.set_usage(0, 42, &Usage { runnable: true, ..usage(0.0, None) }, start);
        assert_eq!(board.hint(0, start + Duration::from_secs(100_000)), None);
    }

    #[test]
    fn idle_threshold_is_one_percent_of_a_core_and_no_gpu() {
        for (cpu, gpu, idle) in
            [(0.99, None, true), (1.0, None, false), (0.0, Some(0.0), true), (0.0, Some(0.1), false)]
        {
            let (mut board, start) = (board(), Instant::now());
            board.spawned(0, 42, start);
            board.set_usage(0, 42, &usage(cpu, gpu), start);
            let hint = board.hint(0, start + Duration::from_secs(300));
            assert_eq!(hint.is_some(), idle, "{cpu} {gpu:?}");
        }
    }
}
