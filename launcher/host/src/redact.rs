//! Secrets in command lines and settings that are shown to users of other nodes, and in their logs. Pure.
//!
//! A value is hidden if its name says that it is a secret (`--api-key`, `HF_TOKEN`), or if it looks like one: a known
//! prefix of access tokens, a long run of letters and digits, or the user part of a URL. Hiding a value by mistake,
//! such as a commit hash, only makes a message less detailed; a secret that is shown has to be replaced.

use std::ffi::{OsStr, OsString};

/// Takes the place of a secret.
pub const REDACTED: &str = "[redacted]";

/// Names that end with one of these belong to secrets.
const SECRET_NAMES: [&str; 9] =
    ["password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "auth"];
/// `key` alone may be anything; after these words it is a secret.
const SECRET_KEYS: [&str; 6] = ["api", "access", "secret", "private", "auth", "encryption"];
/// `token` is a secret unless it is one of a vocabulary.
const VOCABULARY_TOKENS: [&str; 12] =
    ["pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "end", "start", "image", "special"];
/// Beginnings of access tokens of well-known services.
const TOKEN_PREFIXES: [&str; 19] = [
    "sk-",
    "hf_",
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "xoxa-",
    "AKIA",
    "ASIA",
    "AIza",
    "ya29.",
    "eyJ",
    "nvapi-",
    "pypi-",
    "npm_",
];
/// Shortest token after such a prefix.
const MIN_TOKEN_CHARS: usize = 12;
/// Shortest run of letters and digits that counts as random.
const MIN_RANDOM_CHARS: usize = 24;

/// A command line without its secrets.
pub fn words<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> Vec<OsString> {
    let mut secret_follows = false;
    let mut redacted = Vec::new();
    for word in words {
        let text = word.to_string_lossy();
        let is_flag = text.starts_with('-');
        redacted.push(match text.split_once('=') {
            _ if secret_follows && !is_flag => REDACTED.into(),
            Some((name, secret)) => format!("{name}={}", value(name, secret)).into(),
            None if is_flag => word.to_owned(),
            None => value("", &text).into(),
        });
        secret_follows = is_flag && !text.contains('=') && is_secret_name(&text);
    }
    redacted
}

/// A value without its secrets.
pub fn value(name: &str, value: &str) -> String {
    if is_secret_name(name) && !value.is_empty() {
        return REDACTED.into();
    }
    let is_separator = |c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c));
    without_user(value).split_inclusive(is_separator).map(without_token).collect()
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let mut words = name.rsplit(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let (last, before) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    match last {
        "token" => !VOCABULARY_TOKENS.contains(&before),
        "key" => SECRET_KEYS.contains(&before),
        last => SECRET_NAMES.contains(&last),
    }
}

/// `https://[redacted]@host`.
fn without_user(value: &str) -> String {
    let at = || {
        let (scheme, rest) = value.split_once("://")?;
        let authority = rest.split('/').next()?;
        let (user, _) = authority.rsplit_once('@')?;
        Some(format!("{scheme}://{REDACTED}{}", rest.get(user.len()..)?))
    };
    at().unwrap_or_else(|| value.to_owned())
}

/// A part of a value, with the separator after it.
fn without_token(part: &str) -> String {
    let token = part.trim_end_matches(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c)));
    let separator = part.get(token.len()..).unwrap_or_default();
    let has_prefix = TOKEN_PREFIXES
        .iter()
        .any(|prefix| token.strip_prefix(prefix).is_some_and(|rest| rest.len() >= MIN_TOKEN_CHARS));
    if has_prefix || token.split(['-', '_', '.']).any(is_random) {
        format!("{REDACTED}{separator}")
    } else {
        part.to_owned()
    }
}

/// Returns whether letters and digits alternate as they do not in words.
fn is_random(run: &str) -> bool {
    let digits = run.chars().filter(char::is_ascii_digit).count();
    run.len() >= MIN_RANDOM_CHARS && digits >= 2 && digits < run.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        let redacted = words(text.split(' ').map(OsStr::new));
        redacted.join(OsStr::new(" ")).into_string().unwrap()
    }

    #[test]
    fn secrets_of_a_command_line_are_hidden() {
        for (given, shown) in [
            ("train.py --api-key abc --lr 3", "train.py --api-key [redacted] --lr 3"),
            ("train.py --wandb_api_key=abc", "train.py --wandb_api_key=[redacted]"),
            ("env HF_TOKEN=abc DB_PASSWORD=x y", "env HF_TOKEN=[redacted] DB_PASSWORD=[redacted] y"),
            ("x hf_abcdefghijklmnop", "x [redacted]"),
            ("x --hub=ghp_0123456789abcdef0123", "x --hub=[redacted]"),
            ("x --id 0f3a9c77d1e24b5a8c6d0f3a9c77d1e24b5a8c6d", "x --id [redacted]"),
            ("x https://ada:pw@host/data", "x https://[redacted]@host/data"),
            ("x s3://b/d?Signature=Zm9vYmFyYmF6MTIzNDU2Nzg5MGFiYw", "x s3://b/d?Signature=[redacted]"),
        ] {
            assert_eq!(line(given), shown);
        }
    }

    #[test]
    fn ordinary_arguments_are_shown() {
        for text in [
            "train.py --lr 3e-4 --max-tokens 512 --pad-token <pad> --key value --num-key-value-heads 8",
            "train.py --model meta-llama/Meta-Llama-3.1-8B-Instruct --output runs/2026-11-25-120000",
            "train.py --tokenizer gpt2 --token-file /etc/token --auto --data /data/fineweb-edu-10BT-shard-000123",
            "train.py --api-key --lr 3 --seed 12345678901234567890123456",
            "train.py --revision=main --set train.lr=0.1 https://host/data@2",
        ] {
            assert_eq!(line(text), text);
        }
    }

    #[test]
    fn settings_are_hidden_by_their_name_or_their_value() {
        assert_eq!(value("observe.token", "x"), REDACTED);
        assert_eq!(value("data.train", "hf://user:hf_abcdefghijklmnop@host/a"), "hf://[redacted]@host/a");
        assert_eq!(value("train.lr", "0.001"), "0.001");
        assert_eq!(value("observe.token", ""), "");
    }
}
