//! Generates the gRPC code with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=xlaunch");
    let files = protox::compile(["xlaunch/v1/agent.proto"], ["."])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
