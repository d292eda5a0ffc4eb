//! Special tokens declared in files next to a `tokenizer.json`.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

/// Size limit of these files. Chat templates have up to 100 KB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Ids of special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Declared {
    /// Id that ends a text.
    pub(super) eos: Option<u32>,
    /// Id that starts a text.
    pub(super) bos: Option<u32>,
}

/// Reads the files of `dir` in the order of precedence of Python's libraries. They are optional: a missing or broken
/// file declares nothing.
pub(super) fn read(dir: &Path, added: &HashMap<String, u32>) -> Declared {
    let mut declared = Declared::default();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        let Some(config) = read_json(&dir.join(name)) else { continue };
        let id = |key: &str| added.get(token_text(&config[key])?).copied();
        declared.eos = declared.eos.or_else(|| id("eos_token"));
        declared.bos = declared.bos.or_else(|| id("bos_token"));
    }
    for name in ["generation_config.json", "config.json"] {
        let Some(config) = read_json(&dir.join(name)) else { continue };
        let id = |key: &str| {
            let value = &config[key];
            let id = value.as_u64().or_else(|| value[0].as_u64()).and_then(|id| u32::try_from(id).ok())?;
            added.values().any(|known| *known == id).then_some(id)
        };
        declared.eos = declared.eos.or_else(|| id("eos_token_id"));
        declared.bos = declared.bos.or_else(|| id("bos_token_id"));
    }
    declared
}

/// Returns the text of a special token in `tokenizer_config.json` or `special_tokens_map.json`.
pub fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

fn read_json(path: &Path) -> Option<Value> {
    let mut json = Vec::new();
    std::fs::File::open(path).ok()?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut json).ok()?;
    serde_json::from_slice(&json).ok()
}
