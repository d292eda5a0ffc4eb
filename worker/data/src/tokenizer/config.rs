//! Special tokens declared in files next to a `tokenizer.json`.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

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
    let object = |name: &str| match read_json(&dir.join(name)) {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    };
    let (config, map) = (object("tokenizer_config.json"), object("special_tokens_map.json"));
    let id = |name: &str| added.get(special_token(&config, &map, name)?).copied();
    let mut declared = Declared { eos: id("eos_token"), bos: id("bos_token") };
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

/// Returns a special token, such as `bos_token`. `config` is `tokenizer_config.json`, and `map` is
/// `special_tokens_map.json`, which overrides it unless `config` lists all added tokens.
pub fn special_token<'a>(
    config: &'a Map<String, Value>,
    map: &'a Map<String, Value>,
    name: &str,
) -> Option<&'a str> {
    let map = map.get(name).filter(|_| !config.contains_key("added_tokens_decoder"));
    token_text(map.or_else(|| config.get(name))?)
}

fn read_json(path: &Path) -> Option<Value> {
    let mut json = Vec::new();
    std::fs::File::open(path).ok()?.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut json).ok()?;
    serde_json::from_slice(&json).ok()
}
