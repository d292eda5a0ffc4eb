//! Keys that leave answers or whole rows out of the loss. Only `weight` 0 and 1 of a message are read. Other keys are
//! refused, as what they leave out would be trained on. Pure.

use minijinja::value::{Value, ValueKind};

use super::json::field;

const WEIGHT: &str = "weight";

/// Keys by which other trainers leave an answer or a row out of the loss, and the value that does.
const OTHER_WEIGHTS: [(&str, bool); 7] = [
    ("train", false),
    ("train_on", false),
    ("training", false),
    ("trainable", false),
    ("loss", false),
    ("mask", true),
    ("masked", true),
];

/// Keys of trainers that weigh an answer, or parts of it. Any value other than 1 would be trained on as 1.
const OTHER_SCALES: [&str; 4] = ["loss_weight", "loss_scale", "loss_mask", "train_detail"];

/// Returns whether a field of a row may leave it out of the loss.
pub(crate) fn is_loss_key(name: &str) -> bool {
    name == WEIGHT || OTHER_SCALES.contains(&name) || OTHER_WEIGHTS.iter().any(|(key, _)| *key == name)
}

/// Returns whether the loss of an answer counts: not with `weight` 0, as in OpenAI's format.
pub(super) fn is_counted(message: &Value) -> bool {
    let weight = message.get_attr(WEIGHT).ok().and_then(|weight| f64::try_from(weight).ok());
    weight != Some(0.0)
}

/// Refuses an answer that is left out of the loss by a key that is not read.
pub(super) fn check_answer(answer: &Value, at: &str) -> Result<(), String> {
    match other_weight(answer) {
        None => Ok(()),
        Some((key, value)) => Err(format!(
            "`{at}.{key}` is {value}, which is not read\nhelp: leave the message out of the loss with `\"weight\": 0`, \
             or remove the key"
        )),
    }
}

/// Refuses a row that is left out of the loss as a whole, or that has a weight. Fields of these names may also be about
/// something else, such as the class of a text: only values that are weights are refused.
pub(super) fn check_row(row: &Value) -> Result<(), String> {
    if let Some(label) = field(row, "label").filter(is_undesirable) {
        return Err(format!(
            "`label` of the row is {label}: the row has an answer that the model should not write\nhelp: remove such \
             rows, see --on-error, or remove the key if it is about something else"
        ));
    }
    let weight = field(row, WEIGHT).filter(is_other_than_one).map(|weight| (WEIGHT, weight));
    match weight.or_else(|| other_weight(row)) {
        None => Ok(()),
        Some((key, value)) => Err(format!(
            "`{key}` of the row is {value}, but rows have no weights\nhelp: remove such rows, or the key; \
             `\"weight\": 0` in a message of the assistant leaves that message out of the loss"
        )),
    }
}

/// Returns whether a label is that of bad answers in the rows of TRL's KTO trainer, in any of its spellings.
fn is_undesirable(label: &Value) -> bool {
    let text = label.to_string();
    ["false", "undesirable"].iter().any(|name| text.eq_ignore_ascii_case(name))
        || text.parse::<f64>().is_ok_and(|number| number <= 0.0)
}

fn is_other_than_one(weight: &Value) -> bool {
    let number: Option<f64> = weight.to_string().parse().ok();
    match number {
        Some(_) => number != Some(1.0),
        None => weight.kind() == ValueKind::Bool && !weight.is_true(),
    }
}

/// Returns a key of an answer or a row that leaves it out of the loss, and its value.
fn other_weight(value: &Value) -> Option<(&'static str, Value)> {
    for (key, leaves_out) in OTHER_WEIGHTS {
        let Some(value) = field(value, key) else { continue };
        let is_flag = matches!(value.kind(), ValueKind::Bool | ValueKind::Number);
        let is_text = value.as_str().is_some_and(|text| text.eq_ignore_ascii_case(&leaves_out.to_string()));
        if is_flag && value.is_true() == leaves_out || is_text {
            return Some((key, value));
        }
    }
    let is_one = |value: &Value| [Value::from(1), Value::from(true)].contains(value);
    OTHER_SCALES.into_iter().find_map(|key| Some((key, field(value, key).filter(|value| !is_one(value))?)))
}
