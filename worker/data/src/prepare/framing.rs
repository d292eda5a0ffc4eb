//! The ids that frame each document: the one that ends a text, and the one that begins a sequence.

use crate::{Tokenizer, TokenizerError};

/// Number of special tokens that a message lists.
const SHOWN_TOKENS: usize = 8;

/// Use of the id that begins a sequence at the start of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bos {
    /// According to the tokenizer's template.
    Auto,
    /// Yes.
    Always,
    /// No.
    Never,
}

/// Applies the frame of documents to a tokenizer, so that its encoder, its template and the written data agree.
///
/// `end_of_text` names the token that ends a text, or is `none`; if it is not given, the tokenizer must know the token.
///
/// # Errors
/// There is no such token, none is known, or the template puts several tokens before a text.
pub fn frame(tokenizer: Tokenizer, end_of_text: Option<&str>, bos: Bos) -> Result<Tokenizer, String> {
    let tokenizer = match end_of_text {
        Some("none") => tokenizer.with_end_of_text(None),
        Some(token) => {
            let id = tokenizer.added_id(token);
            let id =
                id.ok_or_else(|| format!("--eot: `{token}` is not a special token; {}", tokens(&tokenizer)))?;
            tokenizer.with_end_of_text(Some(id))
        }
        None if tokenizer.end_of_text().is_none() && tokenizer.name() != Tokenizer::bytes().name() => {
            return Err(format!(
                "it is not known which token of {} ends a text: name it with --eot TOKEN, or let documents follow each \
                 other with --eot none; {}",
                tokenizer.name(),
                tokens(&tokenizer)
            ));
        }
        None => tokenizer,
    };
    let id = match bos {
        Bos::Auto => match tokenizer.prefix() {
            [] => None,
            [id] => Some(*id),
            ids => {
                let name =
                    |id: &u32| format!("`{}`", tokenizer.added_token(*id).unwrap_or_default().escape_debug());
                return Err(format!(
                    "{} puts {} before each text, but a document of prepared data starts with one token at most: \
                     choose --bos always for the first of them, or --bos never",
                    tokenizer.name(),
                    ids.iter().map(name).collect::<Vec<_>>().join(" "),
                ));
            }
        },
        Bos::Never => None,
        Bos::Always => {
            let known = tokenizer.known_bos().or(tokenizer.end_of_text());
            Some(known.ok_or("--bos always: the tokenizer has no token that begins a sequence")?)
        }
    };
    tokenizer.with_bos(id).map_err(|error: TokenizerError| format!("--bos: {error}"))
}

fn tokens(tokenizer: &Tokenizer) -> String {
    let all = tokenizer.added_tokens();
    if all.is_empty() {
        return "it has no special tokens".into();
    }
    let shown: Vec<String> =
        all.iter().take(SHOWN_TOKENS).map(|token| format!("`{}`", token.escape_debug())).collect();
    let more = all.len() - shown.len();
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("its special tokens are {}{rest}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Builds a tokenizer with these added tokens, whose template puts `prefix` before texts.
    fn tokenizer(added: &[&str], prefix: &[&str]) -> Tokenizer {
        let token = |(index, content): (usize, &&str)| {
            json!({
                "id": index + 1, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        };
        let id = |token: &str| added.iter().position(|other| *other == token).unwrap() + 1;
        let special = |token: &&str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let text = |(name, type_id)| json!({"Sequence": {"id": name, "type_id": type_id}});
        let ids =
            |token: &&str| ((*token).into(), json!({"id": token, "ids": [id(token)], "tokens": [token]}));
        let template = json!({
            "type": "TemplateProcessing",
            "single": prefix.iter().map(special).chain([("A", 0)].map(text)).collect::<Vec<_>>(),
            "pair": [text(("A", 0)), text(("B", 1))],
            "special_tokens": prefix.iter().map(ids).collect::<serde_json::Map<_, _>>(),
        });
        let template = if prefix.is_empty() { serde_json::Value::Null } else { template };
        let file = json!({
            "version": "1.0", "added_tokens": added.iter().enumerate().map(token).collect::<Vec<_>>(),
            "post_processor": template, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        });
        Tokenizer::from_json(file.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn unknown_end_of_text_is_refused_unless_named() {
        let unknown = || tokenizer(&["<doc>", "<x>"], &[]);
        let error = frame(unknown(), None, Bos::Auto).unwrap_err();
        assert!(error.contains("--eot TOKEN") && error.contains("`<doc>`, `<x>`"), "{error}");
        assert_eq!(frame(unknown(), Some("<x>"), Bos::Auto).unwrap().end_of_text(), Some(2));
        assert_eq!(frame(unknown(), Some("none"), Bos::Auto).unwrap().end_of_text(), None);
        assert!(
            frame(unknown(), Some("<y>"), Bos::Auto).unwrap_err().contains("`<y>` is not a special token")
        );
        for name in ["<|eos|>", "<|bos|>", "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>"] {
            assert_eq!(
                frame(tokenizer(&["<x>", name], &[]), None, Bos::Auto).unwrap().end_of_text(),
                Some(2)
            );
        }
        assert_eq!(frame(Tokenizer::bytes(), None, Bos::Auto).unwrap().end_of_text(), None);
    }

    #[test]
    fn template_of_the_tokenizer_is_what_documents_start_with() {
        let with = || tokenizer(&["<s>", "</s>"], &["<s>"]);
        assert_eq!(frame(with(), None, Bos::Auto).unwrap().bos(), Some(1));
        let never = frame(with(), None, Bos::Never).unwrap();
        assert_eq!((never.bos(), never.known_bos(), never.end_of_text()), (None, Some(1), Some(2)));
        assert_eq!(never.encode_prompt("a<s>", true).unwrap(), [0, 1]);
        let again = Tokenizer::from_json(never.to_json().as_bytes()).unwrap();
        assert_eq!(again.encode_prompt("a", true).unwrap(), [0]);
        let always = frame(tokenizer(&["<s>", "</s>"], &[]), None, Bos::Always).unwrap();
        assert_eq!((always.bos(), always.encode_prompt("a", true).unwrap()), (Some(2), vec![2, 0]));
        assert!(frame(Tokenizer::bytes(), None, Bos::Always).unwrap_err().contains("--bos always"));
    }

    #[test]
    fn template_of_two_tokens_is_refused_unless_one_or_none_is_chosen() {
        let with = || tokenizer(&["<mask>", "<sop>", "</s>"], &["<mask>", "<sop>"]);
        let error = frame(with(), None, Bos::Auto).unwrap_err();
        assert!(
            error.contains("puts `<mask>` `<sop>` before each text") && error.contains("--bos never"),
            "{error}"
        );
        for (bos, expected) in [(Bos::Always, &[1, 0][..]), (Bos::Never, &[0])] {
            assert_eq!(frame(with(), None, bos).unwrap().encode_prompt("a", true).unwrap(), expected);
        }
    }
}
