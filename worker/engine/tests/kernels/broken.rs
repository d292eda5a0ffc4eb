//! Kernels with deliberate mistakes: the suite must find each one, and name the line if a check detects it.

use std::path::Path;
use std::process::{Command, ExitCode};

use xlaunch_engine::Precision::{self, Bf16, Fp32, Tf32};
use xlaunch_engine::testing::{
    AttentionVariant, QueryGradients, Tiling, force_attention, force_glu_tiling, force_portable_experts,
    force_transposed_weight_grads, force_weight_grads_together,
};
use xlaunch_harness::emulator;

use crate::{GLU, child_cases, cpp_compiler, differences, in_two_threads, open};

xlaunch_harness::tests! {
    needs cpp_compiler: broken_kernels_are_found;
}

/// Variable with the precision and a part of the names of the cases that a child runs.
const CHILD: &str = "KERNELS_CHILD";

/// A kernel and one mistake in it.
struct Mistake {
    /// Path of the file to compile, relative to `src/ops`. The mistake may be in one of its headers.
    file: &'static str,
    /// The first occurrence of this text, in the headers and then in the file, is replaced by `by`.
    text: &'static str,
    by: &'static str,
    precision: Precision,
    /// Part of the names of the cases that run the kernel.
    cases: &'static str,
    /// Expected part of the report.
    found: &'static str,
}

const fn mistake(
    file: &'static str,
    text: &'static str,
    by: &'static str,
    precision: Precision,
    cases: &'static str,
    found: &'static str,
) -> Mistake {
    Mistake { file, text, by, precision, cases, found }
}

/// Headers that may contain a mistake, relative to `src/ops`.
const HEADERS: [&str; 8] = [
    "../cuda/headers/prelude.cuh",
    "../cuda/headers/mma_bf16.cuh",
    "../cuda/headers/mma_tf32.cuh",
    "../cuda/headers/hopper_tiles.cuh",
    "attention/qkv.cuh",
    "attention/mma_common.cuh",
    "attention/hopper_bwd.cu",
    "activation/functions.cuh",
];

/// Cases used for several mistakes.
const LAYER: &str = "rows: 130, cols: 384, kind: Layer";
const RMS: &str = "rows: 130, cols: 384, kind: Rms";
const EMBED: &str = "embed EmbedShape { batch: 3, seq: 37";
const ONE_TOKEN: &str = "seq: 1, heads: 1, kv_heads: 1, width: 8 }";
const WIDTH_16: &str = "seq: 70, heads: 2, kv_heads: 1, width: 16 }";
const WIDTH_24: &str = "seq: 37, heads: 2, kv_heads: 2, width: 24 }";
const WIDTH_24_ROPE: &str = "seq: 37, heads: 2, kv_heads: 2, width: 24 }, rope";
/// The last queries of a warp see no key of a tile that its first ones see.
const WINDOW_31: &str = "seq: 200, heads: 2, kv_heads: 1, width: 64, window: 31 }";
/// The window begins and ends within tiles of every size.
const WINDOW_33: &str = "seq: 200, heads: 2, kv_heads: 1, width: 64, window: 33 }";
const CAPPED: &str = "seq: 70, heads: 2, kv_heads: 2, width: 144, scale: 0.25, softcap: 5.0 }";
const WHOLE_HEAD: &str = "seq: 17, heads: 3, kv_heads: 3, width: 16 }";
const LAYERS: &str = "weights of two layers, 1500";
const SYMMETRIC: &str = "orthogonalize 328";
/// Both products are deeper than the ring of tiles.
const LINEAR_GLU: &str = "rows: 300, inputs: 456, outputs: 1040 }, glu to 472";
const WHOLE_HEAD_ROPE: &str = "seq: 17, heads: 3, kv_heads: 3, width: 16 }, rope";

/// Experts with several tiles, and products deeper than the ring of tiles.
const TILES: &str = "experts 300 x 2 of 4";
/// The same case, with the kernels for compute capability 9.0.
const WGMMA_TILES: &str = "experts 300 x 2 of 4 Softmax";
const FP8_TILES: &str = "fp8 Fp8Layer { rows: [40";
const HEADS: &str = "qk norm Head AttentionShape { batch: 2, seq: 35";
/// More heads than groups, in runs, some of which begin in the middle of a row; then rows of more items than threads.
const MANY_HEADS: &str = "qk norm Head AttentionShape { batch: 2, seq: 700, heads: 6, kv_heads: 2, width: 16";
const WIDE_HEADS: &str = "qk norm Full AttentionShape { batch: 1, seq: 5, heads: 40";
const ALL_HEADS: &str = "qk norm Full AttentionShape { batch: 1, seq: 130";

/// Clang splits the vector copies that this misaligns into aligned parts.
const PADDED_WIDTH: &str = "(WIDTH + ROW_PADDING)";

/// Several tiles of keys, and more tiles of queries than multiprocessors; then windows that end within tiles.
const HOPPER_ATTENTION: &str =
    "seq: 193, heads: 4, kv_heads: 1, width: 128 }|seq: 200, heads: 2, kv_heads: 1, width: 64, window: 65 }";

/// Documents of all lengths in several rows, with rotation: they begin in other tiles than the first.
const DOCUMENTS: &str = "batch: 3, seq: 200, heads: 2, kv_heads: 1, width: 64, documents: true }";
/// Short documents with angles that are not those of one rotation, so that positions matter.
const DOCUMENTS_24: &str = "seq: 70, heads: 2, kv_heads: 2, width: 24, documents: true }, rope";
/// The same as `DOCUMENTS` for the kernels for compute capability 9.0.
const HOPPER_96: &str = "kv_heads: 2, width: 96 }";
const HOPPER_WIDE: &str = "seq: 150, heads: 2, kv_heads: 2, width: 256";
const HOPPER_DOCUMENTS: &str = "seq: 200, heads: 2, kv_heads: 1, width: 64, documents: true }";

/// Messages of the checks. The order of two threads determines which of them is reported as the later one.
const RACE: &str = "data race: ";
const SHARED_READ_RACE: &str = "data race: read of shared memory";
const SHARED_WRITE_RACE: &str = "data race: write of shared memory";
const READ_RACE: &str = "data race: read of device memory";
const WRITE_RACE: &str = "data race: write of device memory";
/// A data race, or a read before the first write, depending on the order of threads.
const TOO_EARLY: &str = " of shared memory";
/// A data race with another block, or a write outside of all allocations, depending on the order of blocks.
const ANY_WRITE: &str = ": write of ";
const UNWRITTEN: &str = "read of device memory that nothing has written";
const SHARED_UNWRITTEN: &str = "of shared memory that nothing has written";
const OUTSIDE: &str = "outside of all allocations";
const OUTSIDE_ARRAY: &str = "an index is outside of its array";
const UNALIGNED: &str = "not aligned";
const DIVERGENCE: &str = "divergence";
/// Messages of the checks for tiles that are copied and multiplied asynchronously.
const EARLY_COPY: &str = "write of shared memory that wgmma";
const EARLY_WGMMA: &str = "wgmma reads shared memory that nothing has written";
const EARLY_USE: &str = "read of registers of a wgmma that was not waited for";
const UNFENCED: &str = "without fence_async and a barrier in between";
const ARRIVALS: &str = "too many arrivals at a barrier";
const STUCK: &str = "waits for a barrier that never completes";
/// A result that differs from the CPU's.
const DIFFERS: &str = "differs: ";

// One line each if they fit, as a table.
#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    // Missing barriers.
    mistake(
        "norm/kernel.cu", "[i][warp] = x[i];\n    }\n    __syncthreads();",
        "[i][warp] = x[i];\n    }", Fp32, RMS, SHARED_READ_RACE,
    ),
    mistake("norm/kernel.cu", "+ threadIdx.x;\n    __syncthreads();", "+ threadIdx.x;", Fp32, LAYER, TOO_EARLY),
    mistake(
        "checksum/kernel.cu", "total = 0;\n    __syncthreads();", "total = 0;", Fp32, "checksum 31", SHARED_UNWRITTEN,
    ),
    mistake(
        "checksum/kernel.cu", "atomicAdd(&total, sum);\n    __syncthreads();",
        "atomicAdd(&total, sum);", Fp32, "checksum 31", RACE,
    ),
    mistake(
        "cached_attention/kernel.cu", "        }\n        __syncthreads();", "        }", Fp32, "capacity: 90", RACE,
    ),
    mistake(
        "gemv/kernel.cu", "[3];\n    }\n    __syncthreads();", "[3];\n    }", Bf16, "rows: 8, inputs: 352", TOO_EARLY,
    ),
    mistake("attention/kernel.cu", "= s[i][j];\n    __syncwarp();", "= s[i][j];", Fp32, ONE_TOKEN, TOO_EARLY),
    mistake("attention/mma_tiled.cu", "(b);\n    __syncthreads();", "(b);", Tf32, WIDTH_16, TOO_EARLY),
    mistake(
        "attention/mma_tiled.cu", "(int)window);\n        __syncthreads();\n    }\n    float ones",
        "(int)window);\n    }\n    float ones", Tf32, WIDTH_16, TOO_EARLY,
    ),
    mistake(
        "attention/mma_whole_head.cu", "rotate(k, seq);\n    }\n    __syncthreads();",
        "rotate(k, seq);\n    }\n", Bf16, WHOLE_HEAD_ROPE, SHARED_READ_RACE,
    ),
    mistake(
        "fp8/kernel.cu", "    __syncthreads();\n    for (int i", "    for (int i", Bf16, "fp8", TOO_EARLY,
    ),
    mistake(
        "linear/transpose.cu", "col + j];\n    __syncthreads();", "col + j];", Tf32, "linear LinearShape { rows: 67",
        TOO_EARLY,
    ),
    mistake(
        "qk_norm/kernel.cu", "[i][warp] = x[i];\n    }\n    __syncthreads();",
        "[i][warp] = x[i];\n    }", Fp32, ALL_HEADS, TOO_EARLY,
    ),
    mistake("attention/sinks.cu", "overwrites it.\n    __syncwarp();", "\n", Fp32, "sinks of", RACE),
    // A barrier that only some threads reach.
    mistake(
        "classifier/kernel.cu", "    float row_max = block_max(softmax.max);",
        "    float row_max = 0.0f;\n    if (first < padded) row_max = block_max(softmax.max);",
        Fp32, "rows: 67, vocab: 50", DIVERGENCE,
    ),
    // Copies that are still in progress, and results that other blocks may not see yet.
    mistake(
        "attention/mma_tiled.cu", "wait_copies<LATER>", "wait_copies<LATER + 1>", Tf32, WIDTH_16, SHARED_UNWRITTEN,
    ),
    mistake(
        "qk_norm/kernel.cu", "wait_copies<ITEMS - 1>", "wait_copies<ITEMS>", Fp32, ALL_HEADS, SHARED_UNWRITTEN,
    ),
    mistake(
        "cached_attention/kernel.cu", "__threadfence();\n    __syncthreads();",
        "__syncthreads();", Fp32, "capacity: 90", READ_RACE,
    ),
    // Tiles that are read or overwritten too early, and barriers that are used incorrectly.
    mistake("glu/hopper.cu", "barrier_wait(&s.empty[stage], at", "(at", Bf16, LINEAR_GLU, ARRIVALS),
    mistake("glu/hopper.cu", "at / STAGES % 2 ^ 1", "at / STAGES % 2", Bf16, LINEAR_GLU, STUCK),
    mistake(
        "glu/hopper.cu", "barrier_wait(&s.full[stage], at", "(at", Bf16, LINEAR_GLU, EARLY_WGMMA,
    ),
    mistake("glu/hopper.cu", "wgmma_wait<1>();", "wgmma_wait<2>();", Bf16, LINEAR_GLU, EARLY_COPY),
    mistake("glu/hopper.cu", "        wgmma_wait<0>();\n", "", Bf16, LINEAR_GLU, EARLY_USE),
    mistake(
        "glu/hopper.cu", "sizeof s.a[0] + sizeof s.b[0]", "sizeof s.a[0]", Bf16, LINEAR_GLU, ".cu:",
    ),
    mistake(
        "glu/hopper.cu", "barrier_wait(&s.h_full[warp][slot], used", "(used", Bf16, LINEAR_GLU, SHARED_UNWRITTEN,
    ),
    mistake("glu/hopper.cu", "__syncwarp();\n                fetch_h", "fetch_h", Bf16, LINEAR_GLU, RACE),
    mistake(
        "glu/hopper.cu", "if (TURNS) barrier_wait(&s.turn[group], turn);", "", Bf16, LINEAR_GLU, ".cu:",
    ),
    mistake(
        "glu/hopper.cu", "if (TURNS && lane == 0) barrier", "if (TURNS) barrier", Bf16, LINEAR_GLU, ARRIVALS,
    ),
    mistake("glu/hopper.cu", "n / 8 + j ^ lane / 4", "n / 8 + j", Bf16, LINEAR_GLU, DIFFERS),
    mistake("glu/hopper.cu", "if (col >= cols) return;", "", Bf16, LINEAR_GLU, ANY_WRITE),
    mistake("linear/weight_grads.cu", "barrier_wait(&s.empty[stage], i", "(i", Bf16, LAYERS, ARRIVALS),
    mistake("linear/weight_grads.cu", "    }\n    wgmma_wait<0>();\n", "    }\n", Bf16, LAYERS, EARLY_USE),
    mistake("linear/weight_grads.cu", "__threadfence();\n    __syncwarp();", "__syncwarp();", Bf16, LAYERS, READ_RACE),
    mistake("linear/weight_grads.cu", "part < parts; part++", "part < parts - 1; part++", Bf16, LAYERS, DIFFERS),
    mistake("linear/weight_grads.cu", "= sums(part);", "= sums(0);", Bf16, LAYERS, DIFFERS),
    mistake("attention/hopper_fwd.cu", "wgmma_wait<1>();", "wgmma_wait<2>();", Bf16, HOPPER_ATTENTION, EARLY_USE),
    mistake("attention/hopper_fwd.cu", "        release(&s.q_empty);\n", "", Bf16, HOPPER_ATTENTION, STUCK),
    mistake(
        "attention/hopper_fwd.cu", "            pass_turn(group);\n            wgmma_wait", "            wgmma_wait",
        Bf16, HOPPER_ATTENTION, STUCK,
    ),
    mistake("attention/hopper_bwd_narrow.cu", "        fence_async();\n", "", Bf16, HOPPER_ATTENTION, UNFENCED),
    mistake(
        "attention/hopper_bwd_narrow.cu", "        group_wait<256>(1);\n", "", Bf16, HOPPER_ATTENTION,
        "wgmma reads shared",
    ),
    mistake(
        "attention/hopper_bwd_narrow.cu", "(chunk ^ lane / 4) * 16", "chunk * 16", Bf16, HOPPER_ATTENTION, DIFFERS,
    ),
    mistake("attention/hopper_fwd.cu", "query - window + 1", "query - window + 2", Bf16, HOPPER_ATTENTION, DIFFERS),
    mistake("attention/hopper_fwd.cu", "if (j * KEYS < edge)", "if (false)", Bf16, HOPPER_ATTENTION, DIFFERS),
    mistake(
        "attention/hopper_bwd_narrow.cu", "min(key + window,", "min(key + window + 1,", Bf16, HOPPER_ATTENTION, DIFFERS,
    ),
    mistake("attention/hopper_bwd_narrow.cu", "|| query + QUERIES - 1 > edge", "", Bf16, HOPPER_ATTENTION, DIFFERS),
    mistake("attention/hopper_bwd_wide.cu", "        fence_async();\n", "", Bf16, HOPPER_WIDE, UNFENCED),
    mistake(
        "attention/hopper_bwd_wide.cu", "group_wait<256>(P_WRITTEN)", "group_arrive<256>(P_WRITTEN)", Bf16, HOPPER_WIDE,
        TOO_EARLY,
    ),
    mistake("attention/hopper_bwd_wide.cu", "+ group >= SLICES", "+ group >= 2", Bf16, HOPPER_WIDE, DIFFERS),
    mistake(
        "attention/hopper_bwd_rows.cu", "&& col < WIDTH", "", Bf16, HOPPER_96,
        "read of 16 bytes outside of all allocations",
    ),
    mistake(
        "attention/hopper_bwd_queries.cu", "query - window + 1", "query - window", Bf16, HOPPER_ATTENTION, DIFFERS,
    ),
    mistake(
        "attention/hopper_bwd_queries.cu", "        wgmma_wait<0>();\n        wgmma_results(dq);\n", "", Bf16,
        HOPPER_ATTENTION, "a register of the left operand is written",
    ),
    // Several threads write to the same place.
    mistake("norm/kernel.cu", "    buffer ^= 1;\n", "", Fp32, LAYER, SHARED_WRITE_RACE),
    mistake("qk_norm/kernel.cu", "    buffer ^= 1;\n", "", Fp32, ALL_HEADS, SHARED_WRITE_RACE),
    mistake(
        "cached_attention/kernel.cu", "if (threadIdx.x % WARP >= LANES) continue;",
        "", Fp32, "capacity: 90", SHARED_WRITE_RACE,
    ),
    mistake(
        "attention/mma_whole_head.cu", "if (c == 0) head_delta", "head_delta", Bf16, WHOLE_HEAD, SHARED_WRITE_RACE,
    ),
    mistake("muon/kernel.cu", "piece.packed - from", "piece.packed", Fp32, "muon 10065", DIFFERS),
    mistake("muon/kernel.cu", "&& place + len <= held", "", Fp32, "muon 10065", DIFFERS),
    mistake("muon/kernel.cu", "x += blockIdx.y * len;", "", Fp32, "orthogonalize 9", DIFFERS),
    mistake("muon/kernel.cu", "end += piece.cols;", "", Fp32, "muon 4800", DIFFERS),
    mistake("muon/kernel.cu", "if (applied) v[", "v[", Fp32, "muon 4800", DIFFERS),
    mistake("muon/kernel.cu", "sqrtf(before / after)", "before / after", Fp32, "muon 4800", DIFFERS),
    mistake("muon/kernel.cu", "(i + j) / n == (i + j) % n", "i / n == i % n", Fp32, "orthogonalize 24", DIFFERS),
    mistake("muon/kernel.cu", "margin * sqrtf", "sqrtf", Fp32, "orthogonalize 24", DIFFERS),
    mistake("muon/symmetric.cu", "e[3], on - 8", "e[3], on", Bf16, SYMMETRIC, DIFFERS),
    mistake(
        "muon/symmetric.cu", "first / BLOCK < row / BLOCK", "first / BLOCK + 9 < row / BLOCK", Bf16, SYMMETRIC,
        WRITE_RACE,
    ),
    mistake("muon/symmetric.cu", "? x >> 16 |", "? y >> 16 |", Bf16, SYMMETRIC, DIFFERS),
    mistake("muon/symmetric.cu", "offset = tile.matrix", "offset = 0", Bf16, SYMMETRIC, RACE),
    mistake("muon/kernel.cu", "(factor * u.x[j]", "(u.x[j]", Fp32, "muon 4800", DIFFERS),
    mistake("muon/kernel.cu", "!cautious || ", "", Fp32, "muon 10065", DIFFERS),
    mistake(
        "muon/kernel.cu", "sqrtf(grad_norm_sq[0]);\n    float clip", "1.0f;\n    float clip", Fp32, "muon 4800",
        DIFFERS,
    ),
    mistake(
        "cast/kernel.cu", "blockIdx.x, gridDim.x)", "blockIdx.x, 1)", Bf16, "glu 67 x 44 Silu", WRITE_RACE,
    ),
    // Wrong bounds, and offsets that exceed them.
    mistake("glu/kernel.cu", "first + i >= rows", "first + i > rows", Fp32, "glu 67 x 44 Silu", UNWRITTEN),
    mistake("glu/kernel.cu", "largest = largest_magnitude(largest, y);", "", Bf16, "glu 67 x 44 Silu", DIFFERS),
    mistake("greedy/kernel.cu", "i < vocab", "i <= vocab", Fp32, "greedy 1 x 5", UNWRITTEN),
    mistake("adamw/kernel.cu", "groups[i / GROUP_CHUNK]", "groups[i / GROUP_CHUNK + 1]", Fp32, "adamw 64", UNWRITTEN),
    mistake("embed/kernel.cu", "i > 0 && i <= count", "i <= count", Fp32, EMBED, OUTSIDE_ARRAY),
    mistake(
        "reduce/kernel.cu", "if (first + i * step < end) dys", "dys", Fp32, "linear LinearShape { rows: 67", OUTSIDE,
    ),
    mistake(
        "attention/mma_tiled.cu", "if (row >= seq) continue", "if (row > seq) continue", Tf32, WIDTH_24, ANY_WRITE,
    ),
    mistake("attention/kernel.cu", "kv_heads + kv(head)", "kv_heads + head", Fp32, WIDTH_16, OUTSIDE),
    mistake("qk_norm/kernel.cu", "head < order.count && pair", "head <= order.count && pair", Fp32, HEADS, UNWRITTEN),
    mistake("qk_norm/kernel.cu", "(run << run_bits)", "(run << 2 * run_bits)", Fp32, MANY_HEADS, DIFFERS),
    mistake("qk_norm/kernel.cu", "if (normed && row != angles_row)", "if (i == 0)", Fp32, MANY_HEADS, DIFFERS),
    mistake("add_scaled/kernel.cu", "if (first + k * step >= len) break;", "", Fp32, "add scaled 8", OUTSIDE),
    mistake(
        "softcap/kernel.cu", "if (first + k * step < len) xs", "xs", Fp32, "softcap 8", OUTSIDE,
    ),
    // Shared memory that nothing has written.
    mistake("embed/kernel.cu", "if (threadIdx.x == 0) frequent_count = 0;", "", Fp32, EMBED, SHARED_UNWRITTEN),
    mistake(
        "reduce/kernel.cu", "lane < warps ? partial[lane] : 0.0f",
        "partial[lane]", Fp32, "reductions 31", SHARED_UNWRITTEN,
    ),
    // Vectors at unaligned addresses.
    mistake("rope/kernel.cu", "half % 8 == 0 && is_wide", "is_wide", Bf16, WIDTH_24_ROPE, UNALIGNED),
    mistake("attention/kernel.cu", PADDED_WIDTH, "(WIDTH + 3)", Fp32, ONE_TOKEN, UNALIGNED),
    mistake("qk_norm/kernel.cu", "if (s.is_wide(qkv, dqkv,", "if (1 || s.is_wide(qkv, dqkv,", Bf16, HEADS, UNALIGNED),
    mistake(
        "add_scaled/kernel.cu", "is_wide(x, len) && is_wide(y, len) && is_wide(out, len)",
        "true", Fp32, "add scaled 31", UNWRITTEN,
    ),
    // Wrong lanes, operands and factors.
    mistake(
        "attention/mma_tiled.cu", "x + __shfl_xor_sync(FULL_WARP, x, 2)",
        "x + __shfl_xor_sync(FULL_WARP, x, 4)", Tf32, WIDTH_24, DIFFERS,
    ),
    mistake(
        "attention/mma_tiled.cu", "lower.x, x[m][2] = upper.y", "upper.y, x[m][2] = lower.x", Tf32, WIDTH_24, DIFFERS,
    ),
    mistake("attention/mma_whole_head.cu", "2 * k + lane / 16)", "2 * k + lane / 8 % 2)", Bf16, WHOLE_HEAD, DIFFERS),
    mistake("cached_attention/kernel.cu", "if (!valid) continue;", "", Fp32, "capacity: 4 }", DIFFERS),
    mistake(
        "cached_attention/kernel.cu", "if (threadIdx.x == 0) *counter = 0;", "", Fp32, "capacity: 90", DIFFERS,
    ),
    mistake("norm/kernel.cu", "if (other && !sum)", "if (other)", Fp32, LAYER, DIFFERS),
    mistake("norm/kernel.cu", "* (offset + gs.x[j]) +", "* gs.x[j] +", Fp32, LAYER, DIFFERS),
    mistake("qk_norm/kernel.cu", "angles, -1.0f", "angles, 1.0f", Fp32, HEADS, DIFFERS),
    mistake("qk_norm/kernel.cu", "item.head - heads", "item.head - heads + 1", Fp32, ALL_HEADS, OUTSIDE),
    mistake("qk_norm/kernel.cu", "if (row != blockIdx.x) dgamma", "if (false) dgamma", Fp32, WIDE_HEADS, DIFFERS),
    mistake(
        "classifier/kernel.cu", "return 1.0f - t * t;", "return 1.0f;", Fp32, "rows: 67, vocab: 50, padded: 50 }, cap",
        DIFFERS,
    ),
    // Windows and caps of the scores.
    mistake("attention/kernel.cu", "query - window + 1", "query - window + 64", Fp32, WINDOW_33, DIFFERS),
    mistake(
        "attention/mma_tiled.cu", "first_key(first, window", "first_key(first + 64, window", Bf16, WINDOW_33, DIFFERS,
    ),
    mistake(
        "attention/mma_tiled.cu", "< seq ? key_end - 1 + window", "< seq ? key_end - 33 + window", Bf16, WINDOW_33,
        DIFFERS,
    ),
    mistake(
        "attention/mma_tiled.cu", "(u32)(query - key) < (u32)window", "(u32)(query - key) <= (u32)window", Bf16,
        WINDOW_33, DIFFERS,
    ),
    mistake(
        "attention/mma_tiled.cu", "WINDOWED && offset + 16 * M > window", "WINDOWED && offset > window", Tf32,
        WINDOW_33, DIFFERS,
    ),
    mistake("attention/mma_tiled.cu", "8 * N - 1 - offset >= window", "-offset >= window", Tf32, WINDOW_33, DIFFERS),
    mistake(
        "attention/mma_tiled.cu", "(WINDOWED || DOCUMENTS) && new_max == NEG_INF ? 0.0f : new_max", "new_max", Bf16,
        WINDOW_31, DIFFERS,
    ),
    mistake("attention/kernel.cu", "1.0f - tanh * tanh", "1.0f", Fp32, CAPPED, DIFFERS),
    mistake("attention/mma_tiled.cu", "1.0f - tanh * tanh", "1.0f", Tf32, CAPPED, DIFFERS),
    mistake("cached_attention/kernel.cu", "max(first, low)", "first", Fp32, "softcap: 2.0", DIFFERS),
    mistake(
        "cached_attention/kernel.cu", "position / split - begin + 1", "position / split + 1", Fp32, "softcap: 2.0",
        OUTSIDE,
    ),
    mistake("cached_attention/kernel.cu", "softcap * tanh_for", "tanh_for", Fp32, "softcap: 2.0", DIFFERS),
    // Documents in rows, and rows without a target.
    mistake("attention/kernel.cu", "&& column >= row_first[i]", "", Fp32, DOCUMENTS_24, DIFFERS),
    mistake("attention/kernel.cu", "&& column <= row_last[i]", "", Fp32, DOCUMENTS_24, DIFFERS),
    mistake(
        "attention/kernel.cu", "? bound_of(first_keys, query, seq)", "? bound_of(first_keys, query, seq) + 64", Fp32,
        DOCUMENTS, DIFFERS,
    ),
    mistake("attention/kernel.cu", "key_end - 1, seq) + 1", "key_end - 1, seq) - 63", Fp32, DOCUMENTS, DIFFERS),
    mistake("attention/kernel.cu", "(WINDOWED || DOCUMENTS) && top", "WINDOWED && top", Fp32, DOCUMENTS, DIFFERS),
    mistake("attention/mma_tiled.cu", "|| key < first_key)", ")", Bf16, DOCUMENTS, DIFFERS),
    mistake("attention/mma_tiled.cu", "&& key >= first_key", "", Tf32, DOCUMENTS, DIFFERS),
    mistake("attention/mma_tiled.cu", "&& query <= last_query[m][i / 2]", "", Bf16, DOCUMENTS, DIFFERS),
    mistake("attention/mma_tiled.cu", "first_keys.last + offset > 0", "false", Bf16, DOCUMENTS, DIFFERS),
    mistake(
        "attention/mma_tiled.cu", "first_keys.first + offset >= 8 * N", "first_keys.last + offset >= 8 * N", Bf16,
        DOCUMENTS, DIFFERS,
    ),
    mistake("attention/mma_tiled.cu", "last_queries.first + offset < 8 * N - 1", "false", Bf16, DOCUMENTS, DIFFERS),
    mistake(
        "attention/mma_tiled.cu", "last_queries.last + offset < 0", "last_queries.first + offset < 0", Bf16, DOCUMENTS,
        DIFFERS,
    ),
    mistake("attention/mma_tiled.cu", "i < count ? i : count - 1", "i", Bf16, DOCUMENTS, UNWRITTEN),
    mistake(
        "attention/mma_tiled.cu", "(WINDOWED || DOCUMENTS) && new_max", "WINDOWED && new_max", Tf32, DOCUMENTS, DIFFERS,
    ),
    mistake(
        "attention/hopper_fwd.cu", "first_keys[(i64)batch * seq + query]", "first_keys[query]", Bf16, HOPPER_DOCUMENTS,
        DIFFERS,
    ),
    mistake(
        "attention/hopper_bwd_narrow.cu",
        "last_queries[(i64)batch * seq + key] + 1",
        "last_queries[(i64)batch * seq + key]",
        Bf16, HOPPER_DOCUMENTS, DIFFERS,
    ),
    mistake(
        "attention/hopper_bwd_queries.cu", "first_keys ? first_keys", "false ? first_keys", Bf16, HOPPER_DOCUMENTS,
        DIFFERS,
    ),
    mistake("rope/kernel.cu", "if (first) position -= first[row];", "", Fp32, DOCUMENTS_24, DIFFERS),
    mistake(
        "qk_norm/kernel.cu", "position -= first_tokens[row]", "position -= 0", Fp32, "qk norm of documents", DIFFERS,
    ),
    mistake("embed/kernel.cu", "- (first ? first[row] : 0)", "", Fp32, "embed documents", DIFFERS),
    mistake("embed/kernel.cu", "if (start + t <= end) {", "if (start + t < end) {", Fp32, "embed documents", DIFFERS),
    mistake("classifier/kernel.cu", "if (target < 0) return", "if (false) return", Fp32, "ignored rows", ".cu"),
    mistake(
        "classifier/kernel.cu", "with_grad && i < padded", "with_grad && i < padded - 8", Fp32, "ignored rows", DIFFERS,
    ),
    mistake("classifier/kernel.cu", "weight ? *weight : 1.0f", "1.0f", Fp32, "preference of", DIFFERS),
    mistake("preference/kernel.cu", "t < middle ? token : -token", "token", Fp32, "preference of", DIFFERS),
    mistake("preference/kernel.cu", "fmaxf(-margin, 0.0f)", "0.0f", Fp32, "preference of [20, 20]", DIFFERS),
    mistake("preference/kernel.cu", "is_pair ? beta", "true ? beta", Fp32, "preference of", DIFFERS),
    mistake("reduce/kernel.cu", "memory ? *memory : constant", "constant", Fp32, "reductions 31", DIFFERS),
    // Routing, and rows of experts.
    mistake("experts/route.cu", "z == best && e < at", "z == best && e > at", Fp32, "of 40 Softmax Tied", DIFFERS),
    mistake("experts/route.cu", "taken |= 1u << e / WARP", "taken |= 0u", Fp32, "67 x 2 of 8", DIFFERS),
    mistake("experts/route.cu", "score(logits.z[i], sigmoid) + bias[e]", "z[i]", Fp32, "of 40 Sigmoid Biased", DIFFERS),
    mistake("experts/route.cu", "weight) * scale;", "weight);", Fp32, "of 40 Sigmoid Biased", DIFFERS),
    mistake("experts/bias.cu", "missing < 0.0", "missing <= 0.0", Fp32, "router bias 3 x 5", DIFFERS),
    mistake(
        "experts/bias.cu", "|| !is_applied(grad_norm_sq, loss, skipped, skip_limit)", "", Fp32, "loss inf", DIFFERS,
    ),
    mistake("experts/route.cu", "(gradient[i] - mean)", "gradient[i]", Fp32, "67 x 2 of 8", DIFFERS),
    mistake("experts/sort.cu", "SORT_CHUNK) in_chunk[e] = 0;", "SORT_CHUNK) ;", Fp32, "67 x 2 of 8", TOO_EARLY),
    mistake(
        "experts/sort.cu", "first, experts), 1);\n    __syncthreads();",
        "first, experts), 1);", Fp32, "67 x 2 of 8", RACE,
    ),
    mistake("experts/sort.cu", "+= places[i] == place", "+= places[i] <= place", Fp32, "67 x 2 of 8", ".cu"),
    mistake("experts/sort.cu", "(unsigned)first) %", "0u) %", Fp32, "67 x 2 of 8", DIFFERS),
    mistake("experts/rows.cu", "if (token >= tokens) return;", "", Fp32, "33 x 3 of 5", ".cu"),
    mistake("experts/rows.cu", "(unsigned)choice / (unsigned)chosen", "choice", Fp32, "67 x 2 of 8", ".cu"),
    mistake("experts/grouped/kernel.cu", "        __syncthreads();\n        copy", "        copy", Bf16, TILES, RACE),
    mistake(
        "experts/grouped/kernel.cu", "wait_copies<GROUP_STAGES - 2>",
        "wait_copies<GROUP_STAGES - 1>", Bf16, TILES, TOO_EARLY,
    ),
    mistake("experts/grouped/kernel.cu", "if (r < group.rows) store", "store", Bf16, TILES, ANY_WRITE),
    mistake(
        "experts/grouped/kernel.cu", "    __syncthreads();\n    return group;",
        "    return group;", Fp32, "67 x 2 of 8", RACE,
    ),
    mistake(
        "experts/grouped/kernel.cu", "col + 16 * n + third, k + second",
        "col + 16 * n + second, k + third", Bf16, TILES, DIFFERS,
    ),
    mistake("experts/grouped/kernel.cu", "start + at * GROUP_TILE, min", "start, min", Fp32, TILES, ".cu"),
    mistake(
        "experts/grouped/kernel.cu", "if (add && col + c < inputs) u",
        "if (false) u", Fp32, "67 x 2 of 8", DIFFERS,
    ),
    mistake("experts/grouped/hopper.cu", "barrier_wait(&s.empty[stage], at", "(at", Bf16, WGMMA_TILES, ARRIVALS),
    mistake("experts/grouped/hopper.cu", "barrier_wait(&s.full[stage], at", "(at", Bf16, WGMMA_TILES, EARLY_WGMMA),
    mistake("experts/grouped/hopper.cu", "    }\n    wgmma_wait<0>();\n", "    }\n", Bf16, WGMMA_TILES, EARLY_USE),
    mistake("experts/grouped/hopper.cu", "    fence_async();\n", "", Bf16, WGMMA_TILES, UNFENCED),
    mistake(
        "experts/grouped/hopper.cu", "        clear_products(a, tile.first - k, tile.last - k, group);", ";",
        Bf16, WGMMA_TILES, DIFFERS,
    ),
    mistake("experts/grouped/hopper.cu", "i < first || ", "", Bf16, FP8_TILES, DIFFERS),
    mistake("experts/grouped/hopper.cu", " || i >= last", "", Bf16, FP8_TILES, DIFFERS),
    mistake("experts/grouped/hopper.cu", "begin / 16 * 16", "begin", Bf16, FP8_TILES, "in the middle of 16 bytes"),
    mistake("experts/grouped/hopper.cu", "        wgmma_wait<0>();\n", "", Bf16, FP8_TILES, EARLY_USE),
    mistake("fp8/kernel.cu", "if (row + i < exist) p", "p", Bf16, FP8_TILES, DIFFERS),
    mistake(
        "experts/grouped/hopper.cu", "row, tile.rows, tile.col", "row, 1 << 30, tile.col",
        Bf16, WGMMA_TILES, ANY_WRITE,
    ),
    mistake("experts/layer_bias.cu", "offsets[middle] <= row", "offsets[middle] < row", Fp32, "67 x 2 of 8", DIFFERS),
    // Sinks.
    mistake("attention/sinks.cu", "fmaxf(before, sink)", "before", Fp32, "sinks of", DIFFERS),
    mistake("attention/sinks.cu", "col < width", "true", Fp32, "sinks of AttentionShape { batch: 2, seq: 37", ".cu"),
    mistake(
        "cached_attention/kernel.cu", "sinks, head + g", "sinks, head", Fp32,
        "heads: 4, kv_heads: 1, width: 32, slots: 2", DIFFERS,
    ),
    // Functions and their derivatives.
    mistake(
        "activation/kernel.cu", "3.0f * GELU_CUBE", "2.0f * GELU_CUBE", Fp32, "GeluTanh LinearShape { rows: 67",
        DIFFERS,
    ),
    mistake("activation/kernel.cu", "-0.16916612f", "-0.16816612f", Fp32, "Gelu LinearShape { rows: 67", DIFFERS),
    mistake("activation/kernel.cu", "(2.0f * g)", "(1.0f * g)", Fp32, "Relu2 LinearShape { rows: 67", DIFFERS),
    mistake("glu/kernel.cu", "x * (NORMAL_DENSITY", "(NORMAL_DENSITY", Fp32, "glu 67 x 44 Gelu", DIFFERS),
    mistake(
        "glu/kernel.cu", "u < -limit ? -limit : bounded(u, limit)", "bounded(u, limit)", Fp32,
        "glu 67 x 44 QuickGelu within", DIFFERS,
    ),
    mistake("glu/kernel.cu", "fabsf(y.x[j]) > limit", "y.x[j] > limit", Fp32, "glu 67 x 44 QuickGelu within", DIFFERS),
    mistake(
        "gemv/kernel.cu", "case RELU2: return x * gate<RELU2>", "case RELU2: return x * gate<SILU>", Bf16,
        "rows: 8, inputs: 352, outputs: 128 } Some(Relu2)", DIFFERS,
    ),
];

/// Runs the cases of a child; `None` in the process of the suite.
pub(crate) fn child() -> Option<ExitCode> {
    let (precision, part) = child_cases(CHILD)?;
    let backend = open(precision);
    // Other cases do not depend on a tiling.
    let tilings = [Some(Tiling::Halves), Some(Tiling::Turns)];
    if [HOPPER_ATTENTION, HOPPER_DOCUMENTS, HOPPER_96, HOPPER_WIDE].contains(&part.as_str()) {
        let forms = [QueryGradients::Sums, QueryGradients::Separate].map(AttentionVariant::Hopper);
        for form in forms {
            force_attention(&backend, Some(form));
            let differences = differences(&backend, precision, &part);
            assert!(differences.is_empty(), "{DIFFERS}{}", differences.join(", "));
        }
        return Some(ExitCode::SUCCESS);
    }
    force_attention(&backend, Some(AttentionVariant::Portable));
    force_portable_experts(&backend, part != WGMMA_TILES);
    for tiling in if part.contains(GLU) { &tilings[..] } else { &[None] } {
        force_glu_tiling(&backend, *tiling);
        force_weight_grads_together(&backend, Some(3));
        force_transposed_weight_grads(&backend, Some(true));
        let differences = differences(&backend, precision, &part);
        assert!(differences.is_empty(), "{DIFFERS}{}", differences.join(", "));
    }
    Some(ExitCode::SUCCESS)
}

/// Returns the report of a child; empty if there is none.
fn report(mistake: &Mistake, number: usize) -> String {
    // In the cache, the child would find correct kernels. The emulator keeps those too, and compiles what differs.
    let cache = emulator::cache().unwrap().with_extension(format!("broken-{number}"));
    let folder = mistake.file.rsplit_once('/').unwrap().0;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("XLAUNCH_CACHE", &cache).env(CHILD, format!("{:?} {}", mistake.precision, mistake.cases));
    command.env("EMULATOR_FOLDER", format!("{folder}/"));
    let output =
        command.env("EMULATOR_REPLACE", mistake.text).env("EMULATOR_BY", mistake.by).output().unwrap();
    let _ = std::fs::remove_dir_all(cache);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { String::new() } else { stderr }
}

/// Returns the report of a mistake that was not found as expected.
fn missed(number: usize) -> Option<String> {
    let mistake = &MISTAKES[number];
    if mistake.text == PADDED_WIDTH && emulator::is_clang() {
        return None;
    }
    let report = report(mistake, number);
    let has_line = mistake.found == DIFFERS || report.contains(".cu:") || report.contains(".cuh:");
    let what = || format!("{}: `{}` to `{}`: {report}", mistake.file, mistake.text, mistake.by);
    (!report.contains(mistake.found) || !has_line).then(what)
}

fn broken_kernels_are_found() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    for mistake in MISTAKES {
        let mut files = HEADERS.into_iter().chain([mistake.file]);
        let found =
            files.any(|file| std::fs::read_to_string(sources.join(file)).unwrap().contains(mistake.text));
        assert!(found, "{}: no `{}`", mistake.file, mistake.text);
    }
    // Compiles the kernels that do not depend on a shape, for all children.
    for precision in [Fp32, Tf32, Bf16] {
        drop(open(precision));
    }
    // Every third one finds what the emulator no longer reports, in a third of the minutes.
    let step = if xlaunch_harness::is_long() { 1 } else { 3 };
    let count = MISTAKES.len().div_ceil(step);
    let missed: Vec<String> = in_two_threads(count, |i| missed(i * step)).into_iter().flatten().collect();
    assert!(missed.is_empty(), "{} of {count}:\n{}", missed.len(), missed.join("\n"));
}
