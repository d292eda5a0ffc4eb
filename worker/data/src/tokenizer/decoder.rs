//! Decodes ids incrementally, in whole characters.

use super::Tokenizer;

/// Turns ids into text. The concatenated results of [`Decoder::push`] and [`Decoder::finish`] are the text of all ids.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
    /// The last ids, if text depends on earlier tokens. The first `returned` characters of their text were returned.
    ids: Vec<u32>,
    returned: usize,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), ids: Vec::new(), returned: 0 }
    }

    /// Skips the ids before the text, such as those of a prompt.
    pub fn skip(&mut self, ids: &[u32]) {
        ids.iter().for_each(|id| drop(self.push(*id)));
        self.returned = self.tokenizer.decode(&self.ids).chars().count();
    }

    /// Returns the text that this id completes. It is empty while a character is incomplete, and within a run of bytes
    /// whose text the next byte may change.
    pub fn push(&mut self, id: u32) -> String {
        let tokens = &self.tokenizer.inner.tokens;
        let Some(bytes) = tokens.get(id) else { return String::new() };
        if tokens.concatenate {
            self.bytes.extend(bytes);
            return self.whole_characters();
        }
        self.ids.push(id);
        if tokens.fallback.contains(&id) {
            return String::new();
        }
        let new = self.new_text();
        // Keep the last id as context for the next one: decoders strip a space before the first word.
        self.ids.drain(..self.ids.len() - 1);
        self.returned = self.tokenizer.decode(&self.ids).chars().count();
        new
    }

    /// Returns the remaining text: U+FFFD for a character that was not completed.
    pub fn finish(self) -> String {
        if self.tokenizer.inner.tokens.concatenate {
            return String::from_utf8_lossy(&self.bytes).into_owned();
        }
        self.new_text()
    }

    /// Returns the part of the last ids' text that was not returned before.
    fn new_text(&self) -> String {
        self.tokenizer.decode(&self.ids).chars().skip(self.returned).collect()
    }

    /// Removes and decodes the bytes up to the last character that may still be completed.
    fn whole_characters(&mut self) -> String {
        let held = incomplete(&self.bytes);
        let rest = self.bytes.split_off(self.bytes.len() - held);
        let whole = std::mem::replace(&mut self.bytes, rest);
        String::from_utf8_lossy(&whole).into_owned()
    }
}

/// Returns the number of bytes at the end that start a character without completing it.
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
