//! Writes ids to shards, each document to train or val.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::PrepareError;
use super::encode::Encoded;
use super::side::{MaskWriter, SideWriter, create_new};
use crate::Tokenizer;
use crate::manifest::{Chat, Manifest, SHARD_SUFFIX, STARTS_NAME, Shard, Split, TRAIN_PREFIX, VAL_PREFIX};
use crate::shard::{self, HEADER_BYTES};

const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// Writes both splits.
pub(super) struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    /// Documents whose hash is below this share of the hash range are held out.
    val_share: f64,
    train: Shards<'a>,
    val: Shards<'a>,
    /// True if the current document is held out.
    held_out: bool,
}

impl<'a> Writer<'a> {
    /// `masked`: the data has masks and positions of documents.
    pub(super) fn new(
        dir: &'a Path,
        tokenizer: &'a Tokenizer,
        val_share: f64,
        shard_tokens: u64,
        masked: bool,
    ) -> Self {
        let width = shard::width(tokenizer.vocab());
        let split = || Split { supervised: masked.then_some(0), ..Split::default() };
        let shards =
            |prefix| Shards { dir, prefix, width, shard_tokens, open: None, starts: None, split: split() };
        let (train, val) = (shards(TRAIN_PREFIX), shards(VAL_PREFIX));
        Self { tokenizer, val_share, train, val, held_out: false }
    }

    /// Writes the ids of the next block.
    pub(super) fn write(&mut self, block: &Encoded) -> Result<(), PrepareError> {
        let (mut ids, mut mask) = (block.ids.as_slice(), block.mask.as_slice());
        for part in &block.parts {
            if let Some(hash) = part.start {
                self.held_out = is_held_out(hash, self.val_share);
            }
            let shards = if self.held_out { &mut self.val } else { &mut self.train };
            if part.start.is_some() {
                shards.start()?;
            }
            shards.split.bytes += part.bytes;
            let (these, rest) = ids.split_at(part.ids.min(ids.len()));
            let (bits, other_bits) = mask.split_at(part.ids.min(mask.len()));
            shards.write(these, bits)?;
            (ids, mask) = (rest, other_bits);
        }
        Ok(())
    }

    /// Returns the number of documents and ids so far.
    pub(super) fn written(&self) -> (u64, u64) {
        let (train, val) = (&self.train.split, &self.val.split);
        (train.documents + val.documents, train.tokens + val.tokens)
    }

    /// Completes the shards. `skipped` is the number of lines and rows that were left out.
    pub(super) fn finish(mut self, skipped: u64, chat: Option<Chat>) -> Result<Manifest, PrepareError> {
        self.train.finish()?;
        self.val.finish()?;
        Ok(Manifest {
            version: Manifest::version_for(chat.as_ref()),
            tokenizer: self.tokenizer.name().into(),
            vocab: self.tokenizer.vocab(),
            end_of_text: self.tokenizer.end_of_text(),
            bos: self.tokenizer.bos(),
            tokenizer_xxh3_128: Some(crate::hash(self.tokenizer.to_json().as_bytes())),
            skipped,
            chat,
            train: self.train.split,
            val: self.val.split,
        })
    }
}

/// Decides by the hash of a document, so that copies are in the same split.
#[expect(clippy::cast_precision_loss, reason = "a share needs no higher precision")]
fn is_held_out(hash: u64, share: f64) -> bool {
    (hash as f64) < share * 2_f64.powi(64)
}

/// The shards of one split.
struct Shards<'a> {
    dir: &'a Path,
    prefix: &'static str,
    width: usize,
    shard_tokens: u64,
    open: Option<Open>,
    /// Positions of documents, for masked data.
    starts: Option<SideWriter>,
    /// It counts supervised ids if the data is masked.
    split: Split,
}

/// A shard that is being written. Until it is closed, its header claims that it is full.
struct Open {
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    tokens: u64,
    mask: Option<MaskWriter>,
}

impl Shards<'_> {
    /// Starts a document at the next id.
    fn start(&mut self) -> Result<(), PrepareError> {
        self.split.documents += 1;
        if self.split.supervised.is_none() {
            return Ok(());
        }
        let mut starts = match self.starts.take() {
            Some(starts) => starts,
            None => SideWriter::create(self.dir, format!("{}{STARTS_NAME}", self.prefix))?,
        };
        starts.write(&self.split.tokens.to_le_bytes())?;
        self.starts = Some(starts);
        Ok(())
    }

    /// Writes ids. `mask` has as many bits if the data is masked.
    fn write(&mut self, mut ids: &[u32], mut mask: &[bool]) -> Result<(), PrepareError> {
        while !ids.is_empty() {
            let mut shard = match self.open.take() {
                Some(shard) => shard,
                None => self.create()?,
            };
            let room = usize::try_from(self.shard_tokens - shard.tokens).unwrap_or(usize::MAX);
            let (these, rest) = ids.split_at(ids.len().min(room));
            let (bits, other_bits) = mask.split_at(mask.len().min(room));
            let bytes: Vec<u8> = match self.width {
                // Ids are below the vocabulary size, which is at most 2^16 here.
                #[expect(clippy::cast_possible_truncation, reason = "the ids fit into 16 bits")]
                2 => these.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
                _ => these.iter().flat_map(|id| id.to_le_bytes()).collect(),
            };
            shard.file.write_all(&bytes).map_err(|error| PrepareError::write(&shard.path, &error))?;
            shard.hash.update(&bytes);
            shard.tokens += these.len() as u64;
            self.split.tokens += these.len() as u64;
            if let (Some(mask), Some(supervised)) = (&mut shard.mask, &mut self.split.supervised) {
                mask.write(bits)?;
                *supervised += bits.iter().filter(|counts| **counts).count() as u64;
            }
            self.open = Some(shard);
            if these.len() == room {
                self.close()?;
            }
            (ids, mask) = (rest, other_bits);
        }
        Ok(())
    }

    fn create(&mut self) -> Result<Open, PrepareError> {
        let name = format!("{}{:06}{SHARD_SUFFIX}", self.prefix, self.split.shards.len() + 1);
        let path = self.dir.join(&name);
        let header = self.header(self.shard_tokens);
        let failed = |error: io::Error| PrepareError::write(&path, &error);
        let file = create_new(&path)?;
        let mut file = BufWriter::with_capacity(WRITE_BUFFER_BYTES, file);
        file.write_all(&header).map_err(failed)?;
        let mut hash = Xxh3::new();
        hash.update(&header);
        let mask = match self.split.supervised {
            Some(_) => Some(MaskWriter::create(self.dir, &name)?),
            None => None,
        };
        Ok(Open { name, path, file, hash, tokens: 0, mask })
    }

    fn header(&self, tokens: u64) -> [u8; HEADER_BYTES] {
        // `shard_tokens` was checked before.
        shard::header(tokens, self.width).unwrap_or([0; HEADER_BYTES])
    }

    /// Completes the open shard. If it is not full, updates header and hash to its actual contents.
    fn close(&mut self) -> Result<(), PrepareError> {
        let Some(Open { name, path, file, mut hash, tokens, mask }) = self.open.take() else { return Ok(()) };
        let failed = |error: io::Error| PrepareError::write(&path, &error);
        let mut file = file.into_inner().map_err(|error| failed(error.into_error()))?;
        if tokens < self.shard_tokens {
            file.seek(SeekFrom::Start(0)).map_err(failed)?;
            file.write_all(&self.header(tokens)).map_err(failed)?;
            hash = hash_file(&mut file).map_err(failed)?;
        }
        file.sync_all().map_err(failed)?;
        let bytes = HEADER_BYTES as u64 + tokens * self.width as u64;
        let xxh3_128 = format!("{:032x}", hash.digest128());
        let mask = mask.map(MaskWriter::finish).transpose()?;
        self.split.shards.push(Shard { name, tokens, bytes, xxh3_128, mask });
        Ok(())
    }

    fn finish(&mut self) -> Result<(), PrepareError> {
        self.close()?;
        self.split.starts = self.starts.take().map(SideWriter::finish).transpose()?;
        Ok(())
    }
}

fn hash_file(file: &mut File) -> io::Result<Xxh3> {
    file.seek(SeekFrom::Start(0))?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; WRITE_BUFFER_BYTES]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash),
            count => hash.update(&buffer[..count]),
        }
    }
}
