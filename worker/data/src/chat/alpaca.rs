//! Rows in Alpaca's form: an instruction, which may have an input, and its answer in place of messages. Pure.
//!
//! The instruction and its input are the user's message, with a newline between them, as LLaMA-Factory writes them.

use minijinja::value::{Value, ValueKind};

use super::json::field;
use super::{ASSISTANT, message_of};

pub(super) const INSTRUCTION: &str = "instruction";
pub(super) const OUTPUT: &str = "output";
const INPUT: &str = "input";
const HISTORY: &str = "history";

/// Fields of such rows.
pub(crate) const FIELDS: [&str; 4] = [INSTRUCTION, INPUT, OUTPUT, HISTORY];

/// Returns the messages up to the one that the row answers.
///
/// # Errors
/// If a field is not a string or a list of pairs, or the question is empty.
pub(super) fn prompt(row: &Value) -> Result<Vec<Value>, String> {
    let mut messages = match field(row, HISTORY) {
        Some(history) => turns(&history)?,
        None => Vec::new(),
    };
    let texts = [text(row, INSTRUCTION)?, text(row, INPUT)?];
    let question: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    if question.is_empty() {
        return Err("`instruction` is empty".into());
    }
    messages.push(message_of("user", question.join("\n").into()));
    Ok(messages)
}

/// Returns the message with this answer.
///
/// # Errors
/// If it is empty or not a string.
pub(super) fn answer(text: Value, name: &str) -> Result<Value, String> {
    match text.as_str() {
        Some("") => Err(format!("`{name}` is empty")),
        Some(_) => Ok(message_of(ASSISTANT, text)),
        None => Err(format!("`{name}` is a {}; expected a string", text.kind())),
    }
}

fn text(row: &Value, name: &str) -> Result<String, String> {
    match field(row, name) {
        None => Ok(String::new()),
        Some(text) => text
            .to_str()
            .map(|text| text.to_string())
            .ok_or_else(|| format!("`{name}` is a {}; expected a string", text.kind())),
    }
}

/// Reads a list of questions and answers, each a list of both.
fn turns(history: &Value) -> Result<Vec<Value>, String> {
    let other = || "`history` is not a list of pairs of a question and its answer".to_string();
    if history.kind() != ValueKind::Seq {
        return Err(other());
    }
    let mut messages = Vec::new();
    for turn in history.try_iter().map_err(|error| error.to_string())? {
        let texts: Vec<Value> = turn.try_iter().map(Iterator::collect).unwrap_or_default();
        let [question, answer] = texts.try_into().map_err(|_| other())?;
        if question.as_str().is_none() || answer.as_str().is_none() {
            return Err(other());
        }
        messages.extend([message_of("user", question), message_of(ASSISTANT, answer)]);
    }
    Ok(messages)
}
