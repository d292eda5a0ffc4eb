//! The allocator against its oracle: no overlap, exact books, exact limit, reuse in order only, and every driver failure.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use proptest::prelude::*;

use common::{Driven, Op};
use xlaunch_pool::Place;
use xlaunch_pool::backing::sim::Sim;
use xlaunch_pool::backing::{Backing, Segments, Virtual};
use xlaunch_pool::core::{Core, Refusal, Request, StreamId};

const MIB: u64 = 1 << 20;

fn run(bytes: &[[u8; 4]], contiguous: bool, lag: usize, check_every: usize) {
    let mut driven = Driven::new(contiguous, lag);
    for (number, bytes) in bytes.iter().enumerate() {
        driven.step(Op::decode(*bytes));
        if number % check_every == 0 {
            driven.core.check().unwrap();
        }
    }
    driven.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_program_is_served_rightly(
        bytes in prop::collection::vec(any::<[u8; 4]>(), 1..150),
        contiguous in any::<bool>(),
        lag in 0_usize..3,
    ) {
        run(&bytes, contiguous, lag, 1);
    }
}

/// A million operations, with driver failures and limits among them.
#[test]
fn a_long_life_keeps_the_limit_to_the_byte() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as u32
    };
    for life in 0..10 {
        // Lives of the imagination end in a run of all streams, which grows with their work: ten lives, not one.
        let bytes: Vec<[u8; 4]> = (0..100_000).map(|_| next().to_le_bytes()).collect();
        run(&bytes, life % 2 == 0, life, 500);
    }
}

/// What a small trainer does: parameters, two steps on two streams with a shared buffer, a trim, a larger step.
fn program(core: &mut Core, other: StreamId) -> Result<(), Refusal> {
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
            Err(refusal) => failed = failed.or(Some(refusal)),
        }
    }
    for handle in live.drain(..) {
        core.free(handle).unwrap();
    }
    let after = core.alloc(&Request { stream: other, ..Request::new(12 * MIB) });
    match after {
        Ok(handle) => core.free(handle).unwrap(),
        Err(refusal) => failed = failed.or(Some(refusal)),
    }
    failed = core.trim().err().or(failed);
    failed.map_or(Ok(()), Err)
}

#[test]
fn every_driver_call_may_fail_and_the_allocator_lives_on() {
    for contiguous in [true, false] {
        let make = |sim: &Sim| -> Option<(Core, StreamId)> {
            let backing: Box<dyn Backing> = match contiguous {
                true => Box::new(Virtual::new(sim.clone(), 1024 * MIB).ok()?),
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
        assert!(calls > 8, "the program uses the driver: {calls} calls");
        for k in 0..calls {
            for count in [1, 2, u64::MAX] {
                let sim = Sim::new(128 * MIB);
                sim.fail(k, count);
                let Some((mut core, other)) = make(&sim) else { continue };
                core.set_limit(100 * MIB).unwrap();
                let _ = program(&mut core, other);
                core.check().unwrap();
                assert!(sim.most_held() <= 100 * MIB);
                sim.heal();
                let handle = core.alloc(&Request::new(64 * MIB)).unwrap_or_else(|error| {
                    panic!("call {k} failed {count} times, and then 64 MiB of 128 were refused: {error}")
                });
                core.free(handle).unwrap();
                core.trim().unwrap();
                core.check().unwrap();
                assert_eq!(sim.held(), 0, "call {k}, {count} times: memory was lost");
            }
        }
    }
}

#[test]
fn memory_that_other_work_may_use_waits_once_for_all_of_it() {
    let sim = Sim::new(64 * MIB);
    let mut core = Core::new(Box::new(Virtual::new(sim.clone(), 256 * MIB).unwrap()));
    let other = core.add_stream().unwrap();
    let handles: Vec<_> = (0..4).map(|_| core.alloc(&Request::new(MIB)).unwrap()).collect();
    handles.into_iter().for_each(|handle| core.free(handle).unwrap());
    let (calls, mapped) = (sim.calls(), core.books().mapped.current());
    for _ in 0..4 {
        core.alloc(&Request { stream: other, ..Request::new(MIB) }).unwrap();
    }
    assert_eq!(sim.calls() - calls, 1, "one wait orders the streams, and nothing more is mapped");
    assert_eq!((core.books().waits_inserted, core.books().mapped.current()), (1, mapped));
}

#[test]
fn free_chunks_are_mapped_anew_where_a_large_request_needs_them() {
    let sim = Sim::new(64 * MIB);
    let mut core = Core::new(Box::new(Virtual::new(sim.clone(), 1024 * MIB).unwrap()));
    // Every second buffer is freed: 32 MiB free, in pieces of 4.
    let handles: Vec<_> = (0..16).map(|_| core.alloc(&Request::new(4 * MIB)).unwrap()).collect();
    handles.iter().step_by(2).for_each(|handle| core.free(*handle).unwrap());
    assert_eq!((sim.held(), core.largest_free()), (64 * MIB, 4 * MIB));
    core.alloc(&Request::new(30 * MIB)).unwrap();
    assert_eq!(core.books().retries, 1);
    core.check().unwrap();
}

#[test]
fn a_limit_is_kept_and_outside_bytes_count() {
    let sim = Sim::new(1024 * MIB);
    let mut core = Core::new(Box::new(Virtual::new(sim.clone(), 4096 * MIB).unwrap()));
    core.set_limit(10 * MIB).unwrap();
    core.add_external(4 * MIB).unwrap();
    let handle = core.alloc(&Request::new(6 * MIB)).unwrap();
    assert_eq!(core.alloc(&Request::new(1)), Err(Refusal::Limit { limit: 10 * MIB, needed: 2 * MIB }));
    assert!(core.add_external(1).is_err());
    core.free(handle).unwrap();
    core.add_external(6 * MIB).unwrap();
    assert_eq!(sim.held(), 0, "unused memory made room for the outside bytes");
    core.remove_external(10 * MIB);
    core.alloc(&Request::new(10 * MIB)).unwrap();
    assert!(
        core.alloc(&Request::new(u64::MAX)).is_err_and(|error| matches!(error, Refusal::TooLarge { .. }))
    );
}

#[test]
fn the_last_memory_serves_a_large_request_wherever_it_lies() {
    let mut core = Core::new(Box::new(Virtual::new(Sim::new(1024 * MIB), 4096 * MIB).unwrap()));
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
    let mut core = Core::new(Box::new(Virtual::new(Sim::new(1024 * MIB), 4096 * MIB).unwrap()));
    let mut small = Vec::new();
    for _ in 0..8 {
        let large = core.alloc(&Request::new(8 * MIB)).unwrap();
        small.push(core.alloc(&Request::new(1000)).unwrap());
        core.free(large).unwrap();
    }
    assert_eq!(core.books().mapped.current(), 10 * MIB, "one large buffer's memory and one run");
    small.into_iter().for_each(|handle| core.free(handle).unwrap());
    core.trim().unwrap();
    assert_eq!(core.books().mapped.current(), 0);
}
