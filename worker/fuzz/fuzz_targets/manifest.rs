//! `manifest.json`: an accepted manifest names exactly the expected files, and its chunks cover each of them once.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use xlaunch_worker::fuzz::manifest;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    Files { version: u8, files: Vec<File<'a>> },
}

#[derive(Arbitrary, Debug)]
struct File<'a> {
    name: Name<'a>,
    bytes: u64,
    whole: bool,
    /// Sizes and offsets; `None` means the end of the previous chunk.
    chunks: Vec<(u64, Option<u64>)>,
}

#[derive(Arbitrary, Debug)]
enum Name<'a> {
    Model,
    State,
    Optimizer(u8, u8),
    Any(&'a str),
}

impl Input<'_> {
    fn text(&self) -> Vec<u8> {
        match self {
            Self::Text(text) => text.to_vec(),
            Self::Files { version, files } => {
                let files: Vec<Value> = files.iter().map(File::json).collect();
                json!({"version": version % 4, "files": files}).to_string().into_bytes()
            }
        }
    }
}

impl File<'_> {
    fn json(&self) -> Value {
        let name = match self.name {
            Name::Model => "model.safetensors".into(),
            Name::State => "state.json".into(),
            Name::Optimizer(rank, world) => {
                format!("optimizer-{:05}-of-{:05}.safetensors", rank % 4, world % 4)
            }
            Name::Any(name) => name.to_owned(),
        };
        let mut end = 0_u64;
        let chunks: Vec<Value> = self
            .chunks
            .iter()
            .map(|&(bytes, offset)| {
                let offset = offset.unwrap_or(end);
                end = offset.saturating_add(bytes);
                json!({"offset": offset, "bytes": bytes, "xxh3_128": "00"})
            })
            .collect();
        if self.whole {
json!({"name": name, "bytes": self.bytes, "xxh3_128": "00"})
} else {
json!({"name": name, "bytes": end, "chunks": chunks})
}
    }
}

fuzz_target!(|input: Input<'_>| {
    let Some(files) = manifest(&input.text()) else { return };
    let names: Vec<&str> = files.iter().map(|(name, ..)| name.as_str()).collect();
    assert!(names.contains(&"model.safetensors") && names.contains(&"state.json"));
    assert!(names.iter().all(|name| !name.contains(['/', '\\']) && !name.starts_with('.')));
    for (_, bytes, chunks) in &files {
        let end = chunks.iter().fold(0, |end, (offset, bytes)| {
            assert!(*offset == end && *bytes > 0);
            offset + bytes
        });
        assert_eq!(end, *bytes);
    }
});
