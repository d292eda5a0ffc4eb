//! A row with a better and a worse answer to one prompt, in the forms of public data sets. Pure.
//!
//! A row without `prompt` has its prompt at the beginning of both answers. Tokens that both answers begin with change
//! no loss, whether they count as the prompt or as answers: their probabilities cancel.

use minijinja::value::{Value, ValueKind};

use super::alpaca::{self, INSTRUCTION};
use super::json::field;
use super::row::{
    CHOSEN, REJECTED, Row, common_fields, conversations, has_role, keys, pair, system, variables,
};
use super::{ASSISTANT, message_of};

/// Fields that hold the question in some data sets, beside answers that are strings.
const QUESTIONS: [&str; 6] = ["question", "input", "query", "messages", "conversations", "trajectory"];

/// Returns whether a field of this name may hold the question in a row without `prompt`.
pub(crate) fn is_question(name: &str) -> bool {
    QUESTIONS.contains(&name)
}

/// Reads a row with two answers as a row for the better one and a row for the worse one; `None` if it holds nothing.
///
/// # Errors
/// The reason, and what to do.
pub(crate) fn parse_preference(value: &Value) -> Result<Option<[Row; 2]>, String> {
    match value.kind() {
        ValueKind::None => return Ok(None),
        ValueKind::Map => {}
        kind => return Err(format!("the row is a {kind}; expected an object with `chosen` and `rejected`")),
    }
    let tools = common_fields(value)?;
    let missing = |name: &str| {
        format!(
            "the row has no `{name}`, only {}\nhelp: name the better answer `chosen` and the worse one `rejected`; \
             chats without pairs are read with --chat; see also --on-error",
            keys(value)
        )
    };
    let answer = |name: &str| field(value, name).ok_or_else(|| missing(name));
    let (better, worse) = (answer(CHOSEN)?, answer(REJECTED)?);
    if better == worse {
        return Err(
            "`chosen` and `rejected` are the same\nhelp: leave such rows out with --on-error skip".into()
        );
    }
    let [prompt, better, worse] = match (better.as_str(), worse.as_str()) {
        (Some(better), Some(worse)) => match field(value, "prompt") {
            Some(prompt) => [prompt, better.into(), worse.into()],
            None if field(value, INSTRUCTION).is_some() => {
                let answer = |text: &str, name| Ok::<_, String>(vec![alpaca::answer(text.into(), name)?]);
                [alpaca::prompt(value)?, answer(better, CHOSEN)?, answer(worse, REJECTED)?].map(Value::from)
            }
            None => texts(value, better, worse)?.map(Value::from),
        },
        (None, None) => chats(value, &better, &worse)?.map(Value::from),
        _ => {
            return Err(format!(
                "`chosen` is a {} and `rejected` a {}; expected two strings or two lists of messages",
                better.kind(),
                worse.kind()
            ));
        }
    };
    let row = |completion: &Value, name: &str| {
        let row = pair(&prompt, completion, system(value), variables(value, &tools));
        let name = format!("`{name}`");
        row.map_err(|reason| match reason.replace("`completion`", &name) {
            reason if reason.starts_with(&name) => reason,
            reason => format!("{name}: {reason}"),
        })
    };
    Ok(Some([row(&better, CHOSEN)?, row(&worse, REJECTED)?]))
}

/// Splits two texts into their prompt and the rest of each.
fn texts<'a>(row: &Value, one: &'a str, other: &'a str) -> Result<[&'a str; 3], String> {
    if let Some(name) = QUESTIONS.iter().find(|name| field(row, name).is_some()) {
        return Err(format!(
            "`{name}` is not read beside answers that are strings\nhelp: rename it to `prompt`"
        ));
    }
    let at = end_of_prompt(one, other);
    if one[..at].trim().is_empty() {
        return Err("`chosen` and `rejected` do not begin with a prompt that they share, and the row has no `prompt`\n\
                    help: write the question as `prompt`"
            .into());
    }
    Ok([&one[..at], &one[at..], &other[at..]])
}

/// Returns the length of the prompt at the beginning of two texts: whole words that they share, without the space after
/// them.
fn end_of_prompt(one: &str, other: &str) -> usize {
    let same = one.chars().zip(other.chars()).take_while(|(one, other)| one == other);
    let shared: usize = same.map(|(character, _)| character.len_utf8()).sum();
    let rest = [&one[shared..], &other[shared..]];
    if rest.iter().all(|rest| rest.starts_with(char::is_whitespace)) {
        return shared;
    }
    let end = match one[..shared].char_indices().rfind(|(_, character)| character.is_whitespace()) {
        Some((at, ' ')) => at,
        Some((at, space)) => at + space.len_utf8(),
        None => 0,
    };
    // Some languages have no spaces.
    let is_split = one[..end].trim().is_empty() && rest.iter().all(|rest| !rest.is_empty());
    if is_split { shared } else { end }
}

/// Returns the messages of the prompt, and those of each answer.
fn chats(row: &Value, better: &Value, worse: &Value) -> Result<[Vec<Value>; 3], String> {
    let is_message = better.kind() == ValueKind::Map;
    let list = |answer: &Value, name: &str| match answer.kind() {
        ValueKind::Map => conversations(&Value::from(vec![answer.clone()]), name),
        _ => conversations(answer, name),
    };
    let (mut better, mut worse) = (list(better, CHOSEN)?, list(worse, REJECTED)?);
    let prompt = field(row, "prompt");
    let earlier = field(row, "conversations").filter(|_| is_message);
    let asked = prompt.clone().filter(|prompt| prompt.as_str().is_none()).or(earlier);
    if let Some(asked) = asked {
        let prompt = conversations(&asked, "prompt")?;
        if !prompt.is_empty() && better.starts_with(&prompt) && worse.starts_with(&prompt) {
            better.drain(..prompt.len());
            worse.drain(..prompt.len());
        }
        return Ok([prompt, better, worse]);
    }
    let shared = better.iter().zip(&worse).take_while(|(one, other)| one == other).count();
    let shared = shared.min(better.len().min(worse.len()).saturating_sub(1));
    let rest = [better.split_off(shared), worse.split_off(shared)];
    let mut asked = better;
    if asked.is_empty() && rest.iter().all(|rest| rest.first().is_some_and(|it| has_role(it, ASSISTANT))) {
        let question = prompt.filter(Value::is_true);
        asked.extend(question.map(|text| message_of("user", text)));
    }
    if asked.is_empty() {
        return Err("`chosen` and `rejected` do not begin with the same message\nhelp: begin both with the question, or \
                    write `prompt` as a list of messages"
            .into());
    }
    let [better, worse] = rest;
    Ok([asked, better, worse])
}
