//! `manifest.json` of prepared data: an accepted manifest names shards within the directory, whose sizes add up.
#![no_main]

use std::path::Path;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use xlaunch_data::Manifest;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    Manifest { version: u8, vocab: u32, end_of_text: Option<u32>, train: Vec<Shard<'a>>, val: Vec<Shard<'a>> },
}

#[derive(Arbitrary, Debug)]
struct Shard<'a> {
    name: Option<&'a str>,
    number: u8,
    tokens: u64,
    bytes: Option<u64>,
}

fn split(prefix: &str, shards: &[Shard<'_>], width: u64) -> Value {
    let file = |shard: &Shard<'_>| {
        let name = shard.name.map_or_else(|| format!("{prefix}{:06}.bin", shard.number), str::to_owned);
        let bytes = shard.bytes.unwrap_or(shard.tokens.saturating_mul(width).saturating_add(1024));
        json!({"name": name, "tokens": shard.tokens, "bytes": bytes, "xxh3_128": "0".repeat(32)})
    };
    let tokens = shards.iter().fold(0_u64, |sum, shard| sum.wrapping_add(shard.tokens));
    json!({"documents": 1, "bytes": 1, "tokens": tokens, "shards": shards.iter().map(file).collect::<Vec<_>>()})
}

fuzz_target!(|input: Input<'_>| {
    let text = match input {
        Input::Text(text) => text.to_vec(),
        Input::Manifest { version, vocab, end_of_text, train, val } => {
            let width = if vocab <= 1 << 16 { 2 } else { 4 };
            json!({
                "version": version % 3, "tokenizer": "gpt2", "vocab": vocab, "end_of_text": end_of_text,
                "train": split("train_", &train, width), "val": split("val_", &val, width),
            })
            .to_string()
            .into_bytes()
        }
    };
    let Ok(manifest) = Manifest::parse(Path::new("manifest.json"), &text) else { return };
    assert!(manifest.end_of_text.is_none_or(|id| (id as usize) < manifest.vocab));
    for split in [&manifest.train, &manifest.val] {
        let mut tokens = 0;
        for shard in &split.shards {
            assert!(shard.name.ends_with(".bin") && !shard.name.contains(['/', '\\']));
            assert_eq!(shard.bytes, 1024 + shard.tokens * manifest.width() as u64);
            tokens += shard.tokens;
        }
        assert_eq!(tokens, split.tokens);
    }
    let written = serde_json::to_vec(&manifest).unwrap();
    assert_eq!(Manifest::parse(Path::new("manifest.json"), &written).unwrap(), manifest);
});
