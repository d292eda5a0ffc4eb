//! Compares `xlaunch generate` with transformers.

use xlaunch_tests::{requirements, run_ok, transformers_peer, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::transformers:
    greedy_texts_are_those_of_transformers,
    imported_models_continue_prompts_and_chats_as_transformers_does;
}

fn greedy_texts_are_those_of_transformers() {
    let output = run_ok(transformers_peer("generate_tokens.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": 20 of 20 texts").count(), 4, "{output}");
}

fn imported_models_continue_prompts_and_chats_as_transformers_does() {
    let mut imported = transformers_peer("imported.py");
    imported.env("TRANSFORMERS_VERBOSITY", "error").arg("--xlaunch").arg(xlaunch_path());
    let output = run_ok(&mut imported);
    assert_eq!(output.matches(": 8 of 8 texts are equal").count(), 12, "{output}");
}
