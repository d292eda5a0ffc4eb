//! What the pool costs and saves, measured: the numbers behind `xlaunch bench alloc`.

#[cfg(feature = "cuda")]
mod driver;

use std::hint::black_box;
use std::time::Instant;

use crate::{Mode, Pool, PoolBuf, PoolError};

#[cfg(feature = "cuda")]
pub use driver::driver_pairs;

/// Repetitions of a measurement, of which the median counts.
const RUNS: usize = 9;

/// Nanoseconds that one request with its return costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// What was measured.
    pub name: &'static str,
    /// Median over repetitions.
    pub nanoseconds: f64,
}

/// Pairs of a host pool: the way of a hit is the same for device memory, which it does not touch.
pub fn pool_pairs() -> Result<Vec<Pair>, PoolError> {
    Ok(vec![
        Pair { name: "xlaunch, one buffer of 1 MiB", nanoseconds: one_buffer()? },
        Pair { name: "xlaunch, 256 live buffers of mixed sizes", nanoseconds: mixed()? },
        Pair { name: "xlaunch, from a plan", nanoseconds: planned()? },
        Pair { name: "xlaunch, freed by a second thread", nanoseconds: second_thread()? },
    ])
}

/// Median of the time of one of `pairs`, in nanoseconds.
fn median(pairs: usize, mut run: impl FnMut() -> Result<(), PoolError>) -> Result<f64, PoolError> {
    run()?;
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let start = Instant::now();
        run()?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        times.push(start.elapsed().as_secs_f64() * 1e9 / pairs as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}

fn one_buffer() -> Result<f64, PoolError> {
    const PAIRS: usize = 300_000;
    let pool = Pool::host(Mode::On);
    median(PAIRS, || {
        for _ in 0..PAIRS {
            let buf = pool.alloc::<u8>(1 << 20)?;
            black_box(buf.address());
        }
        Ok(())
    })
}

/// Sizes of a trainer's buffers, from bytes to tens of MiB, evenly over powers of two.
fn mixed() -> Result<f64, PoolError> {
    const PAIRS: usize = 300_000;
    let pool = Pool::host(Mode::On);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random >> 20
    };
    let choices: Vec<(usize, usize)> = (0..PAIRS)
        .map(|_| ((next() % 256) as usize, (1 << (next() % 16 + 8)) + (next() % 4096) as usize))
        .collect();
    let mut live: Vec<PoolBuf<u8>> = Vec::with_capacity(256);
    for (_, len) in &choices[..256] {
        live.push(pool.alloc(*len)?);
    }
    median(PAIRS, || {
        choices.iter().try_for_each(|(which, len)| pool.alloc(*len).map(|buf| live[*which] = buf))
    })
}

fn planned() -> Result<f64, PoolError> {
    const STEPS: usize = 300;
    const BUFFERS: usize = 1000;
    let pool = Pool::host(Mode::Plan);
    let step = || -> Result<(), PoolError> {
        let _step = pool.step(0);
        for index in 0..BUFFERS {
            let buf = pool.alloc::<u8>(4096 + (index % 8) * 1024)?;
            black_box(buf.address());
        }
        Ok(())
    };
    step()?;
    step()?;
    pool.finish_planning();
    let time = median(STEPS * BUFFERS, || (0..STEPS).try_for_each(|_| step()))?;
    debug_assert_eq!(pool.stats().plan_misses, 0);
    Ok(time)
}

/// A thread that asks, and one that frees at the same time.
fn second_thread() -> Result<f64, PoolError> {
    const PAIRS: usize = 100_000;
    let pool = Pool::host(Mode::On);
    median(PAIRS, || {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<Vec<PoolBuf<u8>>>(4);
        std::thread::scope(|scope| {
            scope.spawn(move || receiver.into_iter().for_each(drop));
            (0..PAIRS / 100).try_for_each(|_| -> Result<(), PoolError> {
                let batch = (0..100).map(|_| pool.alloc(8192)).collect::<Result<_, _>>()?;
                // The receiver ends after the sender.
                let _ = sender.send(batch);
                Ok(())
            })?;
            drop(sender);
            Ok(())
        })
    })
}
