//! Families of Hugging Face's models: one table per family of the keys of `config.json`. Defaults are those of the
//! `transformers` library.
//!
//! A family's [`base`](xlaunch_spec::model::Arch::base) has what none of its keys can change.

mod dense;
mod mixtures;
mod shared;

use serde_json::{Map, Value};
use xlaunch_spec::model::Arch;

use super::key::Key;
use super::layers::Windows;
use super::rope::Rope;
use super::tensor_names::Names;
use dense::DENSE;
use mixtures::MIXTURES;

/// A family of models.
#[derive(Debug)]
pub(crate) struct Family {
    pub(super) arch: Arch,
    /// Value of `model_type`.
    pub(crate) model_type: &'static str,
    /// Name for people.
    pub(super) title: &'static str,
    /// The library's class.
    pub(super) class: &'static str,
    /// Keys in the order in which they are read.
    pub(super) keys: &'static [&'static [Key]],
    pub(super) windows: Windows,
    /// Rotary embedding; `None` for learned positions.
    pub(super) rope: Option<Rope>,
    /// Some blocks have no rotation.
    pub(super) still_blocks: bool,
    /// Keys without effect on results, in addition to [`WITHOUT_EFFECT`](super::without_effect::WITHOUT_EFFECT).
    pub(super) without_effect: &'static [&'static str],
    /// The library's class refuses a width that is not a multiple of the number of heads.
    pub(super) divided: bool,
    pub(crate) names: &'static Names,
}

impl Family {
    /// Returns the tables of all families.
    pub(super) fn all() -> impl Iterator<Item = &'static Self> {
        DENSE.iter().chain(&MIXTURES)
    }

    /// Returns the table of a family.
    pub(crate) fn of(arch: Arch) -> &'static Self {
        Self::all().find(|family| family.arch == arch).unwrap_or(&DENSE[0])
    }

    /// Returns the table of the type that a `config.json` names.
    pub(super) fn named(config: &Map<String, Value>) -> Option<&'static Self> {
        let model_type = config.get("model_type")?.as_str()?;
        Self::all().find(|family| family.model_type == model_type)
    }

    /// Returns all keys with a meaning of their own.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static Key> {
        self.keys.iter().copied().flatten()
    }
}
