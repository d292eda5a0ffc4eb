//! Compiles kernel text to machine code with NVRTC. The result is cached on disk by source, options, NVRTC version and
//! architecture.

use std::ffi::{CString, c_int};
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use cudarc::nvrtc::{result, sys};
use xlaunch_pool::DType;
use xxhash_rust::xxh3::xxh3_128;

use crate::cache::cached;
use crate::error::{EngineError, Result};

/// Threads of a block, for kernels without a block shape of their own.
pub(crate) const BLOCK_THREADS: u32 = 256;
/// Block of the kernels that sum columns: threads along columns (eight columns each), and along rows.
pub(crate) const COLUMN_BLOCK: (u32, u32) = (32, 8);

/// Text that precedes every file.
const PRELUDE: &str = concat!(
    "#line 1 \"ptx.cuh\"\n",
    include_str!("headers/ptx.cuh"),
    "#line 1 \"prelude.cuh\"\n",
    include_str!("headers/prelude.cuh")
);

/// A `.cu` file, preceded by the headers that it needs. A `#line` before each part names it in the compiler's messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// Path below `src/ops`.
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
}

/// Builds the [`Source`] of a kernel file and the headers that it needs. Paths are relative to `src/ops`.
macro_rules! source {
    ($file:literal $(, after $header:literal)* $(,)?) => {
        $crate::cuda::Source {
            file: $file,
            text: concat!($($crate::cuda::source!(text $header),)* $crate::cuda::source!(text $file)),
        }
    };
    (text $file:literal) => {
        concat!(
            "#line 1 \"",
            $file,
            "\"\n",
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops/", $file))
        )
    };
}
pub(crate) use source;

/// A constant of the launch code that kernels need as well. It is defined once, in Rust, and passed to the compiler as
/// a macro.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Macro {
    name: &'static str,
    value: Value,
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Int(usize),
    Float(f32),
}

impl Macro {
    pub(crate) const fn int(name: &'static str, value: usize) -> Self {
        Self { name, value: Value::Int(value) }
    }

    pub(crate) const fn float(name: &'static str, value: f32) -> Self {
        Self { name, value: Value::Float(value) }
    }

    fn option(self) -> String {
        match self.value {
            Value::Int(value) => format!("--define-macro={}={value}", self.name),
            // Debug prints the shortest text that parses to the same f32, always with a point or an exponent.
            Value::Float(value) => format!("--define-macro={}={value:?}f", self.name),
        }
    }
}

/// Returns the options to compile a file for this architecture, warp size and element type of activations. They are
/// part of the cache key.
pub(crate) fn options(arch: &str, warp: u32, activations: DType, macros: &[Macro]) -> Vec<String> {
    let act = if activations == DType::Bf16 { "bf16" } else { "float" };
    let common = [
        Macro::int("WARP", warp as usize),
        Macro::int("BLOCK_THREADS", BLOCK_THREADS as usize),
        Macro::int("COLUMN_BLOCK_X", COLUMN_BLOCK.0 as usize),
        Macro::int("COLUMN_BLOCK_Y", COLUMN_BLOCK.1 as usize),
    ];
    let mut options =
        vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), format!("--define-macro=ACT={act}")];
    options.extend(common.iter().chain(macros).map(|definition| definition.option()));
    options
}

/// Returns the result of `load` for the cubin of a source, which comes from the cache or is compiled. A cached cubin
/// that `load` rejects is compiled again.
pub(crate) fn cubin<T>(
    source: Source,
    arch: &str,
    options: &[String],
    load: impl Fn(Vec<u8>) -> Result<T>,
) -> Result<T> {
    let name = file_name(source, options, version());
    cached(&name, load, || compile(source, arch, options))
}

/// A compilation of several sources on all cores: sequentially they would take many seconds on a new host. Dropping it
/// waits for those that have begun, because a process must not exit while a thread is inside the compiler.
#[derive(Debug)]
pub(crate) struct InBackground {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Work {
    arch: String,
    /// Sources with their options.
    sources: Vec<(Source, Vec<String>)>,
    /// Index of the source that is compiled next.
    next: AtomicUsize,
}

impl InBackground {
    /// Starts to compile the sources that the cache lacks, with their options, in this order. Errors are reported when
    /// a source is loaded.
    pub(crate) fn new(arch: String, sources: Vec<(Source, Vec<String>)>) -> Self {
        let count = std::thread::available_parallelism().map_or(1, NonZero::get).min(sources.len());
        let work = Arc::new(Work { arch, sources, next: AtomicUsize::new(0) });
        let start = |_| {
            let work = work.clone();
            // If no thread can be started, each source is compiled on first use.
            std::thread::Builder::new().name("compile".into()).spawn(move || work.compile()).ok()
        };
        let threads = (0..count).filter_map(start).collect();
        Self { work, threads }
    }
}

impl Work {
    fn compile(&self) {
        while let Some((source, options)) = self.sources.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let _ = cubin(*source, &self.arch, options, |_| Ok(()));
        }
    }
}

impl Drop for InBackground {
    fn drop(&mut self) {
        self.work.next.store(self.work.sources.len(), Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // If the thread panicked, the panic was printed already.
            let _ = thread.join();
        }
    }
}

fn file_name(source: Source, options: &[String], version: (c_int, c_int)) -> String {
    let key = format!("{version:?}\n{options:?}\n{PRELUDE}\n{}", source.text);
    format!("{}-{:032x}.cubin", source.file.replace('/', "-"), xxh3_128(key.as_bytes()))
}

/// Returns the version of the loaded NVRTC.
fn version() -> (c_int, c_int) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid for writes; opening the device has checked that the library is installed.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

/// Compiles a file, preceded by the prelude.
pub(crate) fn compile(source: Source, arch: &str, options: &[String]) -> Result<Vec<u8>> {
    compile_with_log(source, arch, options).map(|(cubin, _)| cubin)
}

/// Returns the machine code and the compiler's log.
pub(crate) fn compile_with_log(source: Source, arch: &str, options: &[String]) -> Result<(Vec<u8>, String)> {
    let failed = |log: String| EngineError::Compile { file: source.file, arch: arch.into(), log };
    let text = format!("{PRELUDE}\n{}", source.text);
    let text = CString::new(text).map_err(|_| failed("the source contains a zero byte".into()))?;
    // The name appears in the log.
    let name = CString::new(source.file).ok();
    let program =
        Program(result::create_program(&text, name.as_deref()).map_err(|error| failed(error.to_string()))?);
    // SAFETY: the program is valid until it is dropped.
    if let Err(error) = unsafe { result::compile_program(program.0, options) } {
        return Err(failed(program.log().unwrap_or_else(|| error.to_string())));
    }
    let mut size = 0;
    // SAFETY: the program is valid and compiled, `size` is valid for a write.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }
        .result()
        .map_err(|error| failed(error.to_string()))?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: as above; the buffer has the size that the library returned.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| failed(error.to_string()))?;
    Ok((cubin, program.log().unwrap_or_default()))
}

/// An NVRTC program.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> Option<String> {
        // SAFETY: the program is valid.
        let log = unsafe { result::get_program_log(self.0) }.ok()?;
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created and is destroyed once. An error would mean that it was invalid.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn macros_are_part_of_the_cache_key() {
        let source = Source { file: "norm/kernel.cu", text: "" };
        let name = |rows| {
            let macros = [Macro::int("ROWS", rows), Macro::float("SCALE", 0.797_884_6)];
            file_name(source, &options("sm_90", 32, DType::Bf16, &macros), (13, 0))
        };
        assert_eq!(name(2), name(2));
        assert_ne!(name(2), name(3));
        assert!(name(2).starts_with("norm-kernel.cu-"), "{}", name(2));
        assert_eq!(Macro::float("SCALE", 0.797_884_6).option(), "--define-macro=SCALE=0.7978846f");
    }
}
