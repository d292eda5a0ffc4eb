//! Settings in the files of a model: the form of prompts, the ends of texts, and sampling.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value};
use xlaunch_data::chat::{self, Template, template_names, template_tokens};
use xlaunch_data::{Tokenizer, TokenizerError};
use xlaunch_spec::refusal::Refusal;

use super::{Sampling, Vocabulary};
use crate::inherited::{Inherited, numbers};
use crate::pretrained::Source;

/// Number of tokens to draw from if a directory does not set it; the default of Python's `transformers`.
const DEFAULT_TOP_K: usize = 50;
/// Maximum number of characters of a value in a warning.
const MAX_VALUE_CHARS: usize = 40;
/// Maximum number of tokens per text if neither the user nor the directory sets it.
const DEFAULT_MAX_TOKENS: usize = 128;

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Plain text.
    Text(String),
    /// A list of messages, which the model's chat template turns into a text, with further variables of the template
    /// by name, or none.
    Chat { messages: chat::Value, variables: chat::Value },
}

/// Sampling settings of a user, which take precedence over those of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "see `Sampling`")]
pub struct SamplingOverrides {
    pub temperature: Option<f64>,
    /// 0 draws from all tokens.
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
}

/// Settings of a model.
#[derive(Clone, Debug)]
pub struct Settings {
    pub tokenizer: Tokenizer,
    pub vocabulary: Vocabulary,
    inherited: Option<Inherited>,
    /// The model's chat template, once a chat has needed it.
    template: OnceLock<Result<Template, String>>,
    is_run: bool,
    raw: bool,
}

impl Settings {
    /// Finds a model and its settings, without reading its weights. `note` receives lines for the user; the others are
    /// as in [`Source::find`], [`Source::with_adapter`], [`Source::tokenizer`] and [`new`](Self::new).
    pub(crate) fn open(
        model: &Path,
        adapter: Option<&Path>,
        tokenizer: Option<&str>,
        raw: bool,
        user: SamplingOverrides,
        note: &mut dyn FnMut(&str),
    ) -> Result<(Source, Self), Refusal> {
        let source = Source::find(model)?.with_adapter(adapter)?;
        source.notes.iter().for_each(|line| note(line));
        let tokenizer = source.tokenizer(tokenizer)?;
        let settings = Self::new(&source, tokenizer, raw);
        if let Some(line) = settings.warning(settings.sampling(user).temperature > 0.0) {
            note(&line);
        }
        settings.tokenizer.loading_warnings().iter().for_each(|line| note(line));
        Ok((source, settings))
    }

    /// Returns the settings of `source`. `raw`: prompts are plain text, and its files do not matter.
    pub fn new(source: &Source, tokenizer: Tokenizer, raw: bool) -> Self {
        let (inherited, is_run) = (source.inherited.clone(), source.is_run);
        let vocabulary = vocabulary(source, &tokenizer, raw);
        Self { tokenizer, vocabulary, inherited, template: OnceLock::new(), is_run, raw }
    }

    #[cfg(test)]
    pub(crate) fn for_test(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Self {
        Self { tokenizer, vocabulary, inherited: None, template: OnceLock::new(), is_run: true, raw: false }
    }

    /// Returns the ids of a prompt. An error is the reason.
    pub fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, String> {
        let failed = |error: TokenizerError| error.to_string();
        let tokens = match prompt {
            Prompt::Text(text) if self.raw => self.tokenizer.encode(text).map_err(failed)?,
            Prompt::Text(text) => self.tokenizer.encode_prompt(text, true).map_err(failed)?,
            // The template writes the beginning of the sequence itself.
            Prompt::Chat { messages, variables } => {
                let text = self.chat(messages, variables)?;
                self.tokenizer.encode_prompt(&text, false).map_err(failed)?
            }
        };
        if tokens.is_empty() { Ok(vec![self.first_id().map_err(failed)?]) } else { Ok(tokens) }
    }

    /// Returns the id that an empty prompt consists of: `bos_token_id` of a directory in Hugging Face's layout, as in
    /// `transformers`; otherwise the end-of-text id, which starts documents, or a line feed.
    fn first_id(&self) -> Result<u32, TokenizerError> {
        let inherited = self.inherited.as_ref().filter(|_| !self.raw && !self.is_run);
        let known = |id: &u32| usize::try_from(*id).is_ok_and(|id| id < self.vocabulary.size);
        let bos = inherited.and_then(Inherited::bos_id).filter(known);
        match bos.or(self.tokenizer.end_of_text()) {
            Some(id) => Ok(id),
            None => Ok(self.tokenizer.encode("\n")?.first().copied().unwrap_or(0)),
        }
    }

    /// Renders a chat with the model's own template, up to the point where the model answers.
    fn chat(&self, messages: &chat::Value, variables: &chat::Value) -> Result<String, String> {
        let template = self.template.get_or_init(|| self.chat_template());
        template.as_ref().map_err(Clone::clone)?.render_prompt(messages, variables)
    }

    fn chat_template(&self) -> Result<Template, String> {
        let inherited = self
            .inherited
            .as_ref()
            .ok_or("the model has no chat template, as it was trained from random weights")?;
        let template = inherited.chat_template().ok_or_else(|| {
            let names = template_names(&inherited.tokenizer_config);
            if names.is_empty() {
                "the model has no chat template".into()
            } else {
                format!("the model has no chat template of the name `default`, only `{}`", names.join("`, `"))
            }
        })?;
        Template::new(template, template_tokens(&inherited.tokenizer_config, &inherited.special_tokens_map))
    }

    /// Returns `generation_config.json` of a directory in Hugging Face's layout; empty if it has no such file.
    fn generation_config(&self) -> Option<&Map<String, Value>> {
        let config = self.inherited.as_ref().map(|inherited| &inherited.generation_config);
        config.filter(|_| !self.raw && !self.is_run)
    }

    /// Returns a warning about settings of the model that have no effect. `samples`: whether tokens are drawn.
    pub fn warning(&self, samples: bool) -> Option<String> {
        let names = without_effect(self.generation_config()?, self.vocabulary.size, samples);
        let verbs = if names.len() == 1 { ("is", "has") } else { ("are", "have") };
        (!names.is_empty()).then(|| {
            let names = names.join(", ");
            format!(
                "warning: {names} of generation_config.json {} not supported and {} no effect",
                verbs.0, verbs.1
            )
        })
    }

    /// Returns the sampling settings: those of the user, otherwise those of the directory's `generation_config.json`.
    /// Without `do_sample`, or without the file, decoding is greedy, as in `transformers`.
    pub fn sampling(&self, user: SamplingOverrides) -> Sampling {
        let SamplingOverrides { temperature, top_k, top_p } = user;
        let limit = |top_k: Option<usize>| top_k.filter(|count| *count > 0);
        let plain = Sampling {
            temperature: temperature.unwrap_or(1.0),
            top_k: limit(top_k),
            top_p: top_p.unwrap_or(1.0),
        };
        let Some(config) = self.generation_config() else { return plain };
        if config.get("do_sample").and_then(Value::as_bool) != Some(true) {
            let any = user != SamplingOverrides::default();
            return if any { plain } else { Sampling { temperature: 0.0, ..plain } };
        }
        let valid = |key: &str| config.get(key).filter(|value| is_valid(key, value));
        let number = |key: &str| valid(key).and_then(Value::as_f64);
        let count = valid("top_k").map_or(Some(DEFAULT_TOP_K as u64), Value::as_u64);
        let count = count.and_then(|count| usize::try_from(count).ok());
        Sampling {
            temperature: temperature.or(number("temperature")).unwrap_or(1.0),
            top_k: limit(top_k.or(count)),
            top_p: top_p.or(number("top_p")).unwrap_or(1.0),
        }
    }

    /// Returns the default of the maximum number of tokens after a prompt of `prompt` tokens. As in `transformers`, the
    /// `max_length` of `generation_config.json` includes the prompt, and `max_new_tokens` takes precedence.
    pub fn max_tokens(&self, prompt: usize) -> usize {
        let count = |key: &str| {
            let value = self.generation_config()?.get(key).filter(|value| is_valid(key, value))?;
            usize::try_from(value.as_u64()?).ok()
        };
        let rest = || Some(count("max_length")?.saturating_sub(prompt));
        count("max_new_tokens").or_else(rest).unwrap_or(DEFAULT_MAX_TOKENS)
    }

    /// Warns of prompts of these numbers of tokens after which [`max_tokens`](Self::max_tokens) leaves no text.
    pub(super) fn no_room(&self, prompts: impl Iterator<Item = usize>) -> Option<String> {
        let full = prompts.filter(|tokens| self.max_tokens(*tokens) == 0).count();
        (full > 0).then(|| {
            format!(
                "warning: `max_length` of generation_config.json leaves no room for texts after {full} prompts; set \
                 --max-tokens"
            )
        })
    }
}

/// Returns whether a value of a key that is read is possible. Those of other keys count as valid.
fn is_valid(key: &str, value: &Value) -> bool {
    let number = value.as_f64();
    match key {
        _ if value.is_null() => true,
        "temperature" => number.is_some_and(|number| number >= 0.0),
        "top_p" => number.is_some_and(|number| (0.0..=1.0).contains(&number)),
        "top_k" => value.is_u64(),
        "do_sample" => value.is_boolean(),
        "max_length" | "max_new_tokens" => value.as_u64().is_some_and(|count| count > 0),
        "eos_token_id" => match value {
            Value::Array(ids) => ids.iter().all(|id| is_valid(key, id)),
            id => id.is_i64() || id.is_u64(),
        },
        _ => true,
    }
}

/// Returns the keys of `generation_config.json` that would change the texts of `transformers`, but not those here, for
/// messages: with their value if the key is read, but not this value. `vocab`: number of the model's ids. `samples`:
/// whether tokens are drawn.
fn without_effect(config: &Map<String, Value>, vocab: usize, samples: bool) -> Vec<String> {
    const READ_SETTINGS: [&str; 4] = ["do_sample", "eos_token_id", "max_length", "max_new_tokens"];
    const READ_SAMPLING_SETTINGS: [&str; 3] = ["temperature", "top_k", "top_p"];
    // Each with the number that asks for nothing; `null` and `false` do as well, and lists that are empty.
    const NO_NUMBER: f64 = f64::NAN;
    const IGNORED_SETTINGS: [(&str, f64); 24] = [
        ("bad_words_ids", 0.0),
        ("begin_suppress_tokens", 0.0),
        ("constraints", NO_NUMBER),
        ("dola_layers", 0.0),
        ("encoder_no_repeat_ngram_size", 0.0),
        ("encoder_repetition_penalty", 1.0),
        ("exponential_decay_length_penalty", 0.0),
        ("force_words_ids", NO_NUMBER),
        ("forced_bos_token_id", -1.0),
        ("forced_eos_token_id", -1.0),
        ("guidance_scale", 1.0),
        ("max_time", NO_NUMBER),
        ("min_length", 0.0),
        ("min_new_tokens", 0.0),
        ("no_repeat_ngram_size", 0.0),
        ("num_beams", 1.0),
        ("num_return_sequences", 1.0),
        ("penalty_alpha", 0.0),
        ("repetition_penalty", 1.0),
        ("sequence_bias", 0.0),
        ("stop_strings", 0.0),
        ("suppress_tokens", 0.0),
        ("token_healing", NO_NUMBER),
        ("watermarking_config", 0.0),
    ];
    const IGNORED_SAMPLING_SETTINGS: [(&str, f64); 5] = [
        ("epsilon_cutoff", 0.0),
        ("eta_cutoff", 0.0),
        ("min_p", 0.0),
        ("top_h", NO_NUMBER),
        ("typical_p", 1.0),
    ];
    let reads_sampling = config.get("do_sample").and_then(Value::as_bool) == Some(true);
    let exceeds = |key: &str, value: &Value| {
        key == "eos_token_id" && numbers(Some(value)).iter().any(|id| *id as usize >= vocab)
    };
    let asks_for_nothing = |value: &Value, neutral: f64| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        value => value.as_f64() == Some(neutral),
    };
    let keys = IGNORED_SETTINGS.iter().chain(IGNORED_SAMPLING_SETTINGS.iter().filter(|_| samples));
    let ignored = keys
        .filter(|(key, neutral)| config.get(*key).is_some_and(|value| !asks_for_nothing(value, *neutral)))
        .map(|(key, _)| format!("`{key}`"));
    let keys = READ_SETTINGS.iter().chain(READ_SAMPLING_SETTINGS.iter().filter(|_| reads_sampling));
    let invalid = keys.filter_map(|key| {
        let value =
            config.get(*key).filter(|value| !is_valid(key, value) || exceeds(key, value))?.to_string();
        Some(format!("`{key}: {}`", value.chars().take(MAX_VALUE_CHARS).collect::<String>()))
    });
    let mut names: Vec<String> = ignored.chain(invalid).collect();
    names.sort_unstable();
    names
}

fn vocabulary(source: &Source, tokenizer: &Tokenizer, raw: bool) -> Vocabulary {
    let own = || tokenizer.end_of_text().into_iter().collect();
    match &source.inherited {
        Some(inherited) if !raw => {
            let says = |config: &Map<String, Value>| config.contains_key("eos_token_id");
            let mut ends = inherited.end_ids();
            if source.is_run || !(says(&inherited.config) || says(&inherited.generation_config)) {
                ends.extend(tokenizer.end_of_text());
            }
            Vocabulary { size: if source.is_run { tokenizer.vocab() } else { source.shape.vocab }, ends }
        }
        _ => Vocabulary { size: tokenizer.vocab(), ends: own() },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_without_effect_are_named() {
        let found = |config: Value| {
            without_effect(config.as_object().unwrap(), 256, config["do_sample"] == Value::Bool(true))
        };
        assert_eq!(
            found(json!({"repetition_penalty": 1.1, "num_beams": 4})),
            ["`num_beams`", "`repetition_penalty`"]
        );
        assert_eq!(
            found(json!({"stop_strings": "a", "suppress_tokens": [1]})),
            ["`stop_strings`", "`suppress_tokens`"]
        );
        assert_eq!(
            found(json!({"dola_layers": "high", "penalty_alpha": 0.6, "watermarking_config": {"bias": 2}})),
            ["`dola_layers`", "`penalty_alpha`", "`watermarking_config`"]
        );
        assert_eq!(
            found(json!({
                "encoder_repetition_penalty": 1.2, "max_time": 0, "num_return_sequences": 2, "token_healing": true,
                "force_words_ids": [[1]], "constraints": [{}], "prompt_lookup_num_tokens": 3,
            })),
            [
                "`constraints`",
                "`encoder_repetition_penalty`",
                "`force_words_ids`",
                "`max_time`",
                "`num_return_sequences`",
                "`token_healing`",
            ]
        );
        assert_eq!(found(json!({"do_sample": true, "min_p": 0.1, "top_h": 1.0})), ["`min_p`", "`top_h`"]);
        assert_eq!(found(json!({"do_sample": false, "min_p": 0.1, "top_h": 0.4})), [""; 0]);
        let drawn_by_option = json!({"min_p": 0.1, "temperature": -1});
        assert_eq!(without_effect(drawn_by_option.as_object().unwrap(), 256, true), ["`min_p`"]);
        let neutral = json!({
            "do_sample": true, "repetition_penalty": 1, "num_beams": 1, "typical_p": 1.0, "min_p": null, "top_k": 20,
            "bad_words_ids": [], "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "max_time": null,
            "num_return_sequences": 1, "token_healing": false, "top_h": null, "temperature": 0.6, "top_p": 0.95,
            "eos_token_id": [1, -1], "max_length": 20, "max_new_tokens": null,
        });
        assert_eq!(found(neutral), [""; 0]);
        let impossible = json!({
            "do_sample": true, "temperature": -1, "top_p": 1.5, "top_k": -1, "eos_token_id": [1, "5"],
            "max_length": 0, "max_new_tokens": 1.5,
        });
        let names = [
            "`eos_token_id: [1,\"5\"]`",
            "`max_length: 0`",
            "`max_new_tokens: 1.5`",
            "`temperature: -1`",
            "`top_k: -1`",
            "`top_p: 1.5`",
        ];
        assert_eq!(found(impossible), names);
        let names = ["`do_sample: \"yes\"`", "`eos_token_id: [255,256]`"];
        assert_eq!(found(json!({"do_sample": "yes", "eos_token_id": [255, 256]})), names);
    }

    #[test]
    fn empty_prompt_is_the_first_id_of_the_model() {
        let first = |generation_config: Value, config: Value, is_run: bool| {
            let [generation_config, config] =
                [generation_config, config].map(|config| config.as_object().unwrap().clone());
            let inherited = Some(Inherited { generation_config, config, ..Inherited::default() });
            let vocabulary = Vocabulary { size: 50_257, ends: Vec::new() };
            let settings =
                Settings { inherited, is_run, ..Settings::for_test(Tokenizer::gpt2(), vocabulary) };
            settings.tokens(&Prompt::Text(String::new())).unwrap()
        };
        assert_eq!(first(json!({"bos_token_id": 1}), json!({"bos_token_id": 2}), false), [1]);
        assert_eq!(first(json!({"bos_token_id": null}), json!({"bos_token_id": 2}), false), [2]);
        assert_eq!(first(json!({}), json!({}), false), [50_256]);
        assert_eq!(first(json!({"bos_token_id": 50_257}), json!({}), false), [50_256], "it has no such id");
        assert_eq!(first(json!({}), json!({"bos_token_id": 2}), true), [50_256], "documents start with it");
    }

    #[test]
    fn model_in_hugging_faces_layout_is_decoded_greedily_unless_it_samples() {
        let settings = |generation_config: Value, is_run: bool| {
            let generation_config = generation_config.as_object().unwrap().clone();
            let inherited = Some(Inherited { generation_config, ..Inherited::default() });
            let (tokenizer, vocabulary) = (Tokenizer::bytes(), Vocabulary { size: 256, ends: Vec::new() });
            Settings { inherited, is_run, ..Settings::for_test(tokenizer, vocabulary) }
        };
        let none = SamplingOverrides::default();
        let temperature = |settings: &Settings, user| Some(settings.sampling(user).temperature);
        // The first is also what a directory without the file has.
        for config in [json!({}), json!({"_from_model_config": true, "eos_token_id": 2, "temperature": 0.7})]
        {
            let directory = settings(config.clone(), false);
            assert_eq!(temperature(&directory, none), Some(0.0), "{config}");
            assert_eq!(
                temperature(&directory, SamplingOverrides { top_k: Some(4), ..none }),
                Some(1.0),
                "{config}"
            );
            assert_eq!(temperature(&settings(config.clone(), true), none), Some(1.0), "{config}");
            assert_eq!(temperature(&Settings { raw: true, ..directory }, none), Some(1.0), "{config}");
        }
        let samples = settings(json!({"do_sample": true, "temperature": 0.7, "top_k": -1}), false);
        assert_eq!(samples.sampling(none), Sampling { temperature: 0.7, top_k: Some(50), top_p: 1.0 });
        let all = SamplingOverrides { top_k: Some(0), ..none };
        for settings in [&samples, &settings(json!({}), true)] {
            assert_eq!(settings.sampling(all).top_k, None);
        }
        for (config, expected) in [
            (json!({}), 128),
            (json!({"max_length": 20}), 15),
            (json!({"max_length": 4}), 0),
            (json!({"max_length": 20, "max_new_tokens": 7}), 7),
            (json!({"max_length": null, "max_new_tokens": 0}), 128),
        ] {
            let found = settings(config.clone(), false);
            assert_eq!(found.max_tokens(5), expected, "{config}");
            assert_eq!(found.no_room([1, 5].into_iter()).is_some(), expected == 0, "{config}");
            assert_eq!(settings(config, true).max_tokens(5), 128);
        }
    }
}
