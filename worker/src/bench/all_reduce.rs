//! The worker's part of `xlaunch bench allreduce`: all-reduces known values with the trainer's own collective.
//!
//! Element i of rank r is `(i + r) mod m`, with m small enough that every sum over ranks is exact in bf16 (integers up
//! to 256). So any order of additions gives the same bits, and any other result is an error.

use std::ops::Range;
use std::time::Instant;

use xlaunch_comm::{Collective, Operation};
use xlaunch_engine::{Cast, DType, Tensor};
use xlaunch_proto::v1::{AllReduceBench, AllReduceReport};

use crate::error::Result;
use crate::model::BackendHandle;
use crate::nccl_windows;

/// Largest integer up to which bf16 represents every integer exactly.
const MAX_EXACT_BF16: usize = 256;
/// Elements copied to or from the device in one call.
const CHUNK: usize = 1 << 20;
/// Untimed all-reduces before the measurement.
const WARMUP: usize = 5;
/// A measurement repeats the all-reduce until this many bytes were reduced, within the bounds of `REPEATS`.
const VOLUME_BYTES: u64 = 1 << 28;
const REPEATS: Range<u64> = 20..200;

/// Measures and reports each size. `log` also prints whether NCCL windows are used.
pub(crate) fn all_reduce(
    bench: &AllReduceBench,
    backend: &BackendHandle,
    collective: &mut dyn Collective,
    log: bool,
    mut report: impl FnMut(AllReduceReport),
) -> Result<()> {
    let dtype = if bench.bf16 { DType::Bf16 } else { DType::F32 };
    let staging = backend.alloc_persistent(DType::F32, CHUNK)?;
    let elements = |count: &u64| usize::try_from(*count).unwrap_or(usize::MAX);
    let x = backend.alloc_collective(dtype, bench.counts.iter().map(elements).max().unwrap_or(0))?;
    nccl_windows::register(backend, [&x], collective, log)?;
    for count in &bench.counts {
        let wrong = check(backend, collective, &x, elements(count), &staging)?;
        let seconds = time(backend, collective, &x, elements(count), &staging)?;
        report(AllReduceReport { count: *count, seconds, wrong });
    }
    Ok(())
}

/// All-reduces the first `len` elements once. Returns the number of this rank's elements that differ from the exact
/// sum.
fn check(
    backend: &BackendHandle,
    collective: &mut dyn Collective,
    x: &Tensor,
    len: usize,
    staging: &Tensor,
) -> Result<u64> {
    let (rank, world) = (collective.rank(), collective.world_size());
    for part in parts(len) {
        let values: Vec<f32> = part.clone().map(|i| value(i, rank, world)).collect();
        let staging = staging.slice(0..part.len());
        backend.write_f32(staging, &values)?;
        backend.run(Cast { x: staging, y: x.slice(part) })?;
    }
    run(collective, x, len)?;
    let mut wrong = 0;
    let mut host = vec![0.0; CHUNK.min(len)];
    for part in parts(len) {
        let host = &mut host[..part.len()];
        backend.read_f32(x.slice(part.clone()), host)?;
        collective.check()?;
        wrong += part.zip(host).filter(|(i, found)| expected(*i, world).to_bits() != found.to_bits()).count();
    }
    Ok(wrong as u64)
}

/// Seconds per all-reduce. The values grow with each one, which does not affect the time.
#[expect(clippy::cast_precision_loss, reason = "a few hundred")]
fn time(
    backend: &BackendHandle,
    collective: &mut dyn Collective,
    x: &Tensor,
    len: usize,
    probe: &Tensor,
) -> Result<f64> {
    let bytes = (len * x.dtype().size()) as u64;
    let repeats = (VOLUME_BYTES / bytes.max(1)).clamp(REPEATS.start, REPEATS.end);
    // A read-back waits for all work enqueued before it.
    let wait = || backend.read_f32(probe.slice(0..1), &mut [0.0]);
    (0..WARMUP).try_for_each(|_| run(collective, x, len))?;
    wait()?;
    let start = Instant::now();
    (0..repeats).try_for_each(|_| run(collective, x, len))?;
    wait()?;
    let seconds = start.elapsed().as_secs_f64();
    collective.check()?;
    Ok(seconds / repeats as f64)
}

fn run(collective: &mut dyn Collective, x: &Tensor, len: usize) -> Result<()> {
    Ok(collective.run(Operation::AllReduce { buckets: vec![x.lend(0..len)], dtype: x.dtype() })?)
}

fn parts(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(CHUNK).map(move |first| first..len.min(first + CHUNK))
}

/// Returns m: values range from 0 to m - 1, and `world` of them add up to at most [`MAX_EXACT_BF16`].
fn modulus(world: usize) -> usize {
    (MAX_EXACT_BF16 / world.max(1)).clamp(2, 8)
}

#[expect(clippy::cast_precision_loss, reason = "small integers")]
fn value(i: usize, rank: usize, world: usize) -> f32 {
    ((i + rank) % modulus(world)) as f32
}

fn expected(i: usize, world: usize) -> f32 {
    (0..world).map(|rank| value(i, rank, world)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use xlaunch_comm::{Ring, RingListener, RingPlace};
    use xlaunch_engine::{Backend, PoolMode};

    use crate::bench::SkipAllReduce;

    const BENCH: [u64; 3] = [1, 1000, 3 << 20];

    /// Returns the number of wrong elements per size on each of two ranks, with the ring wrapped by `wrap`.
    fn wrong(wrap: fn(Ring) -> Box<dyn Collective>) -> Vec<Vec<u64>> {
        let dir = tempfile::tempdir().unwrap();
        let listeners: Vec<_> = (0..2).map(|rank| RingListener::bind(dir.path(), rank).unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_string()).collect();
        let rank = |rank: usize, listener: RingListener| {
            let place = RingPlace { rank, world: 2, next_address: &addresses[1 - rank], key: &[7; 32] };
            let ring = Ring::connect(listener, &place, Duration::from_secs(20)).unwrap();
            let backend = BackendHandle::new(Backend::cpu(1, PoolMode::On)).with_windows(true);
            let bench = AllReduceBench { counts: BENCH.to_vec(), bf16: false };
            let (mut collective, mut wrong) = (wrap(ring), Vec::new());
            let report = |report: AllReduceReport| {
                assert!(report.seconds > 0.0);
                wrong.push(report.wrong);
            };
            all_reduce(&bench, &backend, &mut *collective, false, report).unwrap();
            collective.finalize().unwrap();
            wrong
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = listeners
                .into_iter()
                .enumerate()
                .map(|(index, listener)| scope.spawn(move || rank(index, listener)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_reduce_is_exact_and_a_skipped_one_is_detected() {
        assert_eq!(wrong(|ring| Box::new(ring)), vec![vec![0; 3]; 2]);
        for (rank, found) in wrong(|ring| Box::new(SkipAllReduce::all(Box::new(ring)))).iter().enumerate() {
            // One element in m is right by chance: the one for which the other rank adds zero.
            for (size, wrong) in BENCH.iter().zip(found).skip(1) {
                assert!(wrong * 8 >= size * 7 - 8, "rank {rank}: {wrong} of {size}");
            }
        }
        for found in wrong(|ring| Box::new(SkipAllReduce::except_small(Box::new(ring)))) {
            assert!(found[0] == 0 && found[1] > 0 && found[2] > 0, "{found:?}");
        }
    }

    #[test]
    fn every_sum_is_an_integer_that_bf16_represents() {
        for world in [1, 2, 3, 8, 72, 128] {
            assert!((0..64).all(|i| expected(i, world) <= 256.0), "{world} ranks");
            assert!((0..64).any(|i| expected(i, world) > 0.0), "{world} ranks");
        }
    }
}
