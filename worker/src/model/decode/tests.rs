use xlaunch_engine::{Backend, DType, PoolMode};
use xlaunch_spec::model::{Arch, ModelSection, ModelShape};

use super::buffers::id;
use super::{Decoder, PREFILL_ROWS, Row};
use crate::model::{BackendHandle, Model, Rows, init, layout};

fn shapes() -> Vec<ModelShape> {
    let shape = |arch, kv_heads, tied| {
        let section = ModelSection {
            arch: Some(arch),
            layers: Some(3),
            heads: Some(4),
            kv_heads: Some(kv_heads),
            dim: Some(64),
            ffn: Some(100),
            seq: Some(48),
            vocab: Some(1100),
            tied: Some(tied),
            ..ModelSection::default()
        };
        section.resolve().unwrap()
    };
    let one = shape(Arch::Llama, 1, true);
    let shared = |shared_gate| {
        let sizes = ModelShape { expert_ffn: 40, ..shape(Arch::Qwen3Moe, 2, false) };
        ModelShape { dense_layers: 1, shared_experts: 3, shared_gate, router_bias: shared_gate, ..sizes }
    };
    let mut shapes = vec![shape(Arch::Gpt2, 4, true), shape(Arch::Llama, 2, false), one];
    shapes.extend([shared(false), shared(true)]);
    shapes.extend(Arch::all().skip(2).map(|arch| {
        let shape = shape(arch, 2, !arch.base().head_bias);
        let window = if shape.window == 0 { 0 } else { 7 };
        ModelShape { window, query_scale: 0.3, residual_scale: residual_scale(arch), ..shape }
    }));
    shapes
}

fn residual_scale(arch: Arch) -> f64 {
    if arch == Arch::Granite { 0.5 } else { 1.0 }
}

fn model(shape: &ModelShape) -> Model {
    let backend = BackendHandle::new(Backend::cpu(2, PoolMode::On));
    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let layout = layout::Layout::new(shape);
    let mut weights = init::weights(&layout, 3, &threads);
    // Weights are larger than at the start of training, and biases are not zero, so that logits differ.
    let mut random = crate::random::stream(1, "test");
    for weight in &mut weights {
        #[expect(clippy::cast_possible_truncation, reason = "test data")]
        let noise = (random.uniform() - 0.5) as f32;
        *weight = 3.0 * *weight + 0.1 * noise;
    }
    Model::new(&backend, shape, &weights).unwrap()
}

/// Returns the logits of the last of these tokens, computed by the forward pass of training.
fn forward(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let rows = Rows::new(1, model.shape.seq);
    let ids = model.backend.alloc(DType::I32, rows.seq).unwrap();
    let mut window: Vec<i32> = tokens.iter().map(|token| id(*token as usize)).collect();
    window.resize(rows.seq, 0);
    model.backend.write_i32(ids.all(), &window).unwrap();
    let output = model.output(rows, ids.all()).unwrap();
    let mut logits = vec![0.0; model.shape.vocab];
    let last = model.logits(&output, tokens.len() - 1..tokens.len()).unwrap();
    model.backend.read_f32(last.slice(0..logits.len()), &mut logits).unwrap();
    logits
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    u32::try_from(best).unwrap()
}

fn ids(decoder: &Decoder<'_>) -> Vec<u32> {
    let mut ids = vec![0.0; decoder.rows];
    decoder.begin_ids().unwrap().wait(&mut ids).unwrap();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ids are small")]
    ids.into_iter().map(|id| id as u32).collect()
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (seed + i * i * 31) % 1100).collect()
}

#[test]
fn cached_steps_equal_forward_over_the_whole_sequence() {
    for shape in shapes() {
        let model = model(&shape);
        let mut tokens = prompt(9, 5);
        let mut decoder = Decoder::new(&model, 1, shape.seq, shape.vocab).unwrap();
        decoder.prefill(&[(0, &tokens)]).unwrap();
        // The scores of experts amplify rounding.
        let tolerance = if shape.experts > 0 { 2e-4 } else { 5e-5 };
        for step in 0..20 {
            let expected = forward(&model, &tokens);
            let mut logits = vec![0.0; shape.vocab];
            decoder.read_logits(0, &mut logits).unwrap();
            let distance = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let largest = expected.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
            assert!(
                distance < tolerance * largest,
                "{:?}, step {step}: {distance:.2e} of {largest}",
                shape.arch
            );
            assert_eq!(ids(&decoder), [argmax(&expected)], "{:?}, step {step}", shape.arch);
            let token = ids(&decoder)[0];
            if step % 2 == 0 {
                decoder.set_rows(&[Row { slot: 0, position: tokens.len(), token }]).unwrap();
            }
            tokens.push(token);
            decoder.step().unwrap();
        }
    }
}

#[test]
fn ragged_batch_equals_single_sequences_bit_for_bit_in_steps() {
    for shape in shapes() {
        let model = model(&shape);
        let prompts = [prompt(3, 1), prompt(40, 2), prompt(1, 3), prompt(17, 4)];
        let generate = |prompts: &[Vec<u32>]| {
            let mut decoder = Decoder::new(&model, prompts.len(), shape.seq, shape.vocab).unwrap();
            let slots: Vec<(usize, &[u32])> =
                prompts.iter().enumerate().map(|(slot, prompt)| (slot, &prompt[..])).collect();
            decoder.prefill(&slots).unwrap();
            let mut generated = vec![ids(&decoder)];
            let row =
                |(slot, token): (usize, &u32)| Row { slot, position: prompts[slot].len(), token: *token };
            let rows: Vec<Row> = generated[0].iter().enumerate().map(row).collect();
            decoder.set_rows(&rows).unwrap();
            for _ in 0..7 {
                decoder.step().unwrap();
                generated.push(ids(&decoder));
            }
            generated
        };
        let together = generate(&prompts);
        for (index, prompt) in prompts.iter().enumerate() {
            let alone: Vec<u32> = generate(std::slice::from_ref(prompt)).concat();
            let batch: Vec<u32> = together.iter().map(|ids| ids[index]).collect();
            assert_eq!(alone, batch, "{:?}, prompt {index}", shape.arch);
        }
    }
}

#[test]
fn logits_of_a_prompt_are_those_after_each_of_its_beginnings() {
    for shape in shapes().into_iter().take(2) {
        let shape = ModelShape { seq: PREFILL_ROWS + 40, ..shape };
        let model = model(&shape);
        let tokens = prompt(PREFILL_ROWS + 7, 3);
        let mut decoder = Decoder::new(&model, 3, shape.seq, shape.vocab).unwrap();
        let mut rows = Vec::new();
        decoder.prefill_with_logits(2, &tokens, &mut |row| rows.push(row.to_vec())).unwrap();
        assert_eq!(rows.len(), tokens.len());
        for len in [1, 2, 30, PREFILL_ROWS, PREFILL_ROWS + 1, tokens.len()] {
            assert_eq!(argmax(&rows[len - 1]), argmax(&forward(&model, &tokens[..len])), "{len} tokens");
        }
        // The prompt is in the cache, and the next token follows it.
        let mut plain = Decoder::new(&model, 3, shape.seq, shape.vocab).unwrap();
        plain.prefill(&[(2, &tokens)]).unwrap();
        for _ in 0..3 {
            assert_eq!(ids(&decoder), ids(&plain));
            let row = Row { slot: 2, position: tokens.len(), token: ids(&plain)[0] };
            for decoder in [&mut decoder, &mut plain] {
                decoder.set_rows(&[row]).unwrap();
                decoder.step().unwrap();
            }
        }
    }
}

#[test]
fn long_prompts_take_several_passes() {
    let shape = ModelShape { seq: 3 * PREFILL_ROWS, ..shapes().remove(1) };
    let model = model(&shape);
    let prompts = [prompt(2 * PREFILL_ROWS, 1), prompt(5, 2)];
    let mut decoder = Decoder::new(&model, 2, shape.seq, shape.vocab).unwrap();
    decoder.prefill(&[(1, &prompts[0]), (0, &prompts[1])]).unwrap();
    let expected: Vec<u32> = prompts.iter().map(|prompt| argmax(&forward(&model, prompt))).collect();
    assert_eq!(ids(&decoder), expected);
}
