//! `xlaunch data`: output for users, exit codes, full disks, and preparations that are killed.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_data::Tokenizer;
use xlaunch_tests::{Job, Output, Process, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    prepared_data_is_shown_and_verified,
    standard_input_is_prepared_as_jsonl,
    wrong_input_ends_with_its_exit_code,
    tokenizer_with_few_merges_is_opened_without_a_message,
    documents_are_packed_for_training_and_a_resumed_run_continues,
    data_of_more_files_than_a_process_may_open_is_prepared_and_trained_on,
    files_that_are_replaced_during_training_are_read_as_they_were,
    killed_preparations_are_complete_or_refused;
    needs requirements::mount_namespace:
    full_disk_leaves_nothing_that_is_accepted;
}

/// Variable with the number of kills; 100 take about a minute.
const KILLS: &str = "XLAUNCH_TEST_KILLS";
const DEFAULT_KILLS: u32 = 20;

fn data(job: &Job, args: &[&str]) -> Output {
    Process::spawn(job.command(&[&["data"], args].concat()).env("RUST_BACKTRACE", "0")).wait()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.code, 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}

fn prepared_data_is_shown_and_verified() {
    let job = Job::new();
    let prepare =
        ["prepare", "--tokenizer", "gpt2", "--documents", "line", "--val", "0.2", "--output", "out"];
    let output = data(&job, &[&prepare[..], &["text"]].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stdout.starts_with("out: tokenizer gpt2, 50257 ids\n"), "{}", output.stdout);
    let report = json(&data(&job, &["inspect", "--json", "out"]));
    let (train, val) = (&report[0]["parts"][0], &report[0]["parts"][1]);
    let documents = |part: &Value| part["documents"].as_u64().unwrap();
    assert_eq!(documents(train) + documents(val), 400);
    assert!((40..120).contains(&documents(val)), "{val}");
    assert_eq!(
        (train["verified"].as_bool(), train["samples"][0].as_str()),
        (Some(true), Some("line 0: 0 and 0"))
    );
    let table = data(&job, &["inspect", "out", "out/val_000001.bin"]);
    assert!(table.stdout.contains("match") && table.stdout.contains("val_000001.bin"), "{}", table.stdout);
    // A complete directory is overwritten only on request.
    let again = data(&job, &[&prepare[..], &["text"]].concat());
    assert_eq!(again.code, 2);
    assert!(again.stderr.contains("--overwrite"), "{}", again.stderr);
    assert_eq!(data(&job, &[&prepare[..], &["--overwrite", "text/*.txt"]].concat()).code, 0);
    let shard = job.path().join("out/train_000001.bin");
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[2000] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let damaged = data(&job, &["inspect", "out"]);
    assert_eq!(damaged.code, 65);
    assert!(damaged.stderr.contains("out/train_000001.bin: damaged"), "{}", damaged.stderr);
}

/// The hash library of the fast encoder prints that its first attempt to hash the pairs of these merges fails.
fn tokenizer_with_few_merges_is_opened_without_a_message() {
    let job = Job::new();
    let mut file: Value = serde_json::from_str(&Tokenizer::gpt2().to_json()).unwrap();
    file["added_tokens"] = Value::Array(Vec::new());
    let model = &mut file["model"];
    model["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < 512);
    model["merges"].as_array_mut().unwrap().truncate(256);
    let mut last =
        model["merges"][255].as_array().unwrap().iter().filter_map(Value::as_str).collect::<String>();
    for (id, letter) in (512..).zip("!zzzzzz".chars()) {
        model["merges"].as_array_mut().unwrap().push([last.clone(), letter.into()].into_iter().collect());
        last.push(letter);
        model["vocab"].as_object_mut().unwrap().insert(last.clone(), id.into());
    }
    job.write("tokenizer.json", file.to_string());
    let prepare = ["prepare", "--tokenizer", "tokenizer.json", "--eot", "none", "--output", "out", "text"];
    let output = data(&job, &prepare);
    assert!(output.code == 0 && !output.stderr.contains("slots"), "{}", output.stderr);
}

fn documents_are_packed_for_training_and_a_resumed_run_continues() {
    let job = Job::new();
    let prepare =
        ["prepare", "--tokenizer", "gpt2", "--documents", "line", "--val", "0.2", "--output", "out", "text"];
    assert_eq!(data(&job, &prepare).code, 0);
    let run = |keys: &[&str], more: &[&str]| {
        let all = [
            "data.train=\"out\"",
            "data.documents=\"packed\"",
            "model.vocab=50257",
            "train.schedule=\"constant\"",
            "train.eval_every=4",
        ];
        let args = all.iter().chain(keys).flat_map(|key| ["--set", key]);
        job.run(&args.chain(["--nproc", "2"]).chain(more.iter().copied()).collect::<Vec<_>>())
    };
    let output = run(&[], &[]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stderr.contains(" documents packed into "), "{}", output.stderr);
    assert!(output.stderr.contains(" % padding"), "{}", output.stderr);
    let whole = job.losses();
    let saved = "checkpoint.dir=\"saved\"";
    assert_eq!(run(&[saved, "train.steps=4"], &[]).code, 0);
    assert_eq!(job.losses(), whole[..4]);
    assert_eq!(run(&[saved], &["--resume"]).code, 0);
    assert_eq!(job.losses(), whole);
    let refused = run(&[saved, "train.steps=12", "data.documents=\"joined\""], &["--resume"]);
    assert!(refused.stderr.contains("data.documents was packed, is now joined"), "{}", refused.stderr);
}

fn standard_input_is_prepared_as_jsonl() {
    let job = Job::new();
    let args =
        ["data", "prepare", "--tokenizer", "bytes", "--output", "out", "--field", "body", "--json", "-"];
    let mut command = job.command(&args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"{\"body\": \"caf\\u00e9 \\u001b[2J\"}\n").unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let manifest: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((manifest["train"]["tokens"].as_u64(), manifest["vocab"].as_u64()), (Some(10), Some(256)));
    let shown = data(&job, &["inspect", "out"]).stdout;
    assert!(shown.contains("caf\u{e9} \\u{1b}[2J"), "control characters are escaped: {shown:?}");
}

fn wrong_input_ends_with_its_exit_code() {
    let job = Job::new();
    job.write("latin1.txt", b"caf\xe9");
    job.write("bad.jsonl", "{\"text\": \"a\"}\n{\"body\": 1}\n");
    job.write("cut.gz", b"\x1f\x8b\x08\x00\x00");
    job.write("hostile.json", "[".repeat(1 << 20));
    job.write("foreign/notes.txt", "mine");
    let refused = |code: i32, message: &str, args: &[&str]| {
        let output = data(&job, &[&["prepare"], args].concat());
        assert_eq!(output.code, code, "{}", output.stderr);
        assert!(output.stderr.contains(message), "{}", output.stderr);
        assert!(
            !output.stderr.contains("internal error in thread") && !job.path().join("out").exists(),
            "{}",
            output.stderr
        );
    };
    let gpt2 = |input: &'static str| ["--tokenizer", "gpt2", "--output", "out", input];
    refused(65, "latin1.txt: not valid UTF-8 at byte 3", &gpt2("latin1.txt"));
    refused(65, "bad.jsonl:2: the object has no field `text`", &gpt2("bad.jsonl"));
    refused(65, "cut.gz: damaged or truncated gzip data", &gpt2("cut.gz"));
    refused(2, "failed to read missing.txt", &gpt2("missing.txt"));
    refused(2, "no file matches `text/*.md`", &gpt2("text/*.md"));
    refused(
        2,
        "expected bytes, gpt2, a tokenizer.json or its directory",
        &["--tokenizer", "gpt3", "--output", "out", "text"],
    );
    refused(2, "hostile.json: not valid JSON", &["--tokenizer", "hostile.json", "--output", "out", "text"]);
    refused(2, "`notes.txt`", &["--tokenizer", "gpt2", "--output", "foreign", "--overwrite", "text"]);
    refused(
        2,
        "--val: `1` is not a share",
        &["--tokenizer", "gpt2", "--output", "out", "--val", "1", "text"],
    );
    assert_eq!(data(&job, &["inspect", "text"]).code, 2);
}

fn full_disk_leaves_nothing_that_is_accepted() {
    let job = Job::new();
    job.write("big.txt", "some words\n".repeat(200_000));
    // A file system of 1 MiB that only this shell sees.
    let script = "mount -t tmpfs -o size=1m none disk && \"$0\" data prepare --tokenizer bytes --output disk/out \
                  big.txt; code=$?; ls -A disk; exit $code";
    std::fs::create_dir(job.path().join("disk")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(xlaunch_path()).current_dir(job.path());
    let output = Process::spawn(&mut command).wait();
    assert_eq!((output.code, output.stdout.as_str()), (2, ""), "{}", output.stderr);
    let message = "disk/out/train_000001.bin: No space left on device";
    assert!(
        output.stderr.contains(message) && output.stderr.contains("help: free space"),
        "{}",
        output.stderr
    );
}

/// Kills a preparation at a random moment. Its leftovers are complete and verified, or refused and prepared again.
fn write_200_files(job: &Job) {
    for index in 0..200 {
        job.write(&format!("text/{index}.txt"), format!("the text of file {index}\n"));
    }
}

fn data_of_more_files_than_a_process_may_open_is_prepared_and_trained_on() {
    const LIMIT: &str = "-n 64";
    let job = Job::new();
    write_200_files(&job);
    let run = |args: &[&str]| Process::spawn(&mut job.limited_command(LIMIT, args)).wait();
    let trained = run(&["train.toml", "--nproc", "2"]);
    assert_eq!(trained.code, 0, "{}", trained.stderr);
    let losses = job.losses();
    let prepared = run(&["data", "prepare", "--tokenizer", "bytes", "--output", "out", "text"]);
    assert_eq!(prepared.code, 0, "{}", prepared.stderr);
    job.run_ok(&["--nproc", "2"]);
    assert_eq!(job.losses(), losses);
}

fn files_that_are_replaced_during_training_are_read_as_they_were() {
    let job = Job::new();
    write_200_files(&job);
    let mut limited = job.limited_command("-Sn 64", &["train.toml", "--set", "train.steps=400"]);
    let training = Process::spawn(&mut limited);
    let metrics = job.path().join("runs/train/latest/metrics.jsonl");
    wait_for("the first step", || metrics.metadata().is_ok_and(|file| file.len() > 0).then_some(()));
    for index in 0..200 {
        job.write("new", "an editor's new file\n");
        std::fs::rename(job.path().join("new"), job.path().join(format!("text/{index}.txt"))).unwrap();
    }
    let output = training.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
}

fn killed_preparations_are_complete_or_refused() {
    let kills = std::env::var(KILLS).map_or(DEFAULT_KILLS, |kills| kills.parse().unwrap());
    let job = Job::new();
    job.write("big.txt", "some more words\n".repeat(100_000));
    let args = ["data", "prepare", "--tokenizer", "bytes", "--shard-tokens", "200K", "--documents", "line"];
    let args = [&args[..], &["--output", "out", "big.txt"]].concat();
    let whole = Instant::now();
    assert_eq!(Process::spawn(&mut job.command(&args)).wait().code, 0);
    let whole = u64::try_from(whole.elapsed().as_micros()).unwrap();
    let expected = json(&data(&job, &["inspect", "--json", "out"]));
    let remove = |name: &str| std::fs::remove_dir_all(job.path().join(name)).unwrap();
    remove("out");
    let (mut complete, mut refused, mut random) = (0, 0, 0x9e37_79b9_7f4a_7c15_u64);
    for kill in 0..kills {
        // xorshift64.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let process = Process::spawn(&mut job.command(&args));
        std::thread::sleep(Duration::from_micros(random % whole));
        process.signal(Signal::KILL);
        let exit = process.wait();
        assert!([0, 137].contains(&exit.code), "kill {kill}: {}", exit.stderr);
        if !job.path().join("out").exists() {
            continue;
        }
        let found = data(&job, &["inspect", "--json", "out"]);
        match found.code {
            0 => {
                assert_eq!(json(&found), expected, "kill {kill}");
                complete += 1;
                remove("out");
            }
            // Left for the next preparation, which replaces it.
            2 => {
                assert!(found.stderr.contains("was interrupted"), "kill {kill}: {}", found.stderr);
                assert!(!Path::new("out/manifest.json").exists());
                refused += 1;
            }
            code => panic!("kill {kill}: exit code {code}: {}", found.stderr),
        }
    }
    assert!(refused > 0, "{complete} complete");
    assert_eq!(Process::spawn(&mut job.command(&args)).wait().code, 0);
    assert_eq!(json(&data(&job, &["inspect", "--json", "out"])), expected);
}
