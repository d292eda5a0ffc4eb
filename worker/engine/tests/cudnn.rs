//! cuDNN accepts both attention graphs and plans them for a device that is not present. Needs cuDNN and the CUDA
//! driver's library, but no GPU.

#![expect(clippy::print_stdout, reason = "measurements are printed")]

use xlaunch_engine::testing::{cudnn_attention_scratch, find_cudnn};
use xlaunch_engine::{AttentionOptions, AttentionShape};

xlaunch_harness::suite! {
    needs find_cudnn: cudnn_plans_attention_in_both_directions;
}

/// Properties of an H200 in the library's format.
const H200: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,
"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
"maxThreadsPerSM":2048,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":150109880320,
"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,
"driverVer":13000,"deviceName":"NVIDIA H200"}"#;

fn cudnn_plans_attention_in_both_directions() {
    for (batch, heads, kv_heads, seq, width) in [
        (32, 12, 12, 1024, 64),
        (32, 12, 12, 256, 32),
        (8, 16, 4, 2048, 128),
        (4, 12, 12, 1000, 64),
        (2, 2, 2, 37, 24),
        (2, 2, 1, 70, 16),
    ] {
        for window in [None, Some(seq / 2)] {
            let options = AttentionOptions { window, ..AttentionOptions::new(width) };
            let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
            let scratch = cudnn_attention_scratch(H200, s).unwrap_or_else(|error| panic!("{s:?}: {error}"));
            println!("{s:?}: {scratch:?} bytes of scratch memory");
            // Forward keeps no scores. Backward needs delta and the sum for dq in f32 and, with grouped heads, dk and
            // dv of every query head in bf16.
            let queries = batch * heads * seq;
            let backward = queries * (4 + 4 * width + if heads == kv_heads { 0 } else { 4 * width });
            for (least, bytes) in [0, backward].into_iter().zip(scratch) {
                assert!((least..=least + (1 << 20)).contains(&bytes), "{bytes} bytes, {least} expected");
            }
        }
    }
}
