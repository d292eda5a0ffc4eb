//! The rendezvous: this rank joins, receives the next rank's address or the NCCL id, and connects.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;
use xlaunch_comm::{Collective, Local, Nccl, Ring, RingListener, RingPlace};
use xlaunch_proto::VERSION;
use xlaunch_proto::convert::{Join, Joined, RingNeighbour};
use xlaunch_spec::ids::{Digest, NcclId};

use super::Context;
use super::device::OpenDevice;
use crate::environment::Environment;
use crate::error::{Result, WorkerError};
use crate::fail::{self, Place};

/// Additional time for ring neighbours to connect: the agent's own timeout should expire first, as the agent can name
/// the missing ranks.
const RING_CONNECT_MARGIN: Duration = Duration::from_secs(10);

/// The way to connect to the other ranks, after all have joined.
pub(super) struct Connector {
    rank: usize,
    world: usize,
    /// Ranks in a group that divides experts.
    group: usize,
    by: Connection,
}

enum Connection {
    Nccl { stream: Arc<CudaStream>, id: NcclId },
    Ring { listener: RingListener, next: RingNeighbour, timeout: Duration },
    Single,
}

impl Connector {
    /// Opens the collective of all ranks: every rank calls it.
    pub(super) fn connect(self) -> Result<Box<dyn Collective>> {
        let Self { rank, world, group, by } = self;
        let mut collective: Box<dyn Collective> = match by {
            Connection::Nccl { stream, id } => Box::new(Nccl::new(stream, rank, world, id.0)?),
            Connection::Ring { listener, next: RingNeighbour { address, key }, timeout } => {
                let place = RingPlace { rank, world, next_address: &address, key: &key.0 };
                Box::new(Ring::connect(listener, &place, timeout)?)
            }
            Connection::Single => Box::new(Local),
        };
        if group > 1 {
            collective.divide(group)?;
        }
        Ok(collective)
    }
}

/// Joins the rendezvous. `layout` must be the same bytes on every rank. The agent compares its digest: ranks with
/// different buckets would reduce different gradients together.
pub(super) fn join(context: &Context<'_>, layout: &[u8], device: &OpenDevice) -> Result<Connector> {
    let Context { environment, control, spec, job } = context;
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    let (single, stream) = (world == 1, device.backend.stream());
    let listener = match stream {
        None if !single => Some(listen(environment, Path::new(&job.run_dir))?),
        _ => None,
    };
    let nccl_id = match stream {
        Some(_) if !single && rank == 0 => Some(NcclId(xlaunch_comm::unique_id()?)),
        _ => None,
    };
    fail::at(Place::Join);
    let Joined { world_size, nccl_id, ring, .. } = control.join(Join {
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
    let by = match (stream, listener) {
        (Some(stream), _) if !single => {
            let id = nccl_id.ok_or_else(|| WorkerError::Rendezvous("rank 0 sent no NCCL id".into()))?;
            Connection::Nccl { stream, id }
        }
        (None, Some(listener)) => {
            let timeout = Duration::from_secs_f64(spec.launch.join_timeout) + RING_CONNECT_MARGIN;
            let no_ring = || WorkerError::Rendezvous("the agent named no next rank of the ring".into());
            Connection::Ring { listener, next: ring.ok_or_else(no_ring)?, timeout }
        }
        _ => Connection::Single,
    };
    Ok(Connector { rank, world, group: spec.comm.experts, by })
}

/// Listens for the previous rank: on TCP if that rank is on another node.
fn listen(environment: &Environment, run_dir: &Path) -> Result<RingListener> {
    let rank = environment.rank.index();
    Ok(match environment.advertised_address.filter(|_| environment.local_rank.0 == 0) {
        Some(ip) => RingListener::bind_tcp(ip, rank)?,
        None => RingListener::bind(run_dir, rank)?,
    })
}
