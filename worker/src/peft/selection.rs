//! The layers that a configuration of PEFT selects, by name or by a regular expression of Python. Pure.

use onig::{MatchParam, Regex, RegexOptions, SearchOptions, Syntax};
use serde_json::Value;

use super::{Config, PREFIX};
use crate::huggingface::tensor_names::Mapped;

/// The layers that PEFT adapts.
pub(super) struct Selection<'a> {
    /// Layers that are adapted; `None` if the configuration names further ones in a form that is not compared.
    targets: Option<Names<'a>>,
    excluded: Option<Names<'a>>,
    blocks: &'a Value,
}

impl<'a> Selection<'a> {
    /// Reads the keys of a configuration for models of a type.
    ///
    /// # Errors
    /// The key that is not supported, and the problem.
    pub(super) fn of(config: &'a Config, model_type: &str) -> Result<Self, (&'static str, String)> {
        // Further layers, by the names of their weights.
        let has_more = config.target_parameters.as_array().is_some_and(|names| !names.is_empty());
        let in_targets = |problem: String| ("target_modules", problem);
        let targets = match &config.target_modules {
            _ if has_more => None,
            Value::Null => {
                let missing = || {
                    let problem =
                        format!("not set, and PEFT has no default for models of type `{model_type}`");
                    in_targets(problem)
                };
                Some(Names::Ends(default_targets(model_type).ok_or_else(missing)?.to_vec()))
            }
            Value::String(all) if all.eq_ignore_ascii_case("all-linear") => Some(Names::All),
            named => Names::of(named).map_err(in_targets)?,
        };
        let excluded = Names::of(&config.exclude_modules).map_err(|problem| ("exclude_modules", problem))?;
        Ok(Self { targets, excluded, blocks: &config.layers_to_transform })
    }

    /// Returns whether PEFT does not adapt the layer of a tensor.
    pub(super) fn leaves_out(&self, tensor: &Mapped) -> bool {
        let layer = tensor.name.strip_prefix(PREFIX).and_then(|name| name.split_once(".lora_"));
        let Some((layer, _)) = layer else { return false };
        let block = layer.split('.').find_map(|part| part.parse::<u64>().ok());
        let is_block = |value: &Value| block.is_some_and(|block| value.as_u64() == Some(block));
        let is_chosen = match self.blocks {
            Value::Null => true,
            Value::Array(blocks) => blocks.is_empty() || blocks.iter().any(is_block),
            one => is_block(one),
        };
        let Some(targets) = &self.targets else { return false };
        // For PEFT, the whole name of a layer takes precedence over the blocks.
        let is_named = matches!(targets, Names::Ends(names) if names.contains(&layer));
        !targets.matches(layer)
            || self.excluded.as_ref().is_some_and(|names| names.matches(layer))
            || !(is_named || is_chosen)
    }
}

/// Returns the layers that PEFT adapts in models of a type if its configuration names none.
fn default_targets(model_type: &str) -> Option<&'static [&'static str]> {
    match model_type {
        "gpt2" => Some(&["c_attn"]),
        "gpt_neox" => Some(&["query_key_value"]),
        "phi" => Some(&["q_proj", "v_proj", "fc1", "fc2"]),
        "llama" | "mistral" | "mixtral" | "stablelm" | "gemma" | "gemma2" | "gemma3_text" | "qwen2"
        | "qwen3" => Some(&["q_proj", "v_proj"]),
        _ => None,
    }
}

/// Names of layers in PEFT's configuration.
enum Names<'a> {
    /// All linear layers.
    All,
    /// A layer has one of these names, or a name that ends with a dot and one of them.
    Ends(Vec<&'a str>),
    /// The whole name matches.
    Pattern(Regex),
}

impl<'a> Names<'a> {
    /// Reads a list of names or a regular expression. `None` without either.
    fn of(value: &'a Value) -> Result<Option<Self>, String> {
        match value {
            Value::String(pattern) if !pattern.is_empty() => {
                python_pattern(pattern).map(|pattern| Some(Self::Pattern(pattern)))
            }
            Value::Array(names) => Ok(Some(Self::Ends(names.iter().filter_map(Value::as_str).collect()))),
            _ => Ok(None),
        }
    }

    fn matches(&self, layer: &str) -> bool {
        match self {
            Self::All => true,
            Self::Ends(names) => names.iter().any(|name| {
                layer.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }),
            Self::Pattern(pattern) => {
                let whole = SearchOptions::SEARCH_OPTION_NONE;
                // An error is a search that takes too long.
                let found = pattern.match_with_param(layer, 0, whole, None, MatchParam::default());
                found.is_ok_and(|end| end.is_some())
            }
        }
    }
}

/// Compiles a regular expression that matches the same whole names as `re.fullmatch` in Python.
///
/// # Errors
/// The problem, if it is not valid, or has a construct that may have another meaning in Python.
fn python_pattern(pattern: &str) -> Result<Regex, String> {
    if let Some(construct) = python_only(pattern) {
        return Err(format!(
            "the regular expression {pattern:?} has {construct:?}, which is not supported; list the names of the layers"
        ));
    }
    // As in `re.fullmatch`, the end decides between alternatives.
    let whole = format!(r"\A(?:{pattern})\Z");
    Regex::with_options(&whole, RegexOptions::REGEX_OPTION_NONE, Syntax::python())
        .map_err(|error| format!("the regular expression {pattern:?} is not valid: {}", error.description()))
}

/// Returns the first construct of a regular expression that Oniguruma may read in another way than Python: flags,
/// names, references and conditions, sets in sets, and unusual quantifiers.
fn python_only(pattern: &str) -> Option<&str> {
    const GROUPS: [&str; 5] = ["(?:", "(?=", "(?!", "(?<=", "(?<!"];
    let (mut at, mut in_set, mut quantified) = (0, false, false);
    while let Some(character) = pattern[at..].chars().next() {
        let rest = &pattern[at..];
        let (mut len, mut quantifies) = (character.len_utf8(), false);
        match character {
            '\\' => {
                let escaped = rest[1..].chars().next()?;
                len += escaped.len_utf8();
                // Oniguruma has anchors with quotes and angle brackets.
                let is_literal = escaped.is_ascii_punctuation() && !"`'<>".contains(escaped);
                if !is_literal && !"dDwWsS".contains(escaped) {
                    return Some(&rest[..len]);
                }
            }
            ']' => in_set = false,
            '[' if in_set => return Some("["),
            '[' => {
                in_set = true;
                len += usize::from(rest[1..].starts_with('^'));
                // The first bracket is a member of the set.
                if rest[len..].starts_with(']') {
                    return Some(&rest[..=len]);
                }
            }
            '&' | '|' | '~' | '-' if in_set && rest[1..].starts_with(character) => return Some(&rest[..2]),
            _ if in_set => {}
            '(' if rest.starts_with("(?") => {
                let group = GROUPS.iter().find(|group| rest.starts_with(**group));
                let Some(group) = group else { return Some(rest.get(..3).unwrap_or(rest)) };
                (len, quantifies) = (group.len(), true);
            }
            // Nothing to repeat.
            '(' => quantifies = true,
            '*' | '+' | '?' | '{' => {
                let end = rest.find('}').filter(|_| character == '{').unwrap_or(0);
                let quantifier = &rest[..=end];
                if quantified || character == '{' && !is_repetition(quantifier) {
                    return Some(quantifier);
                }
                (len, quantifies) = (quantifier.len(), true);
                // A lazy quantifier matches the same whole names.
                len += usize::from(character != '{' && rest[len..].starts_with('?'));
            }
            _ => {}
        }
        (at, quantified) = (at + len, quantifies);
    }
    None
}

/// Returns whether this is `{n}`, `{n,}` or `{n,m}`.
fn is_repetition(quantifier: &str) -> bool {
    let is_count = |count: &str| !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
    let counts = quantifier.trim_matches(['{', '}']);
    let (from, to) = counts.split_once(',').unwrap_or((counts, ""));
    is_count(from) && (to.is_empty() || is_count(to))
}
