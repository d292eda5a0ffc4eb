//! Documents that share rows: each is computed as if it were alone, the loss is a mean over the tokens that count,
//! and neither depends on how a step is divided.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks, on_ranks_with_shape, shape, spec};
use serde_json::{Value, json};
use xlaunch_engine::{Accumulate, Backend, DType, Documents, IGNORED, PoolMode, Tensor};
use xlaunch_spec::job::{DataSource, DocumentMode, JobSpec, Shard};
use xlaunch_spec::model::{Arch, ModelShape, QkNorm};
use xlaunch_worker::data::{Dataset, Loader, MicroBatch, Schedule};
use xlaunch_worker::model::layout::Layout;
use xlaunch_worker::model::{BackendHandle, GradientArena, LossGradients, Model, Progress, Rows, init};
use xlaunch_worker::train::Requests;

const STEPS: u64 = 4;

/// Ids of a document: its number, then others. Documents of 3 to 29 ids, and one that is longer than two rows.
fn document(number: usize) -> Vec<u8> {
    let len = if number == 7 { 90 } else { 3 + number * number % 27 };
    (0..len).map(|i| u8::try_from((number * 31 + i * i * 7) % 251).unwrap()).collect()
}

/// Whether the loss of predicting id `at` of a document counts. Nothing in document 5 does.
fn counts(number: usize, at: usize) -> bool {
    number != 5 && at >= 2 && !(at + number).is_multiple_of(4)
}

fn side(dir: &Path, name: &str, contents: &[u8]) -> Value {
    std::fs::write(dir.join(name), contents).unwrap();
    json!({"name": name, "bytes": contents.len(), "xxh3_128": "0".repeat(32)})
}

/// Writes a split of these documents in shards of 100 ids, and returns its entry in the manifest.
fn split(dir: &Path, prefix: &str, documents: std::ops::Range<usize>) -> Value {
    let (mut ids, mut mask, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    let count = documents.len();
    for number in documents {
        starts.extend_from_slice(&(ids.len() as u64).to_le_bytes());
        mask.extend((0..document(number).len()).map(|at| counts(number, at)));
        ids.extend(document(number));
    }
    let supervised = mask.iter().filter(|counts| **counts).count();
    let mut shards = Vec::new();
    for (number, (ids, mask)) in ids.chunks(100).zip(mask.chunks(100)).enumerate() {
        let mut file = xlaunch_data::shard::header(ids.len() as u64, 2).unwrap().to_vec();
        file.extend(ids.iter().flat_map(|id| [*id, 0]));
        let mut bits = vec![0_u8; mask.len().div_ceil(8)];
        for (at, _) in mask.iter().enumerate().filter(|(_, counts)| **counts) {
            bits[at / 8] |= 1 << (at % 8);
        }
        let mut shard = side(dir, &format!("{prefix}_{:06}.bin", number + 1), &file);
        shard["tokens"] = json!(ids.len());
        shard["mask"] = side(dir, &format!("{prefix}_{:06}.mask", number + 1), &bits);
        shards.push(shard);
    }
    let starts = side(dir, &format!("{prefix}_starts.bin"), &starts);
    json!({
        "documents": count, "bytes": ids.len(), "tokens": ids.len(), "supervised": supervised, "starts": starts,
        "shards": shards,
    })
}

/// Writes a prepared directory of chats, and returns a job on it.
fn chats(dir: &Path, mode: DocumentMode) -> JobSpec {
    let mut spec = spec(dir, false);
    let chats = dir.join("chats");
    std::fs::create_dir_all(&chats).unwrap();
    let manifest = json!({
        "version": 2, "tokenizer": "bytes", "vocab": 256, "end_of_text": null,
        "chat": {"template_xxh3_128": "0".repeat(32)}, "tokenizer_xxh3_128": "0".repeat(32),
        "train": split(&chats, "train", 0..40), "val": split(&chats, "val", 40..53),
    });
    std::fs::write(chats.join("manifest.json"), manifest.to_string()).unwrap();
    spec.data.train = vec![chats.display().to_string().into()];
    spec.data.documents = Some(mode);
    spec.train.eval_batches = 100;
    spec
}

/// Writes a prepared directory of text: ids above those of chats, in documents that start with 251.
fn text(dir: &Path) -> String {
    let text = dir.join("text_data");
    std::fs::create_dir_all(&text).unwrap();
    let split = |name: &str, documents: usize| {
        let document =
            |number: usize| [251_u8].into_iter().chain((0..number % 50).map(|i| 252 + (i % 4) as u8));
        let ids: Vec<u8> = (0..documents).flat_map(document).collect();
        let mut file = xlaunch_data::shard::header(ids.len() as u64, 2).unwrap().to_vec();
        file.extend(ids.iter().flat_map(|id| [*id, 0]));
        let mut shard = side(&text, &format!("{name}_000001.bin"), &file);
        shard["tokens"] = json!(ids.len());
        json!({"documents": documents, "bytes": ids.len(), "tokens": ids.len(), "shards": [shard]})
    };
    let manifest = json!({
        "version": 1, "tokenizer": "bytes", "vocab": 256, "end_of_text": 251, "tokenizer_xxh3_128": "0".repeat(32),
        "train": split("train", 100), "val": split("val", 20),
    });
    std::fs::write(text.join("manifest.json"), manifest.to_string()).unwrap();
    text.display().to_string()
}

fn cpu() -> BackendHandle {
    BackendHandle::new(Backend::cpu(1, PoolMode::On))
}

/// Models with learned and rotary positions, with norms of queries and keys, windows, caps and sinks.
fn shapes() -> Vec<ModelShape> {
    let llama = shape(Arch::Llama, 2, false);
    let windowed = ModelShape {
        window: 7,
        window_pattern: 2,
        attention_softcap: 10.0,
        logit_softcap: 20.0,
        windowed_rope_theta: 300.0,
        qk_norm: QkNorm::Head,
        kv_heads: 1,
        ..llama.clone()
    };
    let full = ModelShape { qk_norm: QkNorm::Full, window: 3, window_pattern: 1, ..llama.clone() };
    let sinks = ModelShape { attention_sinks: true, window: 7, ..llama.clone() };
    vec![shape(Arch::Gpt2, 2, true), llama, windowed, full, sinks]
}

/// A model, and the losses and gradients of one row.
struct Pass {
    backend: BackendHandle,
    model: Model,
}

impl Pass {
    fn new(shape: &ModelShape) -> Self {
        let backend = cpu();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        // Larger than initial weights, so that attention is not nearly flat.
        let weights = init::weights(&Layout::new(shape), 7, &threads);
        let weights: Vec<f32> = weights.iter().map(|weight| 2.0 * weight).collect();
        let model = Model::new(&backend, shape, &weights).unwrap();
        Self { backend, model }
    }

    fn ints(&self, values: &[i32]) -> Tensor {
        let tensor = self.backend.alloc(DType::I32, values.len()).unwrap();
        self.backend.write_i32(tensor.all(), values).unwrap();
        tensor
    }

    fn floats(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.len()];
        self.backend.read_f32(tensor.all(), &mut values).unwrap();
        values
    }

    /// Returns the losses of a row of documents of these lengths, and the gradients of their sum.
    fn run(&self, tokens: &[i32], targets: &[i32], lengths: Option<&[usize]>) -> [Vec<f32>; 2] {
        let (backend, model) = (&self.backend, &self.model);
        let (tokens, targets) = (self.ints(tokens), self.ints(targets));
        let mut bounds = [Vec::new(), Vec::new()];
        for length in lengths.unwrap_or_default() {
            let [first, last] = &mut bounds;
            let start = i32::try_from(first.len()).unwrap();
            first.extend(vec![start; *length]);
            last.extend(vec![start + i32::try_from(*length).unwrap() - 1; *length]);
        }
        let [first, last] = bounds.map(|bounds| self.ints(&bounds));
        let documents = lengths.map(|_| Documents { first: first.all(), last: last.all() });
        let rows = Rows { batch: 1, seq: tokens.len(), documents };
        let acts = model.forward(rows, tokens.all()).unwrap();
        let losses = backend.alloc(DType::F32, tokens.len()).unwrap();
        let scale = backend.alloc(DType::F32, 1).unwrap();
        backend.write_f32(scale.all(), &[1.0]).unwrap();
        let grads = backend.alloc(DType::F32, model.layout.len).unwrap();
        backend.zero(grads.all()).unwrap();
        let (arena, acc) = (GradientArena { tensor: &grads, slots: None }, Accumulate::Overwrite);
        let head = LossGradients { scale: scale.all(), grads: arena, acc, weights: None };
        let dy = model.loss_and_gradients(&acts, targets.all(), losses.all(), head).unwrap();
        let done = |_: Progress| Ok::<_, xlaunch_engine::EngineError>(());
        model.backward(acts, dy, tokens.all(), arena, acc, done).unwrap();
        [self.floats(&losses), self.floats(&grads)]
    }
}

/// Tokens and targets of one row: the last target of each document is ignored.
fn row(lengths: &[usize]) -> (Vec<i32>, Vec<i32>) {
    let seq: usize = lengths.iter().sum();
    let tokens: Vec<i32> = (0..seq).map(|i| i32::try_from((i * i * 13 + 5) % 251).unwrap()).collect();
    let mut targets = [&tokens[1..], &[0]].concat();
    let mut end = 0;
    for length in lengths {
        end += length;
        targets[end - 1] = IGNORED;
    }
    (tokens, targets)
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut expected.iter().map(|x| f64::from(*x)))
}

#[test]
fn documents_in_a_row_have_losses_and_gradients_of_rows_of_their_own() {
    let lengths = [1, 12, 6, 21];
    let (tokens, targets) = row(&lengths);
    for shape in shapes() {
        let pass = Pass::new(&shape);
        let [losses, gradients] = pass.run(&tokens, &targets, Some(&lengths));
        let (mut expected_losses, mut expected_gradients) = (Vec::new(), vec![0.0; gradients.len()]);
        for length in lengths {
            let document = expected_losses.len()..expected_losses.len() + length;
            let [losses, gradients] = pass.run(&tokens[document.clone()], &targets[document], None);
            expected_losses.extend(losses);
            expected_gradients.iter_mut().zip(gradients).for_each(|(sum, gradient)| *sum += gradient);
        }
        let found = [distance(&losses, &expected_losses), distance(&gradients, &expected_gradients)];
        // Norms of heads divide by small numbers, which enlarges differences of rounding.
        let gradients = if shape.qk_norm == QkNorm::Head { 3e-6 } else { 1e-6 };
        assert!(found[0] < 1e-6 && found[1] < gradients, "{found:?}, {shape:?}");
        // The test would notice: joined documents differ.
        let [joined, _] = pass.run(&tokens, &targets, None);
        assert!(distance(&joined, &expected_losses) > 1e-3, "{shape:?}");
    }
}

#[test]
fn changing_a_document_changes_no_bit_of_the_others_in_its_row() {
    let lengths = [9, 12, 19];
    let (mut tokens, targets) = row(&lengths);
    for shape in shapes() {
        let pass = Pass::new(&shape);
        let [before, _] = pass.run(&tokens, &targets, Some(&lengths));
        tokens[9..21].iter_mut().for_each(|token| *token = (*token + 17) % 251);
        let [after, _] = pass.run(&tokens, &targets, Some(&lengths));
        let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&before[..9]), bits(&after[..9]), "{shape:?}");
        assert_eq!(bits(&before[21..]), bits(&after[21..]), "{shape:?}");
        assert_ne!(bits(&before[9..21]), bits(&after[9..21]), "{shape:?}");
    }
}

/// Returns losses, norms and held-out losses of some steps of the same global batch.
fn train(spec: &JobSpec, dir: &Path, world: usize) -> Vec<f64> {
    let results = Mutex::new(Vec::new());
    on_ranks(spec, dir, world, |mut rank| {
        let mut own = Vec::new();
        let Rank { model, optimizer, stepper, evaluator, dataset, loader, collective, .. } = &mut rank;
        for step in 0..STEPS {
            optimizer.prepare(step, 1e-2).unwrap();
            let result =
                stepper.step(model, optimizer, &mut **collective, loader, Requests::default()).unwrap();
            optimizer.gather(model, &mut **collective).unwrap();
            let val = dataset.held_out().unwrap();
            let found = evaluator.evaluate(model, optimizer, &mut **collective, val).unwrap();
            let (loss, tokens) = (found.loss, found.targets);
            own.extend([f64::from(result.loss), f64::from(result.grad_norm), loss, tokens as f64]);
        }
        rank.collective.finalize().unwrap();
        results.lock().unwrap().push(own);
    });
    let results = results.into_inner().unwrap();
    assert!(results.iter().all(|own| *own == results[0]), "ranks differ");
    results[0].clone()
}

#[test]
fn loss_is_the_mean_over_tokens_that_count_of_all_ranks_and_micro_steps() {
    for mode in [DocumentMode::Joined, DocumentMode::Masked, DocumentMode::Packed] {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = chats(dir.path(), mode);
        let mut expected: Option<Vec<f64>> = None;
        for (world, batch, accumulate) in [(1, 6, 1), (1, 2, 3), (2, 3, 1), (2, 1, 3), (3, 2, 1), (3, 1, 2)] {
            (spec.train.batch, spec.train.accumulate) = (batch, accumulate);
            // Three ranks cannot be given equal parts.
            let shards = if world == 3 { &[Shard::None][..] } else { &[Shard::None, Shard::Optimizer] };
            for shard in shards {
                spec.comm.shard = *shard;
                let found = train(&spec, dir.path(), world);
                let expected = expected.get_or_insert_with(|| found.clone());
                for (at, (found, expected)) in found.iter().zip(&*expected).enumerate() {
                    let difference = (found - expected).abs() / expected;
                    assert!(
                        difference < 1e-6,
                        "{mode:?}, {world} x {batch} x {accumulate}, {at}: {difference:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn first_loss_and_held_out_loss_are_those_of_the_tokens_that_count() {
    let dir = tempfile::tempdir().unwrap();
    let spec = chats(dir.path(), DocumentMode::Packed);
    let shape = shape(Arch::Llama, 2, false);
    let dataset = Dataset::open(&spec, &shape).unwrap();
    let expected = Mutex::new(None);
    on_ranks_with_shape(&shape, &spec, dir.path(), 1, |rank| {
        // Both micro-steps of the first step.
        let (mut total, mut count) = (0.0, 0);
        for _ in 0..2 {
            let MicroBatch { batch, step_targets } = rank.loader.next_batch().unwrap();
            let documents = batch.documents.unwrap();
            let tensor = |values: &[i32]| {
                let tensor = rank.backend.alloc(DType::I32, values.len()).unwrap();
                rank.backend.write_i32(tensor.all(), values).unwrap();
                tensor
            };
            let [tokens, targets, first, last] =
                [&batch.tokens, &batch.targets, &documents.first, &documents.last].map(|x| tensor(x));
            let losses = rank.backend.alloc(DType::F32, batch.tokens.len()).unwrap();
            let documents = Some(Documents { first: first.all(), last: last.all() });
            let output = rank.model.output(Rows { batch: 2, seq: 40, documents }, tokens.all()).unwrap();
            rank.model.loss(&output, targets.all(), losses.all()).unwrap();
            let mut values = vec![0.0; losses.len()];
            rank.backend.read_f32(losses.all(), &mut values).unwrap();
            let counted = values.iter().zip(&batch.targets).filter(|(_, target)| **target != IGNORED);
            for (loss, _) in counted {
                total += f64::from(*loss);
                count += 1;
            }
            *expected.lock().unwrap() = Some((total / f64::from(count), count, step_targets));
        }
        rank.collective.finalize().unwrap();
    });
    let (mean, count, step_targets) = expected.into_inner().unwrap().unwrap();
    assert_eq!(u64::try_from(count).unwrap(), step_targets);
    let trained = train(&spec, dir.path(), 1);
    assert!((trained[0] - mean).abs() < 1e-6 * mean, "{} {mean}", trained[0]);
    // Every token of the held-out chats that counts, except that predictions need a token before them.
    let counted = (40..53).map(|number| (1..document(number).len()).filter(|at| counts(number, *at)).count());
    assert_eq!(trained[3], counted.sum::<usize>() as f64);
    let summary = dataset.train.sources()[0].plan.packing().unwrap();
    let trains = |number: &usize| (1..document(*number).len()).any(|at| counts(*number, at));
    assert_eq!((summary.split, summary.documents), (1, (0..40).filter(trains).count() as u64));
}

#[test]
fn chats_are_packed_into_rows_of_whole_documents() {
    let dir = tempfile::tempdir().unwrap();
    let spec = chats(dir.path(), DocumentMode::Packed);
    let rows = Mutex::new(Vec::new());
    on_ranks(&spec, dir.path(), 1, |rank| {
        for _ in 0..20 {
            let batch = rank.loader.next_batch().unwrap().batch;
            let bounds = batch.documents.unwrap();
            for row in 0..2 {
                let at = row * 40..(row + 1) * 40;
                rows.lock().unwrap().push([
                    batch.tokens[at.clone()].to_vec(),
                    batch.targets[at.clone()].to_vec(),
                    bounds.first[at.clone()].to_vec(),
                    bounds.last[at].to_vec(),
                ]);
            }
        }
        rank.collective.finalize().unwrap();
    });
    let documents: Vec<Vec<i32>> =
        (0..40).map(|number| document(number).into_iter().map(i32::from).collect()).collect();
    for [tokens, targets, first, last] in rows.into_inner().unwrap() {
        let mut at = 0;
        while at < 40 {
            let end = usize::try_from(last[at]).unwrap() + 1;
            assert!((at..end).all(|i| first[i] as usize == at && last[i] as usize + 1 == end));
            let number = documents.iter().position(|ids| *ids == tokens[at..end]);
            let counted = |target: usize| targets[target] != IGNORED;
            match number {
                Some(number) => (at..end).for_each(|i| {
                    let expected = i + 1 < end && counts(number, i + 1 - at);
                    assert_eq!(counted(i), expected, "document {number}, target {}", i - at);
                    assert!(!expected || targets[i] == tokens[i + 1]);
                }),
                // Padding, or a part of the long document.
                None if end == 40 && tokens[at..].iter().all(|token| *token == 0) => {
                    assert!((at..40).all(|i| !counted(i)));
                }
                None => assert!(documents[7].windows(end - at).any(|part| *part == tokens[at..end])),
            }
            at = end;
        }
    }
}

#[test]
fn masked_windows_are_the_joined_ones_with_the_bounds_of_documents() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = chats(dir.path(), DocumentMode::Masked);
    spec.data.shuffle = false;
    let shape = shape(Arch::Llama, 1, false);
    let dataset = Dataset::open(&spec, &shape).unwrap();
    // The number of the document and the index within it of every token of the data.
    let owners: Vec<(usize, usize)> =
        (0..40).flat_map(|number| (0..document(number).len()).map(move |at| (number, at))).collect();
    let schedule = Schedule { first: 0, rank: 0, world: 1, batch: 1, accumulate: 1, seq: 40 };
    let loader = Loader::start(dataset.train.clone(), schedule).unwrap();
    for row in 0..usize::try_from(dataset.train.rows()).unwrap() {
        let MicroBatch { batch, step_targets } = loader.next_batch().unwrap();
        let bounds = batch.documents.unwrap();
        let owners = &owners[40 * row..=40 * (row + 1)];
        for (i, (number, at)) in owners[..40].iter().enumerate() {
            assert_eq!(batch.tokens[i], i32::from(document(*number)[*at]));
            let same = |(other, _): &(usize, usize)| other == number;
            let first = owners.iter().position(same).unwrap();
            let last = owners[..40].iter().rposition(same).unwrap();
            assert_eq!((bounds.first[i] as usize, bounds.last[i] as usize), (first, last), "row {row}, {i}");
            let next = owners[i + 1];
            let expected = if next.0 == *number && counts(next.0, next.1) {
                i32::from(document(next.0)[next.1])
            } else {
                IGNORED
            };
            assert_eq!(batch.targets[i], expected, "row {row}, {i}");
        }
        let counted = batch.targets.iter().filter(|target| **target != IGNORED).count();
        assert_eq!(step_targets, counted as u64);
    }
}

#[test]
fn run_that_continues_reads_the_rows_that_follow() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [DocumentMode::Masked, DocumentMode::Packed] {
        let spec = chats(dir.path(), mode);
        let dataset = Dataset::open(&spec, &shape(Arch::Llama, 1, false)).unwrap();
        let batches = |first, count: usize| -> Vec<MicroBatch> {
            let schedule = Schedule { first, rank: 0, world: 1, batch: 5, accumulate: 1, seq: 40 };
            // Opened again, as in a new process.
            let dataset = Dataset::open(&spec, &shape(Arch::Llama, 1, false)).unwrap();
            let loader = Loader::start(dataset.train.clone(), schedule).unwrap();
            (0..count).map(|_| loader.next_batch().unwrap()).collect()
        };
        // More than two epochs.
        let count = usize::try_from(dataset.train.rows()).unwrap() / 2;
        let all = batches(0, count);
        assert_eq!(batches(5 * 7, count - 7), all[7..], "{mode:?}");
    }
}

#[test]
fn masks_and_starts_belong_to_the_fingerprint_of_data() {
    let shape = shape(Arch::Llama, 2, false);
    let dir = tempfile::tempdir().unwrap();
    let spec = chats(dir.path(), DocumentMode::Packed);
    let of = || Dataset::open(&spec, &shape).unwrap().train.fingerprint().unwrap();
    let before = of();
    let mask = dir.path().join("chats/train_000002.mask");
    let mut bits = std::fs::read(&mask).unwrap();
    bits[3] ^= 4;
    std::fs::write(mask, bits).unwrap();
    assert_ne!(before, of());
}

#[test]
fn documents_need_prepared_data() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    for mode in [DocumentMode::Masked, DocumentMode::Packed] {
        spec.data.documents = Some(mode);
        let error = Dataset::open(&spec, &shape(Arch::Llama, 1, false)).unwrap_err().to_string();
        assert!(error.contains("xlaunch data prepare") && error.contains("joined"), "{error}");
    }
}

/// Rows of a job as tokens and targets, in the order of their numbers.
fn rows(spec: &JobSpec, first: u64, count: usize, world: usize) -> Vec<[Vec<i32>; 2]> {
    let dataset = Dataset::open(spec, &shape(Arch::Llama, 1, false)).unwrap();
    let loaders: Vec<Loader> = (0..world)
        .map(|rank| Schedule { first, rank, world, batch: 2, accumulate: 1, seq: 40 })
        .map(|schedule| Loader::start(dataset.train.clone(), schedule).unwrap())
        .collect();
    let mut rows = Vec::new();
    while rows.len() < count {
        for loader in &loaders {
            let batch = loader.next_batch().unwrap().batch;
            let both = batch.tokens.chunks(40).zip(batch.targets.chunks(40));
            rows.extend(both.map(|(tokens, targets)| [tokens.to_vec(), targets.to_vec()]));
        }
    }
    rows.truncate(count);
    rows
}

#[test]
fn rows_of_a_mixture_have_their_shares_from_the_first_row_on_whatever_ranks_and_resumes() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [DocumentMode::Joined, DocumentMode::Masked, DocumentMode::Packed] {
        let alone = chats(dir.path(), mode);
        let mut spec = alone.clone();
        let source = |path: String, weight| DataSource { path, weight: Some(weight) };
        spec.data.train = vec![source(alone.data.train[0].path.clone(), 3.0), source(text(dir.path()), 9.0)];
        let all = rows(&spec, 0, 300, 1);
        let (mut of_chats, mut ids) = (Vec::new(), 0);
        for (before, row) in all.iter().enumerate() {
            // Zero is padding, or an id of a chat.
            let is_text = row[0].iter().any(|id| *id > 250);
            assert!(row[0].iter().all(|id| *id == 0 || (*id > 250) == is_text), "one source a row: {row:?}");
            if is_text {
                ids += row[0].iter().filter(|id| **id > 250).count();
            } else {
                of_chats.push(row.clone());
            }
            let share = (before + 1) as f64 / 4.0;
            assert!((of_chats.len() as f64 - share).abs() < 1.0, "{mode:?}, {before}: {}", of_chats.len());
        }
        assert!(ids > 0 && of_chats.len() == 75);
        // Chats are read as without text: each of them once before any is repeated.
        assert_eq!(of_chats, rows(&alone, 0, 75, 1), "{mode:?}");
        assert_eq!(rows(&spec, 0, 300, 3), all, "{mode:?}");
        assert_eq!(rows(&spec, 60, 240, 2), all[60..], "{mode:?}");
    }
}
