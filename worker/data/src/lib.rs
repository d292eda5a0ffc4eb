//! Turns text into token files that a model trains on.
//!
//! ```text
//! text, JSON, CSV, Parquet, .gz, .zst --documents--> documents --tokenizer--> ids --shard--> files, manifest.json
//!                                     \--> chats --chat--> ids, masks --/
//! ```
//! [`Tokenizer`] encodes and decodes, [`shard`] handles the headers of token files, [`Manifest`] describes a prepared
//! directory. This crate knows neither models nor devices, so that every command can use it.
//!
//! Invariants:
//! - a directory without a valid manifest is not prepared data: the manifest is written last;
//! - the same input gives the same bytes for any number of threads;
//! - nothing read from a file is allocated before its size is checked.

pub mod chat;
pub mod foreign;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
pub mod hub;
mod inspect;
mod manifest;
mod prepare;
mod quiet;
mod regular;
pub mod shard;
mod tokenizer;
pub mod walk;

pub use inspect::{Lengths, Part, Report, Run, inspect};
pub use manifest::{Chat, Manifest, ManifestError, Shard, SideFile, Split};
pub use prepare::{
    Bos, ChatOptions, Documents, Event, Invalid, MAX_THREADS, OnError, Options, PrepareError, Progress,
    frame, prepare,
};
pub use regular::{open_regular, read_bounded, read_regular};
pub use tokenizer::{Decoder, MAX_TOKENIZER_BYTES, QWEN2_CLASS, Tokenizer, TokenizerError, token_text};

/// Name of the file with the tokenizer in a prepared directory, a checkpoint and an export.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Editors on Windows start UTF-8 with it. It is not part of the text.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The start of a file in place of one that Git LFS has not downloaded.
pub const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Reason why such a file cannot be read.
pub const LFS_REASON: &str =
    "it is a Git LFS pointer in place of the file; download the file with `git lfs pull` or `hf download`";

/// Returns the hash of a file's contents in hexadecimal.
pub(crate) fn hash(contents: &[u8]) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(contents))
}
