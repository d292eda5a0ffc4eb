//! What can be said without a GPU: the library takes both graphs, and plans them for a device that is not there.

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
};

use super::attention::{AttentionPlan, Direction};
use super::descriptor::Descriptor;
use super::graph::Target;
use crate::shapes::AttentionShape;

/// An H200 in the library's own words.
const H200: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,
"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
"maxThreadsPerSM":2048,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":150109880320,
"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,
"driverVer":13000,"deviceName":"NVIDIA H200"}"#;

#[test]
fn the_library_has_kernels_for_both_directions() {
    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        println!("skipped: cuDNN is not installed here (libcudnn.so.9 in LD_LIBRARY_PATH would do)");
        return;
    }
    // SAFETY: as above.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        println!("skipped: the CUDA driver is not installed here, whose library cuDNN's engines ask for");
        return;
    }
    let device = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).unwrap();
    device.set(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, H200.as_bytes()).unwrap();
    let target = Target::Properties(device.finalize().unwrap());
    for (batch, heads, kv_heads, seq, width) in [
        (32, 12, 12, 1024, 64),
        (32, 12, 12, 256, 32),
        (8, 16, 4, 2048, 128),
        (4, 12, 12, 1000, 64),
        (2, 2, 2, 37, 24),
        (2, 2, 1, 70, 16),
    ] {
        let s = AttentionShape { batch, seq, heads, kv_heads, width };
        for direction in [Direction::Forward, Direction::Backward] {
            let plan = AttentionPlan::new(s, direction, &target).unwrap();
            println!("{direction:?} {s:?}: {} bytes of scratch memory", plan.scratch);
            // Forward keeps nothing of the scores. Backward has delta and the sum for dq in f32, and in groups dk and dv
            // of every query head in bf16.
            let queries = batch * heads * seq;
            let backward = queries * (4 + 4 * width + if heads == kv_heads { 0 } else { 4 * width });
            let least = if direction == Direction::Backward { backward } else { 0 };
            assert!((least..=least + (1 << 20)).contains(&plan.scratch), "{least} bytes are known of");
        }
    }
}
