//! Mixtures: several prepared directories that take turns in fixed shares.

use serde_json::Value;
use xlaunch_tests::{Job, Output};

xlaunch_harness::tests! {
    mixture_trains_alike_on_any_number_of_ranks_and_after_a_resume_and_reports_its_shares,
    sources_that_do_not_fit_together_are_refused;
}

const MIXTURE: &str = "data.train=[{path=\"a\",weight=7},{path=\"b\",weight=3}]";

/// Prepares two directories: `a` of numbers, `b` of letters, each with validation data.
fn job() -> Job {
    let job = Job::new();
    let letter = |i: usize| char::from(b'g' + u8::try_from(i % 17).unwrap());
    let line = |i: usize| format!("{}{}{}\n", letter(i), letter(i / 17), "xyz".repeat(i % 5 + 3));
    job.write("b.txt", (0..289).map(line).collect::<String>());
    prepare(&job, "a", "bytes", "text/a.txt");
    prepare(&job, "b", "bytes", "b.txt");
    job
}

fn prepare(job: &Job, output: &str, tokenizer: &str, input: &str) {
    let args =
        ["data", "prepare", "--tokenizer", tokenizer, "--documents", "line", "--val", "0.2", "--overwrite"];
    let prepared = job.command(&[&args[..], &["--output", output, input]].concat()).output().unwrap();
    assert!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
}

fn run(job: &Job, ranks: &str, settings: &[&str], more: &[&str]) -> Output {
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    job.run(&settings.chain(["--nproc", ranks]).chain(more.iter().copied()).collect::<Vec<_>>())
}

fn mixture_trains_alike_on_any_number_of_ranks_and_after_a_resume_and_reports_its_shares() {
    let job = job();
    let common =
        [MIXTURE, "train.steps=12", "train.eval_every=6", "train.schedule=constant", "train.batch=5"];
    let output = run(&job, "2", &common, &[]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let whole = job.losses();
    // 120 sequences: 84 and 36 of 32 tokens.
    for line in ["data        a: 70.00 %, 2.69K tokens, ", "data        b: 30.00 %, 1.15K tokens, "] {
        assert!(output.stdout.contains(line), "{line} in {}", output.stdout);
    }
    assert!(output.stderr.contains("data source a: 70.00 % of the sequences, "), "{}", output.stderr);
    let metrics = job.metrics();
    let last = metrics.iter().rfind(|line| line["val/loss"].is_f64()).unwrap();
    assert_eq!((last["data/tokens/a"].as_u64(), last["data/tokens/b"].as_u64()), (Some(2688), Some(1152)));
    let [all, a, b] = ["val/loss", "val/loss/a", "val/loss/b"].map(|key| last[key].as_f64().unwrap());
    assert!((all - (0.7 * a + 0.3 * b)).abs() < 1e-5 && (a - b).abs() > 0.01, "{all} {a} {b}");
    let summary = std::fs::read_to_string(job.run_dir().join("summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["sources"][1]["tokens"], 1152);

    // One rank reads the same sequences in each step.
    assert_eq!(run(&job, "1", &[&common[..4], &["train.batch=10"]].concat(), &[]).code, 0);
    let close = job.losses().iter().zip(&whole).all(|(one, two)| (one - two).abs() < 1e-4);
    assert!(close && job.losses().len() == 12, "{:?} {whole:?}", job.losses());

    let saved = [&common[..], &["checkpoint.dir=saved"]].concat();
    assert_eq!(run(&job, "2", &[&saved[..], &["train.steps=5"]].concat(), &[]).code, 0);
    let other = "data.train=[{path=\"a\",weight=6},{path=\"b\",weight=4}]";
    let refused = run(&job, "2", &[&saved[..], &[other]].concat(), &["--resume"]);
    assert!(refused.code == 65 && refused.stderr.contains("the training data was "), "{}", refused.stderr);
    let resumed = run(&job, "2", &saved, &["--resume"]);
    assert!(resumed.stderr.contains("resuming at step 6 "), "{}", resumed.stderr);
    assert_eq!(job.losses(), whole);

    // A pass over the mixture has as many sequences as its sources have together.
    let planned = run(&job, "1", &[MIXTURE, "train.epochs=1", "train.batch=1"], &["--dry-run"]).stdout;
    let rows = |source: &str| -> u64 {
        let alone = format!("data.train=\"{source}\"");
        let planned = run(&job, "1", &[&alone, "train.epochs=1", "train.batch=1"], &["--dry-run"]).stdout;
        planned.lines().find_map(|line| line.strip_prefix("steps ")).unwrap().trim().parse().unwrap()
    };
    let steps = format!("\nsteps         {}\n", rows("a") + rows("b"));
    assert!(planned.contains(&steps), "{steps} in {planned}");
}

fn sources_that_do_not_fit_together_are_refused() {
    let job = job();
    let refused = |mixture: &str, code: i32, texts: &[&str]| {
        job.write("mixed.toml", format!("[model]\nseq = 32\n\n[data]\ntrain = {mixture}\n"));
        let mut command = job.command(&["mixed.toml", "--set", "engine.device=cpu"]);
        let output = xlaunch_tests::Process::spawn(command.env("RUST_BACKTRACE", "0")).wait();
        assert_eq!(output.code, code, "{}", output.stderr);
        texts.iter().for_each(|text| assert!(output.stderr.contains(text), "{text} in {}", output.stderr));
    };
    for weight in ["0", "-1.0", "1e300", "nan", "inf"] {
        let place = "mixed.toml:5:9: data.train: ";
        let mixture = format!("[{{ path = \"a\", weight = 1 }}, {{ path = \"b\", weight = {weight} }}]");
        refused(&mixture, 2, &[place, "b has the weight ", "a number from 1e-100 to 1e100 for each source"]);
    }
    refused("[{ path = \"a\", weight = 1 }, \"b\"]", 2, &["mixed.toml:5:9", "b has no weight"]);
    refused("[{ path = \"a\", wieght = 1 }]", 2, &["mixed.toml:5:", "`wieght` is not a key of a source"]);
    let files = "[{ path = \"a\", weight = 1 }, { path = \"text/*.txt\", weight = 1 }]";
    refused(files, 65, &["data.train: ", "text/*.txt is not a directory"]);
    prepare(&job, "b", "gpt2", "b.txt");
    let hash = |name: &str| {
        let manifest = std::fs::read_to_string(job.path().join(name).join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_str(&manifest).unwrap();
        manifest["tokenizer_xxh3_128"].as_str().unwrap().to_owned()
    };
    let (a, b) = (hash("a"), hash("b"));
    let both = "[{ path = \"a\", weight = 1 }, { path = \"b\", weight = 1 }]";
    refused(both, 65, &["different tokenizers", "a/tokenizer.json", "b/tokenizer.json", &a, &b]);
}
