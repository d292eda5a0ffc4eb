//! Low-rank adapters (LoRA) of frozen linear layers: forward and backward.
//!
//! ```text
//! forward    z  = s x A^T        y_m  (+)= z_m B_m^T
//! backward   dB_m = dy_m^T z_m   dz_m  = s dy_m B_m   dA = dz^T x   dx = dz A
//! ```
//! A layer may have several modules m, such as queries, keys and values: `y_m` are a module's columns of the output,
//! and `z_m` its R columns of z. All modules read the same x, so one GEMM computes z, and one each dA and dx. z
//! is kept for backward with x; where x is recomputed, so is z.

use std::cell::OnceCell;

use xlaunch_engine::{Accumulate, Gemm, LinearShape, Matrix, Result, Slice, Tensor};

use super::Model;
use super::layout::{Adapter, Linear};
use super::linear::LayerBackward;

/// Returns columns of a row-major matrix whose rows have `stride` elements.
fn columns(matrix: Slice<'_>, [rows, stride]: [usize; 2], first: usize, count: usize) -> Matrix<'_> {
    let end = (rows.max(1) - 1) * stride + first + count;
    Matrix { slice: matrix.slice(first..end), stride, transposed: false }
}

impl Model {
    /// Returns the width of z, the sum of the ranks of a layer's modules. 0 without adapter.
    pub(super) fn adapter_width(&self, layer: &Linear) -> usize {
        let modules = layer.adapter.as_ref().map_or(0, |adapter| adapter.modules.len());
        modules * self.layout.rank_and_scale().0
    }

    /// Returns the largest width of z.
    pub(super) fn widest_adapter(&self) -> usize {
        let layers =
            self.layout.blocks.iter().flat_map(|block| [&block.qkv, &block.proj, &block.fc, &block.out]);
        layers.map(|layer| self.adapter_width(layer)).max().unwrap_or(0)
    }

    /// Computes the outputs of a layer's adapter, if it has one, or adds them to those of the layer.
    pub(super) fn adapter_forward(
        &self,
        shape: LinearShape,
        layer: &Linear,
        [x, y]: [Slice<'_>; 2],
        kept: &OnceCell<Tensor>,
        acc: Accumulate,
    ) -> Result<()> {
        if layer.adapter.is_none() {
            return Ok(());
        }
        let z = self.activation(shape.rows * self.adapter_width(layer))?;
        self.adapter_forward_with(shape, layer, x, z.all(), y, acc)?;
        let _ = kept.set(z);
        Ok(())
    }

    /// Same as [`adapter_forward`](Self::adapter_forward), with memory for z.
    pub(super) fn adapter_forward_with(
        &self,
        shape: LinearShape,
        layer: &Linear,
        x: Slice<'_>,
        z: Slice<'_>,
        y: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()> {
        let Some(adapter) = &layer.adapter else { return Ok(()) };
        self.project(shape, adapter, x, z)?;
        let (LinearShape { rows, outputs, .. }, rank) = (shape, self.layout.rank_and_scale().0);
        let width = self.adapter_width(layer);
        for (index, module) in adapter.modules.iter().enumerate() {
            let cols = module.outputs.len();
            self.backend.run(Gemm {
                rows,
                cols,
                depth: rank,
                a: columns(z, [rows, width], index * rank, rank),
                b: Matrix::new(self.adapter_param(&module.b), rank).t(),
                factor: 1.0,
                c: columns(y, [rows, outputs], module.outputs.start, cols),
                acc,
            })?;
        }
        Ok(())
    }

    /// Computes `z = s x A^T`.
    fn project(&self, shape: LinearShape, adapter: &Adapter, x: Slice<'_>, z: Slice<'_>) -> Result<()> {
        let LinearShape { rows, inputs, .. } = shape;
        let (cols, factor) = (adapter.a.len() / inputs, self.layout.rank_and_scale().1);
        let a = Matrix::new(self.adapter_param(&adapter.a), inputs);
        let (x, z) = (Matrix::new(x, inputs), Matrix::new(z, cols));
        self.backend.run(Gemm {
            rows,
            cols,
            depth: inputs,
            a: x,
            b: a.t(),
            factor,
            c: z,
            acc: Accumulate::Overwrite,
        })
    }

    /// Computes the gradients of a layer's adapter, and its part of the gradient of the layer's input in `dx`.
    pub(super) fn adapter_backward(
        &self,
        args: LayerBackward<'_>,
        adapter: &Adapter,
        [x, dy, dx]: [&Tensor; 3],
        kept: Option<&Tensor>,
    ) -> Result<()> {
        let LayerBackward { shape, layer, grads, acc, .. } = args;
        let LinearShape { rows, inputs, outputs } = shape;
        let ((rank, scale), width) = (self.layout.rank_and_scale(), self.adapter_width(layer));
        let computed;
        let z = if let Some(z) = kept {
            z
        } else {
            computed = self.activation(rows * width)?;
            self.project(shape, adapter, x.all(), computed.all())?;
            &computed
        };
        let dz = self.activation(rows * width)?;
        let overwrite = Accumulate::Overwrite;
        for (index, module) in adapter.modules.iter().enumerate() {
            let count = module.outputs.len();
            let dy = columns(dy.all(), [rows, outputs], module.outputs.start, count);
            let own = |z| columns(z, [rows, width], index * rank, rank);
            let (b, db) = (self.adapter_param(&module.b), grads.slice(module.b.clone()));
            let (b, db) = (Matrix::new(b, rank), Matrix::new(db, rank));
            let gradient = Gemm {
                rows: count,
                cols: rank,
                depth: rows,
                a: dy.t(),
                b: own(z.all()),
                factor: 1.0,
                c: db,
                acc,
            };
            self.backend.run(gradient)?;
            let back = Gemm {
                rows,
                cols: rank,
                depth: count,
                a: dy,
                b,
                factor: scale,
                c: own(dz.all()),
                acc: overwrite,
            };
            self.backend.run(back)?;
        }
        let [x, dx] = [x, dx].map(|tensor| Matrix::new(tensor.all(), inputs));
        let (dz, a) = (Matrix::new(dz.all(), width), Matrix::new(self.adapter_param(&adapter.a), inputs));
        let da = Matrix::new(grads.slice(adapter.a.clone()), inputs);
        let (cols, factor) = (inputs, 1.0);
        self.backend.run(Gemm { rows: width, cols, depth: rows, a: dz.t(), b: x, factor, c: da, acc })?;
        self.backend.run(Gemm { rows, cols, depth: width, a: dz, b: a, factor, c: dx, acc: overwrite })
    }
}

#[cfg(test)]
mod tests {
    #![expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "test values are small"
    )]

    use rayon::ThreadPoolBuilder;
    use xlaunch_comm::Slots;
    use xlaunch_engine::{Backend, DType, EngineError, PoolMode};
    use xlaunch_spec::job::{LoraSection, Recompute};
    use xlaunch_spec::model::{Arch, ModelShape};

    use super::*;
    use crate::adapter::Adapter;
    use crate::checkpoint::{Arena, Piece};
    use crate::model::decode::Decoder;
    use crate::model::layout::Layout;
    use crate::model::{BackendHandle, GradientArena, LossGradients, MemoryUse, Rows, init};

    fn rows() -> Rows<'static> {
        Rows::new(4, 12)
    }

    fn shape(arch: Arch) -> ModelShape {
        let sizes = arch.base();
        let kv_heads = if matches!(arch, Arch::Gpt2 | Arch::GptNeoX) { 4 } else { 2 };
        let (layers, heads, dim, head_dim, ffn) = (2, 4, 32, 8, 40);
        // Every token uses all experts, as the loss jumps where it chooses another one.
        let experts = sizes.experts.min(3);
        let sizes = ModelShape { experts, experts_per_token: experts, expert_ffn: 0, ..sizes };
        ModelShape { layers, heads, kv_heads, head_dim, dim, ffn, seq: 12, vocab: 50, ..sizes }
    }

    fn lora(targets: &[&str]) -> LoraSection {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        LoraSection { rank: 3, alpha: Some(4.0), targets, ..LoraSection::default() }
    }

    /// Returns values that depend on the position only.
    fn random(len: usize, seed: u64) -> Vec<f32> {
        let value = |i: u64| (crate::random::mix(seed << 32 | i) >> 40) as f32 / (1 << 24) as f32 - 0.5;
        (0..len as u64).map(value).collect()
    }

    fn scaled(values: &[f32], factor: f32) -> Vec<f32> {
        values.iter().map(|value| value * factor).collect()
    }

    /// A model with an adapter whose B is not zero.
    struct Adapted {
        model: Model,
        /// Weights and adapters.
        values: [Vec<f32>; 2],
        tokens: Tensor,
        targets: Tensor,
    }

    impl Adapted {
        fn new(shape: &ModelShape, lora: &LoraSection, recompute: Recompute) -> Self {
            let backend = BackendHandle::new(Backend::cpu(2, PoolMode::On));
            let layout = Layout::new(shape).with_adapters(shape, lora).unwrap();
            let threads = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let weights = scaled(&init::weights(&layout, 1, &threads), 3.0);
            let mut adapters = vec![0.0; layout.trained().len];
            for param in &layout.trained().params {
                adapters[param.range.clone()]
                    .copy_from_slice(&random(param.range.len(), param.range.start as u64 + 1));
            }
            let model = Model::of_layout(&backend, shape, layout, None).unwrap();
            let model = model.with_memory_use(MemoryUse { recompute, classifier_chunk: 7 });
            model.write_weights(0, &weights).unwrap();
            model.write_trained(0, &adapters).unwrap();
            let ids = |seed| -> Vec<i32> {
                random(rows().count(), seed).iter().map(|x| ((x + 0.5) * 49.0) as i32).collect()
            };
            let [tokens, targets] = [ids(2), ids(3)].map(|ids| {
                let tensor = backend.alloc(DType::I32, ids.len()).unwrap();
                backend.write_i32(tensor.all(), &ids).unwrap();
                tensor
            });
            Self { model, values: [weights, adapters], tokens, targets }
        }

        fn loss(&self) -> f64 {
            let backend = &self.model.backend;
            let losses = backend.alloc(DType::F32, rows().count()).unwrap();
            let output = self.model.output(rows(), self.tokens.all()).unwrap();
            self.model.loss(&output, self.targets.all(), losses.all()).unwrap();
            let mut values = vec![0.0; losses.len()];
            backend.read_f32(losses.all(), &mut values).unwrap();
            values.iter().map(|loss| f64::from(*loss)).sum::<f64>() / values.len() as f64
        }

        fn gradients(&self) -> Vec<f32> {
            let backend = &self.model.backend;
            let (losses, len) =
                (backend.alloc(DType::F32, rows().count()).unwrap(), self.model.trained().len());
            let grads = backend.alloc(DType::F32, len).unwrap();
            backend.zero(grads.all()).unwrap();
            let no_slots: Option<&Slots> = None;
            let arena = GradientArena { tensor: &grads, slots: no_slots };
            let acc = Accumulate::Overwrite;
            let acts = self.model.forward(rows(), self.tokens.all()).unwrap();
            let scale = backend.alloc(DType::F32, 1).unwrap();
            backend.write_f32(scale.all(), &[1.0 / rows().count() as f32]).unwrap();
            let head = LossGradients { scale: scale.all(), grads: arena, acc, weights: None };
            let dy = self.model.loss_and_gradients(&acts, self.targets.all(), losses.all(), head).unwrap();
            let progress = |_| Ok::<_, EngineError>(());
            self.model.backward(acts, dy, self.tokens.all(), arena, acc, progress).unwrap();
            let mut values = vec![0.0; len];
            backend.read_f32(grads.all(), &mut values).unwrap();
            values
        }
    }

    #[test]
    fn gradients_of_adapters_are_the_slopes_of_the_loss() {
        let archs =
            [Arch::Gpt2, Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Olmo2, Arch::Gemma2, Arch::Glm4Moe];
        for arch in archs {
            let adapted = Adapted::new(&shape(arch), &lora(&["all-linear"]), Recompute::None);
            let gradients = adapted.gradients();
            for (index, param) in adapted.model.layout.trained().params.iter().enumerate() {
                let gradient = &gradients[param.range.clone()];
                let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                // A step along the gradient, up and down: short where the loss is steep, long where it is flat, because
                // losses are rounded to fp32.
                let step = (2e-3 / norm).min(2e-2) / norm;
                let [up, down] = [step, -step].map(|step| {
                    let mut values = adapted.values[1].clone();
                    let moved = values[param.range.clone()].iter_mut().zip(gradient);
                    moved.for_each(|(value, g)| *value += (step * f64::from(*g)) as f32);
                    adapted.model.write_trained(0, &values).unwrap();
                    adapted.loss()
                });
                let slope = (up - down) / (2.0 * step);
                let expected = norm * norm;
                assert!(
                    (slope - expected).abs() < 0.03 * expected,
                    "{arch:?} {} {index}: slope {slope:e}, gradient {expected:e}",
                    param.name
                );
            }
        }
    }

    #[test]
    fn recomputed_blocks_and_fewer_targets_give_the_same_gradients() {
        let (shape, lora) = (shape(Arch::Qwen3), lora(&["q", "v", "up", "down"]));
        let expected = Adapted::new(&shape, &lora, Recompute::None).gradients();
        assert!(expected.iter().all(|g| g.is_finite()) && expected.iter().any(|g| *g != 0.0));
        for recompute in [Recompute::Cheap, Recompute::Block] {
            assert_eq!(Adapted::new(&shape, &lora, recompute).gradients(), expected, "{recompute:?}");
        }
    }

    #[test]
    fn frozen_weights_in_fp8_give_nearly_the_same_gradients_and_the_same_bits_if_recomputed() {
        for (arch, targets) in
            [(Arch::Llama, "all-linear"), (Arch::Qwen2, "all-linear"), (Arch::Gpt2, "up"), (Arch::Llama, "q")]
        {
            // FP8 needs multiples of 16.
            let shape = ModelShape { ffn: 48, ..shape(arch) };
            let gradients = |fp8, recompute| {
                let adapted = Adapted::new(&shape, &lora(&[targets]), recompute);
                // Smaller weights, whose rounding changes the results less.
                let [weights, adapters] = adapted.values.each_ref().map(|values| scaled(values, 0.25));
                adapted.model.write_weights(0, &weights).unwrap();
                adapted.model.write_trained(0, &adapters).unwrap();
                Adapted { model: adapted.model.with_fp8(fp8), ..adapted }.gradients()
            };
            let (expected, found) = (gradients(false, Recompute::None), gradients(true, Recompute::None));
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let cosine =
                product(&expected, &found) / (product(&expected, &expected) * product(&found, &found)).sqrt();
            assert!(cosine > 0.99 && cosine < 0.999_999, "{arch:?} {targets}: {cosine}");
            for recompute in [Recompute::Cheap, Recompute::Block] {
                assert_eq!(gradients(true, recompute), found, "{arch:?} {targets} {recompute:?}");
            }
        }
    }

    #[test]
    fn new_adapters_change_nothing() {
        for arch in [Arch::Llama, Arch::Gpt2] {
            let adapted = Adapted::new(&shape(arch), &lora(&["all-linear"]), Recompute::None);
            let threads = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let new = init::weights(adapted.model.layout.trained(), 5, &threads);
            adapted.model.write_trained(0, &new).unwrap();
            let (with, shape) = (adapted.loss(), &adapted.model.shape);
            let plain = Model::new(&adapted.model.backend, shape, &adapted.values[0]).unwrap();
            let plain = Adapted { model: plain, ..adapted };
            assert!((with - plain.loss()).abs() < 1e-6, "{arch:?}");
        }
    }

    #[test]
    fn merged_weights_compute_the_same_in_every_family() {
        for arch in Arch::all() {
            let (shape, lora) = (shape(arch), lora(&["all-linear"]));
            let adapted = Adapted::new(&shape, &lora, Recompute::None);
            let expected = adapted.loss();
            let mut adapter = Adapter::zeroed(&shape, lora).unwrap();
            adapter.set(0, &adapted.values[1]);
            let [weights, _] = &adapted.values;
            let merged = std::sync::Mutex::new(vec![0.0; weights.len()]);
            let sink = |Piece { at, values, .. }: Piece| {
                merged.lock().unwrap()[at..at + values.len()].copy_from_slice(&values);
                Ok(())
            };
            // Pieces begin and end in the middle of rows.
            let read = |sink: crate::checkpoint::Sink<'_>| {
                for (index, values) in weights.chunks(1001).enumerate() {
                    let piece = Piece { arena: Arena::Params, at: index * 1001, values: values.to_vec() };
                    sink(piece).unwrap();
                }
                Ok(())
            };
            adapter.merge(&shape, read, &sink).unwrap();
            let merged = merged.into_inner().unwrap();
            let plain = Model::new(&adapted.model.backend, &shape, &merged).unwrap();
            let found = Adapted { model: plain, ..adapted }.loss();
            assert!((found - expected).abs() < 1e-5 * expected, "{arch:?}: {found} {expected}");
        }
    }

    #[test]
    fn generation_uses_the_adapters() {
        for arch in [Arch::Llama, Arch::Gpt2] {
            let adapted = Adapted::new(&shape(arch), &lora(&["all-linear"]), Recompute::None);
            let (model, prompt) = (&adapted.model, [3, 1, 4, 1, 5, 9, 2]);
            let mut decoder = Decoder::new(model, 1, 12, 50).unwrap();
            decoder.prefill(&[(0, &prompt)]).unwrap();
            let mut logits = vec![0.0; 50];
            decoder.read_logits(0, &mut logits).unwrap();
            let ids = model.backend.alloc(DType::I32, prompt.len()).unwrap();
            model.backend.write_i32(ids.all(), &prompt.map(|id: u32| i32::try_from(id).unwrap())).unwrap();
            let output = model.output(Rows::new(1, prompt.len()), ids.all()).unwrap();
            let expected = model.logits(&output, prompt.len() - 1..prompt.len()).unwrap();
            let mut values = vec![0.0; expected.len()];
            model.backend.read_f32(expected.all(), &mut values).unwrap();
            let distance = logits.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(distance < 1e-4, "{arch:?}: {distance}");
        }
    }
}
