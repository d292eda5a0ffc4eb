//! What can be said without a GPU: every kernel file compiles, for every element type and head width.

use super::attention::Path;
use super::compile;
use super::kernels::{COMMON, act_macro};
use crate::backend::Precision;

#[test]
fn every_kernel_compiles_with_every_element_type_and_head_width() {
    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        println!("skipped: NVRTC is not installed here (libnvrtc.so.13 in LD_LIBRARY_PATH would do)");
        return;
    }
    let arch = "sm_90";
    for precision in [Precision::Fp32, Precision::Tf32, Precision::Bf16] {
        for (source, names) in COMMON {
            let options = compile::options(arch, &[act_macro(precision.activations())]);
            assert_holds(&compile::compile(source, arch, &options).unwrap(), names);
        }
        for width in [8, 24, 32, 64, 128] {
            for capability in [(7, 5), (9, 0)] {
                let path = Path::of(precision, capability, width);
                let (source, defines) = path.source();
                let options = compile::options(arch, &defines);
                assert_holds(&compile::compile(source, arch, &options).unwrap(), &path.kernels().0);
            }
        }
    }
}

/// They may be launched before the kernel in front of them has ended.
#[test]
fn every_kernel_waits_for_the_one_before_it_first_of_all() {
    let attention = [Precision::Fp32, Precision::Tf32, Precision::Bf16]
        .map(|precision| Path::of(precision, (9, 0), 32).source().0);
    for source in COMMON.map(|(source, _)| source).into_iter().chain(attention) {
        for kernel in source.text.split("extern \"C\" __global__").skip(1) {
            let (name, body) = kernel.split_once(")\n    {").or_else(|| kernel.split_once(") {")).unwrap();
            let first = body.trim_start().lines().next();
            assert_eq!(first, Some("after_the_kernel_before();"), "{}: {name}", source.file);
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
