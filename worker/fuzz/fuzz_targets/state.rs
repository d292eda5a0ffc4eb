//! `state.json`: an accepted state is written as it was read, and compared with any job without a panic.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use xlaunch_worker::fuzz::{example_state, state};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    /// Keys of a valid state, with their replacements.
    Changed(Vec<(u8, Replacement<'a>)>),
}

#[derive(Arbitrary, Debug)]
enum Replacement<'a> {
    Removed,
    Null,
    Whole(u64),
    Real(f64),
    Text(&'a str),
    Numbers(Vec<u64>),
    Batch(u64, u64, bool),
    Parents(Vec<(&'a str, u64)>),
    Json(&'a [u8]),
}

fn text(input: &Input<'_>) -> Vec<u8> {
    let changes = match input {
        Input::Text(text) => return text.to_vec(),
        Input::Changed(changes) => changes,
    };
    let mut document = example_state();
    for (at, replacement) in changes {
        let Value::Object(map) = &mut document else { continue };
        let Some(key) = map.keys().nth(usize::from(*at) % map.len().max(1)).cloned() else { continue };
        let value = match replacement {
            Replacement::Removed => {
                map.remove(&key);
                continue;
            }
            Replacement::Null => Value::Null,
            Replacement::Whole(value) => json!(value),
            Replacement::Real(value) => json!(value),
            Replacement::Text(value) => json!(value),
            Replacement::Numbers(values) => json!(values),
            Replacement::Batch(batch, accumulate, shuffle) => {
                json!({"batch": batch, "accumulate": accumulate, "shuffle": shuffle})
            }
            Replacement::Parents(parents) => {
                parents.iter().map(|(run, step)| json!({"run": run, "step": step})).collect()
            }
            Replacement::Json(text) => serde_json::from_slice(text).unwrap_or_default(),
        };
        map.insert(key, value);
    }
    document.to_string().into_bytes()
}

fuzz_target!(|input: Input<'_>| {
    state(&text(&input));
});
