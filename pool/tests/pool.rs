//! Tests of the pool's API: reuse, threads, modes, limits, errors, debug mode.

mod common;

use std::sync::mpsc;

use common::{MIB, SIZES, sim_pool, step};
use xlaunch_pool::{Mode, Options, Pool, PoolBuf, PoolError, tag};

#[test]
fn repeated_step_makes_no_driver_call_after_the_first() {
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
fn persistent_and_step_buffers_are_at_opposite_ends() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::On);
    let persistent = pool.persistent().alloc::<u8>(2 * MIB).unwrap();
    let temporary = pool.alloc::<u8>(2 * MIB).unwrap();
    assert!(temporary.address() - persistent.address() > 4096 * MIB as u64);
}

#[test]
fn buffers_have_requested_length_and_do_not_overlap() {
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
fn buffers_dropped_on_other_threads_are_freed() {
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
fn buffers_outlive_the_pool_handle() {
    let pool = Pool::host(Mode::On);
    let buf = pool.alloc::<u8>(MIB).unwrap();
    drop(pool);
    // SAFETY: the range is this buffer's memory.
    unsafe { std::ptr::write_bytes(buf.address() as *mut u8, 1, buf.len()) };
}

#[test]
fn off_mode_calls_the_driver_for_every_buffer() {
    let pool = Pool::host(Mode::Off);
    for _ in 0..3 {
        drop(pool.alloc::<f32>(64).unwrap());
    }
    let stats = pool.stats();
    assert_eq!((stats.chunks.added, stats.chunks.removed, stats.live.current()), (3, 2, 0));
    assert!(matches!(pool.set_limit(1), Err(PoolError::Off)));
}

#[test]
fn oversized_requests_fail_and_pool_stays_usable() {
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
fn out_of_memory_report_names_holders_and_help() {
    let dir = tempfile::tempdir().unwrap();
    let (pool, _sim) = sim_pool(1024 * MIB, Options { limit: 64 * MIB as u64, ..Options::default() });
    pool.snapshot_on_failure(dir.path());
    let _external = pool.reserve_external(4 * MIB as u64).unwrap();
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
        "cannot allocate 20.0 MiB at pool/tests/pool.rs",
        "live 55.0 MiB",
        "limit 64.0 MiB",
        "external 4.0 MiB",
        "3 buffers  forward",
        "help: raise the limit by",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(report.snapshot.as_ref().is_some_and(|path| path.exists()), "{text}");
    pool.set_limit(u64::MAX).unwrap();
    assert!(pool.alloc::<u8>(20 * MIB).is_ok(), "the pool stays usable");
}

#[test]
fn external_bytes_count_until_guard_is_dropped() {
    let (pool, sim) = sim_pool(1024 * MIB, Options { limit: 10 * MIB as u64, ..Options::default() });
    let external = pool.reserve_external(10 * MIB as u64).unwrap();
    assert!(pool.alloc::<u8>(1).is_err());
    drop(external);
    assert!(pool.alloc::<u8>(10 * MIB).is_ok());
    assert!(pool.reserve_external(1).is_ok(), "unused memory was freed to make room");
    assert_eq!(sim.held(), 0);
}

#[test]
fn registered_buffers_have_separate_segments() {
    let (pool, _sim) = sim_pool(1024 * MIB, Mode::On);
    let buf = pool.registered().alloc::<u8>(3 * MIB).unwrap();
    let (start, len) = buf.segment().unwrap();
    assert!(start <= buf.address() && buf.address() + 3 * MIB as u64 <= start + len);
    let other = pool.registered().alloc::<u8>(3 * MIB).unwrap();
    assert_ne!(other.segment().unwrap().0, start, "each buffer has a segment");
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
fn debug_mode_detects_use_after_free_and_names_both_sites() {
    let pool = debug_pool(0);
    let _small = pool.alloc::<u8>(1).unwrap();
    let buf = pool.alloc::<u8>(100_000).unwrap();
    let address = buf.address();
    let line = line!() + 1;
    drop(buf);
    drop(pool.alloc::<u8>(1).unwrap());
    // SAFETY: the memory is still mapped; writing to it although it was freed is the point of the test.
    unsafe { *((address + 777) as *mut u8) = 1 };
    let error = pool.alloc::<u8>(100_000).unwrap_err();
    let text = error.to_string();
    for part in ["after it was freed", "byte 777", "allocated at", "pool/tests/pool.rs", "freed at"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let freed = text.split("freed at").nth(1).unwrap();
    assert!(freed.contains(&format!("tests/pool.rs:{line}:")), "{text}");
    assert!(pool.alloc::<u8>(100_000).is_ok(), "it is reported once");
}

#[test]
fn debug_mode_detects_overrun() {
    let pool = debug_pool(0);
    let buf = pool.alloc::<u8>(1000).unwrap();
    // SAFETY: the block is 1024 bytes long; writing past the shorter buffer is the point of the test.
    unsafe { *((buf.address() + 1003) as *mut u8) = 1 };
    drop(buf);
    let text = pool.alloc::<u8>(10).unwrap_err().to_string();
    assert!(text.contains("past its end") && text.contains("byte 1003"), "{text}");
}
