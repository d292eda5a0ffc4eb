//! Tests of plans: repeated steps are served at fixed addresses; departures from a plan cost speed, never data.

mod common;

use common::{MIB, SIZES, sim_pool, step};
use xlaunch_pool::{Mode, Pool, PoolBuf, StreamId};

#[test]
fn equal_steps_are_planned_and_get_equal_addresses() {
    let (pool, sim) = sim_pool(1024 * MIB, Mode::Plan);
    let run = |key| {
        let _step = pool.step(key);
        step(&pool, &SIZES)
    };
    run(0);
    run(0);
    assert_eq!(pool.stats().plan_hits, 0);
    pool.finish_planning();
    let (calls, mapped) = (sim.calls(), pool.stats().mapped.current());
    let planned = run(0);
    assert_eq!(run(0), planned);
    let stats = pool.stats();
    assert_eq!((stats.plan_hits, stats.plan_misses), (2 * planned.len() as u64, 0));
    assert_eq!(
        (sim.calls(), stats.mapped.current()),
        (calls, mapped),
        "the region is in memory that was mapped before"
    );
    assert_eq!(stats.live.current(), 0, "the region itself does not count as live");
}

#[test]
fn out_of_memory_report_names_the_region_of_plans_and_the_memory_to_free() {
    let (pool, _sim) = sim_pool(64 * MIB, Mode::Plan);
    for _ in 0..3 {
        pool.finish_planning();
        let _step = pool.step(0);
        step(&pool, &SIZES);
    }
    pool.pin_plans();
    let text = pool.alloc::<u8>(60 * MIB).unwrap_err().to_string();
    assert!(text.contains("1 buffers  plans of repeated steps"), "{text}");
    assert!(
        text.contains("help: free 60.0 MiB in one block, or make 60.0 MiB available on the device"),
        "{text}"
    );
}

#[test]
fn live_planned_buffers_do_not_overlap() {
    let pool = Pool::host(Mode::Plan);
    for _ in 0..5 {
        let step = pool.step(0);
        let mut live: Vec<PoolBuf<u8>> = Vec::new();
        for round in 0..100_usize {
            live.push(pool.alloc(round * 7919 % 50_000 + 1).unwrap());
            if round % 3 == 2 {
                live.remove(round * 31 % live.len());
            }
            let mut ranges: Vec<_> =
                live.iter().map(|buf| (buf.address(), buf.address() + buf.len() as u64)).collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
        drop((live, step));
        pool.finish_planning();
    }
    assert_eq!(pool.stats().plan_hits, 300);
}

#[test]
fn step_that_departs_from_its_plan_is_served_and_replanned() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    for _ in 0..2 {
        let _step = pool.step(0);
        step(&pool, &SIZES);
    }
    pool.finish_planning();
    let hits = |sizes: &[usize]| {
        let before = pool.stats();
        let one = pool.step(0);
        step(&pool, sizes);
        drop(one);
        let after = pool.stats();
        (after.plan_hits - before.plan_hits, after.plan_misses - before.plan_misses)
    };
    assert_eq!(hits(&SIZES), (18, 0));
    let mut other = SIZES;
    other[2] = 6 * MIB;
    let (hit, missed) = hits(&other);
    assert!(hit >= 6 && missed >= 3 && hit < 18, "{hit} hits, {missed} misses");
    assert_eq!(hits(&SIZES), (18, 0), "the plan serves again in the next step");
    // After three consecutive departures, the plan is replaced by one for the new sizes.
    for _ in 0..3 {
        hits(&other);
    }
    hits(&other);
    hits(&other);
    pool.finish_planning();
    assert_eq!(hits(&other), (18, 0));
}

#[test]
fn alternating_steps_keep_their_plans() {
    let (pool, sim) = sim_pool(1024 * MIB, Mode::Plan);
    let small: Vec<usize> = SIZES.iter().map(|size| size / 3).collect();
    let run = |key: u64| {
        let _step = pool.step(key);
        step(&pool, if key == 0 { &SIZES } else { &small })
    };
    for key in [0, 1, 0, 1] {
        run(key);
    }
    pool.finish_planning();
    let (large, little) = (run(0), run(1));
    let calls = sim.calls();
    assert_eq!((run(0), run(1)), (large, little));
    assert_eq!((pool.stats().plan_misses, sim.calls()), (0, calls));
}

#[test]
fn planned_buffer_that_outlives_its_step_is_not_reused() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    let run = |keep: bool| {
        let _step = pool.step(0);
        let first = pool.alloc::<u8>(3 * MIB).unwrap();
        let kept = keep.then_some(first);
        let second = pool.alloc::<u8>(3 * MIB).unwrap();
        assert!(kept.as_ref().is_none_or(|kept| kept.address() != second.address()));
        kept
    };
    run(false);
    run(false);
    pool.finish_planning();
    run(false);
    assert_eq!(pool.stats().plan_hits, 2);
    let kept = run(true).unwrap();
    for _ in 0..3 {
        let _step = pool.step(0);
        let other = pool.alloc::<u8>(3 * MIB).unwrap();
        assert!(
            other.address() + 3 * MIB as u64 <= kept.address()
                || kept.address() + 3 * MIB as u64 <= other.address()
        );
    }
}

#[test]
fn planned_buffer_dropped_on_another_thread_is_reused_in_the_same_step() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    for round in 0..6 {
        let step = pool.step(0);
        let buf = pool.alloc::<u8>(3 * MIB).unwrap();
        if round < 3 {
            drop(buf)
        } else {
            std::thread::spawn(move || drop(buf)).join().unwrap()
        }
        drop(pool.alloc::<u8>(3 * MIB).unwrap());
        drop(step);
        pool.finish_planning();
    }
    assert_eq!((pool.stats().plan_hits, pool.stats().live.current()), (2 * 4, 0));
}

/// A planned step hands out parts of the region without the lock, so a concurrent trim must leave the region alone.
#[test]
fn trim_from_another_thread_keeps_region_of_planned_step() {
    let (pool, sim) = sim_pool(1024 * MIB, Mode::Plan);
    for round in 0..4 {
        let step = pool.step(0);
        if round == 3 {
            let other = pool.clone();
            std::thread::spawn(move || other.trim().unwrap()).join().unwrap();
        }
        drop(pool.alloc::<u8>(3 * MIB).unwrap());
        let buf = pool.alloc::<u8>(3 * MIB).unwrap();
        sim.write(StreamId::default(), buf.address(), 3 * MIB as u64, 1);
        drop((buf, step));
        pool.finish_planning();
    }
    assert_eq!((pool.stats().plan_hits, sim.finish()), (4, Vec::new()));
    assert!(pool.trim().unwrap() > 0, "after the step the region is freed");
}

#[test]
fn lease_keeps_planned_memory() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    for round in 0..4 {
        let _step = pool.step(0);
        let buf = pool.alloc::<u8>(3 * MIB).unwrap();
        let lease = (round == 3).then(|| buf.lease(0..10));
        let address = buf.address();
        drop(buf);
        let next = pool.alloc::<u8>(3 * MIB).unwrap();
        assert_eq!(lease.is_none(), next.address() == address, "round {round}");
        pool.finish_planning();
    }
}

#[test]
fn only_first_thread_is_served_from_plans() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    for _ in 0..3 {
        let _step = pool.step(0);
        step(&pool, &SIZES);
        pool.finish_planning();
    }
    let hits = pool.stats().plan_hits;
    let other = pool.clone();
    std::thread::spawn(move || {
        let _step = other.step(0);
        step(&other, &SIZES);
    })
    .join()
    .unwrap();
    assert_eq!(pool.stats().plan_hits, hits);
}
