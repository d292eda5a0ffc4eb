//! The generator. It compiles the sources with protox, so that no `protoc` is needed.

use std::path::Path;

use prost::Message;

use crate::Error;

/// Returns code and encoded descriptors.
pub(super) fn generate(dir: &Path) -> Result<(String, Vec<u8>), Error> {
    let files = protox::compile(
        ["xlaunch/v1/agent.proto", "xlaunch/v1/group.proto", "xlaunch/v1/node.proto"],
        [dir],
    )?;
    let descriptors = files.encode_to_vec();
    let out = tempfile::tempdir()?;
    tonic_prost_build::configure().out_dir(out.path()).compile_fds(files)?;
    Ok((std::fs::read_to_string(out.path().join("xlaunch.v1.rs"))?, descriptors))
}
