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

mod common;

use common::{Ops, cases, distance};
use half::bf16;
use xlaunch_engine::cpu::CpuBackend;
use xlaunch_engine::cuda::CudaBackend;
use xlaunch_engine::{DType, EngineError, PoolMode, Precision};

fn gpu(precision: Precision, mode: PoolMode) -> Option<CudaBackend> {
    match CudaBackend::open(0, precision, mode) {
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

fn compare(precision: Precision, grads: DType, round: fn(f32) -> f32, tolerance: f64) {
    let Some(cuda) = gpu(precision, PoolMode::On) else { return };
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
    println!("{precision:?}, gradients {}: largest difference {:.2e}, {}", grads.name(), worst.0, worst.1);
    assert!(failures.is_empty(), "beyond {tolerance:.0e}:\n{}", failures.join("\n"));
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

#[test]
fn fp32_is_the_cpus_to_rounding() {
    compare(Precision::Fp32, DType::F32, |x| x, 2e-6);
}

#[test]
fn tf32_is_the_cpus_to_its_mantissa() {
    compare(Precision::Tf32, DType::F32, |x| x, 2e-3);
}

#[test]
fn bf16_is_the_cpus_to_its_mantissa_whatever_type_gradients_have() {
    compare(Precision::Bf16, DType::F32, to_bf16, 8e-3);
    compare(Precision::Bf16, DType::Bf16, to_bf16, 8e-3);
}

#[test]
fn the_same_bits_every_time_and_with_the_pool_off() {
    let (Some(on), Some(off)) = (gpu(Precision::Bf16, PoolMode::On), gpu(Precision::Bf16, PoolMode::Off))
    else {
        return;
    };
    let (on, off) = (Ops { backend: &on, grads: DType::F32 }, Ops { backend: &off, grads: DType::F32 });
    let bits = |outputs: common::Outputs| -> Vec<Vec<u32>> {
        outputs.into_iter().map(|(_, values)| values.into_iter().map(f32::to_bits).collect()).collect()
    };
    for (name, case) in cases(to_bf16) {
        let first = bits(case(&on));
        assert_eq!(first, bits(case(&on)), "{name}, again");
        assert_eq!(first, bits(case(&off)), "{name}, pool off");
    }
}
