//! Classes of Python's `transformers` 5 that replace the normalizer and the pre-tokenizer of a `tokenizer.json`. Pure.

use serde_json::{Map, Value, json};

use super::{METASPACE, Tokenizer};

/// The class for models of the type `qwen2`, whatever their files name.
pub const QWEN2_CLASS: &str = "Qwen2Tokenizer";

/// Types of models whose tokenizers are read from the file alone, whatever class they name.
const FILE_ONLY: [&str; 12] = [
    "ernie4_5",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "stablelm",
];
/// Classes that models of any type may name.
const CLASSES: [&str; 11] = [
    QWEN2_CLASS,
    "GPT2Tokenizer",
    "CodeGenTokenizer",
    "GPTNeoXTokenizer",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "CohereTokenizer",
    "T5Tokenizer",
    "XLMRobertaTokenizer",
    "XGLMTokenizer",
];
/// Splits texts in Qwen2's class.
const QWEN2_REGEX: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The files next to a tokenizer, as far as they change how `AutoTokenizer` of `transformers` 5 loads it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loading {
    /// The class that replaces parts of the file.
    pub(super) class: Option<&'static str>,
    /// Whether that class puts a space before a text; `None` for its default.
    pub(super) add_prefix_space: Option<bool>,
    /// True if special tokens in prompts and chats are encoded as text.
    pub(super) split_special_tokens: bool,
}

impl Tokenizer {
    /// Returns warnings if `AutoTokenizer` of `transformers` 5 may give other ids.
    pub fn loading_warnings(&self) -> Vec<String> {
        let class = self.replaced_by().map(|class| {
            format!(
                "warning: `AutoTokenizer` of transformers 5 loads this tokenizer as `{class}`, which replaces \
                 parts of it, and may give other ids than here\nhelp: load it with `PreTrainedTokenizerFast`"
            )
        });
        let split = self.loading.split_special_tokens.then(|| {
            "warning: `AutoTokenizer` of transformers 5 encodes special tokens in prompts and chats as text, as \
             `split_special_tokens` of tokenizer_config.json asks for; here they become ids\nhelp: remove that key"
                .to_owned()
        });
        class.into_iter().chain(split).collect()
    }

    /// Returns the class that `AutoTokenizer` of `transformers` 5 loads this tokenizer as, if that gives other ids.
    fn replaced_by(&self) -> Option<&'static str> {
        self.loading.class.filter(|class| self.is_changed_by(class))
    }

    /// Returns whether this class replaces parts of the tokenizer by others.
    pub fn is_changed_by(&self, class: &str) -> bool {
        let prefix = self.loading.add_prefix_space;
        serde_json::from_str(&self.inner.json).is_ok_and(|file| changes(class, &file, prefix))
    }
}

/// Returns the class that `AutoTokenizer` takes for a model of this type whose files name `declared`; `None` if it
/// takes everything from the `tokenizer.json`.
pub(super) fn loaded(declared: Option<&str>, model_type: Option<&str>) -> Option<&'static str> {
    let declared = declared.map(|name| name.strip_suffix("Fast").unwrap_or(name));
    match (model_type, declared) {
        (Some("qwen2"), _) => Some(QWEN2_CLASS),
        (Some(model), _) if FILE_ONLY.contains(&model) => None,
        (_, Some(name)) => CLASSES.into_iter().find(|class| *class == name),
        (Some("qwen3" | "qwen2_moe" | "qwen3_moe"), None) => Some(QWEN2_CLASS),
        (Some("gpt2" | "phi" | "starcoder2"), None) => Some("GPT2Tokenizer"),
        (Some("gpt_neox" | "olmoe"), None) => Some("GPTNeoXTokenizer"),
        (Some("gemma" | "gemma2" | "gemma3" | "gemma3_text"), None) => Some("GemmaTokenizer"),
        (Some("cohere" | "cohere2"), None) => Some("CohereTokenizer"),
        _ => None,
    }
}

/// Returns whether this class replaces parts of the file by others. `add_prefix_space`: see [`Loading`].
fn changes(class: &str, file: &Map<String, Value>, add_prefix_space: Option<bool>) -> bool {
    // The classes of BPE models read the pieces as if they were tokens of such a model, the others have words of their
    // own.
    if file.get("model").is_some_and(|model| model["type"] == "Unigram") {
        return true;
    }
    let byte_level = |use_regex| {
        json!({
            "type": "ByteLevel", "add_prefix_space": add_prefix_space == Some(true), "trim_offsets": true,
            "use_regex": use_regex
        })
    };
    let split =
        json!({"type": "Split", "pattern": {"Regex": QWEN2_REGEX}, "behavior": "Isolated", "invert": false});
    let nfc = json!({"type": "NFC"});
    let part = |name: &str| comparable(file.get(name).unwrap_or(&Value::Null));
    let (own_normalizer, own_pre_tokenizer) = (part("normalizer"), part("pre_tokenizer"));
    match class {
        // Byte-level files are read as they are.
        "LlamaTokenizer"
            if file.get("pre_tokenizer").is_some_and(|own| own.to_string().contains("\"ByteLevel\"")) =>
        {
            return false;
        }
        "LlamaTokenizer" | "CodeLlamaTokenizer" => {
            let is_metaspace =
                own_pre_tokenizer["type"] == "Metaspace" && own_pre_tokenizer["split"] == false;
            let has_prefix = own_pre_tokenizer["prepend_scheme"] != "never";
            return !own_normalizer.is_null()
                || !is_metaspace
                || has_prefix != add_prefix_space.unwrap_or(true);
        }
        // Its pre-tokenizer splits at spaces, of which its normalizer leaves none.
        "GemmaTokenizer" => {
            let replace =
                json!({"type": "Replace", "pattern": {"String": " "}, "content": METASPACE.to_string()});
            let is_split =
                own_pre_tokenizer["type"] == "Split" && own_pre_tokenizer["pattern"]["String"] == " ";
            return own_normalizer != replace || !(own_pre_tokenizer.is_null() || is_split);
        }
        _ => {}
    }
    let digits = json!({"type": "Digits", "individual_digits": true});
    let (normalizer, pre_tokenizer) = match class {
        QWEN2_CLASS => (nfc, json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})),
        "GPTNeoXTokenizer" => (nfc, byte_level(true)),
        "CohereTokenizer" => (nfc, json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]})),
        _ => (Value::Null, byte_level(true)),
    };
    own_normalizer != normalizer || own_pre_tokenizer != comparable(&pre_tokenizer)
}

/// Returns a part of a file with one form for what has several: sequences, and settings that may be left out.
fn comparable(part: &Value) -> Value {
    let mut part = part.clone();
    for list in ["normalizers", "pretokenizers"] {
        match part.get(list).and_then(Value::as_array).map(Vec::as_slice) {
            Some([]) => return Value::Null,
            Some([only]) => return comparable(only),
            Some(parts) => part[list] = parts.iter().map(comparable).collect(),
            None => {}
        }
    }
    if part["type"] == "ByteLevel" {
        // This one changes no ids.
        part["trim_offsets"] = true.into();
        part["use_regex"] = part.get("use_regex").cloned().unwrap_or(true.into());
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether a class changes a file whose neighbours do not set `add_prefix_space`.
    fn changes(class: &str, file: &Map<String, Value>) -> bool {
        super::changes(class, file, None)
    }

    #[test]
    fn classes_that_replace_parts_of_a_file_are_found() {
        assert_eq!(loaded(Some("GPT2TokenizerFast"), Some("llama")), Some("GPT2Tokenizer"));
        assert_eq!(loaded(Some("PreTrainedTokenizerFast"), Some("qwen3")), None);
        assert_eq!(loaded(Some("PreTrainedTokenizerFast"), Some("qwen2")), Some(QWEN2_CLASS));
        assert_eq!(loaded(None, Some("qwen3")), Some(QWEN2_CLASS));
        assert_eq!(loaded(Some("GPT2Tokenizer"), Some("olmo2")), None);
        assert_eq!(loaded(Some("GPT2Tokenizer"), Some("ernie4_5")), None);
        assert_eq!(loaded(Some("GPT2Tokenizer"), Some("exaone4")), Some("GPT2Tokenizer"));
        let file = |pre_tokenizer: Value| {
            Map::from_iter([("normalizer".into(), Value::Null), ("pre_tokenizer".into(), pre_tokenizer)])
        };
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let sequence = |parts: &[&Value]| json!({"type": "Sequence", "pretokenizers": parts});
        assert!(!changes("GPT2Tokenizer", &file(byte_level.clone())));
        assert!(!changes("GPT2Tokenizer", &file(sequence(&[&byte_level]))));
        assert!(changes("GPT2Tokenizer", &file(sequence(&[&digits, &byte_level]))));
        assert!(changes("GPTNeoXTokenizer", &file(byte_level.clone())));
        assert!(changes(QWEN2_CLASS, &file(byte_level)));
        let qwen2 = json!({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN2_REGEX}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]}});
        assert!(!changes(QWEN2_CLASS, qwen2.as_object().unwrap()));
        let unigram = json!({"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first", "split": false},
            "model": {"type": "Unigram"}});
        assert!(changes("LlamaTokenizer", unigram.as_object().unwrap()));
        assert_eq!(loaded(Some("T5TokenizerFast"), Some("llama")), Some("T5Tokenizer"));
    }

    /// The texts that differ are those of `transformers` 5.24.
    #[test]
    fn classes_of_sentencepiece_replace_parts_of_a_file() {
        let file = |normalizer: Value, pre_tokenizer: Value| {
            Map::from_iter([("normalizer".into(), normalizer), ("pre_tokenizer".into(), pre_tokenizer)])
        };
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
        let llama2 = file(json!({"type": "Sequence", "normalizers": [prepend, replace]}), Value::Null);
        let metaspace = |split: bool| json!({"type": "Metaspace", "prepend_scheme": "first", "split": split});
        let (saved_by_5, split) = (file(Value::Null, metaspace(false)), file(Value::Null, metaspace(true)));
        let spaces = json!({
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false
        });
        let (gemma, old_gemma) = (file(replace.clone(), spaces), file(replace, Value::Null));
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        let bytes = file(Value::Null, byte_level.clone());
        let digits = json!({"type": "Digits", "individual_digits": true});
        let cohere =
            file(json!({"type": "NFC"}), json!({"type": "Sequence", "pretokenizers": [digits, byte_level]}));
        for (class, same) in [
            ("LlamaTokenizer", vec![&saved_by_5, &bytes, &cohere]),
            ("CodeLlamaTokenizer", vec![&saved_by_5]),
            ("GemmaTokenizer", vec![&gemma, &old_gemma]),
            ("CohereTokenizer", vec![&cohere]),
        ] {
            for file in [&llama2, &saved_by_5, &split, &gemma, &old_gemma, &bytes, &cohere] {
                let expected = !same.iter().any(|same| std::ptr::eq(*same, file));
                assert_eq!(changes(class, file), expected, "{class}: {file:?}");
            }
        }
        for (prefix, is_changed) in [(None, false), (Some(true), false), (Some(false), true)] {
            assert_eq!(super::changes("LlamaTokenizer", &saved_by_5, prefix), is_changed, "{prefix:?}");
        }
        assert_eq!(loaded(Some("LlamaTokenizerFast"), Some("llama")), Some("LlamaTokenizer"));
        assert_eq!(loaded(Some("LlamaTokenizer"), Some("mistral")), None);
        assert_eq!(loaded(None, Some("gemma2")), Some("GemmaTokenizer"));
        assert_eq!(loaded(Some("PreTrainedTokenizerFast"), Some("gemma")), None);
    }

    #[test]
    fn files_beside_a_tokenizer_name_its_class() {
        let dir = tempfile::tempdir().unwrap();
        let write =
            |name: &str, json: &Value| fs_err::write(dir.path().join(name), json.to_string()).unwrap();
        fs_err::write(dir.path().join("tokenizer.json"), Tokenizer::bytes().to_json()).unwrap();
        let class = || Tokenizer::from_file(&dir.path().join("tokenizer.json")).unwrap().replaced_by();
        assert_eq!(class(), None);
        write("tokenizer_config.json", &json!({"tokenizer_class": "Qwen2TokenizerFast"}));
        assert_eq!(class(), Some(QWEN2_CLASS));
        write("tokenizer_config.json", &json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
        assert_eq!(class(), None);
        write("config.json", &json!({"model_type": "qwen2"}));
        assert_eq!(class(), Some(QWEN2_CLASS));
        fs_err::write(dir.path().join("tokenizer.json"), Tokenizer::gpt2().to_json()).unwrap();
        write("config.json", &json!({"model_type": "gpt2"}));
        assert_eq!(class(), None);
        write("tokenizer_config.json", &json!({"add_prefix_space": true, "split_special_tokens": true}));
        let warnings = Tokenizer::from_file(&dir.path().join("tokenizer.json")).unwrap().loading_warnings();
        assert!(warnings[0].contains("as `GPT2Tokenizer`"), "{warnings:?}");
        assert!(warnings[1].contains("`split_special_tokens`"), "{warnings:?}");
    }
}
