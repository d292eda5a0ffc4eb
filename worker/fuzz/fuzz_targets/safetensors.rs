//! Files of tensors: a header with any content, followed by at most as much data as a small model has. Every accepted
//! value lies within the file and within the arena.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use xlaunch_worker::fuzz::{parameters, tensors};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    File(&'a [u8]),
    Header { text: &'a [u8], length: Option<u64>, data: u16 },
    /// The tensors of the model, with changes to some of them.
    Changed { changes: Vec<(u8, Change<'a>)>, moments: bool, padding: u8, data: Option<u32> },
}

#[derive(Arbitrary, Debug)]
enum Change<'a> {
    Removed,
    Renamed(&'a str),
    Part(u16, u16),
    Type(u8),
    Shape(Vec<u16>),
    Offsets(u64, u64),
}

fn file(input: &Input<'_>) -> (Vec<u8>, bool) {
    match input {
        Input::File(bytes) => (bytes.to_vec(), false),
        Input::Header { text, length, data } => {
            let length = length.unwrap_or(text.len() as u64);
            ([&length.to_le_bytes()[..], text, &vec![0; usize::from(*data)]].concat(), false)
        }
        Input::Changed { changes, moments, padding, data } => {
            let mut header = Map::new();
            let mut end = 0;
            let prefixes: &[&str] = if *moments { &["m.", "v."] } else { &[""] };
            let all = prefixes.iter().flat_map(|prefix| parameters().iter().map(move |it| (prefix, it)));
            for (at, (prefix, (name, shape))) in all.enumerate() {
                let begin = end;
                end += 4 * shape.iter().product::<usize>();
                let (mut name, mut info) = (
                    format!("{prefix}{name}"),
                    json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}),
                );
                let change = changes.iter().find(|(index, _)| usize::from(*index) == at);
                match change.map(|(_, change)| change) {
                    Some(Change::Removed) => continue,
                    Some(Change::Renamed(other)) => name = (*other).into(),
                    Some(Change::Part(first, last)) => {
                        name = format!("{name}[{first}:{last}]");
                        info["shape"] = json!([last.saturating_sub(*first)]);
                    }
                    Some(Change::Type(kind)) => info["dtype"] = ["F16", "I32", "U8"][usize::from(kind % 3)].into(),
                    Some(Change::Shape(shape)) => info["shape"] = json!(shape),
                    Some(Change::Offsets(begin, end)) => info["data_offsets"] = json!([begin, end]),
                    None => {}
                }
                header.insert(name, info);
            }
            let mut text = Value::Object(header).to_string().into_bytes();
            text.resize(text.len() + usize::from(*padding), b' ');
            let data = data.map_or(end, |data| usize::try_from(data).unwrap_or(0) % (2 * end));
            ([&(text.len() as u64).to_le_bytes()[..], &text, &vec![0; data]].concat(), *moments)
        }
    }
}

fuzz_target!(|input: Input<'_>| {
    let (bytes, moments) = file(&input);
    tensors(&bytes, moments);
});
