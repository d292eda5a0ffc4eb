//! Tests of the names and places of tensors.

use std::collections::BTreeMap;

use xlaunch_spec::model::{Arch, PRESETS};

use super::*;
use crate::huggingface::families::Family;
use crate::huggingface::fixtures;
use crate::model::layout::Param;

fn mapped(shape: &ModelShape) -> Vec<Mapped> {
    tensors(Family::of(shape.arch).names, shape, &Layout::new(shape))
}

/// Small models of all families, and the presets.
fn shapes() -> Vec<(String, ModelShape)> {
    let fixtures = fixtures::all().into_iter().map(|(name, fixture)| (name, fixture.shape()));
    let presets = PRESETS.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone()));
    let wide = ("wide".to_owned(), ModelShape { kv_heads: 2, head_dim: 64, ..PRESETS[0].1.clone() });
    fixtures.chain(presets).chain([wide]).collect()
}

#[test]
fn tensors_hold_every_parameter_once() {
    for (name, preset) in shapes() {
        for tied in [true, false] {
            let shape = ModelShape { tied, head_bias: preset.head_bias && !tied, ..preset.clone() };
            let layout = Layout::new(&shape);
            let mut ranges: Vec<_> = mapped(&shape).into_iter().map(|tensor| tensor.elements).collect();
            ranges.sort_by_key(|range| range.start);
            let mut stored = layout.params.iter().map(Param::stored);
            let mut left = stored.next().unwrap();
            for range in ranges {
                if left.is_empty() {
                    left = stored.next().unwrap();
                }
                assert_eq!(range.start, left.start, "{name}");
                left.start = range.end;
                assert!(left.start <= left.end, "{name}");
            }
            assert!(left.is_empty() && stored.next().is_none(), "{name}");
        }
    }
}

#[test]
fn names_and_shapes_are_those_of_the_library() {
    let fixtures = fixtures::all();
    for arch in Arch::all() {
        assert!(fixtures.values().any(|fixture| fixture.shape().arch == arch), "{arch:?}");
    }
    for (name, fixture) in fixtures {
        let ours: BTreeMap<String, Vec<usize>> = mapped(&fixture.shape())
            .into_iter()
            .filter(|tensor| !(1..9).any(|block| tensor.name.contains(&format!(".{block}."))))
            .map(|tensor| (tensor.name, tensor.shape))
            .collect();
        assert_eq!(ours, fixture.tensors, "{name}");
    }
}

#[test]
fn matrices_of_gpt2_blocks_are_transposed_and_gates_come_before_up_projections() {
    let list = |index: usize| mapped(&ModelShape { layers: 1, ..PRESETS[index].1.clone() });
    // The library stores Conv1D weights transposed, which matters even for square matrices.
    for tensor in list(2) {
        let conv1d = tensor.name.contains(".c_") && tensor.name.ends_with(".weight");
        assert_eq!(tensor.order == Order::Transposed, conv1d, "{}", tensor.name);
    }
    let llama = list(7);
    assert!(llama.iter().all(|tensor| tensor.order == Order::Same));
    let parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
    let starts: Vec<usize> = parts
        .iter()
        .map(|part| llama.iter().find(|tensor| tensor.name.contains(part)).unwrap().elements.start)
        .collect();
    assert!(starts[..3].is_sorted() && starts[3] < starts[4], "{starts:?}");
}

#[test]
fn rotated_elements_of_a_head_are_half_of_it_apart() {
    for (width, pairs) in [(8, 1), (32, 4), (32, 8), (64, 12), (16, 8), (80, 16)] {
        for adjacent in [false, true] {
            let rows: Vec<usize> = (0..width).map(|row| rotated_row(row, width, pairs, adjacent)).collect();
            for pair in 0..pairs {
                // Files pair elements i and i + R, or 2 i and 2 i + 1; the arena i and i + D/2.
                let places = if adjacent { [2 * pair, 2 * pair + 1] } else { [pair, pairs + pair] };
                assert_eq!(places.map(|at| rows[at]), [pair, width / 2 + pair], "{width} {pairs}");
            }
            let mut sorted = rows.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..width).collect::<Vec<_>>(), "{width} {pairs}: {rows:?}");
            assert_eq!(rows.is_sorted(), !adjacent && 2 * pairs == width);
        }
    }
}

#[test]
fn rows_of_heads_are_a_permutation_in_both_directions() {
    let shape =
        ModelShape { heads: 4, kv_heads: 4, head_dim: 16, rope_fraction: 0.5, ..Arch::GptNeoX.base() };
    let names = Family::of(Arch::GptNeoX).names;
    let rows = qkv_rows(names, &shape);
    // The second head's queries follow the values of the first, in which nothing is rotated.
    assert_eq!((rows[16], rows[32], rows[48]), (4 * 16, 8 * 16, 16));
    assert_eq!(rows[32..48], (8 * 16..9 * 16).collect::<Vec<_>>());
    assert_eq!(rows[..16], [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]);
    for (name, shape) in shapes() {
        let by_head = Some(names).filter(|_| shape.heads == shape.kv_heads);
        for names in [Family::of(shape.arch).names].into_iter().chain(by_head) {
            let mut rows = qkv_rows(names, &shape);
            rows.sort_unstable();
            assert_eq!(rows, (0..shape.qkv_width()).collect::<Vec<_>>(), "{name}");
        }
    }
    for (name, fixture) in fixtures::all() {
        for tensor in mapped(&fixture.shape()) {
            #[expect(clippy::cast_precision_loss, reason = "test data")]
            let values: Vec<f32> = (0..tensor.elements.len()).map(|value| value as f32).collect();
            let file = tensor.to_file(&values);
            assert_eq!(tensor.to_arena(&file), values, "{name}: {}", tensor.name);
            let each: Vec<f32> = values.chunks(tensor.unit()).flat_map(|unit| tensor.to_file(unit)).collect();
            assert_eq!(each, file, "{name}: {}", tensor.name);
            assert_eq!(file == values, tensor.order == Order::Same, "{name}: {}", tensor.name);
        }
    }
}

/// Files have `[experts, inputs, outputs]`, in which gate and up projections alternate, or in MXFP4 the transpose.
#[test]
fn matrices_of_gpt_oss_are_those_of_its_files() {
    let shape = fixtures::all()["gpt_oss"].shape();
    let (dim, width) = (shape.dim, shape.expert_width());
    let tensors = mapped(&shape);
    let of = |part: &str| tensors.iter().find(|tensor| tensor.name.ends_with(part)).unwrap();
    let numbered = |tensor: &Mapped| -> Vec<f32> {
        #[expect(clippy::cast_precision_loss, reason = "test data")]
        let values = (0..tensor.elements.len()).map(|value| value as f32).collect();
        values
    };
    let place =
        |expert: usize, row: usize, col: usize, [rows, cols]: [usize; 2]| (expert * rows + row) * cols + col;
    for (part, columns) in [("gate_up_proj", dim), ("down_proj", width)] {
        let tensor = of(&format!("layers.1.mlp.experts.{part}"));
        let (file, rows) = (numbered(tensor), tensor.shape[2]);
        let arena = tensor.to_arena(&file);
        let other = tensor.transposed().unwrap();
        assert_eq!(other.shape, [shape.experts, rows, columns]);
        let as_transposed = other.to_arena(&numbered(&other));
        for (expert, output, input) in [(0, 0, 0), (2, 5, 3), (3, rows - 1, columns - 1), (1, 6, 0)] {
            // The second half of the arena's rows are the up projections, which have odd numbers in files.
            let row = if part == "down_proj" { output } else { output % 2 * width + output / 2 };
            let in_arena = place(expert, row, input, [rows, columns]);
            let in_file = place(expert, input, output, [columns, rows]);
            assert_eq!(arena[in_arena], file[in_file], "{part}");
            assert_eq!(as_transposed[in_arena] as usize, place(expert, output, input, [rows, columns]));
        }
    }
    let bias = of("layers.0.mlp.experts.gate_up_proj_bias");
    let arena = bias.to_arena(&numbered(bias));
    assert_eq!(arena[2 * width + 3] as usize, 2 * width + 6);
    assert_eq!(arena[3 * width + 3] as usize, 2 * width + 7);
}

#[test]
fn further_blocks_are_known_where_a_family_has_them() {
    let fixtures = fixtures::all();
    let derived = |case: &str, name: &str| {
        let shape = fixtures[case].shape();
        is_derived(name, Family::of(shape.arch).names, &shape)
    };
    assert!(derived("glm4_moe", "model.layers.3.eh_proj.weight"));
    assert!(!derived("glm4_moe", "model.layers.2.eh_proj.weight"));
    assert!(!derived("qwen3_moe", "model.layers.2.eh_proj.weight"));
}

#[test]
fn grouped_names_of_experts_hold_the_same_values() {
    for case in ["mixtral", "olmoe", "qwen3_moe", "qwen2_moe", "glm4_moe"] {
        let shape = fixtures::all()[case].shape();
        let (names, layout) = (Family::of(shape.arch).names, Layout::new(&shape));
        let grouped = ["model.layers.0.mlp.experts.gate_up_proj".to_owned()];
        let grouped = tensors(names.found_in(grouped.iter()), &shape, &layout);
        let each = tensors(names.found_in([String::new()].iter()), &shape, &layout);
        assert!(grouped.len() < each.len());
        let others = |tensors: &[Mapped]| -> Vec<Mapped> {
            let expert =
                |tensor: &&Mapped| [".experts.", "gate.weight"].iter().any(|part| tensor.name.contains(part));
            tensors.iter().filter(|tensor| !expert(tensor)).cloned().collect()
        };
        assert_eq!(others(&grouped), others(&each), "{case}");
        let of = |all: &[Mapped], name: &str| {
            all.iter().find(|tensor| tensor.name == name).unwrap().elements.clone()
        };
        let (len, width) = (shape.expert_width() * shape.dim, shape.expert_width());
        let block = "model.layers.1.";
        let [gate_up, down] =
            ["gate_up_proj", "down_proj"].map(|part| of(&grouped, &format!("{block}mlp.experts.{part}")));
        let (folder, parts) = match case {
            "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let [gate, up, down_2] =
            parts.map(|part| of(&each, &format!("{block}{folder}.experts.2.{part}.weight")).start);
        assert_eq!([gate, up], [4, 5].map(|matrix| gate_up.start + matrix * len), "{case}");
        assert_eq!(down_2, down.start + 2 * shape.dim * width, "{case}");
    }
}
