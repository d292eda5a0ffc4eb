//! Tests of reading and writing `config.json`.

use xlaunch_spec::model::{Activation, NormKind, PRESETS, QkNorm, Router};

use super::*;
use crate::huggingface::fixtures;

fn read(config: &Value) -> Result<ModelShape, ModelError> {
    parse(Path::new("config.json"), config.to_string().as_bytes())
}

fn write_own(shape: &ModelShape, ids: TokenIds) -> Value {
    Value::Object(write(Family::of(shape.arch), shape, ids, "float32"))
}

fn preset(name: &str) -> ModelShape {
    PRESETS.iter().find(|(preset, _)| *preset == name).unwrap().1.clone()
}

#[test]
fn configuration_that_was_written_is_read_as_the_same_shape() {
    let families: Vec<_> = Arch::all().map(|arch| ("family", arch.base())).collect();
    for (name, preset) in PRESETS.iter().chain(&families) {
        for tied in [true, false] {
            let shape = ModelShape { tied: tied && !preset.head_bias, norm_eps: 1.5e-6, ..preset.clone() };
            let config = write_own(&shape, TokenIds { end_of_text: Some(7), bos: None });
            let longest = match shape.rope_scaling {
                // As in published files, the length is the one that the scaling reaches.
                RopeScaling::Yarn { .. } => 32 * 4096,
                _ => shape.seq,
            };
            assert_eq!(read(&config).unwrap(), ModelShape { seq: longest, ..shape.clone() }, "{name}");
            assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&json!(7), &json!(7)));
            let config = write_own(&shape, TokenIds::default());
            assert!(config["eos_token_id"].is_null() && config.get("eos_token_id").is_some());
        }
    }
    let wide = ModelShape { head_dim: 64, ..PRESETS[0].1.clone() };
    assert_eq!(read(&write_own(&wide, TokenIds::default())).unwrap(), wide);
}

#[test]
fn configurations_of_the_library_are_read_and_written_back() {
    for (name, fixture) in fixtures::all() {
        let shape = fixture.shape();
        let written = write_own(&shape, TokenIds::default());
        assert_eq!(written["architectures"], fixture.config["architectures"], "{name}");
        for key in ["rope_parameters", "layer_types", "no_rope_layers"] {
            assert_eq!(written.get(key), fixture.config.get(key), "{name}: {key}");
        }
        assert_eq!(read(&written).unwrap(), shape, "{name}");
        assert_eq!(family_for(&shape).unwrap().arch, shape.arch, "{name}");
    }
}

#[test]
fn older_names_of_rotary_keys_are_read() {
    let older = |name: &str| {
        let mut config = write_own(&preset(name), TokenIds::default());
        config.as_object_mut().unwrap().remove("rope_parameters");
        config
    };
    for name in ["llama-1b", "pythia-160m", "gemma3-1b", "olmo2-1b", "smollm3-3b", "qwen3-0.6b"] {
        assert_eq!(read(&older(name)).unwrap(), preset(name), "{name}");
    }
    let mut config = older("llama-1b");
    config["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
    assert_eq!(read(&config).unwrap().rope_scaling, RopeScaling::Linear { factor: 2.0 });
    // Families with names of their own have the general ones as well in files of transformers 4.45 to 4.57.
    let mut pythia = older("pythia-160m");
    (pythia["rope_theta"], pythia["partial_rotary_factor"]) = (json!(10000), json!(0.25));
    assert_eq!(read(&pythia).unwrap(), preset("pythia-160m"));
    for (key, value) in [("rope_theta", json!(500)), ("partial_rotary_factor", json!(0.5))] {
        let mut config = pythia.clone();
        config[key] = value;
        assert!(read(&config).unwrap_err().to_string().contains(&format!("`{key}`")), "{key}");
    }
    // Lengths that are missing are those of the model.
    config["rope_scaling"] = json!({"type": "yarn", "factor": 2});
    let RopeScaling::Yarn { original_max_position_embeddings: original, .. } =
        read(&config).unwrap().rope_scaling
    else {
        panic!("not YaRN")
    };
    assert_eq!(original, preset("llama-1b").seq);
    // Two keys of YaRN that count only together, and only without `attention_factor`.
    for (keys, expected) in [
        (json!({"mscale": 0.5}), 0.0),
        (json!({"mscale_all_dim": 2, "mscale": null}), 0.0),
        (json!({"mscale": 0.5, "mscale_all_dim": 2}), (0.05 * 2f64.ln() + 1.0) / (0.2 * 2f64.ln() + 1.0)),
        (json!({"mscale": 0.5, "mscale_all_dim": 2, "attention_factor": 1.5}), 1.5),
    ] {
        config["rope_scaling"] = json!({"type": "yarn", "factor": 2});
        config["rope_scaling"].as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let RopeScaling::Yarn { attention_factor, .. } = read(&config).unwrap().rope_scaling else {
            panic!("not YaRN")
        };
        assert!((attention_factor - expected).abs() < 1e-12, "{keys}: {attention_factor}");
    }
}

#[test]
fn null_head_width_follows_from_the_heads_and_missing_keys_have_the_librarys_values() {
    let config =
        json!({"model_type": "qwen3", "hidden_size": 2048, "head_dim": null, "num_key_value_heads": null});
    let shape = read(&config).unwrap();
    assert_eq!((shape.head_dim, shape.kv_heads, shape.vocab), (64, 32, 151_936));
    assert_eq!(read(&json!({"model_type": "qwen3"})).unwrap().head_dim, 128);
    let mistral = read(&json!({"model_type": "mistral"})).unwrap();
    assert_eq!((mistral.window, mistral.kv_heads, mistral.seq), (4096, 8, 131_072));
    assert_eq!(read(&json!({"model_type": "mistral", "sliding_window": null})).unwrap().window, 0);
    let gemma = read(&json!({"model_type": "gemma2"})).unwrap();
    assert_eq!((gemma.attention_softcap, gemma.window_pattern, gemma.query_scale), (50.0, 2, 0.0));
    // Beyond the whole numbers of 64 bits.
    let far = read(&json!({"model_type": "gemma2", "query_pre_attn_scalar": 1e20})).unwrap();
    assert_eq!(family_for(&far).unwrap().arch, Arch::Gemma2);
}

#[test]
fn model_is_exported_as_another_family_if_its_own_cannot_represent_it() {
    let llama = || preset("byte-tiny");
    let family = |shape: &ModelShape| family_for(shape).map(|family| family.arch);
    for (shape, expected) in [
        (llama(), Arch::Llama),
        (ModelShape { qkv_bias: true, ..llama() }, Arch::Qwen2),
        (ModelShape { qk_norm: QkNorm::Head, ..llama() }, Arch::Qwen3),
        (ModelShape { window: 64, ..llama() }, Arch::Mistral),
        (ModelShape { logit_scale: 0.1, query_scale: 0.3, ..llama() }, Arch::Granite),
        (ModelShape { no_rope_every: 3, ..llama() }, Arch::SmolLm3),
        // The library refuses such a Llama.
        (ModelShape { heads: 3, kv_heads: 3, ..llama() }, Arch::Mistral),
        (ModelShape { norm: NormKind::Layer, rope_fraction: 0.5, ..llama() }, Arch::StableLm),
        (ModelShape { arch: Arch::Qwen3, qk_norm: QkNorm::None, ..llama() }, Arch::Llama),
        (ModelShape { activation: Activation::Relu2, ..llama() }, Arch::Llama),
        (ModelShape { gated: false, ..llama() }, Arch::Arcee),
        // Keys that make no difference.
        (ModelShape { embedding_scale: 128f64.sqrt(), ..Arch::Gemma.base() }, Arch::Gemma),
        (ModelShape { windowed_rope_theta: 0.0, ..Arch::Olmo3.base() }, Arch::Olmo3),
    ] {
        assert_eq!(family(&shape), Ok(expected), "{shape:?}");
    }
    for (shape, key, value) in [
        (ModelShape { attention_softcap: 5.0, ..llama() }, "model.attention_softcap", "5.0"),
        (ModelShape { qk_norm: QkNorm::Head, rope_fraction: 0.5, ..llama() }, "model.qk_norm", "head"),
        (ModelShape { gated: true, ..Arch::Gpt2.base() }, "model.gated", "true"),
    ] {
        assert_eq!(family(&shape), Err((key, value.to_owned())));
    }
}

#[test]
fn inherited_settings_are_written_back_unless_training_decides_them() {
    let shape = ModelShape { seq: 128, arch: Arch::Mistral, ..PRESETS[0].1.clone() };
    let ids = TokenIds { end_of_text: Some(7), bos: Some(1) };
    let written = write(Family::of(shape.arch), &shape, ids, "float32");
    let mut original = written.clone();
    original.extend(
        json!({
            "model_type": "mistral", "eos_token_id": [2, 32000], "pad_token_id": 5, "max_position_embeddings": 512,
            "dtype": "bfloat16", "transformers_version": "4.1", "bos_token_id": 1, "architectures": ["M"],
            "auto_map": {"AutoModelForCausalLM": "modeling_m.M"},
        })
        .as_object()
        .unwrap()
        .clone(),
    );
    let config = inherit_config(written.clone(), &original, &shape, ids);
    for (key, value) in [
        ("eos_token_id", json!([2, 32000, 7])),
        ("pad_token_id", json!(5)),
        ("bos_token_id", json!(1)),
        ("max_position_embeddings", json!(512)),
        ("model_type", json!("mistral")),
        ("dtype", json!("float32")),
        ("architectures", json!(["M"])),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert!(config.get("transformers_version").is_none() && config.get("auto_map").is_none());
    assert_eq!(inherit(json!({"a": 1}), &Map::new(), ids), json!({"a": 1}));
    // Only tokens are inherited from a configuration of another model.
    original["num_hidden_layers"] = json!(5);
    let config = inherit_config(written, &original, &shape, ids);
    assert_eq!((&config["num_hidden_layers"], &config["pad_token_id"]), (&json!(4), &json!(5)));
    assert_eq!(config["architectures"], json!(["MistralForCausalLM"]));
}

#[test]
fn ids_that_a_generation_config_lacks_are_those_of_the_configuration() {
    let object = |value: Value| value.as_object().unwrap().clone();
    let ids = TokenIds { end_of_text: Some(7), bos: None };
    let config =
        object(json!({"bos_token_id": null, "eos_token_id": [3, 4], "pad_token_id": 5, "vocab_size": 9}));
    assert_eq!(
        generation(ids, &config, &Map::new()),
        json!({"bos_token_id": null, "eos_token_id": [3, 4, 7], "pad_token_id": 5, "do_sample": false})
    );
    let read = object(json!({"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.5}));
    assert_eq!(
        generation(ids, &config, &read),
        json!({"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 5, "temperature": 0.5, "do_sample": false})
    );
    assert_eq!(
        generation(ids, &Map::new(), &Map::new()),
        json!({"bos_token_id": 7, "eos_token_id": 7, "do_sample": false})
    );
}

#[test]
fn settings_are_inherited_although_the_model_is_longer_and_its_rotation_depends_on_the_length() {
    let rope_scaling = RopeScaling::Yarn {
        factor: 2.0,
        original_max_position_embeddings: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.0,
        truncate: true,
    };
    let shape = ModelShape { seq: 128, rope_scaling, ..PRESETS[0].1.clone() };
    let ids = TokenIds::default();
    let written = write(Family::of(shape.arch), &shape, ids, "float32");
    let mut original = written.clone();
    for key in ["rope_theta", "rope_scaling"] {
        original.remove(key);
    }
    original["max_position_embeddings"] = json!(64);
    original["rope_parameters"] = json!({"rope_type": "yarn", "factor": 2, "rope_theta": 10000});
    original["attention_dropout"] = json!(0.1);
    let read_shape = read(&Value::Object(original.clone())).unwrap();
    assert_eq!(ModelShape { seq: 128, ..read_shape }, shape);
    let config = inherit_config(written, &original, &shape, ids);
    assert_eq!(
        (&config["attention_dropout"], &config["max_position_embeddings"]),
        (&json!(0.1), &json!(128))
    );
    assert_eq!(read(&config).unwrap(), shape);
    // The length of a model that is long enough is kept, although YaRN targets a multiple of it.
    let shape = ModelShape { seq: 32, ..shape };
    let written = write(Family::of(shape.arch), &shape, ids, "float32");
    let config = inherit_config(written, &original, &shape, ids);
    assert_eq!(config["max_position_embeddings"], 64);
    assert_eq!(config["rope_parameters"], original["rope_parameters"]);
}

#[test]
fn keys_of_published_models_without_effect_are_read() {
    for (arch, keys) in [
        // GPT-2 medium and XL, DistilGPT-2.
        (Arch::Gpt2, json!({"n_special": 0, "predict_special_tokens": true})),
        (Arch::Gpt2, json!({"output_past": true, "_num_labels": 1})),
        // Gemma 2 9B.
        (Arch::Gemma2, json!({"sliding_window_size": 8})),
        // Dolly.
        (Arch::GptNeoX, json!({"custom_pipelines": {"text-generation": {"impl": "pipeline.Generation"}}})),
        (Arch::Mistral, json!({"_flash_attn_2_enabled": true, "is_causal": true})),
    ] {
        let mut config = write_own(&arch.base(), TokenIds::default());
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        assert_eq!(read(&config).unwrap(), arch.base(), "{keys}");
    }
}

#[test]
fn published_configurations_are_read_as_presets() {
    let gpt2 = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257
    });
    assert_eq!(read(&gpt2).unwrap(), preset("gpt2-124m"));
    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
    });
    assert_eq!(read(&llama).unwrap(), ModelShape { seq: 131_072, ..preset("llama-1b") });
    let smollm = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
        "rope_theta": 100000, "tie_word_embeddings": true, "vocab_size": 49152
    });
    assert_eq!(read(&smollm).unwrap(), ModelShape { seq: 8192, ..preset("smollm2-135m") });
    let qwen3 = json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936
    });
    assert_eq!(read(&qwen3).unwrap(), ModelShape { seq: 40960, ..preset("qwen3-0.6b") });
    let gemma3 = json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true,
        "vocab_size": 262144
    });
    assert_eq!(read(&gemma3).unwrap(), ModelShape { seq: 32768, ..preset("gemma3-1b") });
    let pythia = json!({
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": true,
        "use_parallel_residual": true, "vocab_size": 50304
    });
    assert_eq!(read(&pythia).unwrap(), preset("pythia-160m"));
}

#[test]
fn blocks_of_exaone_4_with_a_window_are_those_with_rotation() {
    // As EXAONE 4.0 32B is published, but for its sizes: the letters repeat as `layer_types` say.
    let kinds = |letters: &str| -> Vec<&str> {
        letters.chars().map(|kind| if kind == 'L' { "sliding_attention" } else { "full_attention" }).collect()
    };
    let mut config = json!({
        "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 5120,
        "layer_types": kinds("LLLGLLLG"), "max_position_embeddings": 131072, "model_type": "exaone4",
        "num_attention_heads": 40, "num_hidden_layers": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "vocab_size": 102400
    });
    let shape = read(&config).unwrap();
    assert_eq!((shape.window, shape.window_pattern, shape.no_rope_every), (4096, 4, 4));
    config["layer_types"] = json!(kinds("LGGGLGGG"));
    assert!(read(&config).unwrap_err().to_string().contains("layer_types"));
    // Without these, letters say nothing to the library's class either.
    config["layer_types"] = Value::Null;
    assert!(read(&config).unwrap_err().to_string().contains("sliding_window_pattern"));
    // A window that no block has, and none.
    config["layer_types"] = json!(kinds("GGGGGGGG"));
    let still = read(&config).unwrap();
    assert_eq!((still.window, still.no_rope_every), (0, 1));
    config["sliding_window"] = Value::Null;
    let whole = read(&config).unwrap();
    assert_eq!((whole.window, whole.no_rope_every), (0, 0));
    for shape in [shape, still, whole] {
        assert_eq!(read(&write_own(&shape, TokenIds::default())).unwrap(), shape);
    }
    let some = ModelShape { no_rope_every: 2, ..Arch::Exaone4.base() };
    assert_eq!(family_for(&some).unwrap_err().0, "model.no_rope_every");
}

#[test]
fn longrope_of_phi_3_is_read_from_files_of_all_versions_and_written_for_them() {
    // As Phi 4 mini is published, but for its factors.
    let (short, long): (Vec<f64>, Vec<f64>) = (0..48).map(|pair| (1.0, 1.0 + f64::from(pair) * 0.75)).unzip();
    let phi4 = json!({
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 199999, "embd_pdrop": 0.0,
        "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": long.clone(), "short_factor": short.clone(), "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": true, "vocab_size": 200064
    });
    let shape = read(&phi4).unwrap();
    let expected = RopeScaling::LongRope {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        attention_factor: 0.0,
        short_factor: short,
        long_factor: long,
    };
    assert_eq!((&shape.rope_scaling, shape.rope_fraction, shape.seq), (&expected, 0.75, 131_072));
    // Older names of the same scaling.
    for name in ["su", "yarn"] {
        let mut older = phi4.clone();
        older["rope_scaling"]["type"] = json!(name);
        assert_eq!(read(&older).unwrap(), shape, "{name}");
    }
    // Training sets another length of sequences, which changes no factor.
    let trained = write_own(&ModelShape { seq: 2048, ..shape.clone() }, TokenIds::default());
    assert_eq!(read(&trained).unwrap(), shape);
    // Version 4 accepts these keys only.
    let keys: Vec<_> = trained["rope_scaling"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["long_factor", "rope_type", "short_factor"]);
    assert_eq!(trained["max_position_embeddings"], json!(131_072));
    for (key, value, expected) in [
        ("original_max_position_embeddings", json!(8192), "outside of the table, 4096, instead"),
        ("factor", json!(16), "max_position_embeddings / original_max_position_embeddings is 32"),
        (
            "short_factor",
            json!([1, 2]),
            "short_factor has 2 elements; expected one above 0 for each of the 48",
        ),
        ("long_factor", json!(["1"]), "`rope_parameters.long_factor`: it must be a list of numbers"),
        (
            "long_factor",
            Value::Null,
            "`rope_parameters.long_factor`: null is not supported: it must be a list",
        ),
        ("rope_type", json!("linear"), "only `default` and `longrope` are supported in this family"),
    ] {
        let mut config = trained.clone();
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"][key] = value;
        let error = read(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
}

/// Changes a key of a written configuration, `table.key` within a table, and expects a refusal that names it.
fn refused(shape: &ModelShape, key: &str, value: Value) -> String {
    let mut config = write_own(shape, TokenIds::default());
    let (path, last) = key.rsplit_once('.').map_or((None, key), |(path, last)| (Some(path), last));
    let mut table = &mut config;
    for name in path.into_iter().flat_map(|path| path.split('.')) {
        table = &mut table[name];
    }
    table[last] = value.clone();
    let error = read(&config).expect_err(&format!("{key} = {value}"));
    let ModelError::Config { key: named, problem, .. } = &error else { panic!("{error}") };
    assert_eq!(named, key, "{error}");
    problem.clone()
}

#[test]
fn keys_of_other_programs_are_accepted_or_named_together() {
    let mut config = write_own(&preset("llama-1b"), TokenIds::default());
    config["layer_types"] = json!(vec!["full_attention"; 16]);
    config["model_name"] = json!("unsloth/Llama-3.2-1B");
    config["tokenizer_model_max_length"] = json!(4096);
    read(&config).unwrap();
    config["my_key"] = json!(1);
    config["our_key"] = json!("x");
    let error = read(&config).unwrap_err().to_string();
    assert!(
        error.contains("`my_key`: 1 is not supported") && error.ends_with("holds for \"our_key\""),
        "{error}"
    );
}

#[test]
fn what_this_trainer_does_not_compute_is_refused_by_its_key() {
    for (key, value) in [
        ("activation_function", json!("relu")),
        ("scale_attn_weights", json!(false)),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("add_cross_attention", json!(true)),
        ("n_head", json!(7)),
        ("n_layer", json!(-1)),
        ("n_layer", json!(1u64 << 40)),
        ("n_inner", json!("wide")),
        ("layer_norm_epsilon", json!(0)),
        ("quantization_config", json!({"bits": 4})),
        ("rope_theta", json!(1e4)),
        ("is_causal", json!(false)),
        ("is_causal", json!(null)),
    ] {
        refused(&preset("gpt2-124m"), key, value);
    }
    for (key, value) in [
        ("model_type", json!("mamba\u{1b}[31m")),
        ("hidden_act", json!("relu6")),
        ("sliding_window", json!(4096)),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!(vec!["sliding_attention"; 16])),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_theta", json!(7)),
        ("rope_scaling", json!({"rope_type": "default"})),
        ("rope_parameters.rope_type", json!("longrope")),
        ("rope_parameters.mscale", json!(1.0)),
        ("rope_parameters.partial_rotary_factor", json!(0.5)),
        ("num_key_value_heads", json!(5)),
        ("head_dim", json!(12)),
        ("tie_word_embeddings", json!("yes")),
        ("num_experts", json!(8)),
        ("kv_lora_rank", json!(512)),
        ("layer_scale", json!(1)),
    ] {
        refused(&preset("llama-1b"), key, value);
    }
    for (arch, key, value) in [
        (Arch::Mistral, "sliding_window", json!(0)),
        (Arch::Mistral, "attention_bias", json!(true)),
        (Arch::Qwen2, "layer_types", json!(["full_attention"])),
        (Arch::Qwen3, "layer_types", json!(vec!["linear_attention"; 4])),
        (Arch::SmolLm3, "no_rope_layers", json!([0, 1, 1, 1])),
        (Arch::SmolLm3, "no_rope_layer_interval", json!(0)),
        (Arch::Olmo3, "rope_parameters.rope_theta", json!(1e4)),
        (Arch::Olmo3, "rope_parameters.sliding_attention", json!({"rope_type": "linear", "factor": 2.0})),
        (Arch::Gemma, "hidden_activation", json!("silu")),
        (Arch::Gemma, "use_bidirectional_attention", json!(true)),
        (Arch::Gemma2, "final_logit_softcapping", json!(-1)),
        (Arch::Gemma2, "query_pre_attn_scalar", json!(0)),
        (Arch::Gemma3, "rope_local_base_freq", json!(3.0)),
        (Arch::Gemma3, "attn_logit_softcapping", json!(50.0)),
        (Arch::Phi, "qk_layernorm", json!(true)),
        (Arch::Phi, "tie_word_embeddings", json!(true)),
        (Arch::Phi, "rope_parameters.partial_rotary_factor", json!(0.1)),
        (Arch::Phi3, "rope_parameters.rope_type", json!("llama3")),
        (Arch::StableLm, "qk_layernorm", json!(true)),
        (Arch::StableLm, "head_dim", json!(16)),
        (Arch::GptNeoX, "num_key_value_heads", json!(2)),
        (Arch::GptNeoX, "rotary_pct", json!(0.9)),
        (Arch::Granite, "logits_scaling", json!(0)),
    ] {
        refused(&arch.base(), key, value);
    }
    let mut config = write_own(&Arch::Qwen2.base(), TokenIds::default());
    config.as_object_mut().unwrap().remove("layer_types");
    for (key, value) in
        [("use_sliding_window", json!(true)), ("sliding_window", json!(8)), ("max_window_layers", json!(2))]
    {
        config[key] = value;
    }
    assert!(read(&config).unwrap_err().to_string().contains("`max_window_layers`"));
    let mut config = write_own(&PRESETS[0].1, TokenIds::default());
    config["rope_scaling"] = json!({"type": "llama3"});
    assert!(read(&config).unwrap_err().to_string().contains("`rope_scaling.factor`"));
    // Another name for the same function, and keys that switch something off.
    let mut config = write_own(&PRESETS[0].1, TokenIds::default());
    (config["hidden_act"], config["use_mrope"], config["experts"]) =
        (json!("swish"), json!(false), json!([]));
    assert_eq!(read(&config).unwrap(), PRESETS[0].1);
}

#[test]
fn other_functions_of_experts_and_other_quantizations_are_refused() {
    for (arch, key, value) in [
        (Arch::GptOss, "swiglu_limit", json!(0)),
        (Arch::GptOss, "swiglu_alpha", json!(1)),
        (Arch::GptOss, "hidden_act", json!("gelu")),
        (Arch::GptOss, "quantization_config", json!({"quant_method": "fp8"})),
        (Arch::Mixtral, "quantization_config", json!({"quant_method": "mxfp4"})),
    ] {
        refused(&arch.base(), key, value);
    }
}

/// The `config.json` of openai/gpt-oss-20b.
#[test]
fn published_configuration_of_gpt_oss_is_read() {
    let kinds = ["sliding_attention", "full_attention"];
    let config = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": (0..24).map(|block| kinds[block % 2]).collect::<Vec<_>>(),
        "max_position_embeddings": 131_072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "pad_token_id": 199_999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false,
        },
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
        "vocab_size": 201_088,
    });
    let shape = read(&config).unwrap();
    assert_eq!(ModelShape { seq: 2048, ..shape.clone() }, preset("gpt-oss-20b"));
    assert_eq!([0, 1, 22, 23].map(|block| shape.window(block)), [Some(128), None, Some(128), None]);
    assert_eq!((shape.experts_per_token, shape.head_dim, shape.glu_limit), (4, 64, 7.0));
    assert!(shape.attention_sinks && shape.router_logit_bias && shape.mlp_bias && shape.qkv_bias);
    // Without keys of rotation, the library's class has these.
    let mut without = config.clone();
    if let Some(keys) = without.as_object_mut() {
        keys.retain(|key, _| {
            !["rope_scaling", "rope_theta", "layer_types", "swiglu_limit"].contains(&&**key)
        });
    }
    assert_eq!(read(&without).unwrap(), shape);
    // An export is not quantized.
    assert_eq!(read(&write_own(&shape, TokenIds::default())).unwrap(), shape);
}

#[test]
fn other_types_of_models_are_refused_with_the_nearest_supported_one() {
    for (model_type, expected) in [
        ("qwen3_next", &["linear attention", "`qwen3`"][..]),
        ("qwen3_5", &["linear attention", "`qwen3`"]),
        ("llama4", &["experts", "`mixtral`"]),
        ("deepseek_v3", &["latent attention", "`glm4_moe`"]),
        ("glm4_moe_lite", &["latent attention", "`glm4_moe`"]),
        ("granitemoe", &["experts", "`mixtral`"]),
        ("olmo", &["`olmo2`"]),
        ("falcon", &["`gpt_neox`"]),
        ("mpt", &["biases"]),
        ("gemma3", &["images", "gemma3_text"]),
        ("mistral4", &["latent attention", "`glm4_moe`"]),
        ("nanochat", &["norms have no weights", "`qwen3`"]),
        ("nemotron_h", &["state space", "`llama`"]),
        ("ernie4_5_moe", &["experts", "`glm4_moe`"]),
        ("helium", &["another order", "`ernie4_5`"]),
        ("glm4v", &["images", "`glm4`"]),
        ("ministral3", &["scaled by their position", "`ministral`"]),
        ("lfm2", &["convolutions", "`qwen3`"]),
        ("minimax_m2", &["another architecture", "`glm4_moe`"]),
        ("never_heard_of", &["supported are llama, gpt2"]),
    ] {
        let problem = refused(&preset("byte-tiny"), "model_type", json!(model_type));
        for text in expected {
            assert!(problem.contains(text), "{model_type}: {text} in {problem}");
        }
    }
    let config = json!({"model_type": "llava", "text_config": {"model_type": "qwen2"}});
    let error = read(&config).unwrap_err().to_string();
    assert!(error.contains("images") && error.contains("type is `qwen2`"), "{error}");
}

#[test]
fn keys_that_change_routing_are_refused() {
    for (case, key, value) in [
        ("mixtral", "router_jitter_noise", json!(0.1)),
        ("mixtral", "output_router_logits", json!(true)),
        ("mixtral", "num_local_experts", json!(0)),
        ("mixtral", "num_experts_per_tok", json!(5)),
        ("mixtral", "norm_topk_prob", json!(true)),
        ("olmoe", "clip_qkv", json!(8.0)),
        ("qwen3_moe", "mlp_only_layers", json!([0])),
        ("qwen3_moe", "decoder_sparse_step", json!(2)),
        ("qwen3_moe", "use_sliding_window", json!(true)),
        ("qwen3_moe", "n_shared_experts", json!(1)),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(50)),
        ("qwen2_moe", "mlp_only_layers", json!([0])),
        ("qwen2_moe", "use_sliding_window", json!(true)),
        ("glm4_moe", "n_group", json!(2)),
        ("glm4_moe", "topk_group", json!(2)),
    ] {
        let mut config = fixtures::all().remove(case).unwrap().config;
        config[key] = value;
        let error = read(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")), "{case} {key}: {error}");
    }
}

#[test]
fn models_with_experts_of_other_families_are_exported_as_one_that_has_them() {
    let name = |shape: &ModelShape| family_for(shape).map(|family| family.model_type);
    let own = Arch::Llama.base();
    let llama = ModelShape { experts: 4, expert_ffn: 64, tied: false, ..own.clone() };
    assert_eq!(name(&llama), Ok("mixtral"));
    let qwen3 = ModelShape { qk_norm: QkNorm::Head, normalise: false, ..llama.clone() };
    assert_eq!(name(&qwen3), Ok("qwen3_moe"));
    let shared = ModelShape { shared_experts: 2, ..llama.clone() };
    let gated = ModelShape { shared_gate: true, normalise: false, ..shared.clone() };
    assert_eq!(name(&gated), Ok("qwen2_moe"));
    let biased =
        ModelShape { router: Router::Sigmoid, router_bias: true, routed_scale: 2.5, ..shared.clone() };
    assert_eq!(name(&biased), Ok("glm4_moe"));
    let refused = |shape: ModelShape| name(&shape).unwrap_err().0;
    assert_eq!(refused(ModelShape { shared_gate: true, ..biased }), "model.experts");
    assert_eq!(refused(ModelShape { router: Router::Sigmoid, ..llama }), "model.experts");
    let mixtral = Arch::Mixtral.base();
    assert_eq!(refused(ModelShape { router: Router::Sigmoid, ..mixtral.clone() }), "model.router");
    assert_eq!(refused(ModelShape { dense_layers: 1, ..mixtral }), "model.dense_layers");
    assert_eq!(name(&ModelShape { experts_per_token: 7, ..own }), Ok("llama"));
}

#[test]
fn text_that_is_not_an_object_and_control_characters_give_safe_errors() {
    for text in [&b"[1]"[..], b"{", b"", b"\xff", b"{\"model_type\": \"\x1b[31m\"}"] {
        let error = parse(Path::new("config.json"), text).unwrap_err().to_string();
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }
    let error = read(&json!({"model_type": "\u{1b}[31m"})).unwrap_err().to_string();
    assert!(!error.chars().any(char::is_control), "{error:?}");
}
