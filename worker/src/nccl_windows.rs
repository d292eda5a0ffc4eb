//! NCCL windows (symmetric memory) for tensors used in collectives: `comm.windows`.
//!
//! [`wanted`] decides before the rendezvous where these tensors are allocated, because only some pool segments can
//! become windows; [`register`] registers them afterwards. Both decisions depend only on values that are the same on
//! all ranks.

use xlaunch_comm::Collective;
use xlaunch_engine::Tensor;
use xlaunch_pool::Space;
use xlaunch_spec::job::{JobSpec, PoolMode};

use crate::error::Result;
use crate::model::BackendHandle;

/// Returns whether ranks on GPUs should use windows. Without the pool there are no segments to register.
pub fn wanted(spec: &JobSpec, ranks: usize) -> bool {
    spec.comm.windows && ranks > 1 && spec.engine.pool != PoolMode::Off
}

/// Registers these tensors until the collective ends, if windows are wanted; with `log`, prints the outcome to stderr.
/// Every rank calls it with the same tensors, before any graph capture. It waits for the other ranks, so the
/// collective's abort handle must already be in place.
pub fn register<'a>(
    backend: &BackendHandle,
    tensors: impl IntoIterator<Item = &'a Tensor>,
    collective: &mut dyn Collective,
    log: bool,
) -> Result<()> {
    let mut registered = backend.has_windows();
    if backend.has_windows() {
        for tensor in tensors {
            registered &= collective.register(tensor.lend(0..0))?;
        }
    }
    if log && collective.world_size() > 1 && backend.pool().space() == Space::Cuda {
        print_outcome(collective.world_size(), registered, backend.has_windows());
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "requested with XLAUNCH_LOG_FALLBACK")]
fn print_outcome(ranks: usize, registered: bool, wanted: bool) {
    let memory = match (registered, wanted) {
        (true, _) => "registered windows",
        (false, true) => {
            "NCCL's buffers, not windows: NCCL is older than 2.27 or cannot register this memory"
        }
        (false, false) => {
            "NCCL's buffers, not windows: `comm.windows` or `engine.pool` is off, or there are several nodes"
        }
    };
    eprintln!("collectives over {ranks} ranks use {memory}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_need_several_ranks_a_pool_and_the_option() {
        let mut spec = JobSpec::default();
        assert!(!wanted(&spec, 2));
        spec.comm.windows = true;
        assert!(wanted(&spec, 2) && !wanted(&spec, 1));
        spec.engine.pool = PoolMode::Off;
        assert!(!wanted(&spec, 2));
    }
}
