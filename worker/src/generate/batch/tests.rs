//! Batches of a model whose tokens depend on the position alone, and of one with random weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlaunch_data::Tokenizer;
use xlaunch_engine::{Backend, PoolMode};
use xlaunch_spec::model::{Arch, ModelSection, RopeScaling};

use super::*;
use crate::generate::command::generate;
use crate::generate::{FinishReason, Sampling, Token, Update, Vocabulary};
use crate::model::layout::Layout;
use crate::model::{BackendHandle, init};

/// Width of the model; the position after which it ends the document follows.
const DIM: usize = 8;
const END_POSITION: usize = 5;

/// A model whose next token depends on the position alone: `a`, then end of text from [`END_POSITION`] on.
fn model(tokenizer: &Tokenizer) -> Model {
    let section = ModelSection {
        arch: Some(Arch::Gpt2),
        layers: Some(1),
        heads: Some(1),
        dim: Some(DIM),
        ffn: Some(8),
        seq: Some(16),
        vocab: Some(tokenizer.vocab()),
        tied: Some(false),
        ..ModelSection::default()
    };
    let backend = BackendHandle::new(Backend::cpu(1, PoolMode::On));
    let model = Model::zeroed(&backend, &section.resolve().unwrap()).unwrap();
    let (before, after) = ([1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]);
    let write = |at: usize, half: [f32; 4]| model.write_weights(at, &[half, half].concat()).unwrap();
    let positions = model.layout.wpe.clone().unwrap().start;
    for position in 0..16 {
        write(positions + position * DIM, if position < END_POSITION { before } else { after });
    }
    model.write_weights(model.layout.lnf.weight.start, &[1.0; DIM]).unwrap();
    let row = |id: u32| model.layout.head.start + id as usize * DIM;
    write(row(tokenizer.encode("a").unwrap()[0]), before);
    write(row(tokenizer.end_of_text().unwrap()), after);
    model
}

fn settings(tokenizer: Tokenizer) -> Settings {
    Settings::for_test(tokenizer, Vocabulary { size: 50_257, ends: vec![50_256] })
}

fn options(temperature: f64, scores: Option<usize>) -> Options {
    let sampling = Sampling { temperature, top_k: None, top_p: 1.0 };
    Options { max_tokens: 12, sampling, seed: 1, stop: Vec::new(), scores, echo: false }
}

#[test]
fn end_of_text_ends_each_sequence_of_a_batch_at_its_position() {
    let settings = settings(Tokenizer::gpt2());
    let model = model(&settings.tokenizer);
    for temperature in [0.0, 0.01] {
        let options = Arc::new(options(temperature, None));
        let prompts = [vec![1], vec![2, 3, 4], vec![5; END_POSITION + 1]];
        let requests =
            prompts.map(|tokens| Request { tokens: tokens.into(), sample: 0, options: options.clone() });
        let mut texts = vec![String::new(); 3];
        let mut ends = vec![None; 3];
        let mut sink = |request: usize, update: Update<'_>| match update {
            Update::Text(text) => texts[request] += text,
            Update::Finished(completion) => ends[request] = Some((completion.tokens, completion.reason)),
        };
        generate(&model, &settings, &requests, &|| false, &mut sink).unwrap();
        assert_eq!(texts, ["aaaaa", "aaa", ""]);
        assert_eq!(ends, [5, 3, 0].map(|tokens| Some((tokens, FinishReason::EndOfText))));
    }
}

#[test]
fn token_that_ends_a_text_is_scored_without_being_part_of_it() {
    let settings = settings(Tokenizer::gpt2());
    let model = model(&settings.tokenizer);
    let options = Options { echo: true, ..options(0.0, Some(1)) };
    let request = Request { tokens: vec![1, 2, 3].into(), sample: 0, options: Arc::new(options) };
    let mut submit = |batch: &mut Batch<'_>, step: usize| {
        if step == 0 {
            batch.submit(7, request.clone());
        }
    };
    let Reported { scores, text, reason } = run(&model, &settings, &mut submit).remove(&7).unwrap();
    assert_eq!((text.as_str(), reason), ("aaa", Some(FinishReason::EndOfText)));
    let (prompt, generated) = scores.split_at(2);
    assert_eq!(prompt.iter().map(|it| it.token).collect::<Vec<_>>(), [2, 3]);
    let a = settings.tokenizer.encode("a").unwrap()[0];
    assert_eq!(generated.iter().map(|it| it.token).collect::<Vec<_>>(), [a, a, a, 50_256]);
    assert!(generated.iter().all(|it| it.top == [(it.token, it.logprob)]), "{generated:?}");
}

/// A model of random weights, whose tokens depend on all earlier ones.
fn random_model(rope_scaling: RopeScaling) -> Model {
    let section = ModelSection {
        arch: Some(Arch::Llama),
        layers: Some(2),
        heads: Some(4),
        kv_heads: Some(2),
        dim: Some(64),
        ffn: Some(100),
        seq: Some(64),
        vocab: Some(256),
        rope_scaling: Some(rope_scaling),
        ..ModelSection::default()
    };
    let shape = section.resolve().unwrap();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let weights = init::weights(&Layout::new(&shape), 3, &threads);
    let weights: Vec<f32> = weights.into_iter().map(|weight| 4.0 * weight).collect();
    Model::new(&BackendHandle::new(Backend::cpu(2, PoolMode::On)), &shape, &weights).unwrap()
}

/// All that a batch reports about a request.
#[derive(Clone, Debug, Default, PartialEq)]
struct Reported {
    scores: Vec<Scored>,
    text: String,
    reason: Option<FinishReason>,
}

/// Runs a batch of two slots until it is idle; `before` runs before each step.
fn run(
    model: &Model,
    settings: &Settings,
    before: &mut dyn FnMut(&mut Batch<'_>, usize),
) -> BTreeMap<usize, Reported> {
    let mut batch = Batch::new(model, settings, 2, 64, Prefill::Separate).unwrap();
    let mut reported = BTreeMap::<usize, Reported>::new();
    for step in 0.. {
        before(&mut batch, step);
        if batch.is_idle() {
            break;
        }
        let mut sink = |number: usize, output: Output| {
            let reported = reported.entry(number).or_default();
            match output {
                Output::Prompt(scores) => reported.scores.extend(scores),
                Output::Token(Token { text, scored, .. }) => {
                    reported.text += &text;
                    reported.scores.extend(scored);
                }
                Output::Text(text) => reported.text += &text,
                Output::Finished(completion) => reported.reason = Some(completion.reason),
                Output::NotFinite => panic!("logits are not finite"),
            }
        };
        batch.advance(&mut || true, &mut sink).unwrap();
    }
    reported
}

#[test]
fn requests_that_join_and_leave_do_not_change_a_bit_of_others() {
    let settings = Settings::for_test(Tokenizer::bytes(), Vocabulary { size: 256, ends: Vec::new() });
    let model = random_model(RopeScaling::Default);
    let greedy = Options { max_tokens: 20, echo: true, ..options(0.0, Some(3)) };
    let drawn = Options { max_tokens: 9, ..options(1.0, Some(1)) };
    let plain = Options { max_tokens: 14, ..options(0.0, None) };
    let request = |length: u32, options: &Options| Request {
        tokens: (0..length).map(|i| (length + i * i * 31) % 256).collect(),
        sample: 1,
        options: Arc::new(options.clone()),
    };
    let requests = [
        request(40, &greedy),
        request(3, &drawn),
        request(17, &plain),
        request(33, &drawn),
        request(1, &greedy),
        request(5, &Options { max_tokens: 0, ..greedy.clone() }),
    ];
    let alone: Vec<Reported> = requests
        .iter()
        .map(|request| {
            let mut submit = |batch: &mut Batch<'_>, step: usize| {
                if step == 0 {
                    batch.submit(7, request.clone());
                }
            };
            run(&model, &settings, &mut submit).remove(&7).unwrap()
        })
        .collect();
    assert_eq!(alone[0].scores.len(), 39 + 20);
    assert_eq!((alone[5].scores.len(), alone[5].text.as_str()), (4, ""));
    assert!(alone.iter().all(|it| it.reason == Some(FinishReason::Length)));
    // Two requests at a time, of which one leaves before its end; a request that waits is cancelled as well.
    let mut join_and_leave = |batch: &mut Batch<'_>, step: usize| {
        if let Some(request) = requests.get(step / 3).filter(|_| step.is_multiple_of(3)) {
            batch.submit(step / 3, request.clone());
            batch.submit(100 + step / 3, request.clone());
        }
        if step > 2 && step % 3 == 1 {
            batch.cancel(100 + step / 3);
        }
    };
    let together = run(&model, &settings, &mut join_and_leave);
    for (index, alone) in alone.iter().enumerate() {
        assert_eq!(&together[&index], alone, "request {index}");
    }
    assert_eq!(together[&100], alone[0]);
}

#[test]
fn texts_do_not_depend_on_other_prompts_if_the_rotation_depends_on_the_length() {
    let settings = Settings::for_test(Tokenizer::bytes(), Vocabulary { size: 256, ends: Vec::new() });
    let options = Arc::new(options(0.0, None));
    let requests = [3, 30, 4, 40].map(|length: u32| Request {
        tokens: (0..length).map(|i| (length + i * i * 31) % 256).collect(),
        sample: 0,
        options: options.clone(),
    });
    let (factor, original_max_position_embeddings) = (4.0, 16);
    let long_rope = RopeScaling::LongRope {
        factor,
        original_max_position_embeddings,
        attention_factor: 0.0,
        short_factor: vec![1.0; 8],
        long_factor: vec![4.0; 8],
    };
    for scaling in [RopeScaling::Dynamic { factor, original_max_position_embeddings }, long_rope] {
        let model = random_model(scaling);
        let texts = |requests: &[Request]| {
            let mut texts = vec![String::new(); requests.len()];
            let mut sink = |request: usize, update: Update<'_>| {
                if let Update::Text(text) = update {
                    texts[request] += text;
                }
            };
            generate(&model, &settings, requests, &|| false, &mut sink).unwrap();
            texts
        };
        let alone: Vec<String> = requests.iter().flat_map(|it| texts(std::slice::from_ref(it))).collect();
        assert_eq!(texts(&requests), alone, "{:?}", model.shape.rope_scaling);
    }
}
