//! Finds the text of the assistant in a rendered chat by rendering its beginnings. Pure.
//!
//! The chat is rendered twice for each answer: up to where the model answers (the prompt), and up to its end.
//! Both must be beginnings of the whole chat, with three exceptions that public templates need:
//! - the prompt may end with an opening `<think>`, or with empty thoughts, that are not in the chat;
//! - thoughts may be missing from earlier answers of the whole chat. Such an answer must be the end of the same answer
//!   rendered as the last one, up to a special token, and there must be only one such end;
//! - the end-of-text token may be written after the last message only, which a probe of the template detects.
//!
//! Anything else is refused: it is not known which part of the text the model would have written.

use std::ops::Range;

/// The opening of thoughts, and their end, with which some templates end a prompt.
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// Known ends of a template's messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endings<'a> {
    /// The token that the template writes only after the last message.
    pub(crate) closing: Option<&'a str>,
    /// Special tokens, which may end an answer.
    pub(crate) tokens: &'a [String],
}

/// Returns the range of an answer in `whole`, the rendered chat, including the token that ends it. `prompt` is the chat
/// rendered up to the answer, `answered` up to its end.
///
/// # Errors
/// The reason why it is not known.
pub(crate) fn answer(
    whole: &str,
    prompt: &str,
    answered: &str,
    endings: &Endings<'_>,
) -> Result<Range<usize>, String> {
    let is_beginning = |prompt: &&str| whole.starts_with(*prompt) && answered.starts_with(*prompt);
    let start =
        [Some(prompt), without_thoughts(prompt)].into_iter().flatten().find(is_beginning).map(str::len);
    let start = start.ok_or_else(|| {
        format!(
            "the prompt is not a beginning of the whole chat, from {} on",
            shown(prompt, difference(prompt, whole))
        )
    })?;
    let answered = match endings.closing {
        Some(closing) => answered.trim_end().strip_suffix(closing).unwrap_or(answered),
        None => answered,
    };
    let own = answered.get(start..).unwrap_or_default();
    let (rest, end) = (&whole[start..], ending(own, endings));
    if rest.starts_with(own) {
        let length = end.map_or(own.len(), |_| own.trim_end().len());
        return Ok(start..start + length);
    }
    let changed = || {
        format!("the answer is another one in the whole chat, from {} on", shown(own, difference(own, rest)))
    };
    // An earlier answer without its thoughts.
    let end = end.ok_or_else(changed)?;
    let own = own.trim_end();
    let lengths =
        rest.match_indices(end).map(|(at, _)| at + end.len()).take_while(|length| *length <= own.len());
    let mut possible = lengths.filter(|length| *length > end.len() && own.ends_with(&rest[..*length]));
    match (possible.next(), possible.next()) {
        (Some(length), None) => Ok(start..start + length),
        _ => Err(changed()),
    }
}

/// Returns a prompt without an opening of thoughts at its end, or empty thoughts.
fn without_thoughts(prompt: &str) -> Option<&str> {
    let rest = prompt.trim_end();
    let rest = rest.strip_suffix(END_THINK).unwrap_or(rest);
    rest.trim_end().strip_suffix(THINK)
}

/// Returns the special token at the end of an answer.
fn ending<'a>(own: &str, endings: &Endings<'a>) -> Option<&'a str> {
    let own = own.trim_end();
    let tokens = endings.tokens.iter().map(String::as_str);
    tokens.filter(|token| own.ends_with(token)).max_by_key(|token| token.len())
}

/// Returns whether a template writes `closing` only after the last message. `short` is a rendered chat, `long` the same
/// chat with more messages.
pub(crate) fn is_closing(short: &str, long: &str, closing: &str) -> bool {
    let without = short.trim_end().strip_suffix(closing);
    !long.starts_with(short.trim_end()) && without.is_some_and(|without| long.starts_with(without.trim_end()))
}

/// Returns the token with which a template ends an answer only if another message follows. `short` is a rendered chat
/// of a question and an answer, `long` the same chat with more messages. A token that also precedes the question
/// begins a message, rather than ending one.
pub(crate) fn separator<'a>(
    short: &str,
    long: &str,
    [question, answer]: [&str; 2],
    tokens: &'a [String],
) -> Option<&'a str> {
    let (before, _) = short.split_once(question)?;
    let (_, last) = short.split_once(answer)?;
    let (_, next) = long.split_once(answer)?;
    let at_start = tokens.iter().filter(|token| next.trim_start().starts_with(token.as_str()));
    let token = at_start.max_by_key(|token| token.len())?;
    (!last.contains(token.as_str()) && !before.contains(token.as_str())).then_some(token)
}

/// Returns the length of the common beginning, which ends between characters.
fn difference(one: &str, other: &str) -> usize {
    let same = one.chars().zip(other.chars()).take_while(|(one, other)| one == other);
    same.map(|(one, _)| one.len_utf8()).sum()
}

fn shown(text: &str, at: usize) -> String {
    let rest: String = text[at..].chars().take(24).collect();
    if rest.is_empty() { "its end".into() } else { format!("`{}`", rest.escape_debug()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: &str = "<|end|>";

    fn found(whole: &str, prompt: &str, answered: &str, closing: Option<&str>) -> Result<String, String> {
        let tokens = [END, "<eos>"].map(String::from);
        let endings = Endings { closing, tokens: &tokens };
        answer(whole, prompt, answered, &endings).map(|span| whole[span].to_owned())
    }

    #[test]
    fn answer_ends_with_the_token_of_its_end() {
        assert_eq!(
            found("U:hi A:yes<|end|>\nU:", "U:hi A:", "U:hi A:yes<|end|>\n", None).unwrap(),
            "yes<|end|>"
        );
        assert_eq!(found("U:hi A:yes\nU:", "U:hi A:", "U:hi A:yes\n", None).unwrap(), "yes\n");
        // A token that is written at the end of the chat only.
        let (last, more) = ("U:hi A:yes<|end|>\n<eos>", "U:hi A:yes<|end|>\nU:so<|end|>\nA:no<|end|>\n<eos>");
        assert!(is_closing(last, more, "<eos>") && !is_closing("A:a<eos>", "A:a<eos>U:b", "<eos>"));
        for whole in [last, more] {
            assert_eq!(found(whole, "U:hi A:", last, Some("<eos>")).unwrap(), "yes<|end|>");
        }
    }

    #[test]
    fn token_that_only_separates_messages_is_told_from_one_that_begins_or_ends_them() {
        let tokens = ["<|im_start|>", "<|im_end|>", "<user>", "<s>"].map(String::from);
        let found = |short: &str, long: &str| separator(short, long, ["Q", "A"], &tokens).map(String::from);
        let chatml = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA";
        assert_eq!(
            found(chatml, &format!("{chatml}<|im_end|>\n<|im_start|>")).as_deref(),
            Some("<|im_end|>")
        );
        assert_eq!(
            found(&format!("{chatml}<|im_end|>\n"), &format!("{chatml}<|im_end|>\n<|im_start|>")),
            None
        );
        assert_eq!(found("<user>Q<bot>A\n", "<user>Q<bot>A\n<user>c"), None);
        assert_eq!(found("<s>u: Q a: A", "<s>u: Q a: A<s>u: c"), None);
    }

    #[test]
    fn thoughts_may_be_missing_from_earlier_answers() {
        let answered = "U:hi A:<think>\nwhy</think>yes<|end|>\n";
        let whole = "U:hi A:yes<|end|>\nU:so";
        assert_eq!(found(whole, "U:hi A:", answered, None).unwrap(), "yes<|end|>");
        for prompt in ["U:hi A:<think>\n", "U:hi A:<think>\n\n</think>\n\n"] {
            assert_eq!(found(whole, prompt, answered, None).unwrap(), "yes<|end|>");
        }
        // Another end of the answer, or one that is not known.
        assert!(
            found("U:hi A:no<|end|>\nU:so", "U:hi A:", answered, None).unwrap_err().contains("another one")
        );
        assert!(
            found("U:hi A:yes\nU:so", "U:hi A:", "U:hi A:a yes\n", None).unwrap_err().contains("another one")
        );
        // Tokens of the end within an answer, which may leave more than one possibility.
        let end_inside = ("U:hi A:no<|end|>yes<|end|>\nU:so", "U:hi A:<think></think>no<|end|>yes<|end|>");
        assert_eq!(found(end_inside.0, "U:hi A:", end_inside.1, None).unwrap(), "no<|end|>yes<|end|>");
        let twice = ("U:hi A:a<|end|>a<|end|>\nU:so", "U:hi A:<think></think>a<|end|>a<|end|>");
        assert!(found(twice.0, "U:hi A:", twice.1, None).unwrap_err().contains("another one"));
    }

    #[test]
    fn prompt_that_is_rendered_otherwise_is_refused() {
        let error = found("tools U:hi A:yes", "U:hi A:", "U:hi A:yes", None).unwrap_err();
        assert!(error.contains("not a beginning of the whole chat, from `U:hi A:` on"), "{error}");
    }
}
