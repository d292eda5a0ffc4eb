//! Reads the parameters of a request one by one, so that every one is either applied or refused by name. Pure.
//!
//! `null` counts as absent, as in OpenAI's API.

use serde_json::{Map, Value, json};

use super::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// Parameters that do not change results.
const WITHOUT_EFFECT: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
];

/// The parameters of a request that have not been read.
#[derive(Debug)]
pub(super) struct Parameters(Map<String, Value>);

impl Parameters {
    pub(super) fn new(body: &[u8]) -> Result<Self> {
        let failed = |reason: String| ApiError::parameter("body", format!("the body is not valid: {reason}"));
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self::of(map)),
            Ok(_) => Err(failed("expected a JSON object".into())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    pub(super) fn of(mut map: Map<String, Value>) -> Self {
        map.retain(|_, value| !value.is_null());
        Self(map)
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let found = convert(&value);
        found.map(Some).ok_or_else(|| {
            ApiError::parameter(name, format!("`{name}` is {}: expected {expected}", shown(&value)))
        })
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>> {
        self.read(name, "a string", |value| value.as_str().map(Into::into))
    }

    /// Reads a whole number from `least` to `most`.
    pub(super) fn count(&mut self, name: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let expected = if most == usize::MAX {
            format!("a whole number of at least {least}")
        } else {
            format!("a whole number from {least} to {most}")
        };
        let convert = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.read(name, &expected, |value| convert(value).filter(|it| (least..=most).contains(it)))
    }

    pub(super) fn number(
        &mut self,
        name: &str,
        expected: &str,
        is_valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>> {
        self.read(name, expected, |value| value.as_f64().filter(|number| is_valid(*number)))
    }

    /// Reads the number of tokens to draw from. 0 and -1 mean all, as clients of vLLM and of transformers write it.
    pub(super) fn top_k(&mut self) -> Result<Option<usize>> {
        let convert =
            |value: &Value| if value == -1 { Some(0) } else { usize::try_from(value.as_u64()?).ok() };
        self.read("top_k", "a whole number of at least 1, or 0 or -1 for all tokens", convert)
    }

    /// Reads any 64-bit number.
    pub(super) fn seed(&mut self) -> Result<Option<u64>> {
        let convert = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        self.read("seed", "a whole number of 64 bits", convert)
    }

    /// Reads a string, or a list of up to `most` strings, of at most `bytes` bytes each.
    pub(super) fn texts(&mut self, name: &str, most: usize, bytes: usize) -> Result<Vec<String>> {
        let texts = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|text| text.as_str().map(Into::into)).collect(),
            _ => None,
        };
        let fit = |texts: &Vec<String>| texts.len() <= most && texts.iter().all(|text| text.len() <= bytes);
        let expected = format!("a string, or a list of up to {most}, of at most {bytes} bytes each");
        Ok(self.read(name, &expected, |value| texts(value).filter(fit))?.unwrap_or_default())
    }

    /// Checks that no parameter remains that would change the result. `samples` is the number of texts per prompt.
    pub(super) fn finish(self, samples: usize) -> Result<()> {
        // Parameters that are not supported, with the values that ask for nothing.
        let neutral: [(&str, &[Value]); 19] = [
            ("add_generation_prompt", &[json!(true)]),
            ("best_of", &[json!(samples)]),
            ("chat_template_kwargs", &[json!({})]),
            ("continue_final_message", &[json!(false)]),
            ("frequency_penalty", &[json!(0), json!(0.0)]),
            ("function_call", &[json!("none")]),
            ("functions", &[json!([])]),
            ("ignore_eos", &[json!(false)]),
            ("include_obfuscation", &[json!(false)]),
            ("logit_bias", &[json!({})]),
            ("min_p", &[json!(0), json!(0.0)]),
            ("min_tokens", &[json!(0)]),
            ("modalities", &[json!(["text"])]),
            ("presence_penalty", &[json!(0), json!(0.0)]),
            ("repetition_penalty", &[json!(1), json!(1.0)]),
            ("response_format", &[json!({"type": "text"})]),
            ("suffix", &[json!("")]),
            ("tool_choice", &[json!("none"), json!("auto")]),
            ("tools", &[json!([])]),
        ];
        let has_no_effect = |name: &str, value: &Value| {
            WITHOUT_EFFECT.contains(&name)
                || neutral.iter().any(|(known, values)| *known == name && values.contains(value))
        };
        match self.0.iter().find(|(name, value)| !has_no_effect(name, value)) {
            None => Ok(()),
            Some((name, value)) => {
                let message = format!("`{name}` is not supported (value: {}); leave it out", shown(value));
                Err(ApiError { code: Some("unsupported_parameter"), ..ApiError::parameter(name, message) })
            }
        }
    }
}

/// Returns the beginning of a value.
fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("`{}...`", &text[..end]),
        None => format!("`{text}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(value: &Value) -> Parameters {
        Parameters::new(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn parameters_that_would_change_results_are_refused_by_name() {
        let harmless = json!({
            "user": "me", "logit_bias": {}, "frequency_penalty": 0, "best_of": 2, "tools": null, "suffix": null,
            "response_format": {"type": "text"}, "presence_penalty": 0.0, "metadata": {"a": 1},
            "repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "chat_template_kwargs": {},
            "include_obfuscation": false,
        });
        assert_eq!(parameters(&harmless).finish(2), Ok(()));
        for (name, value) in [
            ("frequency_penalty", json!(0.5)),
            ("logit_bias", json!({"50256": -100})),
            ("best_of", json!(3)),
            ("response_format", json!({"type": "json_object"})),
            ("tools", json!([{"type": "function"}])),
            ("guided_json", json!({})),
            ("min_p", json!(0.1)),
            ("include_obfuscation", json!(true)),
            ("repetition_penalty", json!(1.1)),
        ] {
            let error = parameters(&json!({ name: value })).finish(2).unwrap_err();
            assert_eq!((error.param.as_deref(), error.status.as_u16()), (Some(name), 400));
            assert!(error.message.contains(&format!("`{name}` is not supported")), "{}", error.message);
        }
    }

    #[test]
    fn wrong_values_are_named_with_what_is_expected() {
        let mut wrong = parameters(&json!({
            "n": 0, "echo": "yes", "temperature": -1, "stop": ["a", 3], "seed": 1.5, "max_tokens": -1,
            "long": "x".repeat(99),
        }));
        let error = wrong.count("n", 1, 128).unwrap_err();
        assert_eq!(error.message, "`n` is `0`: expected a whole number from 1 to 128");
        assert_eq!(wrong.flag("echo").unwrap_err().message, "`echo` is `\"yes\"`: expected true or false");
        assert!(wrong.number("temperature", "a number of at least 0", |it| it >= 0.0).is_err());
        assert!(wrong.texts("stop", 4, 9).unwrap_err().message.contains("a list of up to 4"));
        assert!(wrong.seed().is_err() && wrong.count("max_tokens", 0, usize::MAX).is_err());
        assert!(wrong.flag("long").unwrap_err().message.len() < 120);
        assert_eq!(wrong.finish(1), Ok(()));
        assert!(Parameters::new(b"[1]").unwrap_err().message.contains("expected a JSON object"));
        assert!(Parameters::new(b"{\"a\": ").is_err());
        assert_eq!(parameters(&json!({"seed": -1})).seed(), Ok(Some(u64::MAX)));
        let top_k = |value: Value| parameters(&json!({ "top_k": value })).top_k();
        assert_eq!([-1, 0, 1].map(|count| top_k(json!(count)).unwrap()), [0, 0, 1].map(Some));
        for wrong in [json!(-2), json!(1.5), json!("1")] {
            assert!(top_k(wrong).unwrap_err().message.contains("or 0 or -1 for all tokens"));
        }
    }
}
