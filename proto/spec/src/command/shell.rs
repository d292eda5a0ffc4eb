//! Formats command lines for display.

use std::ffi::OsStr;

/// Maximum length of a command line that is shown in full, in characters.
const MAX_LINE_CHARS: usize = 4096;

/// Returns program and arguments as one line, quoted where a shell needs it, and truncated if it is very long.
pub fn quote_line<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> String {
    let quote = |word: &OsStr| {
        let text = word.to_string_lossy();
        let plain = |c: char| c.is_alphanumeric() || "_-./=:,@%+".contains(c);
        if !text.is_empty() && text.chars().all(plain) {
            text.into_owned()
        } else {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
    };
    let mut line = words.into_iter().map(quote).collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = line.char_indices().nth(MAX_LINE_CHARS) {
        line.truncate(end);
        line += "...";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_line_can_be_pasted_into_a_shell() {
        let line = quote_line(["train.py", "--name", "it's two", "", "a=b"].map(OsStr::new));
        assert_eq!(line, r"train.py --name 'it'\''s two' '' a=b");
        let long = "é".repeat(MAX_LINE_CHARS + 1);
        assert_eq!(quote_line([OsStr::new(&long)]).chars().count(), MAX_LINE_CHARS + 3);
    }
}
