//! Splits a stream of bytes into lines, independently of the chunks in which it arrives.

/// Lines longer than this are passed on in pieces of this size.
pub(super) const MAX_PIECE_BYTES: usize = 256 << 10;

/// A line with its line ending, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The bytes as they arrived, including the newline at the end of a line.
    pub(super) bytes: &'a [u8],
    /// An earlier piece began the same line.
    pub(super) continues: bool,
}

/// Splits the bytes of one stream into lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
    continues: bool,
}

impl Lines {
    /// Calls `each` for every line that `bytes` complete, and for pieces of about [`MAX_PIECE_BYTES`] bytes of a line
    /// that does not end.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(Piece<'_>)) {
        while !bytes.is_empty() {
            let room = MAX_PIECE_BYTES - self.partial.len();
            let within = &bytes[..bytes.len().min(room)];
            let end = within.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let (piece, rest) = bytes.split_at(end.unwrap_or(within.len()));
            bytes = rest;
            if end.is_none() {
                self.partial.extend_from_slice(piece);
                if piece.len() == room {
                    self.flush(&mut each);
                }
            } else if self.partial.is_empty() {
                self.emit(piece, &mut each);
            } else {
                let mut line = std::mem::take(&mut self.partial);
                line.extend_from_slice(piece);
                self.emit(&line, &mut each);
                line.clear();
                self.partial = line;
            }
        }
    }

    /// Passes on an unfinished line, except for an incomplete character at its end. Later bytes continue the line.
    pub(super) fn flush(&mut self, mut each: impl FnMut(Piece<'_>)) {
        let mut piece = std::mem::take(&mut self.partial);
        let whole = whole_characters(&piece).len();
        self.partial = piece.split_off(whole);
        if !piece.is_empty() {
            self.emit(&piece, &mut each);
        }
    }

    /// Passes on all bytes of an unfinished line at the end of the stream.
    pub(super) fn end(&mut self, mut each: impl FnMut(Piece<'_>)) {
        let piece = std::mem::take(&mut self.partial);
        if !piece.is_empty() {
            self.emit(&piece, &mut each);
        }
    }

    /// Returns whether [`flush`](Self::flush) would pass on any bytes.
    pub(super) fn has_partial_line(&self) -> bool {
        !whole_characters(&self.partial).is_empty()
    }

    fn emit(&mut self, bytes: &[u8], each: &mut impl FnMut(Piece<'_>)) {
        each(Piece { bytes, continues: self.continues });
        self.continues = !bytes.ends_with(b"\n");
    }
}

/// Returns the bytes without an incomplete UTF-8 character at their end. Invalid bytes count as complete characters.
pub(super) fn whole_characters(bytes: &[u8]) -> &[u8] {
    // A character has up to four bytes, all but the first of the form 0b10xxxxxx.
    for (length, byte) in (1..4).zip(bytes.iter().rev()) {
        let expected = match byte {
            0x80..=0xbf => continue,
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => 1,
        };
        return if length < expected { &bytes[..bytes.len() - length] } else { bytes };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(parts: &[&[u8]]) -> Vec<(Vec<u8>, bool)> {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        let mut keep = |piece: Piece<'_>| out.push((piece.bytes.to_vec(), piece.continues));
        for part in parts {
            lines.feed(part, &mut keep);
        }
        lines.end(&mut keep);
        out
    }

    /// Bytes with many newlines, sometimes with a line that is longer than the limit.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let short = prop::collection::vec(prop::sample::select(b"ab\r\n\xff\xe2\x82\xac".to_vec()), 0..200);
        let long = (0..MAX_PIECE_BYTES).prop_map(|length| "x\u{20ac}".repeat(length).into_bytes());
        prop::collection::vec(prop_oneof![9 => short, 1 => long], 0..5).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_chunking_gives_the_same_lines(
            bytes in stream(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let parts: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            let out = pieces(&parts);
            prop_assert_eq!(&out, &pieces(&[&bytes]));
            prop_assert_eq!(out.iter().flat_map(|(line, _)| line.clone()).collect::<Vec<_>>(), bytes);
            let mut open = false;
            for (line, continues) in &out {
                prop_assert_eq!(*continues, open);
                prop_assert!(line.len() <= MAX_PIECE_BYTES && !line[..line.len() - 1].contains(&b'\n'));
                open = !line.ends_with(b"\n");
            }
        }
    }

    #[test]
    fn flushed_line_is_continued() {
        let (mut lines, mut out) = (Lines::default(), Vec::new());
        lines.feed(b"name? ", |_| unreachable!("the line has not ended"));
        assert!(lines.has_partial_line());
        lines.flush(|piece| out.push((piece.bytes.to_vec(), piece.continues)));
        lines.feed(b"me\nnext\n", |piece| out.push((piece.bytes.to_vec(), piece.continues)));
        let expected = [(&b"name? "[..], false), (b"me\n", true), (b"next\n", false)];
        assert_eq!(out, expected.map(|(line, continues)| (line.to_vec(), continues)));
    }

    #[test]
    fn character_is_not_flushed_in_its_middle() {
        for text in ["\u{e9}", "\u{20ac}", "\u{1f600}"].map(|character| format!("ab{character}")) {
            for cut in 3..text.len() {
                let (begin, end) = text.as_bytes().split_at(cut);
                let (mut lines, mut out) = (Lines::default(), Vec::new());
                let mut keep = |piece: Piece<'_>| out.push(piece.bytes.to_vec());
                lines.feed(begin, &mut keep);
                lines.flush(&mut keep);
                assert!(!lines.has_partial_line());
                lines.feed(end, &mut keep);
                lines.flush(&mut keep);
                assert_eq!(out, [b"ab".to_vec(), text.as_bytes()[2..].to_vec()]);
            }
        }
        for invalid in [&b"a\xff"[..], b"\x80\x80\x80\x80", b"a\xc3\xa9\xbf", b"\xc0"] {
            assert_eq!(whole_characters(invalid), invalid);
        }
    }
}
