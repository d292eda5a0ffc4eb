//! Exports as the programs of others read them.

use std::path::Path;

use xlaunch_tests::{requirements, run_ok, transformers_peer, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    exports_load_without_a_warning_and_fine_tuned_models_keep_what_they_came_with;
    needs requirements::transformers, requirements::llama_cpp:
    exports_are_converted_by_llama_cpp;
}

/// The whole comparison is `python3 tests/peers/exported.py`; what it prints.
fn exported(llama_cpp: Option<&Path>) -> String {
    let mut command = transformers_peer("exported.py");
    command.arg("--xlaunch").arg(xlaunch_path());
    if let Some(directory) = llama_cpp {
        command.arg("--llama-cpp").arg(directory);
    }
    run_ok(&mut command)
}

fn exports_load_without_a_warning_and_fine_tuned_models_keep_what_they_came_with() {
    let output = exported(None);
    let equal = "strict load, same bits after save_pretrained and import";
    assert_eq!(output.matches(equal).count(), 4, "{output}");
    for text in ["sampling defaults and positions are kept", "window of 16: loss equal"] {
        assert!(output.contains(text), "{text} in {output}");
    }
}

fn exports_are_converted_by_llama_cpp() {
    let output = exported(Some(&requirements::llama_cpp_path().unwrap()));
    assert_eq!(output.matches("llama.cpp: ").count(), 6, "{output}");
}
