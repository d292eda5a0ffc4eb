//! Reads batches in advance, on a separate thread.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use super::batch::{Batch, MicroBatch};
use super::{DataError, Mixture};

/// Number of batches that are read ahead of the one in use.
const READ_AHEAD: usize = 4;

/// The sequences that one rank reads: `batch` sequences per micro-step. In micro-step m the first one has the number
/// `first + (m * world + rank) * batch`.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Number of sequences that all ranks used in earlier runs.
    pub first: u64,
    /// This rank.
    pub rank: usize,
    /// World size.
    pub world: usize,
    /// B.
    pub batch: usize,
    /// Micro-steps per step.
    pub accumulate: usize,
    /// T.
    pub seq: usize,
}

/// Yields batches in order. Dropping it ends the thread.
#[derive(Debug)]
pub struct Loader {
    batches: Receiver<Result<MicroBatch, DataError>>,
}

impl Loader {
    /// Starts the thread.
    pub fn start(rows: Mixture, schedule: Schedule) -> std::io::Result<Self> {
        let (sender, batches) = sync_channel(READ_AHEAD);
        thread::Builder::new().name("loader".into()).spawn(move || {
            let mut step_targets = 0;
            for micro in 0.. {
                let batch = read_micro_step(&rows, schedule, micro, &mut step_targets);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        })?;
        Ok(Self { batches })
    }

    /// The next batch.
    pub fn next_batch(&self) -> Result<MicroBatch, DataError> {
        self.batches.recv().unwrap_or_else(|_| {
            Err(DataError::Read {
                path: "data".into(),
                reason: "the loader thread ended after an earlier error".into(),
            })
        })
    }
}

/// Reads the batch of micro-step `micro`. `step_targets` is the count of the step in progress.
fn read_micro_step(
    rows: &Mixture,
    s: Schedule,
    micro: u64,
    step_targets: &mut u64,
) -> Result<MicroBatch, DataError> {
    let accumulate = s.accumulate as u64;
    if micro.is_multiple_of(accumulate) {
        // Every rank counts the rows of all ranks, so that none has to ask the others.
        let count = accumulate * (s.world * s.batch) as u64;
        let first = s.first + micro / accumulate * count;
        *step_targets = (first..first + count).map(|k| rows.targets(s.seq, k)).sum::<Result<_, _>>()?;
    }
    let batch = read(rows, s, micro)?;
    Ok(MicroBatch { batch, step_targets: *step_targets })
}

/// Reads the batch of micro-step `micro`, counted from the start of the run.
pub(crate) fn read(rows: &Mixture, s: Schedule, micro: u64) -> Result<Batch, DataError> {
    let first = s.first + (micro * s.world as u64 + s.rank as u64) * s.batch as u64;
    let mut batch = Batch::default();
    batch.tokens.reserve(s.batch * s.seq);
    batch.targets.reserve(s.batch * s.seq);
    for k in first..first + s.batch as u64 {
        rows.read(s.seq, k, &mut batch)?;
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Order, source};
    use xlaunch_spec::job::Tokenizer;

    fn rows(text: &[u8], order: Order) -> Mixture {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs_err::write(&path, text).unwrap();
        (source::open(&[path], Tokenizer::Bytes, 256).unwrap(), order).into()
    }

    fn schedule(rank: usize, world: usize, batch: usize) -> Schedule {
        Schedule { first: 0, rank, world, batch, accumulate: 1, seq: 4 }
    }

    #[test]
    fn targets_are_tokens_shifted_by_one() {
        let rows = rows(b"abcdefghijklmnop", Order::new(16, 4, None));
        let loader = Loader::start(rows, schedule(0, 1, 2)).unwrap();
        let MicroBatch { batch, step_targets } = loader.next_batch().unwrap();
        assert_eq!(step_targets, 8);
        assert_eq!(batch.tokens, b"abcdefgh".map(i32::from));
        assert_eq!(batch.targets, b"bcdefghi".map(i32::from));
    }

    #[test]
    fn global_batch_does_not_depend_on_world_size_or_accumulation() {
        let rows = rows(&(0..=255).collect::<Vec<u8>>(), Order::new(256, 4, Some(9)));
        let one = |micro| read(&rows, schedule(0, 1, 4), micro).unwrap().tokens;
        let two = |rank, micro| read(&rows, schedule(rank, 2, 2), micro).unwrap().tokens;
        for step in 0..3 {
            assert_eq!(one(step), [two(0, step), two(1, step)].concat());
        }
        // Two micro-steps on one rank read the same sequences as one micro-step on two ranks.
        let accumulated = |micro| read(&rows, schedule(0, 1, 2), micro).unwrap().tokens;
        assert_eq!([accumulated(0), accumulated(1)].concat(), one(0));
    }

    #[test]
    fn runs_that_continue_each_other_read_every_window_of_each_epoch_once() {
        // 41 windows an epoch. Neither a batch nor a run ends with an epoch.
        let rows = rows(&(0..169).collect::<Vec<u8>>(), Order::new(169, 4, Some(9)));
        let mut starts = Vec::new();
        for (world, batch, micro_steps) in [(2, 3, 5), (3, 3, 5), (1, 6, 8)] {
            let first = starts.len() as u64;
            for micro in 0..micro_steps {
                for rank in 0..world {
                    let schedule = Schedule { first, ..schedule(rank, world, batch) };
                    let read = read(&rows, schedule, micro).unwrap();
                    starts.extend(read.tokens.chunks(4).map(|window| window[0]));
                }
            }
        }
        assert_eq!(starts.len(), 3 * 41);
        for (epoch, windows) in starts.chunks(41).enumerate() {
            let mut windows = windows.to_vec();
            windows.sort_unstable();
            let shift = windows[0];
            assert_eq!(windows, (0..41).map(|index| shift + 4 * index).collect::<Vec<_>>(), "epoch {epoch}");
        }
    }
}
