//! Converts text to token ids and back: bytes, GPT-2's BPE, or the BPE or Unigram model of a `tokenizer.json`.
//!
//! - `file` checks a `tokenizer.json` and opens it; `config` reads the files next to it;
//! - `classes` knows which classes of Python's `transformers` replace parts of a file;
//! - `exact` encodes as Python's `tokenizers` does, `fast` does so for files of common kinds with the same ids;
//! - `template` handles the prefix that a file writes before a text;
//! - `gpt2` writes the `tokenizer.json` of GPT-2 from its ranks, so GPT-2 is encoded by the same code as files;
//! - `cuts` finds places where a long text can be cut;
//! - `decoder` turns ids back into text incrementally.
//!
//! Special tokens within documents are text: only the caller adds ids such as that of `<|endoftext|>`. Within prompts
//! they become ids.

mod classes;
mod config;
pub(crate) mod cuts;
mod decoder;
mod exact;
mod fast;
mod file;
mod gpt2;
mod template;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use classes::Loading;
pub use classes::QWEN2_CLASS;
use config::{AddedToken, Declared};
pub(crate) use config::{Files, named_tokens};
pub use config::{special_token, token_text};
use cuts::{Cuts, LONGEST_PIECE, PIECE};
pub use decoder::Decoder;
use exact::Exact;
use fast::Fast;

/// Character that files use for a space.
const METASPACE: char = '\u{2581}';

/// Size limit of a `tokenizer.json`. Those of the largest vocabularies in use have 35 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 64 << 20;
/// Lower bound of the size of GPT-2's `tokenizer.json`. Smaller files need not be compared with it.
const MIN_GPT2_BYTES: usize = 1 << 20;
/// Pieces without a place to cut that are longer than this take too much memory to be encoded by several threads.
const LONG_PIECE: usize = 512 << 10;
/// GPT-2's `<|endoftext|>`.
const GPT2_END_OF_TEXT: u32 = 50_256;

static GPT2: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::open_gpt2);
static BYTES: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::open_bytes);

/// Encodes and decodes text. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
    end_of_text: Option<u32>,
    /// The files next to it decide how `transformers` loads it.
    loading: Loading,
}

struct Inner {
    name: String,
    /// Bytes of each id.
    tokens: Tokens,
    /// Ids of added tokens.
    added: HashMap<String, u32>,
    /// The ids that the template puts before a text.
    prefix: Vec<u32>,
    /// The id that starts a text according to files next to the tokenizer's.
    declared_bos: Option<u32>,
    /// A `tokenizer.json`.
    json: String,
    /// `None` if each id is a byte.
    encoder: Option<Encoder>,
}

struct Encoder {
    fast: Option<Fast>,
    exact: Exact,
    cuts: Cuts,
    /// Encodes [`LONG_PIECE`]s one at a time, so that the memory needed for one is reused for the next.
    long: OnceLock<Option<Mutex<Fast>>>,
}

/// The bytes of all tokens, by id.
#[derive(Debug, Default)]
struct Tokens {
    bytes: Vec<u8>,
    /// End of the bytes of each id.
    ends: Vec<usize>,
    /// Ids without text, in order.
    special: Vec<u32>,
    /// Ids of bytes whose text depends on their neighbours: in a run that is not UTF-8, each byte becomes one U+FFFD.
    fallback: HashSet<u32>,
    /// An id with text that is not in `fallback`, if that has any.
    separator: Option<u32>,
    /// True if the text of ids is the concatenation of their bytes.
    concatenate: bool,
}

/// Reason why a `tokenizer.json` cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
pub enum TokenizerError {
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{name}: {reason}")]
    Format { name: String, reason: String },
    #[error("the tokenizer {name} failed to encode a text: {reason}")]
    Encode { name: String, reason: String },
}

/// Files of tokenizers in formats that are not read.
const OTHER_FORMATS: [&str; 4] = ["tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model"];

/// How to get a `tokenizer.json` from a tokenizer in another format.
const CONVERT: &str = "convert it in Python with `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`";

/// Returns the name of a tokenizer's file in another format.
fn other_format(dir: &Path) -> Option<&'static str> {
    OTHER_FORMATS.into_iter().find(|name| dir.join(name).exists())
}

impl Tokenizer {
    /// Returns a tokenizer of 256 ids, each a byte of UTF-8. It has no end-of-text id.
    pub fn bytes() -> Self {
        BYTES.clone()
    }

    /// Returns GPT-2's tokenizer, with 50,257 ids.
    pub fn gpt2() -> Self {
        GPT2.clone()
    }

    /// Opens the tokenizer that `--tokenizer` names: `bytes`, `gpt2`, or the path of a `tokenizer.json` or of its
    /// directory.
    pub fn open(name: &str) -> Result<Self, TokenizerError> {
        match name {
            "bytes" => Ok(Self::bytes()),
            "gpt2" => Ok(Self::gpt2()),
            dir if Path::new(dir).is_dir() => Self::from_file(&Path::new(dir).join(crate::TOKENIZER_FILE)),
            file => Self::from_file(Path::new(file)),
        }
    }

    /// Reads a `tokenizer.json`, and the special tokens that files next to it name. The tokenizer has the name of the
    /// file.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let dir = path.parent().unwrap_or(Path::new(""));
        let read = |error: std::io::Error| {
            let reason = match other_format(dir) {
                _ if error.kind() != std::io::ErrorKind::NotFound => error.to_string(),
                Some(other) => format!("it does not exist, and {other} is not read; {CONVERT}"),
                None => crate::hub::missing(path),
            };
            TokenizerError::Read { path: path.into(), reason }
        };
        let json = crate::read_regular(path, MAX_TOKENIZER_BYTES).map_err(read)?;
        let name = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        if json.starts_with(crate::LFS_POINTER) {
            return Err(TokenizerError::Read { path: path.into(), reason: crate::LFS_REASON.into() });
        }
        if path.extension().is_none_or(|extension| extension != "json") && !json.starts_with(b"{") {
            let reason = format!("it is not a tokenizer.json; {CONVERT}");
            return Err(TokenizerError::Read { path: path.into(), reason });
        }
        let files = Files::read(dir)?;
        Self::named(&name, &json, &files.added_tokens(), &|added| files.ids(added))
            .map(|tokenizer| Self { loading: files.loading(), ..tokenizer })
            .map_err(|reason| TokenizerError::Format { name: path.display().to_string(), reason })
    }

    /// Reads the text of a `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let name = crate::TOKENIZER_FILE;
        let nothing = |_: &HashMap<String, u32>| Declared::default();
        Self::named(name, json, &[], &nothing)
            .map_err(|reason| TokenizerError::Format { name: name.into(), reason })
    }

    /// Returns the name: `bytes`, `gpt2`, or that of the file.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the name and the hash of the file, for messages: files of other tokenizers may have the same name.
    pub fn label(&self) -> String {
        format!("`{}` (hash {:.8})", self.name(), crate::hash(self.inner.json.as_bytes()))
    }

    /// Returns the highest id + 1.
    pub fn vocab(&self) -> usize {
        self.inner.tokens.ends.len()
    }

    /// Returns the number of ids that a model for this tokenizer has at least: those of texts, of their beginning and
    /// of their end. Some published tokenizers have added tokens beyond the ids of their model, such as that of images.
    pub fn required_vocab(&self) -> usize {
        let added: HashSet<u32> = self.inner.added.values().copied().collect();
        let of_text = self.inner.tokens.ids().rev().find(|id| !added.contains(id));
        let ids = self.inner.prefix.iter().copied().chain(self.end_of_text).chain(of_text);
        ids.max().map_or(0, |id| id as usize + 1)
    }

    /// Returns the id that starts each document.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// Returns the same tokenizer with documents that start with this id.
    #[must_use]
    pub fn with_end_of_text(self, end_of_text: Option<u32>) -> Self {
        Self { end_of_text, ..self }
    }

    /// Returns the ids that the file's template puts before a text.
    pub(crate) fn prefix(&self) -> &[u32] {
        &self.inner.prefix
    }

    /// Returns the first id that the file's template puts before a text: the beginning of the sequence.
    pub fn bos(&self) -> Option<u32> {
        self.inner.prefix.first().copied()
    }

    /// Returns the id that stands for the beginning of a sequence, whether or not the template writes it.
    pub fn known_bos(&self) -> Option<u32> {
        self.bos().or(self.inner.declared_bos)
    }

    /// Returns the same tokenizer with a template that puts this id before a text, or no id.
    ///
    /// # Errors
    /// If this is the tokenizer of bytes, which has no such id.
    pub fn with_bos(&self, bos: Option<u32>) -> Result<Self, TokenizerError> {
        if bos.as_slice() == self.inner.prefix {
            return Ok(self.clone());
        }
        let name = &self.inner.name;
        let failed = |reason: String| TokenizerError::Format { name: name.clone(), reason };
        let mut file = serde_json::from_str(&self.inner.json).map_err(|error| failed(error.to_string()))?;
        let token = match bos {
            Some(id) => {
                let token =
                    self.added_token(id).ok_or_else(|| failed(format!("id {id} is not an added token")))?;
                Some((token, id))
            }
            None => None,
        };
        template::set_first(&mut file, token);
        let json = serde_json::to_string(&file).map_err(|error| failed(error.to_string()))?;
        let declared = Declared { eos: self.end_of_text, bos: self.known_bos() };
        let opened = Self::named(name, json.as_bytes(), &[], &|_| declared).map_err(failed)?;
        Ok(opened.with_end_of_text(self.end_of_text))
    }

    /// Returns the id of an added token, such as `<|endoftext|>`.
    pub fn added_id(&self, token: &str) -> Option<u32> {
        self.inner.added.get(token).copied()
    }

    /// Returns the added token with this id.
    pub fn added_token(&self, id: u32) -> Option<&str> {
        self.inner.added.iter().find(|(_, of)| **of == id).map(|(token, _)| token.as_str())
    }

    /// Returns all added tokens in order of id.
    pub fn added_tokens(&self) -> Vec<&str> {
        let mut tokens: Vec<(u32, &str)> =
            self.inner.added.iter().map(|(token, id)| (*id, token.as_str())).collect();
        tokens.sort_unstable();
        tokens.into_iter().map(|(_, token)| token).collect()
    }

    /// Returns whether this is the same tokenizer, with the same ids before a text.
    pub fn same_ids(&self, other: &Self) -> bool {
        self.inner.added.len() == other.inner.added.len() && self.extends(other)
    }

    /// Returns whether this is the same tokenizer as `base`, with the same ids before a text, except that it may have
    /// further added tokens.
    pub fn extends(&self, base: &Self) -> bool {
        if self.inner.json == base.inner.json {
            return true;
        }
        self.prefix() == base.prefix() && self.vocab() >= base.vocab() && {
            let parts = |tokenizer: &Self| exact::parts(&tokenizer.inner.json);
            matches!((parts(self), parts(base)), (Ok((own, added)), Ok((theirs, known)))
                if own == theirs && known.is_subset(&added))
        }
    }

    /// Returns whether every id stands for the same text in both, though they may split texts by other rules, and each
    /// may lack added tokens of the other.
    pub fn shares_vocabulary(&self, other: &Self) -> bool {
        let entries = |tokenizer: &Self| Some(exact::parts(&tokenizer.inner.json).ok()?.0["model"].take());
        let texts: HashMap<u32, &String> = self.inner.added.iter().map(|(text, id)| (*id, text)).collect();
        let mut theirs = other.inner.added.iter();
        theirs.all(|(text, id)| texts.get(id).is_none_or(|own| *own == text))
            && matches!((entries(self), entries(other)), (Some(own), Some(theirs)) if own == theirs)
    }

    /// Returns the ids of a text. Special tokens within it count as text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        self.encode_part(text, true, &mut ids)?;
        Ok(ids)
    }

    /// Returns the ids of a prompt, as Python's libraries encode it: special tokens within it become ids. `framed` adds
    /// the ids of the file's template, such as the beginning of the sequence.
    pub fn encode_prompt(&self, text: &str, framed: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.inner.encoder {
            None => self.encode(text),
            Some(encoder) => encoder
                .exact
                .encode_prompt(&self.inner.json, text, framed)
                .map_err(|reason| self.failed(reason)),
        }
    }

    /// Returns the ids of a text as [`Tokenizer::encode_prompt`] without a frame, each with its range of characters.
    /// `trimmed`: the ranges are those of Python, which may leave out white space; otherwise every character belongs to
    /// a range.
    pub fn encode_with_offsets(
        &self,
        text: &str,
        trimmed: bool,
    ) -> Result<Vec<(u32, usize, usize)>, TokenizerError> {
        let Some(encoder) = &self.inner.encoder else {
            let mut buffer = [0; 4];
            let pieces = text.chars().enumerate().flat_map(|(at, character)| {
                let bytes = character.encode_utf8(&mut buffer).as_bytes().to_vec();
                bytes.into_iter().map(move |byte| (u32::from(byte), at, at + 1))
            });
            return Ok(pieces.collect());
        };
        let pieces = encoder.exact.encode_with_offsets(&self.inner.json, text, trimmed);
        pieces.map_err(|reason| self.failed(reason))
    }

    /// Appends the ids of a part of a text, which was cut where [`Tokenizer::cuts`] allows. `first`: the part starts
    /// the text.
    pub(crate) fn encode_part(
        &self,
        text: &str,
        first: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let Some(encoder) = &self.inner.encoder else {
            ids.extend(text.bytes().map(u32::from));
            return Ok(());
        };
        let (mut rest, mut first) = (text, first);
        while !rest.is_empty() {
            let piece = next_piece(rest, encoder.cuts);
            encoder.encode(&self.inner.json, piece, first, ids).map_err(|reason| self.failed(reason))?;
            (rest, first) = (&rest[piece.len()..], false);
        }
        Ok(())
    }

    fn failed(&self, reason: String) -> TokenizerError {
        TokenizerError::Encode { name: self.inner.name.clone(), reason }
    }

    /// Returns the places where texts can be cut without changing their ids.
    pub(crate) fn cuts(&self) -> Cuts {
        self.inner.encoder.as_ref().map_or(Cuts::Anywhere, |encoder| encoder.cuts)
    }

    /// Returns the bytes of text of an id, which need not be whole characters. `None` for special tokens and unknown
    /// ids.
    pub fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        let tokens = &self.inner.tokens;
        tokens.special.binary_search(&id).err()?;
        tokens.get(id)
    }

    /// Returns an incremental decoder.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// Returns the text of ids. Special tokens are written as in the file, bytes that are not UTF-8 as U+FFFD, and ids
    /// outside the vocabulary are omitted.
    pub fn decode(&self, ids: &[u32]) -> String {
        let Inner { tokens, encoder, json, .. } = &*self.inner;
        match encoder {
            Some(encoder) if !tokens.concatenate => encoder.exact.decode(json, ids).unwrap_or_default(),
            _ => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| tokens.get(*id)).flatten().copied().collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
        }
    }

    /// Returns a `tokenizer.json` that Hugging Face's libraries can read: the file's own text, if there is one.
    pub fn to_json(&self) -> String {
        self.inner.json.clone()
    }

    fn named(
        name: &str,
        json: &[u8],
        added: &[AddedToken],
        declared: &dyn Fn(&HashMap<String, u32>) -> Declared,
    ) -> Result<Self, String> {
        if json.len() as u64 > MAX_TOKENIZER_BYTES {
            return Err(format!("larger than {} MiB", MAX_TOKENIZER_BYTES >> 20));
        }
        let known = if json.len() < MIN_GPT2_BYTES { &BYTES } else { &GPT2 };
        if known.inner.json.as_bytes() == json {
            return Ok((*known).clone());
        }
        let json = std::str::from_utf8(json).map_err(|error| error.to_string())?;
        Self::opened(name, json.into(), added, declared)
    }

    fn opened(
        name: &str,
        json: String,
        added: &[AddedToken],
        declared: &dyn Fn(&HashMap<String, u32>) -> Declared,
    ) -> Result<Self, String> {
        let file::Opened { json, end_of_text, prefix, tokens, added, fast, exact, cuts } =
            file::open(json, added)?;
        let Declared { eos, bos } = declared(&added);
        let encoder = Some(Encoder { fast, exact, cuts, long: OnceLock::new() });
        let inner = Inner { name: name.into(), tokens, added, prefix, declared_bos: bos, json, encoder };
        Ok(Self { inner: Arc::new(inner), end_of_text: eos.or(end_of_text), loading: Loading::default() })
    }

    fn open_bytes() -> Self {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let tokens =
            Tokens { ends: (1..=bytes.len()).collect(), bytes, concatenate: true, ..Tokens::default() };
        let inner = Inner {
            name: "bytes".into(),
            tokens,
            added: HashMap::new(),
            prefix: Vec::new(),
            declared_bos: None,
            json: gpt2::bytes_json(),
            encoder: None,
        };
        Self { inner: Arc::new(inner), end_of_text: None, loading: Loading::default() }
    }

    #[expect(clippy::panic, reason = "the ranks are part of the program, and a test reads them")]
    fn open_gpt2() -> Self {
        match Self::opened("gpt2", gpt2::json(), &[], &|_| Declared::default()) {
            Ok(gpt2) => gpt2,
            Err(reason) => panic!("GPT-2's tokenizer: {reason}"),
        }
    }
}

impl Encoder {
    /// Appends the ids of a piece. `first`: the piece starts the text.
    fn encode(&self, json: &str, piece: &str, first: bool, ids: &mut Vec<u32>) -> Result<(), String> {
        let Some(fast) = self.fast.as_ref().filter(|fast| fast.takes(piece)) else {
            ids.extend(self.exact.encode(json, piece, first)?);
            return Ok(());
        };
        if piece.len() <= LONG_PIECE {
            return fast.encode(piece, first, ids);
        }
        let another = || file::reopen_fast(json).map(Mutex::new);
        match self.long.get_or_init(another) {
            Some(long) => long.lock().unwrap_or_else(PoisonError::into_inner).encode(piece, first, ids),
            None => fast.encode(piece, first, ids),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.inner.name)
            .field("vocab", &self.vocab())
            .field("end_of_text", &self.end_of_text)
            .finish_non_exhaustive()
    }
}

impl Tokens {
    fn ids(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.ends.len()).unwrap_or(u32::MAX)
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let index = usize::try_from(id).ok()?;
        let start = index.checked_sub(1).map_or(Some(&0), |before| self.ends.get(before))?;
        self.bytes.get(*start..*self.ends.get(index)?)
    }
}

/// Returns the longest beginning of a text that is encoded at once.
fn next_piece(text: &str, cuts: Cuts) -> &str {
    let bytes = text.as_bytes();
    let (mut min, mut limit) = (0, PIECE);
    while limit < bytes.len() {
        if let Some(cut) = cuts.last(&bytes[..limit], min) {
            return &text[..cut];
        }
        if limit == LONGEST_PIECE {
            return &text[..cuts::character_start(bytes, limit)];
        }
        (min, limit) = (limit - 1, LONGEST_PIECE.min(limit * 2));
    }
    text
}

#[cfg(test)]
mod tests;
