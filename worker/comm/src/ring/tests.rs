//! Tests of the ring over real sockets, with ranks as threads.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use xlaunch_pool::{DType, Mode, Pool, PoolBuf};

use super::{Ring, RingListener, RingPlace};
use crate::collective::{Among, Collective, CommError, Exchange, Operation, Wait};

const TIMEOUT: Duration = Duration::from_secs(20);
const KEY: [u8; 32] = [7; 32];

fn place(rank: usize, addresses: &[String]) -> RingPlace<'_> {
    let world = addresses.len();
    RingPlace { rank, world, next_address: &addresses[(rank + 1) % world], key: &KEY }
}

fn listeners(world: usize, tcp: bool, dir: &std::path::Path) -> (Vec<RingListener>, Vec<String>) {
    let bind = |rank| {
        if tcp {
            RingListener::bind_tcp([127, 0, 0, 1].into(), rank).unwrap()
        } else {
            RingListener::bind(dir, rank).unwrap()
        }
    };
    let listeners: Vec<RingListener> = (0..world).map(bind).collect();
    let addresses = listeners.iter().map(|listener| listener.address().to_string()).collect();
    (listeners, addresses)
}

#[test]
fn ring_listens_in_the_temporary_directory_if_the_given_one_takes_no_socket() {
    let listener = RingListener::bind(std::path::Path::new("/nonexistent"), 0).unwrap();
    let address = listener.address().strip_prefix("unix:").unwrap();
    assert!(std::path::Path::new(address).starts_with(std::env::temp_dir()), "{address}");
}

/// Runs `f` on every rank of a ring, each on its own thread.
fn on_ring<R: Send>(world: usize, tcp: bool, f: impl Fn(Box<Ring>) -> R + Sync) -> Vec<R> {
    let dir = tempfile::tempdir().unwrap();
    let (listeners, addresses) = listeners(world, tcp, dir.path());
    on_listeners(listeners, &addresses, f)
}

fn on_listeners<R: Send>(
    listeners: Vec<RingListener>,
    addresses: &[String],
    f: impl Fn(Box<Ring>) -> R + Sync,
) -> Vec<R> {
    let f = &f;
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let connect = move || Ring::connect(listener, &place(rank, addresses), TIMEOUT).unwrap();
                scope.spawn(move || f(Box::new(connect())))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn fill(buf: &PoolBuf<u8>, bytes: &[u8]) {
    // SAFETY: the buffer has `bytes.len()` bytes of host memory that no other thread uses.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.address() as *mut u8, bytes.len()) };
}

fn contents(buf: &PoolBuf<u8>) -> Vec<u8> {
    // SAFETY: the buffer has `len` bytes of initialised host memory that no thread writes.
    unsafe { std::slice::from_raw_parts(buf.address() as *const u8, buf.len()) }.to_vec()
}

/// A value; sums of these depend on the order of the additions.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.37 - 123.4 + 1e6 * (rank as f32)
}

/// Computes the sums in the documented order.
fn expected(world: usize, len: usize) -> Vec<f32> {
    let mut sums = vec![0.0; len];
    for c in 0..world {
        let range = len * c / world..len * (c + 1) / world;
        for (i, total) in sums.iter_mut().enumerate().take(range.end).skip(range.start) {
            let first = value((c + 1) % world, i);
            *total = (2..=world).fold(first, |sum, step| value((c + step) % world, i) + sum);
        }
    }
    sums
}

fn start_all_reduce(ring: &mut Ring, pool: &Pool, len: usize) -> PoolBuf<u8> {
    let values: Vec<f32> = (0..len).map(|i| value(ring.rank(), i)).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let buf = pool.alloc::<u8>(bytes.len()).unwrap();
    fill(&buf, &bytes);
    ring.start(Operation::AllReduce { buckets: vec![buf.lease(0..bytes.len())], dtype: DType::F32 }).unwrap();
    buf
}

#[test]
fn rank_that_leaves_out_a_collective_is_an_error_before_any_data_is_mixed() {
    for world in [2, 3] {
        let errors = on_ring(world, false, |mut ring| {
            let pool = Pool::host(Mode::On);
            let skipped = (ring.rank() != 1).then(|| start_all_reduce(&mut ring, &pool, 64));
            let flags = start_all_reduce(&mut ring, &pool, 4);
            let result = ring.wait(Wait::All);
            drop((skipped, flags));
            result.unwrap_err()
        });
        // The next rank detects it; others may lose the connection first.
        let found = errors.iter().filter(|error| matches!(error, CommError::Disagree { .. })).count();
        assert!(found >= 1, "{errors:?}");
        let text = errors.iter().map(ToString::to_string).find(|text| text.contains("different collectives"));
        let text = text.unwrap();
        assert!(text.contains("an all-reduce of 16 bytes") && text.contains("of 256 bytes"), "{text}");
    }
}

fn check_all_reduce(world: usize, tcp: bool, lens: &[usize]) {
    let dir = tempfile::tempdir().unwrap();
    let (listeners, addresses) = listeners(world, tcp, dir.path());
    check_all_reduce_over(listeners, &addresses, lens);
}

fn check_all_reduce_over(listeners: Vec<RingListener>, addresses: &[String], lens: &[usize]) {
    let world = addresses.len();
    let results = on_listeners(listeners, addresses, |mut ring| {
        let pool = Pool::host(Mode::On);
        let buffers: Vec<_> = lens.iter().map(|len| start_all_reduce(&mut ring, &pool, *len)).collect();
        ring.wait(Wait::All).unwrap();
        assert!(buffers.iter().all(|buf| !buf.is_leased(0..buf.len())));
        let results: Vec<Vec<u8>> = buffers.iter().map(contents).collect();
        ring.finalize().unwrap();
        results
    });
    for (index, len) in lens.iter().enumerate() {
        let bytes: Vec<u8> = expected(world, *len).iter().flat_map(|value| value.to_ne_bytes()).collect();
        for (rank, result) in results.iter().enumerate() {
            assert!(result[index] == bytes, "rank {rank} of {world}, {len} elements");
        }
    }
}

#[test]
fn all_reduce_gives_the_same_bits_on_all_ranks() {
    for world in 2..=5 {
        check_all_reduce(world, false, &[0, 1, world - 1, 64, 1001]);
    }
}

#[test]
fn large_messages_over_tcp_do_not_deadlock() {
    check_all_reduce(3, true, &[2_000_000, 7, 1_000_003]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_queue_of_all_reduces_is_exact(world in 2usize..5, lens in prop::collection::vec(0usize..3000, 0..6)) {
        check_all_reduce(world, false, &lens);
    }
}

#[test]
fn bf16_is_added_in_f32_and_rounded_once_per_rank() {
    let results = on_ring(2, false, |mut ring| {
        let pool = Pool::host(Mode::On);
        let own = half::bf16::from_f32(if ring.rank() == 0 { 1.0 } else { 0.003_906_25 });
        let buf = pool.alloc::<u8>(20).unwrap();
        fill(&buf, &own.to_ne_bytes().repeat(10));
        ring.start(Operation::AllReduce { buckets: vec![buf.lease(0..20)], dtype: DType::Bf16 }).unwrap();
        ring.wait(Wait::All).unwrap();
        let result = contents(&buf);
        ring.finalize().unwrap();
        result
    });
    let sum = half::bf16::from_f32(1.0 + 1.0 / 256.0).to_ne_bytes().repeat(10);
    assert!(results.iter().all(|result| *result == sum));
}

/// Returns the bytes of `len` elements of this rank, F32 or Bf16.
fn own_bytes(rank: usize, len: usize, dtype: DType) -> Vec<u8> {
    let values = (0..len).map(|i| value(rank, i));
    match dtype {
        DType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
        _ => values.flat_map(|value| half::bf16::from_f32(value).to_ne_bytes()).collect(),
    }
}

/// Returns the results of every rank: of all-reduce, of reduce-scatter, and of all-gather after reduce-scatter.
fn all_reduce_and_sharded(world: usize, shard: usize, dtype: DType) -> Vec<[Vec<u8>; 3]> {
    on_ring(world, false, |mut ring| {
        let pool = Pool::host(Mode::On);
        let bytes = own_bytes(ring.rank(), world * shard, dtype);
        let [whole, scattered, gathered] = [(); 3].map(|()| pool.alloc::<u8>(bytes.len()).unwrap());
        let own = pool.alloc::<u8>(bytes.len() / world).unwrap();
        fill(&whole, &bytes);
        fill(&scattered, &bytes);
        ring.start(Operation::AllReduce { buckets: vec![whole.lease(0..bytes.len())], dtype }).unwrap();
        ring.start(Operation::ReduceScatter {
            buckets: vec![[scattered.lease(0..bytes.len()), own.lease(0..own.len())]],
            dtype,
        })
        .unwrap();
        ring.wait(Wait::All).unwrap();
        assert!(!scattered.is_leased(0..bytes.len()) && !own.is_leased(0..own.len()));
        ring.start(Operation::AllGather {
            buckets: vec![[own.lease(0..own.len()), gathered.lease(0..bytes.len())]],
        })
        .unwrap();
        ring.start(Operation::AllReduce { buckets: vec![scattered.lease(0..bytes.len())], dtype }).unwrap();
        ring.wait(Wait::OldestGather).unwrap();
        assert!(!own.is_leased(0..own.len()) && !gathered.is_leased(0..bytes.len()));
        let results = [&whole, &own, &gathered].map(contents);
        ring.finalize().unwrap();
        results
    })
}

#[test]
fn reduce_scatter_then_all_gather_equals_all_reduce() {
    for world in 2..=4 {
        for dtype in [DType::F32, DType::Bf16] {
            for shard in [0, 1, 64, 1000] {
                for (rank, [whole, own, gathered]) in
                    all_reduce_and_sharded(world, shard, dtype).into_iter().enumerate()
                {
                    let bytes = shard * dtype.size();
                    let at = format!("rank {rank} of {world}, shards of {shard} {}", dtype.name());
                    assert!(own == whole[rank * bytes..(rank + 1) * bytes], "{at}: reduce-scatter");
                    assert!(gathered == whole, "{at}: all-gather");
                }
            }
        }
    }
}

#[test]
fn sharded_collectives_fail_after_peer_death_and_abort() {
    on_ring(2, false, |mut ring| {
        if ring.rank() == 1 {
            return;
        }
        let pool = Pool::host(Mode::On);
        let (whole, own) = (pool.alloc::<u8>(800).unwrap(), pool.alloc::<u8>(400).unwrap());
        ring.start(Operation::ReduceScatter {
            buckets: vec![[whole.lease(0..800), own.lease(0..400)]],
            dtype: DType::F32,
        })
        .unwrap();
        assert!(matches!(ring.wait(Wait::All), Err(CommError::PeerLost { peer: 1, .. })));
        ring.start(Operation::AllGather { buckets: vec![[own.lease(0..400), whole.lease(0..800)]] }).unwrap();
        assert!(matches!(ring.wait(Wait::OldestGather), Err(CommError::PeerLost { peer: 1, .. })));
        ring.abort_handle().abort();
        let refused =
            ring.start(Operation::AllGather { buckets: vec![[own.lease(0..400), whole.lease(0..800)]] });
        assert!(matches!(refused, Err(CommError::Aborted)));
    });
}

#[test]
fn shards_of_unequal_length_are_summed_and_gathered() {
    for (world, equal, rest) in [(2, 3, 2), (3, 2, 4), (3, 0, 5), (4, 64, 1)] {
        let len = world * equal + rest;
        let results = on_ring(world, false, |mut ring| {
            let rank = ring.rank();
            let own = if rank + 1 == world { equal + rest } else { equal };
            let pool = Pool::host(Mode::On);
            let [summed, shard, gathered] =
                [len, own, len].map(|elements| pool.alloc::<u8>(4 * elements).unwrap());
            let values = |index| ((rank + 1) * (index + 1)) as f32;
            fill(&summed, &(0..len).flat_map(|index| values(index).to_ne_bytes()).collect::<Vec<_>>());
            let pair = [summed.lease(0..4 * len), shard.lease(0..4 * own)];
            ring.run(Operation::ReduceScatter { buckets: vec![pair], dtype: DType::F32 }).unwrap();
            let pair = [shard.lease(0..4 * own), gathered.lease(0..4 * len)];
            ring.run(Operation::AllGather { buckets: vec![pair] }).unwrap();
            let found = contents(&gathered);
            ring.finalize().unwrap();
            found
        });
        let ranks = world * (world + 1) / 2;
        let expected: Vec<u8> = (1..=len).flat_map(|index| ((ranks * index) as f32).to_ne_bytes()).collect();
        assert!(results.iter().all(|found| *found == expected), "{world} ranks, {equal} and {rest}");
    }
}

#[test]
#[should_panic(expected = "700 bytes in 2 shards, 400 of rank 0")]
fn shard_longer_than_that_of_the_last_rank_panics() {
    let pool = Pool::host(Mode::On);
    let (whole, own) = (pool.alloc::<u8>(700).unwrap(), pool.alloc::<u8>(400).unwrap());
    let buckets = vec![[own.lease(0..400), whole.lease(0..700)]];
    Operation::AllGather { buckets }.expect_shards((0, 2));
}

/// Returns the results on each rank of operations among some ranks of 6 in groups of 2, with one number of each: sums
/// over peers, what was gathered in the group, and the shard of a sum over the group.
fn among_some() -> Vec<[Vec<u8>; 3]> {
    on_ring(6, false, |mut ring| {
        ring.divide(2).unwrap();
        let (pool, dtype) = (Pool::host(Mode::On), DType::F32);
        let number = (1 << ring.rank()) as f32;
        let bytes = number.to_ne_bytes();
        let twice = [bytes, (10.0 * number).to_ne_bytes()].concat();
        let alloc = |bytes: &[u8]| {
            let buf = pool.alloc::<u8>(bytes.len()).unwrap();
            fill(&buf, bytes);
            buf
        };
        let (summed, own, gathered) = (alloc(&bytes), alloc(&bytes), alloc(&[0; 8]));
        let (whole, shard) = (alloc(&twice), alloc(&[0; 4]));
        let (other, others, meanwhile) = (alloc(&bytes), alloc(&[0; 12]), alloc(&bytes));
        let buckets = vec![summed.lease(0..4)];
        ring.start_among(Among::Peers, Operation::AllReduce { buckets, dtype }).unwrap();
        let buckets = vec![[other.lease(0..4), others.lease(0..12)]];
        ring.start_among(Among::Peers, Operation::AllGather { buckets }).unwrap();
        let buckets = vec![[own.lease(0..4), gathered.lease(0..8)]];
        ring.exchange(Exchange::Run(Operation::AllGather { buckets })).unwrap();
        let buckets = vec![[whole.lease(0..8), shard.lease(0..4)]];
        ring.exchange(Exchange::Start(Operation::ReduceScatter { buckets, dtype })).unwrap();
        // What is started meanwhile remains to be waited for.
        let buckets = vec![meanwhile.lease(0..4)];
        ring.start_among(Among::Peers, Operation::AllReduce { buckets, dtype }).unwrap();
        ring.exchange(Exchange::Finish).unwrap();
        assert!(!whole.is_leased(0..8) && !gathered.is_leased(0..8), "exchanges have ended");
        // The gather that was started before is still the oldest one.
        ring.wait(Wait::OldestGather).unwrap();
        assert!(!others.is_leased(0..12));
        ring.wait(Wait::All).unwrap();
        assert_eq!(contents(&meanwhile), contents(&summed));
        let results = [&summed, &gathered, &shard].map(contents);
        ring.finalize().unwrap();
        results
    })
}

#[test]
fn operations_among_some_ranks_do_not_mix_with_those_of_others() {
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    for (rank, [summed, gathered, shard]) in among_some().into_iter().enumerate() {
        // Rank r has 2^r.
        let (group, position) = (rank / 2, rank % 2);
        let first = (1 << (2 * group)) as f32;
        assert_eq!(summed, bytes(&[[21.0, 42.0][position]]), "rank {rank}");
        assert_eq!(gathered, bytes(&[first, 2.0 * first]), "rank {rank}");
        assert_eq!(shard, bytes(&[[3.0, 30.0][position] * first]), "rank {rank}");
    }
}

#[test]
fn register_is_unsupported_and_keeps_no_lease() {
    on_ring(2, false, |mut ring| {
        let pool = Pool::host(Mode::On);
        let buf = pool.registered().alloc::<u8>(4000).unwrap();
        assert!(!ring.register(buf.lease(0..0)).unwrap());
        drop(buf);
        assert_eq!(pool.stats().live.current(), 0);
        drop(start_all_reduce(&mut ring, &pool, 1000));
        ring.finalize().unwrap();
    });
}

#[test]
fn broadcast_copies_from_any_root() {
    for root in 0..3 {
        let results = on_ring(3, false, |mut ring| {
            let pool = Pool::host(Mode::On);
            let buf = pool.alloc::<u8>(100_000).unwrap();
            fill(&buf, &vec![u8::try_from(ring.rank()).unwrap(); 100_000]);
            ring.start(Operation::Broadcast { elements: buf.lease(0..100_000), root }).unwrap();
            ring.wait(Wait::All).unwrap();
            let result = contents(&buf);
            ring.finalize().unwrap();
            result
        });
        assert!(results.iter().flatten().all(|byte| usize::from(*byte) == root));
    }
}

#[test]
fn error_names_the_dead_peer() {
    let errors = on_ring(3, false, |mut ring| {
        if ring.rank() == 1 {
            return None;
        }
        let pool = Pool::host(Mode::On);
        let start = Instant::now();
        let _buf = start_all_reduce(&mut ring, &pool, 1000);
        let error = ring.wait(Wait::All).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(5));
        Some(error)
    });
    let errors: Vec<CommError> = errors.into_iter().flatten().collect();
    assert!(errors.iter().all(|error| matches!(error, CommError::PeerLost { .. })), "{errors:?}");
    // Rank 0 sends to the dead rank and rank 2 receives from it. The one that notices first names it; the other one may
    // only see that the first closed its connections.
    assert!(errors.iter().any(|error| error.to_string().contains("rank 1")), "{errors:?}");
}

#[test]
fn abort_from_another_thread_ends_a_blocked_all_reduce() {
    let barrier = Barrier::new(2);
    on_ring(2, false, |mut ring| {
        if ring.rank() == 1 {
            barrier.wait();
            return;
        }
        let pool = Pool::host(Mode::On);
        let handle = ring.abort_handle();
        let _buf = start_all_reduce(&mut ring, &pool, 1000);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                handle.abort();
            });
            assert!(matches!(ring.wait(Wait::All), Err(CommError::Aborted)));
        });
        assert!(matches!(ring.check(), Err(CommError::Aborted)));
        barrier.wait();
    });
}

mod connecting;
