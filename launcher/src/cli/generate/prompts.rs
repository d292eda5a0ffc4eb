//! Files of prompts: JSON Lines, one object with `prompt` and, optionally, `id` per line. Pure.

use serde::Deserialize;
use serde_json::Value;
use xlaunch_data::{BYTE_ORDER_MARK, chat};

/// Keys that rows of training data may have beside `messages`. Ignoring one would change the text.
const IGNORED: [&str; 3] = ["system", "tools", "chat_template_kwargs"];
/// Parameters of requests in OpenAI's form, which are options here and the same for all prompts.
const OPTIONS: [&str; 7] = ["max_tokens", "n", "seed", "stop", "temperature", "top_k", "top_p"];

/// A prompt: one line of the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Prompt {
    /// The text to continue, or a user's message.
    #[serde(default)]
    pub(super) prompt: String,
    /// A chat, in place of `prompt`.
    #[serde(default)]
    pub(super) messages: Option<chat::Value>,
    /// A string or a number that is repeated in the output.
    #[serde(default)]
    pub(super) id: Option<Value>,
}

/// Parses a file of prompts. Empty lines are skipped. With `chat`, lines may have `messages` in place of `prompt`.
///
/// # Errors
/// A message about the first line that is not a prompt, with its number.
pub(super) fn parse(name: &str, text: &[u8], chat: bool) -> Result<Vec<Prompt>, String> {
    let mut prompts = Vec::new();
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let failed = |reason: &str| {
            format!("{name}:{number}: {reason}; expected {{\"prompt\": \"...\"}} on each line")
        };
        let json = |error: serde_json::Error| {
            // serde_json appends the position; the line number is always 1 here.
            let text = error.to_string();
            failed(text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason))
        };
        let value: Value = serde_json::from_slice(line).map_err(json)?;
        let has = |key: &str| value.get(key).is_some();
        let is_set = |key: &&str| value.get(key).is_some_and(|value| !value.is_null());
        if let Some(key) = OPTIONS.iter().find(|key| is_set(key)) {
            return Err(format!(
                "{name}:{number}: `{key}` is not supported for single prompts: use the options of the command"
            ));
        }
        match (has("prompt"), has("messages")) {
            (is_text, is_chat) if is_text != is_chat && chat && (is_text || value["messages"].is_array()) => {
                if let Some(key) = IGNORED.iter().find(|key| is_set(key)) {
                    let advice = match (*key, is_text) {
                        ("system", false) => ": make it the first message",
                        ("system", true) => ": write a list of `messages`",
                        _ => "",
                    };
                    let beside = if is_text { "prompt" } else { "messages" };
                    return Err(format!(
                        "{name}:{number}: `{key}` is not supported beside `{beside}`{advice}"
                    ));
                }
            }
            (true, false) => {}
            (false, true) if chat => return Err(failed("`messages` is not a list")),
            (false, true) => return Err(failed("`messages` is a chat: use --chat")),
            (true, true) => return Err(failed("it has both `prompt` and `messages`")),
            (false, false) => return Err(failed("missing field `prompt`")),
        }
        // Not from `value`, which has not kept the order of keys.
        let prompt: Prompt = serde_json::from_slice(line).map_err(json)?;
        if prompt.id.as_ref().is_some_and(|id| !id.is_string() && !id.is_number()) {
            return Err(failed("`id` is neither a string nor a number"));
        }
        prompts.push(prompt);
    }
    if prompts.is_empty() { Err(format!("{name}: there is no prompt in it")) } else { Ok(prompts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_with_their_ids() {
        let text = b"{\"prompt\": \"a\\nb\", \"id\": 7, \"other\": []}\n\n {\"prompt\": \"\"}\r\n";
        let prompts = parse("p", text, false).unwrap();
        assert_eq!(prompts.iter().map(|prompt| &prompt.prompt[..]).collect::<Vec<_>>(), ["a\nb", ""]);
        assert_eq!((prompts[0].id.clone(), &prompts[1].id), (Some(Value::from(7)), &None));
        assert_eq!(parse("p", b"\xef\xbb\xbf{\"prompt\": \"a\"}", false).unwrap().len(), 1);
    }

    #[test]
    fn broken_line_is_named_by_file_and_number() {
        let error = |text: &[u8]| parse("in.jsonl", text, false).unwrap_err();
        assert!(error(b"{\"prompt\": \"a\"}\n{\"prompt\": ").starts_with("in.jsonl:2: EOF"));
        assert!(error(b"{\"text\": \"a\"}").starts_with("in.jsonl:1: missing field `prompt`;"));
        assert!(error(b"{\"prompt\": 3}").starts_with("in.jsonl:1: invalid type"));
        assert!(error(b"{\"prompt\": \"\xff\"}").starts_with("in.jsonl:1: "));
        assert!(error(b"{\"prompt\": \"a\", \"id\": {}}").contains("neither a string"));
        let setting = error(b"{\"prompt\": \"a\", \"seed\": null, \"temperature\": 0}");
        assert!(setting.contains("`temperature` is not supported for single prompts"), "{setting}");
        assert!(error(b"\n\n").contains("no prompt"));
    }

    #[test]
    fn chats_are_read_where_they_are_asked_for() {
        let text =
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"id\": 1}\n{\"prompt\": \"b\"}";
        let prompts = parse("p", text, true).unwrap();
        let messages = serde_json::to_string(&prompts[0].messages).unwrap();
        assert_eq!(messages, r#"[{"role":"user","content":"hi"}]"#);
        assert_eq!((prompts[1].messages.is_none(), prompts[1].prompt.as_str()), (true, "b"));
        assert!(parse("p", text, false).unwrap_err().contains("use --chat"));
        let system = parse("p", b"{\"messages\": [], \"tools\": null, \"system\": \"a\"}", true).unwrap_err();
        assert_eq!(system, "p:1: `system` is not supported beside `messages`: make it the first message");
        let system = parse("p", b"{\"prompt\": \"a\", \"system\": \"b\"}", true).unwrap_err();
        assert_eq!(system, "p:1: `system` is not supported beside `prompt`: write a list of `messages`");
        assert!(parse("p", b"{\"prompt\": \"a\", \"system\": \"b\"}", false).is_ok());
        assert!(parse("p", b"{\"messages\": [], \"tools\": null}", true).is_ok());
        assert!(parse("p", b"{\"messages\": 3}", true).unwrap_err().contains("not a list"));
        assert!(parse("p", b"{\"messages\": [], \"prompt\": \"\"}", true).unwrap_err().contains("both"));
    }
}
