//! Compares every CUDA operation with its CPU implementation, on sizes that are not multiples of tiles, warps or
//! vectors.
//!
//! Both get the same inputs, rounded to Bf16 if the GPU computes in Bf16. The measure is the norm of the difference
//! relative to the norm of the CPU's result. Tolerances:
//!
//! - fp32: 2e-6. Both sum in f32 in different orders; over the few hundred terms of these sizes that is some 10
//!   roundings of 6e-8. Exponentials and square roots differ by a few roundings more.
//! - tf32: 2e-3. Factors are rounded to 10 bits of mantissa, by at most 2^-11 = 5e-4 each, twice per multiplication.
//! - bf16: 8e-3. Results are rounded once, to 8 bits: 2^-9 = 2e-3 at most; a backward reads results that forward
//!   rounded.

#![expect(clippy::print_stdout, reason = "measurements are printed")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::cases::cases;
use common::{Ops, Outputs, amplification, distance, random};
use half::bf16;
use xlaunch_engine::testing::{
    ActivationVariant, AttentionVariant, QueryGradients, Tiling, force_attention, force_gelu_variant,
    force_glu_tiling, force_transposed_weight_grads, force_weight_grads_together, require_gpu,
};
use xlaunch_engine::*;

xlaunch_harness::suite! {
    needs require_gpu:
        fp32_matches_cpu,
        tf32_matches_cpu,
        bf16_matches_cpu_with_own_and_fastest_kernels,
        gated_activations_in_gemms_match_cpu,
        all_variants_of_attention_match_cpu,
        gradients_of_two_layers_in_one_kernel_match_cpu,
        all_gelu_variants_agree,
        results_are_bitwise_reproducible_with_and_without_pool;
}

/// `own` selects deterministic variants: this crate's kernels, without cuDNN and without timing.
fn open(precision: Precision, mode: PoolMode, own: bool) -> Backend {
    let log_fallback = std::env::var_os("XLAUNCH_LOG_FALLBACK").is_some();
    let options = CudaOptions { deterministic: own, log_fallback, ..CudaOptions::new(precision, mode) };
    Backend::cuda(0, options).unwrap()
}

fn compare(precision: Precision, grads: DType, own: bool, round: fn(f32) -> f32, tolerance: f64) {
    let cuda = open(precision, PoolMode::On, own);
    let kernels = if own { "own kernels" } else { "fastest kernels" };
    compare_cases(&cuda, grads, kernels, "", round, tolerance);
}

/// Compares the cases with this part in their names.
fn compare_cases(
    cuda: &Backend,
    grads: DType,
    kernels: &str,
    part: &str,
    round: fn(f32) -> f32,
    tolerance: f64,
) {
    let cpu = Backend::cpu(2, PoolMode::On);
    let cpu = Ops { backend: &cpu, grads: DType::F32 };
    let cuda = Ops { backend: cuda, grads };
    let (mut worst, mut failures) = ((0.0, String::new()), Vec::new());
    // FP8 requires bf16.
    let fp8 = cuda.backend.activation_dtype() == DType::Bf16 && cuda.backend.supports_fp8();
    let is_selected = |name: &str| name.contains(part) && (fp8 || !name.contains("fp8"));
    for (name, case) in cases(round).into_iter().filter(|(name, _)| is_selected(name)) {
        for ((output, theirs), (_, ours)) in case(&cuda).iter().zip(&case(&cpu)) {
            let distance = distance(theirs, ours) / amplification(&name);
            if distance > worst.0 {
                worst = (distance, format!("{output} of {name}"));
            }
            if distance > tolerance {
                failures.push(format!("{output} of {name}: {distance:.2e}"));
            }
        }
    }
    let grads = grads.name();
    println!("gradients {grads}, {kernels}: largest difference {:.2e}, {}", worst.0, worst.1);
    assert!(failures.is_empty(), "above {tolerance:.0e}:\n{}", failures.join("\n"));
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

fn fp32_matches_cpu() {
    compare(Precision::Fp32, DType::F32, false, |x| x, 2e-6);
}

fn tf32_matches_cpu() {
    compare(Precision::Tf32, DType::F32, false, |x| x, 2e-3);
    let backend = open(Precision::Tf32, PoolMode::On, true);
    for transposed in [true, false] {
        force_transposed_weight_grads(&backend, Some(transposed));
        compare_cases(&backend, DType::F32, &format!("transposed {transposed}"), "linear ", |x| x, 2e-3);
    }
}

fn bf16_matches_cpu_with_own_and_fastest_kernels() {
    compare(Precision::Bf16, DType::F32, true, to_bf16, 8e-3);
    compare(Precision::Bf16, DType::Bf16, true, to_bf16, 8e-3);
    compare(Precision::Bf16, DType::Bf16, false, to_bf16, 8e-3);
}

/// Other tests see the fastest variant only.
fn gated_activations_in_gemms_match_cpu() {
    let backend = open(Precision::Bf16, PoolMode::On, true);
    for tiling in [Tiling::Halves, Tiling::Turns] {
        force_glu_tiling(&backend, Some(tiling));
        compare_cases(&backend, DType::Bf16, &format!("{tiling:?}"), ", glu to", to_bf16, 8e-3);
    }
}

/// Other tests see the fastest variant, or the deterministic one.
fn all_variants_of_attention_match_cpu() {
    let backend = open(Precision::Bf16, PoolMode::On, true);
    let [sums, separate] = [QueryGradients::Sums, QueryGradients::Separate].map(AttentionVariant::Hopper);
    for variant in [AttentionVariant::Portable, sums, separate] {
        force_attention(&backend, Some(variant));
        compare_cases(&backend, DType::Bf16, &format!("{variant:?}"), "attention Att", to_bf16, 8e-3);
    }
}

/// Other tests see the fastest variant only.
fn gradients_of_two_layers_in_one_kernel_match_cpu() {
    let backend = open(Precision::Bf16, PoolMode::On, true);
    for parts in [1, 3, 7] {
        force_weight_grads_together(&backend, Some(parts));
        let name = format!("{parts} parts");
        compare_cases(&backend, DType::Bf16, &name, "weights of two layers", to_bf16, 8e-3);
    }
}

/// Other tests see the fastest variant only.
fn all_gelu_variants_agree() {
    let backend = open(Precision::Bf16, PoolMode::On, false);
    let ops = Ops { backend: &backend, grads: DType::Bf16 };
    for (rows, inputs, ffn, outputs) in [(67, 40, 48, 24), (130, 72, 1536, 40), (1999, 24, 264, 768)] {
        let s = LinearShape { rows, inputs, outputs: ffn };
        let next = LinearShape { rows, inputs: ffn, outputs };
        let (x, w, bias) = (random(1, rows * inputs), random(2, ffn * inputs), random(3, ffn));
        let (next_w, dy) = (random(4, outputs * ffn), random(5, rows * outputs));
        let run = |variant| {
            force_gelu_variant(&backend, s, next, variant);
            let (f, acc) = (Activation::GeluTanh, Accumulate::Overwrite);
            ops.activation(f, s, &x, &w, Some(&bias), &next_w, &dy, acc)
        };
        let kernel = run(ActivationVariant::Kernel);
        for variant in [ActivationVariant::Epilogue, ActivationVariant::EpilogueWithBiasGrad] {
            for ((name, ours), (_, theirs)) in run(variant).iter().zip(&kernel) {
                let distance = distance(ours, theirs);
                assert!(distance < 8e-3, "{name} of {s:?} by {variant:?}: {distance:.2e}");
            }
        }
    }
}

fn results_are_bitwise_reproducible_with_and_without_pool() {
    let bits = |outputs: Outputs| -> Vec<Vec<u32>> {
        outputs.into_iter().map(|(_, values)| values.into_iter().map(f32::to_bits).collect()).collect()
    };
    for precision in [Precision::Bf16, Precision::Tf32] {
        let (on, off) = (open(precision, PoolMode::On, true), open(precision, PoolMode::Off, true));
        let (on, off) = (Ops { backend: &on, grads: DType::F32 }, Ops { backend: &off, grads: DType::F32 });
        let fp8 = precision == Precision::Bf16 && on.backend.supports_fp8();
        for (name, case) in cases(to_bf16).into_iter().filter(|(name, _)| fp8 || !name.contains("fp8")) {
            let first = bits(case(&on));
            assert_eq!(first, bits(case(&on)), "{precision:?}, {name}, repeated");
            assert_eq!(first, bits(case(&off)), "{precision:?}, {name}, pool off");
        }
    }
}
