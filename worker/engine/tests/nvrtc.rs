//! Every kernel compiles for every element type and head width. Needs NVRTC, but no GPU.

use xlaunch_engine::Precision;
use xlaunch_engine::testing::{compile_kernels, has_nvrtc};
use xlaunch_harness::Requirement;

xlaunch_harness::suite! {
    needs nvrtc: fp32_kernels_compile, tf32_kernels_compile, bf16_kernels_compile;
}

const WIDTHS: [usize; 7] = [8, 24, 32, 64, 128, 144, 256];

fn nvrtc() -> Requirement {
    if has_nvrtc() {
        Ok(())
    } else {
        Err("NVRTC is not installed: no libnvrtc.so.13 in LD_LIBRARY_PATH".into())
    }
}

fn compile(precision: Precision) {
    if let Err(error) = compile_kernels("sm_90", precision, &WIDTHS) {
        panic!("{error}");
    }
}

fn fp32_kernels_compile() {
    compile(Precision::Fp32);
}

fn tf32_kernels_compile() {
    compile(Precision::Tf32);
}

fn bf16_kernels_compile() {
    compile(Precision::Bf16);
}
