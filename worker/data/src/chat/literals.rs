//! Escapes in the string literals of a template: those that `minijinja` does not decode as Python does. Pure.

use super::rewrite::code;

/// Rewrites `\a`, `\v` and `\U0001f600` in string literals as escapes that `minijinja` decodes. `\N{NAME}` is refused:
/// it would need the names of all characters.
///
/// # Errors
/// The reason, with the line.
pub(super) fn rewrite_escapes(template: &str) -> Result<String, String> {
    let (mut out, mut copied) = (String::with_capacity(template.len()), 0);
    for place in code(template) {
        let (mut quote, mut at) = (None, place.start);
        while let Some(character) = template[at..place.end].chars().next() {
            let start = at;
            at += character.len_utf8();
            match (quote, character) {
                (None, '"' | '\'') => quote = Some(character),
                (Some(open), _) if character == open => quote = None,
                (Some(_), '\\') => {
                    let (length, value) = escape(&template[at..place.end]).map_err(|reason| {
                        let line = template[..start].matches('\n').count() + 1;
                        format!("{reason} (line {line} of the template)")
                    })?;
                    at += length;
                    if let Some(value) = value {
                        out.push_str(&template[copied..start]);
                        out.extend(
                            value.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")),
                        );
                        copied = at;
                    }
                }
                _ => {}
            }
        }
    }
    Ok(out + &template[copied..])
}

/// Returns the length of an escape without its backslash, and its character if `minijinja` does not decode it.
fn escape(rest: &str) -> Result<(usize, Option<char>), String> {
    match rest.chars().next() {
        Some('a') => Ok((1, Some('\x07'))),
        Some('v') => Ok((1, Some('\x0b'))),
        Some('U') => {
            let digits = rest.get(1..9).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
            let value = digits.and_then(|digits| char::from_u32(u32::from_str_radix(digits, 16).ok()?));
            let value = value.ok_or("`\\U` in a string needs the 8 hexadecimal digits of a character")?;
            Ok((9, Some(value)))
        }
        Some('N') => {
            Err("characters by name (`\\N{...}`) are not supported: write the character itself".into())
        }
        other => Ok((other.map_or(0, char::len_utf8), None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_python_become_those_of_minijinja() {
        for (template, expected) in [
            (r"a\a{{ '\a\v' }}", r"a\a{{ '\u0007\u000b' }}"),
            (r#"{{ "\U0001F600" + '\U0000000a' }}"#, r#"{{ "\ud83d\ude00" + '\u000a' }}"#),
            (r"{% if x == '\\a\'\a' %}\v", r"{% if x == '\\a\'\u0007' %}\v"),
        ] {
            assert_eq!(rewrite_escapes(template).as_deref(), Ok(expected));
        }
        for same in [r"{# '\N{BULLET}' #}{% raw %}{{ '\a' }}{% endraw %}", r"{{ '\n\x41\u00e9\d\é\'\\' }}"] {
            assert_eq!(rewrite_escapes(same).as_deref(), Ok(same));
        }
    }

    #[test]
    fn escapes_without_a_character_are_refused() {
        let error = rewrite_escapes("\n{{ '\\N{BULLET}' }}").unwrap_err();
        assert!(error.contains("write the character itself (line 2 "), "{error}");
        for wrong in [r"{{ '\U0001F60' }}", r"{{ '\U00110000' }}", r"{{ '\U+001F600' }}"] {
            let error = rewrite_escapes(wrong).unwrap_err();
            assert!(error.contains("8 hexadecimal digits"), "{wrong}: {error}");
        }
    }
}
