//! A flat arena: its parameters, each with name, shape, range, group and initial values.

use std::ops::Range;

use xlaunch_engine::{GROUP_CHUNK, GROUPS};
use xlaunch_spec::job::{EQUAL_SHARDS, JobSpec};

/// Alignment, in elements, of parameters and of the buckets into which large ones are cut. It aligns rows for tensor
/// cores in both element types, keeps parameters of two groups apart, and makes every shard of a bucket a whole number
/// of group chunks on 2, 4 and 8 ranks. A gap is shorter than this and ends where a parameter starts, so it is never in
/// two buckets.
pub const ALIGN: usize = GROUP_CHUNK * EQUAL_SHARDS;

/// Maximum number of elements in a [`Part`]: at least a millisecond of work; even, as normal numbers are drawn in
/// pairs.
const PART_LEN: usize = 1 << 18;

/// Distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform between the negative and the positive value of this bound.
    Uniform(f32),
}

/// Group of parameters with a learning rate of its own. Weight decay applies to all except vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// Matrices of blocks, A of adapters.
    Matrices,
    /// Scales and shifts of norms, biases.
    Vectors,
    /// Tables of tokens and positions. The first is also the head if it is tied.
    Embeddings,
    /// An untied head's table.
    Head,
    /// B of adapters.
    LoraB,
}

impl Group {
    /// All groups, in the order of their numbers.
    pub const ALL: [Self; GROUPS] =
        [Self::Matrices, Self::Vectors, Self::Embeddings, Self::Head, Self::LoraB];

    /// Returns the group's learning rate relative to the schedule's, and its weight decay.
    pub fn rates(self, spec: &JobSpec) -> (f64, f64) {
        let (scale, decay) = (&spec.lr_scale, spec.train.weight_decay);
        match self {
            Self::Matrices => (1.0, decay),
            Self::Vectors => (scale.vectors, 0.0),
            Self::Embeddings => (scale.embeddings, decay),
            Self::Head => (scale.head, decay),
            Self::LoraB => (scale.lora_b, decay),
        }
    }
}

/// One named parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name in checkpoints, such as `blocks.3.qkv.weight`.
    pub name: String,
    /// Shape in checkpoints: `[rows, cols]` for a matrix, `[len]` for a vector, with the number of experts before that
    /// for one per expert.
    pub shape: Vec<usize>,
    /// Range in the arenas. It is longer than the shape if rows are padded; the padding stays zero.
    pub range: Range<usize>,
    /// Its group, which decides about its learning rate and weight decay.
    pub group: Group,
    /// Initial values.
    pub init: Init,
}

impl Param {
    /// Returns the part of the range that checkpoints contain: all except the padding at its end.
    pub fn stored(&self) -> Range<usize> {
        self.range.start..self.range.start + self.shape.iter().product::<usize>()
    }

    /// Returns whether it has a matrix or a vector of each expert.
    pub(super) fn is_of_experts(&self) -> bool {
        self.shape.len() > if self.group == Group::Vectors { 1 } else { 2 }
    }
}

/// The parameters of an arena.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    /// All parameters, in order of offset.
    pub params: Vec<Param>,
    /// Number of elements of the arena.
    pub len: usize,
}

/// A part of one parameter's stored values: the unit in which threads compute them.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// Index of the first value among the parameter's stored values; always even.
    pub first: usize,
    /// Number of values, at most `PART_LEN`.
    pub len: usize,
}

impl Parameters {
    /// Returns the stored values of all parameters, in parts. No part contains gaps or padding.
    pub fn parts(&self) -> Vec<Part<'_>> {
        let parts = self.params.iter().flat_map(|param| {
            let stored = param.stored().len();
            let starts = (0..stored).step_by(PART_LEN);
            starts.map(move |first| Part { param, first, len: PART_LEN.min(stored - first) })
        });
        parts.collect()
    }

    /// Returns the gaps between the parameters.
    pub fn gaps(&self) -> Vec<Range<usize>> {
        let gaps = self.params.iter().zip(self.ends()).map(|(param, end)| param.range.end..end);
        gaps.filter(|gap| !gap.is_empty()).collect()
    }

    /// Returns the end offset of each parameter including the gap after it, for the bucket planner.
    pub fn ends(&self) -> Vec<usize> {
        let starts = self.params.iter().skip(1).map(|param| param.range.start);
        starts.chain([self.len]).collect()
    }

    /// Returns the number of parameters, without padding and gaps.
    pub fn parameters(&self) -> usize {
        self.params.iter().map(|param| param.stored().len()).sum()
    }

    /// Returns the group of each [`GROUP_CHUNK`] elements of an arena.
    pub fn groups(&self) -> Vec<u8> {
        let mut groups = vec![Group::Vectors as u8; self.len / GROUP_CHUNK];
        for param in &self.params {
            let chunks = param.range.start / GROUP_CHUNK..param.range.end.div_ceil(GROUP_CHUNK);
            groups[chunks].fill(param.group as u8);
        }
        groups
    }

    /// Returns bytes that are equal if and only if two arenas are. The rendezvous compares their digest.
    pub fn fingerprint(&self) -> Vec<u8> {
        let lines =
            self.params.iter().map(|param| format!("{} {:?} {:?}\n", param.name, param.shape, param.range));
        lines.collect::<String>().into_bytes()
    }

    /// Adds a parameter.
    pub(super) fn place(
        &mut self,
        name: String,
        shape: Vec<usize>,
        len: usize,
        group: Group,
        init: Init,
    ) -> Range<usize> {
        let range = self.len..self.len + len;
        self.len = range.end.next_multiple_of(ALIGN);
        self.params.push(Param { name, shape, range: range.clone(), group, init });
        range
    }
}
