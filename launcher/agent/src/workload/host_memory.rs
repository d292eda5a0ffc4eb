//! Decides whether the ranks of this node fit into its memory, and where the state of a job is kept while it is saved.
//! Pure.
//!
//! Training itself must fit, or the job is refused before it starts, because the kernel's OOM killer would kill it
//! later. A save additionally needs room for a copy of the state; without that room, the ranks write their state piece
//! by piece while training waits.

use xlaunch_spec::job::{JobSpec, Shard};
use xlaunch_spec::quantities::shortage_texts;

use super::snapshots::{MemoryUse, memory_use};
use xlaunch_host::memory::Available;

/// Bytes that a worker process on a CPU takes in addition to the trainer's buffers: 11 MiB measured at rest, 60 MiB
/// during start-up.
const CPU_PROCESS: u64 = 96 << 20;
/// Host bytes of a worker process on a GPU, whose buffers are in GPU memory: CUDA context, kernels and pinned buffers.
/// At most 0.7 GiB were measured on an H100 (`tests/gpu/results/host-memory-h100.txt`).
const GPU_PROCESS: u64 = 1 << 30;

/// Host memory that a job needs on this node, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNeeds {
    /// Need of all ranks of this node while they train.
    pub training: u64,
    /// Size of one copy of the state that they save.
    pub copy: u64,
}

impl HostNeeds {
    /// Computes the needs of `ranks` ranks. `buffers` is the size of one rank's buffers on a CPU; `None` on GPUs.
    pub fn new(ranks: u32, buffers: Option<u64>, copy: u64) -> Self {
        let rank = buffers.map_or(GPU_PROCESS, |bytes| bytes.saturating_add(CPU_PROCESS));
        Self { training: rank.saturating_mul(u64::from(ranks)), copy }
    }
}

/// Bytes available for the buffers of each rank when `ranks` ranks train on the CPU.
pub fn buffers_of_rank(available: Available, ranks: u32) -> u64 {
    (available.with_swap() / u64::from(ranks.max(1))).saturating_sub(CPU_PROCESS)
}

/// Bytes of state that this node saves. `state` is the size of the whole job's state, which has `world` ranks, `ranks`
/// of them on this node.
pub fn saved_here(spec: &JobSpec, state: u64, ranks: u32, world: u32, cuda: bool, leads: bool) -> u64 {
    let divides = spec.shard(world as usize, cuda, true) != Shard::None || spec.comm.experts > 1;
    // If the nodes do not share a directory, the first node saves everything. That is known only when they begin.
    if ranks == world || (leads && !divides) {
        return state;
    }
    let part = u128::from(state) * u128::from(ranks) / u128::from(world.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// The place where the state is kept while it is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveBuffers {
    /// Two copies in memory files that the agent keeps, so that a restart can resume from them.
    Snapshots,
    /// A copy in the memory of each worker.
    Copy,
    /// No copy: training waits until the state is written.
    Pieces,
}

/// Plan for a job's use of this node's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Place of the state while it is saved.
    pub buffers: SaveBuffers,
    /// Tells the user why the choice differs from the expected one.
    pub note: Option<String>,
}

/// Plans the memory of a job on this node. `peers`: the job begins on several nodes.
///
/// # Errors
/// The reason that the job cannot run here, and what to do.
pub fn plan(
    spec: &JobSpec,
    needs: HostNeeds,
    peers: bool,
    available: Option<Available>,
) -> Result<MemoryPlan, String> {
    let snapshots = |free: Option<u64>| match memory_use(spec, needs.copy, free) {
        // Attempts on several nodes use no snapshots; `describe_group` tells the user.
        Ok(MemoryUse { used, .. }) if peers => Ok(MemoryUse { used, note: None }),
        Err(_) if peers => Ok(MemoryUse::default()),
        found => found,
    };
    let Some(available) = available else {
        let MemoryUse { used, note } = snapshots(None)?;
        let buffers = if used { SaveBuffers::Snapshots } else { SaveBuffers::Copy };
        return Ok(MemoryPlan { buffers, note });
    };
    let HostNeeds { training, copy } = needs;
    if training > available.with_swap() {
        let [needed, present] = shortage_texts(training, available.with_swap());
        return Err(format!(
            "the ranks of this node need {needed} of memory to train, but only {present} are available to them; \
             `xlaunch --dry-run` shows which keys of the configuration make the job smaller"
        ));
    }
    let free = available.memory.saturating_sub(training);
    let MemoryUse { used, note } = snapshots(Some(free))?;
    if used {
        return Ok(MemoryPlan { buffers: SaveBuffers::Snapshots, note });
    }
    if copy <= free {
        return Ok(MemoryPlan { buffers: SaveBuffers::Copy, note });
    }
    let [copy, free] = shortage_texts(copy, free);
    let note = format!(
        "training waits while a checkpoint is written: a copy of the state needs {copy}, but training leaves {free} of \
         memory free"
    );
    Ok(MemoryPlan { buffers: SaveBuffers::Pieces, note: Some(note) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const NEEDS: HostNeeds = HostNeeds { training: 4 * GIB, copy: 3 * GIB };

    fn buffers(memory: u64, swap: u64) -> Result<SaveBuffers, String> {
        let available = Available { memory, swap };
        plan(&JobSpec::default(), NEEDS, false, Some(available)).map(|plan| plan.buffers)
    }

    #[test]
    fn job_that_cannot_train_is_refused_and_swap_counts_for_training_only() {
        assert_eq!(buffers(7 * GIB, 0), Ok(SaveBuffers::Copy));
        assert_eq!(buffers(7 * GIB - 1, GIB), Ok(SaveBuffers::Pieces));
        assert_eq!(buffers(4 * GIB, 0), Ok(SaveBuffers::Pieces));
        assert_eq!(buffers(3 * GIB, GIB), Ok(SaveBuffers::Pieces));
        let refusal = buffers(3 * GIB, GIB - (1 << 28)).unwrap_err();
        assert!(refusal.contains("need 4 GiB") && refusal.contains("only 3.7 GiB are"), "{refusal}");
    }

    #[test]
    fn save_in_pieces_says_what_a_copy_would_need_and_what_is_left() {
        let available = Available { memory: 5 * GIB, swap: 0 };
        let note = plan(&JobSpec::default(), NEEDS, false, Some(available)).unwrap().note.unwrap();
        assert!(note.contains("needs 3 GiB") && note.contains("leaves 1 GiB of memory"), "{note}");
    }

    #[test]
    fn snapshots_are_kept_only_if_training_leaves_memory_for_them() {
        let mut spec = JobSpec::default();
        (spec.launch.max_restarts, spec.checkpoint.every) = (3, 10);
        let plan = |memory| plan(&spec, NEEDS, false, Some(Available { memory, swap: 0 })).unwrap().buffers;
        assert_eq!(plan(4 * GIB + 24 * GIB), SaveBuffers::Snapshots);
        assert_eq!(plan(4 * GIB + 24 * GIB - 1), SaveBuffers::Copy);
        assert_eq!(plan(4 * GIB + 2 * GIB), SaveBuffers::Pieces);
    }

    #[test]
    fn buffer_limit_is_the_largest_accepted_size() {
        let available = Available { memory: 5 * GIB + 1, swap: GIB };
        let most = buffers_of_rank(available, 2);
        let fits = |buffers| {
            plan(&JobSpec::default(), HostNeeds::new(2, Some(buffers), 0), false, Some(available)).is_ok()
        };
        assert!(fits(most) && !fits(most + 1));
    }

    #[test]
    fn node_saves_its_share_or_everything_if_the_directory_may_not_be_shared() {
        let (mut spec, state) = (JobSpec::default(), 800);
        let saved = |spec: &JobSpec, cuda, leads| saved_here(spec, state, 2, 8, cuda, leads);
        assert_eq!((saved(&spec, false, true), saved(&spec, false, false)), (800, 200));
        assert_eq!(saved(&spec, true, true), 200, "eight GPUs divide the optimizer");
        spec.comm.shard = Shard::None;
        assert_eq!(saved(&spec, true, true), 800);
        assert_eq!(saved_here(&spec, state, 8, 8, true, true), 800);
    }

    #[test]
    fn ranks_on_a_cpu_have_their_buffers_in_host_memory() {
        assert_eq!(HostNeeds::new(2, Some(GIB), 5), HostNeeds { training: 2 * (GIB + CPU_PROCESS), copy: 5 });
        assert_eq!(HostNeeds::new(8, None, 5).training, 8 * GPU_PROCESS);
    }
}
