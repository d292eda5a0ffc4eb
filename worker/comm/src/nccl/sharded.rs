//! Calls of NCCL that move a bucket and its shards.
//!
//! All shards but the rest are equal, and move together; the last rank has the rest as well, which moves alone.

use std::ffi::c_void;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use xlaunch_pool::{DType, Lease, Space};

use super::communicator;
use super::library::{self, Library};
use crate::collective::Shards;

/// Adds a bucket of all ranks of a communicator, of which this one is `(rank, world)`, and writes this rank's shard.
///
/// # Safety
/// The caller has exclusive access to both leases, in the order of the stream, and the communicator is alive.
pub(super) unsafe fn reduce_scatter(
    library: &Library,
    comm: ncclComm_t,
    stream: *mut c_void,
    (rank, world): (usize, usize),
    [from, into]: &[Lease; 2],
    dtype: DType,
) -> ncclResult_t {
    let (kind, sum, last) = (data_type(dtype), ncclRedOp_t::ncclSum, communicator::int(world - 1));
    let Shards { equal, rest } = Shards::new(from.bytes(), into.bytes(), rank, world);
    let (from, into) = (address(from), address(into));
    let [count, others] = [equal, rest].map(|bytes| bytes / dtype.size());
    // SAFETY: `into` has `count` elements, `from` has `count` per rank, and two leases never overlap; the rest is the
    // caller's promise.
    let equal_shards = || unsafe { (library.reduce_scatter)(from, into, count, kind, sum, comm, stream) };
    // SAFETY: as above; after that, both have `others` elements on the last rank, and `from` on all; NCCL does not use
    // `into` on other ranks.
    let rest = || unsafe {
        let (from, into) = (from.byte_add(equal * world), into.byte_add(equal));
        (library.reduce)(from, into, others, kind, sum, last, comm, stream)
    };
    both((count > 0).then_some(equal_shards), (others > 0).then_some(rest))
}

/// Copies the shards of all ranks of a communicator, of which this one is `(rank, world)`, to a bucket.
///
/// # Safety
/// The caller promises what [`reduce_scatter`] asks for.
pub(super) unsafe fn all_gather(
    library: &Library,
    comm: ncclComm_t,
    stream: *mut c_void,
    (rank, world): (usize, usize),
    [from, into]: &[Lease; 2],
) -> ncclResult_t {
    let (bytes, last) = (ncclDataType_t::ncclUint8, communicator::int(world - 1));
    let Shards { equal, rest } = Shards::new(into.bytes(), from.bytes(), rank, world);
    let (from, into) = (address(from), address(into));
    // SAFETY: as in a reduce-scatter, with bytes as elements and the roles of the two swapped.
    let equal_shards = || unsafe { (library.all_gather)(from, into, equal, bytes, comm, stream) };
    // SAFETY: as above.
    let others = || unsafe {
        let (from, into) = (from.byte_add(equal), into.byte_add(equal * world));
        (library.broadcast)(from, into, rest, bytes, last, comm, stream)
    };
    both((equal > 0).then_some(equal_shards), (rest > 0).then_some(others))
}

/// Makes up to two calls, the second one only if the first does not fail.
fn both(
    first: Option<impl FnOnce() -> ncclResult_t>,
    second: Option<impl FnOnce() -> ncclResult_t>,
) -> ncclResult_t {
    let result = first.map_or(ncclResult_t::ncclSuccess, |call| call());
    if library::has_failed(result) { result } else { second.map_or(result, |call| call()) }
}

/// # Panics
/// If the lease is not device memory.
pub(super) fn address(lease: &Lease) -> *mut c_void {
    assert_eq!(lease.space(), Space::Cuda, "NCCL takes device memory only");
    lease.address() as *mut c_void
}

pub(super) fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        other => panic!("all-reduce of {} is not supported", other.name()),
    }
}
