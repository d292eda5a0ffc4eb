//! Internals for integration tests. Tests of kernels, NVRTC and cuDNN run only if these are installed.

use std::collections::BTreeSet;

use crate::backend::Backend;
use crate::cuda::compile::{Macro, Source};
use crate::cuda::cudnn::descriptor::Descriptor;
use crate::cuda::cudnn::graph::Target;
use crate::cuda::cudnn::library::Library;
use crate::cuda::device::NVIDIA_WARP;
use crate::cuda::{STATIC_SHARED, compile};
use crate::error::EngineError;
pub use crate::ops::activation::cuda::ActivationVariant;
pub use crate::ops::attention::cuda::AttentionVariant;
use crate::ops::attention::cudnn::{AttentionPlan, Direction};
use crate::ops::attention::hopper::KERNELS as ATTENTION_KERNELS;
pub use crate::ops::attention::hopper::QueryGradients;
use crate::ops::attention::variant::{OwnKernels, Scores};
use crate::ops::experts::grouped::hopper::{FP8_KERNELS as GROUPED_FP8_KERNELS, KERNELS as GROUPED_KERNELS};
use crate::ops::glu::hopper;
pub use crate::ops::glu::hopper::Tiling;
use crate::ops::linear::weight_grads;
use crate::ops::muon::symmetric::KERNELS as SYMMETRIC_KERNELS;
use crate::ops::{
    Activation, AttentionShape, Cuda, KERNEL_FILES, LinearShape, activation, cached_attention, glu,
};
use crate::options::{CudaOptions, Precision};

/// Makes a back end use this variant of the tanh form of GELU for layers of these shapes before and after it.
pub fn force_gelu_variant(
    backend: &Backend,
    before: LinearShape,
    after: LinearShape,
    variant: ActivationVariant,
) {
    gpu(backend).activation.force(before, after, variant);
}

/// Makes a back end compute attention with this variant, for all shapes that it supports.
pub fn force_attention(backend: &Backend, variant: Option<AttentionVariant>) {
    gpu(backend).attention.force(variant);
}

/// Makes a back end compute linear layers with gated activations with our own GEMM and this tiling, for all layers that
/// it supports.
pub fn force_glu_tiling(backend: &Backend, tiling: Option<Tiling>) {
    gpu(backend).glu.force(tiling);
}

/// Makes a back end compute layers of experts with the portable kernels, or with the fastest ones again.
pub fn force_portable_experts(backend: &Backend, portable: bool) {
    gpu(backend).grouped.force_portable(portable);
}

/// Makes a back end compute the gradients of two layers' weights in one kernel, with the rows in this number of parts,
/// for all layers that it supports.
pub fn force_weight_grads_together(backend: &Backend, parts: Option<usize>) {
    gpu(backend).weight_grads.force(parts);
}

/// Makes a back end in TF32 transpose one operand of every gradient of weights, or no operand.
pub fn force_transposed_weight_grads(backend: &Backend, transposed: Option<bool>) {
    gpu(backend).weight_grads.one.force(transposed);
}

fn gpu(backend: &Backend) -> &Cuda {
    backend.gpu().unwrap_or_else(|| panic!("only a GPU has variants"))
}

/// Requirement of tests on a GPU: the first GPU can be opened.
///
/// # Errors
/// The missing library or device. Other failures are left to the tests, which run into them.
pub fn require_gpu() -> Result<(), String> {
    match Backend::cuda(0, CudaOptions::new(Precision::Fp32, xlaunch_pool::Mode::On)) {
        Err(error @ (EngineError::Library { .. } | EngineError::Device { .. })) => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Returns whether NVRTC can be loaded.
pub fn has_nvrtc() -> bool {
    // SAFETY: the check opens the library, whose initialisers have no preconditions.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

/// The compiler's report on a kernel: registers per thread, bytes spilled to memory, and static shared memory of a
/// block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    pub kernel: String,
    pub registers: usize,
    pub spilled: usize,
    pub shared: usize,
}

/// Compiles every kernel file for `arch` in these precisions; those of attention for these head widths, with and
/// without tensor cores, for plain scores and those with everything, or for `every_kind` of scores. What precisions
/// share is compiled once. Returns each file with the resources of its kernels.
///
/// # Errors
/// The compiler's log, the name of a kernel that is missing from a cubin, or of one that leaves less dynamic shared
/// memory than its launch may request.
pub fn compile_kernels(
    arch: &str,
    precisions: &[Precision],
    widths: &[usize],
    every_kind: bool,
) -> Result<Vec<(&'static str, Vec<Resources>)>, String> {
    let mut compiled = BTreeSet::new();
    let mut files = Vec::new();
    for precision in precisions {
        for (source, macros, names) in kernels_to_compile(arch, *precision, widths, every_kind) {
            let mut options = compile::options(arch, NVIDIA_WARP, precision.activations(), &macros);
            options.push("--ptxas-options=-v".into());
            if compiled.insert((source.file, options.clone())) {
                files.push((source.file, compile_one(source, arch, &options, &names)?));
            }
        }
    }
    Ok(files)
}

/// Returns sources with macros and the names of their kernels.
fn kernels_to_compile(
    arch: &str,
    precision: Precision,
    widths: &[usize],
    every_kind: bool,
) -> impl Iterator<Item = (Source, Vec<Macro>, Vec<&'static str>)> {
    let common = KERNEL_FILES.map(|file| (file.source, file.macros.to_vec(), file.kernels.to_vec()));
    let attention = widths.iter().flat_map(move |width| {
        // Narrow heads, and kernels on FP32 units, have registers to spare, so plain scores are enough for these.
        let last = Scores::ALL.len() - 1;
        let some = move |kind: usize| kind == 0 || *width >= 64 && (every_kind || kind == last);
        let kinds = (0..=last).filter(move |kind| some(*kind)).map(|kind| ((9, 0), Scores::ALL[kind]));
        kinds.chain([((7, 5), Scores::default())]).map(move |(capability, scores)| {
            let kernels = OwnKernels::select(precision, capability, *width, scores);
            let (source, macros) = kernels.source();
            (source, macros, kernels.kernels().0)
        })
    });
    let cached = widths
        .iter()
        .flat_map(|width| [1, 3, 4].map(|group| cached_attention::cuda::source_for((*width, group))));
    let activations = Activation::ALL.into_iter();
    let activations = activations.flat_map(|f| [activation::cuda::compilation(f), glu::cuda::compilation(f)]);
    // Only for bf16, and only for the compute capability whose instructions they use.
    let hopper = hopper::KERNELS.iter().flatten().chain([&weight_grads::KERNEL]).chain(&GROUPED_KERNELS);
    let hopper = hopper.chain(&GROUPED_FP8_KERNELS).chain(&SYMMETRIC_KERNELS);
    let hopper = hopper.chain(ATTENTION_KERNELS.iter().flat_map(|kernels| kernels.all()));
    let has_hopper = precision == Precision::Bf16 && arch == "sm_90a";
    let hopper = hopper.filter(move |_| has_hopper);
    let hopper = hopper.map(|kernel| (kernel.source, kernel.macros.to_vec(), vec![kernel.name]));
    common.into_iter().chain(attention).chain(cached).chain(activations).chain(hopper)
}

fn compile_one(
    source: Source,
    arch: &str,
    options: &[String],
    names: &[&str],
) -> Result<Vec<Resources>, String> {
    let compiled = compile::compile_with_log(source, arch, options);
    let (cubin, log) = compiled.map_err(|error| error.to_string())?;
    for name in names {
        if !cubin.windows(name.len()).any(|window| window == name.as_bytes()) {
            return Err(format!("{}: {name} is missing", source.file));
        }
    }
    let resources = resources(&log);
    let dynamic = KERNEL_FILES.iter().flat_map(|file| file.dynamic_shared);
    for name in dynamic {
        let large = |found: &&Resources| found.kernel == *name && found.shared > STATIC_SHARED;
        if let Some(found) = resources.iter().find(large) {
            return Err(format!("{name}: {} bytes of static shared memory", found.shared));
        }
    }
    Ok(resources)
}

/// Reads the output of `ptxas -v`, such as:
///
/// ```text
/// ptxas info    : Compiling entry function 'norm_fwd' for 'sm_90'
/// ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
/// ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size, 8384 bytes smem
/// ```
fn resources(log: &str) -> Vec<Resources> {
    let before = |line: &str, unit: &str| -> Option<usize> {
        line[..line.find(unit)?].trim_end().rsplit(' ').next()?.parse().ok()
    };
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            let kernel = name.split('\'').next().unwrap_or_default().to_owned();
            found.push(Resources { kernel, registers: 0, spilled: 0, shared: 0 });
        }
        let Some(last) = found.last_mut() else { continue };
        last.spilled = before(line, "bytes spill stores").unwrap_or(last.spilled);
        last.registers = before(line, "registers").unwrap_or(last.registers);
        last.shared = before(line, "bytes smem").unwrap_or(last.shared);
    }
    found
}

/// Returns the names of all kernels of this precision.
pub fn kernel_names(precision: Precision) -> Vec<&'static str> {
    let common = KERNEL_FILES.iter().flat_map(|file| file.kernels.iter().copied());
    let widths = [32, 256].into_iter();
    let attention =
        widths.flat_map(|width| OwnKernels::select(precision, (9, 0), width, Scores::default()).kernels().0);
    let cached = cached_attention::cuda::source_for((64, 1)).2;
    let activations = [activation::cuda::compilation, glu::cuda::compilation];
    let activations = activations.into_iter().flat_map(|compilation| compilation(Activation::Silu).2);
    common.chain(attention).chain(cached).chain(activations).collect()
}

/// Checks that attention by cuDNN can be planned without a GPU.
///
/// # Errors
/// The missing library.
pub fn find_cudnn() -> Result<(), String> {
    Library::get()?;
    // SAFETY: the check opens the library, whose initialisers have no preconditions.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err("the CUDA driver, which cuDNN's engines load, is not installed".into());
    }
    Ok(())
}

/// Returns the bytes of scratch memory of cuDNN's forward and backward for a device that need not be present, described
/// by the library's JSON properties.
///
/// # Errors
/// The error of the library.
pub fn cudnn_attention_scratch(properties: &str, s: AttentionShape) -> Result<[usize; 2], String> {
    use cudarc::cudnn::sys::{
        cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
    };
    let plan = |direction| {
        let device = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        device.set(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, properties.as_bytes())?;
        let target = Target::Properties(device.finalize()?);
        AttentionPlan::new(s, direction, &target).map(|plan| plan.scratch)
    };
    let plan = |direction| plan(direction).map_err(|error| error.to_string());
    Ok([plan(Direction::Forward)?, plan(Direction::Backward)?])
}
