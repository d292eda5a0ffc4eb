//! Free blocks by size: two levels of bins with a bit each, so that the next bin with anything in it is one instruction
//! away (Masmano et al., TLSF, 2004). Sizes are in granules. A power of two has [`SECOND`] bins.

use super::blocks::{Block, Blocks, NONE};

/// Bins of one power of two.
const SECOND: u32 = 32;
/// Powers of two, the first of which holds all sizes below `SECOND`.
const FIRST: usize = 28;
/// Blocks of a bin that are looked at before the next bin is taken.
const LOOK: usize = 8;

/// Which of several fitting blocks of one size is preferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Place {
    /// The lowest address, and the lower part of it: for buffers that stay.
    #[default]
    Low,
    /// The highest address, and the upper part of it: for buffers of one step.
    High,
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Fits, and may be used at once.
    Ready(u32),
    /// Fits, once streams have waited for others.
    Unordered(u32),
    Nothing,
}

/// The free blocks of one arena.
#[derive(Debug)]
pub(crate) struct Bins {
    first: u32,
    second: [u32; FIRST],
    heads: Box<[[u32; SECOND as usize]; FIRST]>,
}

/// The bin of blocks of this size.
fn bin_of(granules: u32) -> (usize, u32) {
    if granules < SECOND {
        return (0, granules);
    }
    let log = granules.ilog2();
    let shift = log - SECOND.ilog2();
    (shift as usize + 1, (granules >> shift) & (SECOND - 1))
}

impl Bins {
    pub(crate) fn new() -> Self {
        Self { first: 0, second: [0; FIRST], heads: Box::new([[NONE; SECOND as usize]; FIRST]) }
    }

    pub(crate) fn insert(&mut self, blocks: &mut Blocks, index: u32) {
        let (first, second) = bin_of(blocks.get(index).granules);
        let head = std::mem::replace(&mut self.heads[first][second as usize], index);
        let block = blocks.get_mut(index);
        (block.bin_before, block.bin_after) = (NONE, head);
        if head != NONE {
            blocks.get_mut(head).bin_before = index;
        }
        self.first |= 1 << first;
        self.second[first] |= 1 << second;
    }

    pub(crate) fn remove(&mut self, blocks: &mut Blocks, index: u32) {
        let block = blocks.get(index);
        let (granules, bin_before, bin_after) = (block.granules, block.bin_before, block.bin_after);
        if bin_after != NONE {
            blocks.get_mut(bin_after).bin_before = bin_before;
        }
        if bin_before != NONE {
            blocks.get_mut(bin_before).bin_after = bin_after;
            return;
        }
        let (first, second) = bin_of(granules);
        self.heads[first][second as usize] = bin_after;
        if bin_after == NONE {
            self.second[first] &= !(1 << second);
            if self.second[first] == 0 {
                self.first &= !(1 << first);
            }
        }
    }

    /// A block of at least `granules`: the best of the first few of the smallest bin that has one, of those that are
    /// `ready` if there are any.
    pub(crate) fn find(
        &self,
        blocks: &Blocks,
        granules: u32,
        place: Place,
        ready: impl Fn(&Block) -> bool,
    ) -> Found {
        let mut unordered = NONE;
        let mut bin = self.bin_from(bin_of(granules));
        while let Some((first, second)) = bin {
            let mut best = NONE;
            let mut index = self.heads[first][second as usize];
            for _ in 0..LOOK {
                if index == NONE {
                    break;
                }
                let block = blocks.get(index);
                if block.granules >= granules {
                    let slot = if ready(block) { &mut best } else { &mut unordered };
                    if *slot == NONE || better(block, blocks.get(*slot), place) {
                        *slot = index;
                    }
                }
                index = block.bin_after;
            }
            if best != NONE {
                return Found::Ready(best);
            }
            bin = self.bin_from((first, second + 1));
        }
        if unordered == NONE { Found::Nothing } else { Found::Unordered(unordered) }
    }

    /// Granules of the longest block.
    pub(crate) fn longest(&self, blocks: &Blocks) -> u32 {
        let Some(first) = self.first.checked_ilog2() else { return 0 };
        let second = self.second[first as usize].ilog2();
        let head = self.heads[first as usize][second as usize];
        chain(blocks, head).map(|index| blocks.get(index).granules).max().unwrap_or(0)
    }

    /// Whether the block is in the bin of its size, and that bin's bits are set.
    pub(crate) fn holds(&self, blocks: &Blocks, index: u32) -> bool {
        let (first, second) = bin_of(blocks.get(index).granules);
        self.first & 1 << first != 0
            && self.second[first] & 1 << second != 0
            && chain(blocks, self.heads[first][second as usize]).any(|other| other == index)
    }

    /// The first bin with anything in it, from this one on.
    fn bin_from(&self, (first, second): (usize, u32)) -> Option<(usize, u32)> {
        let row = if second < SECOND { self.second[first] & (u32::MAX << second) } else { 0 };
        if row != 0 {
            return Some((first, row.trailing_zeros()));
        }
        let rows = self.first & u32::MAX.checked_shl(first as u32 + 1).unwrap_or(0);
        (rows != 0).then(|| {
            let first = rows.trailing_zeros() as usize;
            (first, self.second[first].trailing_zeros())
        })
    }
}

/// The blocks of a bin.
fn chain(blocks: &Blocks, head: u32) -> impl Iterator<Item = u32> {
    let some = |index: u32| (index != NONE).then_some(index);
    std::iter::successors(some(head), move |index| some(blocks.get(*index).bin_after))
}

fn better(a: &Block, b: &Block, place: Place) -> bool {
    if a.granules != b.granules {
        return a.granules < b.granules;
    }
    match place {
        Place::Low => a.start < b.start,
        Place::High => a.start > b.start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_in_order_of_size_and_cover_all_sizes() {
        let mut last = (0, 0);
        for granules in (1..5000).chain((13..32).map(|log| (1 << log) - 1)).chain([u32::MAX]) {
            let bin = bin_of(granules);
            assert!(bin >= last && bin.0 < FIRST && bin.1 < SECOND, "{granules}: {bin:?} after {last:?}");
            last = bin;
        }
        assert_eq!(last, (FIRST - 1, SECOND - 1));
        assert_eq!(bin_of(31), (0, 31));
        assert_eq!(bin_of(32), (1, 0));
    }
}
