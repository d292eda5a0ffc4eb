//! Decodes ids as they come, in whole characters.

use super::Tokenizer;

/// Ids that are held back for a character that is not complete. No character has more bytes than 4, and ids that stand
/// for no text may come between.
const MAX_HELD_IDS: usize = 16;

/// Turns ids into text. What [`Decoder::push`] and [`Decoder::finish`] return, one after the other, is the text of all
/// ids.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    /// Bytes of a character that is not complete.
    bytes: Vec<u8>,
    /// Where text depends on the tokens before: the last ids, and how many bytes of their text were returned.
    ids: Vec<u32>,
    returned: usize,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), ids: Vec::new(), returned: 0 }
    }

    /// The text that this id completes. Empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.inner.tokens.concatenate {
            self.bytes.extend(self.tokenizer.inner.tokens.get(id).unwrap_or_default());
            return self.whole_characters();
        }
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids);
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() < MAX_HELD_IDS {
            return String::new();
        }
        let new = text.get(self.returned..).unwrap_or_default().to_owned();
        // The last id is context for the next: decoders strip a space before the first word.
        self.ids.drain(..self.ids.len() - 1);
        self.returned = self.tokenizer.decode(&self.ids).len();
        new
    }

    /// The text of what is left: U+FFFD for a character that was not completed.
    pub fn finish(mut self) -> String {
        if self.tokenizer.inner.tokens.concatenate {
            return String::from_utf8_lossy(&self.bytes).into_owned();
        }
        let text = self.tokenizer.decode(&self.ids);
        std::mem::take(&mut self.ids);
        text.get(self.returned..).unwrap_or_default().to_owned()
    }

    /// Takes the bytes up to the last character that may still be completed.
    fn whole_characters(&mut self) -> String {
        let held = incomplete(&self.bytes);
        let rest = self.bytes.split_off(self.bytes.len() - held);
        let whole = std::mem::replace(&mut self.bytes, rest);
        String::from_utf8_lossy(&whole).into_owned()
    }
}

/// Bytes at the end that start a character without completing it.
fn incomplete(bytes: &[u8]) -> usize {
    let mut end = bytes;
    loop {
        match std::str::from_utf8(end) {
            Ok(_) => return 0,
            Err(error) => match error.error_len() {
                None => return end.len() - error.valid_up_to(),
                Some(invalid) => end = &end[error.valid_up_to() + invalid..],
            },
        }
    }
}
