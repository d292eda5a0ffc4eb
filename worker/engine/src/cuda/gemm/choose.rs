//! Which of cuBLASLt's algorithms computes a product: the fastest of those it proposes, found out once per host.
//!
//! The library's first proposal is the fastest most of the time, not always. The candidates are timed where a product is
//! first met, on its own operands, and the choice is kept on disk: all ranks and all later runs take the same algorithm, and
//! so get the same bits. Ways to compute something with and without an epilogue are chosen among likewise.

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulAlgo_t as Algorithm, cublasLtMatmulPreferenceAttributes_t as Preference,
};
use xxhash_rust::xxh3::xxh3_128;

use super::{Call, Gemm, Objects, Site, WORKSPACE, failed};
use crate::backend::Result;
use crate::cache::cached;
use crate::cuda::device::Device;
use crate::cuda::graph;
use crate::cuda::profile::{mark, seconds};

/// Proposals asked for.
const CANDIDATES: usize = 32;
/// A measurement is the shortest of ROUNDS rounds of LAUNCHES launches.
const ROUNDS: usize = 3;
const LAUNCHES: u16 = 4;
/// A proposal is left for a later one that takes less than this share of its time.
const CLEARLY_FASTER: f64 = 0.98;
/// One that takes so many times the best in its first round gets no other.
const HOPELESS: f64 = 1.2;

/// The algorithm of a site. `call` may be run any number of times.
pub(super) fn algorithm(gemm: &Gemm, site: &Site, objects: &Objects, call: &Call<'_>) -> Result<Algorithm> {
    let none = |error| failed(&format!("failed to find an algorithm for {site}"), error);
    let candidates = candidates(gemm, site, objects).map_err(none)?;
    let first = *candidates.first().ok_or_else(|| none(NOT_SUPPORTED))?;
    let untimed = match () {
        () if !gemm.timed => Some("the run is to be deterministic"),
        () if call.add => Some("it adds to its output, so it cannot be tried out"),
        () if graph::is_capturing(&gemm.device)? => Some("it was first met in a capture, which runs nothing"),
        () => None,
    };
    let instead_of = untimed.map(|reason| ("the fastest one", reason));
    let path =
        if untimed.is_some() { "cuBLASLt's first proposal" } else { "the fastest of cuBLASLt's proposals" };
    gemm.fallback.took("product", site, path, instead_of);
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
    cached(&file_name(gemm, "product", &format!("{site:?}")), parse, || {
        let found = fastest(&gemm.device, candidates.len(), launch)?;
        Ok(bytes(found.map_or(first, |index| candidates[index])))
    })
}

impl Gemm {
    /// Which of several ways with products to one result is the fastest: the number of the first, or of one that is clearly
    /// faster than those before it. `go` may be called any number of times; a way that fails is none. `site` names all that
    /// the answer depends on beside the device and the library. `None` while a capture goes on, which runs nothing.
    pub(in crate::cuda) fn fastest_way(
        &self,
        site: &str,
        count: usize,
        go: impl Fn(usize) -> Result<()>,
    ) -> Result<Option<usize>> {
        if graph::is_capturing(&self.device)? {
            return Ok(None);
        }
        let parse = |bytes: Vec<u8>| match bytes[..] {
            [index] if usize::from(index) < count => Ok(Some(usize::from(index))),
            _ => Err(failed("failed to read which way is the fastest", NOT_SUPPORTED)),
        };
        cached(&file_name(self, "way", site), parse, || {
            let found = fastest(&self.device, count, go)?.unwrap_or(0);
            Ok(vec![u8::try_from(found).unwrap_or(0)])
        })
    }
}

const NOT_SUPPORTED: CublasError = CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);

/// A choice holds for one device, library version and site.
fn file_name(gemm: &Gemm, kind: &str, site: &str) -> String {
    // SAFETY: the function has no preconditions; the library is there, as the device's opening has found.
    let version = unsafe { sys::cublasLtGetVersion() };
    let (name, compute) = (&gemm.device.info.name, gemm.compute);
    let key = format!("{version} {name} {compute:?} {WORKSPACE} {site}");
    format!("{kind}-{:032x}.choice", xxh3_128(key.as_bytes()))
}

/// The library's proposals, the one it holds for the fastest first.
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
    // SAFETY: the preference was just made and is destroyed once, below; values have the attributes' types; all layouts are
    // alive; the array has room for as many results as are asked for.
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

/// The first of `count` candidates, or one that is clearly faster than those before it.
fn fastest(device: &Device, count: usize, launch: impl Fn(usize) -> Result<()>) -> Result<Option<usize>> {
    let mut best: Option<(usize, f64)> = None;
    for candidate in 0..count {
        // One that does not run after all is none.
        let best_time = best.map_or(f64::INFINITY, |(_, time)| time);
        let Some(time) = time(device, || launch(candidate), best_time)? else { continue };
        if time < best_time * CLEARLY_FASTER {
            best = Some((candidate, time));
        }
    }
    Ok(best.map(|(candidate, _)| candidate))
}

/// Seconds of LAUNCHES launches; `best` is another candidate's.
fn time(device: &Device, launch: impl Fn() -> Result<()>, best: f64) -> Result<Option<f64>> {
    let stream = &device.stream;
    if launch().is_err() {
        return Ok(None);
    }
    let mut shortest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let begin = mark(stream)?;
        for _ in 0..LAUNCHES {
            launch()?;
        }
        shortest = shortest.min(seconds(&begin, &mark(stream)?)?);
        if shortest > best * HOPELESS {
            break;
        }
    }
    Ok(Some(shortest))
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
