//! Files of token ids, with and without llm.c's header: every id that is read is in the file and below the vocabulary.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use xlaunch_worker::fuzz::tokens;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    File(&'a [u8]),
    Llmc { magic: Option<u32>, version: Option<u32>, tokens: Option<u32>, rest: u8, ids: &'a [u8] },
}

fuzz_target!(|input: Input<'_>| {
    let bytes = match input {
        Input::File(bytes) => bytes.to_vec(),
        Input::Llmc { magic, version, tokens, rest, ids } => {
            let mut header = [0; 256];
            header[..3].copy_from_slice(&[
                magic.unwrap_or(20_240_520),
                version.unwrap_or(1),
                tokens.unwrap_or(u32::try_from(ids.len() / 2).unwrap_or(0)),
            ]);
            header[255] = rest.into();
            let header: Vec<u8> = header.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
            [&header, ids].concat()
        }
    };
    tokens(&bytes);
});
