//! Rows of a job's data: maps row k of a run to tokens, targets and documents.
//!
//! ```text
//! joined:  windows of T + 1 tokens of the whole sequence
//! masked:  the same windows, with the bounds of the documents in them
//! packed:  whole documents, and padding
//! pairs:   whole pairs of documents, a better and a worse answer, and padding
//! ```
//! Invariant: a row is a pure function of (data, seed, k).

use std::sync::Arc;

use xlaunch_engine::IGNORED;
use xlaunch_spec::job::DocumentMode;

use super::batch::Batch;
use super::labels::Boundaries;
use super::packing::{Packer, Packing, PackingSummary, Piece};
use super::{DataError, Order, Tokens};

/// Ids that are searched for starts of documents at a time.
const SEARCHED_IDS: u64 = 1 << 20;
/// Seed of rows that must not be in the order of the data but the same in every run.
const FIXED_SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// Token of padding: any id of a vocabulary.
const PADDING: i32 = 0;

/// The rows of one split.
#[derive(Clone, Debug)]
pub enum RowPlan {
    /// Documents joined to one text.
    Joined(Order),
    /// The same windows; documents are told apart.
    Masked(Order, Starts),
    /// Whole documents.
    Packed(Arc<Packing>),
    /// Whole pairs of documents.
    Pairs(Arc<Packing>, Starts),
}

/// Starts of documents.
#[derive(Clone, Debug)]
pub enum Starts {
    /// A document starts at each of these ids.
    At(i32),
    /// Ascending positions, 8 bytes per document.
    Positions(Arc<[u64]>),
}

impl From<Order> for RowPlan {
    fn from(order: Order) -> Self {
        Self::Joined(order)
    }
}

impl RowPlan {
    /// Plans rows of `seq` tokens for training, in the order of the data without a seed.
    pub(super) fn train(
        tokens: &Tokens,
        key: &str,
        mode: DocumentMode,
        seq: usize,
        seed: Option<u64>,
    ) -> Result<Self, DataError> {
        Self::new(tokens, key, mode, seq, [seed; 2])
    }

    /// Plans rows for evaluation. Packed rows are permuted, the same in every run, because the first rows in the order
    /// of the data have the most long documents.
    pub(crate) fn evaluation(
        tokens: &Tokens,
        key: &str,
        mode: DocumentMode,
        seq: usize,
    ) -> Result<Self, DataError> {
        Self::new(tokens, key, mode, seq, [None, Some(FIXED_SEED)])
    }

    fn new(
        tokens: &Tokens,
        key: &str,
        mode: DocumentMode,
        seq: usize,
        [windows, packed]: [Option<u64>; 2],
    ) -> Result<Self, DataError> {
        if mode == DocumentMode::Joined {
            return Ok(Self::Joined(Order::new(tokens.len(), seq, windows)));
        }
        let starts = match &tokens.labels().boundaries {
            Boundaries::Unknown => return Err(DataError::NoDocuments { key: key.into() }),
            Boundaries::EndOfText(id) => Starts::At(*id),
            Boundaries::File { path, tokens, .. } => {
                Starts::Positions(Boundaries::read(path, *tokens)?.into())
            }
        };
        if mode == DocumentMode::Masked {
            return Ok(Self::Masked(Order::new(tokens.len(), seq, windows), starts));
        }
        if tokens.labels().preferences {
            let mut packer = Packer::new(seq);
            let mut first = None;
            starts.for_each_document(tokens, |document| {
                match first.take() {
                    None => first = Some(document.start),
                    Some(start) => packer.add_pair(start..document.end),
                }
                Ok(())
            })?;
            let packing = packer.pack(packed).ok_or_else(|| DataError::NoPair { key: key.into(), seq })?;
            return Ok(Self::Pairs(Arc::new(packing), starts));
        }
        let mut packer = Packer::new(seq);
        let mut mask = Vec::new();
        starts.for_each_document(tokens, |document| {
            packer.add(document, |targets| {
                if tokens.labels().mask.is_none() {
                    return Ok(true);
                }
                mask.clear();
                let count = usize::try_from(targets.end - targets.start).unwrap_or(usize::MAX);
                tokens.read_mask(targets.start, count, &mut mask)?;
                Ok(mask.contains(&true))
            })
        })?;
        let packing = packer.pack(packed).ok_or_else(|| DataError::NothingToTrain { key: key.into() })?;
        Ok(Self::Packed(Arc::new(packing)))
    }

    /// Returns the number of rows per epoch.
    pub fn rows(&self) -> u64 {
        match self {
            Self::Joined(order) | Self::Masked(order, _) => order.windows(),
            Self::Packed(packing) | Self::Pairs(packing, _) => packing.summary().rows,
        }
    }

    /// Returns what packed rows hold.
    pub fn packing(&self) -> Option<PackingSummary> {
        match self {
            Self::Packed(packing) | Self::Pairs(packing, _) => Some(packing.summary()),
            _ => None,
        }
    }

    /// Appends row `k` of `seq` tokens to `batch`.
    pub(super) fn read(
        &self,
        tokens: &Tokens,
        seq: usize,
        k: u64,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        match self {
            Self::Joined(order) => window(tokens, seq, order.position(k), batch).map(drop),
            Self::Masked(order, starts) => {
                let position = order.position(k);
                let ids = window(tokens, seq, position, batch)?;
                batch.tell_apart(&starts.within(&ids, position), seq);
                Ok(())
            }
            Self::Packed(packing) => packed(tokens, seq, packing.row(k), None, batch),
            Self::Pairs(packing, starts) => packed(tokens, seq, packing.row(k), Some(starts), batch),
        }
    }

    /// Returns the number of targets of row `k` that count, without reading them if possible, or its number of pairs.
    pub(super) fn targets(&self, tokens: &Tokens, seq: usize, k: u64) -> Result<u64, DataError> {
        match self {
            Self::Pairs(packing, _) => Ok(packing.row(k).count() as u64),
            Self::Joined(_) if tokens.labels().mask.is_none() => Ok(seq as u64),
            Self::Packed(packing) if tokens.labels().mask.is_none() => {
                let targets = |piece: Piece| u64::from(piece.len) - u64::from(!piece.continues);
                Ok(packing.row(k).map(targets).sum())
            }
            _ => {
                let mut batch = Batch::default();
                self.read(tokens, seq, k, &mut batch)?;
                Ok(batch.counted())
            }
        }
    }
}

impl Starts {
    /// Calls `f` with each document, in order.
    fn for_each_document(
        &self,
        tokens: &Tokens,
        mut f: impl FnMut(std::ops::Range<u64>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut start = 0;
        let mut next = |end: u64| -> Result<(), DataError> {
            let document = start..end;
            start = end;
            if document.is_empty() { Ok(()) } else { f(document) }
        };
        match self {
            Self::Positions(starts) => starts.iter().try_for_each(|start| next(*start))?,
            Self::At(id) => {
                let mut ids = Vec::new();
                let mut at = 0;
                while at < tokens.len() {
                    let count = SEARCHED_IDS.min(tokens.len() - at);
                    ids.clear();
                    tokens.read(at, usize::try_from(count).unwrap_or(usize::MAX), &mut ids)?;
                    for (found, position) in ids.iter().zip(at..) {
                        if found == id {
                            next(position)?;
                        }
                    }
                    at += count;
                }
            }
        }
        next(tokens.len())
    }

    /// Returns the indices within a window where documents start, except the first index.
    fn within(&self, ids: &[i32], position: u64) -> Vec<usize> {
        match self {
            Self::At(id) => (1..ids.len()).filter(|at| ids[*at] == *id).collect(),
            Self::Positions(starts) => {
                let first = starts.partition_point(|start| *start <= position);
                let end = position + ids.len() as u64;
                let within = starts[first..].iter().take_while(|start| **start < end);
                within.filter_map(|start| usize::try_from(start - position).ok()).collect()
            }
        }
    }
}

/// Appends a window of `seq` tokens and its targets. Returns its `seq + 1` ids.
fn window(tokens: &Tokens, seq: usize, position: u64, batch: &mut Batch) -> Result<Vec<i32>, DataError> {
    let mut ids = Vec::with_capacity(seq + 1);
    tokens.read(position, seq + 1, &mut ids)?;
    batch.tokens.extend_from_slice(&ids[..seq]);
    let first = batch.targets.len();
    batch.targets.extend_from_slice(&ids[1..]);
    ignore(tokens, position + 1, &mut batch.targets[first..])?;
    Ok(ids)
}

/// Appends a row of whole documents. With `starts`, a piece may hold several.
fn packed(
    tokens: &Tokens,
    seq: usize,
    pieces: impl Iterator<Item = Piece>,
    inside: Option<&Starts>,
    batch: &mut Batch,
) -> Result<(), DataError> {
    let (row, mut ids, mut starts) = (batch.tokens.len(), Vec::new(), Vec::new());
    for Piece { start, len, continues } in pieces {
        let (len, first) = (len as usize, batch.tokens.len());
        starts.push(first - row);
        ids.clear();
        tokens.read(start, len + usize::from(continues), &mut ids)?;
        let more = inside.map(|inside| inside.within(&ids, start)).unwrap_or_default();
        starts.extend(more.into_iter().map(|at| first - row + at));
        batch.tokens.extend_from_slice(&ids[..len]);
        batch.targets.extend_from_slice(&ids[1..]);
        ignore(tokens, start + 1, &mut batch.targets[first..])?;
        batch.targets.resize(first + len, IGNORED);
    }
    let filled = batch.tokens.len() - row;
    if filled < seq {
        starts.push(filled);
    }
    batch.tokens.resize(row + seq, PADDING);
    batch.targets.resize(row + seq, IGNORED);
    // The first document starts at 0.
    batch.tell_apart(&starts[1..], seq);
    Ok(())
}

/// Ignores targets, ids from `position` on, whose loss does not count.
fn ignore(tokens: &Tokens, position: u64, targets: &mut [i32]) -> Result<(), DataError> {
    if tokens.labels().mask.is_none() {
        return Ok(());
    }
    let mut mask = Vec::with_capacity(targets.len());
    tokens.read_mask(position, targets.len(), &mut mask)?;
    targets.iter_mut().zip(mask).filter(|(_, counts)| !counts).for_each(|(target, _)| *target = IGNORED);
    Ok(())
}
