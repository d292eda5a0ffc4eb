//! Compares models computed by Hugging Face's library and by xlaunch.

use std::path::Path;

use serde_json::Value;
use xlaunch_engine::DType;
use xlaunch_spec::job::Precision;
use xlaunch_tests::{Job, requirements, run_ok, transformers_peer, xlaunch_path};
use xlaunch_worker::model::decode::{Decoder, Row};
use xlaunch_worker::model::{BackendHandle, Model, Rows};
use xlaunch_worker::pretrained::{Device, Source, open_device};

xlaunch_harness::tests! {
    needs requirements::transformers:
    exported_models_have_their_loss_and_logits_in_transformers,
    models_of_transformers_have_their_loss_and_logits_here,
    models_of_every_family_compute_and_train_as_in_transformers,
    muon_trains_as_in_torch,
    packed_chats_train_as_in_transformers,
    exported_tokenizers_are_loaded_by_transformers;
}

/// Maximum difference of losses, and of logits, in fp32.
const TOLERANCE: f64 = 1e-4;
/// Evaluate on all windows after the last step.
const EVALUATE: [&str; 6] =
    ["--set", "train.eval_every=1000", "--set", "train.eval_batches=1000", "--set", "checkpoint.async=false"];

/// Runs commands of `peers/huggingface.py`; returns the output of each.
fn judge(commands: &[Vec<String>]) -> Vec<Value> {
    let mut python = transformers_peer("huggingface.py");
    let lines = run_ok(python.env("TRANSFORMERS_VERBOSITY", "error").args(commands.join(&"--".to_owned())));
    let values: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(values.len(), commands.len());
    values
}

fn command(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

fn val_loss(job: &Job, step: u64) -> f64 {
    let state: Value = serde_json::from_slice(&job.checkpoint(step, "state.json")).unwrap();
    state["val_loss"].as_f64().unwrap()
}

/// Exports the newest run; returns the path of the directory.
fn export(job: &Job, args: &[&str]) -> String {
    let args = [&["export", "runs/train/latest", "--output"], args].concat();
    run_ok(&mut job.command(&args)).trim().to_owned()
}

fn assert_close(ours: f64, theirs: &Value, what: &str) {
    let theirs = theirs["loss"].as_f64().unwrap();
    assert!((ours - theirs).abs() <= TOLERANCE, "{what}: {ours} here, {theirs} in transformers");
}

/// Returns the ids of the longest prompt that all models accept, below the smallest vocabulary.
fn prompt() -> Vec<u32> {
    (0..32).map(|i| (i * i * 31 + 7) % 256).collect()
}

/// Runs commands of `peers/huggingface.py`, and returns the output of each. In the same process, it computes the logits
/// after each id of [`prompt`], which are compared with those of the forward pass of training and of cached decoding.
/// Each model is a pair of the model to open here and the model to open there.
fn judge_with_logits(job: &Job, commands: &[Vec<String>], models: &[(String, String)]) -> Vec<Value> {
    let ids: Vec<String> = prompt().iter().map(ToString::to_string).collect();
    let out = |index: usize| path(job, &format!("logits-{index}"));
    let of_logits = models
        .iter()
        .enumerate()
        .map(|(index, (_, theirs))| [command(&["logits", theirs, &out(index)]), ids.clone()].concat());
    let mut judged = judge(&commands.iter().cloned().chain(of_logits).collect::<Vec<_>>());
    judged.truncate(commands.len());
    for (index, (ours, _)) in models.iter().enumerate() {
        let bytes = std::fs::read(out(index)).unwrap();
        let words = bytes.chunks_exact(4).map(|word| word.try_into().unwrap());
        let theirs: Vec<f32> = words.map(f32::from_le_bytes).collect();
        let backend = open_device(Device::Cpu, Precision::Fp32, false).unwrap();
        let model = Source::find(Path::new(ours)).unwrap().load(&backend, &mut |_| {}, &|| false).unwrap();
        for (how, values) in [("forward", forward(&backend, &model)), ("decoding", decoding(&model))] {
            assert_eq!(values.len(), theirs.len(), "{ours}");
            let distance = values.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(f64::from(distance) <= TOLERANCE, "{ours}: logits of {how} differ by {distance:.2e}");
        }
    }
    judged
}

/// Returns the logits after each id of the prompt, computed by the forward pass of training.
fn forward(backend: &BackendHandle, model: &Model) -> Vec<f32> {
    let ids: Vec<i32> = prompt().into_iter().map(u32::cast_signed).collect();
    let tokens = backend.alloc(DType::I32, ids.len()).unwrap();
    backend.write_i32(tokens.all(), &ids).unwrap();
    let acts = model.forward(Rows::new(1, ids.len()), tokens.all()).unwrap();
    let logits = model.logits(&acts.output, 0..ids.len()).unwrap();
    let mut padded = vec![0.0; logits.len()];
    backend.read_f32(logits.all(), &mut padded).unwrap();
    padded.chunks(padded.len() / ids.len()).flat_map(|row| row[..model.shape.vocab].to_vec()).collect()
}

/// Same as [`forward`], computed with a cache: first several ids at once, then one after the other.
fn decoding(model: &Model) -> Vec<f32> {
    let ids = prompt();
    let mut decoder = Decoder::new(model, 1, ids.len(), model.shape.vocab).unwrap();
    let mut values = Vec::new();
    for position in 0..ids.len() {
        if position < ids.len() / 2 {
            decoder.prefill(&[(0, &ids[..=position])]).unwrap();
        } else {
            decoder.set_rows(&[Row { slot: 0, position, token: ids[position] }]).unwrap();
            decoder.step().unwrap();
        }
        let mut logits = vec![0.0; model.shape.vocab];
        decoder.read_logits(0, &mut logits).unwrap();
        values.extend(logits);
    }
    values
}

fn path(job: &Job, name: &str) -> String {
    job.path().join(name).display().to_string()
}

fn exported_models_have_their_loss_and_logits_in_transformers() {
    let scaling = "model.rope_scaling={rope_type=\"llama3\",factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,\
                   original_max_position_embeddings=16}";
    let models = [
        (&["model.arch=gpt2", "model.tied=true", "model.norm_eps=1e-3"][..], "GPT2LMHeadModel"),
        (&["model.arch=gpt2", "model.tied=false", "model.vocab=1100"], "GPT2LMHeadModel"),
        (&["model.tied=true", "model.kv_heads=1", "model.norm_eps=1e-3"], "LlamaForCausalLM"),
        (&["model.tied=false", "model.head_dim=32", "model.rope_theta=300.0"], "LlamaForCausalLM"),
        (&["model.heads=4", "model.kv_heads=2", "model.head_dim=16", scaling], "LlamaForCausalLM"),
    ];
    let train = |model: &[&str]| {
        let job = Job::new();
        job.write("text/val.bin", "some other text, of which this is a line\n".repeat(20));
        let mut args = EVALUATE.to_vec();
        for set in model.iter().chain(&["train.steps=30", "data.val=[\"text/val.bin\"]"]) {
            args.extend(["--set", set]);
        }
        job.run_ok(&args);
        let judged = command(&["loss", &export(&job, &["out"]), &path(&job, "text/val.bin"), "1", "32"]);
        (job, judged)
    };
    let (jobs, commands): (Vec<Job>, Vec<_>) = models.iter().map(|(model, _)| train(model)).unzip();
    let checkpoint = |job: &Job| job.run_dir().join("checkpoints/step-00000030").display().to_string();
    let pairs: Vec<_> = jobs.iter().map(|job| (checkpoint(job), path(job, "out"))).collect();
    for ((job, theirs), (model, class)) in
        jobs.iter().zip(judge_with_logits(&jobs[0], &commands, &pairs)).zip(models)
    {
        assert_eq!(theirs["model"], class);
        assert_close(val_loss(job, 30), &theirs, &format!("{model:?}"));
    }
}

fn models_of_transformers_have_their_loss_and_logits_here() {
    let job = Job::new();
    let cases = judge(&[command(&["make", &path(&job, "theirs")])]).remove(0);
    let ids = (0..5000_u32).flat_map(|i| u16::try_from(i * i % 293).unwrap().to_le_bytes());
    job.write("ids.bin", ids.collect::<Vec<u8>>());
    let data = path(&job, "ids.bin");
    let (mut losses, mut judged) = (Vec::new(), Vec::new());
    for case in cases.as_array().unwrap() {
        let case = case.as_str().unwrap();
        let theirs = path(&job, &format!("theirs/{case}"));
        let several = Path::new(&theirs).join("model.safetensors.index.json").exists();
        assert_eq!(several, case.ends_with("files"), "{case}");
        job.write(
            "train.toml",
            format!(
                "[data]\ntrain = [\"ids.bin\"]\nval = [\"ids.bin\"]\ntokenizer = \"bin\"\n[engine]\ndevice = \"cpu\"\n\
                 [checkpoint]\ninit = \"theirs/{case}\"\n\
                 [train]\nsteps = 1\nwarmup = 0\nlr = 1.2e-38\nweight_decay = 0\n"
            ),
        );
        job.run_ok(&EVALUATE);
        // Convert in both directions.
        for model in [theirs, export(&job, &[&format!("ours/{case}")])] {
            losses.push((val_loss(&job, 1), model.clone()));
            judged.push(command(&["loss", &model, &data, "2", "64"]));
        }
    }
    assert!(losses.len() >= 14);
    let case = |case: &Value| path(&job, &format!("theirs/{}", case.as_str().unwrap()));
    let models: Vec<_> = cases.as_array().unwrap().iter().map(|it| (case(it), case(it))).collect();
    for ((loss, model), theirs) in losses.into_iter().zip(judge_with_logits(&job, &judged, &models)) {
        assert_close(loss, &theirs, &model);
    }
}

/// The whole comparison is `python3 tests/peers/model_families.py compare`; one process compares all families.
fn models_of_every_family_compute_and_train_as_in_transformers() {
    let output =
        run_ok(transformers_peer("model_families.py").args(["compare", "--xlaunch"]).arg(xlaunch_path()));
    let equal = ": equal: bits, load, export, loss, greedy, steps\n";
    assert_eq!(output.matches(equal).count(), 65, "{output}");
    assert_eq!(output.matches(": other head is used: ").count(), 2, "{output}");
    assert_eq!(output.matches(": MXFP4 is decoded: ").count(), 1, "{output}");
}

/// See `tests/peers/muon.py`.
fn muon_trains_as_in_torch() {
    let output = run_ok(transformers_peer("muon.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": equal: ").count(), 8, "{output}");
}

/// See `tests/peers/documents.py`.
fn packed_chats_train_as_in_transformers() {
    let output = run_ok(transformers_peer("documents.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": equal: ").count(), 4, "{output}");
}

fn exported_tokenizers_are_loaded_by_transformers() {
    let job = Job::new();
    job.run_ok(&["--set", "model.vocab=50257", "--set", "train.steps=1"]);
    let bytes = export(&job, &["bytes"]);
    let gpt2 = export(&job, &["gpt2", "--tokenizer", "gpt2"]);
    let text = "hé, <|endoftext|> 12\n\n it's";
    let read = judge(&[command(&["text", &bytes, text]), command(&["text", &gpt2, "Hello world, it's 12"])]);
    let expected: Vec<Value> = text.bytes().map(Value::from).collect();
    assert_eq!((&read[0]["ids"], &read[0]["eos"]), (&Value::from(expected), &Value::Null));
    assert_eq!(read[0]["text"], text);
    assert_eq!(read[1]["ids"], serde_json::json!([15496, 995, 11, 340, 338, 1105]));
    assert_eq!((&read[1]["eos"], &read[1]["length"]), (&50256.into(), &50257.into()));
}
