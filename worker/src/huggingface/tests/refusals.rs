//! Files that are not the weights of a model, each refused by what it is.

use std::path::{Path, PathBuf};

use fs_err as fs;
use safetensors::SafeTensors;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::Precision;
use xlaunch_spec::model::ModelShape;
use xlaunch_spec::refusal::Refusal;

use super::{checkpoint, export, options, read, shapes};
use crate::pretrained::{Device, Source, Target};
use crate::weights::Weights;

/// Exports a checkpoint of random weights. Returns the directory.
fn exported(dir: &Path, shape: &ModelShape) -> PathBuf {
    let (saved, _) = checkpoint(&dir.join("a"), shape);
    export(&options(&saved, &dir.join("out"))).unwrap().output
}

#[test]
fn file_that_goes_on_after_its_last_tensor_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    let weights = output.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for rest in [&b"x"[..], &[0; 4096], &whole] {
        fs::write(&weights, [&whole, rest].concat()).unwrap();
        let error = read(&output, shape).unwrap_err();
        assert_eq!(error.exit(), ExitCode::Data, "{error}");
        let expected = format!("{} bytes follow its last tensor", rest.len());
        assert!(error.to_string().contains(&expected), "{expected}: {error}");
    }
    fs::write(&weights, &whole).unwrap();
    read(&output, shape).unwrap();
}

/// A header with this many tensors of one byte.
fn header_of(tensors: usize) -> Vec<u8> {
    let entry =
        |at: usize| format!("\"{at}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{at},{}]}}", at + 1);
    let text = format!("{{{}}}", (0..tensors).map(entry).collect::<Vec<_>>().join(","));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; tensors]].concat()
}

#[test]
fn header_with_more_tensors_than_any_model_has_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    for (tensors, expected) in [(50_000, "not found"), (50_001, "more than 50000 tensors")] {
        fs::write(output.join("model.safetensors"), header_of(tensors)).unwrap();
        let error = read(&output, shape).unwrap_err();
        assert_eq!(error.exit(), ExitCode::Data, "{error}");
        assert!(error.to_string().contains(expected), "{tensors}: {error}");
    }
}

#[test]
fn names_with_the_prefix_of_a_wrapper_are_refused_with_the_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    let weights = output.join("model.safetensors");
    let file = fs::read(&weights).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap().tensors();
    let wrapped = tensors.into_iter().map(|(name, tensor)| (format!("_orig_mod.{name}"), tensor));
    fs::write(&weights, safetensors::serialize(wrapped, None).unwrap()).unwrap();
    let error = read(&output, shape).unwrap_err();
    assert_eq!(error.exit(), ExitCode::Data, "{error}");
    for text in [": not found, but \"_orig_mod.", "remove \"_orig_mod.\" from the names"] {
        assert!(error.to_string().contains(text), "{error}");
    }
}

/// An export would lack what they set.
#[test]
fn settings_that_cannot_be_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    for name in ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"] {
        fs::write(output.join(name), "{\"eos_token_id\": 1,}").unwrap();
        let error = read(&output, shape).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("not an object of JSON: trailing comma"), "{error}");
        fs::remove_file(output.join(name)).unwrap();
    }
}

#[test]
fn weights_in_a_file_of_another_name_are_refused_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    fs::rename(output.join("model.safetensors"), output.join("model-00001-of-00001.safetensors")).unwrap();
    let error = read(&output, shape).unwrap_err().to_string();
    assert!(error.contains("index.json, but model-00001-of-00001.safetensors"), "{error}");
}

#[test]
fn weights_of_a_model_of_images_are_refused_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    let weights = output.join("model.safetensors");
    let file = fs::read(&weights).unwrap();
    for prefix in ["model.language_model.", "language_model.model."] {
        let tensors = SafeTensors::deserialize(&file).unwrap().tensors();
        let part = tensors.into_iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor));
        fs::write(&weights, safetensors::serialize(part, None).unwrap()).unwrap();
        let error = read(&output, shape).unwrap_err().to_string();
        assert!(error.contains(&format!(": not found, but \"{prefix}")), "{error}");
        assert!(error.contains("model of images") && error.contains("save its text model"), "{error}");
    }
}

#[test]
fn pickles_and_adapters_are_refused_by_what_they_are() {
    const PICKLE: &[&str] = &["pickles are not read", "save_pretrained"];
    const ADAPTER: &[&str] = &["an adapter is read from its directory", "`save_pretrained(DIR)`"];
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let output = exported(dir.path(), shape);
    let config = fs::read(output.join("config.json")).unwrap();
    for (index, (files, expected)) in [
        (&["pytorch_model.bin", "config.json"][..], PICKLE),
        (&["pytorch_model.bin"], PICKLE),
        (&["pytorch_model.bin.index.json", "config.json"], PICKLE),
        (&["adapter_model.bin", "adapter_config.json"], ADAPTER),
    ]
    .into_iter()
    .enumerate()
    {
        let model = dir.path().join(index.to_string());
        fs::create_dir(&model).unwrap();
        for file in files {
            fs::write(model.join(file), if *file == "config.json" { &config[..] } else { b"{}" }).unwrap();
        }
        // To train from, by its directory and by its file; to generate from.
        let mut refusals = vec![train_from(&model, shape), generate_from(&model)];
        refusals.extend((!files[0].ends_with(".json")).then(|| train_from(&model.join(files[0]), shape)));
        for (exit, message) in refusals {
            assert_eq!(exit, ExitCode::Data, "{files:?}: {message}");
            for text in expected.iter().chain(&files[..1]) {
                assert!(message.contains(text), "{files:?}: {text} in {message}");
            }
        }
    }
}

#[test]
fn file_of_a_model_is_refused_with_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let shape = &shapes()[0];
    let (saved, _) = checkpoint(&dir.path().join("a"), shape);
    let output = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
    for file in ["model.safetensors", "config.json"] {
        for (exit, message) in [train_from(&output.join(file), shape), generate_from(&output.join(file))] {
            assert_eq!(exit, ExitCode::Data, "{message}");
            let expected = format!("it belongs to the model in {}; name that", output.display());
            assert!(message.contains(&expected), "{message}");
        }
    }
    // A checkpoint's file of weights is not part of such a model.
    Weights::open(&saved.join("model.safetensors")).unwrap().check(shape).unwrap();
}

#[test]
fn directory_of_the_hubs_cache_is_refused_with_that_of_its_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = dir.path().join("snapshots");
    fs::create_dir_all(snapshots.join("0123abcd")).unwrap();
    let [(exit, of_training), (_, of_generating)] =
        [train_from(dir.path(), &shapes()[0]), generate_from(dir.path())];
    assert_eq!(exit, ExitCode::Data);
    for message in [of_training, of_generating] {
        let expected = format!("a model is a directory in {}", snapshots.display());
        assert!(message.contains("neither a checkpoint") && message.ends_with(&expected), "{message}");
    }
}

#[test]
fn adapter_beside_a_model_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let (saved, _) = checkpoint(&dir.path().join("a"), &shapes()[0]);
    let output = export(&options(&saved, &dir.path().join("out"))).unwrap().output;
    let note = || Weights::open(&output).unwrap().note();
    assert_eq!(note(), None);
    fs::write(output.join("adapter_config.json"), "{}").unwrap();
    assert!(note().unwrap().contains("the adapter beside the model"), "{:?}", note());
}

#[test]
fn adapters_that_cannot_be_read_are_refused_with_the_key_of_their_configuration() {
    let shape = &shapes()[0];
    for (config, expected) in [
        ("{}", "missing field `peft_type`"),
        (
            r#"{"peft_type": "IA3", "feedforward_modules": ["down_proj"]}"#,
            "`peft_type`: adapters of type \"IA3\" are not supported",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": true}"#,
            "`use_dora`: DoRA is not supported; merge the adapter into its model",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alpha_pattern": {"q_proj": 2}}"#,
            "`alpha_pattern`: ranks and alphas",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "init_lora_weights": "pissa_niter_4"}"#,
            "`init_lora_weights`: \"pissa_niter_4\" changes the weights of the model",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alora_invocation_tokens": [1]}"#,
            "`alora_invocation_tokens`: ",
        ),
        (r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "kasa_config": {}}"#, "`kasa_config`: KaSA"),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_bdlora": {"nblocks": 2}}"#,
            "`use_bdlora`: BD-LoRA",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "arrow_config": {"top_k": 3}}"#,
            "`arrow_config`: adapters that are chosen for each token",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "trainable_token_indices": [0]}"#,
            "`trainable_token_indices`: trained rows of the embedding",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "layer_replication": [[0, 1], [0, 1]]}"#,
            "`layer_replication`: models whose blocks are replicated",
        ),
        // What follows is found only if the initialisation is no obstacle.
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "init_lora_weights": "gaussian"}"#,
            "`base_model_name_or_path`: it does not name the model",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "init_lora_weights": "mica"}"#,
            "`base_model_name_or_path`: it does not name the model",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#,
            "`base_model_name_or_path`: it does not name the model",
        ),
        (
            r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}"#,
            "`hf download Qwen/Qwen3-0.6B",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("adapter_model.safetensors"), "{}").unwrap();
        fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        for (exit, message) in [train_from(dir.path(), shape), generate_from(dir.path())] {
            assert_eq!(exit, ExitCode::Data, "{message}");
            assert!(message.contains(expected), "{expected} in {message}");
        }
        let (_, message) = train_from(&dir.path().join("adapter_model.safetensors"), shape);
        assert!(message.contains("an adapter is read from its directory"), "{message}");
    }
}

fn train_from(path: &Path, shape: &xlaunch_spec::model::ModelShape) -> (ExitCode, String) {
    let error = Weights::open(path).and_then(|weights| weights.check(shape)).unwrap_err();
    (error.exit(), error.to_string())
}

fn generate_from(path: &Path) -> (ExitCode, String) {
    let refusal = load_with(path, None).unwrap_err();
    (refusal.exit, refusal.message)
}

fn load_with(path: &Path, host_memory: Option<u64>) -> Result<(), Refusal> {
    let target = Target { device: Device::Cpu, precision: Precision::Fp32, host_memory };
    Source::find(path)?.load_on(target, false, &mut |_| {}, &|| false).map(drop)
}

#[test]
fn weights_larger_than_the_memory_of_the_host_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output = exported(dir.path(), &shapes()[0]);
    let weights = fs::metadata(output.join("model.safetensors")).unwrap().len();
    for enough in [None, Some(2 * weights)] {
        load_with(&output, enough).unwrap();
    }
    let refusal = load_with(&output, Some(weights / 2)).unwrap_err();
    assert_eq!(refusal.exit, ExitCode::Usage);
    let expected = format!("the weights of {} need ", output.display());
    assert!(refusal.message.starts_with(&expected), "{}", refusal.message);
}
