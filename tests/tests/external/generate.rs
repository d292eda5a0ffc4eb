//! `xlaunch generate` next to transformers.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    greedy_texts_are_those_of_transformers;
}

fn greedy_texts_are_those_of_transformers() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/generate_tokens.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--xlaunch").arg(xlaunch_path()).env("CUDA_VISIBLE_DEVICES", "");
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    assert_eq!(output.stdout.matches(": 20 of 20 texts").count(), 4, "{}", output.stdout);
}
