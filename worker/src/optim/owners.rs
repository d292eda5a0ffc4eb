//! The ranks that make matrices orthogonal, and the places of the updates. Pure.
//!
//! ```text
//! packed updates:   | part of rank 0               | part of rank 1               |
//!                   | 3 of shape (768, 768) | 1 .. | 2 of shape (768, 768) | 2 .. |
//! ```
//! One rank, the owner, makes a matrix orthogonal. Then the parts of all ranks are all-gathered: they are equally long,
//! with gaps at their ends. Within a part, matrices of one shape follow each other, so that they are multiplied
//! together. Without owners there is a single part, with all matrices, on every rank.
//!
//! Matrices are assigned by longest processing time first: the most expensive remaining matrix goes to the rank with
//! the least work so far. The slowest rank then takes at most 4/3 of the shortest possible time (Graham, 1969).

use std::cmp::Reverse;
use std::ops::Range;

use xlaunch_engine::{MUON_ALIGN, orthogonal_operations};
use xlaunch_spec::job::Owners;

/// Rows and columns.
pub(super) type Shape = (usize, usize);

/// Owners pay off if they save this many floating-point operations for each byte of updates that is exchanged: GEMMs of
/// 200 TFLOP/s, while 200 GB/s are exchanged.
const OPERATIONS_PER_BYTE: u64 = 1000;
/// Operations to save on top of that: the time that it takes to start an exchange, about 25 us.
const OPERATIONS_PER_EXCHANGE: u64 = 5_000_000_000;

/// Places of matrices among the packed updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    /// Place of each matrix.
    pub(super) places: Vec<usize>,
    /// Owner of each matrix: 0 without owners.
    pub(super) owners: Vec<usize>,
    /// Length of a part.
    pub(super) part: usize,
    /// Number of parts.
    pub(super) parts: usize,
}

/// Matrices of one shape in a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) shape: Shape,
    /// Range in the part.
    pub(super) range: Range<usize>,
}

impl Packing {
    /// Packs matrices of these shapes. `element_bytes` is the size of an element of an update.
    pub(super) fn new(owners: Owners, shapes: &[Shape], ranks: usize, element_bytes: usize) -> Self {
        let assigned = assign(shapes, ranks);
        let is_owned = match owners {
            Owners::Always => ranks > 1,
            Owners::Never => false,
            Owners::Auto => pays_off(shapes, &assigned, ranks, element_bytes),
        };
        let (owners, parts) = if is_owned { (assigned, ranks) } else { (vec![0; shapes.len()], 1) };
        let mut order: Vec<usize> = (0..shapes.len()).collect();
        order.sort_by_key(|matrix| (owners[*matrix], shapes[*matrix], *matrix));
        let (mut places, mut ends) = (vec![0; shapes.len()], vec![0; parts]);
        let mut previous = None;
        for matrix in order {
            let (owner, shape) = (owners[matrix], shapes[matrix]);
            let end: &mut usize = &mut ends[owner];
            if previous.replace((owner, shape)) != Some((owner, shape)) {
                *end = end.next_multiple_of(MUON_ALIGN);
            }
            places[matrix] = *end;
            *end += shape.0 * shape.1;
        }
        let part = ends.into_iter().max().unwrap_or(0).next_multiple_of(MUON_ALIGN);
        for (place, owner) in places.iter_mut().zip(&owners) {
            *place += owner * part;
        }
        Self { places, owners, part, parts }
    }

    /// Returns whether each matrix is made orthogonal by one of several ranks.
    pub(super) fn is_owned(&self) -> bool {
        self.parts > 1
    }

    /// Returns the part of the packed updates that rank `rank` makes orthogonal.
    pub(super) fn own(&self, rank: usize) -> Range<usize> {
        let start = if self.is_owned() { rank * self.part } else { 0 };
        start..start + self.part
    }

    /// Returns the matrices that rank `rank` makes orthogonal.
    pub(super) fn owned_by(&self, rank: usize) -> impl Iterator<Item = usize> {
        let is_owned = self.is_owned();
        (0..self.owners.len()).filter(move |matrix| !is_owned || self.owners[*matrix] == rank)
    }

    /// Returns the matrices that rank `rank` makes orthogonal, by shape.
    pub(super) fn batches(&self, shapes: &[Shape], rank: usize) -> Vec<Batch> {
        let part = self.own(rank).start;
        let mut own: Vec<usize> = self.owned_by(rank).collect();
        own.sort_by_key(|matrix| self.places[*matrix]);
        let mut batches: Vec<Batch> = Vec::new();
        for matrix in own {
            let (shape, place) = (shapes[matrix], self.places[matrix] - part);
            let end = place + shape.0 * shape.1;
            match batches.last_mut().filter(|batch| batch.shape == shape) {
                Some(batch) => batch.range.end = end,
                None => batches.push(Batch { shape, range: place..end }),
            }
        }
        batches
    }
}

/// Returns a rank for each matrix.
fn assign(shapes: &[Shape], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shapes.len()).collect();
    // The sort is stable: equal matrices are assigned in their order.
    order.sort_by_key(|matrix| Reverse(orthogonal_operations(shapes[*matrix])));
    let (mut owners, mut loads) = (vec![0; shapes.len()], vec![0; ranks.max(1)]);
    for matrix in order {
        let least = (0..loads.len()).min_by_key(|rank| loads[*rank]).unwrap_or(0);
        owners[matrix] = least;
        loads[least] += orthogonal_operations(shapes[matrix]);
    }
    owners
}

/// Estimates whether owners save more time than the exchange of updates takes.
fn pays_off(shapes: &[Shape], owners: &[usize], ranks: usize, element_bytes: usize) -> bool {
    let mut loads = vec![0; ranks.max(1)];
    owners.iter().zip(shapes).for_each(|(owner, shape)| loads[*owner] += orthogonal_operations(*shape));
    let saved = loads.iter().sum::<u64>() - loads.iter().max().copied().unwrap_or(0);
    let elements: usize = shapes.iter().map(|(rows, cols)| rows * cols).sum();
    // Each rank receives the parts of the others.
    let bytes = (elements * element_bytes) as u64 * (ranks as u64 - 1) / ranks as u64;
    saved > OPERATIONS_PER_BYTE * bytes + OPERATIONS_PER_EXCHANGE
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn most_expensive_matrices_are_assigned_first_and_ties_by_index() {
        let shapes = [(4, 4), (8, 8), (4, 8), (8, 8), (4, 4)];
        assert_eq!(assign(&shapes, 2), [1, 0, 0, 1, 1]);
        assert_eq!(assign(&shapes, 3), [2, 0, 2, 1, 2]);
        assert_eq!(assign(&shapes, 1), [0; 5]);
    }

    #[test]
    fn matrices_of_one_shape_are_next_to_each_other_in_parts_of_equal_length() {
        let shapes = [(4, 16), (8, 8), (4, 16), (8, 8), (8, 8)];
        let packing = Packing::new(Owners::Always, &shapes, 2, 2);
        assert_eq!((packing.part, packing.parts, packing.is_owned()), (256, 2, true));
        let batch = |shape, range| Batch { shape, range };
        assert_eq!(packing.batches(&shapes, 0), [batch((8, 8), 0..128)]);
        assert_eq!(packing.batches(&shapes, 1), [batch((4, 16), 0..128), batch((8, 8), 128..192)]);
        assert_eq!(packing.own(1), 256..512);
        let everywhere = Packing::new(Owners::Never, &shapes, 2, 2);
        assert_eq!(everywhere.batches(&shapes, 1), [batch((4, 16), 0..128), batch((8, 8), 128..320)]);
        assert_eq!(everywhere.own(1), 0..384);
    }

    #[test]
    fn owners_pay_off_for_real_models_on_several_ranks() {
        let llama = |layers, dim, ffn| {
            let block = [(dim, dim), (dim, dim), (dim, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)];
            (0..layers).flat_map(|_| block).collect::<Vec<Shape>>()
        };
        for (shapes, ranks, expected) in [
            (llama(12, 384, 1536), 2, true),
            (llama(12, 768, 2048), 8, true),
            (llama(2, 128, 512), 8, false),
            (llama(12, 768, 2048), 1, false),
        ] {
            assert_eq!(Packing::new(Owners::Auto, &shapes, ranks, 2).is_owned(), expected, "{:?}", shapes[0]);
        }
    }

    proptest! {
        #[test]
        fn every_matrix_has_one_place_and_the_work_is_balanced(
            shapes in prop::collection::vec((1usize..40, 1usize..40), 1..40),
            ranks in 1usize..9,
        ) {
            let packing = Packing::new(Owners::Always, &shapes, ranks, 4);
            let mut seen = vec![false; packing.part * packing.parts];
            let mut loads = vec![0; ranks];
            for (rank, load) in loads.iter_mut().enumerate() {
                for Batch { shape, range } in packing.batches(&shapes, rank) {
                    prop_assert!(range.start.is_multiple_of(MUON_ALIGN) && range.end <= packing.part);
                    let own = packing.own(rank).start;
                    let places = range.clone().step_by(shape.0 * shape.1).map(|place| own + place);
                    for place in places {
                        let matrix = packing.places.iter().position(|other| *other == place).unwrap();
                        prop_assert_eq!(shapes[matrix], shape);
                        *load += orthogonal_operations(shape);
                    }
                    for taken in &mut seen[own + range.start..own + range.end] {
                        prop_assert!(!std::mem::replace(taken, true));
                    }
                }
            }
            let total: u64 = shapes.iter().map(|shape| orthogonal_operations(*shape)).sum();
            prop_assert_eq!(loads.iter().sum::<u64>(), total);
            let largest = shapes.iter().map(|shape| orthogonal_operations(*shape)).max().unwrap();
            prop_assert!(*loads.iter().max().unwrap() <= total / ranks as u64 + largest);
        }
    }
}
