//! Decides when a rank saves and with which state: the training thread's side of [`Saver`].

use std::time::{Duration, Instant};

use xlaunch_spec::job::{CheckpointSection, OnSaveError};

use crate::best::Best;
use crate::checkpoint::saver::Saver;
use crate::checkpoint::{CheckpointError, Portion, State};
use crate::error::Result;
use crate::fail::{self, Place};
use crate::model::{BackendHandle, Model};
use crate::optim::AdamW;

/// The checkpoints of a run.
#[derive(Debug)]
pub struct Checkpoints {
    saver: Saver,
    portion: Portion,
    /// The state to save; the step and values that depend on it are filled in.
    template: State,
    asynchronous: bool,
    stop_on_error: bool,
    every: Option<Duration>,
    last: Instant,
    skipped: u64,
}

impl Checkpoints {
    /// Starts without a save. `template` is the state at the start of the run.
    pub fn new(saver: Saver, portion: Portion, template: State, section: &CheckpointSection) -> Self {
        Self {
            saver,
            portion,
            template,
            asynchronous: section.asynchronous,
            stop_on_error: section.on_error == OnSaveError::Stop,
            every: (section.every_seconds > 0.0).then(|| Duration::from_secs_f64(section.every_seconds)),
            last: Instant::now(),
            skipped: 0,
        }
    }

    /// Returns whether `checkpoint.every_seconds` have passed since the last save began. Clocks of ranks may differ, so
    /// rank 0 decides.
    pub fn is_due_by_clock(&self) -> bool {
        self.every.is_some_and(|every| self.last.elapsed() >= every)
    }

    /// Returns whether this rank is still writing. Before a save all ranks must agree that none of them is.
    pub fn is_busy(&self) -> bool {
        self.saver.is_busy()
    }

    /// Counts a save that was due while another one was in flight. Returns the total number.
    pub fn skip(&mut self) -> u64 {
        // Otherwise the clock would request a save after every step.
        self.last = Instant::now();
        self.skipped += 1;
        self.skipped
    }

    /// Begins to save the state at this position. No step and no other save may be in flight. The `last` save is waited
    /// for, and must succeed.
    pub fn save(
        &mut self,
        backend: &BackendHandle,
        model: &Model,
        optimizer: &AdamW,
        position: Position,
        last: bool,
    ) -> Result<()> {
        let start = Instant::now();
        self.last = start;
        let Position { step, sequences, val_loss, best } = position;
        let state = State { step, sequences, val_loss, best, ..self.template.clone() };
        let arenas = optimizer.state(model);
        if self.saver.has_no_buffers() {
            let portion = &self.portion;
            self.saver.save_in_pieces(state, start, |arena, packed, values| {
                backend.read_f32(arenas[arena as usize].slice(portion.stored(&packed)), values)
            })?;
        } else {
            let mut snapshot = self.saver.take_buffers()?;
            let copies = [&mut snapshot.params, &mut snapshot.m, &mut snapshot.v];
            for (tensor, values) in arenas.into_iter().zip(copies) {
                let mut at = 0;
                for stored in self.portion.ranges().iter().map(|owned| &owned.stored) {
                    for piece in values.pieces(at..at + stored.len()) {
                        let from = stored.start + piece.start - at;
                        backend.read_f32(tensor.slice(from..from + piece.len()), &mut values[piece])?;
                    }
                    at += stored.len();
                }
            }
            fail::at(Place::Snapshot);
            self.saver.begin(snapshot, state, start);
        }
        match (last, self.asynchronous) {
            (true, _) => Ok(self.saver.wait()?),
            (false, true) => Ok(()),
            (false, false) => self.wait(),
        }
    }

    /// Fails if the last save has failed by now and the job should end because of that.
    pub fn check(&mut self) -> Result<()> {
        match self.saver.poll() {
            Err(error) if self.is_fatal(&error) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Waits for the save in flight. A failure has been reported; it is an error only if the job requires that.
    pub fn wait(&mut self) -> Result<()> {
        match self.saver.wait() {
            Err(error) if self.is_fatal(&error) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// No checkpoint could be saved at all without buffers, so that error is always fatal.
    fn is_fatal(&self, error: &CheckpointError) -> bool {
        self.stop_on_error || matches!(error, CheckpointError::Memory { .. })
    }
}

/// Position of training.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// Completed steps.
    pub step: u64,
    /// Number of sequences used so far by all ranks.
    pub sequences: u64,
    /// Validation loss after this step, if it was evaluated.
    pub val_loss: Option<f64>,
    /// The best evaluation so far.
    pub best: Option<Best>,
}
