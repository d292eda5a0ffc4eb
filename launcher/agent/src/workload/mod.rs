//! The two kinds of job, behind one trait: [`TrainerWorkload`](trainer::TrainerWorkload) (the built-in trainer) and
//! [`CommandWorkload`](command::CommandWorkload) (any command under torchrun's contract).
//!
//! The driver owns the processes, the state machine and the status board; a workload knows how one worker is started,
//! what workers send, and what to tell the user.

mod checkpoint_requests;
pub mod command;
mod hang;
mod heartbeat;
pub mod host_memory;
mod recent;
mod save;
mod sessions;
pub mod snapshots;
mod stragglers;
pub mod trainer;

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::process::Signal;
use tokio::sync::watch;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;

use crate::activity::ActivityRecord;
use crate::base_environment::BaseEnvironment;
use crate::logs::Output;
use crate::python::flight_recorder::FlightRecorders;
use crate::python::preload::PreloadPlan;
use crate::rendezvous::message::Message;
use crate::state::{Event, Job, Rules};
use crate::status::board::{self, Board};
pub(crate) use hang::{Hang, HangReport};
use xlaunch_cluster::Assignment;
use xlaunch_host::spawn::Options;

/// The part of a running job that depends on its kind.
///
/// The driver's task makes all calls, one at a time, so no method may block on a disk, a socket or a terminal. Order:
/// the descriptions ([`rules`](Self::rules), [`launch`](Self::launch)) once, before anything starts; then for every
/// attempt [`begin_attempt`](Self::begin_attempt), [`command`](Self::command) for each rank, and the events of its
/// workers in the order in which they happen. Workers of a trainer may be started before their attempt begins:
/// [`command`](Self::command) comes first then, and so may their first calls. Workers of an earlier attempt are gone
/// when the next one begins, but their last messages may still arrive.
pub(crate) trait Workload {
    /// The properties of the job that the state machine decides by.
    fn rules(&self) -> Rules;

    /// The description of the launch that status queries return.
    fn launch(&self) -> board::Launch;

    /// Prepares an attempt. On error none of its workers is started and all of them count as failed, with exit code 65
    /// if the error is `InvalidData`.
    fn begin_attempt(&mut self, attempt: u32, assignment: &Assignment) -> std::io::Result<()>;

    /// Reserves `MASTER_PORT` for the next attempt. Called on the node of rank 0.
    fn reserve_port(&mut self) -> std::io::Result<u16>;

    /// Returns whether this node sees the files of the agent of node rank 0, which is identified by `_instance`.
    fn is_shared(&self, _instance: &[u8]) -> bool {
        true
    }

    /// Handles a message about workers from the coordinator or from another node's agent.
    fn group_message(
        &mut self,
        _message: ToAgent,
        _job: &Job,
        _board: &watch::Sender<Board>,
    ) -> Option<Event> {
        None
    }

    /// The GPUs of the ranks, as in `CUDA_VISIBLE_DEVICES`, if they are to be checked before an attempt. Inner `None`:
    /// all GPUs of the node.
    fn gpus_to_check(&self) -> Option<Option<String>> {
        None
    }

    /// Builds the command that starts one worker. Its files go to `dir`, which exists.
    fn command(&self, attempt: u32, rank: u32, dir: &Path) -> std::io::Result<(Command, Options)>;

    /// Number of processes to start: one per rank, or a single one that runs all ranks as threads.
    fn processes(&self) -> u32 {
        self.rules().workers
    }

    /// The process that forks the workers, if the user wants one.
    fn preload(&self) -> Option<PreloadPlan> {
        None
    }

    /// The user's program, if the job runs one. Its exit codes are its own and must not be read as xlaunch's.
    fn program(&self) -> Option<&OsStr> {
        None
    }

    /// The environment that workers inherit.
    fn base_environment(&self) -> &BaseEnvironment;

    /// The destinations of the workers' output.
    fn output(&self) -> &Output;

    /// Shows the user a line of xlaunch's own, without waiting.
    fn notify(&self, line: &str) {
        self.output().print(line);
    }

    /// The time at which [`timer`](Self::timer) is due next.
    fn deadline(&self, _job: &Job) -> Option<Instant> {
        None
    }

    /// Returns the event for a deadline that has passed.
    fn timer(&self, _job: &Job, _now: Instant) -> Option<Event> {
        None
    }

    /// Asks all workers to stop at the next step boundary, with a checkpoint. Workers that cannot be asked are sent
    /// signals by the state machine instead.
    fn request_stop(&self) {}

    /// Handles a signal that is a request to the agent. Returns `false` if the signal is for the workers.
    fn takes_signal(&mut self, _signal: Signal, _job: &Job) -> bool {
        false
    }

    /// Called when the process of this rank has exited.
    fn worker_exited(&mut self, _rank: u32) {}

    /// Handles a worker's call or report. The caller gets a reply, or an error that the agent is ending if `message` is
    /// dropped.
    fn message(&mut self, message: Message, job: &Job, board: &watch::Sender<Board>) -> Option<Event>;

    /// The flight recorders of the workers, if enabled.
    fn flight_recorders(&self) -> Option<FlightRecorders> {
        None
    }

    /// Reads the heartbeats that workers write to files. Called every second while the job runs, and before the first
    /// failure of an attempt is counted. Returns [`Event::Advanced`] if the heartbeats show progress.
    fn read_heartbeats(&mut self, _board: &watch::Sender<Board>, _now: Instant) -> Option<Event> {
        None
    }

    /// The activity that a worker of this attempt records about itself.
    fn activity(&self, _rank: u32) -> Option<ActivityRecord> {
        None
    }

    /// Reports ranks that seem to hang, once per stall. Called every second while the job runs. Returns the hang to
    /// collect evidence for.
    fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Hang>;

    /// Returns whether the ranks of this hang have made no progress since it was reported.
    fn hang_lasts(&self, _hang: &Hang) -> bool {
        false
    }
}
