//! Every kernel compiles for every element type and kind of head width, without spilling more registers to memory than
//! expected. Needs NVRTC, but no GPU. Prints registers and shared memory of every kernel.

#![expect(clippy::print_stdout, reason = "resources are printed")]

use xlaunch_engine::Precision;
use xlaunch_engine::testing::{compile_kernels, has_nvrtc};
use xlaunch_harness::Requirement;

xlaunch_harness::suite! {
    needs nvrtc: float_kernels_compile, bf16_kernels_compile;
}

/// Head widths, those that need the most registers first. The emulator compiles the others too; all are compiled here
/// with `XLAUNCH_TEST_LONG=1`.
const WIDTHS: [usize; 6] = [256, 128, 64, 8, 24, 32];

/// Maximum number of bytes that a thread may spill: a few addresses, outside of loops over columns.
const SPILLED: usize = 64;

fn nvrtc() -> Requirement {
    if has_nvrtc() {
        Ok(())
    } else {
        Err("NVRTC is not installed: no libnvrtc.so.13 in LD_LIBRARY_PATH".into())
    }
}

fn compile(precisions: &[Precision], widths: usize) {
    let widths = if xlaunch_harness::is_long() { &WIDTHS } else { &WIDTHS[..widths] };
    // Kinds of scores with only some of the terms need no more registers than the one with all.
    let files = compile_kernels("sm_90a", precisions, widths, xlaunch_harness::is_long());
    let files = files.unwrap_or_else(|error| panic!("{error}"));
    let mut spilling = Vec::new();
    for (file, kernels) in files {
        assert!(!kernels.is_empty(), "{file}: the compiler names no kernel");
        for kernel in kernels {
            println!("{precisions:?} {file} {kernel:?}");
            assert!(kernel.registers > 0, "{kernel:?}");
            if kernel.spilled > SPILLED {
                spilling.push(format!("{file}: {kernel:?}"));
            }
        }
    }
    assert!(spilling.is_empty(), "{}", spilling.join("\n"));
}

fn float_kernels_compile() {
    compile(&[Precision::Fp32, Precision::Tf32], 1);
}

fn bf16_kernels_compile() {
    compile(&[Precision::Bf16], 3);
}
