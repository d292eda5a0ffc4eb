use std::ops::Range;

use xlaunch_engine::GROUP_CHUNK;
use xlaunch_spec::model::{Arch, ModelShape, PRESETS};

use super::{ALIGN, Group, Layout};

/// Returns all presets and a model of each family.
fn shapes() -> Vec<(String, ModelShape)> {
    let presets = PRESETS.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone()));
    presets.chain(Arch::all().map(|arch| (format!("{arch:?}"), arch.base()))).collect()
}

#[test]
fn parameters_follow_each_other_aligned_and_in_backward_order() {
    for (name, shape) in &shapes() {
        let layout = Layout::new(shape);
        let mut end = 0;
        for param in &layout.params {
            assert!(param.range.start >= end && param.range.start - end < ALIGN, "{name} {}", param.name);
            assert_eq!(param.range.start % ALIGN, 0);
            end = param.range.end;
        }
        assert!(layout.len >= end);
        assert!(layout.blocks.windows(2).all(|pair| pair[0].qkv.weight.start > pair[1].qkv.weight.start));
        assert_eq!(layout.params.last().map(|param| param.name.as_str()), Some("wte.weight"));
    }
}

#[test]
fn presets_have_their_published_sizes() {
    let size = |index: usize| Layout::new(&PRESETS[index].1).parameters();
    // GPT-2 124M has 124,439,808 parameters by the paper's sizes. llama-28m has 28.3M in blocks, and two 50257 x
    // 384 tables. Others: as in the model cards, or the sum over the files.
    assert_eq!(size(2), 124_439_808);
    let of = |name: &str| size(PRESETS.iter().position(|(preset, _)| *preset == name).unwrap());
    for (name, parameters) in [
        ("speedrun-124m", 123_554_304),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
        ("smollm3-3b", 3_075_098_624),
        ("olmo2-1b", 1_484_916_736),
        ("gemma3-1b", 999_885_952),
        ("pythia-160m", 162_322_944),
        ("mixtral-8x7b", 46_702_792_704),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
    ] {
        assert_eq!(of(name), parameters, "{name}");
    }
    assert_eq!(size(1), 12 * (4 * 384 * 384 + 3 * 384 * 1536 + 2 * 384) + 384 + 2 * 50257 * 384);
}

#[test]
fn parts_cover_what_passes_use_and_neighbours_touch() {
    for (name, shape) in &shapes() {
        let layout = Layout::new(shape);
        let (forward, backward) = (layout.forward_parts(), layout.backward_parts());
        assert_eq!((forward.len(), backward.len()), (shape.layers + 2, shape.layers + 1), "{name}");
        let covers = |parts: &[Range<usize>], range: &Range<usize>| {
            parts.iter().any(|part| part.start <= range.start && range.end <= part.end)
        };
        for param in &layout.params {
            assert!(covers(&forward, &param.range), "{name} {}", param.name);
            let kept = covers(&layout.kept(), &param.range);
            assert!(kept || covers(&backward, &param.range), "{name} {}", param.name);
        }
        assert!(
            backward.windows(2).all(|pair| pair[0].end >= pair[1].start && pair[0].start < pair[1].start)
        );
    }
}

#[test]
fn chunks_have_the_groups_of_their_parameters() {
    for layout in [&PRESETS[2].1, &Arch::Mixtral.base(), &Arch::GptOss.base()].map(Layout::new) {
        let groups = layout.groups();
        for param in &layout.params {
            let group = match param.name.as_str() {
                "wte.weight" | "wpe.weight" => Group::Embeddings,
                "head.weight" => Group::Head,
                name if param.shape.len() == 1 || name.ends_with(".bias") => Group::Vectors,
                _ => Group::Matrices,
            };
            let chunks = param.range.start / GROUP_CHUNK..param.range.end.div_ceil(GROUP_CHUNK);
            assert!(groups[chunks].iter().all(|byte| *byte == group as u8), "{}", param.name);
        }
    }
    assert!(Group::ALL.iter().enumerate().all(|(number, group)| *group as usize == number));
}
