//! Exports as the programs of others read them.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    exports_load_without_a_warning_and_fine_tuned_models_keep_what_they_came_with;
    needs requirements::transformers, requirements::llama_cpp:
    exports_are_converted_by_llama_cpp;
}

/// The whole comparison is `python3 tests/peers/exported.py`; what it prints.
fn compare(llama_cpp: Option<&Path>) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/exported.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--xlaunch").arg(xlaunch_path()).env("HF_HUB_OFFLINE", "1");
    command.env("CUDA_VISIBLE_DEVICES", "");
    if let Some(directory) = llama_cpp {
        command.arg("--llama-cpp").arg(directory);
    }
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    output.stdout
}

fn exports_load_without_a_warning_and_fine_tuned_models_keep_what_they_came_with() {
    let output = compare(None);
    let equal = "strict load, same bits after save_pretrained and import";
    assert_eq!(output.matches(equal).count(), 4, "{output}");
    for text in ["sampling defaults and positions are kept", "window of 16: loss equal"] {
        assert!(output.contains(text), "{text} in {output}");
    }
}

fn exports_are_converted_by_llama_cpp() {
    let output = compare(Some(&requirements::llama_cpp_path().unwrap()));
    assert_eq!(output.matches("llama.cpp: ").count(), 6, "{output}");
}
