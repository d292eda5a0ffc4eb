//! Training data from directories that `xlaunch data prepare` has written.
//!
//! A manifest names the shards and the tokenizer, so neither has to be configured. The sizes of the shards are compared
//! with the manifest here; `xlaunch data inspect` compares their hashes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use xlaunch_data::{Chat, Manifest, Split, TOKENIZER_FILE, Tokenizer};
use xlaunch_spec::job::{DocumentMode, Invalid, JobSpec};

use super::{DataError, Tokens, source};

/// Size limit for a tokenizer file: common ones have up to 20 MB.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// A prepared directory.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    dir: PathBuf,
    manifest: Manifest,
}

impl Prepared {
    /// Opens the prepared directory that `data.train` or `data.val` names; `None` if it names files.
    pub(crate) fn of(key: &'static str, patterns: &[String]) -> Result<Option<Self>, DataError> {
        let Some(dir) = patterns.iter().map(Path::new).find(|path| path.is_dir()) else { return Ok(None) };
        if patterns.len() > 1 {
            return Err(DataError::SeveralSources { key, dir: dir.into() });
        }
        let manifest = Manifest::read(dir).map_err(|source| DataError::NotPrepared { key, source })?;
        Ok(Some(Self { dir: dir.into(), manifest }))
    }

    /// Completes the configuration of a job that trains on this data.
    ///
    /// # Errors
    /// If the model has fewer ids than the data.
    pub(crate) fn fill_in(&self, spec: &mut JobSpec) -> Result<(), Invalid> {
        let Manifest { vocab, tokenizer, .. } = &self.manifest;
        if let Some(set) = spec.model.vocab.filter(|set| set < vocab) {
            return Err(Invalid::new(
                "model.vocab",
                format!(
                    "{set} token ids, but {} was prepared with the tokenizer {tokenizer}",
                    self.dir.display()
                ),
                format!("at least {vocab}, or no model.vocab"),
            ));
        }
        spec.model.vocab.get_or_insert(*vocab);
        // The bytes of these files are not tokens.
        spec.data.tokenizer = xlaunch_spec::job::Tokenizer::Bin;
        if self.manifest.chat.is_some() {
            spec.data.documents.get_or_insert(self.default_documents());
        }
        Ok(())
    }

    /// Returns the treatment of documents that suits this data.
    pub(crate) fn default_documents(&self) -> DocumentMode {
        if self.manifest.chat.is_some() { DocumentMode::Packed } else { DocumentMode::Joined }
    }

    /// Opens the tokens to train on. Their ids are below `vocab`, which may exceed the data's vocabulary.
    pub(super) fn train(&self, vocab: usize) -> Result<Tokens, DataError> {
        self.check_vocab(vocab)?;
        source::open_shards(&self.dir, &self.manifest, &self.manifest.train, vocab)
    }

    /// Opens the held-out tokens.
    pub(crate) fn val(&self, vocab: usize) -> Result<Tokens, DataError> {
        self.check_vocab(vocab)?;
        source::open_shards(&self.dir, &self.manifest, &self.manifest.val, vocab)
    }

    /// Checks the vocabulary again: the directory may have been prepared anew since the job was configured.
    fn check_vocab(&self, vocab: usize) -> Result<(), DataError> {
        let needed = self.manifest.vocab;
        if needed <= vocab {
            Ok(())
        } else {
            Err(DataError::SmallModel { dir: self.dir.clone(), needed, vocab })
        }
    }

    /// Returns the bytes of text per held-out token; `None` if no tokens are held out, or if not every loss counts: the
    /// bytes of the tokens that count are unknown.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub(crate) fn val_bytes_per_token(&self) -> Option<f64> {
        let Split { bytes, tokens, supervised, .. } = self.manifest.val;
        (bytes > 0 && tokens > 0 && supervised.is_none()).then(|| bytes as f64 / tokens as f64)
    }

    /// Checks that both directories have the same ids.
    pub(super) fn check_same_tokenizer(&self, val: &Self) -> Result<(), DataError> {
        let (ours, theirs) = (&self.manifest, &val.manifest);
        if (&ours.tokenizer, ours.vocab, ours.end_of_text, ours.bos)
            == (&theirs.tokenizer, theirs.vocab, theirs.end_of_text, theirs.bos)
        {
            return Ok(());
        }
        let describe = |manifest: &Manifest| format!("{} ({} ids)", manifest.tokenizer, manifest.vocab);
        Err(DataError::Tokenizers {
            train: self.dir.clone(),
            val: val.dir.clone(),
            tokenizers: format!("{} and {}", describe(ours), describe(theirs)),
        })
    }

    /// Returns the file that contains the tokenizer.
    pub(crate) fn tokenizer(&self) -> TokenizerSource {
        TokenizerSource::File {
            path: self.dir.join(TOKENIZER_FILE),
            manifest: Some(Box::new(self.manifest.clone())),
        }
    }
}

/// Way to turn the ids of a job's data into text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Unknown: files of token ids do not tell.
    Unknown,
    /// Every byte is one token.
    Bytes,
    /// A `tokenizer.json`, with the manifest next to it if there is one.
    #[expect(missing_docs, reason = "the names describe the fields")]
    File { path: PathBuf, manifest: Option<Box<Manifest>> },
}

impl TokenizerSource {
    /// Reads and parses the tokenizer; `None` if it is unknown.
    pub fn load(&self) -> Result<Option<Tokenizer>, DataError> {
        let (path, manifest) = match self {
            Self::Unknown => return Ok(None),
            Self::Bytes => return Ok(Some(Tokenizer::bytes())),
            Self::File { path, manifest } => (path, manifest),
        };
        let problem = |problem: String| DataError::Format { path: path.clone(), problem };
        let json = self.json()?.unwrap_or_default();
        match manifest {
            Some(manifest) => manifest.tokenizer(&json).map(Some).map_err(problem),
            // `from_file` also reads the configuration files next to it.
            None => Tokenizer::from_file(path).map(Some).map_err(|error| problem(error.to_string())),
        }
    }

    /// Returns the directory of prepared chats, and how they were rendered.
    pub(crate) fn chats(&self) -> Option<(&Path, &Chat)> {
        let Self::File { path, manifest: Some(manifest) } = self else { return None };
        Some((path.parent()?, manifest.chat.as_ref()?))
    }

    /// Returns the contents of the file, if there is one.
    pub fn json(&self) -> Result<Option<Vec<u8>>, DataError> {
        let Self::File { path, .. } = self else { return Ok(None) };
        let failed = |reason: String| DataError::Read { path: path.clone(), reason };
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let mut json = Vec::new();
        file.take(MAX_TOKENIZER_BYTES + 1)
            .read_to_end(&mut json)
            .map_err(|error| failed(error.to_string()))?;
        if json.len() as u64 > MAX_TOKENIZER_BYTES {
            Err(failed(format!("it has more than {MAX_TOKENIZER_BYTES} bytes")))
        } else {
            Ok(Some(json))
        }
    }
}
