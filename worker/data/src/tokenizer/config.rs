//! Tokens declared in files next to a `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::TokenizerError;
use super::classes::{self, Loading};

/// Size limit of these files. Chat templates have up to 100 KB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Key of `tokenizer_config.json` with all added tokens by id.
const ADDED_TOKENS: &str = "added_tokens_decoder";
/// Keys with further tokens: lists, or objects with a name for each.
const FURTHER_TOKENS: [&str; 3] =
    ["extra_special_tokens", "model_specific_special_tokens", "additional_special_tokens"];
/// Special tokens that have a name in every tokenizer.
const COMMON_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Ids of special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Declared {
    /// Id that ends a text.
    pub(super) eos: Option<u32>,
    /// Id that starts a text.
    pub(super) bos: Option<u32>,
}

/// The files that are read with a `tokenizer.json`. They are optional: a missing file declares nothing.
#[derive(Debug)]
pub(crate) struct Files {
    /// `tokenizer_config.json`.
    config: Map<String, Value>,
    /// `special_tokens_map.json`.
    map: Map<String, Value>,
    /// `added_tokens.json`: ids by token.
    added: Map<String, Value>,
    /// `generation_config.json` and `config.json`.
    model: [Map<String, Value>; 2],
}

impl Files {
    pub(crate) fn read(dir: &Path) -> Result<Self, TokenizerError> {
        let object = |name: &str| read_object(&dir.join(name));
        Ok(Self {
            config: object("tokenizer_config.json")?,
            map: object("special_tokens_map.json")?,
            added: object("added_tokens.json")?,
            // The last one is not always that of a model.
            model: [object("generation_config.json")?, object("config.json").unwrap_or_default()],
        })
    }

    /// Returns the ids of special tokens, in the order of precedence of Python's libraries.
    pub(super) fn ids(&self, added: &HashMap<String, u32>) -> Declared {
        let id = |name: &str| added.get(special_token(&self.config, &self.map, name)?).copied();
        let mut declared = Declared { eos: id("eos_token"), bos: id("bos_token") };
        for config in &self.model {
            let id = |key: &str| {
                let value = config.get(key)?;
                let id =
                    value.as_u64().or_else(|| value[0].as_u64()).and_then(|id| u32::try_from(id).ok())?;
                added.values().any(|known| *known == id).then_some(id)
            };
            declared.eos = declared.eos.or_else(|| id("eos_token_id"));
            declared.bos = declared.bos.or_else(|| id("bos_token_id"));
        }
        declared
    }

    /// Returns how Python's `transformers` loads the tokenizer.
    pub(super) fn loading(&self) -> Loading {
        let [_, model] = &self.model;
        let declared = self.config.get("tokenizer_class").or_else(|| model.get("tokenizer_class"));
        let model_type = model.get("model_type").and_then(Value::as_str);
        let flag = |key: &str| self.config.get(key).and_then(Value::as_bool);
        Loading {
            class: classes::loaded(declared.and_then(Value::as_str), model_type),
            add_prefix_space: flag("add_prefix_space"),
            split_special_tokens: flag("split_special_tokens") == Some(true),
        }
    }

    /// Returns the added tokens that these files declare.
    pub(crate) fn added_tokens(&self) -> Vec<AddedToken> {
        let named: Vec<&Value> =
            named_tokens(&self.config, &self.map).into_iter().map(|(_, token)| token).collect();
        let names: HashSet<&str> = named.iter().filter_map(|token| token_text(token)).collect();
        let mut tokens: Vec<AddedToken> = Vec::new();
        if let Some(all) = self.config.get(ADDED_TOKENS) {
            let all = all.as_object().into_iter().flat_map(Map::values);
            tokens.extend(all.filter_map(|token| AddedToken::of(token, false, true)));
        } else {
            let older = self.added.keys().map(|content| Value::from(content.as_str()));
            tokens.extend(older.filter_map(|token| AddedToken::of(&token, false, false)));
        }
        for token in &mut tokens {
            token.is_special |= names.contains(token.content.as_str());
        }
        tokens.extend(named.into_iter().filter_map(|token| AddedToken::of(token, true, false)));
        let lists = FURTHER_TOKENS.iter().filter_map(|key| declaration(&self.config, &self.map, key));
        let further = lists.filter_map(Value::as_array).flatten();
        tokens.extend(further.filter_map(|token| AddedToken::of(token, true, false)));
        tokens
    }
}

/// An added token that the files next to a `tokenizer.json` declare.
#[derive(Clone, Debug)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    is_special: bool,
    /// The fields of a token in a `tokenizer.json`.
    fields: Value,
    /// True if it replaces a token in that file.
    replaces: bool,
}

impl AddedToken {
    /// Returns a token that is described by its text or an object.
    fn of(token: &Value, is_special: bool, replaces: bool) -> Option<Self> {
        let content = token_text(token)?.to_owned();
        Some(Self { content, is_special, fields: token.clone(), replaces })
    }

    fn entry(&self, id: &Value) -> Value {
        let has = |field: &str, default: bool| self.fields.get(field).map_or(default, |flag| *flag == true);
        let is_special = self.is_special || has("special", false);
        json!({
            "id": id, "content": self.content, "special": is_special, "single_word": has("single_word", false),
            "lstrip": has("lstrip", false), "rstrip": has("rstrip", false),
            "normalized": has("normalized", !is_special),
        })
    }
}

/// Changes the added tokens of a `tokenizer.json` to those that `transformers` 5 uses: it also adds tokens of the
/// vocabulary that only the files next to it declare. Returns whether there is a difference. Tokens without an id are
/// left out: they would need rows that the model may not have.
pub(super) fn add_tokens(file: &mut Map<String, Value>, tokens: &[AddedToken]) -> bool {
    let Some(mut list) = file.get("added_tokens").map_or(Some(Vec::new()), |list| list.as_array().cloned())
    else {
        return false;
    };
    let mut places: HashMap<String, usize> = list
        .iter()
        .zip(0..)
        .filter_map(|(known, place)| Some((known["content"].as_str()?.into(), place)))
        .collect();
    let mut is_changed = false;
    for token in tokens {
        let place = places.get(&token.content).copied();
        let known = place.map(|place| &mut list[place]);
        let changed = match (known, file.get("model").map(|model| &model["vocab"][&token.content])) {
            (Some(known), _) if token.replaces => {
                let entry = token.entry(&known["id"]);
                std::mem::replace(known, entry) != *known
            }
            (Some(known), _) => {
                token.is_special && std::mem::replace(&mut known["special"], true.into()) != true
            }
            (None, Some(id @ Value::Number(_))) => {
                places.insert(token.content.clone(), list.len());
                list.push(token.entry(id));
                true
            }
            (None, _) => false,
        };
        is_changed |= changed;
    }
    if !is_changed {
        return false;
    }
    list.sort_by_key(|token| token["id"].as_u64());
    file.insert("added_tokens".into(), list.into());
    true
}

/// Returns all tokens with a name, by which templates refer to them. The last of equal names counts.
pub(crate) fn named_tokens<'a>(
    config: &'a Map<String, Value>,
    map: &'a Map<String, Value>,
) -> Vec<(&'a str, &'a Value)> {
    let objects = FURTHER_TOKENS.iter().filter_map(|key| config.get(*key)?.as_object());
    let further = objects.flatten().map(|(name, token)| (name.as_str(), token));
    let names = config.keys().chain(map.keys()).map(String::as_str).filter(|name| name.ends_with("_token"));
    let named = names.filter_map(|name| Some((name, declaration(config, map, name)?)));
    let (common, other): (Vec<_>, Vec<_>) = named.partition(|(name, _)| COMMON_NAMES.contains(name));
    other.into_iter().chain(further).chain(common).collect()
}

/// Returns the text of a special token in `tokenizer_config.json` or `special_tokens_map.json`.
pub fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// Returns a special token, such as `bos_token`. `config` is `tokenizer_config.json`, and `map` is
/// `special_tokens_map.json`.
pub fn special_token<'a>(
    config: &'a Map<String, Value>,
    map: &'a Map<String, Value>,
    name: &str,
) -> Option<&'a str> {
    token_text(declaration(config, map, name)?)
}

/// Returns what the files say about a special token. `map` overrides `config`, unless that lists all added tokens.
fn declaration<'a>(
    config: &'a Map<String, Value>,
    map: &'a Map<String, Value>,
    name: &str,
) -> Option<&'a Value> {
    let map = map.get(name).filter(|_| !config.contains_key(ADDED_TOKENS));
    map.or_else(|| config.get(name))
}

/// Reads an object of JSON, which is empty if there is no such file.
fn read_object(path: &Path) -> Result<Map<String, Value>, TokenizerError> {
    let failed = |reason: String| TokenizerError::Read { path: path.into(), reason };
    let json = match crate::read_regular(path, MAX_CONFIG_BYTES) {
        Ok(json) => json,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(error) => return Err(failed(error.to_string())),
    };
    serde_json::from_slice(&json).map_err(|error| failed(format!("not an object of JSON: {error}")))
}
