//! Tests of exports of small checkpoints, and of reading directories that are whole, damaged or hostile.

mod refusals;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use fs_err as fs;
use half::f16;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde_json::{Value, json};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{JobSpec, Precision};
use xlaunch_spec::model::{Arch, ModelShape, PRESETS};

use super::Directory;
use crate::checkpoint::directory;
use crate::checkpoint::testing::{save, save_model};
use crate::error::WorkerError;
use crate::export::{Content, Export, ExportDtype, Exported, export, export_in_files};
use crate::model::init;
use crate::model::layout::Layout;
use crate::pretrained::{Device, Source, open_device};
use crate::weights::{Weights, open_newest};

fn threads() -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(2).build().unwrap()
}

/// Covers both architectures; padded vocabularies, tied and untied; grouped and wide heads.
fn shapes() -> Vec<ModelShape> {
    let llama = ModelShape {
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        dim: 32,
        ffn: 48,
        seq: 24,
        vocab: 1100,
        ..PRESETS[7].1.clone()
    };
    let gpt2 = ModelShape {
        layers: 2,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        dim: 32,
        ffn: 48,
        seq: 24,
        vocab: 1100,
        ..PRESETS[2].1.clone()
    };
    [false, true]
        .into_iter()
        .flat_map(|tied| [ModelShape { tied, ..llama.clone() }, ModelShape { tied, ..gpt2.clone() }])
        .collect()
}

/// Saves a checkpoint of a model with random values, including biases and norms. Also returns its arena.
fn checkpoint(dir: &Path, shape: &ModelShape) -> (PathBuf, Vec<f32>) {
    let layout = Layout::new(shape);
    let mut arena = init::weights(&layout, 3, &threads());
    for param in &layout.params {
        for (at, value) in arena[param.stored()].iter_mut().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "test data")]
            let change = (at % 97) as f32 / 1000.0;
            *value += change;
        }
    }
    (save_model(dir, shape, &arena), arena)
}

fn options(checkpoint: &Path, output: &Path) -> Export {
    Export {
        checkpoint: checkpoint.into(),
        output: output.into(),
        dtype: ExportDtype::Fp32,
        tokenizer: None,
        overwrite: false,
        content: Content::Model,
    }
}

/// Fills the arena of a model from the weights at `path`.
fn read(path: &Path, shape: &ModelShape) -> Result<Vec<f32>, WorkerError> {
    let layout = Layout::new(shape);
    let arena = Mutex::new(vec![0.0; layout.len]);
    let weights = Weights::open(path)?;
    weights.check(shape)?;
    weights.read(shape, &layout, &threads(), &|piece| {
        arena.lock().unwrap()[piece.at..piece.at + piece.values.len()].copy_from_slice(&piece.values);
        Ok(())
    })?;
    Ok(arena.into_inner().unwrap())
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn newest_checkpoint_whose_values_are_damaged_is_skipped_unless_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let [older, newest] = [1, 2].map(|step| save(dir.path(), step));
    let weights = newest.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let reason = format!(
        "{} is not a complete checkpoint: model.safetensors does not match its hash",
        newest.display()
    );

    let load = |path: &Path| {
        let backend = open_device(Device::Cpu, Precision::Fp32, false)?;
        let (source, mut notes) = (Source::find(path)?, Vec::new());
        assert_eq!(source.notes, [""; 0]);
        source.load(&backend, &mut |line| notes.push(line.to_owned()), &|| false).map(|_| notes)
    };
    assert_eq!(load(dir.path()).unwrap(), [format!("skipped {}: {reason}", newest.display())]);
    assert_eq!(load(&newest).unwrap_err().message, reason);
    let exported = export(&options(dir.path(), &dir.path().join("out"))).unwrap();
    assert_eq!(
        (exported.checkpoint, exported.step, exported.notes),
        (older.clone(), 1, vec![reason.clone()])
    );
    assert_eq!(export(&options(&newest, &dir.path().join("b"))).unwrap_err().to_string(), reason);

    fs::remove_dir_all(&older).unwrap();
    let message = load(dir.path()).unwrap_err().message;
    assert!(message.starts_with("no valid checkpoint in ") && message.ends_with(&reason), "{message}");
}

#[test]
fn checkpoint_that_its_job_deletes_while_it_is_opened_gives_way_to_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1);
    let open = |steps: u64| {
        open_newest(dir.path(), |path| {
            let step = directory::state(path)?.step;
            if step < steps {
                fs::remove_dir_all(path).unwrap();
                save(dir.path(), step + 1);
            }
            Ok(directory::state(path)?.step)
        })
    };
    let (step, rejected) = open(3).unwrap();
    assert!(step == 3 && rejected.is_empty(), "{rejected:?}");
    let error = open(u64::MAX).unwrap_err().to_string();
    assert!(error.contains("is not a complete checkpoint: "), "{error}");
}

#[test]
fn exported_models_are_read_back_exactly_and_exported_again_with_the_same_bytes() {
    let families = super::fixtures::all().into_values().map(|fixture| fixture.shape());
    for (number, shape) in shapes().into_iter().chain(families).enumerate() {
        let (shape, sizes) = (&shape, if number < 4 { &[u64::MAX, 50_000][..] } else { &[50_000] });
        let dir = tempfile::tempdir().unwrap();
        let (saved, arena) = checkpoint(&dir.path().join("a"), shape);
        for max_file_bytes in sizes.iter().copied() {
            let [one, two] = ["one", "two"].map(|name| dir.path().join(format!("{name}-{max_file_bytes}")));
            export_in_files(&options(&saved, &one), max_file_bytes).unwrap();
            assert_eq!(read(&one, shape).unwrap(), arena, "{number}");
            assert_eq!(Weights::open(&one).unwrap().shape(), Some(shape));
            let again = save_model(
                &dir.path().join(format!("b-{max_file_bytes}")),
                shape,
                &read(&one, shape).unwrap(),
            );
            export_in_files(&options(&again, &two), max_file_bytes).unwrap();
            assert!(files(&one) == files(&two), "{number}");
            let several = one.join("model.safetensors.index.json").exists();
            assert_eq!(several, max_file_bytes == 50_000);
        }
    }
}

#[test]
fn checkpoint_run_and_directory_are_exported_and_read_alike() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[1];
    let (saved, arena) = checkpoint(&dir.path().join("checkpoints"), shape);
    for (number, path) in [dir.path(), &dir.path().join("checkpoints"), &saved].into_iter().enumerate() {
        let Exported { checkpoint, step, tokenizer, output, .. } =
            export(&options(path, &dir.path().join(format!("out/{number}")))).unwrap();
        assert_eq!((&checkpoint, step, tokenizer.as_deref()), (&saved, 10, Some("bytes")));
        assert_eq!(read(path, shape).unwrap(), arena);
        let config: Value = serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
        assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(1100), &Value::Null));
        assert!(output.join("tokenizer.json").exists() && output.join("README.md").exists());
        let error = export(&options(&output, &dir.path().join("again"))).unwrap_err().to_string();
        assert!(error.contains("a model in Hugging Face's layout already"), "{error}");
    }
}

#[test]
fn sequences_may_be_shorter_than_those_of_the_weights() {
    for shape in shapes() {
        let dir = tempfile::tempdir().unwrap();
        let (saved, arena) = checkpoint(&dir.path().join("a"), &shape);
        let exported = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
        let short = ModelShape { seq: 10, ..shape.clone() };
        let (long, layout) = (Layout::new(&shape), Layout::new(&short));
        let mut expected = vec![0.0; layout.len];
        for (from, to) in long.params.iter().zip(&layout.params) {
            let len = to.stored().len();
            expected[to.stored()].copy_from_slice(&arena[from.range.start..from.range.start + len]);
        }
        for path in [&saved, &exported] {
            assert!(read(path, &short).unwrap() == expected, "{path:?}");
        }
        let longer = ModelShape { seq: 48, ..shape.clone() };
        assert_eq!(read(&exported, &longer).is_ok(), shape.arch == Arch::Llama);
    }
}

#[test]
fn model_keys_that_are_not_set_come_from_the_weights_and_others_must_agree() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let (saved, _) = checkpoint(&dir.path().join("a"), shape);
    let exported = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
    for path in [&saved, &exported] {
        let weights = Weights::open(path).unwrap();
        let filled = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            change(&mut spec);
            weights.fill_in(&mut spec).map(|()| spec.model.resolve().unwrap())
        };
        assert_eq!(filled(|_| {}).unwrap(), *shape);
        let short = filled(|spec| (spec.model.seq, spec.model.layers) = (Some(8), Some(2))).unwrap();
        assert_eq!(short, ModelShape { seq: 8, ..shape.clone() });
        let invalid = filled(|spec| spec.model.layers = Some(3)).unwrap_err();
        assert_eq!(invalid.key, "model.layers");
        let text = invalid.to_string();
        assert!(text.contains("3 contradicts checkpoint.init: it is 2 in /"), "{text}");
        // A number of heads that does not fit the other sizes of the weights.
        let heads = filled(|spec| spec.model.heads = Some(3)).unwrap_err();
        assert!(heads.key == "model.heads" && heads.to_string().contains("contradicts"), "{heads}");
        assert_eq!(
            filled(|spec| spec.model.preset = Some("llama-1b".into())).unwrap_err().key,
            "model.layers"
        );
        assert_eq!(filled(|spec| spec.model.rope_theta = Some(1e4)).unwrap_err().key, "model.rope_theta");
    }
}

#[test]
fn export_says_which_class_gives_the_ids_of_its_tokenizer() {
    for (arch, class) in [(Arch::Qwen2, "PreTrainedTokenizerFast"), (Arch::Llama, "AutoTokenizer")] {
        let dir = tempfile::tempdir().unwrap();
        let (saved, _) = checkpoint(&dir.path().join("a"), &arch.base());
        let Exported { output, notes, .. } = export(&options(&saved, &dir.path().join("out"))).unwrap();
        assert_eq!(notes.iter().any(|note| note.contains(class)), arch == Arch::Qwen2, "{notes:?}");
        let card = fs::read_to_string(output.join("README.md")).unwrap();
        assert!(card.contains(&format!("tokenizer = {class}.from_pretrained")), "{card}");
    }
}

/// Files of these families have no number for "no block".
#[test]
fn distances_beyond_the_last_block_agree_with_0() {
    let olmo = ModelShape { window: 8, window_pattern: 0, ..Arch::Olmo3.base() };
    let smol = ModelShape { no_rope_every: 0, ..Arch::SmolLm3.base() };
    for shape in [olmo, smol] {
        let dir = tempfile::tempdir().unwrap();
        let (saved, _) = checkpoint(&dir.path().join("a"), &shape);
        let exported = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
        let mut spec = JobSpec::default();
        spec.model.window_pattern = (shape.window > 0).then_some(0);
        spec.model.no_rope_every = (shape.window == 0).then_some(0);
        Weights::open(&exported).unwrap().fill_in(&mut spec).unwrap();
        assert_eq!(spec.model.resolve().unwrap(), shape);
        assert!(read(&exported, &shape).is_ok());
        let every_other = ModelShape { no_rope_every: 2, ..shape };
        assert!(read(&exported, &every_other).is_err());
    }
}

#[test]
fn weights_that_are_not_finite_are_not_exported_and_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[1];
    let (_, mut arena) = checkpoint(&dir.path().join("a"), shape);
    let at = Layout::new(shape).blocks[1].fc.weight.start + 5;
    arena[at] = f32::INFINITY;
    let saved = save_model(&dir.path().join("b"), shape, &arena);
    let output = dir.path().join("out");
    let error = export(&options(&saved, &output)).unwrap_err();
    assert_eq!(error.exit(), ExitCode::Data);
    let text = error.to_string();
    assert!(text.contains("transformer.h.1.mlp.c_fc.weight") && text.contains("not finite"), "{text}");
    assert!(!output.exists() && files_named(dir.path(), "exporting").is_empty());

    arena[at] = 3.4e38;
    let saved = save_model(&dir.path().join("c"), shape, &arena);
    let rounded = Export { dtype: ExportDtype::Bf16, ..options(&saved, &output) };
    assert!(export(&rounded).unwrap_err().to_string().contains("not finite in bfloat16"));
    export(&options(&saved, &output)).unwrap();
    let weights = output.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    let error = read(&output, shape).unwrap_err();
    assert_eq!(error.exit(), ExitCode::Data);
    assert!(error.to_string().contains("not finite"), "{error}");
}

fn files_named(dir: &Path, part: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().contains(part)).collect()
}

#[test]
fn only_earlier_exports_are_replaced_and_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let (saved, _) = checkpoint(&dir.path().join("a"), &shapes()[0]);
    let output = dir.path().join("out");
    export(&options(&saved, &output)).unwrap();
    let before = files(&output);
    let error = export(&options(&saved, &output)).unwrap_err();
    assert_eq!(error.exit(), ExitCode::Usage);
    assert!(error.to_string().contains("--overwrite"), "{error}");
    let overwrite = Export { dtype: ExportDtype::Bf16, overwrite: true, ..options(&saved, &output) };
    export(&overwrite).unwrap();
    assert_ne!(files(&output), before);
    assert!(files_named(dir.path(), "exporting").is_empty());
    // Someone else's model, and an export that contains a file of the user.
    fs::write(output.join("notes.txt"), "mine").unwrap();
    assert_eq!(export(&overwrite).unwrap_err().exit(), ExitCode::Usage);
    fs::remove_file(output.join("notes.txt")).unwrap();
    let weights = output.join("model.safetensors");
    let text = String::from_utf8_lossy(&fs::read(&weights).unwrap()).into_owned();
    assert!(text.contains("xlaunch"));
    write_tensors(&weights, &[("a", "F32", vec![1], vec![0; 4])]);
    assert_eq!(export(&overwrite).unwrap_err().exit(), ExitCode::Usage);
}

#[test]
fn damaged_checkpoint_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (saved, _) = checkpoint(&dir.path().join("a"), &shapes()[0]);
    let weights = saved.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let error = export(&options(&saved, &dir.path().join("out"))).unwrap_err();
    assert_eq!(error.exit(), ExitCode::Data);
    assert!(!dir.path().join("out").exists() && files_named(dir.path(), "exporting").is_empty());
}

#[test]
fn tokenizer_must_fit_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (saved, _) = checkpoint(&dir.path().join("a"), &shapes()[0]);
    let with = |tokenizer: &str| {
        let output = dir.path().join(tokenizer.replace('/', "_"));
        export(&Export { tokenizer: Some(tokenizer.into()), ..options(&saved, &output) })
    };
    let error = with("gpt2").unwrap_err();
    assert_eq!(error.exit(), ExitCode::Usage);
    assert!(error.to_string().contains("50257 ids, but the model only 1100"), "{error}");
    assert!(with("/nowhere/tokenizer.json").unwrap_err().to_string().contains("/nowhere/tokenizer.json"));
    assert!(with("bytes").is_ok());
}

/// Writes a safetensors file.
fn write_tensors(path: &Path, tensors: &[(&str, &str, Vec<usize>, Vec<u8>)]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let text = Value::Object(header).to_string().into_bytes();
    fs::write(path, [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()).unwrap();
}

/// Returns the tensors of an export, to be changed and written again.
fn tensors(path: &Path) -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, "F32".to_owned(), view.shape().to_vec(), view.data().to_vec())
    };
    read.tensors().into_iter().map(tensor).collect()
}

type Tensors = Vec<(String, String, Vec<usize>, Vec<u8>)>;

fn embedding(tensors: &Tensors) -> (String, String, Vec<usize>, Vec<u8>) {
    let is_embedding = |name: &str| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    tensors.iter().find(|(name, ..)| is_embedding(name)).unwrap().clone()
}

/// An export with modified tensors.
struct Changed {
    output: PathBuf,
    shape: ModelShape,
    original: Tensors,
}

impl Changed {
    fn new(dir: &Path, shape: &ModelShape) -> Self {
        let (saved, _) = checkpoint(&dir.join("a"), shape);
        let output = export(&options(&saved, &dir.join("out"))).unwrap().output;
        let original = tensors(&output.join("model.safetensors"));
        Self { output, shape: shape.clone(), original }
    }

    fn read(&self, change: &dyn Fn(&mut Tensors)) -> Result<Vec<f32>, WorkerError> {
        let mut tensors = self.original.clone();
        change(&mut tensors);
        let borrowed: Vec<_> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (&**name, &**dtype, shape.clone(), bytes.clone()))
            .collect();
        write_tensors(&self.output.join("model.safetensors"), &borrowed);
        read(&self.output, &self.shape)
    }
}

#[test]
fn files_with_other_tensors_are_refused_by_name() {
    for shape in shapes() {
        let dir = tempfile::tempdir().unwrap();
        let changed = Changed::new(dir.path(), &shape);
        let refused = |what: &str, change: &dyn Fn(&mut Tensors)| {
            let error = changed.read(change).unwrap_err();
            assert_eq!(error.exit(), ExitCode::Data, "{error}");
            let text = error.to_string();
            assert!(
                text.contains(what) && text.contains("out") && !text.contains('\u{1b}'),
                "{what}: {text}"
            );
        };
        assert!(changed.read(&|_| {}).is_ok());
        let norm = |tensors: &Tensors| {
            tensors
                .iter()
                .position(|(name, ..)| name.ends_with("norm.weight") || name.ends_with("ln_f.weight"))
                .unwrap()
        };
        refused("not found", &|tensors| drop(tensors.remove(norm(tensors))));
        refused("no such parameter", &|tensors| {
            tensors.push(("evil\u{1b}[31m".into(), "F32".into(), vec![1], vec![0; 4]));
        });
        refused("its shape is [16, 2]", &|tensors| {
            let at = norm(tensors);
            tensors[at].2 = vec![16, 2];
        });
        refused("its type is I32", &|tensors| {
            let at = norm(tensors);
            tensors[at].1 = "I32".into();
        });
        refused("invalid shape", &|tensors| {
            let at = norm(tensors);
            tensors[at].1 = "F16".into();
        });
    }
}

#[test]
fn head_that_differs_from_the_embedding_is_used_although_the_configuration_ties_them() {
    let shape = shapes().into_iter().find(|shape| shape.tied).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let changed = Changed::new(dir.path(), &shape);
    let tied_with = |head: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        // The expected shape is that of the configuration.
        let _ = changed.read(&|tensors| {
            let (_, dtype, sizes, bytes) = embedding(tensors);
            tensors.push(("lm_head.weight".into(), dtype, sizes, head(bytes)));
        });
        Directory::open(&changed.output).unwrap().shape().tied
    };
    assert!(tied_with(&|bytes| bytes));
    assert!(!tied_with(&|mut bytes| {
        *bytes.last_mut().unwrap() ^= 1;
        bytes
    }));
}

#[test]
fn half_precision_base_models_and_derived_tensors_are_read() {
    for shape in shapes() {
        let dir = tempfile::tempdir().unwrap();
        let changed = Changed::new(dir.path(), &shape);
        let exact = changed.read(&|_| {}).unwrap();
        let halved = changed.read(&|tensors| {
            for (_, dtype, _, bytes) in tensors.iter_mut() {
                *dtype = "F16".into();
                let values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
                *bytes = values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect();
            }
        });
        let halved = halved.unwrap();
        assert!(exact.iter().zip(&halved).all(|(a, b)| f16::from_f32(*a).to_f32() == *b));
        let prefix = super::families::Family::of(shape.arch).names.prefix;
        let base = changed.read(&|tensors| {
            for (name, ..) in tensors.iter_mut() {
                *name = name.strip_prefix(prefix).unwrap_or(name).to_owned();
            }
            for name in ["h.0.attn.bias", "layers.0.rotary_emb.inv_freq", "layers.0.rotary_emb.sin_cached"] {
                tensors.push((name.into(), "F32".into(), vec![1], vec![0; 4]));
            }
        });
        assert!(base.unwrap() == exact);
        let head = changed.read(&|tensors| {
            if shape.tied {
                let (_, dtype, sizes, bytes) = embedding(tensors);
                tensors.push(("lm_head.weight".into(), dtype, sizes, bytes));
            }
        });
        assert!(head.unwrap() == exact, "a tied head is not read");
    }
}

/// Replaces the matrices of experts by blocks in MXFP4 that are 2 everywhere.
fn pack(tensors: &mut Tensors) {
    let is_packed = |name: &str| name.ends_with("gate_up_proj") || name.ends_with("down_proj");
    let (matrices, others): (Vec<_>, Vec<_>) =
        tensors.drain(..).partition(|(name, ..)| is_packed(name) && name.contains("experts"));
    *tensors = others;
    for (name, _, shape, _) in matrices {
        let scales = vec![shape[0], shape[2], shape[1] / 32];
        let blocks = [&scales[..], &[16]].concat();
        for (end, shape, byte) in [("blocks", blocks, 0x22), ("scales", scales, 128)] {
            let bytes = vec![byte; shape.iter().product()];
            tensors.push((format!("{name}_{end}"), "U8".into(), shape, bytes));
        }
    }
}

#[test]
fn experts_in_mxfp4_are_decoded_and_incomplete_ones_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = super::fixtures::all()["gpt_oss"].shape();
    let changed = Changed::new(dir.path(), &shape);
    let (exact, packed) = (changed.read(&|_| {}).unwrap(), changed.read(&pack).unwrap());
    for param in &Layout::new(&shape).params {
        let is_packed = param.shape.len() == 3;
        let (exact, packed) = (&exact[param.stored()], &packed[param.stored()]);
        assert!(if is_packed { packed.iter().all(|x| *x == 2.0) } else { packed == exact }, "{}", param.name);
    }
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let packed = changed.read(&|tensors| {
            pack(tensors);
            change(tensors);
        });
        packed.unwrap_err().to_string()
    };
    let error =
        refused(&|tensors| tensors.retain(|(name, ..)| !name.ends_with("0.mlp.experts.down_proj_scales")));
    assert!(error.contains("down_proj_scales") && error.contains("not found"), "{error}");
    let error = refused(&|tensors| {
        let (_, _, shape, bytes) = tensors.iter_mut().find(|(name, ..)| name.ends_with("_blocks")).unwrap();
        bytes.truncate(bytes.len() / shape[0]);
        shape[0] = 1;
    });
    assert!(error.contains("U8"), "{error}");
    let error = refused(&|tensors| {
        let (.., bytes) = tensors.iter_mut().find(|(name, ..)| name.ends_with("_scales")).unwrap();
        bytes[0] = 255;
    });
    assert!(error.contains("not finite"), "{error}");
}

#[test]
fn hostile_files_and_indexes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let (saved, _) = checkpoint(&dir.path().join("a"), shape);
    let output = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
    let (weights, index) = (output.join("model.safetensors"), output.join("model.safetensors.index.json"));
    let whole = fs::read(&weights).unwrap();
    let refused = |what: &str| {
        let error = read(&output, shape).unwrap_err();
        assert_eq!(error.exit(), ExitCode::Data, "{error}");
        assert!(error.to_string().contains(what), "{what}: {error}");
    };
    for cut in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&weights, &whole[..cut]).unwrap();
        refused("model.safetensors");
    }
    fs::write(&weights, &whole[..7]).unwrap();
    refused("only 7 bytes");
    fs::write(&weights, [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
    refused("header is invalid");
    fs::write(&weights, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap();
    refused("`git lfs pull`");
    fs::remove_file(&weights).unwrap();
    refused("model.safetensors");

    fs::write(output.join("part.safetensors"), &whole).unwrap();
    for (file, what) in [
        ("../part.safetensors", "not the name of a file"),
        ("/etc/passwd", "not the name of a file"),
        ("sub/part.safetensors", "not the name of a file"),
        ("..", "not the name of a file"),
        ("part.bin", "not the name of a file"),
        ("missing.safetensors", "missing.safetensors"),
    ] {
        fs::write(&index, json!({"weight_map": {"model.norm.weight": file}}).to_string()).unwrap();
        refused(what);
    }
    for text in ["{", "{}", "{\"weight_map\": {}}", "{\"weight_map\": {\"a\": 3}}", "[]"] {
        fs::write(&index, text).unwrap();
        refused("index.json");
    }
    // Older versions of the library saved frequencies, which some indexes still name.
    let frequencies = json!({"model.layers.0.self_attn.rotary_emb.inv_freq": "part.safetensors"});
    fs::write(&index, json!({"weight_map": frequencies}).to_string()).unwrap();
    read(&output, shape).unwrap();
    fs::write(&index, json!({"weight_map": {"model.other.weight": "part.safetensors"}}).to_string()).unwrap();
    refused("model.other.weight");
    fs::write(&index, json!({"weight_map": {"model.norm.weight": "part.safetensors"}}).to_string()).unwrap();
    assert!(read(&output, shape).is_ok());
    fs::write(output.join("config.json"), "{\"model_type\": \"bert\"}").unwrap();
    refused("`model_type`");
}
