//! Autotuning: finds the fastest of cuBLASLt's algorithms for a site, once per host.
//!
//! The first algorithm of the library's heuristic is usually, but not always, the fastest. When a site is first seen,
//! the candidates are timed on its own operands, and the choice is kept on disk: all ranks and all later runs use the
//! same algorithm and so get the same bits. Variants of an operation with and without an epilogue are selected in the
//! same way.

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t as Algorithm, cublasLtMatmulPreferenceAttributes_t as Preference,
};
use xxhash_rust::xxh3::xxh3_128;

use super::{Gemm, GemmCall, Objects, Site, WORKSPACE, failed, timing};
use crate::cache::cached;
use crate::cuda::graph;
use crate::error::Result;

/// Number of algorithms requested from the heuristic.
const CANDIDATES: usize = 32;

/// Selects the algorithm of a site. `call` may be repeated any number of times.
pub(super) fn algorithm(
    gemm: &Gemm,
    site: &Site,
    objects: &Objects,
    call: &GemmCall<'_>,
) -> Result<Algorithm> {
    let none = |error| failed(&format!("failed to find an algorithm for {site}"), error);
    let candidates = candidates(gemm, site, objects).map_err(none)?;
    let first = *candidates.first().ok_or_else(|| none(NOT_SUPPORTED))?;
    let untimed = match () {
        () if !gemm.timed => Some("the run is deterministic"),
        () if call.accumulate => Some("it accumulates, so it cannot be repeated for timing"),
        () if graph::is_capturing(&gemm.device)? => {
            Some("it was first seen during a capture, which runs nothing")
        }
        () => None,
    };
    let instead_of = untimed.map(|reason| ("the fastest", reason));
    let variant =
        if untimed.is_some() { "cuBLASLt's first algorithm" } else { "cuBLASLt's fastest algorithm" };
    gemm.variants.selected("gemm", site, variant, instead_of);
    if untimed.is_some() || candidates.len() == 1 {
        return Ok(first);
    }
    let bytes = |algorithm: Algorithm| bytemuck::cast_slice(&algorithm.data).to_vec();
    let parse = |bytes: Vec<u8>| match <[u8; size_of::<Algorithm>()]>::try_from(bytes) {
        Ok(bytes) => Ok(Algorithm { data: bytemuck::cast(bytes) }),
        Err(_) => Err(none(NOT_SUPPORTED)),
    };
    let launch = |index: usize| {
        // SAFETY: the caller's call, on its own operands.
        let launched = unsafe { gemm.enqueue(objects, &candidates[index], call) };
        launched.map_err(|error| failed(&format!("failed to time {site}"), error))
    };
    cached(&file_name(gemm, "gemm", &format!("{site:?}")), parse, || {
        let (count, at_limit) = (candidates.len(), &gemm.last_at_limit);
        let found = timing::fastest(&gemm.device, count, timing::LONG_SECONDS, at_limit, launch)?;
        Ok(bytes(found.map_or(first, |index| candidates[index])))
    })
}

/// Returns the first algorithm of the library's heuristic.
pub(super) fn first(gemm: &Gemm, site: &Site, objects: &Objects) -> Result<Algorithm> {
    let none = |error| failed(&format!("failed to find an algorithm for a batch of {site}"), error);
    let candidates = candidates(gemm, site, objects).map_err(none)?;
    gemm.variants.selected("gemm", site, "cuBLASLt's first algorithm for a batch", None);
    candidates.first().copied().ok_or_else(|| none(NOT_SUPPORTED))
}

impl Gemm {
    /// Returns the index of the fastest variant of an operation that consists of GEMMs and kernels: the first one, or
    /// one that is clearly faster than the earlier ones. `run` may be called any number of times; variants that fail
    /// are ignored. `site` names everything that the answer depends on other than the device and the library. Returns
    /// `None` during a capture, in which nothing runs.
    pub(crate) fn fastest_variant(
        &self,
        site: &str,
        count: usize,
        run: impl Fn(usize) -> Result<()>,
    ) -> Result<Option<usize>> {
        if graph::is_capturing(&self.device)? {
            return Ok(None);
        }
        let parse = |bytes: Vec<u8>| match bytes[..] {
            [index] if usize::from(index) < count => Ok(Some(usize::from(index))),
            _ => Err(failed("failed to read the fastest variant", NOT_SUPPORTED)),
        };
        cached(&file_name(self, "variant", site), parse, || {
            let found = timing::fastest(&self.device, count, 0.0, &self.last_at_limit, run)?.unwrap_or(0);
            Ok(vec![u8::try_from(found).unwrap_or(0)])
        })
    }
}

const NOT_SUPPORTED: CublasError = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);

/// File name of a choice, which is valid for one device, library version and site.
fn file_name(gemm: &Gemm, kind: &str, site: &str) -> String {
    // SAFETY: the function has no preconditions; opening the device has checked that the library is installed.
    let version = unsafe { sys::cublasLtGetVersion() };
    let (name, compute) = (&gemm.device.info.name, gemm.compute);
    let key = format!("{version} {name} {compute:?} {WORKSPACE} {} {site}", timing::VERSION);
    format!("{kind}-{:032x}.choice", xxh3_128(key.as_bytes()))
}

/// Returns the library's algorithms in the order of its heuristic.
fn candidates(
    gemm: &Gemm,
    site: &Site,
    objects: &Objects,
) -> std::result::Result<Vec<Algorithm>, CublasError> {
    let preference = result::create_matmul_pref()?;
    let [align_a, align_b, align_c, _] = site.alignment.map(|bytes| u32::try_from(bytes).unwrap_or(16));
    let empty = sys::cublasLtMatmulHeuristicResult_t {
        algo: Algorithm { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    };
    let (mut found, mut count) = ([empty; CANDIDATES], 0);
    // SAFETY: the preference was just created and is destroyed once, below; values have the attributes' types; all
    // layouts are alive; the array has room for the requested number of results.
    unsafe {
        prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a)?;
        prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b)?;
        prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c)?;
        prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_c)?;
        let asked = sys::cublasLtMatmulAlgoGetHeuristic(
            gemm.handle,
            objects.description,
            objects.a,
            objects.b,
            objects.c,
            objects.c,
            preference,
            CANDIDATES as i32,
            found.as_mut_ptr(),
            &raw mut count,
        );
        result::destroy_matmul_pref(preference)?;
        asked.result()?;
    }
    let found = found.iter().take(usize::try_from(count).unwrap_or(0));
    Ok(found.filter(|result| result.state.result().is_ok()).map(|result| result.algo).collect())
}

/// # Safety
/// The preference is alive and `T` is the attribute's type.
unsafe fn prefer<T>(
    preference: sys::cublasLtMatmulPreference_t,
    attribute: Preference,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        result::set_matmul_pref_attribute(
            preference,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}
