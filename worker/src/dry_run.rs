//! Predicts the memory that a job needs on each rank, without running it.
//!
//! The trainer itself runs a few steps, on a device without memory and with a collective without peers. So the sizes of
//! all buffers, the order in which they are allocated and freed, and the behaviour of the pool are the same as in the
//! real job. The memory use of libraries was measured on one kind of GPU.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::Local;
use xlaunch_engine::{Backend, DType, PoolOptions};
use xlaunch_spec::job::{Exec, JobSpec, Recompute, Shard, SpecError};

use crate::bench::SkipAllReduce;
use crate::error::Result;
use crate::model::layout::Layout;
use crate::model::{BackendHandle, Model, SMALLEST_CHUNK};
use crate::optim::AdamW;
use crate::session;
use crate::train::{Division, Evaluator, Preferences, Stepper, wire_dtype};

/// Memory of the CUDA context, kernels and libraries of a GPU, as measured on an H200 (`tests/gpu/memory.py`).
const LIBRARIES: u64 = 544 << 20;
/// Additional memory of NCCL's buffers and kernels, with two GPUs.
const NCCL: u64 = 848 << 20;
/// The pool records a step, plans it, and serves the following ones from the plan.
const STEPS: u64 = 3;
/// Kinds of micro-steps within a step: the first, those in between, the last.
const MICRO_STEPS: usize = 3;

/// Bytes of memory on each rank, unless noted otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Parameters of the model.
    pub parameters: u64,
    /// Parameters that a token uses: all except those of other experts.
    pub active: u64,
    /// Parameters that are trained: those of the model, or of adapters.
    pub trained: u64,
    /// Tokens that one rank processes in a step.
    pub tokens: u64,
    /// Model weights in the element type of activations, and those of the reference of preferences.
    pub weights: u64,
    /// Gradients, and the copies that are sent to other ranks.
    pub gradients: u64,
    /// Moments and, for a bf16 model, master weights.
    pub optimizer: u64,
    /// Peak of forward and backward on top of that.
    pub activations: u64,
    /// Libraries of a GPU.
    pub libraries: u64,
}

impl Memory {
    /// Returns the total in bytes.
    pub fn total(&self) -> u64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.libraries
    }
}

/// A change to the configuration, and the memory that the job needs with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saving {
    /// The keys with their new values, in configuration syntax.
    pub change: String,
    /// Memory with this change and all earlier ones.
    pub memory: Memory,
}

/// Returns the memory that a job of `ranks` ranks needs on each of them, on GPUs or on the CPU.
///
/// A pool that reaches the job's `engine.memory_limit_mb` frees its unused memory and continues, so a job may need less
/// with the limit than without it. If the job does not fit even then, this is the memory that it needs without the
/// limit.
pub fn memory(spec: &JobSpec, cuda: bool, ranks: usize) -> Result<Memory> {
    let needed = memory_within(None, spec, cuda, ranks)?;
    let limit = spec.engine.memory_limit_mb.map(|mib| mib.saturating_mul(1 << 20));
    match limit.filter(|limit| needed.total() - needed.libraries > *limit) {
        Some(limit) => Ok(memory_within(Some(limit), spec, cuda, ranks).unwrap_or(needed)),
        None => Ok(needed),
    }
}

/// Same as [`memory`], with the given limit of the pool.
fn memory_within(limit: Option<u64>, spec: &JobSpec, cuda: bool, ranks: usize) -> Result<Memory> {
    let shape = spec.model.resolve().map_err(SpecError::from)?;
    let tokens = spec.train.batch.saturating_mul(spec.train.accumulate).saturating_mul(shape.seq) as u64;
    let mut spec = spec.clone();
    spec.train.accumulate = spec.train.accumulate.min(MICRO_STEPS);
    let spec = &spec;
    let activations = session::activation_dtype(spec, cuda);
    let pool = PoolOptions {
        mode: session::pool_mode(spec, cuda),
        limit: limit.unwrap_or(u64::MAX),
        ..PoolOptions::default()
    };
    let backend = BackendHandle::new(Backend::dry_run(cuda, activations, pool)?);
    let live = || backend.pool().stats().live.current();
    let workspace = live();
    let shard = spec.shard(ranks, cuda, true);
    spec.check_experts(ranks).map_err(SpecError::from)?;
    let layout = Layout::of_rank(spec, &shape, ranks - 1, ranks).map_err(SpecError::from)?;
    let division = Division::new(spec, &layout, activations, ranks - 1, ranks, shard);
    let model = Model::of_layout(&backend, &shape, layout, division.weights.clone())?;
    let model = model.with_job(spec, ranks);
    let preferences = Preferences::new(&backend, &model, spec)?.map(Rc::new);
    let weights = live() - workspace;
    let optimizer = AdamW::zeroed(&backend, &model, &division.sharding, spec)?;
    let state = live() - workspace - weights;
    let stepper = Stepper::new(&backend, &model, spec, &division, ranks, preferences.clone())?;
    let gradients = live() - workspace - weights - state;
    let evaluator = Evaluator::new(&backend, &model, spec, &division, preferences)?;
    let mut collective = SkipAllReduce::all(Box::new(Local));
    for step in 0..STEPS {
        optimizer.prepare(step, 1.0)?;
        stepper.rehearse(&model, &optimizer, &mut collective)?;
    }
    if cuda && spec.engine.exec == Exec::Graph {
        // The captured graph keeps its memory while the first evaluations run operation by operation.
        backend.pool().pin_plans();
    }
    if spec.train.eval_every != 0 {
        (0..STEPS).try_for_each(|_| evaluator.run(&model, &optimizer, &mut collective))?;
    }
    let peak = backend.pool().stats().mapped.peak;
    let activations = peak.saturating_sub(weights + gradients + state);
    let libraries = match (cuda, ranks) {
        (false, _) => 0,
        (true, 1) => LIBRARIES,
        // The same is assumed for the communicators of a group and of its peers.
        (true, _) => {
            let experts = spec.comm.experts;
            LIBRARIES + NCCL * (1 + u64::from(experts > 1) + u64::from(experts > 1 && experts < ranks))
        }
    };
    let parameters = model.layout.parameters_of_all() as u64;
    let [all, used] = shape.feed_forward_parameters();
    let active = parameters - u64::try_from(all - used).unwrap_or(0);
    let trained = model.layout.whole().parameters() as u64;
    Ok(Memory {
        parameters,
        active,
        trained,
        tokens,
        weights,
        gradients,
        optimizer: state,
        activations,
        libraries,
    })
}

/// Returns changes that make the job smaller; unchanged, it needs `needed`. Each change is applied on top of the
/// previous ones, in order of increasing cost in time. The last one is the first with which the job fits into `limit`
/// bytes.
pub fn savings(spec: &JobSpec, needed: Memory, cuda: bool, ranks: usize, limit: u64) -> Result<Vec<Saving>> {
    let total = |savings: &[Saving]| savings.last().map_or(needed.total(), |saving| saving.memory.total());
    let divided = savings_on(Way::Divide, spec, needed, cuda, ranks, limit)?;
    if total(&divided) <= limit {
        return Ok(divided);
    }
    let split = savings_on(Way::Split, spec, needed, cuda, ranks, limit)?;
    Ok(if total(&split) < total(&divided) { split } else { divided })
}

/// Two mutually exclusive ways to save memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Divide gradients and parameters among the ranks.
    Divide,
    /// Split a step into several micro-steps.
    Split,
}

fn savings_on(
    way: Way,
    spec: &JobSpec,
    mut needed: Memory,
    cuda: bool,
    ranks: usize,
    limit: u64,
) -> Result<Vec<Saving>> {
    let (mut spec, mut found) = (spec.clone(), Vec::<Saving>::new());
    while needed.total() > limit
        && let Some((change, smaller)) = smaller(way, &spec, &needed, cuda, ranks)?
    {
        (spec, needed) = smaller;
        // The change replaces an earlier value of the same key.
        let key = |change: &str| change.split(" = ").next().map(str::to_owned);
        found.retain(|saving| key(&saving.change) != key(&change));
        found.push(Saving { change, memory: needed });
    }
    Ok(found)
}

type Smaller = (String, (JobSpec, Memory));

/// Returns the first change that saves memory.
fn smaller(way: Way, spec: &JobSpec, needed: &Memory, cuda: bool, ranks: usize) -> Result<Option<Smaller>> {
    for (change, changed) in changes(way, spec, cuda, ranks)? {
        let memory = memory(&changed, cuda, ranks)?;
        if memory.total() < needed.total() {
            return Ok(Some((change, (changed, memory))));
        }
    }
    Ok(None)
}

fn changes(way: Way, spec: &JobSpec, cuda: bool, ranks: usize) -> Result<Vec<(String, JobSpec)>> {
    let shape = spec.model.resolve().map_err(SpecError::from)?;
    let rows = spec.train.batch * shape.seq;
    // Blocks take turns in memory by whole buckets, and a default bucket holds several blocks of a small model.
    let bucket_mb =
        bucket_mb_of_blocks(&Layout::new(&shape), wire_dtype(spec, session::activation_dtype(spec, cuda)));
    let changed = |change: String, apply: &dyn Fn(&mut JobSpec)| {
        let mut changed = spec.clone();
        apply(&mut changed);
        (change, changed)
    };
    let divided = |more: Shard, name: &str| {
        let change = format!("comm.shard = \"{name}\"");
        // If the earlier change divided less, this line replaces it, so it names the bucket size again.
        if more < Shard::Gradients || spec.comm.bucket_mb < bucket_mb {
            return changed(change, &|spec| spec.comm.shard = more);
        }
        changed(format!("{change}, comm.bucket_mb = {bucket_mb}"), &|spec| {
            (spec.comm.shard, spec.comm.bucket_mb) = (more, bucket_mb);
        })
    };
    let shard = spec.shard(ranks, cuda, true);
    let divides = |more| {
        let wanted = (way == Way::Divide || more == Shard::Optimizer) && !spec.lora.is_on();
        // Divided experts are refused with more than a sharded optimizer.
        let wanted = wanted && (more == Shard::Optimizer || spec.comm.experts == 1);
        ranks > 1 && shard < more && wanted
    };
    let mut found = Vec::new();
    for (more, name) in [(Shard::Optimizer, "optimizer"), (Shard::Gradients, "gradients")] {
        if divides(more) {
            found.push(divided(more, name));
        }
    }
    if spec.train.classifier_chunk == 0 && rows > SMALLEST_CHUNK {
        let change = format!("train.classifier_chunk = {SMALLEST_CHUNK}");
        found.push(changed(change, &|spec| spec.train.classifier_chunk = SMALLEST_CHUNK));
    }
    if divides(Shard::Parameters) {
        found.push(divided(Shard::Parameters, "parameters"));
    }
    let recompute = |more, name: &str| {
        changed(format!("train.recompute = \"{name}\""), &|spec| spec.train.recompute = more)
    };
    if spec.train.recompute == Recompute::None {
        found.push(recompute(Recompute::Cheap, "cheap"));
    }
    if spec.train.recompute != Recompute::Block {
        found.push(recompute(Recompute::Block, "block"));
    }
    // Micro-steps are added up in F32, so several may need more memory than one.
    let mut parts = 2;
    while way == Way::Split && spec.train.batch.is_multiple_of(parts) {
        let (batch, accumulate) = (spec.train.batch / parts, spec.train.accumulate.saturating_mul(parts));
        let change = format!("train.batch = {batch}, train.accumulate = {accumulate}");
        found.push(changed(change, &|spec| {
            (spec.train.batch, spec.train.accumulate) = (batch, accumulate);
        }));
        parts *= 2;
    }
    Ok(found)
}

/// Returns a bucket size, in MiB, at which most matrices of a block have a bucket of their own: an eighth of the
/// block's gradients, rounded to 0.1.
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn bucket_mb_of_blocks(layout: &Layout, wire: DType) -> f64 {
    let block = layout.backward_parts().iter().map(Range::len).max().unwrap_or(0);
    let tenths = (block * wire.size()) as f64 / f64::from(1 << 20) / 8.0 * 10.0;
    tenths.ceil().max(1.0) / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_spec::job::Precision;

    fn spec() -> JobSpec {
        let mut spec = JobSpec::default();
        spec.comm.shard = Shard::None;
        spec.model.preset = Some("llama-28m".into());
        (spec.train.batch, spec.model.seq) = (32, Some(256));
        spec
    }

    #[test]
    fn sizes_are_those_of_parameters_and_their_element_types() {
        let (spec, n) = (spec(), 4 * 512);
        let parameters = crate::model::layout::Layout::new(&spec.model.resolve().unwrap()).len as u64;
        let near = |bytes: u64, expected: u64| {
            assert!(bytes >= expected && bytes - expected < n + expected / 50, "{bytes} {expected}");
        };
        let one = memory(&spec, true, 1).unwrap();
        near(one.weights, 2 * parameters);
        near(one.gradients, 2 * parameters);
        near(one.optimizer, 12 * parameters);
        let cpu = memory(&spec, false, 1).unwrap();
        near(cpu.weights, 4 * parameters);
        near(cpu.optimizer, 8 * parameters);
        assert_eq!(cpu.libraries, 0);
    }

    #[test]
    fn fp8_is_predicted_as_measured_on_an_h200() {
        // Measured peak of the pool in MiB, for a llama with a billion parameters and 32,768 tokens per micro-step.
        for (precision, measured) in [(Precision::Bf16, 65_546.0), (Precision::Fp8, 60_728.0)] {
            let mut spec = spec();
            spec.model.preset = Some("llama-1b".into());
            (spec.train.batch, spec.model.seq) = (16, Some(2048));
            (spec.train.eval_every, spec.engine.precision) = (0, Some(precision));
            let needed = memory(&spec, true, 1).unwrap();
            let predicted = (needed.total() - needed.libraries) as f64 / f64::from(1 << 20);
            assert!(
                (predicted / measured - 1.0).abs() < 0.03,
                "{precision:?}: {predicted:.0} of {measured:.0}"
            );
        }
    }

    #[test]
    fn evaluation_needs_memory_beside_that_of_the_graph_but_little() {
        let mut spec = spec();
        spec.model.preset = Some("llama-1b".into());
        (spec.train.batch, spec.model.seq, spec.train.eval_every) = (16, Some(2048), 0);
        let gib = |spec: &JobSpec| memory(spec, true, 1).unwrap().total() as f64 / f64::from(1 << 30);
        let trained = gib(&spec);
        spec.train.eval_every = 250;
        let evaluated = gib(&spec) - trained;
        // The inputs of the activation function have 1 GiB. A forward pass that kept its activations needed 30 GiB.
        assert!((1.0..4.0).contains(&evaluated), "{evaluated} GiB");
        assert!(trained + evaluated < 79.0, "fits on an H100 with 79.2 GiB");
    }

    #[test]
    fn each_change_saves_the_stated_memory() {
        let of = |change: fn(&mut JobSpec)| {
            let mut spec = spec();
            change(&mut spec);
            memory(&spec, true, 4).unwrap()
        };
        let all = of(|_| {});
        let cheap = of(|spec| spec.train.recompute = Recompute::Cheap);
        let block = of(|spec| spec.train.recompute = Recompute::Block);
        let shape = spec().model.resolve().unwrap();
        // Per token and block, two outputs of norms and one of SwiGLU; or everything except the input.
        let rows = 32 * 256 * shape.layers as u64;
        let (dim, ffn) = (2 * shape.dim as u64, 2 * shape.ffn as u64);
        let cheap_saves = all.activations - cheap.activations;
        let expected = rows * (2 * dim + ffn);
        assert!(cheap_saves.abs_diff(expected) < expected / 10, "{cheap_saves} {expected}");
        assert!(all.activations - block.activations > rows * (7 * dim + 3 * ffn) * 9 / 10);
        let chunk = of(|spec| spec.train.classifier_chunk = SMALLEST_CHUNK);
        let logits = (32 * 256 - SMALLEST_CHUNK as u64) * 2 * shape.padded_vocab() as u64;
        assert!(all.activations - chunk.activations <= logits);
        let sharded = of(|spec| spec.comm.shard = Shard::Optimizer);
        assert!(sharded.optimizer < all.optimizer * 35 / 100, "{sharded:?}");
        let gradients = of(|spec| spec.comm.shard = Shard::Gradients);
        let parameters = of(|spec| spec.comm.shard = Shard::Parameters);
        // Two tables of 50,304 rows stay whole, and 25 MiB of buckets are in memory at a time.
        let kept = 2 * 2 * 50_304 * 384 + (51 << 20);
        assert!(gradients.gradients < kept + sharded.weights / 4 + 1000, "{gradients:?}");
        assert!(parameters.weights < kept && parameters.weights < sharded.weights, "{parameters:?}");
        let accumulated = of(|spec| spec.train.accumulate = 2);
        // In F32, plus the rounded copy.
        let ratio = accumulated.gradients as f64 / all.gradients as f64;
        assert!((2.95..3.05).contains(&ratio), "{accumulated:?} {all:?}");
    }

    #[test]
    fn savings_end_with_the_first_that_fits() {
        let spec = spec();
        let needed = memory(&spec, true, 4).unwrap();
        assert_eq!(savings(&spec, needed, true, 4, needed.total()).unwrap(), []);
        let some = savings(&spec, needed, true, 4, needed.total() - 1).unwrap();
        assert_eq!(some.len(), 1, "{some:?}");
        let all = savings(&spec, needed, true, 4, LIBRARIES).unwrap();
        let changes: Vec<&str> = all.iter().map(|saving| &*saving.change).collect();
        let [.., "train.recompute = \"block\"", batch] = changes[..] else { panic!("{changes:?}") };
        assert_eq!(batch, "train.batch = 1, train.accumulate = 32");
        // A job that fits into the memory of divided parameters does not need micro-steps.
        let [.., smallest] = &savings_on(Way::Divide, &spec, needed, true, 4, LIBRARIES).unwrap()[..] else {
            panic!("no savings");
        };
        let divided = savings(&spec, needed, true, 4, smallest.memory.total()).unwrap();
        assert_eq!(divided.last(), Some(smallest));
        let changes: Vec<&str> = divided.iter().map(|saving| &*saving.change).collect();
        // Buckets of 25 MiB would hold several of its blocks, which then could not take turns.
        assert!(changes.contains(&"comm.shard = \"parameters\", comm.bucket_mb = 0.6"), "{changes:?}");
        assert!(all.windows(2).all(|pair| pair[1].memory.total() < pair[0].memory.total()));
        let three = memory(&spec, true, 3).unwrap();
        let three = savings_on(Way::Divide, &spec, three, true, 3, LIBRARIES).unwrap();
        assert!(three.iter().any(|saving| saving.change.contains("shard")), "{three:?}");
    }
}
