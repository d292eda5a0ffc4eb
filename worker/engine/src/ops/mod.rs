//! The operations of a GPT trainer, one folder each: formulas, shapes and arguments in `mod.rs`, the CPU implementation
//! in `cpu.rs`, checks and launches in `cuda.rs`, kernels in `kernel.cu`. Short implementations are in `mod.rs`, too. A
//! new operation is a new folder, whose types and kernels are listed in this file: `pub use` names what each defines.
//!
//! An argument struct documents the shape of each operand at its field. Letters: B batch, T sequence, C model width, H
//! heads, Hkv key heads, D head width, F ffn, V vocabulary, Vp padded vocabulary, L layers; N = B T rows of tokens.
//! Arrays are row-major.

pub(crate) mod activation;
pub(crate) mod adamw;
pub(crate) mod add_scaled;
pub(crate) mod attention;
pub(crate) mod cached_attention;
pub(crate) mod cast;
pub(crate) mod checksum;
pub(crate) mod classifier;
pub(crate) mod documents;
pub(crate) mod embed;
pub(crate) mod experts;
pub(crate) mod fp8;
pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod glu;
pub(crate) mod greedy;
pub(crate) mod linear;
pub(crate) mod mark;
pub(crate) mod muon;
pub(crate) mod norm;
pub(crate) mod preference;
pub(crate) mod qk_norm;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod softcap;

pub use activation::{
    Activation, ActivationBackward, ActivationForward, ActivationLinearBackward, LinearActivationForward,
};
pub use adamw::{AdamWConfig, AdamWStep, GROUP_CHUNK, GROUPS, MUON_GROUP, scalar};
pub use add_scaled::{AddScaled, AddTo};
pub use attention::{
    AttentionBackward, AttentionForward, AttentionOptions, AttentionShape, AttentionSinksBackward,
    AttentionSinksForward, Scalar,
};
pub use cached_attention::{CachedAttention, CachedAttentionShape};
pub use cast::Cast;
pub use checksum::{CHECKSUM_DIGITS, Checksum};
pub use classifier::{ClassifierShape, FusedClassifier, IGNORED};
pub use documents::Documents;
pub use embed::{EmbedBackward, EmbedForward, EmbedShape};
pub use experts::{
    BalanceLoss, CombineRows, CombineRowsBackward, ExpertBiasBackward, ExpertBiasForward, GatherRows,
    GatherRowsBackward, GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedFp8,
    GroupedProduct, GroupedShape, MAX_CHOSEN, MAX_EXPERTS, RouteBackward, RouteForward, RouteShape, Router,
    RouterLogits, RowsShape, SortByExpert, UpdateRouterBias,
};
pub use fp8::{Amax, FP8_MULTIPLE, Fp8Operand, GemmFp8, QuantizeFp8};
pub use gemm::{Gemm, Matrix};
pub use gemv::{GEMV_ROWS, Gemv};
pub use glu::{GluBackward, GluForward, GluInputs, GluLinearBackward, LinearGluForward};
pub use greedy::Greedy;
pub use linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearShape};
pub use mark::{Mark, Marks};
pub use muon::{
    MUON_ALIGN, MuonMomentum, MuonPack, MuonPiece, MuonPieces, MuonRowFactors, MuonRowMoments, MuonUpdate,
    Orthogonalize, StepConditions, orthogonal_operations,
};
pub use norm::{NormBackward, NormForward, NormKind, NormShape, Residual, ResidualAdd};
pub use preference::PreferenceLoss;
pub use qk_norm::{QkNorm, QkNormBackward, QkNormForward, QkNorms};
pub use reduce::{ColumnSum, Scale, SquaredNorm, Sum};
pub use softcap::SoftCap;

use std::ops::Deref;

use xlaunch_pool::DType;

use crate::cpu::Threads;
use crate::cuda::hopper::HopperKernel;
use crate::cuda::{Gpu, KernelFile, Macro, Source};
use crate::error::Result;

/// An operation, which is the struct of its arguments. [`Backend::run`](crate::Backend::run) runs it.
///
/// Contract of all operations:
///
/// - activations have the type [`Backend::activation_dtype`](crate::Backend::activation_dtype), as do the parameters
///   that forward and backward read; statistics, losses, master weights and optimizer state are F32; token ids are I32;
/// - gradients of parameters are F32 or Bf16, independently of the activations; sums are formed in F32;
/// - outputs are written completely, inputs are not changed, and an output overlaps no other operand unless the
///   operation works in place;
/// - the result is the same in every run, except for variants that
///   [`CudaOptions::deterministic`](crate::CudaOptions::deterministic) rules out;
/// - a slice of the wrong length or element type is a programming error and panics before any memory is touched.
pub trait Op: Copy {
    /// Runs on the CPU: the readable reference of [`cuda`](Self::cuda).
    fn cpu(self, threads: &Threads);

    /// Enqueues to the GPU's compute stream.
    fn cuda(self, gpu: &Cuda) -> Result<()>;

    /// Returns the bytes of memory that [`cuda`](Self::cuda) allocates while it runs, as far as they matter for the
    /// memory of a job.
    fn scratch(&self) -> usize {
        0
    }
}

/// An open GPU, and the state that operations keep on it between calls.
#[derive(Debug)]
pub struct Cuda {
    pub(crate) activation: activation::cuda::Activations,
    pub(crate) attention: attention::cuda::Attention,
    pub(crate) cached_attention: cached_attention::cuda::CachedKernels,
    pub(crate) glu: glu::cuda::Glu,
    pub(crate) grouped: experts::grouped::cuda::Grouped,
    pub(crate) weight_grads: linear::weight_grads::WeightGrads,
    pub(crate) marks: mark::cuda::Counter,
    /// Dropped last, because the others use it.
    gpu: Gpu,
}

impl Cuda {
    pub(crate) fn new(gpu: Gpu) -> Self {
        Self {
            activation: Default::default(),
            attention: Default::default(),
            cached_attention: Default::default(),
            glu: Default::default(),
            grouped: Default::default(),
            weight_grads: Default::default(),
            marks: Default::default(),
            gpu,
        }
    }

    /// Compiles kernels that the cache lacks, and opens cuDNN, in the background.
    pub(crate) fn prepare(&self, work: Work) {
        let special = match work {
            Work::Any => Vec::new(),
            Work::Training(operations) => self.prepare_operations(&operations),
        };
        let is_used = |file: &&&KernelFile| match work {
            Work::Any => true,
            Work::Training(operations) => operations.use_file(file),
        };
        let common = KERNEL_FILES.iter().filter(is_used).map(|file| (file.source, file.macros.to_vec()));
        self.kernels.compile_in_background(special.into_iter().chain(common));
    }

    /// Opens cuDNN in the background, if these operations use it. Returns sources, with their macros, of kernels that
    /// only they use.
    fn prepare_operations(&self, operations: &Operations) -> Vec<(Source, Vec<Macro>)> {
        let Operations { attention, activation, gated, experts, muon, fp8, .. } = *operations;
        self.attention.prepare(self, attention);
        let compilation = if gated { glu::cuda::compilation } else { activation::cuda::compilation };
        let (source, macros, _) = compilation(activation);
        let has_hopper = self.activations == DType::Bf16 && self.hopper.supports(&[], &[], &[]);
        let hopper: [&[HopperKernel]; 4] = [
            if gated { &glu::hopper::KERNELS[activation as usize] } else { &[] },
            std::slice::from_ref(&linear::weight_grads::KERNEL),
            match (experts, fp8) {
                (true, true) => &experts::grouped::hopper::FP8_KERNELS,
                (true, false) => &experts::grouped::hopper::KERNELS,
                (false, _) => &[],
            },
            if muon { &muon::symmetric::KERNELS } else { &[] },
        ];
        let hopper = hopper.into_iter().flatten().filter(|_| has_hopper).map(HopperKernel::compilation);
        let attention = attention::cuda::Attention::sources(self, attention);
        attention.into_iter().chain(hopper).chain([(source, macros)]).collect()
    }
}

/// The work that a GPU is prepared for.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// All kernels of [`KERNEL_FILES`].
    Any,
    /// A training job with these operations.
    Training(Operations),
}

/// Operations of a training job that decide which kernels it needs.
#[derive(Clone, Copy, Debug)]
pub struct Operations {
    pub attention: AttentionShape,
    /// The function of the feed-forward layers.
    pub activation: Activation,
    pub gated: bool,
    /// Norms of queries and keys.
    pub qk_norm: bool,
    /// Attention sinks.
    pub sinks: bool,
    pub experts: bool,
    pub muon: bool,
    pub fp8: bool,
    /// The loss of pairs of documents.
    pub preferences: bool,
}

impl Operations {
    /// Returns whether the job needs kernels of this file. If the answer is wrong, they are compiled on first use.
    fn use_file(&self, file: &KernelFile) -> bool {
        match file.source.file.split('/').next() {
            Some("attention") => self.sinks,
            Some("experts") => self.experts,
            Some("fp8") => self.fp8,
            // Of generation.
            Some("gemv" | "greedy" | "softcap") => false,
            Some("muon") => self.muon,
            Some("preference") => self.preferences,
            Some("qk_norm") => self.qk_norm,
            _ => true,
        }
    }
}

impl Deref for Cuda {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// Treatment of the previous contents of a slice when a gradient is written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// Previous contents are ignored, even NaN.
    Overwrite,
    /// The slice holds the sum of earlier micro-steps.
    Add,
}

/// Kernel files with the same macros for every job, in the order in which they are compiled: those that take longest
/// first. Files of attention differ by head width, and those of activation functions by function.
pub(crate) const KERNEL_FILES: [&KernelFile; 25] = [
    &qk_norm::cuda::KERNELS,
    &classifier::KERNELS,
    &embed::cuda::KERNELS,
    &norm::cuda::KERNELS,
    &experts::grouped::cuda::KERNELS,
    &experts::route::KERNELS,
    &gemv::cuda::KERNELS,
    &muon::KERNELS,
    &reduce::cuda::KERNELS,
    &adamw::KERNELS,
    &add_scaled::KERNELS,
    &cast::KERNELS,
    &rope::KERNELS,
    &mark::cuda::KERNELS,
    &checksum::KERNELS,
    &linear::transposed::KERNELS,
    &fp8::cuda::KERNELS,
    &experts::rows::KERNELS,
    &experts::sort::KERNELS,
    &experts::bias::KERNELS,
    &experts::layer_bias::KERNELS,
    &attention::sinks::KERNELS,
    &preference::KERNELS,
    &greedy::KERNELS,
    &softcap::KERNELS,
];

#[cfg(test)]
mod tests {
    use super::attention::variant::Scores;
    use super::*;
    use crate::options::Precision;

    /// Programmatic dependent launch lets a kernel start before its predecessor has ended.
    #[test]
    fn every_kernel_starts_with_the_pdl_wait() {
        let precisions = [Precision::Fp32, Precision::Tf32, Precision::Bf16].into_iter();
        let attention = precisions.flat_map(|precision| {
            [32, 256].map(|width| {
                attention::variant::OwnKernels::select(precision, (9, 0), width, Scores::default()).source().0
            })
        });
        let cached = cached_attention::cuda::source_for((32, 1)).0;
        let activations = [activation::cuda::compilation, glu::cuda::compilation];
        let activations = activations.map(|compilation| compilation(Activation::Silu).0);
        let common = KERNEL_FILES.map(|file| file.source).into_iter();
        let sources = common.chain(attention).chain([cached]).chain(activations);
        for source in sources {
            let mut kernels = 0;
            for kernel in source.text.split("extern \"C\" __global__").skip(1) {
                let (name, body) =
                    kernel.split_once(")\n    {").or_else(|| kernel.split_once(") {")).unwrap();
                let first = body.trim_start().lines().next();
                assert_eq!(first, Some("pdl_wait_and_launch();"), "{}: {name}", source.file);
                kernels += 1;
            }
            assert!(kernels > 0, "{}", source.file);
        }
    }
}
