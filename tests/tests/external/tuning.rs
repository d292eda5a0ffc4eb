//! Fine-tuning as trl and PEFT do it.

use xlaunch_tests::{requirements, run_ok, transformers_peer, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::trl:
    chats_train_as_in_trl,
    preferences_train_as_in_trl;
    needs requirements::peft:
    adapters_train_as_in_peft_and_are_exchanged_with_it;
}

/// The whole comparison is `python3 tests/peers/lora.py`.
fn adapters_train_as_in_peft_and_are_exchanged_with_it() {
    let output = run_ok(transformers_peer("lora.py").arg("--xlaunch").arg(xlaunch_path()));
    let equal = ": equal: first loss, 50 steps, adapter and merged export\n";
    assert_eq!(output.matches(equal).count(), 14, "{output}");
}

/// The whole comparison is `python3 tests/peers/dpo.py`.
fn preferences_train_as_in_trl() {
    let output = run_ok(transformers_peer("dpo.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": equal: ").count(), 2, "{output}");
}

/// The whole comparison is `python3 tests/peers/sft.py`.
fn chats_train_as_in_trl() {
    let output = run_ok(transformers_peer("sft.py").arg("--xlaunch").arg(xlaunch_path()));
    assert_eq!(output.matches(": equal: ").count(), 3, "{output}");
}
