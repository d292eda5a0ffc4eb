//! Detects training data that has changed between a run and the run that continues it.

use xlaunch_spec::lineage::Fingerprint;
use xxhash_rust::xxh3::Xxh3;

use super::labels::Boundaries;
use super::{DataError, Tokens};

/// Number of evenly spread windows of tokens to hash: enough to notice an edit that shifts the text, and read in
/// milliseconds regardless of the size of the data.
const WINDOWS: u64 = 256;
/// Tokens per window.
const WINDOW_TOKENS: u64 = 1024;

/// Hashes windows of the tokens and of their mask, if there is one, and the starts of documents. Changes that keep the
/// number of tokens and touch no window go unnoticed.
pub fn fingerprint(tokens: &Tokens) -> Result<Fingerprint, DataError> {
    let (len, mut hash, mut ids, mut mask) = (tokens.len(), Xxh3::new(), Vec::new(), Vec::new());
    if let Boundaries::File { hash: starts, .. } = &tokens.labels().boundaries {
        hash.update(starts.as_bytes());
    }
    let last = len.saturating_sub(WINDOW_TOKENS);
    for window in 0..WINDOWS {
        // The first window starts at the first token, the last one ends at the last.
        let position = u128::from(last) * u128::from(window) / u128::from(WINDOWS - 1);
        let position = u64::try_from(position).unwrap_or(last);
        ids.clear();
        let count = usize::try_from(WINDOW_TOKENS.min(len)).unwrap_or(0);
        tokens.read(position, count, &mut ids)?;
        ids.iter().for_each(|id| hash.update(&id.to_le_bytes()));
        if tokens.labels().mask.is_some() {
            mask.clear();
            tokens.read_mask(position, count, &mut mask)?;
            mask.iter().for_each(|counts| hash.update(&[u8::from(*counts)]));
        }
        if last == 0 {
            break;
        }
    }
    Ok(Fingerprint { tokens: len, hash: format!("{:032x}", hash.digest128()) })
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::job::Tokenizer;

    use super::super::source;
    use super::*;

    fn of(text: &[u8]) -> Fingerprint {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs_err::write(&path, text).unwrap();
        fingerprint(&source::open(&[path], Tokenizer::Bytes, 256).unwrap()).unwrap()
    }

    #[test]
    fn edited_data_has_another_fingerprint() {
        let text: Vec<u8> = (0..1_000_000_u64).map(|at| u8::try_from(at * at % 251).unwrap()).collect();
        let whole = of(&text);
        assert_eq!(whole, of(&text));
        let mut moved = text.clone();
        moved.insert(5000, b'x');
        moved.pop();
        assert_ne!(of(&moved), whole);
        let mut last = text.clone();
        *last.last_mut().unwrap() ^= 1;
        assert_ne!(of(&last), whole);
        assert_ne!(of(&text[..text.len() - 1]).tokens, whole.tokens);
        assert_ne!(of(b"short"), of(b"shoet"));
    }
}
