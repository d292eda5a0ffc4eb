//! Turns what happens to a job (exits, messages and signals) into events for its state machine.

use std::time::Instant;

use rustix::process::Signal;
use xlaunch_host::process::Process;
use xlaunch_host::signals::SignalRequest;
use xlaunch_host::spawn::Exit;
use xlaunch_proto::v1::JobState;

use super::Driver;
use super::attempt::{StartedWorker, WorkerExit};
use crate::python::preload::Preloader;
use crate::rendezvous::message::Message;
use crate::state::Event;

impl Driver<'_> {
    /// Handles the exit of a worker.
    pub(super) fn exited(&mut self, exited: WorkerExit) -> Option<Event> {
        let WorkerExit { pid, rank, exit } = exited;
        if !self.attempt.has(rank, pid) {
            self.next_exited(exited);
            return None;
        }
        let oom = self.attempt.is_out_of_memory(rank, exit).then_some(Event::OomKilled { rank });
        let is_first_failure = self.job.state() == JobState::Running && exit != Exit::Code(0);
        let progress =
            is_first_failure.then(|| self.workload.read_heartbeats(&self.board, Instant::now())).flatten();
        for event in oom.into_iter().chain(self.symptom(rank, exit)).chain(progress) {
            // The job only remembers these events, to judge the exit.
            self.job.handle(event, Instant::now());
        }
        self.workload.worker_exited(rank);
        self.attempt.exited(rank, exit);
        let text = if self.workload.program().is_some() { exit.of_command() } else { exit.to_string() };
        self.board.send_modify(|board| board.exited(rank, text));
        Some(Event::Exited { rank, exit })
    }

    /// Handles a call, or a message of a worker.
    pub(super) fn message(&mut self, message: Message) -> Vec<Event> {
        let event = match message {
            Message::Stop(by) => {
                self.notify(&format!("stop requested by {by}"));
                self.membership.request_stop(None);
                None
            }
            Message::Signal(signal) => {
                // Same as for a signal that xlaunch forwards: the job continues, so its state does not change.
                Signal::from_named_raw(signal)
                    .map(SignalRequest::Forward)
                    .and_then(|it| self.signal_request(it))
            }
            other => {
                let message = self.membership.of_local_rank(other);
                message.and_then(|message| self.workload.message(message, &self.job, &self.board))
            }
        };
        let killed = match event {
            Some(Event::SessionClosed { rank }) => self.killed(rank),
            _ => Vec::new(),
        };
        event.into_iter().chain(killed).collect()
    }

    /// Finds out whether a worker that has closed its session is being killed. A process closes its connections before
    /// it releases its GPU, so this is known well before its exit.
    fn killed(&mut self, rank: u32) -> Vec<Event> {
        let killed_by = |started: &StartedWorker| Process::killed_by(started.worker.pid);
        let Some(signal) = self.attempt.process(rank).and_then(killed_by) else { return Vec::new() };
        self.attempt.dying(rank);
        // The kernel counts an OOM kill before it kills the process.
        let is_out_of_memory = self.attempt.is_out_of_memory(rank, Exit::Signal(signal));
        let oom = is_out_of_memory.then_some(Event::OomKilled { rank });
        oom.into_iter().chain([Event::Killed { rank, signal }]).collect()
    }

    pub(super) fn signal_request(&mut self, request: SignalRequest) -> Option<Event> {
        match request {
            SignalRequest::Stop(signal) => self.membership.request_stop(Some(signal)),
            SignalRequest::Forward(signal) => {
                if !self.workload.takes_signal(signal, &self.job) {
                    self.attempt.notify(signal);
                }
            }
            SignalRequest::Suspend => self.suspend(Signal::STOP),
            SignalRequest::Resume => {
                self.preloader.iter().for_each(Preloader::resume);
                self.terminal.resume();
                self.attempt.resume();
            }
            SignalRequest::Resize => self.attempt.resize(),
        }
        None
    }

    /// Stops all processes, then this one by this signal, until SIGCONT.
    pub(super) fn suspend(&mut self, signal: Signal) {
        self.terminal.revoke();
        match &self.preloader {
            Some(preloader) if self.job.state() == JobState::Starting => preloader.suspend(),
            _ => self.attempt.suspend(signal),
        }
    }
}
