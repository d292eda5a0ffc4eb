//! Models that Hugging Face's library and we compute alike.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xlaunch_tests::{Job, Process, requirements};

xlaunch_harness::tests! {
    needs requirements::transformers:
    exported_models_have_their_loss_in_transformers,
    models_of_transformers_have_their_loss_here,
    exported_tokenizers_are_loaded_by_transformers;
}

/// Largest difference of losses in fp32.
const TOLERANCE: f64 = 1e-4;
/// Evaluation on all windows after the last step.
const EVALUATE: [&str; 6] =
    ["--set", "train.eval_every=1000", "--set", "train.eval_batches=1000", "--set", "checkpoint.async=false"];

/// Runs `peers/huggingface.py`; the JSON that it prints, if it prints any.
fn judge(args: &[&str]) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/huggingface.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).args(args).env("HF_HUB_OFFLINE", "1").env("TRANSFORMERS_VERBOSITY", "error");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn val_loss(job: &Job, step: u64) -> f64 {
    let state: Value = serde_json::from_slice(&job.checkpoint(step, "state.json")).unwrap();
    state["val_loss"].as_f64().unwrap()
}

fn export(job: &Job, args: &[&str]) {
    let args = [&["export", "runs/train/latest", "--output"], args].concat();
    let output = Process::spawn(&mut job.command(&args)).wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
}

fn assert_close(ours: f64, theirs: &Value, what: &str) {
    let theirs = theirs["loss"].as_f64().unwrap();
    assert!((ours - theirs).abs() <= TOLERANCE, "{what}: {ours} here, {theirs} in transformers");
}

fn exported_models_have_their_loss_in_transformers() {
    let scaling = "model.rope_scaling={rope_type=\"llama3\",factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,\
                   original_max_position_embeddings=16}";
    for (model, class) in [
        (&["model.arch=gpt2", "model.tied=true", "model.norm_eps=1e-3"][..], "GPT2LMHeadModel"),
        (&["model.arch=gpt2", "model.tied=false", "model.vocab=1100"], "GPT2LMHeadModel"),
        (&["model.tied=true", "model.kv_heads=1", "model.norm_eps=1e-3"], "LlamaForCausalLM"),
        (&["model.tied=false", "model.head_dim=32", "model.rope_theta=300.0"], "LlamaForCausalLM"),
        (&["model.heads=4", "model.kv_heads=2", "model.head_dim=16", scaling], "LlamaForCausalLM"),
    ] {
        let job = Job::new();
        job.write("text/val.bin", "some other text, of which this is a line\n".repeat(20));
        let mut args = EVALUATE.to_vec();
        for set in model.iter().chain(&["train.steps=30", "data.val=[\"text/val.bin\"]"]) {
            args.extend(["--set", set]);
        }
        job.run_ok(&args);
        export(&job, &["out"]);
        let out = job.path().join("out").display().to_string();
        let val = job.path().join("text/val.bin").display().to_string();
        let theirs = judge(&["loss", &out, &val, "1", "32"]);
        assert_eq!(theirs["model"], class);
        assert_close(val_loss(&job, 30), &theirs, &format!("{model:?}"));
    }
}

fn models_of_transformers_have_their_loss_here() {
    let cases = judge(&["cases"]);
    for case in cases.as_array().unwrap() {
        let case = case.as_str().unwrap();
        let job = Job::new();
        let theirs = job.path().join("theirs").display().to_string();
        judge(&["make", case, &theirs]);
        let several = Path::new(&theirs).join("model.safetensors.index.json").exists();
        assert_eq!(several, case.ends_with("files"), "{case}");
        let ids: Vec<u8> =
            (0..5000_u32).flat_map(|i| u16::try_from(i * i % 293).unwrap().to_le_bytes()).collect();
        job.write("ids.bin", ids);
        job.write(
            "train.toml",
            "[data]\ntrain = [\"ids.bin\"]\nval = [\"ids.bin\"]\ntokenizer = \"bin\"\n[engine]\ndevice = \"cpu\"\n\
             [checkpoint]\ninit = \"theirs\"\n[train]\nsteps = 1\nwarmup = 0\nlr = 1.2e-38\nweight_decay = 0\n",
        );
        job.run_ok(&EVALUATE);
        let ids = job.path().join("ids.bin").display().to_string();
        assert_close(val_loss(&job, 1), &judge(&["loss", &theirs, &ids, "2", "64"]), case);
        // And back.
        export(&job, &["ours"]);
        let ours = job.path().join("ours").display().to_string();
        assert_close(val_loss(&job, 1), &judge(&["loss", &ours, &ids, "2", "64"]), case);
    }
}

fn exported_tokenizers_are_loaded_by_transformers() {
    let job = Job::new();
    job.run_ok(&["--set", "model.vocab=50257", "--set", "train.steps=1"]);
    export(&job, &["bytes"]);
    export(&job, &["gpt2", "--tokenizer", "gpt2"]);
    let path = |name: &str| job.path().join(name).display().to_string();
    let text = "hé, <|endoftext|> 12\n\n it's";
    let bytes = judge(&["text", &path("bytes"), text]);
    let expected: Vec<Value> = text.bytes().map(Value::from).collect();
    assert_eq!((&bytes["ids"], &bytes["eos"]), (&Value::from(expected), &Value::Null));
    assert_eq!(bytes["text"], text);
    let gpt2 = judge(&["text", &path("gpt2"), "Hello world, it's 12"]);
    assert_eq!(gpt2["ids"], serde_json::json!([15496, 995, 11, 340, 338, 1105]));
    assert_eq!((&gpt2["eos"], &gpt2["length"]), (&50256.into(), &50257.into()));
}
