//! The job and its ranks as callers see them, for both kinds of job.
//!
//! The driver tells what happens, the monitor what it sees; [`Board::reply`] is the answer to a status query. Whatever passes
//! with time (silence, hints) is worked out when it is asked for.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    JobKind, JobState, RankState, RankStatus, Restart, StatusReply, StepReport, Totals, TrainStarted,
};

use super::history::{self, History};
use super::sample::Usage;
use crate::clock;
use crate::devices;
use crate::run_dir::rank_dir;

/// CPU use of a rank, in percent of a core, below which it does nothing.
const IDLE: f64 = 1.0;
/// Restarts that are told.
pub const RESTARTS: usize = 20;

/// What is known of a launch from its start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The trainer, or a command.
    pub kind: JobKind,
    /// Name of the run among the job's.
    pub id: String,
    /// Name of the job.
    pub name: String,
    /// Quoted for a shell.
    pub command_line: String,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Holds `attempt_<n>/<local rank>/{stdout,stderr}.log`.
    pub log_dir: PathBuf,
    /// How long a rank may print nothing and do nothing before that is pointed out.
    pub stall_timeout: Duration,
}

/// The state of a job as callers see it.
#[derive(Clone, Debug)]
pub struct Board {
    launch: Launch,
    host: String,
    started_unix_seconds: u64,
    state: JobState,
    reason: String,
    attempt: u32,
    restarts: VecDeque<Restart>,
    train: Option<TrainStarted>,
    last_step: Option<StepReport>,
    history: History,
    totals: Option<Totals>,
    ranks: Vec<Rank>,
    looked: Option<Instant>,
}

#[derive(Clone, Debug, Default)]
struct Rank {
    status: RankStatus,
    heard: Option<Instant>,
    output: Option<Instant>,
    /// It has used neither CPU nor GPU since then.
    idle: Option<Instant>,
    /// That it holds up the others.
    hint: Option<String>,
}

impl Board {
    /// The board of a launch that begins now.
    pub fn new(launch: Launch) -> Self {
        Self {
            launch,
            host: devices::host_name(),
            started_unix_seconds: clock::unix().as_secs(),
            state: JobState::Starting,
            reason: String::new(),
            attempt: 0,
            restarts: VecDeque::new(),
            train: None,
            last_step: None,
            history: History::default(),
            totals: None,
            ranks: Vec::new(),
            looked: None,
        }
    }

    /// A new attempt of `world` ranks begins.
    pub fn reset(&mut self, attempt: u32, world: u32) {
        self.attempt = attempt;
        let status = |rank| RankStatus { rank, local_rank: rank, ..Default::default() };
        self.ranks = (0..world).map(|rank| Rank { status: status(rank), ..Default::default() }).collect();
    }

    /// The job is in this state.
    pub fn now_in(&mut self, state: JobState) {
        self.state = state;
    }

    /// Why it is.
    pub fn because(&mut self, reason: &str) {
        self.reason = reason.into();
    }

    /// An attempt has failed, and another follows.
    pub fn restarts(&mut self, restart: Restart) {
        if self.restarts.len() == RESTARTS {
            self.restarts.pop_front();
        }
        self.restarts.push_back(restart);
    }

    /// The rank's process runs.
    pub fn spawned(&mut self, rank: u32, pid: u32, now: Instant) {
        // A command joins nobody that we know of: it runs.
        let is_command = self.launch.kind == JobKind::Command;
        if let Some(rank) = self.rank(rank) {
            rank.status.pid = pid;
            rank.status.set_state(if is_command { RankState::Running } else { RankState::Started });
            rank.output = Some(now);
        }
    }

    /// The rank has joined the others.
    pub fn joined(&mut self, rank: u32, device_uuid: &str) {
        if let Some(Rank { status, .. }) = self.rank(rank) {
            status.device_uuid = device_uuid.into();
            status.set_state(RankState::Joined);
        }
    }

    /// The rank has said something over its session.
    pub fn reported(&mut self, rank: u32, report: &Report, now: Instant) {
        if let Some(Rank { status, heard, .. }) = self.rank(rank) {
            *heard = Some(now);
            if status.state() != RankState::Exited {
                status.set_state(RankState::Running);
            }
            if let Report::Step(step) = report {
                status.step = step.step + 1;
                status.pool_live_bytes = step.pool_live_bytes;
                status.pool_mapped_bytes = step.pool_mapped_bytes;
                status.pool_peak_bytes = step.pool_peak_bytes;
                status.pool_fragmentation = step.pool_fragmentation;
            }
        }
        match report {
            Report::TrainStarted(started) if rank == 0 => self.train = Some(started.clone()),
            Report::Step(step) if rank == 0 => {
                self.last_step = Some(*step);
                self.history.add(clock::unix_ms(), step);
                history::count(self.totals.get_or_insert_default(), step);
            }
            _ => {}
        }
    }

    /// The rank's process is gone; `exit` says how, in words.
    pub fn exited(&mut self, rank: u32, exit: String) {
        if let Some(Rank { status, idle, .. }) = self.rank(rank) {
            status.exit = exit;
            status.set_state(RankState::Exited);
            *idle = None;
        }
    }

    /// What the rank's processes use, if `pid` is still its process.
    pub(super) fn used(&mut self, rank: u32, pid: u32, usage: &Usage, now: Instant) {
        let Some(rank) = self.rank(rank).filter(|rank| rank.runs() == Some(pid)) else { return };
        rank.status.cpu_percent = Some(usage.cpu_percent);
        rank.status.memory_bytes = Some(usage.memory_bytes);
        rank.status.gpu_percent = usage.gpu_percent;
        rank.status.gpu_memory_bytes = usage.gpu_memory_bytes;
        let idle = usage.cpu_percent < IDLE && usage.gpu_percent.unwrap_or(0.0) == 0.0;
        rank.idle = idle.then(|| rank.idle.unwrap_or(now));
    }

    /// When the rank last wrote to stdout or stderr, if `pid` is still its process.
    pub(super) fn wrote(&mut self, rank: u32, pid: u32, at: Instant) {
        if let Some(rank) = self.rank(rank).filter(|rank| rank.runs() == Some(pid)) {
            rank.output = rank.output.max(Some(at));
        }
    }

    /// These ranks, and no others, hold up the job: what to say of them.
    pub fn point_out(&mut self, mut hints: BTreeMap<u32, String>) {
        for (number, rank) in (0..).zip(&mut self.ranks) {
            rank.hint = hints.remove(&number);
        }
    }

    /// All that the monitor sees is as of `now`.
    pub(super) fn looked(&mut self, now: Instant) {
        self.looked = Some(now);
    }

    /// Whether the monitor has looked at or after `moment`.
    pub fn has_looked_since(&self, moment: Instant) -> bool {
        self.looked >= Some(moment)
    }

    /// This start of the group, from 0.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        u32::try_from(self.ranks.len()).unwrap_or(u32::MAX)
    }

    /// Whether nothing more will happen.
    pub fn is_over(&self) -> bool {
        matches!(self.state, JobState::Done | JobState::Failed)
    }

    /// Where the output of a rank's present process goes.
    pub fn log_dir(&self, rank: u32) -> PathBuf {
        rank_dir(&self.launch.log_dir, self.attempt, rank)
    }

    /// Rank and process id of every process that runs.
    pub(super) fn running(&self) -> Vec<(u32, u32)> {
        self.ranks.iter().filter_map(|rank| Some((rank.status.rank, rank.runs()?))).collect()
    }

    /// What a person should look at in this rank.
    pub fn hint(&self, rank: u32, now: Instant) -> Option<String> {
        let rank = self.ranks.get(rank as usize)?;
        rank.runs()?;
        if rank.hint.is_some() {
            return rank.hint.clone();
        }
        let silent = now.saturating_duration_since(rank.output?);
        let idle = now.saturating_duration_since(rank.idle?);
        silence(silent, idle, rank.status.gpu_percent.is_some(), self.launch.stall_timeout)
    }

    /// The answer to a status query at `now`, on demand with its history.
    pub fn reply(&self, now: Instant, history: bool) -> StatusReply {
        let since = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let ranks = self.ranks.iter().map(|rank| RankStatus {
            seconds_since_heartbeat: rank.heard.map_or(0.0, since),
            seconds_since_output: rank.output.map(since),
            hint: self.hint(rank.status.rank, now).unwrap_or_default(),
            ..rank.status.clone()
        });
        let step = self.last_step.unwrap_or_default();
        StatusReply {
            job_id: self.launch.id.clone(),
            job_name: self.launch.name.clone(),
            attempt: self.attempt,
            state: self.state.into(),
            world_size: self.world(),
            ranks: ranks.collect(),
            step: self.last_step.map_or(0, |step| step.step + 1),
            total_steps: self.train.as_ref().map_or(0, |started| started.total_steps),
            loss: step.loss,
            tokens_per_second: history::speed(&step),
            reason: self.reason.clone(),
            kind: self.launch.kind.into(),
            command_line: self.launch.command_line.clone(),
            started_unix_seconds: self.started_unix_seconds,
            restarts: self.attempt,
            max_restarts: self.launch.max_restarts,
            host: self.host.clone(),
            launcher_pid: std::process::id(),
            log_dir: self.launch.log_dir.to_string_lossy().into_owned(),
            past_restarts: self.restarts.iter().cloned().collect(),
            totals: self.totals.clone(),
            history: if history { self.history.points().to_vec() } else { Vec::new() },
        }
    }

    fn rank(&mut self, rank: u32) -> Option<&mut Rank> {
        self.ranks.get_mut(rank as usize)
    }
}

impl Rank {
    /// Its process, while it runs.
    fn runs(&self) -> Option<u32> {
        (self.status.pid != 0 && self.status.state() != RankState::Exited).then_some(self.status.pid)
    }
}

/// Whether a rank that has been silent and idle for so long should be looked at. A rank that waits for its peers inside a
/// collective keeps its GPU or a core busy: what stands out is the one they wait for.
fn silence(silent: Duration, idle: Duration, has_gpu: bool, patience: Duration) -> Option<String> {
    if silent.min(idle) < patience {
        return None;
    }
    let gpu = if has_gpu { ", no GPU" } else { "" };
    Some(format!("silent for {} s, no CPU{gpu}", silent.as_secs()))
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
            log_dir: "/logs".into(),
            stall_timeout: Duration::from_secs(300),
        });
        board.reset(1, 2);
        board
    }

    fn usage(cpu_percent: f64, gpu_percent: Option<f64>) -> Usage {
        Usage { cpu_percent, memory_bytes: 7, gpu_percent, gpu_memory_bytes: None }
    }

    #[test]
    fn a_rank_stands_out_when_it_has_been_silent_and_idle_long_enough() {
        let (mut board, start) = (board(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        board.spawned(1, 42, start);
        board.used(1, 42, &usage(0.2, Some(0.0)), at(10));
        board.used(1, 42, &usage(0.0, Some(0.0)), at(200));
        assert_eq!(board.hint(1, at(309)), None, "idle for 299 s");
        assert_eq!(board.hint(1, at(310)).as_deref(), Some("silent for 310 s, no CPU, no GPU"));
        assert_eq!(board.reply(at(310), false).ranks[1].hint, "silent for 310 s, no CPU, no GPU");
        board.wrote(1, 42, at(305));
        assert_eq!(board.hint(1, at(330)), None, "it has printed");
        assert_eq!(board.hint(1, at(700)).as_deref(), Some("silent for 395 s, no CPU, no GPU"));
        board.used(1, 42, &usage(0.0, Some(3.0)), at(700));
        assert_eq!(board.hint(1, at(700)), None, "its GPU works");
        board.used(1, 42, &usage(0.0, None), at(701));
        assert_eq!(board.hint(1, at(1100)).as_deref(), Some("silent for 795 s, no CPU"));
        board.exited(1, "exit code 0".into());
        assert_eq!(board.hint(1, at(1100)), None, "it is gone");
    }

    #[test]
    fn what_was_seen_of_an_earlier_process_is_nobodys() {
        let (mut board, now) = (board(), Instant::now());
        board.spawned(0, 42, now);
        board.reset(2, 2);
        board.spawned(0, 43, now);
        board.used(0, 42, &usage(50.0, None), now);
        assert_eq!(board.reply(now, false).ranks[0].cpu_percent, None);
        assert_eq!((board.running(), board.reply(now, false).restarts), (vec![(0, 43)], 2));
    }
}
