//! Headers of token files: an accepted header has exactly the ids that the file has room for.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use xlaunch_data::shard::{HEADER_BYTES, layout};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    File { head: &'a [u8], bytes: u64 },
    Header { magic: u8, version: Option<i32>, tokens: i32, width: i32, bytes: Option<u64> },
}

fuzz_target!(|input: Input<'_>| {
    let (head, bytes) = match input {
        Input::File { head, bytes } => (head.to_vec(), bytes),
        Input::Header { magic, version, tokens, width, bytes } => {
            let magic = [20_240_520, 20_240_801, 278_895_051, 20_240_522][usize::from(magic % 4)];
            let words = [magic, version.unwrap_or(1), tokens, width];
            let mut head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            head.resize(HEADER_BYTES, 0);
            let fitting = 1024 + u64::from(tokens.unsigned_abs()) * u64::from(width.unsigned_abs());
            (head, bytes.unwrap_or(fitting))
        }
    };
    if let Ok(Some(layout)) = layout(&head, bytes) {
        assert!(layout.header == 1024 && matches!(layout.width, 2 | 4));
        assert_eq!(layout.header + layout.width as u64 * layout.tokens, bytes);
    }
});
