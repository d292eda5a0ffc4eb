//! Adapters as PEFT trains, reads and writes them.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::peft:
    adapters_train_as_in_peft_and_are_exchanged_with_it;
}

/// The whole comparison is `python3 tests/peers/lora.py`.
fn adapters_train_as_in_peft_and_are_exchanged_with_it() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/lora.py");
    let mut command = Command::new(requirements::python_path());
    command.arg(script).arg("--xlaunch").arg(xlaunch_path());
    command.env("HF_HUB_OFFLINE", "1").env("CUDA_VISIBLE_DEVICES", "");
    let output = Process::spawn(&mut command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    let equal = ": equal: first loss, 50 steps, adapter and merged export\n";
    assert_eq!(output.stdout.matches(equal).count(), 10, "{}", output.stdout);
}
