//! Selects the variant of an operation: the fastest by timing, found once per host.
//!
//! All variants of an operation write the same outputs and do not read them, so they can be timed in any order, on the
//! operation's own operands, when a shape is first seen. The choice is kept on disk. If no choice is possible, the
//! first variant runs, which supports everything.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

use super::{Gpu, Source};
use crate::error::Result;

/// Everything that a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site<S> {
    pub(crate) operation: &'static str,
    pub(crate) shape: S,
    /// Number of variants to choose from.
    pub(crate) variants: usize,
}

/// One of several ways to compute an operation.
pub(crate) trait Variant: Copy {
    fn name(self) -> &'static str;
}

/// Indices of the fastest variants found so far.
#[derive(Debug)]
pub(crate) struct Fastest<S> {
    found: RefCell<HashMap<Site<S>, usize>>,
    /// The variant that a test forces at all sites that support it.
    forced: Cell<Option<usize>>,
}

impl<S> Default for Fastest<S> {
    fn default() -> Self {
        Self { found: RefCell::default(), forced: Cell::default() }
    }
}

impl<S: Copy + Debug + Eq + Hash> Fastest<S> {
    /// Returns the variant to run, and logs it. `unsupported` is the reason why only the first one can run, if so;
    /// `sources` are our own kernels, since the choice depends on how fast they are. `run` may be called any number of
    /// times.
    pub(crate) fn select<V: Variant>(
        &self,
        gpu: &Gpu,
        site: Site<S>,
        unsupported: Option<&str>,
        sources: &[Source],
        variants: &[V],
        run: impl Fn(V) -> Result<()>,
    ) -> Result<V> {
        if let Some(variant) = self.forced.get().filter(|_| unsupported.is_none()) {
            return Ok(variants[variant]);
        }
        let no_choice = unsupported.or(gpu.deterministic.then_some("the run is deterministic"));
        let found = match no_choice {
            Some(_) => None,
            None => self.find(gpu, site, sources, variants, run)?,
        };
        let not_faster = if found.is_some() { "it is slower" } else { "it was first seen during a capture" };
        let selected = variants[found.unwrap_or(0)];
        let faster = (found.unwrap_or(0) == 0).then(|| (variants[1].name(), no_choice.unwrap_or(not_faster)));
        gpu.variants.selected(site.operation, site.shape, selected.name(), faster);
        Ok(selected)
    }

    /// Selects this variant from now on for all sites that it supports, even in deterministic runs; `None` restores the
    /// choice of the fastest.
    pub(crate) fn force(&self, variant: Option<usize>) {
        self.forced.set(variant);
    }

    /// Selects this variant for a site from now on.
    pub(crate) fn set(&self, site: Site<S>, variant: usize) {
        self.found.borrow_mut().insert(site, variant);
    }

    /// Returns the index of the fastest variant; `None` if it is not known yet and nothing can be timed now.
    fn find<V: Variant>(
        &self,
        gpu: &Gpu,
        site: Site<S>,
        sources: &[Source],
        variants: &[V],
        run: impl Fn(V) -> Result<()>,
    ) -> Result<Option<usize>> {
        if let Some(variant) = self.found.borrow().get(&site) {
            return Ok(Some(*variant));
        }
        let sources: String = sources.iter().map(|source| source.text).collect();
        let name = format!("{site:?} {sources}");
        let found = gpu.gemm.fastest_variant(&name, variants.len(), |index| run(variants[index]))?;
        if let Some(variant) = found {
            self.set(site, variant);
        }
        Ok(found)
    }
}
