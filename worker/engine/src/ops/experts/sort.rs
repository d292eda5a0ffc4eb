//! Order of the choices by expert: a stable counting sort.

use xlaunch_pool::DType;

use super::{MAX_EXPERTS, index};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::ops::{Cuda, Op};
use crate::tensor::Slice;

/// Choices that one block counts and places, one per thread.
const SORT_CHUNK: usize = 256;
/// Threads of a block that computes where the choices of one expert start.
const SORT_STARTS_THREADS: usize = 256;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/sort.cu"),
    kernels: &["sort_count", "sort_starts", "sort_places"],
    macros: &[
        Macro::int("MAX_EXPERTS", MAX_EXPERTS),
        Macro::int("SORT_CHUNK", SORT_CHUNK),
        Macro::int("SORT_STARTS_THREADS", SORT_STARTS_THREADS),
    ],
    dynamic_shared: &[],
};

/// Sorts M choices by expert; those of an expert keep their order.
#[derive(Clone, Copy, Debug)]
pub struct SortByExpert<'a> {
    /// M.
    pub choices: usize,
    /// E.
    pub experts: usize,
    /// The expert whose choices come first. The order of experts wraps around.
    pub first: usize,
    /// (M,) I32, each below E.
    pub chosen: Slice<'a>,
    /// (E + 1,) I32: the row at which each expert starts, in their order, then M.
    pub offsets: Slice<'a>,
    /// (M,) I32: the choice of each row.
    pub choice_of: Slice<'a>,
    /// (M,) I32: the row of each choice.
    pub row_of: Slice<'a>,
    /// (E,) F32: number of choices of each expert.
    pub loads: Slice<'a>,
    /// ([`counters`](Self::counters),) I32: scratch memory with unspecified contents afterwards. Steps of decoding are
    /// captured, so they must not allocate any.
    pub scratch: Slice<'a>,
}

impl SortByExpert<'_> {
    /// Returns the length of the scratch memory: two counters for each expert in each chunk.
    pub fn counters(choices: usize, experts: usize) -> usize {
        2 * experts * choices.div_ceil(SORT_CHUNK)
    }
}

impl Op for SortByExpert<'_> {
    fn cpu(self, _: &Threads) {
        let (a, m) = (Access::new("sort_by_expert"), self.choices);
        let chosen = a.read_i32(self.chosen, m);
        let (offsets, loads) =
            (a.write_i32(self.offsets, self.experts + 1), a.write(self.loads, self.experts));
        let (choice_of, row_of) = (a.write_i32(self.choice_of, m), a.write_i32(self.row_of, m));
        let mut order: Vec<usize> = (0..m).collect();
        let place = |expert: i32| (index(expert) + self.experts - self.first) % self.experts;
        order.sort_by_key(|choice| place(chosen[*choice]));
        loads.fill(0.0);
        for (row, choice) in order.into_iter().enumerate() {
            (choice_of[row], row_of[choice]) = (signed(choice), signed(row));
            loads[index(chosen[choice])] += 1.0;
        }
        let mut start = 0;
        let (before, from_first) = loads.split_at(self.first);
        for (offset, load) in offsets.iter_mut().zip(from_first.iter().chain(before).chain(&[0.0])) {
            *offset = start;
            #[expect(clippy::cast_possible_truncation, reason = "a whole number of choices")]
            let load = *load as i32;
            start += load;
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { choices, experts, first, chosen, offsets, choice_of, row_of, loads, scratch } = self;
        assert!(experts <= MAX_EXPERTS && first < experts, "{experts} experts from {first}");
        [chosen, choice_of, row_of].into_iter().for_each(|x| expect(x, DType::I32, choices));
        expect(offsets, DType::I32, experts + 1);
        expect(loads, DType::F32, experts);
        let chunks = choices.div_ceil(SORT_CHUNK);
        let counters = Self::counters(choices, experts);
        expect(scratch, DType::I32, counters);
        let (counts, starts) = (scratch.slice(0..counters / 2), scratch.slice(counters / 2..counters));
        let each_chunk = Launch::blocks(chunks, SORT_CHUNK as u32);
        let each_expert = Launch::blocks(experts, SORT_STARTS_THREADS as u32);
        let places = args![chosen, starts, choice_of, row_of, choices, experts, first, chunks];
        // SAFETY: checked above; chosen experts are below E by the operation's contract, so every counter exists, and
        // all choices together have M places.
        unsafe {
            gpu.launch("sort_count", each_chunk, args![chosen, counts, choices, experts, first, chunks])?;
            gpu.launch("sort_starts", each_expert, args![counts, starts, offsets, loads, first, chunks])?;
            gpu.launch("sort_places", each_chunk, places)
        }
    }
}

fn signed(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
