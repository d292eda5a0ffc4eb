//! Files of prompts: JSON Lines, one object with `prompt` and, optionally, `id` per line. Pure.

use serde::Deserialize;
use serde_json::Value;

/// One line.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Prompt {
    /// The text to continue.
    pub(super) prompt: String,
    /// Repeated in the output: a string or a number.
    #[serde(default)]
    pub(super) id: Option<Value>,
}

/// The prompts of a file. Empty lines are skipped.
///
/// # Errors
/// The first line that is not a prompt, by its number.
pub(super) fn parse(name: &str, text: &[u8]) -> Result<Vec<Prompt>, String> {
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let failed = |reason: &str| {
            format!("{name}:{number}: {reason}; expected {{\"prompt\": \"...\"}} on each line")
        };
        let prompt: Prompt = serde_json::from_slice(line).map_err(|error| {
            // The position within the line; its line is always 1.
            let text = error.to_string();
            failed(text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason))
        })?;
        if prompt.id.as_ref().is_some_and(|id| !id.is_string() && !id.is_number()) {
            return Err(failed("`id` is neither a string nor a number"));
        }
        prompts.push(prompt);
    }
    match prompts.is_empty() {
        true => Err(format!("{name}: there is no prompt in it")),
        false => Ok(prompts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_with_their_ids() {
        let text = b"{\"prompt\": \"a\\nb\", \"id\": 7, \"other\": []}\n\n {\"prompt\": \"\"}\r\n";
        let prompts = parse("p", text).unwrap();
        assert_eq!(prompts.iter().map(|prompt| &prompt.prompt[..]).collect::<Vec<_>>(), ["a\nb", ""]);
        assert_eq!((prompts[0].id.clone(), &prompts[1].id), (Some(Value::from(7)), &None));
    }

    #[test]
    fn broken_line_is_named_by_file_and_number() {
        let error = |text: &[u8]| parse("in.jsonl", text).unwrap_err();
        assert!(error(b"{\"prompt\": \"a\"}\n{\"prompt\": ").starts_with("in.jsonl:2: EOF"));
        assert!(error(b"{\"text\": \"a\"}").starts_with("in.jsonl:1: missing field `prompt`;"));
        assert!(error(b"{\"prompt\": 3}").starts_with("in.jsonl:1: invalid type"));
        assert!(error(b"{\"prompt\": \"\xff\"}").starts_with("in.jsonl:1: "));
        assert!(error(b"{\"prompt\": \"a\", \"id\": {}}").contains("neither a string"));
        assert!(error(b"\n\n").contains("no prompt"));
    }
}
