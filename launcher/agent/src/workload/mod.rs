//! The two kinds of job, as the driver sees them.

pub mod command;
mod hang;
pub mod trainer;

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::process::Signal;
use tokio::sync::{mpsc, watch};

use crate::logs::Output;
use crate::rendezvous::service::Message;
use crate::run_dir::RunDir;
use crate::spawn::Options;
use crate::state::{Event, Job, Rules};
use crate::status::board::{self, Board};
use crate::workload::command::{CommandPlan, Commands};
use crate::workload::trainer::{Trained, Trainer, TrainerPlan};

/// What is to be run.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub enum Plan<'a> {
    Trainer(TrainerPlan<'a>),
    Command(CommandPlan<'a>),
}

/// The side of a running job that depends on its kind.
pub(crate) enum Work<'a> {
    Trainer(Box<Trainer<'a>>),
    Command(Box<Commands<'a>>),
}

impl<'a> Work<'a> {
    /// `console` takes lines that come back by [`say`](Self::say).
    pub(crate) fn new(
        plan: Plan<'a>,
        run: &'a RunDir,
        console: mpsc::Sender<String>,
    ) -> std::io::Result<Self> {
        Ok(match plan {
            Plan::Trainer(plan) => Self::Trainer(Box::new(Trainer::new(plan, run, console)?)),
            Plan::Command(plan) => Self::Command(Box::new(Commands::new(plan, run)?)),
        })
    }

    pub(crate) fn rules(&self) -> Rules {
        match self {
            Self::Trainer(trainer) => trainer.rules(),
            Self::Command(commands) => commands.rules(),
        }
    }

    /// What callers are told of the launch.
    pub(crate) fn launch(&self) -> board::Launch {
        match self {
            Self::Trainer(trainer) => trainer.launch(),
            Self::Command(commands) => commands.launch(),
        }
    }

    /// Signals to xlaunch that end the job.
    pub(crate) fn ending_signals(&self) -> Vec<Signal> {
        match self {
            Self::Trainer(_) => vec![Signal::INT, Signal::TERM, Signal::HUP],
            Self::Command(commands) => commands.ending_signals(),
        }
    }

    /// A new attempt is about to be started.
    pub(crate) fn begin(&mut self, attempt: u32) -> std::io::Result<()> {
        match self {
            Self::Trainer(trainer) => trainer.begin(attempt),
            Self::Command(commands) => commands.begin()?,
        }
        Ok(())
    }

    /// What starts one worker, whose files lie in `dir`.
    pub(crate) fn command(&self, attempt: u32, rank: u32, dir: &Path) -> std::io::Result<(Command, Options)> {
        match self {
            Self::Trainer(trainer) => Ok((trainer.command(attempt, rank)?, Options::default())),
            Self::Command(commands) => Ok(commands.command(attempt, rank, dir)),
        }
    }

    /// What workers of a command run.
    pub(crate) fn program(&self) -> Option<&OsStr> {
        match self {
            Self::Trainer(_) => None,
            Self::Command(commands) => commands.program(),
        }
    }

    /// Where the workers' output goes.
    pub(crate) fn output(&self) -> &Output {
        match self {
            Self::Trainer(trainer) => trainer.output(),
            Self::Command(commands) => commands.output(),
        }
    }

    /// A line for the user.
    pub(crate) fn say(&mut self, line: &str) {
        match self {
            Self::Trainer(trainer) => trainer.say(line),
            Self::Command(commands) => commands.output().say(line),
        }
    }

    /// When something is due that [`timer`](Self::timer) knows of.
    pub(crate) fn deadline(&self, job: &Job) -> Option<Instant> {
        match self {
            Self::Trainer(trainer) => trainer.deadline(job),
            Self::Command(_) => None,
        }
    }

    pub(crate) fn timer(&self, job: &Job, now: Instant) -> Option<Event> {
        match self {
            Self::Trainer(trainer) => trainer.timer(job, now),
            Self::Command(_) => None,
        }
    }

    pub(crate) fn ask_to_stop(&self) {
        match self {
            Self::Trainer(trainer) => trainer.ask_to_stop(),
            // The state machine sends signals to these.
            Self::Command(_) => {}
        }
    }

    /// A worker is gone.
    pub(crate) fn ended(&mut self, rank: u32) {
        match self {
            Self::Trainer(trainer) => trainer.ended(rank),
            Self::Command(_) => {}
        }
    }

    /// What a worker wants or reports.
    pub(crate) fn message(
        &mut self,
        message: Message,
        job: &Job,
        board: &watch::Sender<Board>,
    ) -> Option<Event> {
        match self {
            Self::Trainer(trainer) => trainer.message(message, job, board),
            Self::Command(commands) => {
                commands.refuse(message);
                None
            }
        }
    }

    pub(crate) fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) {
        match self {
            Self::Trainer(trainer) => trainer.report_stalls(board, now),
            Self::Command(commands) => commands.report_stalls(board, now),
        }
    }

    /// All is over and said.
    pub(crate) async fn finish(self) -> Trained {
        match self {
            Self::Trainer(trainer) => trainer.finish(),
            Self::Command(commands) => {
                commands.finish().await;
                Trained::default()
            }
        }
    }
}
