//! Runs every kernel on CPU threads, in the emulator of `tests/kernels`. Results equal those of the CPU back end; no
//! access is out of bounds, misaligned, to unwritten memory, or a data race; and nothing depends on the order in which
//! threads run.
//!
//! The device is opened by `Backend`, so kernels, their arguments and launches are those of a GPU. Every buffer is
//! a separate device allocation. The order of threads differs in each launch.

#![expect(clippy::print_stdout, reason = "measurements are printed")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "kernels/broken.rs"]
mod broken;
mod common;
#[path = "kernels/large.rs"]
mod large;
#[path = "kernels/warps.rs"]
mod warps;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use common::cases::cases;
use common::{Case, Ops, amplification, distance};
use half::bf16;
use xlaunch_engine::testing::{
    AttentionVariant, QueryGradients, Tiling, force_attention, force_glu_tiling, force_portable_experts,
    force_transposed_weight_grads, force_weight_grads_together, kernel_names,
};
use xlaunch_engine::*;
use xlaunch_harness::{Requirement, emulator, is_long};

xlaunch_harness::tests! {
    needs cpp_compiler:
        every_kernel_runs_and_matches_the_cpu,
        gated_activations_in_gemms_match_the_cpu,
        all_variants_of_attention_match_the_cpu,
        gradients_of_two_layers_in_one_kernel_match_the_cpu,
        layers_of_experts_by_wgmma_match_the_cpu,
        symmetric_products_match_the_cpu,
        reads_fill_all_pieces_of_pinned_memory,
        results_do_not_depend_on_the_order_of_threads;
}

/// Sizes that take long here, of kernels that also run with other sizes.
const TOO_LARGE: [&str; 10] = [
    "wpe EmbedShape { batch: 1, seq: 140000",
    "capacity: 600",
    "capacity: 200",
    "seq: 901",
    "rows: 137",
    "rows: 1999",
    "rows: 2100",
    "1999 x",
    "seq: 384",
    "vocab: 128250",
];

/// Cases that differ in TF32: attention and the GEMMs. All others launch the same kernels as FP32.
const TF32_CASES: &str = "attention AttentionShape|linear |GeluTanh LinearShape";

/// FP8 requires bf16, and sorting more rows than a bitmap has does not depend on the type of activations.
const BF16_ONLY: [&str; 2] = ["fp8", "seq: 140000"];

fn main() -> ExitCode {
    // Does not return if the emulator can be built.
    let _ = cpp_compiler();
    if let Some(code) = broken::child().or_else(warps::child).or_else(large::child) {
        return code;
    }
    let mut groups = tests();
    groups.extend(broken::tests());
    groups.extend(warps::tests());
    groups.extend(large::tests());
    let code = xlaunch_harness::run(env!("CARGO_CRATE_NAME"), 1, groups);
    emulator::leave();
    code
}

fn cpp_compiler() -> Requirement {
    emulator::enter(Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn open(precision: Precision) -> Backend {
    let options = CudaOptions { deterministic: true, ..CudaOptions::new(precision, PoolMode::Off) };
    Backend::cuda(0, options).unwrap()
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Returns the precision and parts of names in this environment variable, which a suite sets for its child.
fn child_cases(variable: &str) -> Option<(Precision, String)> {
    let cases = std::env::var(variable).ok()?;
    let (precision, parts) = cases.split_once(' ')?;
    let known = [Precision::Fp32, Precision::Tf32, Precision::Bf16];
    let precision = known.into_iter().find(|known| format!("{known:?}") == precision)?;
    Some((precision, parts.to_owned()))
}

/// Returns the cases that are not too large and whose name has one of these parts, separated by `|`.
fn selected(precision: Precision, parts: &str) -> Vec<Case> {
    let round: fn(f32) -> f32 = if precision == Precision::Bf16 { to_bf16 } else { |x| x };
    let has_part = |name: &str| parts.split('|').any(|part| name.contains(part));
    let is_skipped = |name: &str| {
        let bf16_only = precision != Precision::Bf16 && BF16_ONLY.iter().any(|part| name.contains(part));
        bf16_only || TOO_LARGE.iter().any(|size| name.contains(size))
    };
    let is_selected = |name: &str| has_part(name) && !is_skipped(name);
    let selected: Vec<Case> = cases(round).into_iter().filter(|(name, _)| is_selected(name)).collect();
    assert!(!selected.is_empty(), "no case in {precision:?} has a part of {parts:?} in its name");
    selected
}

/// Returns the outputs that differ by more than the tolerances of the suite `cuda_ops`.
fn differences(cuda: &Backend, precision: Precision, parts: &str) -> Vec<String> {
    differences_of(cuda, precision, gradients(precision), selected(precision, parts))
}

/// Returns the usual type of gradients.
fn gradients(precision: Precision) -> DType {
    if precision == Precision::Bf16 { DType::Bf16 } else { DType::F32 }
}

/// Returns the outputs of these cases that differ if gradients have this type.
fn differences_of(cuda: &Backend, precision: Precision, grads: DType, cases: Vec<Case>) -> Vec<String> {
    let tolerance = match precision {
        Precision::Fp32 => 2e-6,
        Precision::Tf32 => 2e-3,
        Precision::Bf16 => 8e-3,
    };
    let cpu = Backend::cpu(1, PoolMode::On);
    let (cpu, cuda) = (Ops { backend: &cpu, grads: DType::F32 }, Ops { backend: cuda, grads });
    let (mut largest, mut differences) = ((0.0, String::new()), Vec::new());
    for (name, case) in cases {
        let start = Instant::now();
        let outputs = case(&cuda);
        let took = start.elapsed().as_secs_f64();
        println!("{took:7.2} s  {name}");
        for ((output, theirs), (_, ours)) in outputs.iter().zip(&case(&cpu)) {
            let distance = distance(theirs, ours) / amplification(&name);
            if distance > largest.0 {
                largest = (distance, format!("{output} of {name}"));
            }
            if distance.is_nan() || distance > tolerance {
                differences.push(format!("{output} of {name}: {distance:.2e}"));
            }
        }
    }
    println!(
        "{precision:?}, gradients {}: largest difference {:.2e}, {}",
        cuda.grads.name(),
        largest.0,
        largest.1
    );
    differences
}

/// Runs children in two threads: mostly they compile, or run launches with few blocks. Results are in any order.
fn in_two_threads<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < count);
    let run_all = || std::iter::from_fn(take).map(&run).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|_| scope.spawn(run_all));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs kernels that no case runs: casts in both directions, sums, and marks.
fn cast_and_mark(backend: &Backend) {
    let values = [0.0, 1.0, -2.5, 1.0 / 3.0, 1e-40, f32::MAX, f32::NEG_INFINITY];
    let len = values.len();
    let [x, y] = [0, 1].map(|_| backend.alloc(DType::F32, len).unwrap());
    let half = backend.alloc(DType::Bf16, len).unwrap();
    backend.write_f32(x.all(), &values).unwrap();
    backend.run(Cast { x: x.all(), y: half.all() }).unwrap();
    backend.run(Cast { x: half.all(), y: y.all() }).unwrap();
    let mut rounded = vec![0.0; len];
    backend.read_f32(y.all(), &mut rounded).unwrap();
    assert_eq!(rounded, values.map(to_bf16));
    backend.run(AddTo { x: half.all(), y: y.all() }).unwrap();
    backend.run(AddTo { x: x.all(), y: y.all() }).unwrap();
    backend.read_f32(y.all(), &mut rounded).unwrap();
    assert_eq!(rounded, values.map(|value| to_bf16(value) + to_bf16(value) + value));

    let marks = backend.open_marks().unwrap().unwrap();
    let seconds = backend.alloc(DType::F32, 1).unwrap();
    backend.run(Mark::Begin).unwrap();
    backend.run(Mark::End(seconds.all())).unwrap();
    backend.read_f32(seconds.all(), &mut rounded[..1]).unwrap();
    assert_eq!(marks.passed(), 2);
    assert!((0.0..60.0).contains(&rounded[0]), "{} s", rounded[0]);
}

fn every_kernel_runs_and_matches_the_cpu() {
    let run = |precision, parts| {
        let backend = open(precision);
        // Otherwise no case would run these kernels.
        force_transposed_weight_grads(&backend, Some(true));
        force_portable_experts(&backend, true);
        backend.begin_profile();
        cast_and_mark(&backend);
        let cases = without_repeats(precision, selected(precision, parts));
        let differences = differences_of(&backend, precision, gradients(precision), cases);
        let ran = backend.end_profile().unwrap().into_iter().map(|span| span.name);
        (differences, ran.collect::<BTreeSet<String>>())
    };
    // TF32 follows FP32, as it compiles the same kernels except for attention.
    let groups = [vec![(Precision::Bf16, "")], vec![(Precision::Fp32, ""), (Precision::Tf32, TF32_CASES)]];
    let (differences, ran): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let run_all = |group: Vec<_>| group.into_iter().map(|(p, parts)| run(p, parts)).collect::<Vec<_>>();
        let threads = groups.map(|group| scope.spawn(move || run_all(group)));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).unzip()
    });
    let differences = differences.concat();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    let ran: BTreeSet<String> = ran.into_iter().flatten().collect();
    let names = [Precision::Bf16, Precision::Fp32, Precision::Tf32].into_iter().flat_map(kernel_names);
    let missing: BTreeSet<_> = names.filter(|name| !ran.contains(*name)).collect();
    assert!(missing.is_empty(), "no test runs {missing:?}");
}

/// Returns whether a case is in the first of two halves, each of which has cases without and with rotation: they follow
/// each other.
fn is_in_first_half(index: usize) -> bool {
    [0, 3].contains(&(index % 4))
}

/// Cases that are large for the tiles of the kernels for compute capability 9.0. All other kernels have smaller tiles,
/// of which smaller cases of this width have several.
const LARGE_TILES: [&str; 2] =
    ["seq: 300, heads: 4, kv_heads: 2, width: 128", "batch: 2, seq: 128, heads: 4, kv_heads: 1, width: 128"];

/// Leaves out most repetitions among cases of attention, which take most of the time here: with bf16,
/// [`all_variants_of_attention_match_the_cpu`] runs those of [`HOPPER_WIDTHS`]; FP32 and TF32, whose kernels differ in
/// their multiplications alone, share half of the others. Of attention over a cache, half of the cases run with FP32,
/// and all with bf16. With bf16, other tests run all cases of gated activations in GEMMs and of symmetric products.
fn without_repeats(precision: Precision, cases: Vec<Case>) -> Vec<Case> {
    let (mut attention, mut cached) = (0.., 0..);
    let mut is_kept = |name: &str| {
        if name.contains(CACHED_ATTENTION) {
            let is_first = cached.next().is_none_or(is_in_first_half);
            return is_long() || precision != Precision::Fp32 || is_first;
        }
        if is_long() {
            return true;
        }
        if !name.contains(ATTENTION) {
            // The same kernels must run here, too.
            let is_repeated = name.contains(GLU) && !name.contains("Silu")
                || name.contains(ORTHOGONAL) && !name.contains("orthogonalize 9 ");
            // Bf16 sorts as many experts.
            return if precision == Precision::Bf16 { !is_repeated } else { !name.contains("of 300") };
        }
        let index = attention.next().unwrap_or(0);
        let is_first = is_in_first_half(index);
        match precision {
            // The kernels of the narrowest of these widths must run here too.
            Precision::Bf16 if name.contains(HOPPER_WIDTHS[0]) => is_first,
            Precision::Bf16 => !HOPPER_WIDTHS[1..4].iter().any(|width| name.contains(width)),
            _ if LARGE_TILES.iter().any(|size| name.contains(size)) => false,
            // Without and with rotation, as in halves.
            Precision::Fp32 => [0, 5].contains(&(index % 8)),
            Precision::Tf32 => [3, 6].contains(&(index % 8)),
        }
    };
    cases.into_iter().filter(|(name, _)| is_kept(name)).collect()
}

/// Cases of linear layers with gated activations; GPUs of other compute capabilities run the other variant.
const GLU: &str = ", glu to";

fn gated_activations_in_gemms_match_the_cpu() {
    let backend = open(Precision::Bf16);
    for tiling in [Tiling::Halves, Tiling::Turns] {
        force_glu_tiling(&backend, Some(tiling));
        backend.begin_profile();
        let differences = differences(&backend, Precision::Bf16, GLU);
        assert!(differences.is_empty(), "{tiling:?}: {}", differences.join("\n"));
        let ran = backend.end_profile().unwrap().into_iter().filter(|span| span.name == "linear_glu");
        // Forward and backward of all cases, except the one with rows that are not whole vectors, and forward of the
        // one with a bias.
        assert_eq!(ran.count(), 2 * (selected(Precision::Bf16, GLU).len() - 1) - 1, "{tiling:?}");
        // The deepest case takes long.
        same_bits_in_any_order(&backend, "rows: 130, inputs: 72, outputs: 528 }, glu", 4);
        same_bits_in_any_order(&backend, "rows: 300, inputs: 456, outputs: 1040 }, glu", 2);
    }
}

/// Cases of attention.
const ATTENTION: &str = "attention AttentionShape";
const CACHED_ATTENTION: &str = "cached attention";

/// Head widths of the kernels for compute capability 9.0. The last two have nothing that others do not have, and run
/// with `XLAUNCH_TEST_LONG=1`.
const HOPPER_WIDTHS: [&str; 6] =
    ["width: 64", "width: 96", "width: 128", "width: 256", "width: 80", "width: 192"];

fn all_variants_of_attention_match_the_cpu() {
    let backend = open(Precision::Bf16);
    let widths = if is_long() { &HOPPER_WIDTHS[..] } else { &HOPPER_WIDTHS[..4] };
    let cases = selected(Precision::Bf16, ATTENTION).into_iter().map(|(name, _)| name);
    let names: Vec<String> = cases.filter(|name| widths.iter().any(|width| name.contains(width))).collect();
    let is_hopper = |name: &String| !name.contains("softcap") || name.contains("width: 256");
    // The ways to sum gradients of queries differ in nothing else, so each runs half of the cases.
    let [separate_cases, sums_cases] = [true, false].map(|is_first| -> BTreeSet<&String> {
        let is_kept = |index| is_long() || is_in_first_half(index) == is_first;
        names.iter().enumerate().filter(|(index, _)| is_kept(*index)).map(|(_, name)| name).collect()
    });
    // Other GPUs run these kernels, as do FP32 and TF32.
    let portable = separate_cases.iter().copied();
    let portable = portable.filter(|name| is_long() || !name.contains(LARGE_TILES[0])).collect();
    let [sums, separate] = [QueryGradients::Sums, QueryGradients::Separate].map(AttentionVariant::Hopper);
    for (variant, [first, last], names) in [
        (AttentionVariant::Portable, ["attention_bwd_queries", "attention_bwd_keys"], portable),
        (sums, ["attention_bwd_hopper", "attention_bwd_hopper_finish"], sums_cases),
        (separate, ["attention_bwd_hopper", "attention_bwd_hopper_queries"], separate_cases),
    ] {
        force_attention(&backend, Some(variant));
        backend.begin_profile();
        let mut cases = selected(Precision::Bf16, ATTENTION);
        cases.retain(|(name, _)| names.contains(name));
        let is_portable = variant == AttentionVariant::Portable;
        let count = names.iter().filter(|name| is_portable || is_hopper(name)).count();
        let differences = differences_of(&backend, Precision::Bf16, DType::Bf16, cases);
        assert!(differences.is_empty(), "{variant:?}: {}", differences.join("\n"));
        let ran: Vec<String> = backend.end_profile().unwrap().into_iter().map(|span| span.name).collect();
        for name in [first, last] {
            assert_eq!(ran.iter().filter(|ran| *ran == name).count(), count, "{variant:?}: {name}");
        }
    }
    same_bits_in_any_order(&backend, "seq: 65, heads: 2, kv_heads: 1, width: 64 }", 6);
    same_bits_in_any_order(&backend, "seq: 193, heads: 4, kv_heads: 1, width: 128 }", 4);
    same_bits_in_any_order(&backend, "seq: 150, heads: 2, kv_heads: 2, width: 256 }", 4);
}

/// Cases of the gradients of two layers' weights; other GPUs run a GEMM for each layer.
const TWO_LAYERS: &str = "weights of two layers";

fn gradients_of_two_layers_in_one_kernel_match_the_cpu() {
    let backend = open(Precision::Bf16);
    for parts in [1, 3, 7] {
        force_weight_grads_together(&backend, Some(parts));
        backend.begin_profile();
        let differences = differences(&backend, Precision::Bf16, TWO_LAYERS);
        assert!(differences.is_empty(), "{parts} parts: {}", differences.join("\n"));
        let ran = backend.end_profile().unwrap().into_iter().filter(|span| span.name == "weight_grads");
        // All cases except those with rows that are not whole vectors, and those that add.
        assert_eq!(ran.count(), selected(Precision::Bf16, TWO_LAYERS).len() - 2, "{parts} parts");
        same_bits_in_any_order(&backend, "weights of two layers, 1500", 4);
    }
}

/// Cases of layers of experts; other GPUs run the portable kernels.
const EXPERTS: &str = "experts ";

fn layers_of_experts_by_wgmma_match_the_cpu() {
    let backend = open(Precision::Bf16);
    for grads in [DType::Bf16, DType::F32] {
        // The type is that of the gradients of weights alone.
        let cases = selected(Precision::Bf16, EXPERTS).into_iter().enumerate();
        let cases = cases.filter(|(index, _)| is_long() || grads == DType::Bf16 || is_in_first_half(*index));
        let cases: Vec<Case> = cases.map(|(_, case)| case).collect();
        // All cases except the one with rows that are not whole vectors; of some, also the half of a gated layer.
        let count = cases.iter().filter(|(name, _)| !name.contains("experts 33")).count();
        backend.begin_profile();
        let differences = differences_of(&backend, Precision::Bf16, grads, cases);
        assert!(differences.is_empty(), "{grads:?}: {}", differences.join("\n"));
        let ran = backend.end_profile().unwrap().into_iter().filter(|span| span.name == "grouped_hopper");
        let ran = ran.count();
        assert!((6 * count..=7 * count).contains(&ran), "{grads:?}: {ran} of {count} cases");
    }
    same_bits_in_any_order(&backend, "experts 300", 4);
}

/// Cases of matrices that become orthogonal; other GPUs multiply them by the library.
const ORTHOGONAL: &str = "orthogonalize ";

fn symmetric_products_match_the_cpu() {
    let backend = open(Precision::Bf16);
    backend.begin_profile();
    let differences = differences(&backend, Precision::Bf16, ORTHOGONAL);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    let ran = backend.end_profile().unwrap().into_iter().filter(|span| span.name == "symmetric_product");
    // Two products in each of five steps, or six in each of two pairs and two in the remaining step for long matrices.
    // One of these has two batches; one has odd sizes.
    assert_eq!(ran.count(), 2 * 10 + 5 * 14);
    same_bits_in_any_order(&backend, "orthogonalize 328", 4);
}

fn reads_fill_all_pieces_of_pinned_memory() {
    let backend = open(Precision::Fp32);
    // One piece and a part of the next.
    let expected: Vec<f32> = (0..17_000_000_u32).map(|index| (index % 16_777_213) as f32).collect();
    let tensor = backend.alloc(DType::F32, expected.len()).unwrap();
    backend.write_f32(tensor.all(), &expected).unwrap();
    let mut found = backend.host_allocator().alloc(expected.len());
    assert!(format!("{found:?}").ends_with("2 pinned pieces)"), "{found:?}");
    for values in found.pieces(0..expected.len()) {
        backend.read_f32(tensor.slice(values.clone()), &mut found[values]).unwrap();
    }
    assert!(found[..] == expected);
}

fn results_do_not_depend_on_the_order_of_threads() {
    let backend = open(Precision::Bf16);
    let parts = [
        "embed EmbedShape { batch: 3",
        "rows: 67",
        "seq: 37",
        "seq: 70",
        "reductions",
        "adamw 64",
        "orthogonalize 9",
        "checksum 31",
        "batch: 2, seq: 35",
        "add scaled 10007",
        "experts 67",
        "experts 150",
    ];
    for part in parts {
        same_bits_in_any_order(&backend, part, 4);
    }
}

/// Runs cases this many times and compares the bits; 100 times with `XLAUNCH_TEST_LONG=1`.
fn same_bits_in_any_order(backend: &Backend, part: &str, rounds: usize) {
    let rounds = if is_long() { 100 } else { rounds };
    let ops = Ops { backend, grads: DType::Bf16 };
    let bits = |case: &Case| -> Vec<Vec<u32>> {
        let outputs = case.1(&ops).into_iter();
        outputs.map(|(_, values)| values.into_iter().map(f32::to_bits).collect()).collect()
    };
    let cases = selected(Precision::Bf16, part);
    assert!(!cases.is_empty(), "{part}");
    for case in cases {
        let first = bits(&case);
        assert!((1..rounds).all(|_| bits(&case) == first), "{}", case.0);
    }
}
