//! Open MPI's `mpirun`: the rank of this process, one per node. There is no list of hosts, so a flag gives the address
//! of the coordinator.

use super::{Allocation, Host, check_place};

const MPIRUN: &str = "mpirun";

pub(super) fn detect(host: &Host<'_>) -> Result<Option<Allocation>, String> {
    let Some(nodes) = host.number::<u32>("OMPI_COMM_WORLD_SIZE")? else { return Ok(None) };
    let rank = match host.number("OMPI_COMM_WORLD_RANK")? {
        None => host.required("PMIX_RANK", MPIRUN)?,
        Some(rank) => rank,
    };
    check_place(&nodes, &rank)?;
    if let Some(local) = host.number::<u32>("OMPI_COMM_WORLD_LOCAL_SIZE")?.filter(|local| local.value > 1) {
        return Err(format!(
            "mpirun has started several processes on this host ({}), but one launch starts all workers of a node: use \
             `mpirun -npernode 1 xlaunch ...` and --nproc-per-node",
            local.source
        ));
    }
    Ok(Some(Allocation {
        engine: MPIRUN,
        variables: host.variables(&[
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMIX_RANK",
        ]),
        nodes: Some(nodes),
        node_rank: Some(rank),
        endpoint: None,
        run_id: None,
        munge: false,
    }))
}
