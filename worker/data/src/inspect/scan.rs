//! Counts the ids and documents of consecutive token files, and takes samples.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::side::{MaskReader, StartsReader};
use super::{Lengths, Part, READ_BYTES, Run};
use crate::shard::Layout;
use crate::{PrepareError, Tokenizer};

/// Number of ids in a sample.
const SAMPLE_TOKENS: usize = 64;
/// Number of ids in a sample of a chat.
const CHAT_SAMPLE_TOKENS: usize = 512;

/// Places where documents start.
pub(super) enum Documents {
    Unknown,
    /// A document starts at each end-of-text id.
    AfterEndOfText(u32),
    /// Documents start at listed positions.
    At(Box<StartsReader>),
}

impl Documents {
    /// Documents of text encoded with this tokenizer.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        tokenizer.end_of_text().map_or(Self::Unknown, Self::AfterEndOfText)
    }

    /// Returns no places if the condition holds.
    pub(super) fn unless(self, unknown: bool) -> Self {
        if unknown { Self::Unknown } else { self }
    }

    fn are_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Counts the ids of consecutive files.
pub(super) struct Scan<'a> {
    tokenizer: Option<&'a Tokenizer>,
    places: Documents,
    /// Numbers of the documents to show. If their places are unknown, the first ids are shown.
    sample_at: [u64; 2],
    tokens: u64,
    highest: Option<u32>,
    supervised: Option<u64>,
    documents: u64,
    length: u64,
    /// Number of documents by length. There are far fewer lengths than documents.
    lengths: BTreeMap<u64, u64>,
    /// Ids, and whether their loss counts.
    samples: Vec<Vec<(u32, bool)>>,
    /// True if the current ids belong to the last sample.
    sampling: bool,
}

impl<'a> Scan<'a> {
    pub(super) fn new(tokenizer: Option<&'a Tokenizer>, places: Documents, documents: Option<u64>) -> Self {
        Self {
            tokenizer,
            sample_at: [0, documents.unwrap_or(0) / 2],
            tokens: 0,
            highest: None,
            supervised: None,
            documents: 0,
            length: 0,
            lengths: BTreeMap::new(),
            samples: Vec::new(),
            sampling: !places.are_known(),
            places,
        }
    }

    /// Takes the first two documents as samples.
    pub(super) fn sample_pair(&mut self) {
        self.sample_at = [0, 1];
    }

    pub(super) fn highest(&self) -> Option<u32> {
        self.highest
    }

    pub(super) fn add_supervised(&mut self, count: u64) {
        *self.supervised.get_or_insert(0) += count;
    }

    /// Counts the ids of a file and returns the file's hash.
    pub(super) fn file(
        &mut self,
        path: &Path,
        mut file: File,
        layout: Layout,
        mut mask: Option<&mut MaskReader>,
    ) -> Result<String, PrepareError> {
        let (mut hash, mut buffer) = (Xxh3::new(), Vec::with_capacity(READ_BYTES));
        let mut skip = usize::try_from(layout.header).unwrap_or(usize::MAX);
        loop {
            buffer.clear();
            let read = Read::by_ref(&mut file).take(READ_BYTES as u64).read_to_end(&mut buffer);
            if read.map_err(|error| PrepareError::read(path.display(), &error))? == 0 {
                return Ok(format!("{:032x}", hash.digest128()));
            }
            hash.update(&buffer);
            let ids = buffer.get(skip..).unwrap_or_default();
            skip = 0;
            for id in ids.chunks_exact(layout.width) {
                let id = id.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
                let counts = mask.as_mut().map_or(Ok(false), |mask| mask.next())?;
                self.id(id, counts)?;
            }
        }
    }

    fn id(&mut self, id: u32, counts: bool) -> Result<(), PrepareError> {
        self.highest = self.highest.max(Some(id));
        let (starts_document, is_mark) = match &mut self.places {
            Documents::Unknown => (false, false),
            Documents::AfterEndOfText(end) => (*end == id, *end == id),
            Documents::At(starts) => (starts.next_is(self.tokens)?, false),
        };
        if starts_document {
            self.end_document();
            self.sampling = self.sample_at.contains(&self.documents);
            self.documents += 1;
        }
        self.length += u64::from(!is_mark);
        let starts_sample =
            if self.places.are_known() { starts_document && self.sampling } else { self.tokens == 0 };
        if starts_sample {
            self.samples.push(Vec::new());
        }
        let limit = if matches!(self.places, Documents::At(_)) { CHAT_SAMPLE_TOKENS } else { SAMPLE_TOKENS };
        let sample = self.samples.last_mut().filter(|sample| sample.len() < limit);
        if let Some(sample) = sample.filter(|_| self.sampling && !is_mark) {
            sample.push((id, counts));
        }
        self.tokens += 1;
        Ok(())
    }

    fn end_document(&mut self) {
        if self.documents > 0 {
            *self.lengths.entry(self.length).or_insert(0) += 1;
        }
        self.length = 0;
    }

    pub(super) fn part(mut self, name: &str, shards: usize) -> Result<Part, PrepareError> {
        self.end_document();
        let (known, masked) = (self.places.are_known(), self.supervised.is_some());
        if let Documents::At(starts) = self.places {
            starts.finish()?;
        }
        let decode = |ids: &[u32]| self.tokenizer.map(|tokenizer| tokenizer.decode(ids)).unwrap_or_default();
        let run = |run: &[(u32, bool)]| Run {
            supervised: run[0].1,
            text: decode(&run.iter().map(|(id, _)| *id).collect::<Vec<_>>()),
        };
        let text = |sample: &Vec<(u32, bool)>| decode(&sample.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        let runs =
            |sample: &Vec<(u32, bool)>| sample.chunk_by(|one, other| one.1 == other.1).map(run).collect();
        Ok(Part {
            name: name.into(),
            shards,
            tokens: self.tokens,
            documents: known.then_some(self.documents),
            lengths: quantiles(&self.lengths).filter(|_| known),
            samples: if masked { Vec::new() } else { self.samples.iter().map(text).collect() },
            chats: if masked { self.samples.iter().map(runs).collect() } else { Vec::new() },
            supervised: self.supervised,
            bytes: None,
            verified: None,
        })
    }
}

fn quantiles(lengths: &BTreeMap<u64, u64>) -> Option<Lengths> {
    let count: u64 = lengths.values().sum();
    // The smallest length that at least this share of the documents does not exceed.
    let at = |share: u64| {
        let rank = (count * share).div_ceil(100).max(1);
        let mut below = 0;
        lengths.iter().find_map(|(length, count)| {
            below += count;
            (below >= rank).then_some(*length)
        })
    };
    Some(Lengths { min: at(0)?, median: at(50)?, p99: at(99)?, max: at(100)? })
}
