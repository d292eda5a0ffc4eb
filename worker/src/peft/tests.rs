use safetensors::Dtype;
use safetensors::tensor::TensorView;
use xlaunch_data::TOKENIZER_FILE;

use super::*;
use crate::pretrained::Source;
use crate::weights::Weights;

#[test]
fn every_linear_layer_of_every_family_is_a_module_with_its_name_in_peft() {
    for arch in Arch::all() {
        let shape = ModelShape { layers: 2, experts: arch.base().experts.min(2), ..arch.base() };
        let lora = LoraSection { rank: 2, ..LoraSection::default() };
        let layout = layout(&shape, &lora).unwrap();
        let found = tensors(&shape, &layout);
        assert_eq!(found.len(), 2 * layout.adapted_modules().len(), "{arch:?}");
        assert_eq!(found.len(), 2 * 2 * Module::all(&shape).len(), "{arch:?}");
        // All matrices of blocks are adapted, but those of experts.
        if shape.experts > 0 {
            continue;
        }
        let block = Family::of(arch).names.block(0);
        let is_matrix = |tensor: &&Mapped| tensor.name.starts_with(&block) && tensor.shape.len() == 2;
        let model = weights(&shape, &layout);
        assert_eq!(model.values().filter(is_matrix).count(), Module::all(&shape).len(), "{arch:?}");
    }
}

/// Writes an adapter of ones with the tensors whose names are kept.
fn write(dir: &Path, base: &Path, shape: &ModelShape, keys: &[(&str, Value)], keep: impl Fn(&str) -> bool) {
    let lora = LoraSection { rank: 2, ..LoraSection::default() };
    let mut config = config(shape, &lora, base).unwrap();
    keys.iter().for_each(|(key, value)| config[*key] = value.clone());
    fs_err::write(dir.join(ADAPTER_CONFIG), config.to_string()).unwrap();
    let kept: Vec<Mapped> = tensors(shape, &layout(shape, &lora).unwrap())
        .into_iter()
        .filter(|tensor| keep(&tensor.name))
        .collect();
    let ones: Vec<u8> =
        kept.iter().flat_map(|tensor| tensor.elements.clone()).flat_map(|_| 1_f32.to_le_bytes()).collect();
    let view = |tensor: &Mapped| {
        let bytes = &ones[..4 * tensor.elements.len()];
        (tensor.name.clone(), TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap())
    };
    let file = safetensors::serialize(kept.iter().map(view), None).unwrap();
    fs_err::write(dir.join(ADAPTER_WEIGHTS), file).unwrap();
}

/// Writes such an adapter, and reads it.
fn reread(
    shape: &ModelShape,
    keys: &[(&str, Value)],
    keep: impl Fn(&str) -> bool,
) -> Result<Adapter, String> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Path::new("base"), shape, keys, keep);
    let directory = PeftDirectory::open(dir.path()).unwrap();
    directory.read(shape).map_err(|error| error.to_string())
}

#[test]
fn adapter_in_a_pickle_is_refused_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Arch::Llama.base();
    write(dir.path(), Path::new("base"), &shape, &[], |_| true);
    let weights = dir.path().join(ADAPTER_WEIGHTS);
    fs_err::rename(weights, dir.path().join("adapter_model.bin")).unwrap();
    let base = Weights::File("base".into());
    let error = base.with_adapter(dir.path()).unwrap_err().to_string();
    assert!(error.contains("adapter_model.bin") && error.contains("save_pretrained"), "{error}");
}

#[test]
fn layers_that_peft_did_not_adapt_keep_their_weights() {
    let shape = ModelShape { layers: 3, ..Arch::Llama.base() };
    let last = |name: &str| name.contains(".layers.2.");
    let pattern = json!(r".*\.2\..*proj");
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("2.self_attn.{name}"));
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("layers.2.mlp.{name}"));
    let in_last = [&attention[..], &mlp].concat();
    for keys in [
        ("layers_to_transform", json!([2])),
        ("layers_to_transform", json!(2)),
        ("target_modules", pattern),
        ("target_modules", json!(in_last)),
    ] {
        let adapter = reread(&shape, std::slice::from_ref(&keys), last).unwrap();
        let values: Vec<f32> = adapter.pieces().flat_map(|(_, values)| values).collect();
        let modules = layout(&shape, &adapter.lora).unwrap().adapted_modules();
        let each = Module::all(&shape).len();
        assert_eq!(modules.len(), 3 * each);
        for (index, module) in modules.iter().enumerate() {
            let expected = if index / each == 2 { 1.0 } else { 0.0 };
            let all = values[module.a.clone()].iter().chain(&values[module.b.clone()]);
            assert!(all.copied().all(|value| value == expected), "{keys:?}: {index}");
        }
    }
    // A file that lacks what its configuration does not leave out.
    let missing = |keys: &[(&str, Value)], keep: &dyn Fn(&str) -> bool| {
        let error = reread(&shape, keys, keep).unwrap_err();
        assert!(error.contains("layers.0.") || error.contains("layers.2."), "{error}");
        assert!(error.contains("not found") && error.contains("`layers_to_transform`"), "{error}");
    };
    missing(&[], &last);
    missing(&[("layers_to_transform", json!([0, 2]))], &last);
    missing(&[("layers_to_transform", json!([2]))], &|name| last(name) && !name.contains("q_proj.lora_A"));
}

#[test]
fn layer_named_in_full_is_adapted_in_any_block() {
    let shape = ModelShape { layers: 3, ..Arch::Llama.base() };
    let names = ["0", "1"].map(|block| format!("model.layers.{block}.self_attn.k_proj"));
    let is_named = |name: &str| names.iter().any(|layer| name.contains(layer.as_str()));
    let one = ("layers_to_transform", json!([1]));
    reread(&shape, &[("target_modules", json!(names)), one.clone()], is_named).unwrap();
    let error =
        reread(&shape, &[("target_modules", json!(["self_attn.k_proj"])), one], is_named).unwrap_err();
    assert!(error.contains("layers.0.") && error.contains("PEFT does not read it"), "{error}");
}

/// PEFT leaves out such tensors when it loads an adapter.
#[test]
fn tensors_of_layers_that_the_configuration_leaves_out_are_refused() {
    let shape = ModelShape { layers: 3, ..Arch::Llama.base() };
    let attention = json!(["q_proj", "k_proj", "v_proj", "o_proj"]);
    for keys in [
        ("target_modules", attention.clone()),
        ("target_modules", json!(["proj"])),
        ("exclude_modules", json!(["mlp.up_proj"])),
        ("exclude_modules", json!(r".*\.mlp\.(up|down)_proj")),
        ("layers_to_transform", json!([0, 2])),
        ("layers_to_transform", json!(1)),
        ("target_modules", json!(r".*\.(q|k|v|o)_proj")),
        ("target_modules", json!(r"^(?!.*\.1\.)model\.layers\.[0-9]{1,2}\.(?:self_attn|mlp)\.\w+$")),
        // The whole name has to match.
        ("target_modules", json!("q_proj|.*_proj.")),
    ] {
        let error = reread(&shape, std::slice::from_ref(&keys), |_| true).unwrap_err();
        assert!(error.contains("PEFT does not read it"), "{keys:?}: {error}");
    }
    reread(&shape, &[("target_modules", attention)], |name| name.contains("self_attn")).unwrap();
    for all in [
        "all-linear",
        "All-Linear",
        r".*_proj",
        r"model\.layers\.\d+\.\S+?\.(q_proj|[^q]+_proj)",
        "model|model.*",
    ] {
        reread(&shape, &[("target_modules", json!(all))], |_| true).unwrap();
    }
    let attention = [("target_modules", json!("all-linear")), ("exclude_modules", json!(r".*\.mlp\..*"))];
    reread(&shape, &attention, |name| name.contains("self_attn")).unwrap();
    let parameters = ("target_parameters", json!(["q_proj.weight"]));
    reread(&shape, &[("target_modules", json!([])), parameters], |name| name.contains("q_proj")).unwrap();
}

#[test]
fn configuration_without_targets_means_those_of_peft_for_the_type_of_the_model() {
    let unset = ("target_modules", Value::Null);
    let is_default = |name: &str| name.contains("q_proj") || name.contains("v_proj");
    let llama = ModelShape { layers: 3, ..Arch::Llama.base() };
    reread(&llama, std::slice::from_ref(&unset), is_default).unwrap();
    let one = [unset.clone(), ("layers_to_transform", json!(1))];
    reread(&llama, &one, |name| name.contains(".1.") && is_default(name)).unwrap();
    let error = reread(&llama, std::slice::from_ref(&unset), |_| true).unwrap_err();
    assert!(error.contains("PEFT does not read it"), "{error}");
    let two = |arch: Arch| ModelShape { layers: 2, ..arch.base() };
    reread(&two(Arch::Gpt2), std::slice::from_ref(&unset), |name| name.contains("c_attn")).unwrap();
    reread(&two(Arch::Phi), std::slice::from_ref(&unset), |name| is_default(name) || name.contains(".fc"))
        .unwrap();
    let error = reread(&two(Arch::SmolLm3), &[unset], is_default).unwrap_err();
    assert!(
        error.contains("target_modules") && error.contains("no default for models of type `smollm3`"),
        "{error}"
    );
}

#[test]
fn ranks_that_no_adapter_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for rank in [0, 1 << 40, u64::MAX] {
        write(dir.path(), Path::new("base"), &Arch::Llama.base(), &[("r", json!(rank))], |_| true);
        let error = PeftDirectory::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("`r`: ") && error.contains("not a rank from 1 to 65536"), "{error}");
    }
}

#[test]
fn regular_expressions_that_python_may_read_otherwise_are_refused() {
    let shape = ModelShape { layers: 1, ..Arch::Llama.base() };
    for (pattern, why) in [
        ("(?i).*Q_PROJ", "has \"(?i\""),
        (r"(?P<a>.*)_proj", "has \"(?P\""),
        (r"(.).*\1_proj", r#"has "\\1""#),
        (".*++_proj", "has \"+\""),
        (".*_proj{,2}", "has \"{,2}\""),
        (".*{2}?_proj", "has \"{2}\""),
        ("[[:alpha:].0_]+", "has \"[\""),
        ("[]a].*", "has \"[]\""),
        ("[a--b].*", "has \"--\""),
        (r".*_proj\'", r#"has "\\'""#),
        ("(*FAIL)", "has \"*\""),
        (".*(_proj", "is not valid"),
    ] {
        for key in ["target_modules", "exclude_modules"] {
            let error = reread(&shape, &[(key, json!(pattern))], |_| true).unwrap_err();
            assert!(error.contains(key) && error.contains(why), "{pattern}: {error}");
        }
    }
}

#[test]
fn names_and_targets_are_those_that_peft_writes() {
    let shape = ModelShape { layers: 1, ..Arch::Llama.base() };
    let lora = LoraSection { rank: 2, targets: vec!["q".into(), "down".into()], ..LoraSection::default() };
    let names: Vec<String> =
        tensors(&shape, &layout(&shape, &lora).unwrap()).into_iter().map(|tensor| tensor.name).collect();
    assert!(
        names.contains(&"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".into()),
        "{names:?}"
    );
    assert!(
        names.contains(&"base_model.model.model.layers.0.mlp.down_proj.lora_B.weight".into()),
        "{names:?}"
    );
    let written = config(&shape, &lora, Path::new("base")).unwrap();
    assert_eq!(
        (&written["target_modules"], &written["lora_alpha"]),
        (&json!(["down_proj", "q_proj"]), &json!(4))
    );
    // Two layers of GPT-2 have names that end alike.
    let lora = LoraSection { targets: vec!["o".into()], ..lora };
    let shape = ModelShape { layers: 1, ..Arch::Gpt2.base() };
    let written = config(&shape, &lora, Path::new("base")).unwrap();
    assert_eq!(
        (&written["target_modules"], &written["fan_in_fan_out"]),
        (&json!(["attn.c_proj"]), &json!(true))
    );
}

#[test]
fn tokenizer_and_template_beside_an_adapter_come_first() {
    let dir = tempfile::tempdir().unwrap();
    let (base, adapter) = (dir.path().join("base"), dir.path().join("adapter"));
    let model = json!({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 7,
    });
    let text = |dir: &Path, token: &str| {
        let special = json!({"id": 1, "content": token, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false});
        let file = json!({"added_tokens": [special],
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
        fs_err::write(dir.join(TOKENIZER_FILE), file.to_string()).unwrap();
        fs_err::write(dir.join("chat_template.jinja"), token).unwrap();
    };
    fs_err::create_dir(&base).unwrap();
    fs_err::create_dir(&adapter).unwrap();
    fs_err::write(base.join("config.json"), model.to_string()).unwrap();
    text(&base, "<base>");
    let shape = Source::find(&base).unwrap().shape;
    write(&adapter, &base, &shape, &[], |_| true);
    let check = |token: &str| {
        for source in [
            Source::find(&adapter).unwrap(),
            Source::find(&base).unwrap().with_adapter(Some(&adapter)).unwrap(),
        ] {
            let (tokenizer, inherited) = (source.tokenizer.unwrap(), source.inherited.unwrap());
            assert_eq!(tokenizer.added_token(1), Some(token));
            assert_eq!((inherited.chat_template(), inherited.end_ids()), (Some(token), vec![7]));
        }
        // What a job that starts from the adapter passes on.
        let inherited = Weights::open(&adapter).unwrap().inherited().unwrap();
        assert_eq!(inherited.chat_template(), Some(token));
    };
    check("<base>");
    text(&adapter, "<own>");
    check("<own>");
    // A path that is relative to the working directory is the same in a run that is used from another one.
    let depth = std::env::current_dir().unwrap().components().count();
    let relative = Path::new(&"../".repeat(depth)).join(base.strip_prefix("/").unwrap());
    write(&adapter, &relative, &shape, &[], |_| true);
    let weights = Weights::open(&adapter).unwrap();
    assert!(weights.without_adapter().path().is_absolute(), "{weights:?}");
}
