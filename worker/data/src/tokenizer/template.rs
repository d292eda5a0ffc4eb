//! What a tokenizer file adds around and before a text: ids of its template, and spaces. Pure.

use serde_json::{Map, Value, json};

/// Returns the ids that the file's template puts before a text.
pub(super) fn prefix(file: &Map<String, Value>) -> Vec<u32> {
    let ids = members(file.get("post_processor"), "processors").into_iter().find_map(|processor| {
        match processor["type"].as_str()? {
            "TemplateProcessing" => {
                let names = processor["single"]
                    .as_array()?
                    .iter()
                    .map_while(|part| part["SpecialToken"]["id"].as_str());
                let ids = names.filter_map(|name| processor["special_tokens"][name]["ids"].as_array());
                Some(ids.flatten().collect())
            }
            "BertProcessing" | "RobertaProcessing" => Some(vec![&processor["cls"][1]]),
            _ => None,
        }
    });
    ids.unwrap_or_default().into_iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// Changes the template to put this token before a text, or no token. Processors that add no ids are kept.
pub(super) fn set_first(file: &mut Map<String, Value>, first: Option<(&str, u32)>) {
    let adds_ids = |processor: &Value| {
        matches!(
            processor["type"].as_str(),
            Some("TemplateProcessing" | "BertProcessing" | "RobertaProcessing")
        )
    };
    let mut kept: Vec<Value> =
        members(file.get("post_processor"), "processors").into_iter().cloned().collect();
    kept.retain(|processor| !adds_ids(processor));
    kept.extend(first.map(|(token, id)| processing(token, id)));
    let processor = match kept.len() {
        0 => Value::Null,
        1 => kept.remove(0),
        _ => json!({"type": "Sequence", "processors": kept}),
    };
    file.insert("post_processor".into(), processor);
}

fn processing(token: &str, id: u32) -> Value {
    let special = |type_id: u32| json!({"SpecialToken": {"id": token, "type_id": type_id}});
    let text = |name: &str, type_id: u32| json!({"Sequence": {"id": name, "type_id": type_id}});
    json!({
        "type": "TemplateProcessing",
        "single": [special(0), text("A", 0)],
        "pair": [special(0), text("A", 0), special(1), text("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    })
}

/// Returns whether a file may write a prefix before a text.
pub(super) fn has_prefix(json: &str) -> bool {
    ["\"Prepend\"", "\"Metaspace\"", "\"add_prefix_space\""].iter().any(|key| json.contains(key))
}

/// See [`remove_prefix_of`].
pub(super) fn remove_prefix(file: &mut Map<String, Value>) {
    remove_prefix_of(file);
}

/// Removes the prefix that is written before a text. Returns whether there was one.
pub(super) fn remove_prefix_of(file: &mut Map<String, Value>) -> bool {
    let mut removed = false;
    if let Some(normalizer) = file.get_mut("normalizer").filter(|value| !value.is_null()) {
        if normalizer["type"] == "Prepend" {
            *normalizer = Value::Null;
            removed = true;
        } else if let Some(list) = normalizer.get_mut("normalizers").and_then(Value::as_array_mut) {
            let count = list.len();
            list.retain(|member| member["type"] != "Prepend");
            removed = count != list.len();
        }
    }
    let Some(pre_tokenizer) = file.get_mut("pre_tokenizer").filter(|value| !value.is_null()) else {
        return removed;
    };
    match pre_tokenizer.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        Some(list) => list.iter_mut().fold(removed, |changed, member| never_prepend(member) | changed),
        None => never_prepend(pre_tokenizer) | removed,
    }
}

fn never_prepend(pre_tokenizer: &mut Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("Metaspace") if pre_tokenizer["prepend_scheme"] != "never" => {
            pre_tokenizer["prepend_scheme"] = "never".into();
            pre_tokenizer["add_prefix_space"] = false.into();
            true
        }
        Some("ByteLevel") if pre_tokenizer["add_prefix_space"] != false => {
            pre_tokenizer["add_prefix_space"] = false.into();
            true
        }
        _ => false,
    }
}

/// Returns a component, or its members if it is a sequence.
pub(super) fn members<'a>(component: Option<&'a Value>, list: &str) -> Vec<&'a Value> {
    match component {
        None | Some(Value::Null) => Vec::new(),
        Some(component) if component["type"] == "Sequence" => {
            let list_of = component[list].as_array().map_or(&[][..], Vec::as_slice);
            list_of.iter().flat_map(|member| members(Some(member), list)).collect()
        }
        Some(component) => vec![component],
    }
}
