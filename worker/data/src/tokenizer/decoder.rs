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
    /// Text of the last skipped ids, which later ids may change. Removed from the first text.
    skipped: String,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, bytes: Vec::new(), ids: Vec::new(), returned: 0, skipped: String::new() }
    }

    /// Skips the ids before the text, such as those of a prompt. A character that begins in them is part of the text
    /// only if later ids complete it.
    pub fn skip(&mut self, ids: &[u32]) {
        ids.iter().for_each(|id| drop(self.push(*id)));
        self.end_prompt();
        self.skipped = self.rest();
    }

    /// Returns the text of the whole characters in a run of bytes that ends a prompt, so that later ids do not change
    /// it. The decoder of Hugging Face turns each byte of a run that is not UTF-8 as a whole into U+FFFD, so one byte
    /// after the prompt would rewrite the prompt's end.
    pub fn end_prompt(&mut self) -> String {
        let tokens = &self.tokenizer.inner.tokens;
        let is_byte = |id: &u32| tokens.fallback.contains(id);
        let run = self.ids.iter().rev().take_while(|id| is_byte(id)).count();
        let run = &self.ids[self.ids.len() - run..];
        let bytes: Vec<u8> = run.iter().filter_map(|id| tokens.get(*id)).flatten().copied().collect();
        let held = incomplete(&bytes);
        if held == run.len() {
            return String::new();
        }
        // Another token in place of the run keeps later bytes apart from it, and the space of a word after it.
        let mut others = self.ids.iter().chain(&tokens.separator).copied();
        let separator = others.find(|id| !is_byte(id));
        let held = self.ids.split_off(self.ids.len() - held);
        let text = self.new_text();
        self.ids = separator.into_iter().collect();
        self.returned = self.tokenizer.decode(&self.ids).chars().count();
        self.ids.extend(held);
        text
    }

    /// Returns the text that this id completes. It is empty while a character is incomplete, and within a run of bytes
    /// whose text the next byte may change.
    pub fn push(&mut self, id: u32) -> String {
        let earlier = self.settle(id);
        let tokens = &self.tokenizer.inner.tokens;
        let Some(bytes) = tokens.get(id) else { return String::new() };
        if tokens.concatenate {
            self.bytes.extend(bytes);
            let text = self.whole_characters();
            return earlier + &self.unskipped(text);
        }
        self.ids.push(id);
        if tokens.fallback.contains(&id) {
            return String::new();
        }
        let new = self.new_text();
        // Keep the last id as context for the next one: decoders strip a space before the first word.
        self.ids.drain(..self.ids.len() - 1);
        self.returned = self.tokenizer.decode(&self.ids).chars().count();
        earlier + &self.unskipped(new)
    }

    /// Returns the text of earlier ids that this id, the next one, does not change, such as U+FFFD for a character that
    /// it does not continue. [`push`](Self::push) then returns the rest of its text.
    pub fn settle(&mut self, id: u32) -> String {
        let tokens = &self.tokenizer.inner.tokens;
        let Some(bytes) = tokens.get(id) else { return String::new() };
        let is_settled = if tokens.concatenate {
            let error = std::str::from_utf8(&[&self.bytes, bytes].concat()).err();
            let invalid = error.filter(|error| error.valid_up_to() == 0).and_then(|error| error.error_len());
            invalid == Some(self.bytes.len())
        } else {
            let is_byte = |id: &u32| tokens.fallback.contains(id);
            self.ids.last().is_some_and(is_byte) && !is_byte(&id)
        };
        if !is_settled {
            return String::new();
        }
        let text = self.rest();
        self.bytes.clear();
        self.returned = self.tokenizer.decode(&self.ids).chars().count();
        self.unskipped(text)
    }

    /// Returns the remaining text: U+FFFD for a character that was not completed.
    pub fn finish(mut self) -> String {
        let rest = self.rest();
        self.unskipped(rest)
    }

    /// Returns the text of what is held back, as if no more ids followed.
    fn rest(&self) -> String {
        if self.tokenizer.inner.tokens.concatenate {
            return String::from_utf8_lossy(&self.bytes).into_owned();
        }
        self.new_text()
    }

    /// Removes what the first text has in common with that of the skipped ids.
    fn unskipped(&mut self, text: String) -> String {
        if text.is_empty() || self.skipped.is_empty() {
            return text;
        }
        let skipped = std::mem::take(&mut self.skipped);
        let common = text.chars().zip(skipped.chars()).take_while(|(new, old)| new == old).count();
        text.chars().skip(common).collect()
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
pub(super) fn incomplete(bytes: &[u8]) -> usize {
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
