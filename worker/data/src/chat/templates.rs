//! Finds the chat template of a tokenizer, and the files that are copied along with prepared chats.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::template::Template;
use crate::tokenizer::{Files, named_tokens};
use crate::{hash, open_regular, read_bounded, token_text};

/// Name of the file with a chat template.
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Name of a file that `transformers` prefers to [`TEMPLATE_FILE`].
const DEFAULT_TEMPLATE_FILE: &str = "additional_chat_templates/default.jinja";
/// Name of the file with the template of chats with tools, if they have one of their own.
const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";
/// Name of the file with the settings of a tokenizer.
pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";
const TOKENS_FILE: &str = "special_tokens_map.json";
/// Size limit of each of these files.
const MAX_TEMPLATE_BYTES: u64 = 16 << 20;

/// The templates of a tokenizer.
#[derive(Clone, Debug)]
pub struct Templates {
    /// The reason if there is none: only rows of texts can be written then.
    default: Result<Template, String>,
    /// Template of chats with tools, if they have another one.
    with_tools: Option<Template>,
    /// Tokens that the files of the tokenizer declare.
    pub(super) tokens: Vec<String>,
    /// Hash of the templates in hexadecimal.
    pub(crate) hash: String,
    /// Names and contents of the files that describe them.
    pub(crate) copies: Vec<(&'static str, String)>,
}

/// Reason why a tokenizer that has only a template for chats with tools writes no others.
const ONLY_WITH_TOOLS: &str = "there is no template `default`, and `tool_use` is for chats with `tools`";

/// The text of templates.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sources {
    default: Option<String>,
    with_tools: Option<String>,
}

impl Templates {
    /// Reads the template in `file`; otherwise that of `tokenizer`, which is the argument of
    /// [`Tokenizer::open`](crate::Tokenizer::open).
    ///
    /// # Errors
    /// The reason, and what to do.
    pub fn find(tokenizer: &str, file: Option<&Path>) -> Result<Self, String> {
        let dir = directory(tokenizer);
        let read_beside = |name: &str| {
            dir.as_deref().map_or(Ok(None), |dir| {
                let path = dir.join(name);
                read(&path, open_regular(&path))
            })
        };
        let mut config_text = read_beside(CONFIG_FILE)?;
        let mut config = object(CONFIG_FILE, config_text.as_deref())?;
        let special = object(TOKENS_FILE, read_beside(TOKENS_FILE)?.as_deref())?;
        let sources = match file {
            Some(path) => {
                // It may be a FIFO: `--chat-template <(program)`.
                let text = read(path, File::open(path))?
                    .ok_or_else(|| format!("--chat-template: {} does not exist", path.display()))?;
                Sources { default: Some(text), with_tools: None }
            }
            None => Sources::beside(&read_beside, &config)?,
        };
        let hash = sources.hash();
        if let (Some(default), Some(with_tools)) = (&sources.default, &sources.with_tools) {
            // Prepared data and models have both in their configuration.
            let named = |name: &str, template: &str| json!({ "name": name, "template": template });
            let templates = json!([named("default", default), named("tool_use", with_tools)]);
            if config.insert("chat_template".into(), templates.clone()) != Some(templates) {
                config_text = Some(Json::from(config.clone()).to_string());
            }
        }
        let tokens = || template_tokens(&config, &special);
        let mut copies = Vec::new();
        copies.extend(config_text.map(|text| (CONFIG_FILE, text)));
        // A list of templates is part of the configuration.
        if let (Some(default), None) = (&sources.default, &sources.with_tools) {
            copies.push((TEMPLATE_FILE, default.clone()));
        }
        let default = match sources.default {
            Some(default) => Ok(Template::new(&default, tokens())?),
            None if sources.with_tools.is_some() => Err(ONLY_WITH_TOOLS.into()),
            None => Err(missing(tokenizer, &template_names(&config))),
        };
        let with_tools = sources.with_tools.map(|source| Template::new(&source, tokens())).transpose()?;
        let files = dir.as_deref().map(Files::read).transpose().map_err(|error| error.to_string())?;
        let declared = files.iter().flat_map(Files::added_tokens).map(|token| token.content).collect();
        Ok(Self { default, with_tools, tokens: declared, hash, copies })
    }

    /// Returns the name of the file with the templates of a directory, and their hash; `None` if there are none.
    pub(crate) fn hash_in(dir: &Path) -> Result<Option<(&'static str, String)>, String> {
        let read_beside = |name: &str| read(&dir.join(name), open_regular(&dir.join(name)));
        let config = object(CONFIG_FILE, read_beside(CONFIG_FILE)?.as_deref())?;
        let sources = Sources::beside(&read_beside, &config)?;
        let name = if sources == Sources::of_config(&config) { CONFIG_FILE } else { TEMPLATE_FILE };
        Ok((sources != Sources::default()).then(|| (name, sources.hash())))
    }

    /// Returns whether a template may read a variable of this name.
    pub(crate) fn may_read(&self, name: &str) -> bool {
        self.default.iter().chain(&self.with_tools).any(|each| each.has_word(name))
    }

    /// Returns the template of chats without tools, or the reason why there is none, and of those with them.
    pub(crate) fn both(&self) -> (Result<&Template, &String>, Option<&Template>) {
        (self.default.as_ref(), self.with_tools.as_ref())
    }
}

impl Sources {
    /// Reads the templates of a tokenizer with these settings. `read` reads one of its files.
    fn beside(
        read: &dyn Fn(&str) -> Result<Option<String>, String>,
        config: &Map<String, Json>,
    ) -> Result<Self, String> {
        let default = match read(DEFAULT_TEMPLATE_FILE)? {
            None => read(TEMPLATE_FILE)?,
            default => default,
        };
        if default.is_none() {
            return Ok(Self::of_config(config));
        }
        Ok(Self { default, with_tools: read(TOOL_TEMPLATE_FILE)? })
    }

    fn hash(&self) -> String {
        // Earlier versions put a template that raises an exception in the place of a missing one.
        let no_default = || format!("{{{{ raise_exception('{ONLY_WITH_TOOLS}') }}}}");
        let mut hashed = self.default.clone().unwrap_or_else(no_default);
        if let Some(other) = &self.with_tools {
            hashed.extend(["\0", other.as_str()]);
        }
        hash(hashed.as_bytes())
    }

    /// Returns the templates in `tokenizer_config.json`.
    fn of_config(config: &Map<String, Json>) -> Self {
        let owned = |name| template_of(config, name).map(String::from);
        Self { default: owned("default"), with_tools: owned("tool_use") }
    }
}

/// Returns the special tokens that templates refer to by name, as in `transformers`: those with a name of their own,
/// such as `bos_token`, and those that a model adds. `config` is `tokenizer_config.json`, `map` is
/// `special_tokens_map.json`.
pub fn template_tokens(config: &Map<String, Json>, map: &Map<String, Json>) -> Vec<(String, String)> {
    let named = named_tokens(config, map).into_iter();
    named.filter_map(|(name, token)| Some((name.to_owned(), token_text(token)?.to_owned()))).collect()
}

/// Returns a chat template in `tokenizer_config.json`, which has one, the `default`, or several with names: a list, of
/// which the last of equal names counts, or an object.
pub fn template_of<'a>(config: &'a Map<String, Json>, name: &str) -> Option<&'a str> {
    match config.get("chat_template")? {
        Json::String(template) => (name == "default").then_some(template),
        Json::Array(list) => list.iter().rfind(|template| template["name"] == name)?["template"].as_str(),
        Json::Object(named) => named.get(name)?.as_str(),
        _ => None,
    }
}

/// Returns the names of the chat templates in `tokenizer_config.json`.
pub fn template_names(config: &Map<String, Json>) -> Vec<&str> {
    match config.get("chat_template") {
        Some(Json::Array(list)) => list.iter().filter_map(|template| template["name"].as_str()).collect(),
        Some(Json::Object(named)) => named.keys().map(String::as_str).collect(),
        _ => Vec::new(),
    }
}

fn missing(tokenizer: &str, names: &[&str]) -> String {
    if !names.is_empty() {
        return format!(
            "the tokenizer {tokenizer} has no chat template of the name `default`, only `{}`\nhelp: name a \
             file with one of them with --chat-template FILE",
            names.join("`, `")
        );
    }
    format!(
        "the tokenizer {tokenizer} has no chat template: there is neither a {TEMPLATE_FILE} nor a \
         `chat_template` in a {CONFIG_FILE} beside it\nhelp: name the directory of a chat model with \
         --tokenizer, or a template with --chat-template FILE"
    )
}

/// Returns the directory with the files of a tokenizer; `None` if it is built in.
fn directory(tokenizer: &str) -> Option<PathBuf> {
    let path = Path::new(tokenizer);
    match tokenizer {
        "bytes" | "gpt2" => None,
        _ if path.is_dir() => Some(path.into()),
        _ => Some(path.parent().unwrap_or(Path::new("")).into()),
    }
}

/// Reads a file that has just been opened; `None` if it does not exist.
fn read(path: &Path, file: io::Result<File>) -> Result<Option<String>, String> {
    let text = file.and_then(|file| read_bounded(file, MAX_TEMPLATE_BYTES));
    match text.and_then(|text| String::from_utf8(text).map_err(io::Error::other)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some).map_err(|error| format!("failed to read {}: {error}", path.display())),
    }
}

fn object(name: &str, text: Option<&str>) -> Result<Map<String, Json>, String> {
    let Some(text) = text else { return Ok(Map::new()) };
    serde_json::from_str(text)
        .map_err(|error| format!("{name} beside the tokenizer is not valid JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use minijinja::value::Value;

    use super::*;

    #[test]
    fn templates_see_the_tokens_that_a_model_adds() {
        let object = |value: Json| value.as_object().unwrap().clone();
        let mut config = object(json!({
            "eos_token": {"content": "</s>"}, "extra_special_tokens": {"turn_token": "<t>"}, "unk_token": "<u>",
            "model_specific_special_tokens": {"image_token": {"content": "<i>"}}, "pad_token": null,
            "sound_token": "<a>", "turn_token": "<other>", "add_bos_token": true,
        }));
        let shown = |config: &Map<String, Json>| {
            let map =
                object(json!({"eos_token": "x", "bos_token": "<s>", "end_token": "<e>", "unk_token": null}));
            let tokens: std::collections::BTreeMap<_, _> =
                template_tokens(config, &map).into_iter().collect();
            tokens.into_iter().map(|(name, token)| format!("{name} {token}")).collect::<Vec<_>>()
        };
        let own = ["image_token <i>", "sound_token <a>", "turn_token <t>"];
        let old = [&["bos_token <s>", "end_token <e>", "eos_token x"][..], &own].concat();
        assert_eq!(shown(&config), old);
        // Newer files list all added tokens, and have no use for the other file.
        config.insert("added_tokens_decoder".into(), json!({}));
        assert_eq!(shown(&config), [&["eos_token </s>"][..], &own, &["unk_token <u>"]].concat());
    }

    #[test]
    fn template_of_chats_with_tools_has_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs_err::write(dir.path().join(name), text).unwrap();
        fs_err::create_dir(dir.path().join("additional_chat_templates")).unwrap();
        write(TEMPLATE_FILE, "plain");
        write(TOOL_TEMPLATE_FILE, "tools");
        write(CONFIG_FILE, r#"{"eos_token": "</s>"}"#);
        let found = Templates::find(&dir.path().display().to_string(), None).unwrap();
        let none = Value::from(());
        let (default, with_tools) = found.both();
        assert_eq!(default.unwrap().render(&none, &none, false).unwrap(), "plain");
        assert_eq!(with_tools.unwrap().render(&none, &none, false).unwrap(), "tools");
        // Both travel with the data.
        let [(CONFIG_FILE, config)] = &found.copies[..] else { panic!("{:?}", found.copies) };
        let config = object(CONFIG_FILE, Some(config)).unwrap();
        assert_eq!(
            template_of(&config, "default").zip(template_of(&config, "tool_use")),
            Some(("plain", "tools"))
        );
        assert_eq!(config["eos_token"], "</s>");
        for name in ["tool_use", "rag"] {
            for named in [json!([{"name": name, "template": "tools"}]), json!({ name: "tools" })] {
                let bare = tempfile::tempdir().unwrap();
                let config = json!({ "chat_template": named });
                fs_err::write(bare.path().join(CONFIG_FILE), config.to_string()).unwrap();
                let found = Templates::find(&bare.path().display().to_string(), None).unwrap();
                let (default, with_tools) = found.both();
                let with_tools = with_tools.map(|template| template.render(&none, &none, false).unwrap());
                assert_eq!(with_tools.as_deref(), (name == "tool_use").then_some("tools"));
                assert_eq!(found.copies.len(), 1);
                let error = default.unwrap_err();
                assert!(error.contains("`default`") && error.contains(&format!("`{name}`")), "{error}");
            }
        }
        let only = Templates::find("bytes", Some(&dir.path().join(TEMPLATE_FILE))).unwrap();
        assert!(only.both().1.is_none());
    }

    #[test]
    fn template_is_the_one_that_transformers_takes() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs_err::write(dir.path().join(name), text).unwrap();
        let found = || {
            let found = Templates::find(&dir.path().display().to_string(), None).unwrap();
            let none = Value::from(());
            let text = |template: &Template| template.render(&none, &none, false).unwrap();
            let (default, with_tools) = found.both();
            (text(default.unwrap()), with_tools.map(text))
        };
        let plain = |text: &str| (text.to_owned(), None);
        let named = |name: &str, template: &str| json!({ "name": name, "template": template });
        for (templates, expected) in [
            (json!({"default": "a", "tool_use": "b"}), ("a".to_owned(), Some("b".to_owned()))),
            (json!([named("default", "a"), named("default", "b")]), plain("b")),
        ] {
            write(CONFIG_FILE, &json!({ "chat_template": templates }).to_string());
            assert_eq!(found(), expected);
        }
        write(TEMPLATE_FILE, "c");
        assert_eq!(found(), plain("c"));
        fs_err::create_dir(dir.path().join("additional_chat_templates")).unwrap();
        write(DEFAULT_TEMPLATE_FILE, "d");
        assert_eq!(found(), plain("d"));
    }
}
