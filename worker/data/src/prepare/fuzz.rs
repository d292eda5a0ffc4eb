//! Runs the encoder on a block as the reader would pass it.

use std::sync::Arc;

use super::Invalid;
use super::blocks::{Block, Form};
use super::encode::Encoder;
use crate::Tokenizer;

/// Returns the documents and ids of lines of JSONL with the text in `field`, or the error message.
pub fn jsonl(bytes: &[u8], field: &str, replace: bool) -> Result<(usize, Vec<u32>), String> {
    let invalid = if replace { Invalid::Replace } else { Invalid::Error };
    let encoder =
        Encoder { tokenizer: Tokenizer::bytes(), field: field.into(), invalid, skip: false, chats: None };
    let block = Block {
        label: "input".into(),
        form: Arc::new(Form::Json),
        bytes: bytes.into(),
        continues: false,
        offset: 0,
        line: 1,
        read: 0,
    };
    let encoded = encoder.encode(&block).map_err(|error| error.to_string())?;
    assert_eq!(encoded.parts.iter().map(|part| part.ids).sum::<usize>(), encoded.ids.len());
    Ok((encoded.parts.len(), encoded.ids))
}
