//! What queries print, and how they end: answers to stdout, problems to stderr.

use std::io::Write;

use xlaunch_proto::exit::ExitCode;

use xlaunch_agent::Refusal;
use xlaunch_agent::clock;

/// Why a query ends before it is answered.
#[derive(Debug)]
pub(super) enum End {
    /// Something the user should know.
    Problem(Refusal),
    /// Nobody reads stdout any more.
    Unread,
}

impl From<String> for End {
    fn from(problem: String) -> Self {
        Self::Problem(Refusal::new(ExitCode::WorkerFailed, problem))
    }
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Problem(refusal)
    }
}

/// The exit code of a query, whose problem is told.
pub(super) fn finish(result: Result<ExitCode, End>) -> ExitCode {
    match result {
        Ok(exit) => exit,
        Err(End::Unread) => ExitCode::Done,
        Err(End::Problem(Refusal { exit, message })) => {
            say(&format!("error: {}", message.trim()));
            exit
        }
    }
}

/// Text for people beside the answer; nothing of it acts on the terminal.
pub(super) fn say(text: &str) {
    let lines: Vec<_> = text.lines().map(escape).collect();
    // A closed stderr leaves only the exit code to tell.
    let _ = writeln!(std::io::stderr(), "{}", lines.join("\n"));
}

/// Part of the answer.
pub(super) fn put(bytes: &[u8]) -> Result<(), End> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|_| End::Unread)
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    clock::unix().as_secs()
}

/// Characters in a line of the terminal; elsewhere lines are as long as they are.
pub(super) fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_col > 0);
    size.map_or(usize::MAX, |size| size.ws_col.into())
}

/// Lines of at most `width` characters. What programs and users named is in them: nothing of it may act on a terminal.
pub(super) fn fit(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let line = escape(line.trim_end());
        match line.char_indices().nth(width) {
            Some(_) => out.extend(line.chars().take(width.saturating_sub(3)).chain("...".chars())),
            None => out += &line,
        }
        out.push('\n');
    }
    out
}

/// Control characters, and those that change the direction of text, as `\u{1b}`.
pub(super) fn escape(text: &str) -> String {
    let acts = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// What stands in place of the last answer: from the upper left corner, on a terminal that is cleared first.
pub(super) fn redrawn(text: &str, first: bool) -> String {
    if first { format!("\x1b[2J\x1b[H{text}") } else { format!("\x1b[H\x1b[J{text}") }
}
