//! Tests of reading earlier versions, and of files that are refused.

use xlaunch_spec::job::{JobSpec, Optimizer};
use xlaunch_spec::model::Arch;

use super::*;

#[test]
fn version_1_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name(3));
    fs_err::create_dir(&path).unwrap();
    let layout = Layout::new(&shape());
    let tensors = |arenas: &[(&str, Arena)]| {
        let mut data = Vec::new();
        for (prefix, arena) in arenas {
            for param in &layout.params {
                let bytes: Vec<u8> =
                    param.stored().flat_map(|at| value(*arena, at, 3).to_le_bytes()).collect();
                data.push((format!("{prefix}{}", param.name), param.shape.clone(), bytes));
            }
        }
        let view = |(name, shape, bytes): &(String, Vec<usize>, Vec<u8>)| {
            let dtype = safetensors::Dtype::F32;
            let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes.leak_copy()).unwrap();
            (name.clone(), view)
        };
        safetensors::serialize(data.iter().map(view), None).unwrap()
    };
    let mut old = serde_json::to_value(state("", 3)).unwrap();
    old["version"] = 1.into();
    let files = [
        (MODEL.to_owned(), tensors(&[("", Arena::Params)])),
        (optimizer_name(0, 1), tensors(&[("m.", Arena::M), ("v.", Arena::V)])),
        (STATE.to_owned(), serde_json::to_vec(&old).unwrap()),
    ];
    let mut entries = Vec::new();
    for (name, bytes) in &files {
        fs_err::write(path.join(name), bytes).unwrap();
        let hash = manifest::Chunk::of(0, bytes).xxh3_128;
        entries.push(serde_json::json!({"name": name, "bytes": bytes.len(), "xxh3_128": hash}));
    }
    let manifest = serde_json::json!({"version": 1, "files": entries});
    fs_err::write(path.join(MANIFEST), manifest.to_string()).unwrap();
    assert_complete(&path, 3);
    assert_eq!(newest(dir.path()), Some(path));
}

trait LeakCopy {
    fn leak_copy(&self) -> &'static [u8];
}

impl LeakCopy for Vec<u8> {
    /// Copies the data and leaks it: a view must borrow it for longer than a closure lives.
    fn leak_copy(&self) -> &'static [u8] {
        self.clone().leak()
    }
}

#[test]
fn changed_byte_of_any_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for (file, at_end) in [
        (MODEL, 1),
        (MODEL, 30_000),
        (&*optimizer_name(0, 1), 1),
        (&*optimizer_name(0, 1), 60_000),
        (STATE, 10),
    ] {
        let path = save(dir.path(), 2);
        flip(&path.join(file), at_end);
        let error = read_all(&path).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Damaged { reason, .. } if reason.contains(file)),
            "{error}"
        );
    }
}

/// Changes the manifest of a checkpoint, and returns the reason why it is rejected.
fn rejected(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs_err::read(path.join(MANIFEST)).unwrap()).unwrap();
    change(&mut manifest);
    fs_err::write(path.join(MANIFEST), manifest.to_string()).unwrap();
    read_all(&path).unwrap_err().to_string()
}

#[test]
fn manifest_lists_exactly_the_expected_files() {
    let file = |manifest: &serde_json::Value, name: &str| {
        let files = manifest["files"].as_array().unwrap();
        files.iter().position(|file| file["name"] == name).unwrap()
    };
    let without = |name: &str| {
        rejected(|manifest| {
            let at = file(manifest, name);
            manifest["files"].as_array_mut().unwrap().remove(at);
        })
    };
    assert!(without(MODEL).ends_with("does not contain model.safetensors"));
    assert!(without(STATE).ends_with("does not contain state.json"));
    assert!(without(&optimizer_name(0, 1)).contains("optimizer state of every rank"));
    for name in ["../model.safetensors", "..", ".model", "other", "optimizer-1-of-1.safetensors"] {
        let error = rejected(|manifest| {
            let mut entry = manifest["files"][0].clone();
            entry["name"] = name.into();
            manifest["files"].as_array_mut().unwrap().push(entry);
        });
        assert!(error.contains(&format!("contains the file name {name:?}")), "{error}");
    }
    let twice = rejected(|manifest| {
        let entry = manifest["files"][0].clone();
        manifest["files"].as_array_mut().unwrap().push(entry);
    });
    assert!(twice.ends_with("contains a file twice"), "{twice}");
    let gap = rejected(|manifest| {
        let at = file(manifest, MODEL);
        manifest["files"][at]["chunks"].as_array_mut().unwrap().remove(1);
    });
    assert!(gap.contains("do not follow each other"), "{gap}");
    let other = rejected(|manifest| manifest["version"] = 5.into());
    assert!(other.ends_with("has format version 5, but this build reads versions 1 to 4"), "{other}");
}

#[test]
fn what_is_not_a_regular_file_is_rejected_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for file in [MANIFEST, MODEL, STATE] {
        let path = save(dir.path(), 1);
        let original = path.join(file);
        fs_err::rename(&original, dir.path().join("elsewhere")).unwrap();
        fs_err::os::unix::fs::symlink(dir.path().join("elsewhere"), &original).unwrap();
        assert!(read_all(&path).unwrap_err().to_string().ends_with("is not a regular file"), "{file}");
        fs_err::remove_file(&original).unwrap();
        // Opening a pipe would wait for a writer.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &original,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(read_all(&path).unwrap_err().to_string().ends_with("is not a regular file"), "{file}");
        assert_eq!(newest(dir.path()), None);
        fs_err::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn checkpoint_of_another_model_is_refused_with_the_first_difference() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let other = ModelShape { ffn: 32, ..shape() };
    let error = directory::open(&path, &other).unwrap_err().to_string();
    assert!(error.contains("model.ffn is 24 in the checkpoint, 32 in this job"), "{error}");
}

fn weights(bytes: &[u8]) -> Result<Vec<f32>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(MODEL);
    fs_err::write(&path, bytes).unwrap();
    let layout = Layout::new(&shape());
    let arena = Mutex::new(vec![f32::NAN; layout.len]);
    let sink = |Piece { at, values, .. }: Piece| {
        arena.lock().unwrap()[at..at + values.len()].copy_from_slice(&values);
        Ok(())
    };
    check_weights(&path, &layout).map_err(|error| error.to_string())?;
    read_weights(&path, &layout, &threads(), &sink).map_err(|error| error.to_string())?;
    Ok(arena.into_inner().unwrap())
}

#[test]
fn damaged_safetensors_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = fs_err::read(save(dir.path(), 1).join(MODEL)).unwrap();
    let wte = Layout::new(&shape()).wte.start;
    assert_eq!(weights(&good).unwrap()[wte], value(Arena::Params, wte, 1));
    let length = usize::try_from(u64::from_le_bytes(good[..8].try_into().unwrap())).unwrap();
    for len in [0, 7, 8, 100, 8 + length, good.len() - 1] {
        assert!(weights(&good[..len]).is_err(), "{len} bytes");
    }
    for length in [u64::MAX, good.len() as u64, 0, 1] {
        let error = weights(&[&length.to_le_bytes()[..], &good[8..]].concat()).unwrap_err();
        assert!(error.contains(MODEL), "{error}");
    }
    let header: serde_json::Value = serde_json::from_slice(&good[8..8 + length]).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut header = header.clone();
        change(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        weights(&[&(header.len() as u64).to_le_bytes()[..], &header, &good[8 + length..]].concat())
    };
    let other_type = with(&|header| header["wte.weight"]["dtype"] = "I32".into());
    assert!(other_type.unwrap_err().contains("but the model has F32"));
    for offsets in [[0, 4], [4, 0], [u64::MAX - 64, u64::MAX], [1 << 40, (1 << 40) + 64]] {
        let changed = with(&|header| header["wte.weight"]["data_offsets"] = serde_json::json!(offsets));
        assert!(changed.is_err(), "{offsets:?}");
    }
}

#[test]
fn tokenizer_is_part_of_a_checkpoint_and_older_ones_have_none() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = save(dir.path(), 1);
    assert_eq!(tokenizer(&bytes).unwrap().unwrap().name(), "bytes", "the configuration says so");
    assert_eq!(open_version(&bytes), 2, "older builds read it");

    let json = xlaunch_data::Tokenizer::bytes().to_json().into_bytes();
    let settings = Settings { tokenizer: Some(json.clone()), ..settings(dir.path(), Retention::default()) };
    let mut state = state("run", 2);
    (state.version, state.spec) = (version(&JobSpec::default(), &shape(), true), serde_json::Value::Null);
    save_with(settings, Disk::default(), Alone::default(), state).unwrap();
    let path = dir.path().join(name(2));
    assert_eq!((open_version(&path), fs_err::read(path.join(TOKENIZER)).unwrap()), (3, json));
    assert_eq!(tokenizer(&path).unwrap().unwrap().vocab(), 256);
    assert_complete(&path, 2);

    let mut damaged = fs_err::read(path.join(TOKENIZER)).unwrap();
    damaged[0] = b' ';
    fs_err::write(path.join(TOKENIZER), damaged).unwrap();
    let error = tokenizer(&path).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Damaged { reason, .. } if reason.contains(TOKENIZER)),
        "{error}"
    );
    fs_err::remove_file(path.join(TOKENIZER)).unwrap();
    assert!(matches!(read_all(&path), Err(CheckpointError::Damaged { .. })), "the manifest lists it");
}

#[test]
fn builds_before_0_4_refuse_what_they_would_take_for_another_model_or_optimizer() {
    let (mut spec, shape) = (JobSpec::default(), shape());
    assert_eq!([false, true].map(|tokenizer| version(&spec, &shape, tokenizer)), [2, 3]);
    assert_eq!(version(&spec, &Arch::Qwen3.base(), true), 4);
    spec.train.optimizer = Optimizer::Muon;
    assert_eq!(version(&spec, &shape, false), 4);
}

/// Returns the version in the manifest of a checkpoint.
fn open_version(path: &Path) -> u64 {
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs_err::read(path.join(MANIFEST)).unwrap()).unwrap();
    manifest["version"].as_u64().unwrap()
}
