//! `model.safetensors.index.json`: an accepted index names only files in its own directory.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use xlaunch_worker::fuzz::index;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    Files(Vec<(&'a str, &'a str, bool)>),
}

fuzz_target!(|input: Input<'_>| {
    let files = match input {
        Input::Text(text) => index(text),
        Input::Files(entries) => {
            let named = |file: &str, suffix: bool| if suffix { format!("{file}.safetensors") } else { file.into() };
            let map: Map<String, Value> = entries
                .iter()
                .map(|(tensor, file, suffix)| ((*tensor).to_owned(), Value::String(named(file, *suffix))))
                .collect();
            index(json!({"weight_map": map}).to_string().as_bytes())
        }
    };
    for file in files {
        assert!(!file.contains('/') && file != ".." && file.ends_with(".safetensors"), "{file:?}");
        assert!(!file.chars().any(char::is_control), "{file:?}");
    }
});
