//! Internals that integration tests need: tests of kernels, NVRTC and cuDNN run only where these are installed.

use crate::backend::CudaBackend;
use crate::cuda::compile;
use crate::cuda::cudnn::descriptor::Descriptor;
use crate::cuda::cudnn::graph::Target;
use crate::cuda::cudnn::library::Library;
use crate::error::EngineError;
use crate::ops::attention::cudnn::{AttentionPlan, Direction};
use crate::ops::attention::variant::OwnKernels;
pub use crate::ops::gelu::cuda::GeluVariant;
use crate::ops::{AttentionShape, KERNEL_FILES, LinearShape, cached_attention};
use crate::options::{CudaOptions, Precision};

/// Makes a back end use this variant of GELU for the layers of these shapes before and after it.
pub fn force_gelu_variant(
    backend: &CudaBackend,
    before: LinearShape,
    after: LinearShape,
    variant: GeluVariant,
) {
    backend.gelu.force(before, after, variant);
}

/// The requirement of tests on a GPU: the first one can be opened.
///
/// # Errors
/// What is missing: a library or the device. Any other failure is one of the tests, which meet it.
pub fn require_gpu() -> Result<(), String> {
    match CudaBackend::open(0, CudaOptions::new(Precision::Fp32, xlaunch_pool::Mode::On)) {
        Err(error @ (EngineError::Library { .. } | EngineError::Device { .. })) => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Whether NVRTC can be loaded.
pub fn has_nvrtc() -> bool {
    // SAFETY: the check opens the library, whose initialisers have no preconditions.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

/// Compiles every kernel file for `arch` in this precision; attention's for these head widths, with tensor cores and
/// without.
///
/// # Errors
/// The compiler's log, or the name of a kernel that a cubin lacks.
pub fn compile_kernels(arch: &str, precision: Precision, widths: &[usize]) -> Result<(), String> {
    let common = KERNEL_FILES.map(|file| (file.source, file.macros.to_vec(), file.kernels.to_vec()));
    let attention = widths.iter().flat_map(|width| {
        [(7, 5), (9, 0)].map(|capability| {
            let kernels = OwnKernels::select(precision, capability, *width);
            let (source, macros) = kernels.source();
            (source, macros, kernels.kernels().0)
        })
    });
    let cached = widths
        .iter()
        .flat_map(|width| [1, 3, 4].map(|group| cached_attention::cuda::source_for(*width, group)));
    for (source, macros, names) in common.into_iter().chain(attention).chain(cached) {
        let options = compile::options(arch, precision.activations(), &macros);
        let cubin = compile::compile(source, arch, &options).map_err(|error| error.to_string())?;
        for name in names {
            if !cubin.windows(name.len()).any(|window| window == name.as_bytes()) {
                return Err(format!("{}: {name} is missing", source.file));
            }
        }
    }
    Ok(())
}

/// Names of all kernels of this precision.
pub fn kernel_names(precision: Precision) -> Vec<&'static str> {
    let common = KERNEL_FILES.iter().flat_map(|file| file.kernels.iter().copied());
    let widths = [32, 256].into_iter();
    let attention = widths.flat_map(|width| OwnKernels::select(precision, (9, 0), width).kernels().0);
    let cached = cached_attention::cuda::source_for(64, 1).2;
    common.chain(attention).chain(cached).collect()
}

/// What planning attention by cuDNN without a GPU lacks, if anything.
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

/// Bytes of scratch memory of cuDNN's forward and backward for a device that need not be present, described by the
/// library's JSON properties.
///
/// # Errors
/// The library's.
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
