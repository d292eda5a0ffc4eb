//! Training on the output of `xlaunch data prepare` and on other files of token ids, and data that is refused.

use std::path::Path;

use serde_json::Value;
use xlaunch_data::{Manifest, Shard, Split, Tokenizer, shard};
use xlaunch_tests::{Job, Output};

xlaunch_harness::tests! {
    text_is_prepared_trained_on_and_sampled,
    prepared_directory_brings_tokenizer_vocabulary_and_validation_data,
    samples_follow_the_prompt_during_training,
    vocabularies_above_65536_train_from_32_bit_shards,
    evaluated_tokens_do_not_depend_on_ranks_or_batch,
    directory_that_is_not_prepared_data_is_refused,
    small_vocabulary_is_refused_with_its_place,
    files_of_another_kind_are_refused_with_the_key_to_change;
}

/// A configuration without `model.vocab` and data.
const CONFIG: &str = r#"
[model]
layers = 1
heads = 2
dim = 16
ffn = 24
seq = 32

[train]
steps = 8
batch = 4
lr = 3e-3
warmup = 2
eval_every = 4
sample = 5

[engine]
device = "cpu"

[data]
"#;

fn job(data: &str) -> Job {
    let job = Job::new();
    job.write("train.toml", format!("{CONFIG}{data}"));
    job
}

fn text() -> String {
    (0..200).map(|i| format!("line {i}: {} and {}\n", i * i, i % 7)).collect()
}

/// Returns the bytes of a token file.
fn shard_file(ids: &[u32], width: usize) -> Vec<u8> {
    let mut file = shard::header(ids.len() as u64, width).unwrap().to_vec();
    ids.iter().for_each(|id| file.extend_from_slice(&id.to_le_bytes()[..width]));
    file
}

/// Writes a prepared directory with one document per split. The last tenth of the text is held out.
fn prepare(dir: &Path, tokenizer: &Tokenizer) -> Manifest {
    let text = text();
    let (train, val) = text.split_at(text.len() / 10 * 9);
    std::fs::create_dir_all(dir).unwrap();
    let split = |name: &str, text: &str| {
        let ids: Vec<u32> =
            tokenizer.end_of_text().into_iter().chain(tokenizer.encode(text).unwrap()).collect();
        let file = shard_file(&ids, shard::width(tokenizer.vocab()));
        let (tokens, bytes) = (ids.len() as u64, file.len() as u64);
        std::fs::write(dir.join(name), file).unwrap();
        let shard = Shard { name: name.into(), tokens, bytes, xxh3_128: "0".repeat(32), mask: None };
        Split { documents: 1, bytes: text.len() as u64, tokens, shards: vec![shard], ..Split::default() }
    };
    let manifest = Manifest {
        version: Manifest::VERSION,
        tokenizer: tokenizer.name().into(),
        vocab: tokenizer.vocab(),
        end_of_text: tokenizer.end_of_text(),
        bos: tokenizer.bos(),
        tokenizer_xxh3_128: None,
        skipped: 0,
        chat: None,
        train: split("train_000001.bin", train),
        val: split("val_000001.bin", val),
    };
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_json()).unwrap();
    std::fs::write(dir.join(Manifest::FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    manifest
}

fn text_is_prepared_trained_on_and_sampled() {
    let job = job("train = \"tokens\"");
    let prepare = ["data", "prepare", "--tokenizer", "gpt2", "--documents", "line", "--val", "0.3"];
    let prepared = job.command(&[&prepare[..], &["--output", "tokens", "text"]].concat()).output().unwrap();
    assert!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
    let settings = ["train.eval_tokens=64", "train.sample_prompt=line", "data.val_fraction=0.1"];
    let run = job.run_ok(&settings.map(|setting| ["--set", setting]).concat());
    assert!(run.stderr.contains("(64 tokens)"), "{}", run.stderr);
    assert!(
        run.stderr.contains("data.val_fraction has no effect: data.train is a prepared"),
        "{}",
        run.stderr
    );
    assert!(run.stdout.contains("the model writes:\n  | line"), "{}", run.stdout);
    // An interrupted `prepare` leaves the directory in this state.
    std::fs::remove_file(job.path().join("tokens/manifest.json")).unwrap();
    assert_refused(&job.run(&[]), 65, &["tokens has no manifest.json", "interrupted"]);
}

fn prepared_directory_brings_tokenizer_vocabulary_and_validation_data() {
    let job = job("train = \"tokens\"");
    let manifest = prepare(&job.path().join("tokens"), &Tokenizer::gpt2());
    let run = job.run_ok(&["--nproc", "2"]);
    // One window less than there is room for, as epochs begin at different offsets.
    let windows = (manifest.train.tokens - 1) / 32 - 1;
    let epochs = format!("{:.2} epochs", (8 * 2 * 4) as f64 / windows as f64);
    for text in ["parameters, 8 steps of 256 tokens: 2.05K tokens", &epochs, "bits per byte"] {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
    for text in ["bits per byte", "the model writes:"] {
        assert!(run.stdout.contains(text), "{text} in {}", run.stdout);
    }
    let metrics = job.metrics();
    let evaluated: Vec<&Value> = metrics.iter().filter(|line| line["val/loss"].is_f64()).collect();
    assert_eq!(evaluated.len(), 2);
    let ratio = manifest.val.tokens as f64 / manifest.val.bytes as f64;
    for line in evaluated {
        let expected = line["val/loss"].as_f64().unwrap() / std::f64::consts::LN_2 * ratio;
        let bits = line["val/bits_per_byte"].as_f64().unwrap();
        assert!((bits - expected).abs() < 1e-5 * expected, "{bits}, not {expected}");
    }
    let state: Value = serde_json::from_slice(&job.checkpoint(8, "state.json")).unwrap();
    assert_eq!(state["model"]["vocab"], 50_257);
    let written = std::fs::read(job.path().join("tokens/tokenizer.json")).unwrap();
    assert!(job.checkpoint(8, "tokenizer.json") == written);
    // It can be resumed like any other run.
    let run = job.run_ok(&["--nproc", "1", "--resume", "--set", "train.steps=10"]);
    assert!(run.stderr.contains("resuming at step 9"), "{}", run.stderr);
    assert!(job.checkpoint(10, "tokenizer.json") == written);
}

fn samples_follow_the_prompt_during_training() {
    let samples = |job: &Job| -> Vec<Value> {
        let text = std::fs::read_to_string(job.run_dir().join("samples.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let settings = ["--set", "train.sample_every=3", "--set", "train.sample_prompt=\"line 7:\""];
    let job = job("train = \"tokens\"");
    prepare(&job.path().join("tokens"), &Tokenizer::bytes());
    let run = job.run_ok(&[&["--nproc", "2"], &settings[..]].concat());
    let found = samples(&job);
    assert_eq!(
        found.iter().map(|line| line["_step"].as_u64()).collect::<Vec<_>>(),
        [Some(3), Some(6), Some(8)]
    );
    assert!(found.iter().all(|line| line["prompt"] == "line 7:" && line["text"].is_string()), "{found:?}");
    assert_eq!(run.stderr.matches("the model writes:\n  | line 7:").count(), 2, "{}", run.stderr);
    let last = format!("line 7:{}", found[2]["text"].as_str().unwrap());
    assert!(run.stdout.contains(&format!("the model writes:\n  | {}", last.lines().next().unwrap())));

    // The same data as text gives the same losses, whether sampled or not.
    let (text, losses) = (Job::new(), job.losses());
    text.write("train.toml", format!("{CONFIG}train = \"all.txt\"\nval = \"val.txt\"\n"));
    let (whole, cut) = (self::text(), self::text().len() / 10 * 9);
    text.write("all.txt", &whole[..cut]);
    text.write("val.txt", &whole[cut..]);
    text.run_ok(&["--nproc", "2"]);
    assert_eq!(text.losses(), losses);
    assert_eq!(samples(&text).len(), 1, "the last one");
}

fn vocabularies_above_65536_train_from_32_bit_shards() {
    let job = job("train = \"ids.bin\"\ntokenizer = \"bin\"");
    let ids: Vec<u32> = (0..4000).map(|i| 69_999 - i * i % 50).collect();
    job.write("ids.bin", shard_file(&ids, 4));
    let vocabulary = ["--set", "model.vocab=70000"];
    job.run_ok(&[&vocabulary[..], &["--set", "train.steps=30", "--set", "train.lr=0.02"]].concat());
    let losses = job.losses();
    let uniform = 70_000_f64.ln();
    assert!((losses[0] - uniform).abs() < 0.5, "{}, not about {uniform}", losses[0]);
    assert!(losses[29] < losses[0] - 2.0, "ids above 65536 are learned: {losses:?}");

    let refused = job.run(&["--set", "model.vocab=69000"]);
    assert_refused(&refused, 65, &["ids.bin", "token id 69999 at position 0", "model.vocab = 69000"]);
}

fn evaluated_tokens_do_not_depend_on_ranks_or_batch() {
    let evaluate = |ranks: &str, batch: &str, tokens: &str| {
        let job = job("train = \"tokens\"");
        prepare(&job.path().join("tokens"), &Tokenizer::bytes());
        // A learning rate that changes no weight, because the global batch depends on ranks and batch.
        let fixed =
            ["train.steps=1", "train.eval_every=1", "train.lr=1e-30", "train.warmup=0", "train.sample=0"];
        let (batch, tokens) = (format!("train.batch={batch}"), format!("train.eval_tokens={tokens}"));
        let settings: Vec<&str> = fixed.into_iter().chain([&*batch, &*tokens]).collect();
        let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        let run = job.run_ok(&[&["--nproc", ranks], &settings[..]].concat());
        let losses: Vec<f64> = job.metrics().iter().filter_map(|line| line["val/loss"].as_f64()).collect();
        assert_eq!(losses.len(), 1);
        let tokens =
            run.stderr.split_once("bits per byte (").unwrap().1.split(')').next().unwrap().to_owned();
        (losses[0], tokens)
    };
    // Rounded up to whole sequences; limited to the existing ones.
    for (tokens, expected) in [("300", "320 tokens"), ("1000000", "416 tokens")] {
        let one = evaluate("1", "4", tokens);
        assert_eq!(one.1, expected);
        for (ranks, batch) in [("2", "4"), ("3", "4"), ("1", "5"), ("3", "7")] {
            let other = evaluate(ranks, batch, tokens);
            assert_eq!(other.1, expected, "{ranks} ranks, batch {batch}");
            assert!(
                (other.0 - one.0).abs() <= 1e-6 * one.0,
                "{ranks} ranks, batch {batch}: {other:?} {one:?}"
            );
        }
    }
}

fn directory_that_is_not_prepared_data_is_refused() {
    let refused = |change: &dyn Fn(&Path), data: &str, texts: &[&str]| {
        let job = job(data);
        let dir = job.path().join("tokens");
        prepare(&dir, &Tokenizer::bytes());
        change(&dir);
        assert_refused(&job.run(&[]), 65, texts);
        assert!(!job.path().join("runs").exists(), "nothing was started");
    };
    let one = "train = \"tokens\"";
    let remove = |name: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(name)).unwrap();
    let interrupted = ["data.train", "tokens has no manifest.json", "interrupted"];
    refused(&remove("manifest.json"), one, &interrupted);
    refused(&remove("val_000001.bin"), one, &["val_000001.bin"]);
    refused(&remove("tokenizer.json"), one, &["tokenizer.json"]);
    let cut = |dir: &Path| std::fs::write(dir.join("train_000001.bin"), shard_file(&[1, 2, 3], 2)).unwrap();
    refused(&cut, one, &["train_000001.bin", "manifest", "1030 bytes"]);
    let longer =
        |dir: &Path| std::fs::write(dir.join("tokenizer.json"), Tokenizer::gpt2().to_json()).unwrap();
    refused(&longer, one, &["tokenizer.json", "50257 ids", "256"]);
    let other = |dir: &Path| drop(prepare(&dir.with_file_name("other"), &Tokenizer::gpt2()));
    let both = "train = \"tokens\"\nval = \"other\"";
    refused(&other, both, &["data.train", "data.val", "different tokenizers", "bytes (256 ids)", "gpt2"]);
    let several = "train = [\"tokens\", \"text/*.txt\"]";
    refused(&|_| {}, several, &["data.train", "tokens must be the only entry"]);
    refused(&|_| {}, "train = \"missing\"", &["data.train", "no file matches"]);
    let unreadable = |dir: &Path| {
        std::fs::remove_file(dir.join("train_000001.bin")).unwrap();
        std::fs::create_dir(dir.join("train_000001.bin")).unwrap();
    };
    refused(&unreadable, one, &["train_000001.bin"]);
}

fn small_vocabulary_is_refused_with_its_place() {
    let job = job("train = \"tokens\"");
    prepare(&job.path().join("tokens"), &Tokenizer::gpt2());
    let config = std::fs::read_to_string(job.path().join("train.toml")).unwrap();
    job.write("train.toml", config.replace("seq = 32", "seq = 32\nvocab = 1000"));
    let place = ["train.toml:8:9: model.vocab: 1000 token ids", "tokenizer gpt2", "at least 50257"];
    assert_refused(&job.run(&[]), 2, &place);
    assert_refused(
        &job.run(&["--set", "model.vocab=2000"]),
        2,
        &["--set model.vocab=2000", "at least 50257"],
    );
    // A larger vocabulary is accepted: it allows for padding, or ids that are added later.
    job.run_ok(&["--set", "model.vocab=50304", "--set", "train.steps=1"]);
    let state: Value = serde_json::from_slice(&job.checkpoint(1, "state.json")).unwrap();
    assert_eq!(state["model"]["vocab"], 50_304);
}

fn files_of_another_kind_are_refused_with_the_key_to_change() {
    let wide: Vec<u8> = (0..2000_u32).flat_map(|i| (i * 37 % 256).to_le_bytes()).collect();
    let modded = {
        let mut file = shard_file(&[1; 100], 2);
        file[..4].copy_from_slice(&278_895_051_i32.to_le_bytes());
        file
    };
    let hostile = {
        let mut file = shard_file(&[1; 100], 2);
        file[8..12].copy_from_slice(&(-5_i32).to_le_bytes());
        file
    };
    let (bytes, bin) = ("data.tokenizer = \"bytes\"", "data.tokenizer = \"bin\"");
    for (file, tokenizer, texts) in [
        (text().into_bytes(), "bin", ["this is text", bytes]),
        (b"\x1f\x8b\x08\0compressed".to_vec(), "bytes", ["a gzip archive", "xlaunch data prepare"]),
        (shard_file(&[1; 100], 2), "bytes", ["a file of token ids", bin]),
        (shard_file(&[1; 100], 4), "bytes", ["a file of token ids", bin]),
        (modded, "bin", ["0 bytes per token", "expected 2 or 4"]),
        (hostile, "bin", ["-5 tokens", "truncated or damaged"]),
        (wide, "bin", ["32-bit ids without a header", "20240801"]),
    ] {
        let job = job("train = \"data.bin\"");
        job.write("data.bin", file);
        let tokenizer = format!("data.tokenizer={tokenizer}");
        let run = job.run(&["--set", &tokenizer, "--set", "model.vocab=256"]);
        assert_refused(&run, 65, &[&["data.bin"], &texts[..]].concat());
    }
}

fn assert_refused(run: &Output, code: i32, texts: &[&str]) {
    assert_eq!(run.code, code, "{}", run.stderr);
    for text in texts {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
}
