//! Tokens, targets and documents of a micro-step.

use xlaunch_engine::IGNORED;

/// B sequences of T tokens, and the token after each position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// `[B, T]`.
    pub tokens: Vec<i32>,
    /// `[B, T]`: the tokens shifted by one position, or `IGNORED` where no loss counts: unsupervised tokens, padding,
    /// and the last token of a document if documents are told apart.
    pub targets: Vec<i32>,
    /// `None`: each row is one document.
    pub documents: Option<DocumentBounds>,
}

/// Bounds of the document of each token. Padding is a document of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DocumentBounds {
    /// `[B, T]`: index within the row of the document's first token.
    pub first: Vec<i32>,
    /// `[B, T]`: index of its last token.
    pub last: Vec<i32>,
}

/// The batch of a micro-step, and the number of targets that count, or of pairs, in the whole step, on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// This rank's batch.
    pub batch: Batch,
    /// Number of targets, or of pairs of answers, of all ranks and micro-steps.
    pub step_targets: u64,
}

impl Batch {
    /// Appends the bounds of the documents of the last row, which start at 0 and at `starts`, and ignores the target of
    /// the last token of each but the last, because its successor belongs to another document. `starts` may contain
    /// `seq`, where the successor of the row's last token starts a document.
    pub(super) fn tell_apart(&mut self, starts: &[usize], seq: usize) {
        let row = self.targets.len() - seq;
        for start in starts {
            self.targets[row + start - 1] = IGNORED;
        }
        let inside = starts.iter().copied().filter(|start| *start < seq);
        let bounds = self.documents.get_or_insert_default();
        let mut first = 0;
        for end in inside.chain([seq]) {
            let as_i32 = |index: usize| i32::try_from(index).unwrap_or(i32::MAX);
            bounds.first.resize(row + end, as_i32(first));
            bounds.last.resize(row + end, as_i32(end - 1));
            first = end;
        }
    }

    /// Returns the number of targets that count.
    pub(crate) fn counted(&self) -> u64 {
        self.targets.iter().filter(|target| **target != IGNORED).count() as u64
    }
}

impl DocumentBounds {
    /// Bounds of `rows` rows of `seq` tokens that are one document each.
    pub(crate) fn whole_rows(rows: usize, seq: usize) -> Self {
        let last = i32::try_from(seq - 1).unwrap_or(i32::MAX);
        Self { first: vec![0; rows * seq], last: vec![last; rows * seq] }
    }
}
