//! A row of chat data: checks its form, and converts the different ways of writing chats to a single one. Pure.

use minijinja::value::{Value, ValueKind};

use super::json::{field, parse_json};
use super::{ASSISTANT, CHAT_COLUMNS, alpaca, message_of, weights};

/// Fields of a message that may hold the model's thoughts. The first that it has is taken.
const THOUGHT_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Fields in which templates find the thoughts, whichever of [`THOUGHT_FIELDS`] a message has.
pub(crate) const THOUGHTS: [&str; 2] = ["thinking", "reasoning_content"];

/// Field of a row with the schemas of tools, and the name by which templates know them.
pub(crate) const TOOLS: &str = "tools";

/// Fields of a row with two answers: the better one, and the worse one.
pub(crate) const CHOSEN: &str = "chosen";
pub(crate) const REJECTED: &str = "rejected";

/// Names of roles in ShareGPT's rows, and the role that each stands for.
const SHAREGPT_ROLES: [(&str, &str); 5] =
    [("human", "user"), ("user", "user"), ("gpt", ASSISTANT), ("assistant", ASSISTANT), ("system", "system")];

/// Fields of rows and messages with what an answer may be about.
pub(crate) const MEDIA: &[&str] = &["images", "image", "videos", "video", "audios", "audio"];

/// Reason to refuse rows with two answers where each should have one.
const PREFERENCES: &str = "the row has a better and a worse answer, `chosen` and `rejected`\nhelp: to train on \
                           preferences, use --preferences in place of --chat; to train on the better answers alone, \
                           rename `chosen` to `completion` beside a `prompt`, or to `messages`";

/// Contents of a row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Row {
    /// Nothing: `null`.
    Empty,
    Chat(Chat),
    /// A text to complete, and its completion.
    Completion {
        prompt: String,
        completion: String,
    },
    /// A text, all of which is trained on.
    Text(String),
}

/// A conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chat {
    /// Objects with a `role`, in order.
    pub(crate) messages: Vec<Value>,
    /// Further variables of the template by name: the schemas of tools, if there are any, and the fields of the row
    /// that are not read here.
    pub(crate) variables: Value,
    /// Number of messages that no loss counts for: those of a prompt.
    pub(crate) prompt: usize,
}

/// Reads a row of JSON. Its keys keep their order, as templates may write them.
///
/// # Errors
/// The reason, and what to do.
pub(crate) fn parse(value: &Value) -> Result<Row, String> {
    match value.kind() {
        ValueKind::None => return Ok(Row::Empty),
        ValueKind::Map => {}
        kind => return Err(format!("the row is a {kind}; expected an object with `messages`")),
    }
    let field = |name: &str| field(value, name);
    let tools = common_fields(value)?;
    let variables = || variables(value, &tools);
    let system = system(value);
    if let Some(list) = field("messages") {
        return chat(with_system(trained(&list, "messages")?, system)?, variables(), 0);
    }
    if let Some(list) = field("conversations") {
        return chat(with_system(conversations(&list, "conversations")?, system)?, variables(), 0);
    }
    let has_pair = field("prompt").is_some() && field("completion").is_some();
    if let (Some(_), Some(output), false) = (field(alpaca::INSTRUCTION), field(alpaca::OUTPUT), has_pair) {
        let mut messages = with_system(alpaca::prompt(value)?, system)?;
        messages.push(alpaca::answer(output, alpaca::OUTPUT)?);
        return chat(messages, variables(), 0);
    }
    if field(REJECTED).is_some() && ["completion", "text"].iter().all(|name| field(name).is_none()) {
        return Err(PREFERENCES.into());
    }
    match (field("prompt"), field("completion"), field("text")) {
        (Some(prompt), Some(completion), _) => pair(&prompt, &completion, system, variables()),
        (Some(_), None, _) => Err("the row has a `prompt`, but no `completion`".into()),
        (None, Some(_), _) => Err("the row has a `completion`, but no `prompt`".into()),
        (None, None, Some(text)) => {
            let text =
                text.as_str().ok_or_else(|| format!("`text` is a {}; expected a string", text.kind()))?;
            if text.is_empty() { Ok(Row::Empty) } else { Ok(Row::Text(text.into())) }
        }
        (None, None, None) if keys(value).is_empty() => {
            Err("no field of the row has a value\nhelp: see --on-error".into())
        }
        (None, None, None) => Err(format!(
            "the row has none of `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`, only \
             {}\nhelp: rename its fields, or see --on-error",
            keys(value)
        )),
    }
}

/// Checks the fields that all kinds of rows may have. Returns the schemas of tools.
pub(super) fn common_fields(value: &Value) -> Result<Value, String> {
    let field = |name: &str| field(value, name);
    let tools = tools(field(TOOLS))?;
    if field("functions").is_some_and(|functions| functions.is_true()) {
        return Err("`functions` is not read\nhelp: write them as `tools`".into());
    }
    if ["messages", "conversations", "prompt", CHOSEN].iter().any(|name| field(name).is_some()) {
        check_media(value, "")?;
    }
    if field("chat_template_kwargs").is_some_and(|options| options.len() != Some(0)) {
        return Err("`chat_template_kwargs` is not supported\nhelp: remove it, and set these variables at the beginning \
                    of a template: --chat-template FILE with `{% set enable_thinking = false %}`"
            .into());
    }
    weights::check_row(value)?;
    Ok(tools)
}

pub(super) fn system(row: &Value) -> Option<Value> {
    field(row, "system").or_else(|| field(row, "system_prompt"))
}

/// Returns the kind of a value with an article, for messages.
fn kind(value: &Value) -> String {
    if value.is_none() { "null".into() } else { format!("a {}", value.kind()) }
}

/// Returns the names of fields that have a value.
pub(super) fn keys(value: &Value) -> String {
    let keys = value.try_iter().into_iter().flatten();
    let keys = keys.filter(|key| value.get_item(key).is_ok_and(|field| !field.is_none()));
    keys.take(10).map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
}

/// Refuses images and the like: the model would learn answers about what it has not seen.
fn check_media(value: &Value, at: &str) -> Result<(), String> {
    let has = |name: &&&str| value.get_attr(name).is_ok_and(|media| media.is_true());
    match MEDIA.iter().find(has) {
        None => Ok(()),
        Some(name) => Err(format!(
            "`{at}{name}` is not read: only text is supported\nhelp: remove such rows, see --on-error, or remove the \
             field if no message is about it"
        )),
    }
}

/// Adds the system message that a row has beside its messages.
fn with_system(mut messages: Vec<Value>, system: Option<Value>) -> Result<Vec<Value>, String> {
    let Some(system) = system else { return Ok(messages) };
    let text =
        system.as_str().ok_or_else(|| format!("`system` is a {}; expected a string", system.kind()))?;
    let own = messages.first().filter(|first| has_role(first, "system"));
    match own.map(|first| first.get_attr("content").is_ok_and(|content| content.as_str() == Some(text))) {
        _ if text.is_empty() => {}
        Some(true) => {}
        Some(false) => return Err("the row has a `system` and another message of that role".into()),
        None => messages.insert(0, message_of("system", Value::from(text))),
    }
    Ok(messages)
}

/// Returns the schemas of tools: a list, or a string of JSON that contains one.
fn tools(value: Option<Value>) -> Result<Value, String> {
    let Some(value) = value else { return Ok(Value::from(())) };
    let value = match value.as_str() {
        Some("") => return Ok(Value::from(())),
        Some(json) => {
            parse_json(json).map_err(|error| format!("`tools` is a string, but not of JSON: {error}"))?
        }
        None => value,
    };
    match value.kind() {
        ValueKind::None => return Ok(value),
        ValueKind::Seq => {}
        kind => return Err(format!("`tools` is a {kind}; expected a list of schemas")),
    }
    // A template would print a schema in a string as a string, with its quotes escaped.
    let schemas = value.try_iter().map_err(|error| error.to_string())?;
    match schemas.enumerate().find(|(_, schema)| schema.kind() != ValueKind::Map) {
        None => Ok(value),
        Some((index, other)) => {
            Err(format!("`tools[{index}]` is {}; expected an object with the schema of a tool", kind(&other)))
        }
    }
}

/// Returns the further variables of the template for a row.
pub(super) fn variables(row: &Value, tools: &Value) -> Value {
    let fields = row.try_iter().into_iter().flatten().filter_map(|key| {
        let name = key.as_str().filter(|name| !CHAT_COLUMNS.contains(name))?;
        field(row, name).map(|value| (key.clone(), value))
    });
    let tools = (!tools.is_none()).then(|| (Value::from(TOOLS), tools.clone()));
    Value::from_pairs(fields.chain(tools))
}

pub(super) fn pair(
    prompt: &Value,
    completion: &Value,
    system: Option<Value>,
    variables: Value,
) -> Result<Row, String> {
    let has_tools = field(&variables, TOOLS).is_some_and(|tools| tools.is_true());
    match (prompt.as_str(), completion.as_str()) {
        (Some(_), Some("")) => Err("`completion` is empty".into()),
        (Some(_), Some(_)) if system.as_ref().is_some_and(Value::is_true) || has_tools => Err(
            "`system` and `tools` are not read beside a `prompt` that is a string\nhelp: write `prompt` and \
                 `completion` as lists of messages, or remove them"
                .into(),
        ),
        (Some(prompt), Some(completion)) => {
            Ok(Row::Completion { prompt: prompt.into(), completion: completion.into() })
        }
        (None, None) => {
            let mut all = with_system(messages(prompt, "prompt")?, system)?;
            let (count, answer) = (all.len(), trained(completion, "completion")?);
            if answer.is_empty() {
                return Err("`completion` is empty".into());
            }
            all.extend(answer);
            chat(all, variables, count)
        }
        _ => Err(format!(
            "`prompt` is a {} and `completion` a {}; expected two strings or two lists of messages",
            prompt.kind(),
            completion.kind()
        )),
    }
}

fn chat(messages: Vec<Value>, variables: Value, prompt: usize) -> Result<Row, String> {
    if messages.is_empty() {
        return Err("the chat has no messages".into());
    }
    let is_setting = |message: &&Value| has_role(message, "system") || has_role(message, "developer");
    match messages.iter().find(|message| !is_setting(message)) {
        None => Err("the chat has only system messages".into()),
        Some(first) if has_role(first, ASSISTANT) => {
            Err("the chat starts with the assistant: there is no message that it answers".into())
        }
        Some(_) if !messages[prompt..].iter().any(|message| has_role(message, ASSISTANT)) => {
            Err("the chat has no message of the role `assistant` to train on".into())
        }
        Some(_) => Ok(Row::Chat(Chat { messages, variables, prompt })),
    }
}

/// Returns whether a message has this role.
pub(crate) fn has_role(message: &Value, role: &str) -> bool {
    message.get_attr("role").is_ok_and(|found| found.as_str() == Some(role))
}

/// Returns whether a message of a row holds the model's thoughts.
pub(crate) fn has_thoughts(message: &Value) -> bool {
    message.get_attr(THOUGHTS[0]).is_ok_and(|thoughts| thoughts.is_true())
}

/// Checks messages to train on.
fn trained(list: &Value, name: &str) -> Result<Vec<Value>, String> {
    let messages = messages(list, name)?;
    for (index, message) in messages.iter().enumerate().filter(|(_, message)| has_role(message, ASSISTANT)) {
        weights::check_answer(message, &format!("{name}[{index}]"))?;
    }
    Ok(messages)
}

/// Checks messages. Keys without a value are left out, as `transformers` does.
pub(crate) fn messages(list: &Value, name: &str) -> Result<Vec<Value>, String> {
    if list.kind() != ValueKind::Seq {
        return Err(format!("`{name}` is {}; expected a list of messages", kind(list)));
    }
    let list = list.try_iter().map_err(|error| error.to_string())?;
    list.enumerate().map(|(index, message)| self::message(&message, &format!("{name}[{index}]"))).collect()
}

fn message(message: &Value, at: &str) -> Result<Value, String> {
    if message.kind() != ValueKind::Map {
        return Err(format!("`{at}` is {}; expected an object with `role` and `content`", kind(message)));
    }
    let mut pairs = Vec::new();
    for key in message.try_iter().map_err(|error| error.to_string())? {
        let value = message.get_item(&key).map_err(|error| error.to_string())?;
        if !value.is_none() {
            pairs.push((key, value));
        }
    }
    let has = |name: &str| pairs.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value);
    match has("role").map(Value::kind) {
        Some(ValueKind::String) => {}
        Some(kind) => return Err(format!("`{at}.role` is a {kind}; expected a string")),
        None if has("from").is_some() => {
            return Err(format!("`{at}` has `from` and `value`; expected `role` and `content`"));
        }
        None => return Err(format!("`{at}` has no `role`")),
    }
    check_media(message, &format!("{at}."))?;
    if has("function_call").is_some() {
        return Err(format!("`{at}.function_call` is not read\nhelp: write it as `tool_calls`"));
    }
    match has("content") {
        Some(content) => check_content(content, at)?,
        None if has("tool_calls").is_some() => {}
        None => return Err(format!("`{at}` has no `content`")),
    }
    if let Some(calls) = has("tool_calls").filter(|calls| calls.kind() != ValueKind::Seq) {
        return Err(format!("`{at}.tool_calls` is a {}; expected a list", calls.kind()));
    }
    if let Some(weight) = has("weight") {
        let number = f64::try_from(weight.clone()).ok().filter(|_| weight.kind() == ValueKind::Number);
        if number != Some(0.0) && number != Some(1.0) {
            return Err(format!("`{at}.weight` is {weight}; expected 0 or 1"));
        }
    }
    if let Some(thoughts) = THOUGHT_FIELDS.iter().find_map(|name| has(name)).cloned() {
        let place = |pairs: &[(Value, Value)], name: &str| {
            pairs.iter().position(|(key, _)| key.as_str() == Some(name))
        };
        // Some templates print whole messages: the order is that of `transformers`.
        let thinking = place(&pairs, THOUGHTS[0]).map(|place| pairs.remove(place).1);
        pairs.insert(0, (Value::from(THOUGHTS[0]), thinking.unwrap_or_else(|| thoughts.clone())));
        match place(&pairs, THOUGHTS[1]) {
            Some(place) => pairs[place].1 = thoughts,
            None => pairs.push((Value::from(THOUGHTS[1]), thoughts)),
        }
    }
    Ok(Value::from_pairs(pairs))
}

/// Accepts a string, or a list of parts that are texts.
fn check_content(content: &Value, at: &str) -> Result<(), String> {
    match content.kind() {
        ValueKind::String => return Ok(()),
        ValueKind::Seq => {}
        kind => return Err(format!("`{at}.content` is a {kind}; expected a string or a list of parts")),
    }
    for (index, part) in content.try_iter().map_err(|error| error.to_string())?.enumerate() {
        let field = |name: &str| part.get_attr(name).ok().and_then(|value| value.to_str());
        match (field("type").as_deref(), field("text")) {
            (Some("text"), Some(_)) => {}
            (Some("text"), None) => return Err(format!("`{at}.content[{index}]` has no `text`")),
            (Some(other), _) => {
                return Err(format!(
                    "`{at}.content[{index}]` is of type `{}`; only `text` is supported",
                    other.escape_debug()
                ));
            }
            (None, _) => return Err(format!("`{at}.content[{index}]` has no `type`")),
        }
    }
    Ok(())
}

/// Reads ShareGPT's list of `from` and `value`, or a list of messages.
pub(super) fn conversations(list: &Value, name: &str) -> Result<Vec<Value>, String> {
    let first = list.get_item_by_index(0).ok();
    let sharegpt = first.is_some_and(|first| first.get_attr("from").is_ok_and(|from| !from.is_undefined()));
    if !sharegpt {
        return trained(list, name);
    }
    let mut converted = Vec::new();
    for (index, message) in list.try_iter().map_err(|error| error.to_string())?.enumerate() {
        let field = |name: &str| message.get_attr(name).ok().and_then(|value| value.to_str());
        let at = format!("{name}[{index}]");
        let (Some(from), Some(value)) = (field("from"), field("value")) else {
            return Err(format!("`{at}` has no `from` and `value` that are strings"));
        };
        let role = SHAREGPT_ROLES.iter().find(|(name, _)| *name == &*from).map(|(_, role)| *role);
        let role = role.ok_or_else(|| {
            format!(
                "`{at}.from` is `{}`; expected human, gpt or system\nhelp: convert the rows to `messages` of `role` \
                 and `content`",
                from.escape_debug()
            )
        })?;
        if role == ASSISTANT {
            weights::check_answer(&message, &at)?;
        }
        check_media(&message, &format!("{at}."))?;
        let weight = message.get_attr("weight").ok().filter(|weight| !weight.is_undefined());
        let pairs = [("role", Value::from(role)), ("content", Value::from(&*value))];
        let pairs = pairs.into_iter().chain(weight.map(|weight| ("weight", weight)));
        converted.push(self::message(&Value::from_pairs(pairs), &at)?);
    }
    Ok(converted)
}
