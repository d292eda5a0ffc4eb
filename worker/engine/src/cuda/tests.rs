//! What can be said without a GPU: every kernel file compiles, for every element type and head width.

use super::compile;
use super::kernels::{ATTENTION, COMMON, act_macro, width_macro};
use crate::DType;

#[test]
fn every_kernel_compiles_with_every_element_type_and_head_width() {
    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        println!("skipped: NVRTC is not installed here (libnvrtc.so.13 in LD_LIBRARY_PATH would do)");
        return;
    }
    let arch = "sm_90";
    for dtype in [DType::F32, DType::Bf16] {
        for (source, names) in COMMON {
            let options = compile::options(arch, &[act_macro(dtype)]);
            assert_holds(&compile::compile(source, arch, &options).unwrap(), names);
        }
        for width in [24, 32, 64, 128] {
            let (source, names) = ATTENTION;
            let options = compile::options(arch, &[act_macro(dtype), width_macro(width)]);
            assert_holds(&compile::compile(source, arch, &options).unwrap(), names);
        }
    }
}

/// The machine code names these kernels.
fn assert_holds(cubin: &[u8], names: &[&str]) {
    for name in names {
        let found = cubin.windows(name.len()).any(|window| window == name.as_bytes());
        assert!(found, "{name} is missing");
    }
}
