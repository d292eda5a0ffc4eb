//! Chats: how they are written as text, and which of their tokens to train on.
//!
//! ```text
//! row of JSON --row--> messages --template--> text, spans of the assistant --encode--> ids, mask
//!                                  \--> beginnings of the text --spans--/
//! ```
//! - `row` reads rows, `alpaca` those of instructions, and `weights` refuses those with weights that are not read;
//! - `templates` finds the chat template of a tokenizer; `template` renders chats with it as Python's `transformers`
//!   does; `rewrite` and `literals` prepare its source, `python` and `json` have what templates expect of Python, and
//!   `content` converts messages to the form that a template accepts;
//! - a row may have two answers, of which the first is preferred: it becomes two documents, one for each;
//! - the text of the assistant is the contents of a template's `generation` blocks; `spans` derives it for templates
//!   that have none.
//!
//! Invariant: if it is not certain which tokens the model would write, a chat is refused.

mod alpaca;
mod content;
mod encode;
mod json;
mod literals;
mod preference;
mod python;
mod rewrite;
mod row;
mod spans;
mod template;
mod templates;
mod weights;

/// The role of the model.
pub(crate) const ASSISTANT: &str = "assistant";

/// Returns a message of a role.
fn message_of(role: &str, content: Value) -> Value {
    Value::from_pairs([("role", Value::from(role)), ("content", content)])
}

/// Names of the fields of a row, apart from [`ALPACA_COLUMNS`], [`MEDIA`] and those of [`is_loss_key`].
pub(crate) const CHAT_COLUMNS: &[&str] = &[
    "messages",
    "conversations",
    "prompt",
    "completion",
    "text",
    row::CHOSEN,
    row::REJECTED,
    row::TOOLS,
    "functions",
    "system",
    "system_prompt",
    "label",
    "chat_template_kwargs",
];

/// Parsed JSON. Unlike in `serde_json`, objects keep the order of their keys, in which templates print them.
pub use minijinja::Value;

pub(crate) use alpaca::FIELDS as ALPACA_COLUMNS;
pub(crate) use encode::{ChatEncoder, Document, Outcome};
pub(crate) use json::parse_json;
pub(crate) use preference::is_question;
pub(crate) use row::MEDIA;
pub use template::Template;
pub(crate) use templates::{CONFIG_FILE, TEMPLATE_FILE};
pub use templates::{Templates, template_names, template_of, template_tokens};
pub(crate) use weights::is_loss_key;

pub use crate::tokenizer::special_token;

#[cfg(test)]
mod tests;
