//! Reading: only complete checkpoints, only of the same model.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use xlaunch_proto::model::ModelShape;

use super::{CheckpointError, MODEL, OPTIMIZER, STATE, State, VERSION, list, manifest};
use crate::model::layout::Layout;

/// What a checkpoint gives back: whole arenas, gaps and padding zero.
#[derive(Debug)]
#[expect(missing_docs, reason = "named after the arenas")]
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

/// Checks that `path` is a complete checkpoint of this model; reads no tensors.
pub fn check_model(path: &Path, shape: &ModelShape) -> Result<State, CheckpointError> {
    manifest::verify(path)?;
    let read = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let text = fs_err::read(path.join(STATE)).map_err(|error| read(error.to_string()))?;
    let state: State = serde_json::from_slice(&text).map_err(|error| read(format!("{STATE}: {error}")))?;
    if state.version != VERSION {
        return Err(read(format!("version {}, this build reads {VERSION}", state.version)));
    }
    match difference(&state.model, shape) {
        None => Ok(state),
        Some(difference) => Err(CheckpointError::OtherModel { path: path.into(), difference }),
    }
}

/// Reads a checkpoint of this model.
pub fn load(path: &Path, shape: &ModelShape, layout: &Layout) -> Result<Arenas, CheckpointError> {
    let state = check_model(path, shape)?;
    let model = path.join(MODEL);
    let optimizer = path.join(OPTIMIZER);
    Ok(Arenas {
        params: load_arena(&model, layout, "")?,
        m: load_arena(&optimizer, layout, "m.")?,
        v: load_arena(&optimizer, layout, "v.")?,
        state,
    })
}

/// Reads the weights of `path`, a `model.safetensors`, into an arena.
pub fn load_weights(path: &Path, layout: &Layout) -> Result<Vec<f32>, CheckpointError> {
    load_arena(path, layout, "")
}

fn load_arena(path: &Path, layout: &Layout, prefix: &str) -> Result<Vec<f32>, CheckpointError> {
    let read = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let bytes = fs_err::read(path).map_err(|error| read(error.to_string()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| read(error.to_string()))?;
    let mut arena = vec![0.0; layout.len];
    for param in &layout.params {
        let name = format!("{prefix}{}", param.name);
        let tensor = file.tensor(&name).map_err(|error| read(format!("{name}: {error}")))?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != param.shape {
            let difference = format!(
                "{name} is {:?} {:?}, the model has F32 {:?}",
                tensor.dtype(),
                tensor.shape(),
                param.shape
            );
            return Err(CheckpointError::OtherModel { path: path.into(), difference });
        }
        let (values, target) = (tensor.data().chunks_exact(4), &mut arena[param.stored()]);
        for (value, bytes) in target.iter_mut().zip(values) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
    Ok(arena)
}

/// The first size that differs, in words.
fn difference(saved: &ModelShape, wanted: &ModelShape) -> Option<String> {
    if saved.arch != wanted.arch {
        return Some(format!("model.arch is {:?} there, {:?} here", saved.arch, wanted.arch));
    }
    if saved.tied != wanted.tied {
        return Some(format!("model.tied is {} there, {} here", saved.tied, wanted.tied));
    }
    let sizes = |shape: &ModelShape| {
        [shape.layers, shape.heads, shape.kv_heads, shape.dim, shape.ffn, shape.seq, shape.vocab]
    };
    let names = ["layers", "heads", "kv_heads", "dim", "ffn", "seq", "vocab"];
    let (saved, wanted) = (sizes(saved), sizes(wanted));
    let index = (0..names.len()).find(|index| saved[*index] != wanted[*index])?;
    Some(format!("model.{} is {} there, {} here", names[index], saved[index], wanted[index]))
}

#[cfg(test)]
mod tests {
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
    fn what_was_saved_is_read_back_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = save_step(dir.path(), 7);
        assert_eq!(path.file_name().unwrap(), "step-00000007");
        let layout = Layout::new(&shape());
        let arenas = load(&path, &shape(), &layout).unwrap();
        assert_eq!((arenas.state.step, arenas.state.sequences), (7, 112));
        let qkv = layout.blocks[0].qkv.weight.start;
        assert_eq!((arenas.params[qkv + 3], arenas.m[qkv], arenas.v[qkv]), (10.0, 7.0, 7.0));
        assert_eq!(save_step(dir.path(), 7), path, "the same step again replaces it");
    }

    #[test]
    fn damage_makes_a_checkpoint_invisible() {
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
    fn another_model_is_refused_with_the_first_difference() {
        let dir = tempfile::tempdir().unwrap();
        let path = save_step(dir.path(), 1);
        let other = ModelShape { ffn: 32, ..shape() };
        let error = check_model(&path, &other).unwrap_err().to_string();
        assert!(error.contains("model.ffn is 24 there, 32 here"), "{error}");
    }

    #[test]
    fn prune_keeps_the_newest() {
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
