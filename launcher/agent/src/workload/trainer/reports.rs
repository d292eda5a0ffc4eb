//! Handling of worker reports, and checkpoints on request.

use std::time::{Duration, Instant};

use prost::Message as _;
use tokio::sync::watch;
use xlaunch_proto::v1;
use xlaunch_proto::v1::agent_command::Command as WorkerCommand;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    CheckpointCommand, CheckpointReply, CheckpointReport, Failed, FailedAck, Heartbeat, JobState, NodeSaved,
    RankReports, ShardSaved, StepReport, WorkerReport,
};
use xlaunch_spec::exit::ExitCode;

use super::TrainerWorkload;
use crate::sinks::{RankReport, progress};
use crate::state::{Event, Job};
use crate::status::board::Board;
use crate::status::time::{CheckpointInterval, Measured, suggestion};
use crate::workload::Workload;
use crate::workload::checkpoint_requests::Requester;

/// The device id that ranks without a GPU report.
const CPU_DEVICE: &str = "cpu";

impl TrainerWorkload<'_> {
    /// Passes a report on to status, sinks and summary. Returns the event that it causes, if any.
    pub(super) fn report(
        &mut self,
        rank: u32,
        report: Report,
        board: &watch::Sender<Board>,
    ) -> Option<Event> {
        let global_rank = self.attempt.assignment.first_rank + rank;
        let report = match report {
            Report::ShardSaved(shard) if self.leads() => {
                self.shard_saved(global_rank, shard);
                return None;
            }
            Report::ShardSaved(shard) => {
                let saved = NodeSaved {
                    attempt: self.attempt.number,
                    rank: global_rank,
                    shard: shard.encode_to_vec(),
                };
                self.send(FromAgent::Saved(saved));
                return None;
            }
            other => other,
        };
        let event = self.event_of(rank, &report);
        let at = Instant::now();
        let mut restart = None;
        board.send_modify(|board| {
            board.reported(rank, &report, at);
            restart = board.time.take_restart_times().map(|text| (text, board.time.measured(at)));
        });
        if let Some((text, measured)) = restart {
            self.notify(&format!("xlaunch: {text}"));
            self.suggest_interval(measured);
        }
        if !self.leads() {
            // The agent of rank 0 compares all ranks and writes the curves.
            self.forward(global_rank, report);
            return event;
        }
        self.hang_detector.record(rank, &report, at);
        if let Report::Step(StepReport { own_seconds: Some(own_seconds), .. }) = &report {
            self.rank_stepped(rank, *own_seconds, board);
        }
        let report = RankReport { rank, at, report };
        self.results.summary.record(&report);
        let resume_line = match (&report.report, &self.attempt.resume_snapshot, &self.plan.resume_from) {
            (Report::TrainStarted(started), Some(_), _) => {
                progress::resume_line(started, "a memory snapshot")
            }
            (Report::TrainStarted(started), None, Some(checkpoint)) => {
                progress::resume_line(started, checkpoint.display())
            }
            _ => None,
        };
        if let Some(line) = resume_line {
            self.sinks.printer().print(line);
        }
        if self.plan.bench.is_some() && !matches!(report.report, Report::Heartbeat(_)) {
            self.results.reports.push(report.clone());
        }
        self.sinks.report(report);
        event
    }

    /// Queues reports that the agent of rank 0 needs to find hung and slow ranks.
    fn forward(&mut self, rank: u32, report: Report) {
        if matches!(report, Report::Heartbeat(_) | Report::Step(_) | Report::TrainStarted(_)) {
            let report = WorkerReport { report: Some(report) }.encode_to_vec();
            self.attempt.unsent_reports.push(v1::RankReport { rank, report });
        }
    }

    /// Sends the queued reports to the agent of rank 0.
    pub(super) fn send_reports(&mut self) {
        let reports = std::mem::take(&mut self.attempt.unsent_reports);
        if !reports.is_empty() {
            self.send(FromAgent::Reports(RankReports { attempt: self.attempt.number, reports }));
        }
    }

    /// Handles a report of another node's rank.
    pub(super) fn reported_remotely(&mut self, rank: u32, report: &Report, board: &watch::Sender<Board>) {
        let now = Instant::now();
        self.hang_detector.heard_of(rank, now);
        self.hang_detector.record(rank, report, now);
        if let Report::Step(StepReport { own_seconds: Some(own_seconds), .. }) = report {
            self.rank_stepped(rank, *own_seconds, board);
        }
    }

    /// Suggests a checkpoint interval to the user, at most once per job. Called after restarts only: a job without them
    /// loses no work.
    fn suggest_interval(&mut self, measured: Option<Measured>) {
        let checkpoint = &self.plan.spec.checkpoint;
        let configured = CheckpointInterval {
            steps: checkpoint.every,
            time: Duration::from_secs_f64(checkpoint.every_seconds),
        };
        let text = measured.and_then(|measured| suggestion(configured, &measured));
        if let Some(text) = text.filter(|_| !self.interval_suggested) {
            self.interval_suggested = true;
            self.notify(&format!("xlaunch: {text}"));
        }
    }

    /// Records the time of a step, and reports stragglers.
    fn rank_stepped(&mut self, rank: u32, own_seconds: f64, board: &watch::Sender<Board>) {
        let lines = self.attempt.stragglers.record(rank, own_seconds);
        if !lines.is_empty() {
            lines.iter().for_each(|line| self.notify(&format!("xlaunch: {line}")));
            self.show_hints(board);
        }
    }

    /// Updates the hints that the status shows for hung and slow ranks.
    pub(super) fn show_hints(&self, board: &watch::Sender<Board>) {
        let mut hints = self.attempt.stragglers.hints();
        hints.extend(self.attempt.hang_hints.clone());
        board.send_modify(|board| board.set_hints(hints));
    }

    /// Tells rank 0 to commit a checkpoint once all ranks have written their shards.
    pub(super) fn shard_saved(&mut self, rank: u32, shard: ShardSaved) {
        if let Some(mut commit) = self.attempt.saves.record(rank, shard) {
            if let Err(problem) = self.renew_lock() {
                commit.error = problem;
            }
            self.attempt.sessions.send(0, WorkerCommand::CommitCheckpoint(commit));
        }
    }

    /// Updates progress and pending requests from a report, and returns the event for the state machine, if any.
    fn event_of(&mut self, rank: u32, report: &Report) -> Option<Event> {
        match report {
            Report::Heartbeat(Heartbeat { progress, .. }) => {
                let last = self.attempt.progress.get_mut(rank as usize)?;
                let rises = *progress > std::mem::replace(last, *progress);
                return rises.then_some(Event::Progress);
            }
            Report::TrainStarted(started) if rank == 0 => self.attempt.step = Some(started.first_step),
            Report::Step(step) if rank == 0 => {
                self.attempt.step = Some(step.step);
                if step.step > self.furthest_step {
                    self.furthest_step = step.step;
                    return Some(Event::Advanced { by_steps: true });
                }
            }
            Report::Finished(_) => return Some(Event::Finished { rank }),
            Report::Checkpoint(checkpoint) if rank == 0 => return Some(self.checkpoint_saved(checkpoint)),
            Report::CheckpointFailed(failed) => {
                let line = self.checkpoint_requests.fail(&format!("{}: {}", failed.path, failed.reason));
                self.notify_if(line);
            }
            Report::Failed(failed) => return Some(self.rank_failed(rank, failed)),
            _ => {}
        }
        None
    }

    fn checkpoint_saved(&mut self, CheckpointReport { step, path, seconds }: &CheckpointReport) -> Event {
        // Workers and the agent share a working directory; the readers of this path may have another one.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        // This reads the disk on the driver's task: rank 0 has just written there, so the disk responds.
        if let Err(reason) = (self.plan.files.verify)(&path) {
            let problem = format!("the checkpoint of step {step} was not saved: {reason}");
            let line = self.checkpoint_requests.fail(&problem);
            self.notify_if(line);
            self.notify(&format!("xlaunch: {problem}"));
            return Event::CheckpointIncomplete(problem);
        }
        let text = path.to_string_lossy().into_owned();
        let line =
            self.checkpoint_requests.saved(&CheckpointReply { step: *step, path: text, seconds: *seconds });
        self.notify_if(line);
        Event::Checkpoint { step: *step, path }
    }

    fn rank_failed(&mut self, rank: u32, failed: &Failed) -> Event {
        let Failed { message, exit_code, differing_ranks } = failed;
        let number = self.attempt.assignment.first_rank + rank;
        let line = self.checkpoint_requests.fail(&format!("rank {number} failed: {message}"));
        self.notify_if(line);
        self.attempt.sessions.send(rank, WorkerCommand::FailedAck(FailedAck {}));
        let exit = i32::try_from(*exit_code).ok().and_then(ExitCode::of_worker);
        let message = message.lines().next().unwrap_or_default().to_owned();
        if !differing_ranks.is_empty() {
            let local = differing_ranks.iter().filter_map(|rank| self.local_rank(*rank));
            let ranks: Vec<_> = local.map(|rank| (rank, self.device(rank))).collect();
            return if ranks.is_empty() {
                // The node of the differing ranks reports them.
                Event::PeerFailed(message)
            } else {
                Event::ReplicasDiffer { ranks, message }
            };
        }
        // Rank 0 reports a failed save on behalf of the rank whose save has failed.
        let saving = self.attempt.saves.failed_rank().filter(|_| exit == Some(ExitCode::SaveFailed));
        let saving = saving.and_then(|rank| self.local_rank(rank));
        let rank = saving.unwrap_or(rank);
        Event::OwnError { rank, message, exit: exit.unwrap_or(ExitCode::WorkerFailed) }
    }

    /// The name under which a rank's device is remembered across attempts.
    fn device(&self, rank: u32) -> String {
        let number = self.attempt.assignment.first_rank + rank;
        match self.attempt.devices.get(&rank) {
            Some(uuid) if uuid != CPU_DEVICE => format!("{uuid} (rank {number})"),
            _ => format!("rank {number}"),
        }
    }

    /// Requests a checkpoint, or tells the requester why the job cannot save one now.
    pub(super) fn request_checkpoint(&mut self, requester: Requester, job: &Job) {
        let refusal = match (job.state(), self.attempt.step) {
            _ if self.plan.bench.is_some() => "a benchmark saves no checkpoints",
            (JobState::Stopping | JobState::Done | JobState::Failed, _) => "the job is stopping",
            (JobState::Running, Some(step)) => {
                self.checkpoint_requests.add(step, requester);
                // Only rank 0 gets the command, and tells the others in its next step. Ranks that received it in
                // different steps would save once for each of these steps.
                return self.attempt.sessions.send(0, WorkerCommand::Checkpoint(CheckpointCommand {}));
            }
            _ => "the job is not training yet; try again when `xlaunch status` shows a step",
        };
        self.notify_if(requester.refuse_at_once(refusal));
    }

    pub(super) fn notify_if(&self, line: Option<String>) {
        if let Some(line) = line {
            self.notify(&format!("xlaunch: {line}"));
        }
    }
}
