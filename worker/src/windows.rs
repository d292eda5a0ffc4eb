//! Memory that ranks on GPUs sum and gather in each other's windows, where they can.
//!
//! Before the ranks meet, [`wanted`] decides from where tensors that collectives work on are allocated; when they have met,
//! [`register`] makes windows of them. Both are decided from what is the same on all ranks.

use xlaunch_comm::Collective;
use xlaunch_engine::Tensor;
use xlaunch_pool::Space;
use xlaunch_proto::spec::{JobSpec, PoolMode};

use crate::error::Result;
use crate::model::BackendHandle;

/// Whether ranks on GPUs are to have windows. Without the pool there are no segments that can be registered.
pub fn wanted(spec: &JobSpec, ranks: usize) -> bool {
    spec.comm.windows && ranks > 1 && spec.engine.pool != PoolMode::Off
}

/// Registers these tensors, if windows are wanted, until the collective ends; with `log`, says whether that is so. Every
/// rank calls it with the same tensors, before anything is captured, and when its collective can be aborted: it waits for
/// the others.
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
    if log && collective.world() > 1 && backend.pool().space() == Space::Cuda {
        say(collective.world(), registered, backend.has_windows());
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "what was asked for")]
fn say(ranks: usize, registered: bool, wanted: bool) {
    let way = match (registered, wanted) {
        (true, _) => "registered windows",
        (false, true) => "NCCL's buffers, not windows: NCCL is older than 2.27 or does not register",
        (false, false) => "NCCL's buffers, not windows: comm.windows or engine.pool is off",
    };
    eprintln!("collectives over {ranks} ranks: {way}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_ranks_with_a_pool_have_windows_where_they_are_asked_for() {
        let mut spec = JobSpec::default();
        assert!(!wanted(&spec, 2));
        spec.comm.windows = true;
        assert!(wanted(&spec, 2) && !wanted(&spec, 1));
        spec.engine.pool = PoolMode::Off;
        assert!(!wanted(&spec, 2));
    }
}
