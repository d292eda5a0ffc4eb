//! The end of a stream, kept for the report.

use std::sync::Mutex;

use super::lock;

/// Bytes that are kept at least.
const KEPT: usize = 64 << 10;
/// Lines that are given at most: enough for a whole traceback.
const LINES: usize = 200;
/// Bytes of a line that are given.
const WIDTH: usize = 4096;

/// The last bytes of a stream. Costs a copy per byte, and no look at lines until somebody asks.
#[derive(Debug, Default)]
pub(super) struct Tail(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    /// Something before `bytes` is gone.
    cut: bool,
}

impl Tail {
    pub(super) fn feed(&self, bytes: &[u8]) {
        let mut kept = lock(&self.0);
        kept.bytes.extend_from_slice(bytes);
        if kept.bytes.len() > 2 * KEPT {
            let gone = kept.bytes.len() - KEPT;
            kept.bytes.drain(..gone);
            kept.cut = true;
        }
    }

    /// The last lines, oldest first, as a terminal would show them, without colours: of what a carriage return writes
    /// over, the last.
    pub(super) fn lines(&self) -> Vec<String> {
        let kept = lock(&self.0);
        let mut lines: Vec<&[u8]> = kept.bytes.split(|byte| *byte == b'\n').collect();
        // Behind the last newline there is nothing, before the first one perhaps the end of a line.
        if lines.last().is_some_and(|line| line.is_empty()) {
            lines.pop();
        }
        let first = usize::from(kept.cut && lines.len() > 1);
        lines[first.max(lines.len().saturating_sub(LINES))..].iter().map(|line| shown(line)).collect()
    }
}

fn shown(line: &[u8]) -> String {
    let line = line.trim_ascii_end();
    let line = line.rsplit(|byte| *byte == b'\r').next().unwrap_or(line);
    let line = colourless(line);
    match line.get(..WIDTH) {
        Some(begin) if line.len() > WIDTH => format!("{} [...]", String::from_utf8_lossy(begin)),
        _ => String::from_utf8_lossy(&line).into_owned(),
    }
}

/// The line without sequences that choose a colour: `ESC [ 1 ; 31 m`.
fn colourless(mut line: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len());
    while let Some(at) = line.windows(2).position(|pair| pair == b"\x1b[") {
        out.extend_from_slice(&line[..at]);
        let digits = line[at + 2..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b';').count();
        let end = at + 2 + digits;
        if line.get(end) == Some(&b'm') {
            line = &line[end + 1..];
        } else {
            out.extend_from_slice(&line[at..end]);
            line = &line[end..];
        }
    }
    out.extend_from_slice(line);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(text: &[u8]) -> Vec<String> {
        let tail = Tail::default();
        // Pieces as a pipe may give them.
        text.chunks(1000).for_each(|piece| tail.feed(piece));
        tail.lines()
    }

    #[test]
    fn the_last_lines_are_kept_and_the_unfinished_one_counts() {
        assert_eq!(tail(b""), Vec::<String>::new());
        assert_eq!(tail(b"a\n\nb\r\nc"), ["a", "", "b", "c"]);
        let many: String = (0..100_000).map(|i| format!("line {i}\n")).collect();
        let lines = tail(many.as_bytes());
        assert_eq!((lines.len(), lines[0].as_str(), lines[199].as_str()), (200, "line 99800", "line 99999"));
    }

    #[test]
    fn progress_bars_count_by_their_last_state_and_other_bytes_are_shown_somehow() {
        assert_eq!(tail(b"\r 10%\r 20%\nError\xff\n"), [" 20%", "Error\u{fffd}"]);
        assert_eq!(tail(b"\x1b[1;31mError\x1b[0m: \x1b[2Jno\x1b["), ["Error: \u{1b}[2Jno\u{1b}["]);
    }

    #[test]
    fn a_huge_line_is_cut_and_bounded() {
        let lines = tail(&[&[b'y'; 1 << 20][..], b"\nlast\n"].concat());
        assert_eq!(lines, ["last"]);
        let lines = tail(&[b'y'; 1 << 20]);
        assert_eq!((lines.len(), lines[0].len()), (1, WIDTH + " [...]".len()));
    }
}
