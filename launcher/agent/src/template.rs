//! Text with placeholders, as Python's `Template.safe_substitute` fills it in.

/// Replaces `$name` and `${name}` by their values. The name of `$$` is `$`. Placeholders without a value stay as they
/// are.
pub(crate) fn fill<'a>(template: &[u8], value: impl Fn(&[u8]) -> Option<&'a [u8]>) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(template.len()), template);
    while let Some(at) = rest.iter().position(|byte| *byte == b'$') {
        let (before, after) = (&rest[..at], &rest[at + 1..]);
        out.extend_from_slice(before);
        let (name, length) = name(after);
        match value(name) {
            Some(value) => {
                out.extend_from_slice(value);
                rest = &after[length..];
            }
            None => {
                out.push(b'$');
                rest = after;
            }
        }
    }
    out.extend_from_slice(rest);
    out
}

/// Returns the name after a `$`, and the length of the placeholder without that `$`.
fn name(after: &[u8]) -> (&[u8], usize) {
    match after {
        [b'$', ..] => (&after[..1], 1),
        [b'{', inner @ ..] => {
            let end = inner.iter().position(|byte| *byte == b'}');
            end.map_or((&[], 0), |end| (&inner[..end], end + 2))
        }
        _ => {
            let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
            let end = after.iter().position(|byte| !is_part(byte)).unwrap_or(after.len());
            (&after[..end], end)
        }
    }
}
