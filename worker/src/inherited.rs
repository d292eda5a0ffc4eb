//! Settings in Hugging Face's layout other than sizes and weights: special tokens, chat template, sampling defaults.
//! Training does not change them, so checkpoints keep them and exports write them back.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use xlaunch_data::chat::{special_token, template_of};

/// Name of the file with the sizes of a model.
pub(crate) const CONFIG: &str = "config.json";
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Directory with templates for other purposes, such as `tool_use.jinja`.
const NAMED_TEMPLATES: &str = "additional_chat_templates";
/// Size limit of each of these files.
const MAX_INHERITED_BYTES: u64 = 4 << 20;

/// The contents of these files; empty for a missing file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "named after the files")]
pub struct Inherited {
    pub config: Map<String, Value>,
    pub generation_config: Map<String, Value>,
    pub tokenizer_config: Map<String, Value>,
    pub special_tokens_map: Map<String, Value>,
    pub chat_template: Option<String>,
}

impl Inherited {
    /// Reads the files of `dir`. A file that cannot be read counts as empty.
    pub fn read(dir: &Path) -> Self {
        let object = |name: &str| match read(&dir.join(name)).map(|text| serde_json::from_str(&text)) {
            Some(Ok(Value::Object(object))) => object,
            _ => Map::new(),
        };
        let mut inherited = Self {
            config: object(CONFIG),
            generation_config: object(GENERATION_CONFIG),
            tokenizer_config: object(TOKENIZER_CONFIG),
            special_tokens_map: object(SPECIAL_TOKENS_MAP),
            chat_template: read(&dir.join(CHAT_TEMPLATE)),
        };
        inherited.join_templates(named_templates(&dir.join(NAMED_TEMPLATES)));
        inherited
    }

    /// Moves the chat template and these named ones to the tokenizer's configuration, where all versions of
    /// transformers read them. Without a default template, they are not used; a named one replaces the other.
    fn join_templates(&mut self, mut named: BTreeMap<String, String>) {
        if named.is_empty() {
            return;
        }
        let Some(default) = named.remove("default").or_else(|| self.chat_template.take()) else { return };
        self.chat_template = None;
        let all = std::iter::once(("default".to_owned(), default)).chain(named);
        let all: Vec<Value> =
            all.map(|(name, template)| json!({ "name": name, "template": template })).collect();
        self.tokenizer_config.insert("chat_template".into(), all.into());
    }

    /// Takes the chat template of prepared chats, and their tokenizer's settings if there are none; `ends` are ids that
    /// end an answer, in addition to those already known.
    pub fn add_chats(&mut self, prepared: Self, ends: &[u32]) {
        let known = self.end_ids();
        let new: Vec<u32> = ends.iter().copied().filter(|id| !known.contains(id)).collect();
        if !new.is_empty() {
            let all: Vec<u32> = known.into_iter().chain(new).collect();
            self.generation_config.insert("eos_token_id".into(), all.into());
        }
        if prepared.chat_template.is_some() {
            self.chat_template = prepared.chat_template;
        } else if let Some(named) = prepared.tokenizer_config.get("chat_template") {
            self.chat_template = None;
            self.tokenizer_config.insert("chat_template".into(), named.clone());
        }
        if self.tokenizer_config.is_empty() {
            self.tokenizer_config = prepared.tokenizer_config;
        }
    }

    /// Returns all ids that end a text, according to both configuration files.
    pub fn end_ids(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        for config in [&self.generation_config, &self.config] {
            for id in numbers(config.get("eos_token_id")) {
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
        }
        ids
    }

    /// Returns the id that starts a text without a prompt.
    pub fn bos_id(&self) -> Option<u32> {
        let configs = [&self.generation_config, &self.config];
        configs.iter().find_map(|config| numbers(config.get("bos_token_id")).first().copied())
    }

    /// Returns a special token, such as `bos_token`.
    pub fn token(&self, key: &str) -> Option<&str> {
        special_token(&self.tokenizer_config, &self.special_tokens_map, key)
    }

    /// Returns the chat template, from its own file or from the tokenizer's configuration.
    pub fn chat_template(&self) -> Option<&str> {
        if let Some(template) = &self.chat_template {
            return Some(template);
        }
        template_of(&self.tokenizer_config, "default")
    }
}

pub(crate) fn numbers(value: Option<&Value>) -> Vec<u32> {
    let number = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(number).collect(),
        Some(value) => number(value).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Returns the templates in a directory, by their names.
fn named_templates(dir: &Path) -> BTreeMap<String, String> {
    let template = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".jinja")?;
        Some((name.to_owned(), read(&path)?))
    };
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| template(file.path())).collect()
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(MAX_INHERITED_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_of_a_directory_are_those_of_one_list_in_the_tokenizers_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(CHAT_TEMPLATE, "plain");
        assert_eq!(Inherited::read(dir.path()).chat_template(), Some("plain"));
        std::fs::create_dir(dir.path().join(NAMED_TEMPLATES)).unwrap();
        for (name, text) in [("tool_use.jinja", "tools"), ("rag.jinja", "documents"), ("notes.txt", "")] {
            write(&format!("{NAMED_TEMPLATES}/{name}"), text);
        }
        let inherited = Inherited::read(dir.path());
        assert_eq!((inherited.chat_template(), &inherited.chat_template), (Some("plain"), &None));
        let named = |name: &str, template: &str| json!({ "name": name, "template": template });
        let all = [named("default", "plain"), named("rag", "documents"), named("tool_use", "tools")];
        assert_eq!(inherited.tokenizer_config["chat_template"], json!(all));
        write(&format!("{NAMED_TEMPLATES}/default.jinja"), "other");
        assert_eq!(Inherited::read(dir.path()).chat_template(), Some("other"));
        std::fs::remove_file(dir.path().join(CHAT_TEMPLATE)).unwrap();
        assert_eq!(Inherited::read(dir.path()).chat_template(), Some("other"));
    }
}
