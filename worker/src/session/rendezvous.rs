//! The rendezvous: this rank joins, learns the others' addresses or the NCCL id, and opens the collective.

use std::path::Path;
use std::time::Duration;

use xlaunch_comm::{Collective, Local, Nccl, Ring, RingListener};
use xlaunch_proto::VERSION;
use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::ids::{Digest, NcclId};

use super::Context;
use super::device::OpenDevice;
use crate::error::{Result, WorkerError};
use crate::fail::{self, Place};

/// Time for ring neighbours to connect, beyond what the agent allows: the agent can name the ranks that are missing.
const RING_CONNECT_MARGIN: Duration = Duration::from_secs(10);

/// Joins and opens the collective of all ranks. `layout` must be the same bytes on every rank: the agent compares its
/// digest, as ranks with different buckets would reduce different gradients together.
pub(super) fn join(context: &Context<'_>, layout: &[u8], device: &OpenDevice) -> Result<Box<dyn Collective>> {
    let Context { environment, control, spec, job } = context;
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    let single = world == 1;
    let listener = match device.stream {
        None if !single => Some(RingListener::bind(Path::new(&job.run_dir), rank)?),
        _ => None,
    };
    let nccl_id = match device.stream {
        Some(_) if !single && rank == 0 => Some(NcclId(xlaunch_comm::unique_id()?)),
        _ => None,
    };
    fail::at(Place::Join);
    let Joined { world_size, nccl_id, ring_addresses, .. } = control.join(Join {
        rank: environment.rank,
        attempt: environment.attempt,
        version: VERSION.into(),
        config_hash: spec.digest(),
        layout_hash: Digest::of(layout),
        device_uuid: device.backend.device().uuid.clone(),
        nccl_id,
        ring_address: listener.as_ref().map(|listener| listener.address().to_string()).unwrap_or_default(),
        pid: std::process::id(),
    })?;
    if world_size != environment.world_size {
        let message = format!("the agent's world size is {world_size}, but WORLD_SIZE is {world}");
        return Err(WorkerError::Rendezvous(message));
    }
    Ok(match (&device.stream, listener) {
        (Some(stream), _) if !single => {
            let id = nccl_id.ok_or_else(|| WorkerError::Rendezvous("rank 0 sent no NCCL id".into()))?;
            Box::new(Nccl::new(stream.clone(), rank, world, id.0)?)
        }
        (None, Some(listener)) => {
            let timeout = Duration::from_secs_f64(spec.launch.join_timeout) + RING_CONNECT_MARGIN;
            Box::new(Ring::connect(listener, rank, &ring_addresses, timeout)?)
        }
        _ => Box::new(Local),
    })
}
