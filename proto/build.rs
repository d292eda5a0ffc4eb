//! Generates the gRPC code with protox, so that no `protoc` is needed, and keeps the description that reflection serves.

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=xlaunch");
    let files = protox::compile(["xlaunch/v1/agent.proto", "xlaunch/v1/node.proto"], ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors"), files.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
