//! Documents that share rows of a batch.
//!
//! A row of T tokens may hold several documents one after another. A query sees only keys of its own document, and
//! positions count from the first token of each document.

use xlaunch_pool::DType;

use crate::cpu::Access;
use crate::cuda::expect;
use crate::tensor::Slice;

/// Bounds of each token's document. Within a row they never decrease.
#[derive(Clone, Copy, Debug)]
pub struct Documents<'a> {
    /// (B, T) I32: index within the row of the first token of the document.
    pub first: Slice<'a>,
    /// (B, T) I32: index within the row of its last token.
    pub last: Slice<'a>,
}

/// The same on the CPU; without documents, each row is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds<'a> {
    seq: usize,
    arrays: Option<[&'a [i32]; 2]>,
}

impl<'a> Documents<'a> {
    /// Checks the operands for `rows` tokens.
    pub(crate) fn check(self, rows: usize) {
        expect(self.first, DType::I32, rows);
        expect(self.last, DType::I32, rows);
    }

    /// Reads the bounds of `rows` tokens in rows of `seq`.
    pub(crate) fn read(documents: Option<Self>, a: &'a Access, rows: usize, seq: usize) -> Bounds<'a> {
        let arrays =
            documents.map(|Self { first, last }| [first, last].map(|bounds| a.read_i32(bounds, rows)));
        Bounds { seq, arrays }
    }
}

impl Bounds<'_> {
    /// Returns the index of the first token of the document of token `at` in row `row`.
    #[inline(always)]
    pub(crate) fn first(self, row: usize, at: usize) -> usize {
        self.arrays.map_or(0, |[first, _]| index(first[row * self.seq + at]))
    }

    /// Returns the index of the last token.
    #[inline(always)]
    pub(crate) fn last(self, row: usize, at: usize) -> usize {
        self.arrays.map_or(self.seq - 1, |[_, last]| index(last[row * self.seq + at]))
    }
}

/// Converts a bound to an index. The caller has checked the bounds; a negative one would fail the bounds check.
fn index(bound: i32) -> usize {
    usize::try_from(bound).unwrap_or(usize::MAX / (1 << 24))
}
