//! Training data from directories that `xlaunch data prepare` has written.
//!
//! A manifest names the shards and the tokenizer, so neither has to be configured. The sizes of the shards are compared
//! with the manifest here; `xlaunch data inspect` compares their hashes.

use std::path::{Path, PathBuf};

use xlaunch_data::{
    Chat, MAX_TOKENIZER_BYTES, Manifest, ManifestError, Split, TOKENIZER_FILE, Tokenizer, read_regular,
};
use xlaunch_spec::job::{DataSource, DocumentMode, DpoSection, Invalid, JobSpec};

use super::{DataError, Tokens, source};

/// A prepared directory.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    /// The key that names it.
    key: &'static str,
    dir: PathBuf,
    weight: f64,
    manifest: Manifest,
}

/// Returns a name for each directory of a mixture: the last component of its path or, if that is not unique, the path.
/// The name of a single directory is empty.
pub(super) fn names(dirs: &[Prepared]) -> Vec<String> {
    if dirs.len() == 1 {
        return vec![String::new()];
    }
    let last = |dir: &Prepared| dir.dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let all: Vec<String> = dirs.iter().map(last).collect();
    let is_unique = |name: &String| all.iter().filter(|other| *other == name).count() == 1;
    let name = |(dir, name): (&Prepared, &String)| {
        if is_unique(name) { name.clone() } else { dir.dir.display().to_string() }
    };
    dirs.iter().zip(&all).map(name).collect()
}

impl Prepared {
    /// Opens the prepared directories that `data.train` or `data.val` names; none if it names files.
    pub(crate) fn all(key: &'static str, sources: &[DataSource]) -> Result<Vec<Self>, DataError> {
        let is_dir = |source: &&DataSource| Path::new(&source.path).is_dir();
        let Some(found) = sources.iter().find(|source| source.weight.is_some() || is_dir(source)) else {
            return Ok(Vec::new());
        };
        if found.weight.is_none() && sources.len() > 1 {
            return Err(DataError::SeveralSources { key, dir: found.path.clone().into() });
        }
        if let Some(other) = sources.iter().find(|source| !is_dir(source)) {
            return Err(DataError::NotMixable { key, path: other.path.clone().into() });
        }
        sources
            .iter()
            .map(|DataSource { path, weight }| Self::open(key, path, weight.unwrap_or(1.0)))
            .collect()
    }

    /// Opens a prepared directory.
    pub(crate) fn open(key: &'static str, dir: &str, weight: f64) -> Result<Self, DataError> {
        let manifest = Manifest::open(Path::new(dir));
        let manifest = manifest.map_err(|source| match source {
            ManifestError::ReplacementInterrupted { .. } => DataError::ReplacementInterrupted { key, source },
            _ => DataError::NotPrepared { key, source },
        })?;
        Ok(Self { key, dir: dir.into(), weight, manifest })
    }

    /// Weight in a mixture.
    pub(super) fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns whether its documents are chats.
    pub(crate) fn has_chats(&self) -> bool {
        self.manifest.chat.is_some()
    }

    /// Returns whether its documents are pairs of a better and a worse answer.
    pub(crate) fn has_preferences(&self) -> bool {
        self.manifest.has_preferences()
    }

    /// Completes the configuration of a job that trains on this data.
    ///
    /// # Errors
    /// If the model has fewer ids than the data.
    pub(crate) fn fill_in(&self, spec: &mut JobSpec) -> Result<(), Invalid> {
        let Manifest { vocab, tokenizer, .. } = &self.manifest;
        if let Some(set) = spec.model.vocab
            && let needed = self.required_vocab(set)
            && set < needed
        {
            return Err(Invalid::new(
                "model.vocab",
                format!(
                    "{set} token ids, but {} was prepared with the tokenizer {tokenizer}",
                    self.dir.display()
                ),
                format!("at least {needed}, or no model.vocab"),
            ));
        }
        spec.model.vocab.get_or_insert(*vocab);
        // The bytes of these files are not tokens.
        spec.data.tokenizer = xlaunch_spec::job::Tokenizer::Bin;
        if self.has_chats() {
            spec.data.documents.get_or_insert(self.default_documents());
        }
        if self.manifest.has_preferences() {
            spec.dpo.beta.get_or_insert(DpoSection::BETA);
        }
        Ok(())
    }

    /// Returns the treatment of documents that suits this data.
    pub(crate) fn default_documents(&self) -> DocumentMode {
        if self.has_chats() { DocumentMode::Packed } else { DocumentMode::Joined }
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

    /// Returns the number of ids that a model for this data has at least. `vocab` is that of the model at hand: if it
    /// has all ids of the tokenizer, the tokenizer is not opened.
    fn required_vocab(&self, vocab: usize) -> usize {
        let all = self.manifest.vocab;
        if all <= vocab {
            return all;
        }
        // A tokenizer that cannot be opened is reported where its text is needed.
        self.tokenizer().load().ok().flatten().map_or(all, |tokenizer| tokenizer.required_vocab())
    }

    /// Checks the vocabulary again: the directory may have been prepared again since the job was configured.
    fn check_vocab(&self, vocab: usize) -> Result<(), DataError> {
        let needed = self.required_vocab(vocab);
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

    /// Checks that both directories can be used together: they have the same ids, the same chat template if both have
    /// chats, and both have pairs of answers or none.
    pub(crate) fn check_matches(&self, other: &Self) -> Result<(), DataError> {
        let mismatch = |what, found: [String; 2]| {
            let [one, other] = [self, other].map(|it| format!("{} {}", it.key, it.dir.display()));
            Err(DataError::Mismatch { one, other, what, found: found.join(" and ") })
        };
        let (own, theirs) = (&self.manifest, &other.manifest);
        let same_file =
            own.tokenizer_xxh3_128.is_some() && own.tokenizer_xxh3_128 == theirs.tokenizer_xxh3_128;
        let same_ids = || -> Result<bool, DataError> {
            let loaded = (self.tokenizer().load()?, other.tokenizer().load()?);
            Ok(matches!(loaded, (Some(own), Some(theirs)) if own.same_ids(&theirs)))
        };
        if !(same_file || same_ids()?) {
            return mismatch("tokenizers", [self, other].map(Self::describe_tokenizer));
        }
        if !self.has_chats()
            && !other.has_chats()
            && (own.end_of_text, own.bos) != (theirs.end_of_text, theirs.bos)
        {
            let ids =
                |it: &Manifest| format!("{:?}", it.end_of_text.iter().chain(&it.bos).collect::<Vec<_>>());
            return mismatch("ids before each document", [own, theirs].map(ids));
        }
        if own.has_preferences() != theirs.has_preferences() {
            let kind = |it: &Manifest| if it.has_preferences() { "pairs of answers" } else { "other data" };
            return mismatch("rows", [own, theirs].map(|it| kind(it).into()));
        }
        if let (Some(own), Some(theirs)) = (&own.chat, &theirs.chat)
            && own.template_xxh3_128 != theirs.template_xxh3_128
        {
            return mismatch(
                "chat templates",
                [own, theirs].map(|chat| format!("hash {}", chat.template_xxh3_128)),
            );
        }
        Ok(())
    }

    fn describe_tokenizer(&self) -> String {
        let Manifest { tokenizer, vocab, tokenizer_xxh3_128, .. } = &self.manifest;
        let hash = tokenizer_xxh3_128.as_ref().map_or_else(String::new, |hash| format!(", hash {hash}"));
        format!("{} of {tokenizer} ({vocab} ids){hash}", self.dir.join(TOKENIZER_FILE).display())
    }

    /// Returns the file that contains the tokenizer.
    pub(crate) fn tokenizer(&self) -> TokenizerSource {
        TokenizerSource::File {
            path: self.dir.join(TOKENIZER_FILE),
            manifest: Some(Box::new(self.manifest.clone())),
        }
    }
}

/// Difference between the tokenizer of data and that of a model, as a message for the user.
#[derive(Debug)]
pub(crate) enum Mismatch {
    /// Some texts have other ids, but every id stands for the same text.
    Rules(String),
    /// The same ids stand for other text.
    Ids(String),
}

/// Compares the tokenizer of data with that of a model. The data may have further added tokens. `data` begins the
/// message: "DIR was prepared with".
pub(crate) fn tokenizer_mismatch(data: &str, theirs: &Tokenizer, own: &Tokenizer) -> Option<Mismatch> {
    if theirs.extends(own) {
        return None;
    }
    if own.with_bos(theirs.bos()).is_ok_and(|own| theirs.extends(&own)) {
        let [own, theirs] = [own, theirs].map(|of| of.bos().map_or("never", |_| "always"));
        let message = format!(
            "{data} --bos {theirs}, but the model was trained with --bos {own}: prepare the text with --bos {own}"
        );
        return (own != theirs).then_some(Mismatch::Rules(message));
    }
    let shared = theirs.shares_vocabulary(own);
    let [own, theirs] = [own, theirs].map(Tokenizer::label);
    let advice = "prepare the text with the model's (`xlaunch data prepare --tokenizer MODEL`)";
    Some(if shared {
        let same =
            "which has the same vocabulary but splits some texts differently or has other added tokens";
        Mismatch::Rules(format!("{data} tokenizer {theirs}, but the model has {own}, {same}: {advice}"))
    } else {
        Mismatch::Ids(format!("{data} tokenizer {theirs}, but the model has {own}: {advice}"))
    })
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
        let json = read_regular(path, MAX_TOKENIZER_BYTES);
        json.map(Some).map_err(|error| DataError::Read { path: path.clone(), reason: error.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn added_tokens_beyond_the_ids_of_the_model_are_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: serde_json::Value| {
            std::fs::write(dir.path().join(name), text.to_string()).unwrap();
        };
        let part = json!({"documents": 0, "bytes": 0, "tokens": 0, "shards": []});
        write(
            Manifest::FILE,
            json!({"version": 1, "tokenizer": "t", "vocab": 4, "end_of_text": 2, "train": part, "val": part}),
        );
        let token = |id: u32, content: &str| {
            json!({
                "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        };
        let added = [token(2, "<eos>"), token(3, "<image>")];
        let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []});
        write(TOKENIZER_FILE, json!({"added_tokens": added, "model": model}));
        let prepared = Prepared::open("data.train", &dir.path().to_string_lossy(), 1.0).unwrap();
        for (vocab, fits) in [(4, true), (3, true), (2, false)] {
            let mut spec = JobSpec::default();
            spec.model.vocab = Some(vocab);
            let filled = prepared.fill_in(&mut spec);
            assert_eq!(filled.is_ok(), fits, "{vocab}");
            assert_eq!(prepared.check_vocab(vocab).is_ok(), fits, "{vocab}");
            if let Err(invalid) = filled {
                assert!(invalid.expected.starts_with("at least 3,"), "{}", invalid.expected);
            }
        }
    }
}
