//! Every CUDA operation against its CPU twin, on sizes that are no multiples of tiles, warps or vectors.
//!
//! Both get the same inputs, rounded to Bf16 where the GPU computes with that. The measure is the norm of the difference
//! relative to the norm of the CPU's result:
//!
//! - fp32: 2e-6. Both sum in f32 in different orders; over the few hundred terms of these sizes that is some 10 roundings
//!   of 6e-8. Exponentials and square roots differ by a few roundings more.
//! - tf32: 2e-3. Factors are rounded to 10 bits of mantissa, 2^-11 = 5e-4 each at most, twice per product.
//! - bf16: 8e-3. Results are rounded once, to 8 bits: 2^-9 = 2e-3 at most; a backward reads results that forward rounded.

#![expect(clippy::print_stdout, reason = "a skipped test says why, a measurement how large it was")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{Ops, cases, distance};
use half::bf16;
use xlaunch_engine::cpu::CpuBackend;
use xlaunch_engine::cuda::{CudaBackend, CudaOptions};
use xlaunch_engine::{AttentionShape, Backend, DType, EngineError, KernelTime, PoolMode, Precision};

/// Without cuDNN if `own` says so, so that every path is tested.
fn gpu(precision: Precision, mode: PoolMode, own: bool) -> Option<CudaBackend> {
    let log_fallback = std::env::var_os("XLAUNCH_LOG_FALLBACK").is_some();
    let options = CudaOptions { deterministic: own, log_fallback, ..CudaOptions::new(precision, mode) };
    match CudaBackend::open(0, options) {
        Ok(backend) => Some(backend),
        Err(EngineError::Library { library, .. }) => {
            println!("skipped: {library} is not installed here");
            None
        }
        Err(EngineError::Device { reason, .. }) => {
            println!("skipped: no GPU here: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn compare(precision: Precision, grads: DType, own: bool, round: fn(f32) -> f32, tolerance: f64) {
    let Some(cuda) = gpu(precision, PoolMode::On, own) else { return };
    let cpu = CpuBackend::new(2, PoolMode::On);
    let cpu = Ops { backend: &cpu, grads: DType::F32 };
    let cuda = Ops { backend: &cuda, grads };
    let (mut worst, mut failures) = ((0.0, String::new()), Vec::new());
    for (name, case) in cases(round) {
        for ((output, theirs), (_, ours)) in case(&cuda).iter().zip(&case(&cpu)) {
            let distance = distance(theirs, ours);
            if distance > worst.0 {
                worst = (distance, format!("{output} of {name}"));
            }
            if distance > tolerance {
                failures.push(format!("{output} of {name}: {distance:.2e}"));
            }
        }
    }
    let kernels = if own { "own kernels" } else { "fastest kernels" };
    let grads = grads.name();
    println!("{precision:?}, gradients {grads}, {kernels}: largest difference {:.2e}, {}", worst.0, worst.1);
    assert!(failures.is_empty(), "beyond {tolerance:.0e}:\n{}", failures.join("\n"));
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

#[test]
fn fp32_is_the_cpus_to_rounding() {
    compare(Precision::Fp32, DType::F32, false, |x| x, 2e-6);
}

#[test]
fn tf32_is_the_cpus_to_its_mantissa() {
    compare(Precision::Tf32, DType::F32, false, |x| x, 2e-3);
}

#[test]
fn bf16_is_the_cpus_to_its_mantissa_whatever_type_gradients_have_and_whosever_kernels_run() {
    compare(Precision::Bf16, DType::F32, true, to_bf16, 8e-3);
    compare(Precision::Bf16, DType::Bf16, true, to_bf16, 8e-3);
    compare(Precision::Bf16, DType::Bf16, false, to_bf16, 8e-3);
}

#[test]
fn the_same_bits_every_time_and_with_the_pool_off() {
    let bits = |outputs: common::Outputs| -> Vec<Vec<u32>> {
        outputs.into_iter().map(|(_, values)| values.into_iter().map(f32::to_bits).collect()).collect()
    };
    for precision in [Precision::Bf16, Precision::Tf32] {
        let (Some(on), Some(off)) = (gpu(precision, PoolMode::On, true), gpu(precision, PoolMode::Off, true))
        else {
            return;
        };
        let (on, off) = (Ops { backend: &on, grads: DType::F32 }, Ops { backend: &off, grads: DType::F32 });
        for (name, case) in cases(to_bf16) {
            let first = bits(case(&on));
            assert_eq!(first, bits(case(&on)), "{precision:?}, {name}, again");
            assert_eq!(first, bits(case(&off)), "{precision:?}, {name}, pool off");
        }
    }
}

/// `XLAUNCH_TIMES=1` prints microseconds of attention by our own kernels and by the fastest, side by side; and of those of
/// strict fp32 and of tf32.
#[test]
fn times_of_attention() {
    if std::env::var_os("XLAUNCH_TIMES").is_none() {
        println!("skipped: XLAUNCH_TIMES=1 asks for it");
        return;
    }
    let open = |precision, own| gpu(precision, PoolMode::On, own);
    let bf16 = (open(Precision::Bf16, true), open(Precision::Bf16, false));
    let float = (open(Precision::Fp32, true), open(Precision::Tf32, true));
    let ((Some(own), Some(fastest)), (Some(fp32), Some(tf32))) = (bf16, float) else { return };
    println!("microseconds: B, H, Hkv, T, D | own forward, backward | fastest forward, backward | by");
    print_times(&own, &fastest);
    println!("microseconds: B, H, Hkv, T, D | fp32 forward, backward | tf32 forward, backward | by");
    print_times(&fp32, &tf32);
}

/// A line for each of some sizes.
fn print_times(first: &CudaBackend, second: &CudaBackend) {
    for (batch, heads, kv_heads, seq, width) in [
        (32, 12, 12, 1024, 64),
        (32, 12, 12, 256, 32),
        (8, 16, 4, 2048, 128),
        (4, 12, 12, 1000, 64),
        (32, 12, 12, 256, 64),
        (32, 12, 12, 512, 64),
    ] {
        let s = AttentionShape { batch, seq, heads, kv_heads, width };
        let ([first_fwd, first_bwd], _) = times(first, s);
        let ([fwd, bwd], by) = times(second, s);
        println!(
            "{batch}, {heads}, {kv_heads}, {seq}, {width} | {first_fwd:.1}, {first_bwd:.1} | {fwd:.1}, {bwd:.1} | {by}"
        );
    }
}

/// Microseconds on the device of forward and of backward, and the kernels' names: the median of rounds, so many calls each
/// that the device always has work waiting.
fn times(backend: &CudaBackend, s: AttentionShape) -> ([f64; 2], String) {
    const ROUNDS: usize = 20;
    const CALLS: usize = 20;
    let rows = s.batch * s.seq;
    let ops = Ops { backend, grads: DType::F32 };
    let (qkv, out) = (ops.random(40, rows * s.qkv_width()), ops.random(41, rows * s.heads * s.width));
    let (dout, dqkv) = (ops.random(42, rows * s.heads * s.width), ops.random(43, rows * s.qkv_width()));
    let lse = backend.alloc(DType::F32, rows * s.heads).unwrap();
    let mut names = Vec::new();
    let mut median = |call: &dyn Fn()| {
        let mut rounds: Vec<f64> = (0..=ROUNDS)
            .map(|round| {
                backend.begin_profile();
                (0..CALLS).for_each(|_| call());
                let times = KernelTime::by_name(&backend.end_profile().unwrap());
                if round == 0 {
                    names.extend(times.iter().map(|time| time.name.clone()));
                }
                times.iter().map(|time| time.seconds).sum::<f64>() * 1e6 / CALLS as f64
            })
            .collect();
        // The first round makes plans and compiles kernels.
        rounds.remove(0);
        rounds.sort_by(f64::total_cmp);
        rounds[ROUNDS / 2]
    };
    let forward = median(&|| backend.attention_fwd(s, qkv.all(), None, out.all(), lse.all()).unwrap());
    let backward = median(&|| {
        backend.attention_bwd(s, qkv.all(), None, out.all(), dout.all(), lse.all(), dqkv.all()).unwrap();
    });
    ([forward, backward], names.join(", "))
}
