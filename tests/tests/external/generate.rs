//! Compares `xlaunch generate` with transformers.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    greedy_texts_are_those_of_transformers,
    imported_models_continue_prompts_and_chats_as_transformers_does;
}

fn greedy_texts_are_those_of_transformers() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/generate_tokens.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--xlaunch").arg(xlaunch_path()).env("CUDA_VISIBLE_DEVICES", "");
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    assert_eq!(output.stdout.matches(": 20 of 20 texts").count(), 4, "{}", output.stdout);
}

fn imported_models_continue_prompts_and_chats_as_transformers_does() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/imported.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--xlaunch").arg(xlaunch_path()).env("CUDA_VISIBLE_DEVICES", "");
    command.env("HF_HUB_OFFLINE", "1").env("TRANSFORMERS_VERBOSITY", "error");
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    assert_eq!(output.stdout.matches(": 8 of 8 texts are equal").count(), 12, "{}", output.stdout);
}
