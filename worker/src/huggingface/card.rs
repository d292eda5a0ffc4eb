//! The small files of an export: configuration files, tokenizer, and model card. Pure.

use serde_json::{Value, json};
use xlaunch_data::{QWEN2_CLASS, TOKENIZER_FILE, Tokenizer};
use xlaunch_spec::model::ModelShape;

use super::ModelError;
use super::config::{self, TokenIds};
use super::families::Family;
use super::writer::ExportDtype;
use crate::checkpoint::State;
use crate::inherited::{
    CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, Inherited, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG,
};
use crate::model::layout::Layout;

pub(super) const MODEL_CARD: &str = "README.md";
/// The tokenizer class that takes all settings from `tokenizer.json`.
const TOKENIZER_CLASS: &str = "PreTrainedTokenizerFast";

/// Returns names and contents of all files except weights. `config.json` comes last: without it nothing loads the
/// directory.
pub(crate) fn files(
    family: &Family,
    state: &State,
    layout: &Layout,
    dtype: ExportDtype,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<(&'static str, Vec<u8>)>, ModelError> {
    let shape = &state.model;
    let ids = TokenIds {
        end_of_text: tokenizer.and_then(Tokenizer::end_of_text),
        bos: tokenizer.and_then(Tokenizer::bos),
    };
    let inherited = inherited(state, tokenizer);
    let generation = config::generation(ids, &inherited.config, &inherited.generation_config);
    let mut files = tokenizer_files(shape, tokenizer, &inherited)?;
    files.push((GENERATION_CONFIG, text(&generation)));
    files.push((MODEL_CARD, model_card(family, state, layout, dtype, tokenizer).into_bytes()));
    let config = config::write(family, shape, ids, dtype.name());
    let config = config::inherit_config(config, &inherited.config, shape, ids);
    files.push((CONFIG, text(&config)));
    Ok(files)
}

/// Returns names and contents of the files of the tokenizer and its chat template.
pub(crate) fn tokenizer_files(
    shape: &ModelShape,
    tokenizer: Option<&Tokenizer>,
    inherited: &Inherited,
) -> Result<Vec<(&'static str, Vec<u8>)>, ModelError> {
    if let Some(tokenizer) = tokenizer.filter(|tokenizer| tokenizer.required_vocab() > shape.vocab) {
        let reason = format!("it has {} ids, but the model only {}", tokenizer.required_vocab(), shape.vocab);
        return Err(ModelError::Tokenizer { name: tokenizer.name().into(), reason });
    }
    let mut files = Vec::new();
    if let Some(tokenizer) = tokenizer {
        files.push((TOKENIZER_FILE, tokenizer.to_json().into_bytes()));
        files.push((TOKENIZER_CONFIG, text(&tokenizer_config(tokenizer, shape, inherited))));
    }
    if !inherited.special_tokens_map.is_empty() {
        files.push((SPECIAL_TOKENS_MAP, text(&json!(inherited.special_tokens_map))));
    }
    files.extend(inherited.chat_template.clone().map(|template| (CHAT_TEMPLATE, template.into_bytes())));
    Ok(files)
}

/// Returns the files that came with the initial weights. If the model was trained with a tokenizer that lacks their
/// special tokens, settings that name tokens are dropped.
pub(crate) fn inherited(state: &State, tokenizer: Option<&Tokenizer>) -> Inherited {
    let inherited = state.inherited.clone().unwrap_or_default();
    let known = |key: &str| match (inherited.token(key), tokenizer) {
        (Some(token), Some(tokenizer)) => tokenizer.added_id(token).is_some(),
        _ => true,
    };
    if ["bos_token", "eos_token", "pad_token", "unk_token"].into_iter().all(known) {
        return inherited;
    }
    let mut config = inherited.config;
    config.retain(|key, _| !key.ends_with("_token_id"));
    Inherited { config, ..Inherited::default() }
}

/// Returns whether `AutoTokenizer` of `transformers` 5 would give other ids: it does not read the class of the files.
pub(crate) fn is_replaced(family: &Family, tokenizer: &Tokenizer) -> bool {
    family.model_type == "qwen2" && tokenizer.is_changed_by(QWEN2_CLASS)
}

fn text(json: &Value) -> Vec<u8> {
    format!("{json:#}\n").into_bytes()
}

fn tokenizer_config(tokenizer: &Tokenizer, shape: &ModelShape, inherited: &Inherited) -> Value {
    let mut config = json!({
        "clean_up_tokenization_spaces": false,
        "model_max_length": shape.seq,
        "tokenizer_class": TOKENIZER_CLASS,
    });
    let token = |id: Option<u32>| id.map(|id| tokenizer.decode(&[id]));
    if let Some(end) = token(tokenizer.end_of_text()) {
        // Files that name the end of texts name all special tokens. Otherwise the class has defaults of its own.
        let default = Some(&end).filter(|_| inherited.token("eos_token").is_none());
        config["bos_token"] = json!(token(tokenizer.bos()).as_ref().or(default));
        config["eos_token"] = json!(end);
    }
    // This key names files of Python, which are not part of the export.
    for (key, value) in inherited.tokenizer_config.iter().filter(|(key, _)| *key != "auto_map") {
        config[key] = value.clone();
    }
    // Some classes write a template of their own; this one keeps the template of `tokenizer.json`, which the data was
    // prepared with.
    config["tokenizer_class"] = json!(TOKENIZER_CLASS);
    if inherited.tokenizer_config.contains_key("add_bos_token") {
        config["add_bos_token"] = json!(tokenizer.bos().is_some());
    }
    config
}

fn model_card(
    family: &Family,
    state: &State,
    layout: &Layout,
    dtype: ExportDtype,
    tokenizer: Option<&Tokenizer>,
) -> String {
    let shape = &state.model;
    let (arch, tag) = (family.title, family.model_type);
    let tokens = u128::from(state.sequences) * shape.seq as u128;
    let loss = state.val_loss.map_or("not measured".into(), |loss| format!("{loss:.4}"));
    let head = if shape.tied { "tied to the embedding" } else { "of its own" };
    let is_replaced = tokenizer.is_some_and(|tokenizer| is_replaced(family, tokenizer));
    let class = if is_replaced { TOKENIZER_CLASS } else { "AutoTokenizer" };
    let tokenizer = tokenizer.map_or("none", Tokenizer::name);
    let feed_forward = if shape.experts > 0 {
        let (experts, width, chosen) = (shape.experts, shape.expert_width(), shape.experts_per_token);
        let shared = match shape.shared_width() {
            0 => String::new(),
            width => format!(", and {width} shared by all tokens"),
        };
        format!("{experts} experts of {width}, {chosen} for each token{shared}")
    } else {
        shape.ffn.to_string()
    };
    let rows = [
        ("architecture", arch.to_owned()),
        ("parameters", layout.parameters().to_string()),
        ("layers", shape.layers.to_string()),
        ("width", shape.dim.to_string()),
        (
            "attention heads",
            format!("{}, {} for keys and values, of width {}", shape.heads, shape.kv_heads, shape.head_dim),
        ),
        ("feed-forward width", feed_forward),
        ("sequence length", shape.seq.to_string()),
        ("vocabulary", shape.vocab.to_string()),
        ("output head", head.into()),
        ("tokenizer", tokenizer.to_owned()),
        ("element type", dtype.name().into()),
        ("training steps", state.step.to_string()),
        ("training tokens", tokens.to_string()),
        (
            if state.reference.is_some() { "validation loss (preferences, DPO)" } else { "validation loss" },
            loss,
        ),
    ];
    // `|` ends a table cell, and the tokenizer's name is a file name.
    let cell = |text: &str| text.replace(['|', '\n', '\r'], " ");
    let rows: String = rows.iter().map(|(name, value)| format!("| {name} | {} |\n", cell(value))).collect();
    format!(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- xlaunch\n- {tag}\n---\n\n\
         # A {arch} model trained with xlaunch\n\n| | |\n| --- | --- |\n{rows}\n```python\n\
         from transformers import AutoModelForCausalLM, {class}\n\n\
         model = AutoModelForCausalLM.from_pretrained(\"PATH\")\n\
         tokenizer = {class}.from_pretrained(\"PATH\")\n```\n"
    )
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::model::PRESETS;

    use super::*;

    /// Returns the tokenizer's configuration of a model that came with this one.
    fn written(tokenizer: &Tokenizer, read: &Value) -> Value {
        let tokenizer_config = read.as_object().unwrap().clone();
        let inherited = Inherited { tokenizer_config, ..Inherited::default() };
        super::tokenizer_config(tokenizer, &PRESETS[0].1, &inherited)
    }

    #[test]
    fn classes_in_files_of_python_are_not_named() {
        let read = json!({"auto_map": {"AutoTokenizer": ["tokenization_m.M", null]}, "padding_side": "left"});
        let config = written(&Tokenizer::gpt2(), &read);
        assert_eq!((config.get("auto_map"), &config["padding_side"]), (None, &json!("left")));
    }

    #[test]
    fn first_token_is_added_only_to_files_that_leave_all_tokens_to_their_class() {
        let tokenizer = Tokenizer::open("gpt2").unwrap();
        let bos = |read: Value| written(&tokenizer, &read)["bos_token"].clone();
        assert_eq!(bos(json!({"model_max_length": 1024})), json!("<|endoftext|>"));
        assert_eq!(bos(json!({"eos_token": "<|endoftext|>"})), Value::Null);
        assert_eq!(bos(json!({"eos_token": "<|endoftext|>", "bos_token": "a"})), json!("a"));
    }
}
