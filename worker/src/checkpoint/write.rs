//! Writes checkpoints: into a hidden directory, synced, with the manifest last, and then renamed.

use std::borrow::Cow;
use std::io::Write;
use std::path::{Path, PathBuf};

use fs_err::File;
use safetensors::tensor::{Dtype, View};

use super::manifest::{Entry, Manifest};
use super::{CheckpointError, MANIFEST, MODEL, OPTIMIZER, STATE, State, VERSION, list, name};
use crate::model::layout::{Layout, Param};

/// Host copies of the arenas that a checkpoint contains.
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are named after the arenas")]
pub struct Snapshot<'a> {
    pub params: &'a [f32],
    pub m: &'a [f32],
    pub v: &'a [f32],
}

/// Saves a checkpoint of `state.step` to `dir` and returns its path. An existing one of the same step is replaced.
pub fn save(
    dir: &Path,
    layout: &Layout,
    arenas: &Snapshot<'_>,
    state: &State,
) -> Result<PathBuf, CheckpointError> {
    let path = dir.join(name(state.step));
    write(dir, &path, layout, arenas, state)
        .map_err(|error| CheckpointError::Write { path: path.clone(), reason: error.to_string() })?;
    Ok(path)
}

fn write(
    dir: &Path,
    path: &Path,
    layout: &Layout,
    arenas: &Snapshot<'_>,
    state: &State,
) -> std::io::Result<()> {
    let temporary = dir.join(format!(".tmp-{}", name(state.step)));
    if temporary.exists() {
        fs_err::remove_dir_all(&temporary)?;
    }
    fs_err::create_dir_all(&temporary)?;

    let model = tensors(layout, "", arenas.params);
    safetensors::serialize_to_file(model, None, &temporary.join(MODEL)).map_err(std::io::Error::other)?;
    let moments = tensors(layout, "m.", arenas.m).chain(tensors(layout, "v.", arenas.v));
    safetensors::serialize_to_file(moments, None, &temporary.join(OPTIMIZER))
        .map_err(std::io::Error::other)?;
    fs_err::write(temporary.join(STATE), serde_json::to_vec_pretty(state)?)?;

    let mut files = Vec::new();
    for file in [MODEL, OPTIMIZER, STATE] {
        File::open(temporary.join(file))?.sync_all()?;
        files.push(Entry::of(&temporary, file)?);
    }
    let manifest = Manifest { version: VERSION, files };
    let mut file = File::create(temporary.join(MANIFEST))?;
    file.write_all(&serde_json::to_vec_pretty(&manifest)?)?;
    file.sync_all()?;
    File::open(&temporary)?.sync_all()?;

    if path.exists() {
        // Rename cannot replace a directory that is not empty, so the old checkpoint is moved out of the way first.
        let old = dir.join(format!(".old-{}", name(state.step)));
        if old.exists() {
            fs_err::remove_dir_all(&old)?;
        }
        fs_err::rename(path, &old)?;
        fs_err::rename(&temporary, path)?;
        fs_err::remove_dir_all(&old)?;
    } else {
        fs_err::rename(&temporary, path)?;
    }
    File::open(dir)?.sync_all()
}

/// Removes all but the `keep` newest checkpoints of `dir`; 0 keeps all.
pub fn prune(dir: &Path, keep: usize) -> Result<(), CheckpointError> {
    if keep == 0 {
        return Ok(());
    }
    for path in list(dir).into_iter().skip(keep) {
        fs_err::remove_dir_all(&path)
            .map_err(|error| CheckpointError::Write { path: path.clone(), reason: error.to_string() })?;
    }
    Ok(())
}

fn tensors<'a>(
    layout: &'a Layout,
    prefix: &'a str,
    arena: &'a [f32],
) -> impl Iterator<Item = (String, F32View<'a>)> {
    layout.params.iter().map(move |param| {
        (format!("{prefix}{}", param.name), F32View { param, values: &arena[param.stored()] })
    })
}

/// One parameter's part of an arena, as a safetensors view.
struct F32View<'a> {
    param: &'a Param,
    values: &'a [f32],
}

impl View for F32View<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.param.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The format is little-endian, as are all supported platforms.
        Cow::Borrowed(bytemuck::cast_slice(self.values))
    }

    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}
