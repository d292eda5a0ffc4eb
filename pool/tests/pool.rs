//! The pool as programs see it: hits, threads, plans, debug mode, errors, snapshots.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;

use xlaunch_pool::backing::Virtual;
use xlaunch_pool::backing::sim::Sim;
use xlaunch_pool::{Mode, Options, Pool, PoolBuf, PoolError, Space, StreamId, tag};

const MIB: usize = 1 << 20;

/// A pool of a device of the imagination; its addresses must not be touched.
fn sim_pool(total: usize, options: impl Into<Options>) -> (Pool, Sim) {
    let sim = Sim::new(total as u64);
    let backing = Virtual::new(sim.clone(), 8 * total as u64).unwrap();
    (Pool::with_backing(Space::Cuda, Box::new(backing), options), sim)
}

/// Buffers of a trainer's step: some come and go, some live to the end.
fn step(pool: &Pool, sizes: &[usize]) -> Vec<u64> {
    let mut addresses = Vec::new();
    let mut kept: Vec<PoolBuf<u8>> = Vec::new();
    for size in sizes {
        let scratch = pool.alloc::<u8>(size / 2 + 1).unwrap();
        kept.push(pool.alloc::<u8>(*size).unwrap());
        addresses.push(scratch.address());
        addresses.push(kept.last().unwrap().address());
    }
    while let Some(buf) = kept.pop() {
        addresses.push(pool.alloc::<u8>(buf.len()).unwrap().address());
    }
    addresses
}

const SIZES: [usize; 6] = [3 * MIB, 100, 5 * MIB, 700_000, 40_000, 9 * MIB];

#[test]
fn what_repeats_itself_needs_no_driver_after_the_first_time() {
    let (pool, sim) = sim_pool(1024 * MIB, Mode::On);
    let _params = pool.persistent().alloc::<f32>(10 * MIB).unwrap();
    step(&pool, &SIZES);
    let calls = sim.calls();
    for _ in 0..10 {
        step(&pool, &SIZES);
    }
    assert_eq!(sim.calls(), calls);
}

#[test]
fn buffers_that_stay_and_buffers_that_go_lie_at_opposite_ends() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::On);
    let stays = pool.persistent().alloc::<u8>(2 * MIB).unwrap();
    let goes = pool.alloc::<u8>(2 * MIB).unwrap();
    assert!(goes.address() - stays.address() > 4096 * MIB as u64);
}

#[test]
fn a_buffer_is_as_long_as_asked_for_and_apart_from_others() {
    let pool = Pool::host(Mode::On);
    let bufs: Vec<PoolBuf<u8>> = (0..200).map(|len| pool.alloc(len * 37).unwrap()).collect();
    for (index, buf) in bufs.iter().enumerate() {
        // SAFETY: the range is this buffer's memory, and no other thread uses it.
        unsafe { std::ptr::write_bytes(buf.address() as *mut u8, index as u8, buf.len()) };
    }
    for (index, buf) in bufs.iter().enumerate() {
        assert_eq!((buf.len(), buf.address() % 512), (index * 37, 0));
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(buf.address() as *const u8, buf.len()) };
        assert!(bytes.iter().all(|byte| *byte == index as u8));
    }
}

#[test]
fn buffers_dropped_on_other_threads_come_back() {
    let pool = Pool::host(Mode::On);
    let (sender, receiver) = mpsc::channel::<PoolBuf<u8>>();
    let receiver = std::sync::Mutex::new(receiver);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Ok(buf) = { receiver.lock().unwrap().recv() } {
                    drop(buf)
                }
            });
        }
        for thread in 0..4 {
            let (pool, sender) = (pool.clone(), sender.clone());
            scope.spawn(move || {
                for round in 0..5_000 {
                    let buf = pool.alloc::<u8>((round * 7919 + thread) % 100_000).unwrap();
                    if round % 2 == 0 { sender.send(buf).unwrap() } else { drop(buf) }
                }
            });
        }
        drop(sender);
    });
    let stats = pool.stats();
    assert_eq!((stats.live.current(), stats.buffers.current(), stats.buffers.added), (0, 0, 20_000));
    assert_eq!(pool.trim().unwrap(), stats.mapped.current());
}

#[test]
fn a_pool_may_be_dropped_before_its_buffers() {
    let pool = Pool::host(Mode::On);
    let buf = pool.alloc::<u8>(MIB).unwrap();
    drop(pool);
    // SAFETY: the range is this buffer's memory.
    unsafe { std::ptr::write_bytes(buf.address() as *mut u8, 1, buf.len()) };
}

#[test]
fn off_asks_the_driver_every_time() {
    let pool = Pool::host(Mode::Off);
    for _ in 0..3 {
        drop(pool.alloc::<f32>(64).unwrap());
    }
    let stats = pool.stats();
    assert_eq!((stats.chunks.added, stats.chunks.removed, stats.live.current()), (3, 2, 0));
    assert!(matches!(pool.set_limit(1), Err(PoolError::Off)));
}

#[test]
fn equal_steps_get_a_plan_and_with_it_the_same_addresses() {
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
        "the region lies in memory that was there"
    );
    assert_eq!(stats.live.current(), 0, "the region itself is not live");
}

#[test]
fn planned_buffers_that_live_together_do_not_overlap() {
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
fn a_step_that_departs_from_its_plan_is_served_all_the_same() {
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
    assert!(hit >= 6 && missed >= 3 && hit < 18, "{hit} served, {missed} not");
    assert_eq!(hits(&SIZES), (18, 0), "the plan serves again in the next step");
    // Departures in a row end the plan; the new shape gets its own.
    for _ in 0..3 {
        hits(&other);
    }
    hits(&other);
    hits(&other);
    pool.finish_planning();
    assert_eq!(hits(&other), (18, 0));
}

#[test]
fn alternating_shapes_keep_their_plans() {
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
fn a_planned_buffer_that_outlives_its_step_is_not_written_over() {
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
fn a_planned_buffer_dropped_on_another_thread_comes_back_in_time() {
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

/// The region is handed out without the lock: while a step may do so, it stays.
#[test]
fn a_trim_from_another_thread_leaves_a_planned_step_its_memory() {
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
    assert!(pool.trim().unwrap() > 0, "afterwards it goes");
}

#[test]
fn loans_of_planned_buffers_keep_their_place() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::Plan);
    for round in 0..4 {
        let _step = pool.step(0);
        let buf = pool.alloc::<u8>(3 * MIB).unwrap();
        let loan = (round == 3).then(|| buf.lend(0..10));
        let address = buf.address();
        drop(buf);
        let next = pool.alloc::<u8>(3 * MIB).unwrap();
        assert_eq!(loan.is_none(), next.address() == address, "round {round}");
        pool.finish_planning();
    }
}

#[test]
fn only_the_first_thread_is_served_from_plans() {
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

#[test]
fn impossible_sizes_are_refused_and_the_pool_lives_on() {
    for mode in [Mode::On, Mode::Plan, Mode::Off] {
        let pool = Pool::host(mode);
        assert!(matches!(pool.alloc::<f32>(usize::MAX), Err(PoolError::TooLarge { .. })), "{mode:?}");
        assert!(pool.alloc::<f32>(1 << 60).is_err());
        let empty = pool.alloc::<f32>(0).unwrap();
        assert_eq!((empty.len(), empty.is_empty(), empty.address() % 512), (0, true, 0));
        assert_eq!(pool.alloc::<f32>(3).unwrap().len(), 3);
    }
}

#[test]
fn a_full_pool_says_who_holds_what_and_what_would_have_helped() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, _sim) = sim_pool(1024 * MIB, Options { limit: 64 * MIB as u64, ..Options::default() });
    pool.snapshot_on_failure(dir.path());
    let _outside = pool.external(4 * MIB as u64).unwrap();
    let _params = pool.persistent().alloc::<u8>(40 * MIB).unwrap();
    let _acts: Vec<_> = {
        let _tag = tag("forward");
        (0..3).map(|_| pool.alloc::<u8>(5 * MIB).unwrap()).collect()
    };
    let error = pool.alloc::<u8>(20 * MIB).unwrap_err();
    let PoolError::OutOfMemory(report) = &error else { panic!("{error}") };
    assert_eq!((report.requested, report.live, report.external), (20 << 20, 55 << 20, 4 << 20));
    assert_eq!((report.limit, report.top.len()), (Some(64 << 20), 2));
    let text = error.to_string();
    for part in [
        "20.0 MiB asked for by",
        "pool.rs",
        "live 55.0 MiB",
        "limit 64.0 MiB",
        "held by others 4.0 MiB",
        "3 buffers  forward",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(report.snapshot.as_ref().is_some_and(|path| path.exists()), "{text}");
    pool.set_limit(u64::MAX).unwrap();
    assert!(pool.alloc::<u8>(20 * MIB).is_ok(), "the pool lives on");
}

#[test]
fn registered_outside_bytes_end_with_their_guard() {
    let (pool, sim) = sim_pool(1024 * MIB, Options { limit: 10 * MIB as u64, ..Options::default() });
    let outside = pool.external(10 * MIB as u64).unwrap();
    assert!(pool.alloc::<u8>(1).is_err());
    drop(outside);
    assert!(pool.alloc::<u8>(10 * MIB).is_ok());
    assert!(pool.external(1).is_ok(), "unused memory is given back for it");
    assert_eq!(sim.held(), 0);
}

#[test]
fn a_registered_buffer_has_a_segment_around_it() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::On);
    let buf = pool.registered().alloc::<u8>(3 * MIB).unwrap();
    let (start, len) = buf.segment().unwrap();
    assert!(start <= buf.address() && buf.address() + 3 * MIB as u64 <= start + len);
    let other = pool.registered().alloc::<u8>(3 * MIB).unwrap();
    assert_ne!(other.segment().unwrap().0, start, "segments are not run together");
}

fn debug_pool(fill: u8) -> Pool {
    Pool::host(Options { debug: Some(fill), ..Options::default() })
}

#[test]
fn debug_mode_fills_new_buffers() {
    for fill in [0x00, 0xff, 0x7f] {
        let pool = debug_pool(fill);
        for _ in 0..2 {
            let buf = pool.alloc::<u8>(1000).unwrap();
            // SAFETY: the range is this buffer's memory.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buf.address() as *mut u8, 1000) };
            assert!(bytes.iter().all(|byte| *byte == fill));
            bytes.fill(1);
        }
    }
}

#[test]
fn debug_mode_finds_a_write_after_free_and_names_both_sites() {
    let pool = debug_pool(0);
    let _small = pool.alloc::<u8>(1).unwrap();
    let buf = pool.alloc::<u8>(100_000).unwrap();
    let address = buf.address();
    let line = line!() + 1;
    drop(buf);
    drop(pool.alloc::<u8>(1).unwrap());
    // SAFETY: the memory is mapped; that nobody owns it is the point.
    unsafe { *((address + 777) as *mut u8) = 1 };
    let error = pool.alloc::<u8>(100_000).unwrap_err();
    let text = error.to_string();
    for part in ["after it was freed", "byte 777", "allocated by", "pool/tests/pool.rs", "freed at"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let freed = text.split("freed at").nth(1).unwrap();
    assert!(freed.contains(&format!("tests/pool.rs:{line}:")), "{text}");
    assert!(pool.alloc::<u8>(100_000).is_ok(), "said once");
}

#[test]
fn debug_mode_finds_a_write_behind_the_end() {
    let pool = debug_pool(0);
    let buf = pool.alloc::<u8>(1000).unwrap();
    // SAFETY: the block is 1024 bytes long; that the buffer is shorter is the point.
    unsafe { *((buf.address() + 1003) as *mut u8) = 1 };
    drop(buf);
    let text = pool.alloc::<u8>(10).unwrap_err().to_string();
    assert!(text.contains("behind its end") && text.contains("byte 1003"), "{text}");
}

#[test]
fn leaks_are_listed_by_site() {
    let pool = Pool::host(Mode::On);
    let _kept: Vec<_> = (0..3).map(|_| pool.alloc::<u8>(5000).unwrap()).collect();
    let sites = pool.snapshot().by_site();
    let [(Some(site), 15360, 3)] = sites[..] else { panic!("{sites:?}") };
    assert!(site.location.file().ends_with("pool.rs"));
}

#[test]
fn counters_have_the_names_of_pytorch() {
    let pool = Pool::host(Mode::On);
    let _buf = pool.alloc::<u8>(1000).unwrap();
    let counters = pool.stats().torch();
    let value = |name: &str| counters.iter().find(|(other, _)| other == name).map(|(_, value)| *value);
    assert_eq!(value("allocated_bytes.all.current"), Some(1024));
    assert_eq!(value("requested_bytes.all.peak"), Some(1000));
    assert_eq!(value("allocation.all.allocated"), Some(1));
    assert_eq!(value("reserved_bytes.all.current"), Some(2 << 20));
    assert_eq!(value("num_device_alloc"), Some(1));
    assert_eq!(value("num_ooms"), Some(0));
}

fn traced() -> (Pool, Vec<PoolBuf<u8>>) {
    let pool = Pool::host(Options { trace: 1000, ..Options::default() });
    let kept = [3000, 5 * MIB, 70_000].map(|len| pool.alloc::<u8>(len).unwrap()).into();
    drop(pool.alloc::<u8>(2 * MIB).unwrap());
    (pool, kept)
}

/// CPython is the judge of what a pickle is. Skipped with a word where there is none.
#[test]
fn the_snapshot_is_a_pickle_that_tiles_its_segments() {
    let (pool, _kept) = traced();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot.pickle");
    pool.snapshot().write_memory_viz(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[..2], [0x80, 2], "protocol 2, which the viewer reads");
    let script = r"
import pickle, pickletools, sys
data = open(sys.argv[1], 'rb').read()
allowed = set('PROTO EMPTY_DICT EMPTY_LIST MARK APPENDS SETITEMS BINUNICODE BININT BININT1 BININT2 LONG1 NEWTRUE NEWFALSE TUPLE2 TUPLE NONE STOP'.split())
used = {op.name for op, _, _ in pickletools.genops(data)}
assert used <= allowed, used - allowed
s = pickle.loads(data)
for segment in s['segments']:
    assert segment['total_size'] == sum(b['size'] for b in segment['blocks'])
    at = segment['address']
    for block in segment['blocks']:
        assert block['address'] == at, block
        at += block['size']
live = sum(b['requested_size'] for g in s['segments'] for b in g['blocks'] if b['state'] == 'active_allocated')
actions = [e['action'] for e in s['device_traces'][0]]
frame = s['device_traces'][0][0]['frames'][0]
print(live, ' '.join(actions), frame['filename'].split('/')[-1])
";
    let Ok(output) = Command::new("python3").arg("-c").arg(script).arg(&path).output() else {
        eprintln!("skipped: no python3");
        return;
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let live = 3000 + 5 * MIB + 70_000;
    let expected = format!("{live} alloc alloc alloc alloc free_requested free_completed pool.rs\n");
    assert_eq!(out, expected, "{err}");
}

#[test]
fn counters_over_time_and_the_replay_log_tell_the_same() {
    let (pool, _kept) = traced();
    let snapshot = pool.snapshot();
    let json: serde_json::Value = serde_json::from_str(&snapshot.perfetto(3)).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    assert_eq!((events.len(), &events[0]["ph"], &events[0]["pid"]), (5, &"C".into(), &3.into()));
    let live: Vec<u64> = events.iter().map(|event| event["args"]["live"].as_u64().unwrap()).collect();
    assert!(live[3] == live[2] + (2 << 20) && live[4] == live[2], "{live:?}");
    let trace = xlaunch_pool::replay::Trace::parse(&snapshot.rmm_csv()).unwrap();
    assert_eq!((trace.start.len(), trace.step.len()), (3, 2));
}

/// Nothing of this crate may end up on a path of this machine; a test file's own name must do for sites.
#[test]
fn sites_are_relative() {
    let (pool, _kept) = traced();
    let site = pool.snapshot().by_site()[0].0.unwrap();
    assert!(Path::new(site.location.file()).is_relative());
}
