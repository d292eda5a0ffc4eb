//! Reads checkpoints that are complete and of the same model.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fs_err::File;
use rayon::ThreadPool;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata};
use xlaunch_proto::model::ModelShape;

use super::{CheckpointError, MODEL, OPTIMIZER, STATE, State, VERSION, list, manifest};
use crate::model::layout::{Layout, Param, Piece};

/// Largest header that the safetensors format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A loaded checkpoint: whole arenas, with zero gaps and padding.
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are named after the arenas")]
pub struct Arenas {
    pub params: Vec<f32>,
    pub m: Vec<f32>,
    pub v: Vec<f32>,
    pub state: State,
}

/// The newest complete checkpoint in `dir`.
pub fn newest(dir: &Path) -> Option<PathBuf> {
    list(dir).into_iter().find(|path| manifest::verify(path).is_ok())
}

/// Checks that `path` is a complete checkpoint of this model, without loading its tensors.
pub fn check_model(path: &Path, shape: &ModelShape) -> Result<State, CheckpointError> {
    manifest::verify(path)?;
    let read = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let text = fs_err::read(path.join(STATE)).map_err(|error| read(error.to_string()))?;
    let state: State = serde_json::from_slice(&text).map_err(|error| read(format!("{STATE}: {error}")))?;
    if state.version != VERSION {
        return Err(read(format!(
            "it has format version {}, but this build reads version {VERSION}",
            state.version
        )));
    }
    match difference(&state.model, shape) {
        None => Ok(state),
        Some(difference) => Err(CheckpointError::OtherModel { path: path.into(), difference }),
    }
}

/// Loads a checkpoint of this model with these threads.
pub fn load(
    path: &Path,
    shape: &ModelShape,
    layout: &Layout,
    threads: &ThreadPool,
) -> Result<Arenas, CheckpointError> {
    let read = || {
        let [params] = load_arenas(&path.join(MODEL), layout, [""], threads)?;
        let [m, v] = load_arenas(&path.join(OPTIMIZER), layout, ["m.", "v."], threads)?;
        Ok((params, m, v))
    };
    // In parallel, as verifying the hashes takes as long as reading. Its error takes precedence.
    let (state, arenas) = threads.join(|| check_model(path, shape), read);
    let (state, (params, m, v)) = (state?, arenas?);
    Ok(Arenas { params, m, v, state })
}

/// Loads a `model.safetensors` into an arena with these threads.
pub fn load_weights(path: &Path, layout: &Layout, threads: &ThreadPool) -> Result<Vec<f32>, CheckpointError> {
    load_arenas(path, layout, [""], threads).map(|[params]| params)
}

/// Loads one arena for each of these prefixes of tensor names.
fn load_arenas<const N: usize>(
    path: &Path,
    layout: &Layout,
    prefixes: [&str; N],
    threads: &ThreadPool,
) -> Result<[Vec<f32>; N], CheckpointError> {
    let read = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let file = File::open(path).map_err(|error| read(error.to_string()))?;
    let (header, data) = header(&file).map_err(|error| read(error.to_string()))?;
    let mut arenas = [const { Vec::new() }; N];
    for (arena, prefix) in arenas.iter_mut().zip(prefixes) {
        let offsets = tensor_offsets(path, layout, &header, prefix)?;
        *arena = vec![0.0; layout.len];
        let pieces = layout.pieces(arena);
        let fill = |Piece { param, first, values }: Piece<'_>| {
            let begin = data.saturating_add(offsets[param.name.as_str()]);
            let at = begin.saturating_add((first * size_of::<f32>()) as u64);
            file.file().read_exact_at(bytemuck::cast_slice_mut(values), at)?;
            // A no-op on little-endian machines.
            values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
            Ok(())
        };
        let filled = threads.install(|| pieces.into_par_iter().try_for_each(fill));
        filled.map_err(|error: io::Error| read(error.to_string()))?;
    }
    Ok(arenas)
}

/// The header of a safetensors file, and the file offset of its data. See <https://huggingface.co/docs/safetensors>,
/// "Format".
fn header(file: &File) -> io::Result<(Metadata, u64)> {
    let mut length = [0; 8];
    file.file().read_exact_at(&mut length, 0)?;
    let (length, begin) = (u64::from_le_bytes(length), length.len() as u64);
    if length > MAX_HEADER_BYTES.min(file.metadata()?.len().saturating_sub(begin)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the length of its safetensors header is invalid",
        ));
    }
    let mut header = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.file().read_exact_at(&mut header, begin)?;
    Ok((serde_json::from_slice(&header)?, begin + length))
}

/// Offset of each parameter's values, in bytes after the header.
fn tensor_offsets<'a>(
    path: &Path,
    layout: &'a Layout,
    header: &Metadata,
    prefix: &str,
) -> Result<HashMap<&'a str, u64>, CheckpointError> {
    let offset = |param: &'a Param| {
        let name = format!("{prefix}{}", param.name);
        let read =
            |reason: &str| CheckpointError::Read { path: path.into(), reason: format!("{name}: {reason}") };
        let tensor = header.info(&name).ok_or_else(|| read("tensor not found"))?;
        if tensor.dtype != Dtype::F32 || tensor.shape != param.shape {
            let difference = format!(
                "{name} is {:?} {:?}, but the model has F32 {:?}",
                tensor.dtype, tensor.shape, param.shape
            );
            return Err(CheckpointError::OtherModel { path: path.into(), difference });
        }
        let (begin, end) = tensor.data_offsets;
        if end.checked_sub(begin) != Some(param.stored().len() * size_of::<f32>()) {
            return Err(read("its data offsets do not match its shape"));
        }
        Ok((param.name.as_str(), begin as u64))
    };
    layout.params.iter().map(offset).collect()
}

/// Describes the first difference between two shapes.
fn difference(saved: &ModelShape, wanted: &ModelShape) -> Option<String> {
    if saved.arch != wanted.arch {
        return Some(format!(
            "model.arch is {:?} in the checkpoint, {:?} in this job",
            saved.arch, wanted.arch
        ));
    }
    if saved.tied != wanted.tied {
        return Some(format!("model.tied is {} in the checkpoint, {} in this job", saved.tied, wanted.tied));
    }
    let sizes = |shape: &ModelShape| {
        [shape.layers, shape.heads, shape.kv_heads, shape.dim, shape.ffn, shape.seq, shape.vocab]
    };
    let names = ["layers", "heads", "kv_heads", "dim", "ffn", "seq", "vocab"];
    let (saved, wanted) = (sizes(saved), sizes(wanted));
    let index = (0..names.len()).find(|index| saved[*index] != wanted[*index])?;
    Some(format!(
        "model.{} is {} in the checkpoint, {} in this job",
        names[index], saved[index], wanted[index]
    ))
}

#[cfg(test)]
mod tests {
    use rayon::ThreadPoolBuilder;

    use super::super::{MANIFEST, Snapshot, prune, save};
    use super::*;
    use xlaunch_proto::model::{ModelSection, ModelShape};
    use xlaunch_proto::spec::JobSpec;

    fn shape() -> ModelShape {
        let section = ModelSection {
            layers: Some(1),
            dim: Some(16),
            heads: Some(2),
            ffn: Some(24),
            // An embedding of more than two pieces.
            vocab: Some(40_001),
            ..Default::default()
        };
        section.resolve().unwrap()
    }

    fn save_step(dir: &Path, step: u64) -> PathBuf {
        let layout = Layout::new(&shape());
        let mut arena = vec![0.0; layout.len];
        for param in &layout.params {
            let values = arena[param.stored()].iter_mut().enumerate();
            values.for_each(|(i, value)| *value = i as f32 + step as f32);
        }
        let state = State {
            version: VERSION,
            step,
            sequences: 16 * step,
            world_size: 2,
            model: shape(),
            seed: 1,
            spec: JobSpec::default(),
        };
        save(dir, &layout, &Snapshot { params: &arena, m: &arena, v: &arena }, &state).unwrap()
    }

    #[test]
    fn saved_checkpoint_loads_bit_identically() {
        let dir = tempfile::tempdir().unwrap();
        let path = save_step(dir.path(), 7);
        assert_eq!(path.file_name().unwrap(), "step-00000007");
        let layout = Layout::new(&shape());
        let arenas =
            load(&path, &shape(), &layout, &ThreadPoolBuilder::new().num_threads(2).build().unwrap())
                .unwrap();
        assert_eq!((arenas.state.step, arenas.state.sequences), (7, 112));
        let wte = layout.params.iter().find(|param| param.name == "wte.weight").unwrap().stored();
        let expected = (0..wte.len()).map(|i| i as f32 + 7.0);
        assert!(wte.len() > 600_000 && arenas.v[wte].iter().copied().eq(expected));
        let qkv = layout.blocks[0].qkv.weight.start;
        assert_eq!((arenas.params[qkv + 3], arenas.m[qkv], arenas.v[qkv]), (10.0, 7.0, 7.0));
        assert_eq!(save_step(dir.path(), 7), path, "saving a step again replaces its checkpoint");
    }

    #[test]
    fn damaged_safetensors_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, layout) = (save_step(dir.path(), 1).join(MODEL), Layout::new(&shape()));
        let threads = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let good = fs_err::read(&path).unwrap();
        let load = |bytes: &[u8]| {
            fs_err::write(&path, bytes).unwrap();
            load_weights(&path, &layout, &threads).map_err(|error| error.to_string())
        };
        assert!(load(&good).is_ok());
        let length = usize::try_from(u64::from_le_bytes(good[..8].try_into().unwrap())).unwrap();
        for len in [0, 7, 8, 100, 8 + length, good.len() - 1] {
            assert!(load(&good[..len]).is_err(), "{len} bytes");
        }
        for length in [u64::MAX, good.len() as u64, 0, 1] {
            let error = load(&[&length.to_le_bytes()[..], &good[8..]].concat()).unwrap_err();
            assert!(error.contains(MODEL), "{error}");
        }
        let header: serde_json::Value = serde_json::from_slice(&good[8..8 + length]).unwrap();
        let with = |offsets: [u64; 2]| {
            let mut header = header.clone();
            header["wte.weight"]["data_offsets"] = serde_json::json!(offsets);
            let header = serde_json::to_vec(&header).unwrap();
            [&(header.len() as u64).to_le_bytes()[..], &header, &good[8 + length..]].concat()
        };
        let size =
            layout.params.iter().find(|param| param.name == "wte.weight").unwrap().stored().len() as u64 * 4;
        let mut other_type = header.clone();
        other_type["wte.weight"]["dtype"] = "I32".into();
        let other_type = serde_json::to_vec(&other_type).unwrap();
        let bytes = [&(other_type.len() as u64).to_le_bytes()[..], &other_type, &good[8 + length..]].concat();
        assert!(load(&bytes).unwrap_err().contains("but the model has F32"));
        for offsets in [[0, 4], [4, 0], [u64::MAX - size, u64::MAX], [1 << 40, (1 << 40) + size]] {
            assert!(load(&with(offsets)).is_err(), "{offsets:?}");
        }
    }

    #[test]
    fn damaged_checkpoints_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let older = save_step(dir.path(), 1);
        for damage in 0..3 {
            let path = save_step(dir.path(), 2);
            assert_eq!(newest(dir.path()), Some(path.clone()));
            match damage {
                0 => fs_err::remove_file(path.join(MANIFEST)).unwrap(),
                1 => {
                    let mut bytes = fs_err::read(path.join(MODEL)).unwrap();
                    *bytes.last_mut().unwrap() ^= 1;
                    fs_err::write(path.join(MODEL), bytes).unwrap();
                }
                _ => fs_err::write(path.join(OPTIMIZER), "").unwrap(),
            }
            assert_eq!(newest(dir.path()), Some(older.clone()), "damage {damage}");
        }
    }

    #[test]
    fn manifest_that_names_files_elsewhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = save_step(dir.path(), 1);
        let manifest: serde_json::Value =
            serde_json::from_slice(&fs_err::read(path.join(MANIFEST)).unwrap()).unwrap();
        for name in ["../model.safetensors", "..", ".model", "a\\b"] {
            let mut manifest = manifest.clone();
            manifest["files"][0]["name"] = name.into();
            fs_err::write(path.join(MANIFEST), manifest.to_string()).unwrap();
            let error = super::super::manifest::verify(&path).unwrap_err().to_string();
            assert!(error.contains("contains the file name"), "{name}: {error}");
        }
    }

    #[test]
    fn checkpoint_of_another_model_is_refused_with_the_first_difference() {
        let dir = tempfile::tempdir().unwrap();
        let path = save_step(dir.path(), 1);
        let other = ModelShape { ffn: 32, ..shape() };
        let error = check_model(&path, &other).unwrap_err().to_string();
        assert!(error.contains("model.ffn is 24 in the checkpoint, 32 in this job"), "{error}");
    }

    #[test]
    fn newest_is_the_highest_step_even_with_more_digits() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["step-00000007", "step-100000000", "step-99999999", "step-8", "latest"] {
            fs_err::create_dir(dir.path().join(name)).unwrap();
        }
        let names: Vec<_> =
            list(dir.path()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["step-100000000", "step-99999999", "step-00000007"]);
    }

    #[test]
    fn prune_keeps_the_newest_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        for step in [1, 2, 10] {
            save_step(dir.path(), step);
        }
        prune(dir.path(), 2).unwrap();
        let left: Vec<_> = list(dir.path()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(left, ["step-00000010", "step-00000002"]);
        assert_eq!(newest(&dir.path().join("nowhere")), None);
    }
}
