//! Makes text from workers, peers and files safe to print on a terminal.

/// Escapes all characters that move the cursor, change colours or reverse the direction of writing.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let is_bidi =
            matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match c {
            '\t' => out.push(c),
            _ if c.is_control() || is_bidi => out.extend(c.escape_default()),
            _ => out.push(c),
        }
    }
    out
}
