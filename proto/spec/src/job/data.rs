//! The section `[data]`.

use serde::{Deserialize, Serialize};

#[cfg(feature = "schema")]
use super::data_source;
use super::data_source::DataSource;
use super::one_or_more;

/// Training and evaluation data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Training data: a directory written by `xlaunch data prepare`, or files as paths or globs (`**` spans
    /// directories). Relative paths start at the directory of the configuration file, or at the working directory if
    /// they come from `--set` or a variable. A prepared directory includes its tokenizer and validation data. Globs
    /// skip hidden directories, directories with a CACHEDIR.TAG, Python virtual environments and `job.output`, and
    /// follow links to directories where a part other than `**` matches them. Several prepared directories are mixed in
    /// the ratio of their weights: a list of tables with `path` and `weight`.
    #[serde(deserialize_with = "one_or_more::deserialize")]
    #[cfg_attr(feature = "schema", schemars(with = "data_source::Forms"))]
    pub train: Vec<DataSource>,
    /// Evaluation data, in the same forms as `train`; for a prepared directory, its validation split is used. Default:
    /// the validation data of the prepared directories `train`, with the same weights; with files, the last
    /// `val_fraction` of the training tokens is held out.
    #[serde(deserialize_with = "one_or_more::deserialize")]
    #[cfg_attr(feature = "schema", schemars(with = "data_source::Forms"))]
    pub val: Vec<DataSource>,
    /// Fraction of the training tokens, from 0 to 0.5, that is held out for evaluation if `train` is files and `val` is
    /// empty.
    pub val_fraction: f64,
    /// Conversion of files into token ids. Has no effect with a prepared directory, which contains token ids.
    pub tokenizer: Tokenizer,
    /// Read sequences in a seeded random order that changes each epoch. false reads them in file order.
    pub shuffle: bool,
    /// Treatment of the documents in a sequence. masked and packed need a directory written by `xlaunch data prepare`.
    /// Default: packed for chats, otherwise joined.
    pub documents: Option<DocumentMode>,
}

/// Treatment of the documents in a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DocumentMode {
    /// All documents form one text, which is cut into sequences. Tokens attend to those of earlier documents in the
    /// sequence.
    #[default]
    Joined,
    /// The same sequences, but tokens attend to those of their own document only, and positions begin again with each
    /// document.
    Masked,
    /// Sequences of whole documents, packed so that little padding remains; attention and positions as with masked. A
    /// document longer than `model.seq` is split into parts.
    Packed,
}

impl Default for DataSection {
    fn default() -> Self {
        let globs = ["**/*.txt", "**/*.md", "**/*.rs", "**/*.py", "**/*.toml"];
        Self {
            train: globs.map(DataSource::from).to_vec(),
            val: Vec::new(),
            val_fraction: 0.05,
            tokenizer: Tokenizer::Bytes,
            shuffle: true,
            documents: None,
        }
    }
}

impl DocumentMode {
    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Masked => "masked",
            Self::Packed => "packed",
        }
    }
}

impl DataSection {
    /// Returns the treatment of documents, with the default filled in.
    pub fn documents(&self) -> DocumentMode {
        self.documents.unwrap_or_default()
    }
}

/// Conversion of files into token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Every byte of a text file is one token; the vocabulary is 256.
    Bytes,
    /// Files contain token ids: 16-bit or 32-bit in llm.c's formats (magic numbers 20240520 and 20240801), or 16-bit in
    /// modded-nanogpt's format (278895051) or nanoGPT's (no header).
    Bin,
}
