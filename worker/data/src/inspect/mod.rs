//! `xlaunch data inspect`: reads and verifies prepared data or a token file as a whole, and describes its contents.

mod scan;
mod side;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use scan::{Documents, Scan};
use side::{MaskReader, StartsReader};

use crate::manifest::{Manifest, ManifestError, Shard, Split};
use crate::shard::{self, HEADER_BYTES, Layout};
use crate::{
    MAX_TOKENIZER_BYTES, PrepareError, TOKENIZER_FILE, Tokenizer, TokenizerError, foreign, open_regular,
    read_regular,
};

const READ_BYTES: usize = 1 << 20;

/// Contents of a directory or a token file.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Path that was inspected.
    pub path: PathBuf,
    /// The tokenizer's name. For a token file without a `tokenizer.json` next to it, `gpt2` if the ids are within
    /// GPT-2's vocabulary.
    pub tokenizer: Option<String>,
    /// Highest id + 1 of the tokenizer.
    pub vocab: Option<usize>,
    /// The id that starts each document.
    pub end_of_text: Option<u32>,
    /// True if documents are pairs of a better and a worse answer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub preferences: bool,
    /// `train` and `val`, or the single token file.
    pub parts: Vec<Part>,
}

/// A split of a prepared directory, or a token file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Part {
    /// `train`, `val`, or the name of the file.
    pub name: String,
    /// Number of shards.
    pub shards: usize,
    /// Number of ids.
    pub tokens: u64,
    /// Bytes of text, known only from a manifest.
    pub bytes: Option<u64>,
    /// Number of documents.
    pub documents: Option<u64>,
    /// Ids per document, not counting the end-of-text id.
    pub lengths: Option<Lengths>,
    /// Number of ids whose loss counts, for chats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supervised: Option<u64>,
    /// Beginnings of some documents.
    pub samples: Vec<String>,
    /// Beginnings of some chats, or of both answers of a pair, the better one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chats: Vec<Vec<Run>>,
    /// True if the contents match the hashes of a manifest. `None` if there is no manifest.
    pub verified: Option<bool>,
}

/// A part of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// True if the loss of its ids counts.
    pub supervised: bool,
    /// The text of its ids.
    pub text: String,
}

/// Ids per document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "the names describe the fields")]
pub struct Lengths {
    pub min: u64,
    pub median: u64,
    pub p99: u64,
    pub max: u64,
}

/// Reads and verifies a prepared directory or a token file.
pub fn inspect(path: &Path) -> Result<Report, PrepareError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => directory(path),
        Ok(_) => token_file(path),
        Err(error) => Err(PrepareError::read(path.display(), &error)),
    }
}

fn directory(dir: &Path) -> Result<Report, PrepareError> {
    let manifest = Manifest::open(dir).map_err(|error| match error {
        ManifestError::Missing { .. }
        | ManifestError::ReplacementInterrupted { .. }
        | ManifestError::Read { .. } => PrepareError::Usage(error.to_string()),
        ManifestError::Version { .. } | ManifestError::Damaged { .. } => {
            PrepareError::Data(error.to_string())
        }
    })?;
    let tokenizer = tokenizer(dir, &manifest)?;
    let part = |name: &str, split: &Split| {
        let documents = match &split.starts {
            Some(starts) => Documents::At(Box::new(StartsReader::open(dir, starts)?)),
            None => Documents::of(&tokenizer).unless(manifest.chat.is_some()),
        };
        let mut scan = Scan::new(Some(&tokenizer), documents, Some(split.documents));
        if manifest.has_preferences() {
            scan.sample_pair();
        }
        for shard in &split.shards {
            scan_shard(dir, shard, &manifest, &mut scan)?;
        }
        let mut part = scan.part(name, split.shards.len())?;
        if part.supervised.is_some() && part.supervised != split.supervised {
            let found = part.supervised.unwrap_or_default();
            let reason = format!("the masks of `{name}` have {found} ids whose loss counts");
            return Err(PrepareError::Data(format!("{}: {reason}", dir.join(Manifest::FILE).display())));
        }
        if part.documents.is_some_and(|documents| documents != split.documents) {
            let found = part.documents.unwrap_or_default();
            let reason = format!("{} documents in `{name}`, but {found} end-of-text ids", split.documents);
            return Err(PrepareError::Data(format!("{}: {reason}", dir.join(Manifest::FILE).display())));
        }
        (part.documents, part.bytes, part.verified) = (Some(split.documents), Some(split.bytes), Some(true));
        part.supervised = split.supervised;
        Ok(part)
    };
    Ok(report(dir, &manifest, vec![part("train", &manifest.train)?, part("val", &manifest.val)?]))
}

fn report(path: &Path, manifest: &Manifest, parts: Vec<Part>) -> Report {
    Report {
        path: path.into(),
        tokenizer: Some(manifest.tokenizer.clone()),
        vocab: Some(manifest.vocab),
        end_of_text: manifest.end_of_text,
        preferences: manifest.has_preferences(),
        parts,
    }
}

fn scan_shard(
    dir: &Path,
    shard: &Shard,
    manifest: &Manifest,
    scan: &mut Scan<'_>,
) -> Result<(), PrepareError> {
    let path = dir.join(&shard.name);
    let damaged = |reason: &str| Err(PrepareError::Data(format!("{}: damaged: {reason}", path.display())));
    let (file, layout, bytes) = open(&path)?;
    let Some(layout) = layout else { return damaged("it has no header") };
    if (bytes, layout.tokens, layout.width) != (shard.bytes, shard.tokens, manifest.width()) {
        return damaged("its size differs from the manifest");
    }
    let mut mask = shard.mask.as_ref().map(|mask| MaskReader::open(dir, mask)).transpose()?;
    let hash = scan.file(&path, file, layout, mask.as_mut())?;
    if let Some(mask) = mask {
        scan.add_supervised(mask.finish()?);
    }
    if !hash.eq_ignore_ascii_case(&shard.xxh3_128) {
        return damaged("its contents do not match the hash in the manifest");
    }
    match scan.highest() {
        Some(id) if u64::from(id) >= manifest.vocab as u64 => {
            damaged(&format!("id {id} is not below the vocabulary's size, {}", manifest.vocab))
        }
        _ => Ok(()),
    }
}

fn token_file(path: &Path) -> Result<Report, PrepareError> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // A manifest that does not list the file, or cannot be read, says nothing about it.
    if let Ok(manifest) = Manifest::read(dir)
        && let Some(shard) =
            manifest.train.shards.iter().chain(&manifest.val.shards).find(|shard| shard.name == name)
    {
        let tokenizer = tokenizer(dir, &manifest)?;
        let documents = Documents::of(&tokenizer).unless(manifest.chat.is_some());
        let mut scan = Scan::new(Some(&tokenizer), documents, None);
        scan_shard(dir, shard, &manifest, &mut scan)?;
        let part = Part { verified: Some(true), ..scan.part(&name, 1)? };
        return Ok(report(path, &manifest, vec![part]));
    }
    let (file, layout, bytes) = open(path)?;
    let layout = match layout {
        Some(layout) => layout,
        None if bytes > 0 && bytes % 2 == 0 => Layout { header: 0, width: 2, tokens: bytes / 2 },
        None => {
            let reason = match bytes {
                0 => "it is empty",
                _ => "no header, and its size is not a whole number of 16-bit ids",
            };
            return Err(PrepareError::Data(format!("{}: not a token file: {reason}", path.display())));
        }
    };
    let beside = dir.join(TOKENIZER_FILE);
    let tokenizer = if beside.exists() {
        Some(Tokenizer::from_file(&beside).map_err(unusable)?)
    } else {
        Some(Tokenizer::gpt2()).filter(|_| layout.width == 2)
    };
    let documents = tokenizer.as_ref().map_or(Documents::Unknown, Documents::of);
    let mut scan = Scan::new(tokenizer.as_ref(), documents, None);
    scan.file(path, file, layout, None)?;
    let highest = scan.highest();
    let mut part = scan.part(&name, 1)?;
    // The ids may come from another tokenizer.
    let fits = |tokenizer: &Tokenizer| highest.is_none_or(|id| u64::from(id) < tokenizer.vocab() as u64);
    let tokenizer = tokenizer.filter(fits);
    if tokenizer.is_none() {
        part = Part { documents: None, lengths: None, samples: Vec::new(), ..part };
    }
    Ok(Report {
        path: path.into(),
        tokenizer: tokenizer.as_ref().map(|tokenizer| tokenizer.name().into()),
        vocab: tokenizer.as_ref().map(Tokenizer::vocab),
        end_of_text: tokenizer.as_ref().and_then(Tokenizer::end_of_text),
        preferences: false,
        parts: vec![part],
    })
}

fn tokenizer(dir: &Path, manifest: &Manifest) -> Result<Tokenizer, PrepareError> {
    let path = dir.join(TOKENIZER_FILE);
    let json = read_regular(&path, MAX_TOKENIZER_BYTES)
        .map_err(|error| PrepareError::Data(format!("{}: {error}", path.display())))?;
    manifest.tokenizer(&json).map_err(|reason| PrepareError::Data(format!("{}: {reason}", path.display())))
}

fn unusable(error: TokenizerError) -> PrepareError {
    PrepareError::Data(error.to_string())
}

/// Opens a token file. Also returns its size.
fn open(path: &Path) -> Result<(File, Option<Layout>, u64), PrepareError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => PrepareError::Data(format!("{} is missing", path.display())),
        _ => PrepareError::read(path.display(), &error),
    };
    let mut file = open_regular(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let mut head = Vec::with_capacity(HEADER_BYTES);
    Read::by_ref(&mut file).take(HEADER_BYTES as u64).read_to_end(&mut head).map_err(failed)?;
    io::Seek::rewind(&mut file).map_err(failed)?;
    let layout = shard::layout(&head, bytes)
        .map_err(|error| PrepareError::Data(format!("{}: {error}", path.display())))?;
    if layout.is_none()
        && let Some(found) = foreign::not_ids(&head)
    {
        return Err(PrepareError::Data(format!(
            "{}: not a token file: it is {}",
            path.display(),
            found.what
        )));
    }
    Ok((file, layout, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Documents, Invalid, Options, prepare};

    fn prepared(tokenizer: Tokenizer, lines: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("a.txt");
        fs_err::write(&input, lines).unwrap();
        let options = Options {
            tokenizer,
            output: dir.path().join("out"),
            inputs: vec![input.display().to_string()],
            documents: Documents::Line,
            field: None,
            chat: None,
            on_error: crate::OnError::Stop,
            val: 0.0,
            shard_tokens: 150,
            invalid: Invalid::Error,
            overwrite: false,
            threads: 1,
        };
        prepare(&options, &mut |_| {}).unwrap();
        dir
    }

    #[test]
    fn counts_lengths_and_samples_of_documents() {
        // Documents with 1 to 100 ids.
        let lines: String = (1..=100).map(|length| " a".repeat(length) + "\n").collect();
        let dir = prepared(Tokenizer::gpt2(), &lines);
        let report = inspect(&dir.path().join("out")).unwrap();
        let train = &report.parts[0];
        assert_eq!((train.documents, train.tokens, train.shards), (Some(100), 5150, 35));
        assert_eq!(train.lengths, Some(Lengths { min: 1, median: 50, p99: 99, max: 100 }));
        assert_eq!(train.samples, [" a".to_owned(), " a".repeat(51)]);
        assert_eq!((train.verified, report.parts[1].tokens), (Some(true), 0));
        // A document that starts in the previous shard does not count as one of the file.
        let file = inspect(&dir.path().join("out/train_000001.bin")).unwrap();
        assert_eq!((file.parts[0].documents, file.parts[0].verified), (Some(16), Some(true)));
        assert_eq!(file.tokenizer.as_deref(), Some("gpt2"));
        fs_err::remove_file(dir.path().join("out/manifest.json")).unwrap();
        let file = inspect(&dir.path().join("out/train_000001.bin")).unwrap();
        assert_eq!((file.parts[0].documents, file.parts[0].verified), (Some(16), None));
    }

    #[test]
    fn bytes_have_a_sample_without_documents() {
        let dir = prepared(Tokenizer::bytes(), "first\nsecond\n");
        let report = inspect(&dir.path().join("out")).unwrap();
        let train = &report.parts[0];
        assert_eq!((train.documents, train.tokens, train.lengths), (Some(2), 11, None));
        assert_eq!(train.samples, ["firstsecond"]);
        // As with `--eot none`: the tokenizer alone would say that documents start with an id.
        let dir = prepared(Tokenizer::gpt2().with_end_of_text(None), "first\nsecond\n");
        let shard = inspect(&dir.path().join("out/train_000001.bin")).unwrap();
        assert_eq!((shard.end_of_text, shard.parts[0].documents), (None, None));
    }

    #[test]
    fn text_empty_files_and_odd_sizes_are_not_token_files() {
        let dir = tempfile::tempdir().unwrap();
        let text = b"{\"text\": \"some words\"}\n";
        for (contents, reason) in [(&b""[..], "it is empty"), (b"abc", "16-bit"), (text, "it is text")] {
            let path = dir.path().join("file");
            fs_err::write(&path, contents).unwrap();
            let error = inspect(&path).unwrap_err();
            assert!(matches!(&error, PrepareError::Data(text) if text.contains(reason)), "{error}");
        }
    }

    #[test]
    fn damage_is_found() {
        let dir = prepared(Tokenizer::gpt2(), &"some words\n".repeat(100));
        let out = dir.path().join("out");
        let refusal = || match inspect(&out).unwrap_err() {
            PrepareError::Data(reason) => reason,
            other => panic!("{other}"),
        };
        let path = out.join("train_000002.bin");
        let whole = fs_err::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[1100] ^= 1;
        fs_err::write(&path, &flipped).unwrap();
        assert!(refusal().contains("train_000002.bin: damaged: its contents do not match"));
        fs_err::write(&path, &whole[..whole.len() - 2]).unwrap();
        assert!(refusal().contains("truncated or damaged"));
        fs_err::remove_file(&path).unwrap();
        assert!(refusal().contains("train_000002.bin is missing"));
        fs_err::write(&path, &whole).unwrap();
        fs_err::write(out.join(TOKENIZER_FILE), Tokenizer::bytes().to_json()).unwrap();
        assert!(refusal().contains("not the tokenizer that the data"));
        fs_err::remove_file(out.join(Manifest::FILE)).unwrap();
        assert!(matches!(inspect(&out), Err(PrepareError::Usage(reason)) if reason.contains("interrupted")));
    }
}
