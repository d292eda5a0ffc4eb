//! Tables of pieces of matrices: one launch of a kernel works on all of them, wherever they are in memory.

use bytemuck::{Pod, Zeroable};

use crate::tensor::Tensor;

/// Consecutive elements of a matrix, in arrays of the whole model and among packed updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonPiece {
    /// Position in weights, gradients and momentum.
    pub at: usize,
    /// Position among the packed updates.
    pub packed: usize,
    /// Number of elements.
    pub len: usize,
    /// Position of the first element in its matrix.
    pub first: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Index of the matrix's first row among the rows of all matrices.
    pub row: usize,
    /// Factor of the update.
    pub factor: f32,
}

/// A piece as kernels read it: `Piece` in kernel.cu.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    at: u64,
    packed: u64,
    len: u64,
    first: u64,
    cols: u64,
    row: u64,
    factor: f32,
    unused: u32,
}

/// Pieces in the memory of a device.
#[derive(Debug)]
pub struct MuonPieces {
    entries: Tensor,
    pub(super) count: usize,
    /// Length of the longest piece.
    pub(super) longest: usize,
    /// Lengths that the arrays have at least: weights, packed updates, and rows.
    pub(super) ends: [usize; 3],
}

impl MuonPieces {
    /// Returns the entries of these pieces, to be copied to the device.
    ///
    /// # Panics
    /// If a piece is empty.
    pub(crate) fn bytes(pieces: &[MuonPiece]) -> Vec<u8> {
        assert!(pieces.iter().all(|piece| piece.len > 0 && piece.cols > 0), "empty pieces");
        let entry = |piece: &MuonPiece| {
            let MuonPiece { at, packed, len, first, cols, row, factor } = *piece;
            let [at, packed, len, first, cols, row] =
                [at, packed, len, first, cols, row].map(|number| number as u64);
            Entry { at, packed, len, first, cols, row, factor, unused: 0 }
        };
        bytemuck::cast_slice(&pieces.iter().map(entry).collect::<Vec<_>>()).to_vec()
    }

    /// Describes pieces whose entries are in this memory.
    pub(crate) fn new(entries: Tensor, pieces: &[MuonPiece]) -> Self {
        let end = |of: fn(&MuonPiece) -> usize| pieces.iter().map(of).max().unwrap_or(0);
        Self {
            entries,
            count: pieces.len(),
            longest: end(|piece| piece.len),
            ends: [
                end(|piece| piece.at + piece.len),
                end(|piece| piece.packed + piece.len),
                end(|piece| piece.row + (piece.first + piece.len).div_ceil(piece.cols)),
            ],
        }
    }

    /// Returns the memory with the entries.
    pub(super) fn entries(&self) -> &Tensor {
        &self.entries
    }

    /// Reads entries from memory of the host.
    #[expect(clippy::cast_possible_truncation, reason = "they were made from `usize`")]
    pub(super) fn parse(bytes: &[u8]) -> Vec<MuonPiece> {
        let piece = |bytes: &[u8]| {
            let Entry { at, packed, len, first, cols, row, factor, .. } = bytemuck::pod_read_unaligned(bytes);
            let [at, packed, len, first, cols, row] =
                [at, packed, len, first, cols, row].map(|number| number as usize);
            MuonPiece { at, packed, len, first, cols, row, factor }
        };
        bytes.chunks_exact(size_of::<Entry>()).map(piece).collect()
    }
}
