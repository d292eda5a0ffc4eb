//! Times of host pools. Requests that hit the pool take the same time for device memory, which they do not access.

use std::hint::black_box;
use std::time::Instant;

use serde::Serialize;
use xlaunch_pool::{Mode, Pool, PoolBuf, PoolError};

/// Time of one allocation with its free.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Timing {
    /// Name of the measurement.
    pub(crate) name: &'static str,
    /// Median over the runs.
    pub(crate) nanoseconds: f64,
}

/// Measures the times of a host pool.
pub(super) fn host(runs: usize) -> Result<Vec<Timing>, PoolError> {
    let timing = |name, nanoseconds| Timing { name, nanoseconds };
    Ok(vec![
        timing("xlaunch-pool, 1 MiB of host memory", one_buffer(runs)?),
        timing("xlaunch-pool, 256 live buffers of mixed sizes", mixed_sizes(runs)?),
        timing("xlaunch-pool, from a plan", planned(runs)?),
        timing("xlaunch-pool, freed by a second thread", second_thread(runs)?),
    ])
}

/// Returns the time of one of the `pairs` in a run, in nanoseconds: the median of `runs`, after one run to warm up.
pub(super) fn median(
    runs: usize,
    pairs: usize,
    mut run: impl FnMut() -> Result<(), PoolError>,
) -> Result<f64, PoolError> {
    run()?;
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        times.push(start.elapsed().as_secs_f64() * 1e9 / pairs as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[runs / 2])
}

fn one_buffer(runs: usize) -> Result<f64, PoolError> {
    const PAIRS: usize = 300_000;
    let pool = Pool::host(Mode::On);
    median(runs, PAIRS, || {
        for _ in 0..PAIRS {
            let buf = pool.alloc::<u8>(1 << 20)?;
            black_box(buf.address());
        }
        Ok(())
    })
}

/// Measures sizes from 256 bytes to 8 MiB, uniform over powers of two, like the buffers of a trainer.
fn mixed_sizes(runs: usize) -> Result<f64, PoolError> {
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
    median(runs, PAIRS, || {
        choices.iter().try_for_each(|(which, len)| pool.alloc(*len).map(|buf| live[*which] = buf))
    })
}

fn planned(runs: usize) -> Result<f64, PoolError> {
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
    let time = median(runs, STEPS * BUFFERS, || (0..STEPS).try_for_each(|_| step()))?;
    assert_eq!(pool.stats().plan_misses, 0, "all requests are served from the plan");
    Ok(time)
}

/// Measures one thread that allocates while another one frees.
fn second_thread(runs: usize) -> Result<f64, PoolError> {
    const PAIRS: usize = 100_000;
    let pool = Pool::host(Mode::On);
    median(runs, PAIRS, || {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<Vec<PoolBuf<u8>>>(4);
        std::thread::scope(|scope| {
            scope.spawn(move || receiver.into_iter().for_each(drop));
            (0..PAIRS / 100).try_for_each(|_| -> Result<(), PoolError> {
                let batch = (0..100).map(|_| pool.alloc(8192)).collect::<Result<_, _>>()?;
                // The receiver outlives the sender.
                let _ = sender.send(batch);
                Ok(())
            })?;
            drop(sender);
            Ok(())
        })
    })
}
