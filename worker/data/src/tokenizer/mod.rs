//! Text to token ids and back: bytes, GPT-2's BPE, or the BPE of a `tokenizer.json`.
//!
//! - `file` checks a `tokenizer.json` and opens it with the crate `tokenizers`;
//! - `gpt2` writes the `tokenizer.json` of GPT-2 from its ranks, so GPT-2 is encoded by the same code as files;
//! - `cuts` says where a long text can be cut;
//! - `decoder` turns ids back into text as they come.
//!
//! Special tokens within text are text: only the caller adds ids such as that of `<|endoftext|>`.

pub(crate) mod cuts;
mod decoder;
mod file;
mod gpt2;

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use tokenizers::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};

use cuts::{Cuts, LONGEST_PIECE, PIECE};
pub use decoder::Decoder;
use file::Bpe;

/// A `tokenizer.json` may have this size. Those of the largest vocabularies in use have 35 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Less than GPT-2's `tokenizer.json` has. Smaller files need not be compared with it.
const MIN_GPT2_BYTES: usize = 1 << 20;
/// Pieces without a place to cut that take too much memory to be encoded by several threads.
const LONG_PIECE: usize = 512 << 10;
/// GPT-2's `<|endoftext|>`.
const GPT2_END_OF_TEXT: u32 = 50_256;

static GPT2: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::open_gpt2);
static BYTES: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::open_bytes);

/// Encodes and decodes. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    /// Highest id + 1.
    vocab: usize,
    end_of_text: Option<u32>,
    /// What each id stands for.
    tokens: Tokens,
    /// A `tokenizer.json`.
    json: String,
    /// `None`: an id is a byte.
    bpe: Option<Bpe>,
    /// Encodes [`LONG_PIECE`]s, one at a time: what a thread needs for one is kept for the next.
    long: OnceLock<Mutex<Bpe>>,
}

/// The bytes of all tokens, by id.
#[derive(Debug, Default)]
struct Tokens {
    bytes: Vec<u8>,
    /// Where the bytes of each id end.
    ends: Vec<usize>,
    /// Ids that stand for no text, in order.
    special: Vec<u32>,
    /// Whether the text of ids is that of their bytes one after the other.
    concatenate: bool,
}

/// Why a `tokenizer.json` cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum TokenizerError {
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{name}: {reason}")]
    Format { name: String, reason: String },
}

impl Tokenizer {
    /// 256 ids, each a byte of UTF-8. There is no end-of-text id.
    pub fn bytes() -> Self {
        BYTES.clone()
    }

    /// GPT-2's 50,257 ids.
    pub fn gpt2() -> Self {
        GPT2.clone()
    }

    /// What `--tokenizer` names: `bytes`, `gpt2`, or the path of a `tokenizer.json`.
    pub fn open(name: &str) -> Result<Self, TokenizerError> {
        match name {
            "bytes" => Ok(Self::bytes()),
            "gpt2" => Ok(Self::gpt2()),
            file => Self::from_file(Path::new(file)),
        }
    }

    /// Reads a `tokenizer.json`. Its name is the file's.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let read =
            |error: std::io::Error| TokenizerError::Read { path: path.into(), reason: error.to_string() };
        let file = std::fs::File::open(path).map_err(read)?;
        let mut json = Vec::new();
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut json).map_err(read)?;
        let name = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        Self::named(&name, &json)
            .map_err(|reason| TokenizerError::Format { name: path.display().to_string(), reason })
    }

    /// Reads the text of a `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let name = crate::TOKENIZER_FILE;
        Self::named(name, json).map_err(|reason| TokenizerError::Format { name: name.into(), reason })
    }

    /// `bytes`, `gpt2`, or the name of the file.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Highest id + 1.
    pub fn vocab(&self) -> usize {
        self.inner.vocab
    }

    /// The id that starts each document.
    pub fn end_of_text(&self) -> Option<u32> {
        self.inner.end_of_text
    }

    /// The ids of a text. Special tokens within it are text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        self.encode_part(text, true, &mut ids);
        ids
    }

    /// Appends the ids of a part of a text, which was cut where [`Tokenizer::cuts`] says. `first`: the text's start.
    pub(crate) fn encode_part(&self, text: &str, first: bool, ids: &mut Vec<u32>) {
        let Some(bpe) = &self.inner.bpe else { return ids.extend(text.bytes().map(u32::from)) };
        let (mut rest, mut first) = (text, first);
        while !rest.is_empty() {
            let piece = next_piece(rest, bpe.cuts);
            if piece.len() > LONG_PIECE {
                self.with_long(|bpe| encode_piece(bpe, piece, first, ids));
            } else {
                encode_piece(bpe, piece, first, ids);
            }
            (rest, first) = (&rest[piece.len()..], false);
        }
    }

    /// Where texts can be cut without changing their ids.
    pub(crate) fn cuts(&self) -> Cuts {
        self.inner.bpe.as_ref().map_or(Cuts::Anywhere, |bpe| bpe.cuts)
    }

    fn with_long(&self, encode: impl FnOnce(&Bpe)) {
        let Some(bpe) = &self.inner.bpe else { return };
        let long = self.inner.long.get_or_init(|| {
            let copy = file::open(&self.inner.json).map(|opened| Bpe { cuts: bpe.cuts, ..opened.bpe });
            Mutex::new(copy.unwrap_or_else(|_| bpe.clone()))
        });
        encode(&long.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The bytes of text that an id stands for: not whole characters. `None` for special tokens and unknown ids.
    pub fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        let tokens = &self.inner.tokens;
        tokens.special.binary_search(&id).err()?;
        tokens.get(id)
    }

    /// Decodes ids as they come.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// The text of ids. Special tokens are written as in the file, bytes that are not UTF-8 as U+FFFD, and ids outside
    /// the vocabulary not at all.
    pub fn decode(&self, ids: &[u32]) -> String {
        let Inner { tokens, bpe, .. } = &*self.inner;
        match bpe {
            Some(bpe) if !tokens.concatenate => bpe.start.decode(ids, false).unwrap_or_default(),
            _ => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| tokens.get(*id)).flatten().copied().collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
        }
    }

    /// A `tokenizer.json` that Hugging Face's libraries read: the file's own text, if there is one.
    pub fn to_json(&self) -> String {
        self.inner.json.clone()
    }

    fn named(name: &str, json: &[u8]) -> Result<Self, String> {
        if json.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("larger than {} MiB", MAX_FILE_BYTES >> 20));
        }
        let known = if json.len() < MIN_GPT2_BYTES { &BYTES } else { &GPT2 };
        if known.inner.json.as_bytes() == json {
            return Ok((*known).clone());
        }
        let json = std::str::from_utf8(json).map_err(|error| error.to_string())?;
        let file::Opened { vocab, end_of_text, tokens, bpe } = file::open(json)?;
        Ok(Self {
            inner: Arc::new(Inner {
                name: name.into(),
                vocab,
                end_of_text,
                tokens,
                json: json.into(),
                bpe: Some(bpe),
                long: OnceLock::new(),
            }),
        })
    }

    fn open_bytes() -> Self {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let tokens =
            Tokens { ends: (1..=bytes.len()).collect(), bytes, special: Vec::new(), concatenate: true };
        let json = gpt2::bytes_json();
        Self {
            inner: Arc::new(Inner {
                name: "bytes".into(),
                vocab: 256,
                end_of_text: None,
                tokens,
                json,
                bpe: None,
                long: OnceLock::new(),
            }),
        }
    }

    #[expect(clippy::panic, reason = "the ranks are part of the program, and a test opens them")]
    fn open_gpt2() -> Self {
        let json = gpt2::json();
        match file::open(&json) {
            Ok(file::Opened { vocab, tokens, bpe, .. }) => Self {
                inner: Arc::new(Inner {
                    name: "gpt2".into(),
                    vocab,
                    end_of_text: Some(GPT2_END_OF_TEXT),
                    tokens,
                    json,
                    // GPT-2's own expression allows more cuts than can be shown for files.
                    bpe: Some(Bpe { cuts: Cuts::WordEnd, ..bpe }),
                    long: OnceLock::new(),
                }),
            },
            Err(reason) => panic!("GPT-2's tokenizer: {reason}"),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { name, vocab, end_of_text, .. } = &*self.inner;
        f.debug_struct("Tokenizer")
            .field("name", name)
            .field("vocab", vocab)
            .field("end_of_text", end_of_text)
            .finish_non_exhaustive()
    }
}

impl Tokens {
    fn get(&self, id: u32) -> Option<&[u8]> {
        let index = usize::try_from(id).ok()?;
        let start = index.checked_sub(1).map_or(Some(&0), |before| self.ends.get(before))?;
        self.bytes.get(*start..*self.ends.get(index)?)
    }
}

/// The longest start of a text that is encoded at once.
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

fn encode_piece(bpe: &Bpe, piece: &str, first: bool, ids: &mut Vec<u32>) {
    let pipeline = bpe.rest.as_ref().filter(|_| !first).unwrap_or(&bpe.start);
    encode(pipeline, piece, ids);
}

#[expect(clippy::panic, reason = "fails only above 4 GiB, and pieces are far below that")]
fn encode(pipeline: &PipelineTokenizer, piece: &str, ids: &mut Vec<u32>) {
    let options = EncodeOptions {
        add_special_tokens: false,
        encode_special_tokens: true,
        padding: Override::Off,
        truncation: Override::Off,
    };
    let mut new: Vec<PipelineToken> = Vec::with_capacity(piece.len() / 3);
    if let Err(error) = pipeline.encode_into(piece, &options, &mut new) {
        panic!("encoding {} bytes: {error}", piece.len());
    }
    ids.extend_from_slice(PipelineToken::cast_slice(&new));
}

#[cfg(test)]
mod tests;
