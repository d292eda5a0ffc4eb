//! Whole models against PyTorch: logits, loss, every parameter's gradient, and the weights after three AdamW steps.
//!
//! The expected values were computed in double precision by `tests/peers/goldens.py` and stored in single precision, so
//! every difference is rounding of this trainer. Tolerance: 1e-5 of a tensor's norm, about 100 roundings of f32.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use xlaunch_comm::bucket::Plan;
use xlaunch_comm::{Groups, Local, Sharding};
use xlaunch_engine::testing::require_gpu;
use xlaunch_engine::{
    Accumulate, Backend, Cast, CudaOptions, DType, EngineError, PoolMode, Precision, SquaredNorm, Tensor,
};
use xlaunch_harness::{Requirement, emulator};
use xlaunch_spec::job::{JobSpec, Recompute, TrainSection};
use xlaunch_spec::model::{
    Activation, Arch, ModelShape, NormPlace, PRESETS, Parallel, Positions, QkNorm, RopeScaling,
};
use xlaunch_worker::model::layout::{ALIGN, Layout};
use xlaunch_worker::model::{BackendHandle, GradientArena, LossGradients, MemoryUse, Model, Progress, Rows};
use xlaunch_worker::optim::AdamW;
use xlaunch_worker::train::{Division, Gradients};

const TOLERANCE: f64 = 1e-5;
/// Tolerance for bf16, which keeps 8 bits: roundings of 2^-9 in about ten consecutive operations.
const BF16_TOLERANCE: f64 = 3e-2;
/// Tolerance for FP8: E5M2 rounds each gradient by up to an eighth, E4M3 weights and inputs by up to a sixteenth.
const FP8_TOLERANCE: f64 = 0.15;
const ROWS: Rows<'static> = Rows { batch: 2, seq: 16, documents: None };

xlaunch_harness::suite! {
    gpt2_matches_pytorch_on_cpu,
    llama_matches_pytorch_on_cpu,
    llama_with_grouped_query_attention_matches_pytorch_on_cpu,
    llama_with_wide_heads_and_scaled_rotation_matches_pytorch_on_cpu,
    other_architectures_match_pytorch_on_cpu,
    losses_in_chunks_match_pytorch_on_cpu,
    recomputed_blocks_give_the_same_bits_on_cpu,
    fp8_is_near_pytorch_on_cpu;
    needs require_gpu:
    gpt2_matches_pytorch_on_gpu,
    llama_matches_pytorch_on_gpu,
    llama_with_grouped_query_attention_matches_pytorch_on_gpu,
    llama_with_wide_heads_and_scaled_rotation_matches_pytorch_on_gpu,
    other_architectures_match_pytorch_on_gpu,
    losses_in_chunks_match_pytorch_on_gpu,
    recomputed_blocks_give_the_same_bits_on_gpu,
    micro_steps_are_added_in_fp32_and_rounded_once_on_gpu,
    bf16_is_near_pytorch_on_gpu,
    fp8_is_near_pytorch_on_gpu;
    needs emulated_gpu: tests_on_gpu_pass_in_the_emulator;
}

/// A model in `tests/peers/goldens.py`, by the name of its file.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
}

const GPT2: Case = Case { name: "gpt2" };
const LLAMA: Case = Case { name: "llama" };
const LLAMA_GQA: Case = Case { name: "llama_gqa" };
const LLAMA_WIDE: Case = Case { name: "llama_wide" };
/// Models that have all other keys of the architecture among them.
const OTHERS: [Case; 6] = [
    Case { name: "head_norms" },
    Case { name: "post_norms" },
    Case { name: "windows" },
    Case { name: "two_norms" },
    Case { name: "shared_norm" },
    Case { name: "factors" },
];

/// A model with attention sinks, biases, and experts whose gates have limits.
const SINKS: Case = Case { name: "sinks" };

/// Returns the shape in `tests/peers/goldens.py`.
#[expect(clippy::too_many_lines, reason = "a table")]
fn shape(case: Case) -> ModelShape {
    let tiny = |arch: Arch, tied| ModelShape {
        layers: 2,
        heads: 4,
        kv_heads: 4,
        head_dim: 8,
        dim: 32,
        ffn: 48,
        seq: 16,
        vocab: 61,
        tied,
        ..arch.base()
    };
    let rotary = ModelShape { positions: Positions::Rotary, ..tiny(Arch::Gpt2, false) };
    match case.name {
        "gpt2" => tiny(Arch::Gpt2, true),
        "llama" => tiny(Arch::Llama, false),
        "llama_gqa" => ModelShape { kv_heads: 2, ..tiny(Arch::Llama, true) },
        "llama_wide" => ModelShape {
            kv_heads: 2,
            head_dim: 16,
            norm_eps: 1e-3,
            rope_theta: 500.0,
            rope_scaling: RopeScaling::Llama3 {
                factor: 4.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 32,
            },
            ..tiny(Arch::Llama, false)
        },
        "head_norms" => ModelShape {
            kv_heads: 2,
            head_dim: 16,
            qk_norm: QkNorm::Head,
            qkv_bias: true,
            attention_bias: true,
            mlp_bias: true,
            no_rope_every: 2,
            rope_scaling: RopeScaling::Yarn {
                factor: 4.0,
                original_max_position_embeddings: 8,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 0.0,
                truncate: true,
            },
            ..tiny(Arch::Llama, true)
        },
        "post_norms" => ModelShape {
            kv_heads: 2,
            norm_place: NormPlace::Post,
            qk_norm: QkNorm::Full,
            activation: Activation::Gelu,
            rope_scaling: RopeScaling::Linear { factor: 2.0 },
            ..tiny(Arch::Llama, false)
        },
        "windows" => ModelShape {
            kv_heads: 1,
            norm_place: NormPlace::Both,
            norm_offset: true,
            qk_norm: QkNorm::Head,
            activation: Activation::GeluTanh,
            window: 5,
            window_pattern: 2,
            rope_theta: 500.0,
            windowed_rope_theta: 50.0,
            attention_softcap: 3.0,
            logit_softcap: 2.0,
            query_scale: 0.5,
            embedding_scale: 0.0,
            ..tiny(Arch::Llama, true)
        },
        "two_norms" => ModelShape {
            parallel: Parallel::TwoNorms,
            rope_fraction: 0.5,
            activation: Activation::Gelu,
            rope_scaling: RopeScaling::Dynamic { factor: 2.0, original_max_position_embeddings: 8 },
            ..rotary
        },
        "shared_norm" => ModelShape {
            parallel: Parallel::SharedNorm,
            head_bias: true,
            qkv_bias: false,
            activation: Activation::Relu2,
            ..rotary
        },
        "factors" => ModelShape {
            embedding_scale: 3.0,
            residual_scale: 0.4,
            query_scale: 0.2,
            logit_scale: 0.3,
            attention_bias: true,
            mlp_bias: true,
            ..tiny(Arch::Llama, true)
        },
        "sinks" => ModelShape {
            kv_heads: 2,
            glu_limit: 0.3,
            window: 5,
            experts: 6,
            experts_per_token: 3,
            rope_theta: 1e4,
            ..tiny(Arch::GptOss, false)
        },
        other => panic!("{other}"),
    }
}

struct Golden {
    floats: HashMap<String, Vec<f32>>,
    ids: HashMap<String, Vec<i32>>,
}

impl Golden {
    fn read(name: &str) -> Self {
        // The path is relative to the package, from which cargo runs tests, so that a test binary copied to a GPU host
        // works as well.
        let path = Path::new("tests/goldens").join(format!("{name}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut ids) = (HashMap::new(), HashMap::new());
        for (name, tensor) in file.tensors() {
            let words = tensor.data().chunks_exact(4).map(|word| <[u8; 4]>::try_from(word).unwrap());
            match tensor.dtype() {
                Dtype::F32 => {
                    floats.insert(name, words.map(f32::from_le_bytes).collect());
                }
                _ => {
                    ids.insert(name, words.map(i32::from_le_bytes).collect());
                }
            }
        }
        Self { floats, ids }
    }

    /// Builds the arena of a layout from tensors named `<prefix><parameter>`.
    fn arena(&self, layout: &Layout, prefix: &str) -> Vec<f32> {
        let mut arena = vec![0.0; layout.len];
        for param in &layout.params {
            arena[param.stored()].copy_from_slice(&self.floats[&format!("{prefix}{}", param.name)]);
        }
        arena
    }
}

/// `|ours - theirs| / |theirs|` over the whole tensor.
fn relative(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut ours.iter().zip(theirs).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let scale = norm(&mut theirs.iter().map(|b| f64::from(*b)));
    // A tensor that is zero except for rounding (the gradient of attention's key bias) is compared absolutely.
    difference / scale.max(1e-4)
}

fn check(what: &str, ours: &[f32], theirs: &[f32]) {
    let error = relative(ours, theirs);
    assert!(error <= TOLERANCE, "{what}: relative difference {error:.2e}");
}

fn read(backend: &BackendHandle, tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.len()];
    backend.read_f32(tensor.all(), &mut values).unwrap();
    values
}

struct Fixture {
    backend: BackendHandle,
    model: Model,
    golden: Golden,
    grads: Tensor,
    tokens: Tensor,
    targets: Tensor,
    losses: Tensor,
}

#[derive(Debug)]
struct Failed;

impl From<EngineError> for Failed {
    fn from(error: EngineError) -> Self {
        panic!("{error}")
    }
}

fn cpu() -> BackendHandle {
    BackendHandle::new(Backend::cpu(2, PoolMode::On))
}

/// Opens the GPU in strict fp32: nothing less could meet the tolerance.
fn gpu() -> BackendHandle {
    BackendHandle::new(Backend::cuda(0, CudaOptions::new(Precision::Fp32, PoolMode::On)).unwrap())
}

impl Fixture {
    fn new(backend: BackendHandle, case: Case) -> Self {
        Self::with(backend, case, MemoryUse::default(), DType::F32)
    }

    fn in_fp8(backend: BackendHandle, case: Case, memory: MemoryUse) -> Self {
        let grads = backend.activation_dtype();
        let f = Self::with(backend, case, memory, grads);
        Self { model: f.model.with_fp8(true), ..f }
    }

    fn with(backend: BackendHandle, case: Case, memory: MemoryUse, grads: DType) -> Self {
        let shape = shape(case);
        let golden = Golden::read(case.name);
        let weights = golden.arena(&Layout::new(&shape), "param.");
        let model = Model::new(&backend, &shape, &weights).unwrap().with_memory_use(memory);
        let grads = backend.alloc(grads, model.layout.len).unwrap();
        backend.zero(grads.all()).unwrap();
        let tokens = backend.alloc(DType::I32, ROWS.count()).unwrap();
        let targets = backend.alloc(DType::I32, ROWS.count()).unwrap();
        let losses = backend.alloc(DType::F32, ROWS.count()).unwrap();
        Self { backend, model, golden, grads, tokens, targets, losses }
    }

    /// Forward and backward of one batch. Returns the loss and the logits.
    fn pass(&self, tokens: &[i32], targets: &[i32]) -> (f64, Vec<f32>) {
        self.backend.write_i32(self.tokens.all(), tokens).unwrap();
        self.backend.write_i32(self.targets.all(), targets).unwrap();
        let acts = self.model.forward(ROWS, self.tokens.all()).unwrap();
        let vocab = self.model.shape.vocab;
        let padded = read(&self.backend, &self.model.logits(&acts.output, 0..ROWS.count()).unwrap());
        let rows = padded.chunks(padded.len() / ROWS.count());
        let logits = rows.flat_map(|row| row[..vocab].to_vec()).collect();
        let (scale, acc) = (self.backend.alloc(DType::F32, 1).unwrap(), Accumulate::Overwrite);
        self.backend.write_f32(scale.all(), &[1.0 / ROWS.count() as f32]).unwrap();
        let scale = scale.all();
        let grads = GradientArena { tensor: &self.grads, slots: None };
        let head = LossGradients { scale, grads, acc, weights: None };
        let (targets, losses) = (self.targets.all(), self.losses.all());
        let dy = self.model.loss_and_gradients(&acts, targets, losses, head).unwrap();
        let mut ends = Vec::new();
        self.model
            .backward::<Failed>(acts, dy, self.tokens.all(), grads, acc, |progress| {
                ends.extend(match progress {
                    Progress::Finished(end) => Some(end),
                    Progress::NextPart | Progress::Exchange(_) => None,
                });
                Ok(())
            })
            .unwrap();
        assert!(ends.is_sorted() && ends.last() == Some(&self.model.layout.len), "{ends:?}");
        let losses = read(&self.backend, &self.losses);
        (losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / losses.len() as f64, logits)
    }
}

fn compare(backend: BackendHandle, case: Case) {
    compare_all(&Fixture::new(backend, case));
}

fn compare_all(f: &Fixture) {
    compare_pass(f);
    compare_steps(f);
}

fn compare_pass(f: &Fixture) {
    let (loss, logits) = f.pass(&f.golden.ids["tokens"], &f.golden.ids["targets"]);
    check("logits", &logits, &f.golden.floats["logits"]);
    let expected = f64::from(f.golden.floats["loss"][0]);
    assert!((loss - expected).abs() <= TOLERANCE * expected, "loss {loss} against {expected}");
    let grads = read(&f.backend, &f.grads);
    for param in &f.model.layout.params {
        let theirs = &f.golden.floats[&format!("grad.{}", param.name)];
        check(&format!("gradient of {}", param.name), &grads[param.stored()], theirs);
    }
}

fn compare_steps(f: &Fixture) {
    let train = TrainSection {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        clip: 1.0,
        ..Default::default()
    };
    let spec = JobSpec { train, ..Default::default() };
    let weights = f.golden.arena(&f.model.layout, "param.");
    let replicated = Sharding::replicated(
        Plan::new(&f.model.layout.ends(), ALIGN, 4, usize::MAX, usize::MAX),
        Groups::single(0, 1),
    );
    let optimizer = AdamW::new(&f.backend, &f.model, &weights, &replicated, &spec).unwrap();
    let grad_norm_sq = f.backend.alloc(DType::F32, 1).unwrap();
    let finite = f.backend.alloc(DType::F32, 1).unwrap();
    f.backend.zero(finite.all()).unwrap();
    let (tokens, targets) = (&f.golden.ids["step_tokens"], &f.golden.ids["step_targets"]);
    for (step, (tokens, targets)) in tokens.chunks(ROWS.count()).zip(targets.chunks(ROWS.count())).enumerate()
    {
        let (loss, _) = f.pass(tokens, targets);
        optimizer.prepare(step as u64, spec.train.lr).unwrap();
        f.backend.run(SquaredNorm { x: f.grads.all(), out: grad_norm_sq.all() }).unwrap();
        optimizer.step(&f.model, f.grads.all(), grad_norm_sq.all(), finite.all(), &mut Local).unwrap();
        let norm = f64::from(read(&f.backend, &grad_norm_sq)[0]).sqrt();
        for (what, ours) in [("step_losses", loss), ("step_norms", norm)] {
            let theirs = f64::from(f.golden.floats[what][step]);
            assert!((ours - theirs).abs() <= TOLERANCE * theirs, "{what}[{step}]: {ours} against {theirs}");
        }
    }
    let params = read(&f.backend, &f.model.weights);
    let shape = &f.model.shape;
    let rotation_is_partial = shape.positions == Positions::Learned || shape.rope_fraction < 1.0;
    for param in &f.model.layout.params {
        let mut theirs = f.golden.floats[&format!("after.{}", param.name)].clone();
        let ours = &params[param.stored()];
        if param.name.ends_with("qkv.bias") && rotation_is_partial {
            // Without rotation, a bias of the keys shifts all scores of a query equally, so its gradient is zero except
            // for rounding. AdamW scales that noise to updates of about the learning rate, of which there are three at
            // most.
            let first = shape.attention_width();
            let keys = first..first + shape.head_dim * shape.kv_heads;
            assert!(
                ours[keys.clone()].iter().zip(&theirs[keys.clone()]).all(|(a, b)| (a - b).abs() < 3.1e-3)
            );
            theirs[keys.clone()].copy_from_slice(&ours[keys]);
        }
        check(&format!("{} after three steps", param.name), ours, &theirs);
    }
}

fn gpt2_matches_pytorch_on_cpu() {
    compare(cpu(), GPT2);
}

fn llama_matches_pytorch_on_cpu() {
    compare(cpu(), LLAMA);
}

fn llama_with_grouped_query_attention_matches_pytorch_on_cpu() {
    compare(cpu(), LLAMA_GQA);
}

fn llama_with_wide_heads_and_scaled_rotation_matches_pytorch_on_cpu() {
    compare(cpu(), LLAMA_WIDE);
}

fn gpt2_matches_pytorch_on_gpu() {
    compare(gpu(), GPT2);
}

fn llama_matches_pytorch_on_gpu() {
    compare(gpu(), LLAMA);
}

fn llama_with_grouped_query_attention_matches_pytorch_on_gpu() {
    compare(gpu(), LLAMA_GQA);
}

fn llama_with_wide_heads_and_scaled_rotation_matches_pytorch_on_gpu() {
    compare(gpu(), LLAMA_WIDE);
}

fn other_architectures_match_pytorch_on_cpu() {
    other_architectures_match_pytorch(cpu);
}

fn other_architectures_match_pytorch_on_gpu() {
    other_architectures_match_pytorch(gpu);
}

#[expect(clippy::print_stderr, reason = "a failure follows the name of its case")]
fn other_architectures_match_pytorch(backend: fn() -> BackendHandle) {
    for case in OTHERS.into_iter().chain([SINKS]) {
        eprintln!("{}", case.name);
        compare(backend(), case);
    }
}

fn losses_in_chunks_match_pytorch_on_cpu() {
    losses_in_chunks_match_pytorch(cpu);
}

fn losses_in_chunks_match_pytorch_on_gpu() {
    losses_in_chunks_match_pytorch(gpu);
}

fn losses_in_chunks_match_pytorch(backend: fn() -> BackendHandle) {
    // The last chunk has two rows, or one chunk has all rows.
    for (case, classifier_chunk) in [(GPT2, 5), (LLAMA, 5), (LLAMA, 100), (OTHERS[2], 5), (OTHERS[4], 5)] {
        let memory = MemoryUse { classifier_chunk, ..MemoryUse::default() };
        let f = Fixture::with(backend(), case, memory, DType::F32);
        compare_all(&f);
        f.pass(&f.golden.ids["tokens"], &f.golden.ids["targets"]);
        let trained = read(&f.backend, &f.losses);
        let output = f.model.output(ROWS, f.tokens.all()).unwrap();
        f.model.loss(&output, f.targets.all(), f.losses.all()).unwrap();
        assert_eq!(read(&f.backend, &f.losses), trained, "{}", case.name);
    }
}

fn recomputed_blocks_give_the_same_bits_on_cpu() {
    recomputed_blocks_give_the_same_bits(cpu);
}

fn recomputed_blocks_give_the_same_bits_on_gpu() {
    recomputed_blocks_give_the_same_bits(gpu);
    recomputed_blocks_give_the_same_bits(gpu_in_bf16);
}

fn recomputed_blocks_give_the_same_bits(backend: fn() -> BackendHandle) {
    // On a GPU, FP8 comes with bf16.
    let (on, fp8) = (backend(), [false, true]);
    let fp8 = if on.is_asynchronous() && (on.activation_dtype() == DType::F32 || !on.supports_fp8()) {
        &fp8[..1]
    } else {
        &fp8[..]
    };
    let cases = [GPT2, LLAMA, LLAMA_GQA, LLAMA_WIDE, SINKS].into_iter().chain(OTHERS);
    let cases = cases.flat_map(|case| fp8.iter().map(move |fp8| (case, *fp8)));
    for (case, fp8) in cases {
        let [expected, cheap, block] =
            [Recompute::None, Recompute::Cheap, Recompute::Block].map(|recompute| {
                let memory = MemoryUse { recompute, ..MemoryUse::default() };
                let f = Fixture::with(backend(), case, memory, DType::F32);
                let f = Fixture { model: f.model.with_fp8(fp8), ..f };
                let (loss, _) = f.pass(&f.golden.ids["tokens"], &f.golden.ids["targets"]);
                (loss.to_bits(), read(&f.backend, &f.grads).into_iter().map(f32::to_bits).collect::<Vec<_>>())
            });
        assert!(cheap == expected && block == expected, "{}, FP8 {fp8}", case.name);
    }
}

fn micro_steps_are_added_in_fp32_and_rounded_once_on_gpu() {
    let backend = gpu_in_bf16();
    let len = 1024;
    let sharding = Sharding::replicated(Plan::new(&[512, len], ALIGN, 2, 1024, 1024), Groups::single(0, 1));
    let division = Division { sharding: sharding.clone(), gradients: None, weights: None };
    let layout = Layout::new(&PRESETS[0].1);
    // In bf16 each of these additions would be lost: 1 + 2^-9 is rounded to 1.
    let (first, rest) = (vec![1.0; len], vec![1.0 + 3.0 * 2.0_f32.powi(-9); len]);
    for (accumulate, world, expected, dtype) in
        [(2, 2, 1.0 + 2.0_f32.powi(-7), DType::Bf16), (2, 1, rest[0], DType::F32), (1, 2, 1.0, DType::Bf16)]
    {
        let gradients = Gradients::new(&backend, &layout, &division, DType::Bf16, accumulate, world).unwrap();
        let values = backend.alloc(DType::F32, len).unwrap();
        for written in [&first, &rest].into_iter().take(accumulate) {
            backend.write_f32(values.all(), written).unwrap();
            backend.run(Cast { x: values.all(), y: gradients.arena().tensor.all() }).unwrap();
        }
        gradients.reduce(sharding.plan().buckets(), &mut Local).unwrap();
        assert_eq!(gradients.reduced().dtype(), dtype);
        assert_eq!(read(&backend, gradients.reduced()), vec![expected; len]);
    }
}

fn gpu_in_bf16() -> BackendHandle {
    let options = CudaOptions { deterministic: true, ..CudaOptions::new(Precision::Bf16, PoolMode::On) };
    BackendHandle::new(Backend::cuda(0, options).unwrap())
}

fn bf16_is_near_pytorch_on_gpu() {
    let chunked = MemoryUse { classifier_chunk: 5, ..MemoryUse::default() };
    for (case, memory, grads) in [
        (GPT2, MemoryUse::default(), DType::F32),
        (LLAMA_GQA, MemoryUse::default(), DType::F32),
        (LLAMA, chunked, DType::Bf16),
        (OTHERS[0], MemoryUse::default(), DType::Bf16),
        (OTHERS[1], MemoryUse::default(), DType::Bf16),
        (OTHERS[2], MemoryUse::default(), DType::Bf16),
        (OTHERS[3], MemoryUse::default(), DType::Bf16),
        (OTHERS[4], chunked, DType::Bf16),
        (OTHERS[5], MemoryUse::default(), DType::Bf16),
        (SINKS, MemoryUse::default(), DType::Bf16),
    ] {
        near_pytorch(&Fixture::with(gpu_in_bf16(), case, memory, grads), BF16_TOLERANCE);
    }
}

fn near_pytorch(f: &Fixture, tolerance: f64) {
    let (loss, logits) = f.pass(&f.golden.ids["tokens"], &f.golden.ids["targets"]);
    let expected = f64::from(f.golden.floats["loss"][0]);
    assert!((loss - expected).abs() <= tolerance * expected, "loss {loss} against {expected}");
    let near = |what: &str, ours: &[f32], theirs: &[f32]| {
        let distance = relative(ours, theirs);
        assert!(distance <= tolerance, "{what}: {distance:.2e}");
    };
    near("logits", &logits, &f.golden.floats["logits"]);
    let (grads, params) = (read(&f.backend, &f.grads), &f.model.layout.params);
    let ours: Vec<f32> = params.iter().flat_map(|param| grads[param.stored()].to_vec()).collect();
    let theirs: Vec<f32> =
        params.iter().flat_map(|param| f.golden.floats[&format!("grad.{}", param.name)].clone()).collect();
    near("gradient", &ours, &theirs);
}

fn fp8_is_near_pytorch_on_cpu() {
    fp8_is_near_pytorch(cpu);
}

fn fp8_is_near_pytorch_on_gpu() {
    let gpu = gpu_in_bf16();
    if gpu.supports_fp8() {
        drop(gpu);
        fp8_is_near_pytorch(gpu_in_bf16);
    }
}

/// Checks that FP8 is close to PyTorch, but not so close that nothing was rounded. A sample may have any number of
/// tokens.
fn fp8_is_near_pytorch(backend: fn() -> BackendHandle) {
    // Without norms before layers or with soft caps, the errors of so small a model are no measure.
    let [head_norms, _, _, two_norms, shared_norm, factors] = OTHERS;
    for case in [GPT2, LLAMA, LLAMA_GQA, LLAMA_WIDE, SINKS, head_norms, two_norms, shared_norm, factors] {
        let f = Fixture::in_fp8(backend(), case, MemoryUse::default());
        near_pytorch(&f, FP8_TOLERANCE);
        let (_, logits) = f.pass(&f.golden.ids["tokens"], &f.golden.ids["targets"]);
        assert!(relative(&logits, &f.golden.floats["logits"]) > 5e-3, "{}", case.name);
        let sample = f.model.output(Rows::new(1, 13), f.tokens.slice(0..13)).unwrap();
        let next = read(&f.backend, &f.model.logits(&sample, 12..13).unwrap());
        assert!(next.iter().all(|logit| logit.is_finite()), "{}", case.name);
    }
}

fn emulated_gpu() -> Requirement {
    match emulator::cache() {
        Some(_) => Err("it runs in the emulator already".into()),
        None => emulator::find_compiler(),
    }
}

/// Runs the kernels of a GPU on CPU threads; see `tests/kernels`.
fn tests_on_gpu_pass_in_the_emulator() {
    let cache = tempfile::tempdir().unwrap();
    let directory = emulator::build(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    emulator::use_in(&mut command, &directory, cache.path());
    let output = command.arg("on_gpu").output().unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && stdout.contains("ok. 10 passed"), "{stdout}\n{stderr}");
}
