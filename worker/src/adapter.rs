//! A trained adapter (LoRA) in host memory, and its addition to the weights that it adapts.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::ThreadPool;
use xlaunch_spec::job::{LoraSection, SpecError};
use xlaunch_spec::model::ModelShape;

use crate::checkpoint::{self, Piece, Sink, State};
use crate::error::Result;
use crate::model::layout::{Layout, ModuleRanges};
use crate::random::mix;

/// Values of an adapter per piece.
const ADAPTER_PIECE_LEN: usize = 1 << 20;

/// The adapters of a model's layers.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Their settings.
    pub lora: LoraSection,
    /// Their arena, in fp32.
    values: Vec<f32>,
}

impl Adapter {
    /// Creates an adapter whose values are zero until they are [set](Self::set).
    pub fn zeroed(shape: &ModelShape, lora: LoraSection) -> Result<Self> {
        let len = layout(shape, &lora)?.trained().len;
        Ok(Self { lora, values: vec![0.0; len] })
    }

    /// Reads the adapter of the checkpoint `path` of a run that trains adapters.
    pub fn read_checkpoint(
        path: &Path,
        state: &State,
        lora: &LoraSection,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let layout = layout(&state.model, lora)?;
        let adapter = Mutex::new(Self::zeroed(&state.model, lora.clone())?);
        let sink = |Piece { at, values, .. }: Piece| {
            adapter.lock().unwrap_or_else(PoisonError::into_inner).set(at, &values);
            Ok(())
        };
        checkpoint::read(path, &state.model, layout.trained(), &[], threads, &sink)?;
        Ok(adapter.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets values from element `at` of the arena.
    pub fn set(&mut self, at: usize, values: &[f32]) {
        self.values[at..at + values.len()].copy_from_slice(values);
    }

    /// Returns all values in pieces, each with its place in the arena.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, Vec<f32>)> {
        self.values
            .chunks(ADAPTER_PIECE_LEN)
            .enumerate()
            .map(|(index, piece)| (index * ADAPTER_PIECE_LEN, piece.to_vec()))
    }

    /// Passes weights on with the adapter added to them. `shape` is that of the model whose arena the weights are in.
    pub fn merge(
        &self,
        shape: &ModelShape,
        read: impl FnOnce(Sink<'_>) -> Result<()>,
        sink: Sink<'_>,
    ) -> Result<()> {
        let mut modules = layout(shape, &self.lora)?.adapted_modules();
        modules.sort_by_key(|module| module.weight.start);
        let merged = |mut piece: Piece| {
            self.add_to(&modules, piece.at, &mut piece.values);
            sink(piece)
        };
        read(&merged)
    }

    /// Adds `scale B A` to weights that start at element `at` of the model's arena.
    fn add_to(&self, modules: &[ModuleRanges], at: usize, weights: &mut [f32]) {
        #[expect(clippy::cast_possible_truncation, reason = "weights are in fp32")]
        let (scale, rank) = (self.lora.scale() as f32, self.lora.rank);
        let end = at + weights.len();
        let first = modules.partition_point(|module| module.weight.end <= at);
        for module in modules[first..].iter().take_while(|module| module.weight.start < end) {
            let [a, b] = [&module.a, &module.b].map(|range: &Range<usize>| &self.values[range.clone()]);
            let part = module.weight.start.max(at)..module.weight.end.min(end);
            let mut start = part.start;
            while start < part.end {
                let place = start - module.weight.start;
                let (row, col) = (place / module.inputs, place % module.inputs);
                let len = (module.inputs - col).min(part.end - start);
                let mut delta = vec![0.0; len];
                for (k, b) in b[row * rank..(row + 1) * rank].iter().enumerate() {
                    let a = &a[k * module.inputs + col..][..len];
                    delta.iter_mut().zip(a).for_each(|(delta, a)| *delta += b * a);
                }
                let weights = &mut weights[start - at..start - at + len];
                weights.iter_mut().zip(&delta).for_each(|(weight, delta)| *weight += scale * delta);
                start += len;
            }
        }
    }
}

/// Returns the layout of a model with adapters.
pub(crate) fn layout(shape: &ModelShape, lora: &LoraSection) -> Result<Layout> {
    Ok(Layout::new(shape).with_adapters(shape, lora).map_err(SpecError::from)?)
}

/// Hash of the values of an arena, which arrive in pieces of any length, in any order and from several threads.
#[derive(Debug, Default)]
pub struct ValuesHash(AtomicU64);

impl ValuesHash {
    /// Adds values that start at element `at`.
    pub fn add(&self, at: usize, values: &[f32]) {
        let hash = |(index, value): (usize, &f32)| mix(mix((at + index) as u64) ^ u64::from(value.to_bits()));
        let sum = values.iter().enumerate().map(hash).fold(0, u64::wrapping_add);
        self.0.fetch_add(sum, Ordering::Relaxed);
    }

    /// Returns the hash in hexadecimal.
    pub fn finish(self) -> String {
        format!("{:016x}", self.0.into_inner())
    }
}
