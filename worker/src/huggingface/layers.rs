//! Keys of `config.json` that say which blocks have a window, and which have no rotation. Pure.

use std::iter::once;

use serde_json::{Map, Value, json};
use xlaunch_spec::model::ModelShape;

use super::ModelError;
use super::keys::Keys;
use super::rope::{FULL, SLIDING};

/// Windows of a family.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windows {
    /// No block has a window.
    None,
    /// All blocks have the window of `sliding_window`, by default this one.
    All(Option<usize>),
    /// Windows only with `use_sliding_window`: in blocks from `max_window_layers` on, by default 28, or by
    /// `layer_types`.
    Switched(usize),
    /// Same, with blocks without rotation instead of `max_window_layers`.
    Unrotated,
    /// All blocks have this window by default, except those whose number is a multiple of the second; or `layer_types`
    /// says which.
    Pattern(usize, usize),
    /// Same, and if there is a window, blocks without it have no rotation either.
    Rotated(usize, usize),
    /// All blocks have this window by default, or those that `layer_types` names.
    Listed(usize),
}

const WINDOW: &str = "sliding_window";
const SWITCH: &str = "use_sliding_window";
const FIRST: &str = "max_window_layers";
const TYPES: &str = "layer_types";
const PATTERN: &str = "sliding_window_pattern";

impl Windows {
    /// Returns whether a key is one of windows.
    pub(super) fn has(self, key: &str) -> bool {
        let keys: &[&str] = match self {
            Self::None => &[TYPES],
            Self::All(_) => &[WINDOW],
            // Models without such a key have it all the same.
            Self::Switched(_) | Self::Unrotated => &[WINDOW, SWITCH, FIRST, TYPES],
            Self::Pattern(..) | Self::Rotated(..) => &[WINDOW, TYPES, PATTERN],
            Self::Listed(_) => &[WINDOW, TYPES],
        };
        keys.contains(&key)
    }

    /// Reads all keys. The number of blocks, and which are rotated, must have been read before.
    pub(super) fn read(self, keys: &Keys<'_>, shape: &mut ModelShape) -> Result<(), ModelError> {
        let (window, by_default, pattern) = match self {
            Self::None => match types(keys, shape.layers)? {
                Some(full) if full.contains(&false) => {
                    return Err(keys.refused(TYPES, "models of this type have no windows"));
                }
                _ => return Ok(()),
            },
            Self::All(default) => {
                shape.window = window(keys, default)?.unwrap_or(0);
                return Ok(());
            }
            Self::Switched(default) => {
                let window = if keys.flag(SWITCH, false)? { window(keys, Some(default))? } else { None };
                let first = keys.size(FIRST, 28)?;
                let full = (0..shape.layers).map(|block| window.is_none() || block < first);
                (window, (full.collect(), FIRST), shape.window_pattern)
            }
            Self::Unrotated => {
                let window = if keys.flag(SWITCH, false)? { window(keys, None)? } else { None };
                let full = (0..shape.layers).map(|block| window.is_none() || shape.is_rotated(block));
                (window, (full.collect(), SWITCH), shape.window_pattern)
            }
            Self::Pattern(default, pattern) => {
                let pattern = keys.size(PATTERN, pattern)?;
                let full = (0..shape.layers).map(|block| is_multiple(block, pattern));
                (window(keys, Some(default))?, (full.collect::<Vec<_>>(), PATTERN), pattern)
            }
            Self::Rotated(default, pattern) => {
                let window = window(keys, Some(default))?;
                // Published files describe the pattern by letters, which only `layer_types` make numbers.
                let has_types = !keys.is_unset(TYPES);
                let pattern = if has_types { pattern } else { keys.size(PATTERN, pattern)? };
                let full = (0..shape.layers).map(|block| window.is_none() || is_multiple(block, pattern));
                (window, (full.collect::<Vec<_>>(), PATTERN), pattern)
            }
            Self::Listed(default) => {
                let window = window(keys, Some(default))?;
                (window, (vec![window.is_none(); shape.layers], TYPES), shape.window_pattern)
            }
        };
        let (full, key) = match types(keys, shape.layers)? {
            Some(full) => (full, TYPES),
            None => by_default,
        };
        if let Self::Rotated(..) = self {
            shape.no_rope_every = window.and_then(|_| distance(&full, pattern)).unwrap_or(0);
        }
        (shape.window, shape.window_pattern) = (0, 0);
        let Some(first) = full.iter().position(|full| !full) else { return Ok(()) };
        let Some(window) = window else {
            return Err(keys.error(key, format!("block {first} has a window, but {WINDOW} sets none")));
        };
        let Some(pattern) = distance(&full, pattern) else {
            let reason = "blocks without a window must be those whose number is a multiple of one number";
            return Err(keys.refused(key, reason));
        };
        (shape.window, shape.window_pattern) = (window, pattern);
        Ok(())
    }

    /// Writes all keys.
    pub(super) fn write(self, shape: &ModelShape, config: &mut Map<String, Value>) {
        let window = Some(shape.window).filter(|window| *window != 0);
        let kinds = (0..shape.layers).map(|block| shape.window(block).map_or(FULL, |_| SLIDING));
        let kinds: Vec<&str> = kinds.collect();
        let first = if window.is_some() && shape.window_pattern == 0 { 0 } else { shape.layers };
        let pattern = match (window, shape.window_pattern) {
            (None, _) => 1,
            (Some(_), 0) => shape.layers + 1,
            (Some(_), pattern) => pattern,
        };
        let values = match self {
            Self::None => vec![],
            Self::All(_) => vec![(WINDOW, json!(window))],
            Self::Switched(_) | Self::Unrotated => vec![
                (WINDOW, json!(window)),
                (SWITCH, json!(window.is_some())),
                (FIRST, json!(first)),
                (TYPES, json!(kinds)),
            ],
            // The library's class needs a window even if no block has one.
            Self::Pattern(default, _) => vec![
                (WINDOW, json!(window.unwrap_or(default))),
                (PATTERN, json!(pattern)),
                (TYPES, json!(kinds)),
            ],
            Self::Rotated(default, _) => {
                // A window that no block has ends the rotation of all.
                let unused = (shape.no_rope_every == 1).then_some(default);
                vec![(WINDOW, json!(window.or(unused))), (PATTERN, json!(pattern)), (TYPES, json!(kinds))]
            }
            Self::Listed(_) => vec![(WINDOW, json!(window)), (TYPES, json!(kinds))],
        };
        config.extend(values.into_iter().map(|(key, value)| (key.to_owned(), value)));
    }
}

/// Reads the window; `null` is not the same as no key.
fn window(keys: &Keys<'_>, default: Option<usize>) -> Result<Option<usize>, ModelError> {
    match keys.values.get(WINDOW) {
        None => Ok(default),
        Some(Value::Null) => Ok(None),
        Some(_) => match keys.size(WINDOW, 0)? {
            0 => Err(keys.refused(WINDOW, "it must be at least 1, or null")),
            window => Ok(Some(window)),
        },
    }
}

/// Reads which blocks attend to all positions.
fn types(keys: &Keys<'_>, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(kinds) = keys.list(TYPES)? else { return Ok(None) };
    if kinds.len() != layers {
        return Err(keys.error(TYPES, format!("{} kinds for {layers} blocks", kinds.len())));
    }
    let is_full = |kind: &Value| match kind.as_str() {
        Some(FULL) => Ok(true),
        Some(SLIDING) => Ok(false),
        _ => Err(keys.refused(TYPES, &format!("only {FULL} and {SLIDING} are"))),
    };
    kinds.iter().map(is_full).collect::<Result<_, _>>().map(Some)
}

/// Names of the keys of blocks without rotation.
const NO_ROPE: &str = "no_rope_layers";
const INTERVAL: &str = "no_rope_layer_interval";

/// Returns whether a key is one of blocks without rotation.
pub(super) fn is_rotation(key: &str) -> bool {
    [NO_ROPE, INTERVAL].contains(&key)
}

/// Reads which blocks have no rotation.
pub(super) fn read_rotation(keys: &Keys<'_>, shape: &mut ModelShape) -> Result<(), ModelError> {
    let every = keys.size(INTERVAL, 4)?;
    if every == 0 {
        return Err(keys.refused(INTERVAL, "it must be at least 1"));
    }
    let Some(list) = keys.list(NO_ROPE)? else {
        shape.no_rope_every = every;
        return Ok(());
    };
    // 1 stands for rotation.
    let still: Vec<bool> =
        list.iter().map(|flag| flag.as_u64() == Some(0) || flag.as_bool() == Some(false)).collect();
    match distance(&still, every).filter(|_| still.len() == shape.layers) {
        Some(every) => shape.no_rope_every = every,
        None => {
            let reason = "blocks without rotation must be those whose number is a multiple of one number";
            return Err(keys.refused(NO_ROPE, reason));
        }
    }
    Ok(())
}

/// Writes which blocks have no rotation.
pub(super) fn write_rotation(shape: &ModelShape, config: &mut Map<String, Value>) {
    let rotated = (0..shape.layers).map(|block| u8::from(shape.is_rotated(block)));
    let every = if shape.no_rope_every == 0 { shape.layers + 1 } else { shape.no_rope_every };
    config.insert(NO_ROPE.into(), json!(rotated.collect::<Vec<_>>()));
    config.insert(INTERVAL.into(), json!(every));
}

/// Returns the number whose multiples, counted from 1, are the marked blocks; 0 if none is. The preferred number is
/// returned if it is such a number.
fn distance(marked: &[bool], preferred: usize) -> Option<usize> {
    let first = marked.iter().position(|marked| *marked).map_or(0, |block| block + 1);
    let fits = |every: &usize| {
        marked.iter().enumerate().all(|(block, marked)| *marked == is_multiple(block, *every))
    };
    once(preferred).chain([first]).find(fits)
}

/// Returns whether the number of a block, counted from 1, is a multiple; never of 0.
fn is_multiple(block: usize, every: usize) -> bool {
    every != 0 && (block + 1).is_multiple_of(every)
}
