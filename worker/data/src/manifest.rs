//! `manifest.json`: the contents of a prepared directory. It is written last, so a directory without it is not prepared
//! data.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::chat::{CONFIG_FILE, Templates};
use crate::{Tokenizer, hash};

/// Size limit of a manifest. With a million shards it has 100 MB.
const MAX_BYTES: u64 = 128 << 20;
/// Maximum vocabulary size in a manifest: far above all in use, and ids fit into i32.
const MAX_VOCAB: usize = 1 << 30;

/// The contents of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version; the first key in the file.
    pub version: u32,
    /// The tokenizer's name: `bytes`, `gpt2`, or that of a file.
    pub tokenizer: String,
    /// Highest id + 1.
    pub vocab: usize,
    /// The id that starts each document.
    pub end_of_text: Option<u32>,
    /// The id that follows the end-of-text id, if the tokenizer's template puts one before a text.
    #[serde(default)]
    pub bos: Option<u32>,
    /// XXH3-128 hash of `tokenizer.json` in hexadecimal.
    #[serde(default)]
    pub tokenizer_xxh3_128: Option<String>,
    /// Number of unusable lines and rows that were left out.
    #[serde(default)]
    pub skipped: u64,
    /// How chats were rendered. If set, documents do not start with the end-of-text id: the template writes its own
    /// tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<Chat>,
    /// Training data.
    pub train: Split,
    /// Held-out data.
    pub val: Split,
}

/// The preparation of chats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chat {
    /// XXH3-128 hash of the chat template in hexadecimal.
    pub template_xxh3_128: String,
    /// Special ids that end answers, ascending.
    #[serde(default)]
    pub ends: Vec<u32>,
    /// Number of chats from whose end turns were left out to fit a maximum number of ids.
    #[serde(default)]
    pub truncated: u64,
    /// Number of chats that were left out because not even their first turn fits.
    #[serde(default)]
    pub dropped: u64,
    /// True if documents are pairs of a better and a worse answer, one after the other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preferences: bool,
}

/// One part of the data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// Number of documents.
    pub documents: u64,
    /// Size of their text in bytes of UTF-8.
    pub bytes: u64,
    /// Number of their ids, including an end-of-text id each.
    pub tokens: u64,
    /// Number of ids whose loss counts, if shards have masks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervised: Option<u64>,
    /// The file with the positions of documents. Without it, a document starts at each end-of-text id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts: Option<SideFile>,
    /// Token files, in order. A document may continue in the next file.
    pub shards: Vec<Shard>,
}

/// A token file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Name within the directory.
    pub name: String,
    /// Number of ids.
    pub tokens: u64,
    /// Size of the file.
    pub bytes: u64,
    /// XXH3-128 hash of the file in hexadecimal.
    pub xxh3_128: String,
    /// The file with one bit per id, least significant bit first: 1 if the loss of predicting this id counts. Padding
    /// bits are 0. Without it, every loss counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<SideFile>,
}

/// A file that describes the ids of token files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SideFile {
    /// Name within the directory.
    pub name: String,
    /// Size of the file.
    pub bytes: u64,
    /// XXH3-128 hash of the file in hexadecimal.
    pub xxh3_128: String,
}

/// Reason why a directory is not prepared data.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
pub enum ManifestError {
    /// The directory was never prepared, or its preparation was interrupted.
    #[error(
        "{} has no {}: it is not prepared data, or `xlaunch data prepare` was interrupted",
        dir.display(),
        Manifest::FILE
    )]
    Missing { dir: PathBuf },
    /// The new data is complete, but has not replaced all of the old data.
    #[error(
        "{dir} has no {}: `xlaunch data prepare --overwrite` was interrupted while it replaced the data; \
         run `xlaunch data prepare` with `--output {dir}` and without `--overwrite` to finish that",
        Manifest::FILE,
        dir = dir.display()
    )]
    ReplacementInterrupted { dir: PathBuf },
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error(
        "{}: version {version} is not supported; expected version {} to {}",
        path.display(),
        Manifest::VERSION,
        Manifest::PREFERENCE_VERSION
    )]
    Version { path: PathBuf, version: u32 },
    #[error("{} is damaged: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

impl Manifest {
    /// Name of the file.
    pub const FILE: &str = "manifest.json";
    /// Version of the manifest and of the data that it describes.
    pub const VERSION: u32 = 1;
    /// Version of the manifest of chats. Programs that know only version 1 would train on the questions as well.
    pub const CHAT_VERSION: u32 = 2;
    /// Version of the manifest of preferences. Programs that know only version 2 would train on the worse answers, too.
    pub const PREFERENCE_VERSION: u32 = 3;

    /// Reads and checks the manifest of `dir`. Sizes and hashes of the shards are not compared with the files.
    pub fn read(dir: &Path) -> Result<Self, ManifestError> {
        let path = dir.join(Self::FILE);
        let json = crate::read_regular(&path, MAX_BYTES).map_err(|error| match error.kind() {
            ErrorKind::NotFound if has_replacement(dir) => {
                ManifestError::ReplacementInterrupted { dir: dir.into() }
            }
            ErrorKind::NotFound => ManifestError::Missing { dir: dir.into() },
            ErrorKind::FileTooLarge => {
                ManifestError::Damaged { path: path.clone(), reason: error.to_string() }
            }
            _ => ManifestError::Read { path: path.clone(), reason: error.to_string() },
        })?;
        Self::parse(&path, &json)
    }

    /// Reads the manifest of `dir` like [`read`](Self::read), and checks that the chat template there is the one that
    /// the data was prepared with: models that are trained on the data are exported with it.
    pub fn open(dir: &Path) -> Result<Self, ManifestError> {
        let manifest = Self::read(dir)?;
        manifest.check_template(dir)?;
        Ok(manifest)
    }

    /// Parses and checks the contents of `path`.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, ManifestError> {
        let damaged = |reason: String| ManifestError::Damaged { path: path.into(), reason };
        // The version comes first: the rest of another version may have any form.
        let Header { version } = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        if !(Self::VERSION..=Self::PREFERENCE_VERSION).contains(&version) {
            return Err(ManifestError::Version { path: path.into(), version });
        }
        let manifest: Self = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Returns the version of the manifest of such data.
    pub(crate) fn version_for(chat: Option<&Chat>) -> u32 {
        match chat {
            None => Self::VERSION,
            Some(Chat { preferences: false, .. }) => Self::CHAT_VERSION,
            Some(Chat { preferences: true, .. }) => Self::PREFERENCE_VERSION,
        }
    }

    /// Returns whether documents are pairs of a better and a worse answer.
    pub fn has_preferences(&self) -> bool {
        self.chat.as_ref().is_some_and(|chat| chat.preferences)
    }

    /// Returns the number of bytes per id in the shards.
    pub fn width(&self) -> usize {
        crate::shard::width(self.vocab)
    }

    /// Parses the tokenizer in `json`, the contents of the `tokenizer.json` next to the manifest. The error is the
    /// reason why the data was not prepared with it.
    pub fn tokenizer(&self, json: &[u8]) -> Result<Tokenizer, String> {
        if self.tokenizer_xxh3_128.as_ref().is_some_and(|expected| *expected != hash(json)) {
            return Err("it is not the tokenizer that the data in this directory was prepared with".into());
        }
        let tokenizer = Tokenizer::from_json(json).map_err(|error| error.to_string())?;
        if tokenizer.vocab() != self.vocab {
            let (found, expected) = (tokenizer.vocab(), self.vocab);
            return Err(format!(
                "it has {found} ids, but the manifest says {expected}; prepare the directory again"
            ));
        }
        Ok(tokenizer.with_end_of_text(self.end_of_text))
    }

    /// Checks the chat template in `dir`, the directory of this manifest.
    pub(crate) fn check_template(&self, dir: &Path) -> Result<(), ManifestError> {
        let Some(chat) = &self.chat else { return Ok(()) };
        let damaged = |name: &str, reason| ManifestError::Damaged { path: dir.join(name), reason };
        match Templates::hash_in(dir).map_err(|reason| damaged(CONFIG_FILE, reason))? {
            Some((name, found)) if found != chat.template_xxh3_128 => {
                Err(damaged(name, "the data was prepared with another chat template".into()))
            }
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<(), String> {
        if self.vocab == 0 || self.vocab > MAX_VOCAB {
            return Err(format!("a vocabulary of {} ids", self.vocab));
        }
        if let Some(id) = self.end_of_text.filter(|id| usize::try_from(*id).is_ok_and(|id| id >= self.vocab))
        {
            return Err(format!(
                "the end-of-text id {id} is not below the vocabulary's size, {}",
                self.vocab
            ));
        }
        if self.version != Self::version_for(self.chat.as_ref()) {
            return Err(format!("version {} does not match the key `chat`", self.version));
        }
        if self.has_preferences() && [&self.train, &self.val].iter().any(|split| split.documents % 2 != 0) {
            return Err("an odd number of documents, but they are pairs".into());
        }
        let mut names = BTreeSet::new();
        for (split, prefix) in [(&self.train, TRAIN_PREFIX), (&self.val, VAL_PREFIX)] {
            check_starts(split, prefix)?;
            let mut tokens = Some(0_u64);
            for shard in &split.shards {
                check_shard(shard, prefix, self.width())?;
                check_mask(shard, self.chat.is_some())?;
                if !names.insert(shard.name.as_str()) {
                    return Err(format!("the shard `{}` is named twice", shard.name));
                }
                tokens = tokens.and_then(|tokens| tokens.checked_add(shard.tokens));
            }
            if tokens != Some(split.tokens) {
                return Err(format!(
                    "the tokens of the shards `{prefix}*` do not add up to {}",
                    split.tokens
                ));
            }
        }
        Ok(())
    }
}

/// Subdirectory for data that will replace complete data. Its own manifest is written last.
pub(crate) const REPLACEMENT: &str = ".prepare.new";

/// Returns whether all of the data that will replace the data in `dir` has been written.
pub(crate) fn has_replacement(dir: &Path) -> bool {
    dir.join(REPLACEMENT).join(Manifest::FILE).exists()
}

/// Names of shards: prefix, six or more digits, [`SHARD_SUFFIX`].
pub(crate) const TRAIN_PREFIX: &str = "train_";
pub(crate) const VAL_PREFIX: &str = "val_";
pub(crate) const SHARD_SUFFIX: &str = ".bin";
/// Names of masks are those of their shards with this suffix.
pub(crate) const MASK_SUFFIX: &str = ".mask";
/// Names of the files with the positions of documents: prefix and this.
pub(crate) const STARTS_NAME: &str = "starts.bin";
/// Bytes of a position of a document.
pub(crate) const START_BYTES: u64 = 8;

/// Returns whether this is the name of a shard of the split with this prefix.
pub(crate) fn is_shard_name(name: &str, prefix: &str) -> bool {
    has_number(name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SHARD_SUFFIX)))
}

/// Returns whether this is the name of a mask, or of the positions of documents, of the split with this prefix.
pub(crate) fn is_side_name(name: &str, prefix: &str) -> bool {
    let rest = name.strip_prefix(prefix);
    rest == Some(STARTS_NAME) || has_number(rest.and_then(|rest| rest.strip_suffix(MASK_SUFFIX)))
}

fn has_number(digits: Option<&str>) -> bool {
    digits.is_some_and(|digits| digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn check_shard(shard: &Shard, prefix: &str, width: usize) -> Result<(), String> {
    let name = &shard.name;
    if !is_shard_name(name, prefix) {
        return Err(format!("`{}` is not the name of a shard `{prefix}NNNNNN.bin`", name.escape_debug()));
    }
    let bytes = shard.tokens.checked_mul(width as u64);
    let bytes = bytes.and_then(|bytes| bytes.checked_add(crate::shard::HEADER_BYTES as u64));
    if shard.tokens > crate::shard::MAX_TOKENS || bytes != Some(shard.bytes) {
        return Err(format!("{name}: {} bytes for {} tokens of {width} bytes", shard.bytes, shard.tokens));
    }
    check_hash(name, &shard.xxh3_128)
}

fn check_mask(shard: &Shard, required: bool) -> Result<(), String> {
    let Some(mask) = &shard.mask else {
        return if required {
            Err(format!("{}: a shard of chats without a mask", shard.name))
        } else {
            Ok(())
        };
    };
    let expected = shard.name.strip_suffix(SHARD_SUFFIX).map(|stem| format!("{stem}{MASK_SUFFIX}"));
    check_side(mask, &expected.unwrap_or_default(), shard.tokens.div_ceil(8))
}

fn check_starts(split: &Split, prefix: &str) -> Result<(), String> {
    if split.supervised.is_some_and(|supervised| supervised > split.tokens) {
        return Err(format!("more than all tokens of `{prefix}*` are supervised"));
    }
    let Some(starts) = &split.starts else { return Ok(()) };
    let bytes = split.documents.checked_mul(START_BYTES).ok_or("more documents than a file can list")?;
    check_side(starts, &format!("{prefix}{STARTS_NAME}"), bytes)
}

fn check_side(file: &SideFile, name: &str, bytes: u64) -> Result<(), String> {
    if file.name != name {
        return Err(format!("`{}` is not the name `{name}`", file.name.escape_debug()));
    }
    if file.bytes != bytes {
        return Err(format!("{name}: {} bytes; expected {bytes}", file.bytes));
    }
    check_hash(name, &file.xxh3_128)
}

fn check_hash(name: &str, hash: &str) -> Result<(), String> {
    if hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        Ok(())
    } else {
        Err(format!("{name}: the hash is not 32 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn valid() -> Value {
        let shard = |name| json!({"name": name, "tokens": 3, "bytes": 1030, "xxh3_128": "0".repeat(32)});
        json!({
            "version": 1, "tokenizer": "gpt2", "vocab": 50257, "end_of_text": 50256, "later": 1,
            "train": {"documents": 2, "bytes": 20, "tokens": 6,
                "shards": [shard("train_000001.bin"), shard("train_000002.bin")]},
            "val": {"documents": 1, "bytes": 10, "tokens": 3, "shards": [shard("val_000001.bin")]},
        })
    }

    fn refusal(change: impl FnOnce(&mut Value)) -> String {
        let mut value = valid();
        change(&mut value);
        Manifest::parse(Path::new("d/manifest.json"), value.to_string().as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn valid_manifest_is_read_from_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Manifest::read(dir.path()), Err(ManifestError::Missing { .. })));
        std::fs::write(dir.path().join(Manifest::FILE), valid().to_string()).unwrap();
        let manifest = Manifest::read(dir.path()).unwrap();
        assert_eq!((manifest.train.shards.len(), manifest.val.tokens, manifest.width()), (2, 3, 2));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(refusal(|value| value["version"] = json!(4)).contains("version 4 is not supported"));
        assert!(refusal(|value| value["vocab"] = json!(0)).contains("vocabulary of 0"));
        assert!(refusal(|value| value["end_of_text"] = json!(50257)).contains("50257 is not below"));
        assert!(refusal(|value| value["train"]["tokens"] = json!(7)).contains("do not add up to 7"));
        let first = |value: &mut Value, key: &str, new: Value| value["train"]["shards"][0][key] = new;
        assert!(refusal(|value| first(value, "name", json!("../train_000001.bin"))).contains("not the name"));
        assert!(refusal(|value| first(value, "name", json!("train_000002.bin"))).contains("named twice"));
        assert!(refusal(|value| first(value, "bytes", json!(1031))).contains("1031 bytes for 3 tokens"));
        assert!(refusal(|value| first(value, "tokens", json!(u64::MAX))).contains("tokens of 2 bytes"));
        assert!(refusal(|value| first(value, "xxh3_128", json!("zz"))).contains("hexadecimal"));
    }
    #[test]
    fn masks_and_starts_of_chats_must_fit_their_shards() {
        let chat = |change: &dyn Fn(&mut Value)| {
            refusal(|value| {
                let side = |name: &str, bytes: u64| json!({"name": name, "bytes": bytes, "xxh3_128": "0".repeat(32)});
                value["version"] = json!(2);
                value["chat"] = json!({"template_xxh3_128": "0".repeat(32)});
                for (split, shards) in [("train", 2), ("val", 1)] {
                    value[split]["supervised"] = json!(2);
                    let documents = value[split]["documents"].as_u64().unwrap();
                    value[split]["starts"] = side(&format!("{split}_starts.bin"), 8 * documents);
                    for index in 0..shards {
                        value[split]["shards"][index]["mask"] =
                            side(&format!("{split}_{:06}.mask", index + 1), 1);
                    }
                }
                change(value);
            })
        };
        assert!(chat(&|value| value["version"] = json!(1)).contains("does not match the key `chat`"));
        assert!(chat(&|value| value["chat"] = Value::Null).contains("does not match the key `chat`"));
        assert!(chat(&|value| value["train"]["supervised"] = json!(7)).contains("are supervised"));
        assert!(chat(&|value| value["val"]["starts"]["bytes"] = json!(7)).contains("7 bytes; expected 8"));
        assert!(chat(&|value| value["val"]["starts"]["name"] = json!("/x")).contains("`/x` is not the name"));
        let mask = |value: &mut Value, new: Value| value["train"]["shards"][1]["mask"] = new;
        assert!(chat(&|value| mask(value, Value::Null)).contains("a shard of chats without a mask"));
        let first = json!({"name": "train_000001.mask", "bytes": 1, "xxh3_128": "0".repeat(32)});
        assert!(chat(&|value| mask(value, first.clone())).contains("is not the name `train_000002.mask`"));
    }
}
