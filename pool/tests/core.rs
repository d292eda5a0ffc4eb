//! Tests of the allocator with its oracle: no overlap, exact counters and limit, reuse only in stream order, and a
//! failure of every driver call.

#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

mod common;

use proptest::prelude::*;

use common::oracle::{CheckedCore, Op};
use common::sim::Sim;
use xlaunch_pool::backing::{Backing, Purpose, Segments, VirtualMemory};
use xlaunch_pool::core::{AllocError, BlockInfo, Core, Request, SMALL_MAX};
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

/// Acts like a small trainer: parameters, buffers of two streams, one of them shared, a larger request, a trim.
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
            let backing: Box<dyn Backing> = if contiguous {
                Box::new(VirtualMemory::new(sim.clone(), 1024 * MIB).ok()?)
            } else {
                Box::new(Segments::new(sim.clone()))
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
    // Every second buffer is freed: 32 MiB are free, in pieces of 4.
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

#[test]
fn small_and_large_requests_do_not_share_memory() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let mut mapped_after = |bytes| {
        core.alloc(&Request::new(bytes)).unwrap();
        core.counters().mapped.current() / MIB
    };
    // First a slab, then a chunk for large requests, then the rest of each.
    assert_eq!([SMALL_MAX, SMALL_MAX + 1, SMALL_MAX, MIB].map(&mut mapped_after), [2, 4, 4, 4]);
    for _ in 0..30 {
        assert_eq!(mapped_after(SMALL_MAX), 4);
    }
    assert_eq!(mapped_after(1), 6, "32 requests of 64 KiB fill a slab");
}

#[test]
fn empty_slab_serves_a_large_request_before_memory_is_mapped() {
    let sim = Sim::new(64 * MIB);
    let mut core = core_on(&sim);
    let small: Vec<_> = (0..48).map(|_| core.alloc(&Request::new(SMALL_MAX)).unwrap()).collect();
    let calls = sim.calls();
    small[16..].iter().for_each(|handle| core.free(*handle).unwrap());
    core.alloc(&Request::new(3 * MIB)).unwrap();
    small[..16].iter().for_each(|handle| core.free(*handle).unwrap());
    core.alloc(&Request::new(MIB)).unwrap();
    assert_eq!(sim.calls(), calls, "the second request was served from what remained of the first slab");
    core.check().unwrap();
}

#[test]
fn slab_in_use_does_not_serve_large_requests() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let mut small: Vec<_> = (0..32).map(|_| core.alloc(&Request::new(SMALL_MAX)).unwrap()).collect();
    for part in [0..16, 8..24, 16..32] {
        part.clone().for_each(|index| core.free(small[index]).unwrap());
        let large = core.alloc(&Request::new(MIB)).unwrap();
        assert_eq!(core.counters().mapped.current(), 4 * MIB, "{part:?}");
        core.free(large).unwrap();
        core.trim().unwrap();
        part.for_each(|index| small[index] = core.alloc(&Request::new(SMALL_MAX)).unwrap());
    }
}

#[test]
fn chunk_is_a_fraction_of_mapped_memory_within_bounds() {
    for place in [Place::Low, Place::High] {
        let sim = Sim::new(512 << 30);
        let mut core = Core::new(Box::new(VirtualMemory::new(sim, 512 << 30).unwrap()));
        let mut growth = |bytes| {
            let mapped = core.counters().mapped.current();
            core.alloc(&Request { place, ..Request::new(bytes) }).unwrap();
            (core.counters().mapped.current() - mapped) / MIB
        };
        assert_eq!(growth(2 * MIB), 2);
        assert_eq!(growth(MIB), 2, "the smallest chunk");
        assert_eq!(growth(10236 * MIB), 10236, "more than a chunk: what the request lacks");
        assert_eq!(growth(2 * MIB), 40, "10 GiB / 256");
        assert_eq!(growth(38 * MIB), 0, "the rest of the chunk");
        assert_eq!(growth(200 << 30), 200 << 10);
        assert_eq!(growth(2 * MIB), 512, "the largest chunk");
    }
}

#[test]
fn chunk_is_halved_until_it_fits() {
    const LARGE: u64 = 10 << 30;
    let mapped_after = |total, limit| {
        let sim = Sim::new(total);
        let mut core = Core::new(Box::new(VirtualMemory::new(sim, 1 << 40).unwrap()));
        core.set_limit(limit).unwrap();
        core.alloc(&Request::new(LARGE)).unwrap();
        core.alloc(&Request::new(MIB)).unwrap();
        (core.counters().mapped.current() - LARGE) / MIB
    };
    assert_eq!(mapped_after(LARGE + 15 * MIB, u64::MAX), 10, "40 and 20 MiB are refused");
    assert_eq!(mapped_after(LARGE + 9 * MIB, u64::MAX), 6, "half of 10 MiB, in units of 2 MiB");
    assert_eq!(mapped_after(1 << 40, LARGE + 9 * MIB), 8, "what the limit allows");
}

#[test]
fn free_memory_at_the_edge_is_extended() {
    for place in [Place::Low, Place::High] {
        let mut core = core_on(&Sim::new(64 * MIB));
        let mut mapped_after = |bytes| {
            core.alloc(&Request { place, ..Request::new(bytes) }).unwrap();
            core.counters().mapped.current() / MIB
        };
        // The slab of the first request is not extended, but the chunk of the second one is.
        assert_eq!([1, 3 * MIB, 3 * MIB, 5 * MIB].map(&mut mapped_after), [2, 6, 8, 14], "{place:?}");
    }
}

#[test]
fn step_buffers_fill_the_highest_hole_first() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let alloc =
        |core: &mut Core| core.alloc_at(&Request { place: Place::High, ..Request::new(2 * MIB) }).unwrap();
    let buffers = [(); 3].map(|()| alloc(&mut core));
    assert_eq!(buffers[0].1 - buffers[2].1, 4 * MIB);
    core.free(buffers[1].0).unwrap();
    core.trim().unwrap();
    assert_eq!(alloc(&mut core).1, buffers[1].1);
    core.check().unwrap();
}

#[test]
fn general_memory_is_mapped_in_pieces_and_segments_whole() {
    let chunks = |backing: Box<dyn Backing>, purpose| {
        let mut core = Core::new(backing);
        let handle = core.alloc(&Request { purpose, ..Request::new(1200 * MIB) }).unwrap();
        let (_, segment) = core.segment_of(handle).unwrap();
        assert_eq!(core.counters().mapped.current(), 1200 * MIB);
        core.check().unwrap();
        (core.counters().chunks.current(), segment / MIB)
    };
    let contiguous = || Box::new(VirtualMemory::new(Sim::new(4096 * MIB), 4096 * MIB).unwrap());
    assert_eq!(chunks(contiguous(), Purpose::General), (3, 512));
    assert_eq!(chunks(contiguous(), Purpose::Registered), (1, 1200));
    let separate = Box::new(Segments::new(Sim::new(4096 * MIB)));
    assert_eq!(chunks(separate, Purpose::General), (1, 1200));
}

#[test]
fn trim_returns_bytes_given_back_to_the_device() {
    let sim = Sim::new(64 * MIB);
    let mut core = core_on(&sim);
    core.add_external(MIB).unwrap();
    assert_eq!(core.trim(), Ok(0));
    let [first, second] = [(); 2].map(|()| core.alloc(&Request::new(4 * MIB)).unwrap());
    core.free(first).unwrap();
    assert_eq!(core.trim(), Ok(4 * MIB));
    assert_eq!(core.trim(), Ok(0));
    core.free(second).unwrap();
    // The device is synchronised and the memory is unmapped, but it cannot be released.
    sim.fail(sim.calls() + 2, 1);
    assert_eq!(core.trim(), Ok(0));
    assert_eq!((core.counters().mapped.current(), core.held(), sim.held()), (0, 5 * MIB, 4 * MIB));
    assert_eq!(core.trim(), Ok(4 * MIB));
    assert_eq!((core.held(), core.external(), sim.held()), (MIB, MIB, 0));
    assert_eq!(core.counters().synchronizations, 2);
}

#[test]
fn limit_equal_to_held_bytes_unmaps_nothing() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let handle = core.alloc(&Request::new(2 * MIB)).unwrap();
    core.free(handle).unwrap();
    core.set_limit(2 * MIB).unwrap();
    assert_eq!((core.counters().mapped.current(), core.limit()), (2 * MIB, 2 * MIB));
    core.set_limit(2 * MIB - 1).unwrap();
    assert_eq!(core.counters().mapped.current(), 0);
}

#[test]
fn peaks_restart_at_current_values() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let [freed, _] = [(); 2].map(|()| core.alloc(&Request::new(2 * MIB - 1)).unwrap());
    core.free(freed).unwrap();
    let peaks = |core: &Core| {
        let counters = core.counters();
        [counters.requested, counters.live, counters.buffers, counters.mapped, counters.chunks]
            .map(|counter| counter.peak)
    };
    assert_eq!(peaks(&core), [4 * MIB - 2, 4 * MIB, 2, 4 * MIB, 2]);
    core.reset_peaks();
    assert_eq!(peaks(&core), [2 * MIB - 1, 2 * MIB, 1, 4 * MIB, 2]);
}

#[test]
fn failed_requests_are_counted() {
    let mut core = core_on(&Sim::new(8 * MIB));
    for failures in 1..3 {
        core.alloc(&Request::new(10 * MIB)).unwrap_err();
        assert_eq!(core.counters().failures, failures);
    }
}

#[test]
fn handle_stays_stale_when_its_block_is_allocated_again() {
    let mut core = core_on(&Sim::new(8 * MIB));
    let stale = core.alloc(&Request::new(MIB)).unwrap();
    core.free(stale).unwrap();
    let handle = core.alloc(&Request::new(MIB)).unwrap();
    assert!(core.address(handle).is_ok() && core.address(stale).is_err());
    assert!(core.free(stale).is_err() && core.record_use(stale, StreamId::default()).is_err());
}

#[test]
fn debug_output_shows_counters_and_limit() {
    let output = format!("{:?}", core_on(&Sim::new(8 * MIB)));
    assert!(
        output.contains("counters: Counters") && output.contains("limit: 18446744073709551615"),
        "{output}"
    );
}

#[test]
fn streams_are_counted() {
    let mut core = core_on(&Sim::new(8 * MIB));
    assert_eq!(core.streams(), 1);
    let other = core.add_stream().unwrap();
    assert_eq!((core.streams(), other.index()), (2, 1));
}

#[test]
fn heap_walk_lists_adjacent_blocks_in_one_segment() {
    let sim = Sim::new(64 * MIB);
    let mut core = core_on(&sim);
    let mut alloc = |bytes, place| core.alloc_at(&Request { place, ..Request::new(bytes) }).unwrap().1;
    let low = alloc(MIB + 1, Place::Low);
    let high = alloc(3 * MIB, Place::High);
    let blocks = |segment: Vec<BlockInfo>| {
        segment.into_iter().map(|block| (block.address, block.bytes, block.requested)).collect::<Vec<_>>()
    };
    let segments: Vec<_> = core.heap_walk().into_iter().map(blocks).collect();
    let used = MIB + 512;
    assert_eq!(
        segments,
        [
            vec![(low, used, Some(MIB + 1)), (low + used, 2 * MIB - used, None)],
            vec![(high - MIB, MIB, None), (high, 3 * MIB, Some(3 * MIB))],
        ]
    );
    assert_eq!(core.largest_free(), MIB);
    assert_eq!(core.device_memory(), Some((58 * MIB, 64 * MIB)));
}

#[test]
fn pending_is_free_memory_that_a_stream_must_wait_for() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let (first, other) = (StreamId::default(), core.add_stream().unwrap());
    let [freed, _, shared, _] = [(); 4].map(|()| core.alloc(&Request::new(2 * MIB)).unwrap());
    assert_eq!(core.pending(other), []);
    core.record_use(shared, other).unwrap();
    core.free(freed).unwrap();
    core.free(shared).unwrap();
    assert_eq!(core.pending(other), [(first, 4 * MIB)]);
    assert_eq!(core.pending(first), [(other, 2 * MIB)]);
    core.record_wait(first, other);
    assert_eq!(core.pending(other), []);
}

#[test]
fn inactive_split_is_free_memory_of_chunks_in_use() {
    let mut core = core_on(&Sim::new(64 * MIB));
    let [first, second, third] = [3, 2, 2].map(|mib| core.alloc(&Request::new(mib * MIB)).unwrap());
    // 4 + 2 + 2 MiB are mapped.
    assert_eq!((core.counters().mapped.current(), core.inactive_split()), (8 * MIB, MIB));
    core.free(third).unwrap();
    assert_eq!(core.inactive_split(), MIB, "an empty chunk does not count");
    core.free(first).unwrap();
    assert_eq!(core.inactive_split(), 4 * MIB, "the second buffer is in the first two chunks");
    core.free(second).unwrap();
    assert_eq!(core.inactive_split(), 0);
}
