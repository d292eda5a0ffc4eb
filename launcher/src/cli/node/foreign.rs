//! Another user's log on a terminal: it is read there, and acts on nothing.

use crate::cli::console::escape;

/// The log, piece by piece, as text. Lines, tabs and carriage returns stay; whatever else acts on a terminal is written out,
/// and what is not UTF-8 is replaced.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    /// The begin of a character whose end has not come.
    rest: Vec<u8>,
}

impl Foreign {
    /// What can be shown of the log with this next piece.
    pub(super) fn text(&mut self, piece: &[u8]) -> String {
        self.rest.extend(piece);
        let bytes = std::mem::take(&mut self.rest);
        let mut text = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            for part in chunk.valid().split_inclusive(['\n', '\t', '\r']) {
                let end = part.len() - usize::from(part.ends_with(['\n', '\t', '\r']));
                text += &escape(&part[..end]);
                text += &part[end..];
            }
            let unfinished = std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none());
            if unfinished && chunks.peek().is_none() {
                self.rest = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_are_and_nothing_acts_on_the_terminal() {
        let mut log = Foreign::default();
        let shown = log.text("50%\r\tgrün\n\x1b]52;c;cm0=\x07\x1b[2J\u{9b}2J\u{202e}\x08\n".as_bytes());
        let acts = "\\u{1b}]52;c;cm0=\\u{7}\\u{1b}[2J\\u{9b}2J\\u{202e}\\u{8}";
        assert_eq!(shown, format!("50%\r\tgrün\n{acts}\n"));
        assert_eq!(log.text(b"\x9b2J\xff.\n"), "\u{fffd}2J\u{fffd}.\n");
    }

    #[test]
    fn a_character_in_two_pieces_is_one() {
        let mut log = Foreign::default();
        let bytes = "a\u{1f600}b\u{9b}".as_bytes();
        let pieces: String = bytes.chunks(1).map(|piece| log.text(piece)).collect();
        assert_eq!(pieces, "a\u{1f600}b\\u{9b}");
        assert_eq!(log.text(b"\xf0\x9f") + &log.text(b"x"), "\u{fffd}x");
    }
}
