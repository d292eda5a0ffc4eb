//! The rows of a split: those of one source, or of several that take turns.
//!
//! Each row comes from one source. Row k of a mixture is row j of the source whose turn it is, where j is the number of
//! earlier rows of that source ([`Turns`]): a pure function of k, like the rows of each source. A source whose rows are
//! used up starts over in another order, as a single source does in its next epoch.

use std::sync::Arc;

use xlaunch_spec::lineage::Fingerprint;
use xxhash_rust::xxh3::Xxh3;

use super::batch::Batch;
use super::turns::{PERIOD, Turns};
use super::{DataError, RowPlan, Tokens, fingerprint};

/// Tokens, and their rows.
#[derive(Clone, Debug)]
pub struct Source {
    /// Name for users: the last component of its path, if that is unique.
    pub name: String,
    /// The tokens.
    pub tokens: Tokens,
    /// The rows.
    pub plan: RowPlan,
}

/// One or several sources.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Arc<[Source]>,
    /// `None` for a single source.
    turns: Option<Arc<Turns>>,
}

/// Use of a source of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceUse {
    /// Name of the source.
    pub name: String,
    /// Share of the rows, from 0 to 1.
    pub share: f64,
    /// Rows used so far.
    pub used: u64,
    /// Rows per epoch of the source.
    pub rows: u64,
}

impl SourceUse {
    /// Returns the number of passes over the source.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn epochs(&self) -> f64 {
        self.used as f64 / self.rows as f64
    }
}

/// Returns the fingerprint of a single source, or one of several with their shares.
pub(super) fn fingerprint_of<'a>(
    sources: impl Iterator<Item = (&'a Source, f64)>,
) -> Result<Fingerprint, DataError> {
    let found = sources.map(|(source, share)| Ok((fingerprint(&source.tokens)?, share)));
    let mut found: Vec<(Fingerprint, f64)> = found.collect::<Result<_, DataError>>()?;
    if found.len() == 1 {
        return Ok(found.remove(0).0);
    }
    let mut hash = Xxh3::new();
    for (Fingerprint { tokens, hash: own }, share) in &found {
        hash.update(format!("{share} {tokens} {own}\n").as_bytes());
    }
    let tokens = found.iter().map(|(found, _)| found.tokens).sum();
    Ok(Fingerprint { tokens, hash: format!("{:032x}", hash.digest128()) })
}

impl<P: Into<RowPlan>> From<(Tokens, P)> for Mixture {
    fn from((tokens, plan): (Tokens, P)) -> Self {
        let source = Source { name: String::new(), tokens, plan: plan.into() };
        Self { sources: Arc::new([source]), turns: None }
    }
}

impl Mixture {
    /// Mixes sources in the ratio of their positive weights.
    pub(super) fn new(sources: Vec<Source>, weights: &[f64]) -> Self {
        let turns = (sources.len() > 1).then(|| Arc::new(Turns::new(weights)));
        Self { sources: sources.into(), turns }
    }

    /// Returns the sources.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Returns the number of rows of an epoch: those of all sources.
    pub fn rows(&self) -> u64 {
        self.sources.iter().map(|source| source.plan.rows()).sum()
    }

    /// Returns the share of each source; 1 for a single one.
    pub fn shares(&self) -> Vec<f64> {
        let share = |part: &u32| f64::from(*part) / f64::from(PERIOD);
        self.turns.as_ref().map_or_else(|| vec![1.0], |turns| turns.parts().iter().map(share).collect())
    }

    /// Returns how much of each source of a mixture has been used after `rows` rows; nothing for a single source.
    pub fn usage(&self, rows: u64) -> Vec<SourceUse> {
        let Some(turns) = &self.turns else { return Vec::new() };
        let counts = turns.counts(rows);
        let of = |((source, share), used): ((&Source, f64), u64)| SourceUse {
            name: source.name.clone(),
            share,
            used,
            rows: source.plan.rows(),
        };
        self.sources.iter().zip(self.shares()).zip(counts).map(of).collect()
    }

    /// Describes the data, to detect that it has changed. A mixture has other data if its shares differ.
    pub fn fingerprint(&self) -> Result<Fingerprint, DataError> {
        fingerprint_of(self.sources.iter().zip(self.shares()))
    }

    /// Appends row `k` of `seq` tokens to `batch`.
    pub(super) fn read(&self, seq: usize, k: u64, batch: &mut Batch) -> Result<(), DataError> {
        let (source, k) = self.locate(k);
        source.plan.read(&source.tokens, seq, k, batch)
    }

    /// Returns the number of targets of row `k` that count, or its number of pairs of answers.
    pub(crate) fn targets(&self, seq: usize, k: u64) -> Result<u64, DataError> {
        let (source, k) = self.locate(k);
        source.plan.targets(&source.tokens, seq, k)
    }

    fn locate(&self, k: u64) -> (&Source, u64) {
        let (source, k) = self.turns.as_ref().map_or((0, k), |turns| turns.of(k));
        (&self.sources[source], k)
    }
}
