//! `xlaunch data prepare`: turns text into shards.
//!
//! ```text
//! inputs --> reader thread: open, decompress, cut into blocks
//!              | blocks, numbered, a bounded number of bytes
//!              v
//!            encoder threads: check UTF-8, parse JSON, split into documents, encode
//!              | ids of each block, in any order
//!              v
//!            caller's thread: in order, each document to train or val --> shards --> manifest, last
//! ```
//! With a chat template, rows are chats: each id also has a bit that says whether its loss counts ([`crate::chat`]).
//!
//! The cuts between blocks depend on the input alone, and blocks are written in order, so any number of threads gives
//! the same bytes. If several errors occur, the first one in that order is reported.

mod blocks;
mod encode;
mod error;
mod framing;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod inputs;
mod kind;
mod output;
mod parquet_rows;
mod pipeline;
mod rows;
mod side;
mod source;
mod write;

use std::path::{Path, PathBuf};

use crate::Tokenizer;
use crate::chat::Templates;
use crate::manifest::{Chat, Manifest};

pub use error::PrepareError;
pub use framing::{Bos, frame};

/// Maximum number of encoder threads. More would wait for the reader thread.
pub const MAX_THREADS: usize = 64;

/// Settings of a preparation.
#[derive(Clone, Debug)]
pub struct Options {
    /// Encodes the text.
    pub tokenizer: Tokenizer,
    /// Directory to write.
    pub output: PathBuf,
    /// Files, directories, globs, and `-` for standard input.
    pub inputs: Vec<String>,
    /// Boundaries of documents in text other than JSONL.
    pub documents: Documents,
    /// The field or column that holds the text. If it is given, an input that is not a table by its name or content is
    /// read as JSONL.
    pub field: Option<String>,
    /// Options for reading rows as chats; `None` if they are not chats.
    pub chat: Option<ChatOptions>,
    /// Share of documents to hold out.
    pub val: f64,
    /// Number of ids per shard.
    pub shard_tokens: u64,
    /// Handling of text that is not UTF-8.
    pub invalid: Invalid,
    /// Handling of lines and rows that cannot be used.
    pub on_error: OnError,
    /// True to replace a prepared directory.
    pub overwrite: bool,
    /// Number of encoder threads.
    pub threads: usize,
}

/// Settings of chats.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// Write chats as text.
    pub templates: Templates,
    /// Maximum number of ids of a chat.
    pub max_tokens: Option<usize>,
    /// True if each row has a better and a worse answer.
    pub preferences: bool,
}

/// Boundaries of documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Documents {
    /// Each file is a document.
    File,
    /// Each line is a document.
    Line,
    /// Documents are separated by this text.
    Separator(String),
}

/// Handling of text that is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// Fail.
    Error,
    /// Write U+FFFD.
    Replace,
}

/// Handling of a line of JSONL, or a row of a table, that is broken or has no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// Fail.
    Stop,
    /// Leave it out, and report it.
    Skip,
}

impl Options {
    /// The field or column that holds the text.
    fn column(&self) -> &str {
        self.field.as_deref().unwrap_or("text")
    }
}

/// Progress of a preparation.
#[derive(Clone, Debug)]
pub enum Event {
    /// A note for the user.
    Note(String),
    /// A block was written.
    Progress(Progress),
}

/// Amount of data read and written so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes of the inputs read so far, counted as on disk.
    pub read: u64,
    /// Size of all inputs in bytes. `None` if standard input is one of them.
    pub size: Option<u64>,
    /// Documents written.
    pub documents: u64,
    /// Ids written.
    pub tokens: u64,
}

/// Writes the directory. If that fails, removes the written files, and existing data that was to be replaced stays. If
/// it fails while the new data replaces the existing data, the next preparation finishes the replacement, and does
/// nothing else unless it may replace that data again.
pub fn prepare(options: &Options, report: &mut dyn FnMut(Event)) -> Result<Manifest, PrepareError> {
    if output::finish_replacement(&options.output)? {
        let dir = options.output.display();
        let finished = format!("finished replacing the data in {dir}, which had been interrupted");
        if !options.overwrite {
            // The data of the interrupted command is complete. Its inputs are not known here, so these are not compared
            // with them.
            report(Event::Note(format!("{finished}; no input was read")));
            return Manifest::read(&options.output).map_err(|error| PrepareError::Data(error.to_string()));
        }
        report(Event::Note(finished));
    }
    check(options)?;
    // Find the inputs first: a mistyped input must not destroy the data that is to be replaced.
    let inputs = inputs::find(&options.inputs, &output::resolved(&options.output))?;
    let output = output::Output::claim(&options.output, options.overwrite)?;
    let written = write_all(options, inputs, &output.dir(), report);
    match written.and_then(|manifest| output.complete(&manifest, options).map(|()| manifest)) {
        Ok(manifest) => Ok(manifest),
        Err(error) => {
            output.abandon();
            Err(error)
        }
    }
}

fn check(options: &Options) -> Result<(), PrepareError> {
    let usage = |reason: String| Err(PrepareError::Usage(reason));
    if !(0.0..1.0).contains(&options.val) {
        return usage(format!("--val: `{}` is not a share of documents; expected 0 to below 1", options.val));
    }
    if options.shard_tokens == 0 || options.shard_tokens > crate::shard::MAX_TOKENS {
        let max = crate::shard::MAX_TOKENS;
        return usage(format!("--shard-tokens: {} is outside of 1 to {max}", options.shard_tokens));
    }
    if !(1..=MAX_THREADS).contains(&options.threads) {
        return usage(format!("--threads: {} is outside of 1 to {MAX_THREADS}", options.threads));
    }
    match &options.documents {
        Documents::Separator(text) if text.is_empty() || text.len() > blocks::MAX_DELIMITER_BYTES => {
            usage(format!("--documents: a separator has 1 to {} bytes", blocks::MAX_DELIMITER_BYTES))
        }
        _ => Ok(()),
    }
}

fn write_all(
    options: &Options,
    inputs: Vec<inputs::Input>,
    dir: &Path,
    report: &mut dyn FnMut(Event),
) -> Result<Manifest, PrepareError> {
    let chat = options.chat.as_ref();
    let mut writer =
        write::Writer::new(dir, &options.tokenizer, options.val, options.shard_tokens, chat.is_some());
    let found = pipeline::run(options, inputs, &mut writer, report)?;
    let chat = chat.map(|chat| Chat {
        template_xxh3_128: chat.templates.hash.clone(),
        ends: found.ends.iter().copied().collect(),
        truncated: found.truncated,
        dropped: found.dropped,
        preferences: chat.preferences,
    });
    let manifest = writer.finish(found.skipped, chat)?;
    if found.dropped > 0 && manifest.train.documents == 0 && manifest.val.documents == 0 {
        let reason = format!("nothing is left: all {} are longer than --max-tokens", found.dropped);
        return Err(PrepareError::Usage(reason));
    }
    if manifest.train.documents == 0 && manifest.val.documents == 0 {
        return Err(PrepareError::Data("the inputs contain no documents: all are empty".into()));
    }
    if manifest.train.documents == 0 {
        let (what, help) = match manifest.val.documents {
            1 => ("the only one is".to_owned(), "use --val 0: documents are not divided, see --documents"),
            all => (format!("all {all} are"), "lower --val"),
        };
        return Err(PrepareError::Usage(format!(
            "no document is left to train on: with --val {}, {what} held out\nhelp: {help}",
            options.val
        )));
    }
    let documents = manifest.train.documents + manifest.val.documents;
    if options.chat.is_none() && options.tokenizer.end_of_text().is_none() && documents > 1 {
        report(Event::Note(format!(
            "{documents} documents follow each other without a token between them: the tokenizer {} ends no text",
            options.tokenizer.name()
        )));
    }
    if manifest.val.documents == 0 && options.val > 0.0 {
        let advice = match (manifest.train.documents, options.chat.is_some()) {
            (1, true) => "a chat is not divided",
            (1, false) => "a document is not divided, see --documents",
            (_, true) => "raise --val",
            (_, false) => "raise --val, or see --documents",
        };
        report(Event::Note(format!(
            "no document was held out for validation ({} in all, --val {}); {advice}",
            manifest.train.documents, options.val,
        )));
    }
    Ok(manifest)
}

#[cfg(test)]
mod chat_tests;
#[cfg(test)]
mod tests;
