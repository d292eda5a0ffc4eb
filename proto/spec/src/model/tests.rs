use super::*;

#[test]
fn every_preset_and_family_is_valid() {
    for (name, shape) in &PRESETS {
        shape.check().unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for (number, arch) in Arch::all().enumerate() {
        assert_eq!(arch as usize, number, "the table has the order of the families");
        arch.base().check().unwrap_or_else(|error| panic!("{arch:?}: {error}"));
    }
}

#[test]
fn sizes_override_the_preset_and_kv_heads_follow_heads() {
    let section = ModelSection { heads: Some(2), dim: Some(64), ..Default::default() };
    let shape = section.resolve().unwrap();
    assert_eq!((shape.heads, shape.kv_heads, shape.head_width(), shape.layers), (2, 2, 32, 4));
}

#[test]
fn resolve_names_the_key_of_an_invalid_size() {
    let key = |section: ModelSection| section.resolve().unwrap_err().key;
    assert_eq!(key(ModelSection { dim: Some(130), ..Default::default() }), "model.dim");
    assert_eq!(key(ModelSection { layers: Some(0), ..Default::default() }), "model.layers");
    assert_eq!(key(ModelSection { kv_heads: Some(3), ..Default::default() }), "model.kv_heads");
    assert_eq!(key(ModelSection { preset: Some("huge".into()), ..Default::default() }), "model.preset");
    let large = ModelSection { dim: Some(1 << 20), heads: Some(1 << 12), ..Default::default() };
    assert_eq!(key(ModelSection { layers: Some(1 << 20), ..large.clone() }), "model.dim");
    assert_eq!(key(large), "model.dim");
}

#[test]
fn head_width_that_is_set_need_not_divide_the_model_width() {
    let section = ModelSection { heads: Some(3), head_dim: Some(64), ..Default::default() };
    let shape = section.resolve().unwrap();
    assert_eq!((shape.dim, shape.attention_width(), shape.qkv_width()), (128, 192, 9 * 64));
    let key = |section: ModelSection| section.resolve().unwrap_err().key;
    for invalid in [0, 12, 264, usize::MAX] {
        assert_eq!(key(ModelSection { head_dim: Some(invalid), ..section.clone() }), "model.head_dim");
    }
    assert_eq!(key(ModelSection { head_dim: None, ..section }), "model.dim");
}

#[test]
fn numbers_are_checked() {
    let key = |section: ModelSection| section.resolve().unwrap_err().key;
    for eps in [0.0, -1e-5, 2.0, 1e-50, f64::NAN] {
        assert_eq!(key(ModelSection { norm_eps: Some(eps), ..Default::default() }), "model.norm_eps");
    }
    for theta in [0.0, 0.5, f64::INFINITY, f64::NAN] {
        assert_eq!(key(ModelSection { rope_theta: Some(theta), ..Default::default() }), "model.rope_theta");
    }
    for fraction in [0.0, 0.03, -0.5, 1.01, f64::NAN] {
        let section = ModelSection { rope_fraction: Some(fraction), ..Default::default() };
        assert_eq!(key(section), "model.rope_fraction");
    }
    for cap in [-1.0, f64::INFINITY, f64::NAN] {
        assert_eq!(
            key(ModelSection { logit_softcap: Some(cap), ..Default::default() }),
            "model.logit_softcap"
        );
    }
    for scale in [0.0, -1.0, f64::NAN] {
        assert_eq!(
            key(ModelSection { residual_scale: Some(scale), ..Default::default() }),
            "model.residual_scale"
        );
    }
}

#[test]
fn scaling_of_the_rotation_is_checked() {
    let llama3 = |factor, low, high, original_max_position_embeddings| RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings,
    };
    let yarn = |beta_fast, beta_slow, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 32,
        beta_fast,
        beta_slow,
        attention_factor,
        truncate: true,
    };
    // Heads of 32 elements have 16 pairs.
    let longrope = |pairs, factor, original_max_position_embeddings| RopeScaling::LongRope {
        factor: 4.0,
        original_max_position_embeddings,
        attention_factor: 0.0,
        short_factor: vec![1.0; 16],
        long_factor: vec![factor; pairs],
    };
    let resolve = |scaling: &RopeScaling| {
        ModelSection { rope_scaling: Some(scaling.clone()), ..Default::default() }.resolve()
    };
    for scaling in [
        llama3(0.5, 1.0, 4.0, 8192),
        llama3(8.0, 4.0, 4.0, 8192),
        llama3(8.0, f64::NAN, 4.0, 8192),
        llama3(8.0, 1.0, 4.0, 0),
        RopeScaling::Linear { factor: 0.0 },
        RopeScaling::Dynamic { factor: 2.0, original_max_position_embeddings: 0 },
        yarn(1.0, 32.0, 1.0),
        yarn(32.0, 1.0, -1.0),
        longrope(15, 2.0, 32),
        longrope(16, 0.0, 32),
        longrope(16, f64::NAN, 32),
        longrope(16, 2.0, 1),
    ] {
        assert_eq!(resolve(&scaling).unwrap_err().key, "model.rope_scaling", "{scaling:?}");
    }
    let valid =
        [llama3(8.0, 1.0, 4.0, 8192), yarn(32.0, 1.0, 0.0), longrope(16, 2.0, 32), RopeScaling::Default];
    for scaling in valid {
        assert_eq!(resolve(&scaling).unwrap().rope_scaling, scaling);
    }
}

#[test]
fn keys_without_effect_are_refused() {
    let key = |section: ModelSection| section.resolve().unwrap_err().key;
    let gpt2 = || ModelSection { preset: Some("gpt2-124m".into()), ..Default::default() };
    assert_eq!(key(ModelSection { rope_theta: Some(500.0), ..gpt2() }), "model.rope_theta");
    let rope_scaling = Some(RopeScaling::Linear { factor: 2.0 });
    assert_eq!(key(ModelSection { rope_scaling, ..gpt2() }), "model.rope_scaling");
    assert_eq!(key(ModelSection { window_pattern: Some(2), ..Default::default() }), "model.window_pattern");
    assert_eq!(key(ModelSection { glu_limit: Some(7.0), ..gpt2() }), "model.glu_limit");
    assert_eq!(key(ModelSection { glu_offset: Some(1.0), ..gpt2() }), "model.glu_offset");
    let router = ModelSection { router_logit_bias: Some(true), ..Default::default() };
    assert_eq!(key(router), "model.router_logit_bias");
    let biased = ModelSection { experts: Some(4), mlp_bias: Some(true), ..Default::default() };
    assert!(biased.resolve().is_ok());
    assert_eq!(key(ModelSection { shared_experts: Some(1), ..biased }), "model.mlp_bias");
    let windowed_rope_theta = Some(1e4);
    assert_eq!(key(ModelSection { windowed_rope_theta, ..Default::default() }), "model.windowed_rope_theta");
    let parallel = ModelSection { parallel: Some(Parallel::TwoNorms), ..Default::default() };
    assert_eq!(key(ModelSection { norm_place: Some(NormPlace::Post), ..parallel }), "model.norm_place");
}

#[test]
fn architecture_other_than_the_presets_keeps_its_sizes_only() {
    let preset = ModelSection { preset: Some("llama-1b".into()), ..Default::default() };
    let section = ModelSection { arch: Some(Arch::Gpt2), kv_heads: Some(32), ..preset };
    let shape = section.resolve().unwrap();
    assert_eq!((shape.rope_scaling, shape.positions), (RopeScaling::Default, Positions::Learned));
    assert_eq!((shape.layers, shape.ffn, shape.vocab), (16, 8192, 128_256));
}

#[test]
fn blocks_have_their_own_windows_and_rotation() {
    let gemma = Arch::Gemma3.base();
    let windows: Vec<_> = (0..7).map(|block| gemma.window(block)).collect();
    let local = Some(512);
    assert_eq!(windows, [local, local, local, local, local, None, local]);
    let smollm = Arch::SmolLm3.base();
    assert_eq!([2, 3, 4, 7].map(|block| smollm.is_rotated(block)), [true, false, true, false]);
    assert_eq!(ModelShape { head_dim: 80, rope_fraction: 0.4, ..smollm }.rotated_width(), 32);
}

#[test]
fn models_with_newer_keys_are_told_apart() {
    let known = PRESETS.iter().filter(|(_, shape)| shape.is_known_before_0_4()).map(|(name, _)| *name);
    let known: Vec<_> = known.collect();
    assert!(["byte-tiny", "gpt2-124m", "llama-1b"].iter().all(|name| known.contains(name)), "{known:?}");
    assert!(!["qwen3-0.6b", "gemma3-1b", "mistral-7b"].iter().any(|name| known.contains(name)), "{known:?}");
    let llama = &PRESETS[0].1;
    for changed in [
        ModelShape { qk_norm: QkNorm::Head, ..llama.clone() },
        ModelShape { logit_softcap: 30.0, ..llama.clone() },
        ModelShape { rope_scaling: RopeScaling::Linear { factor: 2.0 }, ..llama.clone() },
        ModelShape { kv_heads: 2, ..Arch::Gpt2.base() },
    ] {
        assert!(!changed.is_known_before_0_4(), "{changed:?}");
    }
}

#[test]
fn shape_of_an_older_checkpoint_is_read() {
    let json = r#"{"arch":"llama","layers":4,"heads":4,"kv_heads":4,"dim":128,"ffn":352,"seq":128,"vocab":256,
                   "tied":true}"#;
    assert_eq!(serde_json::from_str::<ModelShape>(json).unwrap(), PRESETS[0].1);
    for (name, shape) in &PRESETS {
        let json = serde_json::to_vec(shape).unwrap();
        assert_eq!(serde_json::from_slice::<ModelShape>(&json).unwrap(), *shape, "{name}");
    }
    let error = serde_json::from_str::<ModelShape>(&json.replace("\"ffn\":352,", "")).unwrap_err();
    assert!(error.to_string().contains("`ffn` is missing"), "{error}");
}
