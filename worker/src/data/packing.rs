//! Packs whole documents into rows of T tokens: best fit, longest documents first.
//!
//! Pure: the same lengths give the same rows. The contents of rows change from epoch to epoch: documents of the same
//! length are exchanged and rows are permuted, by seed and epoch. So every epoch has the same number of rows, and row k
//! is found without a plan of its epoch.
//!
//! Time: O(n log n) for n documents, once. Memory: at most 64 bytes per document while packing, 24 afterwards.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use xlaunch_spec::quantities::counted;

use super::order::permute;
use crate::random::mix;

/// A document, or a part of one that is longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Position of the first token.
    pub(super) start: u64,
    pub(super) len: u32,
    /// True if the document continues, so that the last token, too, has a successor to predict.
    pub(super) continues: bool,
}

/// Properties of a packing that a user is told.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PackingSummary {
    /// Rows per epoch.
    pub rows: u64,
    /// Documents in them.
    pub documents: u64,
    /// Documents that were split because they are longer than a row.
    pub split: u64,
    /// Documents and parts that were left out because no loss of theirs counts.
    pub left_out: u64,
    /// Pairs that were left out because they are longer than a row. `None` unless documents are pairs.
    pub too_long: Option<u64>,
    /// Share of the rows' positions without a token, from 0 to 1.
    pub padding: f64,
}

impl fmt::Display for PackingSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, documents, split, left_out, too_long, padding } = self;
        let documents = counted(*documents, if too_long.is_some() { "pair" } else { "document" });
        let rows = counted(*rows, "sequence");
        write!(f, "{documents} packed into {rows} per epoch, {:.1} % padding", 100.0 * padding)?;
        if let Some(count @ 1..) = too_long {
            write!(f, "; left out: {} longer than model.seq", counted(*count, "pair"))?;
        }
        if *split > 0 {
            write!(f, "; split: {} longer than model.seq", counted(*split, "document"))?;
        }
        if *left_out > 0 {
            write!(f, "; left out: {} without a token to learn", counted(*left_out, "part"))?;
        }
        Ok(())
    }
}

/// Rows of documents.
#[derive(Clone, Debug)]
pub struct Packing {
    /// Longest first; those of the same length in the order of the data.
    pieces: Vec<Piece>,
    /// Indices of `pieces`, row by row.
    members: Vec<u32>,
    /// The end of each row in `members`. Rows are in the order of their first document in the data.
    ends: Vec<u32>,
    /// `None`: every epoch is the same, in this order.
    seed: Option<u64>,
    summary: PackingSummary,
}

/// Collects the pieces to pack.
#[derive(Debug, Default)]
pub(super) struct Packer {
    seq: usize,
    pieces: Vec<Piece>,
    summary: PackingSummary,
}

impl Packer {
    /// Starts to pack rows of `seq` tokens.
    pub(super) fn new(seq: usize) -> Self {
        Self { seq, ..Self::default() }
    }

    /// Adds a document. `counts` tells whether the loss of predicting any of these tokens counts.
    pub(super) fn add<E>(
        &mut self,
        document: Range<u64>,
        mut counts: impl FnMut(Range<u64>) -> Result<bool, E>,
    ) -> Result<(), E> {
        let seq = self.seq as u64;
        let (mut start, before) = (document.start, self.pieces.len());
        while start < document.end {
            let end = document.end.min(start + seq);
            let continues = end < document.end;
            // The first token of a document has no predecessor.
            let targets = start + 1..end + u64::from(continues);
            if !targets.is_empty() && counts(targets)? {
                let len = u32::try_from(end - start).unwrap_or(u32::MAX);
                self.pieces.push(Piece { start, len, continues });
            } else {
                self.summary.left_out += 1;
            }
            start = end;
        }
        self.summary.documents += u64::from(self.pieces.len() > before);
        self.summary.split += u64::from(document.end - document.start > seq);
        Ok(())
    }

    /// Adds a pair of documents, which is not split.
    pub(super) fn add_pair(&mut self, pair: Range<u64>) {
        let too_long = self.summary.too_long.get_or_insert(0);
        match u32::try_from(pair.end - pair.start) {
            Ok(len) if len as usize <= self.seq => {
                self.pieces.push(Piece { start: pair.start, len, continues: false });
                self.summary.documents += 1;
            }
            _ => *too_long += 1,
        }
    }

    /// Packs the pieces; `None` if there are none, or more than 2^32.
    pub(super) fn pack(mut self, seed: Option<u64>) -> Option<Packing> {
        u32::try_from(self.pieces.len()).ok().filter(|pieces| *pieces > 0)?;
        // A stable sort: it keeps the order of the data.
        self.pieces.shrink_to_fit();
        self.pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len));
        let (row_of, rows) = best_fit(&self.pieces, self.seq);
        let (members, ends) = by_row(&self.pieces, &row_of, rows);
        let tokens: u64 = self.pieces.iter().map(|piece| u64::from(piece.len)).sum();
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let padding = 1.0 - tokens as f64 / (rows as f64 * self.seq as f64);
        let summary = PackingSummary { rows: rows as u64, padding, ..self.summary };
        Some(Packing { pieces: self.pieces, members, ends, seed, summary })
    }
}

impl Packing {
    /// Returns the pieces of row `k` of a run.
    pub(super) fn row(&self, k: u64) -> impl Iterator<Item = Piece> + '_ {
        let (epoch, index) = (k / self.summary.rows, k % self.summary.rows);
        let key = self.seed.map(|seed| mix(seed ^ mix(epoch)));
        let index = key.map_or(index, |key| permute(index, self.summary.rows, key));
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let first = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        let members = &self.members[first as usize..self.ends[index] as usize];
        members
            .iter()
            .map(move |member| self.pieces[key.map_or(*member as usize, |key| self.exchanged(*member, key))])
    }

    /// Returns the rows of an epoch, and what they hold.
    pub fn summary(&self) -> PackingSummary {
        self.summary
    }

    /// Returns the piece in the place of another one of the same length.
    fn exchanged(&self, member: u32, key: u64) -> usize {
        let member = member as usize;
        let len = self.pieces[member].len;
        let first = self.pieces.partition_point(|piece| piece.len > len);
        let end = self.pieces.partition_point(|piece| piece.len >= len);
        let key = mix(key ^ u64::from(len));
        first + usize::try_from(permute((member - first) as u64, (end - first) as u64, key)).unwrap_or(0)
    }
}

/// Puts each piece into the fullest row that has room for it. Returns the row of each piece, and the number of rows.
fn best_fit(pieces: &[Piece], seq: usize) -> (Vec<u32>, usize) {
    let seq = u32::try_from(seq).unwrap_or(u32::MAX);
    // Rows by the number of free positions.
    let mut open: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut rows = 0;
    let row_of = pieces.iter().map(|piece| {
        let (row, free) = match open.range_mut(piece.len..).next().map(|(free, rows)| (*free, rows.pop())) {
            Some((free, Some(row))) => {
                if open.get(&free).is_some_and(Vec::is_empty) {
                    open.remove(&free);
                }
                (row, free)
            }
            _ => {
                rows += 1;
                (rows - 1, seq)
            }
        };
        if free > piece.len {
            open.entry(free - piece.len).or_default().push(row);
        }
        row
    });
    let row_of: Vec<u32> = row_of.collect();
    (row_of, rows as usize)
}

/// Lists the pieces of each row, and orders rows by their first piece in the data.
fn by_row(pieces: &[Piece], row_of: &[u32], rows: usize) -> (Vec<u32>, Vec<u32>) {
    let mut firsts = vec![(u64::MAX, 0_u32); rows];
    for (piece, row) in pieces.iter().zip(row_of) {
        let (first, count) = &mut firsts[*row as usize];
        *first = piece.start.min(*first);
        *count += 1;
    }
    let mut order: Vec<u32> = (0..).take(rows).collect();
    order.sort_unstable_by_key(|row| firsts[*row as usize].0);
    let (mut ends, mut next, mut at) = (Vec::with_capacity(rows), vec![0; rows], 0);
    for row in order {
        next[row as usize] = at;
        at += firsts[row as usize].1;
        ends.push(at);
    }
    let mut members = vec![0; pieces.len()];
    for (piece, row) in (0_u32..).zip(row_of) {
        let place = &mut next[*row as usize];
        members[*place as usize] = piece;
        *place += 1;
    }
    (members, ends)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::convert::Infallible;

    use super::*;

    fn packed(lengths: &[u64], seq: usize, seed: Option<u64>) -> Packing {
        let mut packer = Packer::new(seq);
        let mut start = 0;
        for length in lengths {
            packer.add(start..start + length, |_| Ok::<_, Infallible>(true)).unwrap();
            start += length;
        }
        packer.pack(seed).unwrap()
    }

    fn rows(packing: &Packing, epoch: u64) -> Vec<Vec<Piece>> {
        let rows = packing.summary().rows;
        (epoch * rows..(epoch + 1) * rows).map(|k| packing.row(k).collect()).collect()
    }

    /// Lengths from 2 to 40, many of them equal.
    fn lengths(count: u64) -> Vec<u64> {
        (0..count).map(|i| 2 + mix(i) % 39).collect()
    }

    #[test]
    fn every_epoch_has_every_document_once_and_no_row_is_too_long() {
        let packing = packed(&lengths(1000), 64, Some(7));
        let mut orders = BTreeSet::new();
        for epoch in 0..3 {
            let rows = rows(&packing, epoch);
            assert!(rows.iter().all(|row| row.iter().map(|piece| piece.len).sum::<u32>() <= 64));
            let mut starts: Vec<u64> = rows.concat().iter().map(|piece| piece.start).collect();
            assert!(orders.insert(starts.clone()), "epoch {epoch} repeats an order");
            starts.sort_unstable();
            let mut expected = 0;
            for (start, length) in starts.iter().zip(lengths(1000)) {
                assert_eq!(*start, expected);
                expected += length;
            }
        }
        assert!(packing.summary().padding < 0.01, "{:?}", packing.summary());
    }

    #[test]
    fn documents_go_to_the_fullest_row_with_room_for_them() {
        // 7 leaves 3 free and 6 leaves 4 free: 3 fits exactly with 7, then 4 with 6.
        let packing = packed(&[3, 6, 4, 7], 10, None);
        let found: Vec<Vec<u32>> =
            rows(&packing, 0).iter().map(|row| row.iter().map(|piece| piece.len).collect()).collect();
        assert_eq!(found, [vec![7, 3], vec![6, 4]]);
        assert_eq!(packing.summary().padding, 0.0);
    }

    #[test]
    fn rows_depend_on_seed_and_epoch_only() {
        let [one, same, other] = [3, 3, 4].map(|seed| rows(&packed(&lengths(300), 64, Some(seed)), 5));
        assert_eq!(one, same);
        assert_ne!(one, other);
        let fixed = packed(&lengths(300), 64, None);
        assert_eq!(rows(&fixed, 0), rows(&fixed, 1));
    }

    #[test]
    fn longer_documents_are_split_and_predict_the_first_token_of_the_next_part() {
        let packing = packed(&[25, 4], 10, None);
        let summary = packing.summary();
        assert_eq!((summary.split, summary.documents, summary.rows), (1, 2, 3));
        let mut pieces = rows(&packing, 0).concat();
        pieces.sort_unstable_by_key(|piece| piece.start);
        let parts: Vec<_> = pieces.iter().map(|piece| (piece.start, piece.len, piece.continues)).collect();
        assert_eq!(parts, [(0, 10, true), (10, 10, true), (20, 5, false), (25, 4, false)]);
    }

    #[test]
    fn pairs_are_never_split() {
        let mut packer = Packer::new(10);
        [0..4, 4..15, 15..25].into_iter().for_each(|pair| packer.add_pair(pair));
        let packing = packer.pack(None).unwrap();
        let found: Vec<_> = rows(&packing, 0).concat().iter().map(|piece| (piece.start, piece.len)).collect();
        assert_eq!(found, [(0, 4), (15, 10)]);
        let summary = packing.summary().to_string();
        assert!(summary.starts_with("2 pairs packed into 2 sequences per epoch"), "{summary}");
        assert!(summary.ends_with("; left out: 1 pair longer than model.seq"), "{summary}");
    }

    #[test]
    fn documents_without_a_loss_that_counts_are_left_out() {
        let mut packer = Packer::new(10);
        // A single token has nothing to predict.
        for document in [0..1, 1..5, 5..9] {
            packer.add(document, |targets| Ok::<_, Infallible>(targets.contains(&7))).unwrap();
        }
        let packing = packer.pack(None).unwrap();
        assert_eq!(packing.summary().left_out, 2);
        assert_eq!(packing.row(0).map(|piece| piece.start).collect::<Vec<_>>(), [5]);
        assert!(Packer::new(10).pack(None).is_none());
    }
}
