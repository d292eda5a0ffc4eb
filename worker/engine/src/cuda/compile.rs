//! Kernel text to machine code: NVRTC. What it made is cached by source, options, NVRTC version and architecture.

use std::ffi::{CString, c_int};

use cudarc::nvrtc::{result, sys};
use xxhash_rust::xxh3::xxh3_128;

use crate::backend::{EngineError, Result};
use crate::cache::cached;

const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

/// One `.cu` file and what comes before it, each behind a line that names it to the compiler.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub(super) file: &'static str,
    pub(super) text: &'static str,
}

/// The cubin of a source for `arch` with these macros: from the cache, or compiled and put there. `usable` is asked
/// about a cached one, which is compiled anew if it is not.
pub(super) fn cubin<T>(
    source: Source,
    arch: &str,
    defines: &[String],
    usable: impl Fn(Vec<u8>) -> Result<T>,
) -> Result<T> {
    let options = options(arch, defines);
    let name = file_name(source, &options, version());
    cached(&name, usable, || compile(source, arch, &options))
}

pub(super) fn options(arch: &str, defines: &[String]) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={arch}"), "--std=c++17".into()];
    options.extend(defines.iter().map(|define| format!("--define-macro={define}")));
    options
}

fn file_name(source: Source, options: &[String], version: (c_int, c_int)) -> String {
    let key = format!("{version:?}\n{options:?}\n{PRELUDE}\n{}", source.text);
    format!("{}-{:032x}.cubin", source.file, xxh3_128(key.as_bytes()))
}

/// Of the NVRTC at hand.
fn version() -> (c_int, c_int) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid for writes; the library is there, as the device's opening has found.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

/// Compiles one file, with the prelude before it.
pub(super) fn compile(source: Source, arch: &str, options: &[String]) -> Result<Vec<u8>> {
    let failed = |log: String| EngineError::Compile { file: source.file, arch: arch.into(), log };
    let text = format!("{PRELUDE}\n{}", source.text);
    let text = CString::new(text).map_err(|_| failed("the source holds a zero byte".into()))?;
    let program = Program(result::create_program(&text, None).map_err(|error| failed(error.to_string()))?);
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
    // SAFETY: as above; the buffer has the size the library asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| failed(error.to_string()))?;
    Ok(cubin)
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
        // SAFETY: the program was created and is destroyed once. Failing would mean that it was not valid.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
