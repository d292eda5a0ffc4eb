//! Lines of JSONL: texts that are written are read back, and nothing else is taken for text.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use xlaunch_data::fuzz::jsonl;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Bytes { bytes: &'a [u8], field: &'a str, replace: bool },
    Lines(Vec<(&'a str, u8)>),
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Bytes { bytes, field, replace } => {
        if let Ok((documents, ids)) = jsonl(bytes, field, replace) {
            assert!(documents <= bytes.len() && ids.iter().all(|id| *id < 256));
        }
    }
    Input::Lines(lines) => {
        let text: String =
            lines.iter().map(|(text, n)| json!({"a": [n], "text": text}).to_string() + "\n").collect();
        let (documents, ids) = jsonl(text.as_bytes(), "text", false).unwrap();
        assert_eq!(documents, lines.iter().filter(|(text, _)| !text.is_empty()).count());
        let expected: Vec<u32> = lines.iter().flat_map(|(text, _)| text.bytes().map(u32::from)).collect();
        assert_eq!(ids, expected);
    }
});
