//! Warps of 64 threads, as on GPUs of other vendors: shows which kernels work with any warp size.

use std::collections::BTreeSet;
use std::process::{Command, ExitCode, Output};

use xlaunch_engine::Precision::{self, Bf16, Fp32, Tf32};
use xlaunch_engine::testing::{force_transposed_weight_grads, kernel_names};
use xlaunch_harness::long;

use crate::{cast_and_mark, child_cases, cpp_compiler, differences, open};

xlaunch_harness::tests! {
    // No supported GPU has such warps, and kernels are compiled again for them.
    needs cpp_compiler, long: all_but_tensor_core_kernels_run_with_warps_of_64;
}

/// Variable with the precision and parts of the names of the cases that a child runs, separated by `|`.
const CHILD: &str = "KERNELS_WARPS_CHILD";
/// Prefix of the names of the kernels that a child has run.
const RAN: &str = "ran: ";

/// Cases of each kernel that needs no tensor cores, in the precision that runs it.
const ANY_WARP: [(Precision, &str); 3] = [
    (
        Fp32,
        "embed EmbedShape { batch: 3|embed wpe EmbedShape { batch: 3|rows: 67, cols: 100|rows: 130, cols: 384\
         |cols: 1544|linear LinearShape { rows: 67|seq: 37|width: 24, window: 31|reductions 31|checksum 31\
         |Tanh LinearShape { rows: 67|glu 67|rows: 67, vocab: 50|vocab: 59995|adamw 64|gemv LinearShape { rows: 5\
         |capacity: 90|greedy 1|batch: 2, seq: 35|add scaled 31|softcap 31|muon 4800|orthogonalize 9\
         |experts 67|router bias 3|router logits LinearShape { rows: 5",
    ),
    // bf16 has separate kernels only for tensor cores and for conversion.
    (Bf16, "rows: 130, cols: 384|rows: 67, vocab: 50|adamw 64|fp8 LinearShape { rows: 16|softcap 31"),
    // As in the suite, gradients of weights with a transposed operand.
    (Tf32, "linear LinearShape { rows: 67"),
];

/// Cases of the other kernels: attention in tiles and by whole heads, decoding.
const WARP_OF_32: [(Precision, &str); 4] = [
    (Tf32, "seq: 37, heads: 2, kv_heads: 2, width: 24 }, rope"),
    (Bf16, "seq: 70, heads: 2, kv_heads: 1, width: 16 }, rope"),
    (Bf16, "seq: 17, heads: 3, kv_heads: 3, width: 16 }, rope"),
    (Bf16, "gemv LinearShape { rows: 8"),
];

/// Names of the kernels among these that have separate names.
const NAMES: [&str; 6] = [
    "attention_bwd_values",
    "attention_bwd_whole",
    "attention_fwd_whole",
    "gemv_mma_16",
    "gemv_mma_32",
    "gemv_mma_8",
];

/// Runs the cases of a child; `None` in the process of the suite.
#[expect(clippy::print_stdout, reason = "the suite reads the output")]
pub(crate) fn child() -> Option<ExitCode> {
    let (precision, parts) = child_cases(CHILD)?;
    let backend = open(precision);
    force_transposed_weight_grads(&backend, Some(true));
    backend.begin_profile();
    cast_and_mark(&backend);
    let differences = differences(&backend, precision, &parts);
    assert!(differences.is_empty(), "{differences:?}");
    let spans = backend.end_profile().unwrap();
    spans.iter().for_each(|span| println!("{RAN}{}", span.name));
    Some(ExitCode::SUCCESS)
}

fn run(precision: Precision, parts: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("EMULATOR_WARP", "64").env(CHILD, format!("{precision:?} {parts}")).output().unwrap()
}

/// Runs all children at once: most of their time is compilation.
fn run_all(cases: &[(Precision, &str)]) -> Vec<Output> {
    std::thread::scope(|scope| {
        let children: Vec<_> = cases.iter().map(|case| scope.spawn(|| run(case.0, case.1))).collect();
        children.into_iter().map(|child| child.join().unwrap()).collect()
    })
}

fn all_but_tensor_core_kernels_run_with_warps_of_64() {
    let mut ran = BTreeSet::new();
    for output in run_all(&ANY_WARP) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        ran.extend(stdout.lines().filter_map(|line| line.strip_prefix(RAN).map(str::to_owned)));
    }
    let names = [Fp32, Bf16].into_iter().flat_map(kernel_names);
    let others: BTreeSet<_> = names.filter(|name| !ran.contains(*name)).collect();
    assert_eq!(others, NAMES.into());
    for ((_, parts), output) in WARP_OF_32.iter().zip(run_all(&WARP_OF_32)) {
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(report.contains("the instruction is one of warps of 32 threads"), "{parts}: {report}");
    }
}
