//! The allocator against its oracle: no overlap, exact counters and limit, reuse only in stream order, and a failure of
//! every driver call.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use proptest::prelude::*;

use common::oracle::{CheckedCore, Op};
use common::sim::Sim;
use xlaunch_pool::backing::{Backing, Segments, VirtualMemory};
use xlaunch_pool::core::{AllocError, Core, Request};
use xlaunch_pool::{Place, StreamId};

const MIB: u64 = 1 << 20;

fn run(bytes: &[[u8; 4]], contiguous: bool, lagging: usize, check_every: usize) {
    let mut checked = CheckedCore::new(contiguous, lagging);
    for (number, bytes) in bytes.iter().enumerate() {
        checked.step(Op::decode(*bytes));
        if number % check_every == 0 {
            checked.core.check().unwrap();
        }
    }
    checked.finish();
}

fn core_on(sim: &Sim) -> Core {
    Core::new(Box::new(VirtualMemory::new(sim.clone(), 4096 * MIB).unwrap()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_keep_invariants(
        bytes in prop::collection::vec(any::<[u8; 4]>(), 1..150),
        contiguous in any::<bool>(),
        lag in 0_usize..3,
    ) {
        run(&bytes, contiguous, lag, 1);
    }
}

/// A million operations, with driver failures and limits among them.
#[test]
fn million_operations_keep_limit_exact() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as u32
    };
    for round in 0..10 {
        // Ten programs rather than one: the lagging stream queues its work, up to the end of a program.
        let bytes: Vec<[u8; 4]> = (0..100_000).map(|_| next().to_le_bytes()).collect();
        run(&bytes, round % 2 == 0, round, 500);
    }
}

/// What a small trainer does: parameters, buffers of two streams, one of them shared, a larger request, a trim.
fn program(core: &mut Core, other: StreamId) -> Result<(), AllocError> {
    let mut live = Vec::new();
    let mut alloc = |core: &mut Core, bytes, stream, place| {
        let handle = core.alloc(&Request { stream, place, ..Request::new(bytes) });
        handle.inspect(|handle| live.push(*handle))
    };
    let first = StreamId::default();
    let mut failed = None;
    for (bytes, stream, place) in [
        (3 * MIB, first, Place::Low),
        (700, first, Place::Low),
        (9 * MIB, first, Place::High),
        (5 * MIB, other, Place::High),
        (40 * MIB, first, Place::High),
    ] {
        match alloc(core, bytes, stream, place) {
            Ok(handle) => core.record_use(handle, other).unwrap(),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    for handle in live.drain(..) {
        core.free(handle).unwrap();
    }
    let after = core.alloc(&Request { stream: other, ..Request::new(12 * MIB) });
    match after {
        Ok(handle) => core.free(handle).unwrap(),
        Err(error) => failed = failed.or(Some(error)),
    }
    failed = core.trim().err().or(failed);
    failed.map_or(Ok(()), Err)
}

#[test]
fn allocator_survives_failure_of_every_driver_call() {
    for contiguous in [true, false] {
        let make = |sim: &Sim| -> Option<(Core, StreamId)> {
            let backing: Box<dyn Backing> = match contiguous {
                true => Box::new(VirtualMemory::new(sim.clone(), 1024 * MIB).ok()?),
                false => Box::new(Segments::new(sim.clone())),
            };
            let mut core = Core::new(backing);
            let other = core.add_stream()?;
            Some((core, other))
        };
        let sim = Sim::new(128 * MIB);
        let (mut core, other) = make(&sim).unwrap();
        program(&mut core, other).unwrap();
        let calls = sim.calls();
        assert!(calls > 8, "the program makes {calls} driver calls");
        for k in 0..calls {
            for count in [1, 2, u64::MAX] {
                let sim = Sim::new(128 * MIB);
                sim.fail(k, count);
                let Some((mut core, other)) = make(&sim) else { continue };
                core.set_limit(100 * MIB).unwrap();
                let _ = program(&mut core, other);
                core.check().unwrap();
                assert!(sim.max_held() <= 100 * MIB);
                sim.heal();
                let handle = core.alloc(&Request::new(64 * MIB)).unwrap_or_else(|error| {
                    panic!(
                        "after {count} failures from call {k} on, 64 MiB of 128 are not available: {error}"
                    )
                });
                core.free(handle).unwrap();
                core.trim().unwrap();
                core.check().unwrap();
                assert_eq!(sim.held(), 0, "{count} failures from call {k} on leaked memory");
            }
        }
    }
}

#[test]
fn reuse_on_another_stream_inserts_one_wait_for_all_freed_blocks() {
    let sim = Sim::new(64 * MIB);
    let mut core = core_on(&sim);
    let other = core.add_stream().unwrap();
    let handles: Vec<_> = (0..4).map(|_| core.alloc(&Request::new(MIB)).unwrap()).collect();
    handles.into_iter().for_each(|handle| core.free(handle).unwrap());
    let (calls, mapped) = (sim.calls(), core.counters().mapped.current());
    for _ in 0..4 {
        core.alloc(&Request { stream: other, ..Request::new(MIB) }).unwrap();
    }
    assert_eq!(sim.calls() - calls, 1, "one wait orders the streams, and no memory is mapped");
    assert_eq!((core.counters().waits_inserted, core.counters().mapped.current()), (1, mapped));
}

#[test]
fn free_chunks_are_remapped_for_a_large_request() {
    let sim = Sim::new(64 * MIB);
    let mut core = core_on(&sim);
    // Every second buffer is freed: 32 MiB free, in pieces of 4.
    let handles: Vec<_> = (0..16).map(|_| core.alloc(&Request::new(4 * MIB)).unwrap()).collect();
    handles.iter().step_by(2).for_each(|handle| core.free(*handle).unwrap());
    assert_eq!((sim.held(), core.largest_free()), (64 * MIB, 4 * MIB));
    core.alloc(&Request::new(30 * MIB)).unwrap();
    assert_eq!(core.counters().retries, 1);
    core.check().unwrap();
}

#[test]
fn limit_is_exact_and_includes_external_bytes() {
    let sim = Sim::new(1024 * MIB);
    let mut core = core_on(&sim);
    core.set_limit(10 * MIB).unwrap();
    core.add_external(4 * MIB).unwrap();
    let handle = core.alloc(&Request::new(6 * MIB)).unwrap();
    assert_eq!(core.alloc(&Request::new(1)), Err(AllocError::Limit { limit: 10 * MIB, needed: 2 * MIB }));
    assert!(core.add_external(1).is_err());
    core.free(handle).unwrap();
    core.add_external(6 * MIB).unwrap();
    assert_eq!(sim.held(), 0, "unused memory was unmapped to make room for the external bytes");
    core.remove_external(10 * MIB);
    core.alloc(&Request::new(10 * MIB)).unwrap();
    assert!(
        core.alloc(&Request::new(u64::MAX)).is_err_and(|error| matches!(error, AllocError::TooLarge { .. }))
    );
}

#[test]
fn memory_of_an_empty_slab_serves_a_large_request() {
    let mut core = core_on(&Sim::new(1024 * MIB));
    core.set_limit(2 * MIB).unwrap();
    let small = core.alloc(&Request::new(1000)).unwrap();
    let large = core.alloc(&Request::new(MIB)).unwrap();
    assert!(core.alloc(&Request::new(MIB)).is_err());
    core.free(large).unwrap();
    core.free(small).unwrap();
    core.check().unwrap();
    core.alloc(&Request::new(2 * MIB)).unwrap();
}

#[test]
fn small_buffers_do_not_pin_large_holes() {
    let mut core = core_on(&Sim::new(1024 * MIB));
    let mut small = Vec::new();
    for _ in 0..8 {
        let large = core.alloc(&Request::new(8 * MIB)).unwrap();
        small.push(core.alloc(&Request::new(1000)).unwrap());
        core.free(large).unwrap();
    }
    assert_eq!(core.counters().mapped.current(), 10 * MIB, "one large buffer and one slab");
    small.into_iter().for_each(|handle| core.free(handle).unwrap());
    core.trim().unwrap();
    assert_eq!(core.counters().mapped.current(), 0);
}
