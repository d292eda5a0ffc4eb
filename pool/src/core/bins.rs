//! Free blocks by size, in the two-level bins of TLSF (Masmano et al., 2004): one bit per bin, so that bit scans find
//! the next non-empty bin. The first level is the power of two of a size, which the second level divides into
//! [`SECOND_LEVELS`] bins. Sizes are in granules.

use super::blocks::{Block, Blocks, NONE};

/// Number of bins per power of two.
const SECOND_LEVELS: u32 = 32;
/// Number of powers of two; the first one holds all sizes below [`SECOND_LEVELS`].
const FIRST_LEVELS: usize = 28;
/// Number of blocks of one bin among which the best fit is chosen; bounds the time of a search.
const BEST_FIT_CANDIDATES: usize = 8;

/// End of the address range that a request prefers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Place {
    /// The low end: for persistent buffers such as parameters.
    #[default]
    Low,
    /// The high end: for buffers of one step.
    High,
}

/// Result of a search for a free block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The block of this index fits and may be used at once.
    Ready(u32),
    /// The block of this index fits, but the stream must first wait for other streams.
    NeedsWait(u32),
    /// No block fits.
    None,
}

/// The free blocks of one arena.
#[derive(Debug)]
pub(crate) struct Bins {
    /// Bit per first level: whether any of its bins holds a block.
    first: u32,
    /// Bit per bin of each first level.
    second: [u32; FIRST_LEVELS],
    /// First block of each bin, or [`NONE`]; a bin is a doubly linked list through the block headers.
    heads: Box<[[u32; SECOND_LEVELS as usize]; FIRST_LEVELS]>,
}

/// Returns the bin of blocks of this size.
fn bin_of(granules: u32) -> (usize, u32) {
    if granules < SECOND_LEVELS {
        return (0, granules);
    }
    let log = granules.ilog2();
    let shift = log - SECOND_LEVELS.ilog2();
    (shift as usize + 1, (granules >> shift) & (SECOND_LEVELS - 1))
}

impl Bins {
    pub(crate) fn new() -> Self {
        Self {
            first: 0,
            second: [0; FIRST_LEVELS],
            heads: Box::new([[NONE; SECOND_LEVELS as usize]; FIRST_LEVELS]),
        }
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

    /// Finds a block of at least `granules`: the best among the first few of the smallest bin that has one. A larger
    /// block that is `ready` is preferred to a smaller one that is not.
    pub(crate) fn find(
        &self,
        blocks: &Blocks,
        granules: u32,
        place: Place,
        ready: impl Fn(&Block) -> bool,
    ) -> Fit {
        let mut needs_wait = NONE;
        let mut bin = self.bin_from(bin_of(granules));
        while let Some((first, second)) = bin {
            let mut best = NONE;
            let mut index = self.heads[first][second as usize];
            for _ in 0..BEST_FIT_CANDIDATES {
                if index == NONE {
                    break;
                }
                let block = blocks.get(index);
                if block.granules >= granules {
                    let slot = if ready(block) { &mut best } else { &mut needs_wait };
                    if *slot == NONE || better(block, blocks.get(*slot), place) {
                        *slot = index;
                    }
                }
                index = block.bin_after;
            }
            if best != NONE {
                return Fit::Ready(best);
            }
            bin = self.bin_from((first, second + 1));
        }
        if needs_wait == NONE { Fit::None } else { Fit::NeedsWait(needs_wait) }
    }

    /// Returns the size of the largest block in granules.
    pub(crate) fn largest(&self, blocks: &Blocks) -> u32 {
        let Some(first) = self.first.checked_ilog2() else { return 0 };
        let second = self.second[first as usize].ilog2();
        let head = self.heads[first as usize][second as usize];
        chain(blocks, head).map(|index| blocks.get(index).granules).max().unwrap_or(0)
    }

    /// Returns whether the block is in the bin of its size and the bits of that bin are set.
    pub(crate) fn holds(&self, blocks: &Blocks, index: u32) -> bool {
        let (first, second) = bin_of(blocks.get(index).granules);
        self.first & 1 << first != 0
            && self.second[first] & 1 << second != 0
            && chain(blocks, self.heads[first][second as usize]).any(|other| other == index)
    }

    /// Returns the first non-empty bin, starting with this one.
    fn bin_from(&self, (first, second): (usize, u32)) -> Option<(usize, u32)> {
        let row = if second < SECOND_LEVELS { self.second[first] & (u32::MAX << second) } else { 0 };
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

/// Iterates over the blocks of a bin.
fn chain(blocks: &Blocks, head: u32) -> impl Iterator<Item = u32> {
    let some = |index: u32| (index != NONE).then_some(index);
    std::iter::successors(some(head), move |index| some(blocks.get(*index).bin_after))
}

/// Returns whether `a` fits better than `b`, given that both are large enough: the smaller one is better, then the one
/// nearer to the preferred end.
fn better(a: &Block, b: &Block, place: Place) -> bool {
    let by_place = match place {
        Place::Low => a.start.cmp(&b.start),
        Place::High => b.start.cmp(&a.start),
    };
    a.granules.cmp(&b.granules).then(by_place).is_lt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates adjacent free blocks of these sizes. Their indices are their positions in the list.
    fn free_blocks(sizes: &[u32]) -> (Blocks, Bins) {
        let (mut blocks, mut bins) = (Blocks::new(sizes.iter().sum()), Bins::new());
        for (index, granules) in sizes.iter().enumerate() {
            if index + 1 < sizes.len() {
                blocks.split(index as u32, *granules);
            }
            bins.insert(&mut blocks, index as u32);
        }
        (blocks, bins)
    }

    #[test]
    fn best_fit_is_smallest_block_then_nearest_to_preferred_end() {
        let (blocks, bins) = free_blocks(&[1040, 1030, 1030, 1030, 1050]);
        let find = |granules, place| bins.find(&blocks, granules, place, |_| true);
        assert_eq!(find(1025, Place::Low), Fit::Ready(1));
        assert_eq!(find(1025, Place::High), Fit::Ready(3));
        assert_eq!(find(1031, Place::Low), Fit::Ready(0));
    }

    #[test]
    fn larger_ready_block_is_preferred_to_smaller_pending_one() {
        let (blocks, bins) = free_blocks(&[10, 10, 5000]);
        let find = |ready: u32| bins.find(&blocks, 10, Place::Low, |block| block.granules == ready);
        assert_eq!(find(5000), Fit::Ready(2));
        assert_eq!(find(0), Fit::NeedsWait(0));
    }

    #[test]
    fn block_fits_exactly_the_requests_up_to_its_size() {
        for size in [1, 31, 32, 33, 63, 64, 65, 1000, 1024, 1_000_000, 1 << 30] {
            let (blocks, bins) = free_blocks(&[size]);
            for granules in
                [1, 31, 32, 33, 64, 999, size - 1, size].into_iter().filter(|granules| *granules > 0)
            {
                let expected = if granules <= size { Fit::Ready(0) } else { Fit::None };
                assert_eq!(
                    bins.find(&blocks, granules, Place::Low, |_| true),
                    expected,
                    "{granules} in {size}"
                );
            }
            assert_eq!(bins.find(&blocks, size + 1, Place::Low, |_| true), Fit::None, "{size}");
            assert_eq!(bins.largest(&blocks), size);
        }
    }

    #[test]
    fn removed_blocks_are_not_found() {
        let (mut blocks, mut bins) = free_blocks(&[1040, 1030, 70, 71]);
        assert!((0..4).all(|index| bins.holds(&blocks, index)));
        for (removed, left) in [(0, 1030), (1, 71), (3, 70), (2, 0)] {
            bins.remove(&mut blocks, removed);
            assert!(!bins.holds(&blocks, removed));
            assert_eq!(bins.largest(&blocks), left);
        }
        assert_eq!((bins.first, bins.second), (0, [0; FIRST_LEVELS]));
        assert_eq!(bins.find(&blocks, 1, Place::Low, |_| true), Fit::None);
    }

    #[test]
    fn block_is_held_only_if_bits_of_its_bin_are_set() {
        let (first, second) = bin_of(70);
        let (blocks, mut bins) = free_blocks(&[70]);
        assert!(bins.holds(&blocks, 0));
        bins.first = !(1 << first);
        assert!(!bins.holds(&blocks, 0));
        bins.first = 1 << first;
        bins.second[first] = !(1 << second);
        assert!(!bins.holds(&blocks, 0));
    }

    #[test]
    fn bins_are_ordered_by_size_and_cover_all_sizes() {
        let mut last = (0, 0);
        for granules in (1..5000).chain((13..32).map(|log| (1 << log) - 1)).chain([u32::MAX]) {
            let bin = bin_of(granules);
            assert!(
                bin >= last && bin.0 < FIRST_LEVELS && bin.1 < SECOND_LEVELS,
                "{granules}: {bin:?} after {last:?}"
            );
            last = bin;
        }
        assert_eq!(last, (FIRST_LEVELS - 1, SECOND_LEVELS - 1));
        assert_eq!(bin_of(31), (0, 31));
        assert_eq!(bin_of(32), (1, 0));
    }
}
