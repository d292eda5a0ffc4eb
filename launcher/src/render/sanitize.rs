//! Makes another user's log safe to print: readable, but unable to control the terminal.

use super::text::escape;

/// Turns a log into safe text, chunk by chunk. Line feeds, tabs and carriage returns are kept, other control characters
/// are escaped, and invalid UTF-8 is replaced.
#[derive(Debug, Default)]
pub(crate) struct LogSanitizer {
    /// An incomplete UTF-8 sequence at the end of the last chunk.
    incomplete: Vec<u8>,
}

impl LogSanitizer {
    pub(crate) fn text(&mut self, chunk: &[u8]) -> String {
        self.incomplete.extend(chunk);
        let bytes = std::mem::take(&mut self.incomplete);
        let mut text = String::with_capacity(bytes.len());
        let mut parts = bytes.utf8_chunks().peekable();
        while let Some(part) = parts.next() {
            for line in part.valid().split_inclusive(['\n', '\t', '\r']) {
                let end = line.len() - usize::from(line.ends_with(['\n', '\t', '\r']));
                text += &escape(&line[..end]);
                text += &line[end..];
            }
            let is_incomplete = std::str::from_utf8(part.invalid()).is_err_and(|e| e.error_len().is_none());
            if is_incomplete && parts.peek().is_none() {
                self.incomplete = part.invalid().to_vec();
            } else if !part.invalid().is_empty() {
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
    fn control_sequences_are_escaped_and_line_breaks_kept() {
        let mut log = LogSanitizer::default();
        let shown = log.text("50%\r\tgrün\n\x1b]52;c;cm0=\x07\x1b[2J\u{9b}2J\u{202e}\x08\n".as_bytes());
        let escaped = "\\u{1b}]52;c;cm0=\\u{7}\\u{1b}[2J\\u{9b}2J\\u{202e}\\u{8}";
        assert_eq!(shown, format!("50%\r\tgrün\n{escaped}\n"));
        assert_eq!(log.text(b"\x9b2J\xff.\n"), "\u{fffd}2J\u{fffd}.\n");
    }

    #[test]
    fn character_split_between_chunks_is_decoded() {
        let mut log = LogSanitizer::default();
        let bytes = "a\u{1f600}b\u{9b}".as_bytes();
        let chunks: String = bytes.chunks(1).map(|chunk| log.text(chunk)).collect();
        assert_eq!(chunks, "a\u{1f600}b\\u{9b}");
        assert_eq!(log.text(b"\xf0\x9f") + &log.text(b"x"), "\u{fffd}x");
    }
}
